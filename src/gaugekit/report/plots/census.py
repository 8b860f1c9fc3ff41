"""The census: redundant dimensions by symmetry and by layer."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from gaugekit.report.plots.base import Figure, Key, bar
from gaugekit.report.text import OBSERVABLES, OUTSIDE, layer_label, share, shorten

if TYPE_CHECKING:
    from gaugekit.verbs.inspect import InspectReport, SymmetryRow


def census(report: InspectReport) -> Figure:
    keys = _keys(report)
    inexact = any(row.exactness != "exact" for row in report.by_symmetry)
    star = " A star marks those that hold for some observables only: the table says which." if inexact else ""
    largest = max((row.dimension for row in report.by_symmetry), default=1)
    return Figure(
        id="census",
        title="By symmetry",
        caption="Each bar counts the independent directions in which the weights can move without changing what the "
        f"model computes (its {OBSERVABLES[report.observable]}).{star}",
        height=70 + 34 * max(len(report.by_symmetry), 2),
        data=[_census_bar(row, keys[row.name], report.parameters) for row in report.by_symmetry],
        layout={
            # A trace a bar, because plotly draws patterns right only where they are one for a trace.
            "barmode": "overlay",
            # Room for the numbers that stand beside the bars.
            "xaxis": {"title": {"text": "dimensions"}, "range": [0, 1.28 * largest], "nticks": 5},
            "yaxis": {"autorange": "reversed", "type": "category"},
        },
    )


def _census_bar(row: SymmetryRow, key: Key, parameters: int) -> dict[str, Any]:
    part = f" ({share(row.dimension / parameters)} of all parameters)" if parameters else ""
    return {
        "type": "bar",
        "orientation": "h",
        "y": [escape(row.name) + ("" if row.exactness == "exact" else " *")],
        "x": [row.dimension],
        "text": [f"{row.dimension:,}"],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": _marker(key),
        "customdata": [[escape(shorten(row.group, 60)), row.exactness, part]],
        "hovertemplate": "<b>%{y}</b><br>group %{customdata[0]}<br>dimension %{x:,}%{customdata[2]}"
        "<br>%{customdata[1]}<extra></extra>",
    }


def layers(report: InspectReport) -> Figure:
    keys = _keys(report)
    labels = [escape(layer_label(row.layer)) for row in report.by_layer]
    traces = []
    for name, key in keys.items():
        dimensions = [row.by_symmetry.get(name) for row in report.by_layer]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": escape(name),
                "y": labels,
                "x": dimensions,
                "marker": _marker(key),
                "hovertemplate": "%{x:,}",
            }
        )
    outside = " What belongs to no single layer stands last." if OUTSIDE in labels else ""
    return Figure(
        id="layers",
        title="By layer",
        caption=f"The same directions, counted where they live: from the first layer (top) to the last.{outside}",
        height=90 + max(17 * len(labels), 80),
        data=traces,
        layout={
            "barmode": "stack",
            "bargap": 0.25,
            "hovermode": "y unified",
            "xaxis": {"title": {"text": "dimensions"}, "nticks": 5, "hoverformat": ","},
            "yaxis": {"autorange": "reversed", "type": "category", "title": {"text": "layer"}},
        },
        legend=tuple(keys.values()),
    )


def _keys(report: InspectReport) -> dict[str, Key]:
    names = dict.fromkeys(row.name for row in report.by_symmetry)
    return {name: bar(name, index) for index, name in enumerate(names)}


def _marker(key: Key) -> dict[str, Any]:
    if not key.pattern:
        return {"color": key.colour}
    return {"color": key.colour, "pattern": {"shape": key.pattern, "fillmode": "overlay", "size": 6, "solidity": 0.35}}
