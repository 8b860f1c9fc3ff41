"""A norm as a function of one entry: how its curve bends, and how well a line and a tanh describe it."""

from __future__ import annotations

from html import escape
from math import tanh
from typing import TYPE_CHECKING

from gaugekit.report.findings import place
from gaugekit.report.plots import along
from gaugekit.report.plots.base import COLOURS, Figure, dot

if TYPE_CHECKING:
    from gaugekit.verbs.moments import Curve
    from gaugekit.verbs.states import NormStates

SHOWN = 5
REACH = 30.0  # how far the axis goes: few entries of a trained model lie beyond, some of them a thousand times as far
STEPS = 100  # of a tanh, on either side

LINE, TANH, BEST = dot("line c·x", 0), dot("c·tanh(a·x)", 1), dot("any function of x", 2)


def curves(norms: along.Norms) -> Figure:
    """For a few norms from the first to the last that have a curve."""
    chosen = [(norm, norm.curve) for norm in norms if norm.curve is not None]
    last = len(chosen) - 1
    chosen = [chosen[at] for at in sorted({round(last * k / (SHOWN - 1)) for k in range(SHOWN)})]
    traces = [
        trace
        for colour, (norm, curve) in zip(COLOURS, chosen, strict=False)
        for trace in (_measured(norm, curve, colour), _fitted(norm, curve, colour))
    ]
    points = [point for trace in traces for point in zip(trace["x"], trace["y"], strict=True)]
    reach = min(REACH, max(abs(x) for x, _ in points))
    height = max(abs(y) for x, y in points if abs(x) <= reach)
    return Figure(
        id="curves",
        title="Outputs over inputs",
        caption="The mean of an entry of n̂ over that entry of x, scaled to begin with slope 1; the curve bends because "
        "large entries belong to large states, which are divided by more; dotted, the c·tanh(a·x) that fits best "
        "over all entries (DyT, 2503.10622). A click on a name hides its norm.",
        height=440,
        data=traces,
        layout={
            "hovermode": "closest",
            "showlegend": True,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            "xaxis": {"title": {"text": "entry of x (scaled)"}, "range": [-1.03 * reach, 1.03 * reach]},
            "yaxis": {"title": {"text": "entry of n̂"}, "range": [-1.1 * height, 1.1 * height]},
        },
    )


def _measured(norm: NormStates, curve: Curve, colour: str) -> along.Trace:
    name = escape(place(norm))
    slope = _slope(curve)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "legendgroup": name,
        "x": [slope * x for x in curve.x],
        "y": list(curve.y),
        "customdata": list(curve.x),
        "line": {"color": colour, "width": 1.5},
        "marker": {"color": colour, "size": 4},
        "hovertemplate": f"<b>{name}</b><br>x %{{customdata:.4g}}, n̂ %{{y:.4g}}<extra></extra>",
    }


def _fitted(norm: NormStates, curve: Curve, colour: str) -> along.Trace:
    name = escape(place(norm))
    slope = _slope(curve)
    # Even steps in the frame, then the ends.
    inside = [REACH * k / STEPS for k in range(-STEPS, STEPS + 1)]
    low, high = slope * curve.x[0], slope * curve.x[-1]
    scaled = [low, *(x for x in inside if low < x < high), high]
    bend = curve.scale / slope
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "legendgroup": name,
        "showlegend": False,
        "x": scaled,
        "y": [curve.height * tanh(bend * x) for x in scaled],
        "line": {"color": colour, "width": 1.5, "dash": "dot"},
        "hovertemplate": f"<b>{name}</b><br>tanh, R² {curve.tanh:.3f}<extra></extra>",
    }


def _slope(curve: Curve) -> float:
    """Of the curve about 0, where it is straight: as far as |y| ≤ 1."""
    points = list(zip(curve.x, curve.y, strict=True))
    middle = min(range(len(points)), key=lambda at: abs(points[at][0]))
    first = last = middle
    while first > 0 and abs(points[first - 1][1]) <= 1:
        first -= 1
    while last < len(points) - 1 and abs(points[last + 1][1]) <= 1:
        last += 1
    near = points[first : last + 1]
    squares = sum(x * x for x, _ in near)
    slope = sum(x * y for x, y in near) / squares if squares else 0.0
    return slope if slope > 0 else curve.scale


def fits(norms: along.Norms) -> Figure:
    given = [norm.curve for norm in norms]
    picks = {LINE: "linear", TANH: "tanh", BEST: "best"}
    traces = [
        along.series(norms, key, [None if curve is None else getattr(curve, pick) for curve in given])
        for key, pick in picks.items()
    ]
    least = min((y for trace in traces for y in trace["y"] if y is not None), default=0.0)
    return Figure(
        id="fits",
        title="Line, tanh, or any function",
        caption="How much of the variance of n̂ each explains, entry by entry: where the tanh comes near the best "
        "function of x alone and the line does not, the norm acts like a tanh (DyT, 2503.10622).",
        height=440,
        data=traces,
        layout=along.layout(norms, {"title": {"text": "R²"}, "range": [least - 0.05 * (1.02 - least), 1.02]}),
        legend=tuple(picks),
    )
