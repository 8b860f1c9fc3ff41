"""How near one model was brought to another, place by place."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from gaugekit.report.plots.base import TICKS, Figure, dot, log_axis
from gaugekit.report.text import measure, plain

if TYPE_CHECKING:
    from gaugekit.verbs.align import AlignReport

LEAST = 1e-9  # what is smaller is drawn here: a logarithmic axis has no zero


def nearer(report: AlignReport) -> Figure:
    """Relative distances of weights before and after, every layer and what stands in none."""
    series = {
        "as stored": [place.before for place in report.places],
        "aligned": [place.after for place in report.places],
    }
    names = [plain(place.where) for place in report.places]
    keys = [dot(name, index) for index, name in enumerate(series)]
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": key.name,
            "marker": {"color": key.colour, "symbol": key.symbol, "size": 8, "opacity": 0.9},
            "x": names,
            "y": [max(value, LEAST) if isfinite(value) else None for value in values],
            "customdata": [measure(value) for value in values],
            "hovertemplate": f"%{{x}}, {key.name}<br>%{{customdata}}<extra></extra>",
        }
        for key, values in zip(keys, series.values(), strict=True)
    ]
    lowest = any(value < LEAST for values in series.values() for value in values)
    return Figure(
        id="nearer",
        title="Distance to the reference",
        caption="How far the weights of a place are from the reference's, relative to these, as the model was stored "
        f"and where it has been moved to.{' Distances below a billionth stand at the bottom.' if lowest else ''}",
        height=420,
        data=traces,
        layout={
            "hovermode": "closest",
            "xaxis": {"type": "category", "nticks": 2 * TICKS, "showgrid": False, "automargin": True},
            "yaxis": log_axis("relative distance", (value for trace in traces for value in trace["y"])),
        },
        legend=tuple(keys),
    )
