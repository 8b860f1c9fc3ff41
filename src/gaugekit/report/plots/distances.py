"""Distances of two models layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from gaugekit.report.distances import LayerSet
from gaugekit.report.heads import NAMES
from gaugekit.report.plots.base import COLOURS, TICKS, Figure, Key, dot, log_axis
from gaugekit.report.text import measure

if TYPE_CHECKING:
    from gaugekit.verbs.compare import LayerDistance

Series = Mapping[str, Sequence[float | None]]
Traces = list[dict[str, Any]]

LEAST = 1e-9  # what is smaller is drawn here: a logarithmic axis has no zero, and no distance is known so well


def aligned(layers: LayerSet, number: int) -> Figure:
    """Distances after the symmetries are removed, and the rounding that explains some of it."""
    rows = layers.rows
    series: Series = {
        NAMES["qk"]: [row.qk for row in rows],
        NAMES["vo"]: [row.vo for row in rows],
        "hidden units (MLP)": [row.mlp for row in rows],
    }
    rounding = Key("rounding", COLOURS[-1], symbol="line")
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": rounding.name,
        "line": {"color": rounding.colour, "width": 2, "dash": "dash"},
        **_points(rows, [row.rounding for row in rows], rounding.name),
    }
    traces = [line, *_dots(rows, series)]
    return Figure(
        id=f"aligned-{number}",
        title="Distance by layer",
        caption="How far apart the two models are in each layer once the symmetries are removed, relative to the "
        f"first; the dashed line is what the rounding of the stored weights explains for heads.{_cut_off(traces)}",
        height=380,
        data=traces,
        layout=_layout("relative distance", traces),
        legend=(*_keys(series), rounding),
    )


def spectra(layers: LayerSet, number: int) -> Figure:
    """Distances of the spectra, for which nothing has to be aligned."""
    rows = layers.rows
    series: Series = {NAMES["qk"]: [row.spectra_qk for row in rows], NAMES["vo"]: [row.spectra_vo for row in rows]}
    traces = _dots(rows, series)
    return Figure(
        id=f"spectra-{number}",
        title="Spectra by layer",
        caption="How far apart the singular values of matched heads are, relative to the first model; no symmetry "
        f"can change them.{_cut_off(traces)}",
        height=380,
        data=traces,
        layout=_layout("relative distance of spectra", traces),
        legend=tuple(_keys(series)),
    )


def _keys(series: Series) -> Iterator[Key]:
    """Of the series that have something to show: a model may be without MLPs."""
    for index, (name, values) in enumerate(series.items()):
        if any(value is not None for value in values):
            yield dot(name, index)


def _dots(rows: Sequence[LayerDistance], series: Series) -> Traces:
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": key.name,
            "marker": {"color": key.colour, "symbol": key.symbol, "size": 8, "opacity": 0.9},
            **_points(rows, series[key.name], key.name),
        }
        for key in _keys(series)
    ]


def _points(rows: Sequence[LayerDistance], values: Sequence[float | None], name: str) -> dict[str, Any]:
    return {
        "x": [str(row.layer) for row in rows],
        "y": [max(value, LEAST) if value is not None and isfinite(value) else None for value in values],
        "customdata": [measure(value) for value in values],
        "hovertemplate": f"layer %{{x}}, {name}<br>%{{customdata}}<extra></extra>",
    }


def _cut_off(traces: Traces) -> str:
    lowest = any(value == LEAST for trace in traces for value in trace["y"])
    return " Distances below a billionth stand at the bottom." if lowest else ""


def _layout(y: str, traces: Traces) -> dict[str, Any]:
    return {
        "hovermode": "closest",
        "xaxis": {"title": {"text": "layer"}, "type": "category", "tickangle": 0, "nticks": TICKS, "showgrid": False},
        "yaxis": log_axis(y, (value for trace in traces for value in trace["y"])),
    }
