"""States and the sphere: their angle to the uniform direction 1, their variance along it, and the radius."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gaugekit.report.findings import null_band
from gaugekit.report.plots import along
from gaugekit.report.plots.base import COLOURS, Figure, Key, dot, log_axis

if TYPE_CHECKING:
    from gaugekit.verbs.moments import Spread

LEAST = 1e-16  # shares of variance below this are drawn here: they are rounding
APART = 0.2  # of the distance between norms
CLOSE = 0.98  # the axis of radii reaches at least this far down, so that rounding is not seen as a change

BEFORE, NORMALIZED, AFTER = dot("before (x)", 0), dot("normalized (n̂)", 1), dot("after (y)", 2)


def angles(norms: along.Norms) -> Figure:
    band = max(norm.null_angle for norm in norms)
    spreads = {
        BEFORE: [norm.angle_before for norm in norms],
        NORMALIZED: [norm.angle_normalized for norm in norms],
        AFTER: [norm.angle_after for norm in norms],
    }
    of_normalized = "a LayerNorm puts n̂ at 90°"
    if all(norm.kind == "rms" for norm in norms):
        of_normalized = "an RMSNorm leaves n̂ at the angle of x"
        del spreads[NORMALIZED]
    ends = [end for each in spreads.values() for s in each for end in (s.mean - s.std, s.mean + s.std)]
    reach = 1.05 * max(2 * band, 90 - min(ends), max(ends) - 90)
    traces = [_spread(norms, key, each) for key, each in spreads.items()]
    for number, trace in enumerate(traces):  # side by side
        trace["x"] = [at + APART * (number - (len(traces) - 1) / 2) for at in trace["x"]]
    return Figure(
        id="angles",
        title="Angle to the uniform direction",
        caption="Angles of states and 1, mean and standard deviation over tokens, beside those of random vectors, "
        f"{null_band(norms)}: near 90° alone says nothing; {of_normalized} (Gupta et al., 2409.12951).",
        height=380,
        data=traces,
        layout=along.layout(
            norms,
            {"title": {"text": "degrees"}, "range": [90 - reach, 90 + reach], "zeroline": False},
            shapes=[_band(90 - band, 90 + band)],
        ),
        legend=(*spreads, Key("random vectors", "rgba(140, 140, 140, 0.35)")),
    )


def _spread(norms: along.Norms, key: Key, spreads: list[Spread]) -> along.Trace:
    bars = {"type": "data", "array": [spread.std for spread in spreads], "thickness": 1, "width": 0}
    trace = along.series(norms, key, [spread.mean for spread in spreads], mode="markers", error_y=bars)
    for text, spread in zip(trace["customdata"], spreads, strict=True):
        text[1] = f"{spread.mean:.2f}° ± {spread.std:.2f}°, {spread.smallest:.2f}° to {spread.largest:.2f}°"
    return trace


def _band(low: float, high: float) -> dict[str, Any]:
    return {
        "type": "rect",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": low,
        "y1": high,
        "layer": "below",
        "line": {"width": 0},
        "fillcolor": "rgba(140, 140, 140, 0.2)",
    }


def variance(norms: along.Norms) -> Figure:
    null = Key("random states (1/d)", COLOURS[-1], symbol="line")
    traces = [
        along.level(norms, null, [norm.null_share for norm in norms]),
        along.series(norms, BEFORE, [norm.along_ones_before for norm in norms], least=LEAST),
        along.series(norms, AFTER, [norm.along_ones_after for norm in norms], least=LEAST),
    ]
    return Figure(
        id="variance",
        title="Variance along the uniform direction",
        caption="The share of the states' variance along 1, beside that of random states: below the dashed line states "
        "avoid this direction, above it they prefer it (Gupta et al., 2409.12951).",
        height=380,
        data=traces,
        layout=along.layout(norms, log_axis("share of variance", (y for trace in traces for y in trace["y"]))),
        legend=(BEFORE, AFTER, null),
    )


def radius(norms: along.Norms) -> Figure:
    spreads = [norm.radius for norm in norms]
    trace = _spread(norms, NORMALIZED, spreads)
    trace["error_y"] |= {
        "symmetric": False,
        "array": [spread.largest - spread.mean for spread in spreads],
        "arrayminus": [spread.mean - spread.smallest for spread in spreads],
    }
    for text, spread in zip(trace["customdata"], spreads, strict=True):
        text[1] = f"{spread.mean:.6f}, {spread.smallest:.6f} to {spread.largest:.6f}"
    low = min(CLOSE, *(spread.smallest for spread in spreads))
    return Figure(
        id="radius",
        title="Radius",
        caption="Lengths of normalized states, mean and from the least to the largest: without eps all would be 1, the "
        "sphere on which every state lives (the essay “Every Transformer Lives on a Sphere”).",
        height=380,
        data=[trace],
        layout=along.layout(
            norms,
            {"title": {"text": "‖n̂‖ / √d"}, "range": [1 - 1.08 * (1 - low), 1 + 0.15 * (1 - low)], "zeroline": False},
        ),
    )
