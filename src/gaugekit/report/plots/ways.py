"""Losses along the way between two models."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import TYPE_CHECKING, Any

from gaugekit.report.merge import MEASURES
from gaugekit.report.plots.base import COLOURS, Figure, Key, dot

if TYPE_CHECKING:
    from gaugekit.verbs.barriers import Ways

NAIVE, ALIGNED = dot("as they are", 1), dot("aligned", 0)
STRAIGHT = Key("straight line between the ends", COLOURS[-1], symbol="line")


def way(ways: Ways) -> Figure:
    """Both ways, and the straight line above which a barrier rises."""
    what, unit = MEASURES[ways.measure]
    series = {NAIVE: ways.naive} | ({} if ways.aligned is None else {ALIGNED: ways.aligned})
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": STRAIGHT.name,
        "x": [ways.t[0], ways.t[-1]],
        "y": finite((ways.naive[0], ways.naive[-1])),
        "line": {"color": STRAIGHT.colour, "width": 2, "dash": "dash"},
        "hoverinfo": "skip",
    }
    return Figure(
        id="way",
        title=f"{what.capitalize()} on the way",
        caption=f"{what.capitalize()} ({unit}) of the model at each place t between the first (0) and the second (1). "
        "The barrier is the largest rise above the dashed line.",
        height=420,
        data=[line, *(_curve(ways, key, losses) for key, losses in series.items())],
        layout={
            "hovermode": "closest",
            "xaxis": {"title": {"text": "t"}, "range": [-0.02, 1.02], "zeroline": False},
            "yaxis": {"title": {"text": what if ways.measure == "departure" else f"{what}, {unit}"}, "zeroline": False},
        },
        legend=(*series, STRAIGHT),
    )


def finite(losses: Iterable[float]) -> list[float | None]:
    """As JSON has them, which knows no infinity."""
    return [loss if isfinite(loss) else None for loss in losses]


def _curve(ways: Ways, key: Key, losses: tuple[float, ...]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": key.name,
        "x": list(ways.t),
        "y": finite(losses),
        "line": {"color": key.colour, "width": 2},
        "marker": {"color": key.colour, "symbol": key.symbol, "size": 8},
        "hovertemplate": f"{key.name}, t %{{x:.3g}}<br>%{{y:.4f}}<extra></extra>",
    }
