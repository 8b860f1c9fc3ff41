"""Norm weights: their mean and range, one norm after the other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from gaugekit.report.plots.base import Figure, Key, dot, norm_axis

if TYPE_CHECKING:
    from gaugekit.verbs.inspect import InspectReport, NormRow


def norms(report: InspectReport) -> Figure:
    """Every norm in the order of the model; norms whose names differ in the layer's number only share a colour."""
    series: dict[str, list[tuple[int, NormRow]]] = {}
    for place, norm in enumerate(report.norms):
        series.setdefault(_without_layer(norm.where), []).append((place, norm))
    keys = [dot(name, index) for index, name in enumerate(series)]
    traces = [_norm_trace(key, members) for key, members in zip(keys, series.values(), strict=True)]
    return Figure(
        id="norms",
        title="Norm weights",
        caption="The weights of every norm, in the order of the model: the dot is their mean, the line reaches from "
        "the smallest to the largest.",
        height=360,
        data=traces,
        layout={
            "hovermode": "closest",
            "xaxis": norm_axis(len(report.norms), list(_layer_ticks(report.norms))),
            "yaxis": {"title": {"text": "weight"}},
        },
        legend=tuple(keys),
    )


def _norm_trace(key: Key, members: Sequence[tuple[int, NormRow]]) -> dict[str, Any]:
    rows = [norm for _, norm in members]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape(key.name),
        "x": [place for place, _ in members],
        "y": [row.mean for row in rows],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [row.largest - row.mean for row in rows],
            "arrayminus": [row.mean - row.smallest for row in rows],
            "thickness": 1.5,
            "width": 0,
        },
        "marker": {"color": key.colour, "symbol": key.symbol, "size": 7},
        "customdata": [[escape(r.where), r.kind, r.smallest, r.largest, r.std, r.zeros] for r in rows],
        "hovertemplate": "<b>%{customdata[0]}</b> (%{customdata[1]})<br>mean %{y:.4g}, std %{customdata[4]:.4g}"
        "<br>from %{customdata[2]:.4g} to %{customdata[3]:.4g}<br>zeros %{customdata[5]}<extra></extra>",
    }


def _without_layer(where: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", where, count=1)


def _layer_ticks(norms: Sequence[NormRow]) -> Iterator[tuple[int, str]]:
    """Where each layer's norms begin."""
    previous = None
    for place, norm in enumerate(norms):
        found = re.search(r"(?<=\.)\d+(?=\.)", norm.where)
        if found and found[0] != previous:
            yield place, found[0]
        previous = found[0] if found else None
