"""What heads attend to, and the keys that no query can select."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gaugekit.report.findings import entropy_shares
from gaugekit.report.plots.base import SCALE, TICKS, Figure, Key, colorbar, dot, head_axes, map_height

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gaugekit.verbs.attending import HeadStates

SCALED, UNSCALED = dot("as the norm scales them", 0), dot("unscaled", 1)


def entropy(rows: Sequence[HeadStates]) -> Figure:
    """By layer and head, as shares of what uniform attention has."""
    width = max(len(row.entropy) for row in rows)
    shares = [entropy_shares(row) for row in rows]
    return Figure(
        id="entropy",
        title="Entropy of attention",
        caption="As a share of that of uniform attention, mean over queries: near 1 a head averages all it sees, which "
        "a LayerNorm makes easy (Brody et al., 2305.02582), near 0 it looks at one token.",
        height=_height(rows),
        data=[
            {
                "type": "heatmap",
                "z": [each + [None] * (width - len(each)) for each in shares],
                "x": [str(head) for head in range(width)],
                "y": [str(row.layer) for row in rows],
                "customdata": [
                    [[round(nats, 3), round(row.uniform, 3)] for nats in row.entropy]
                    + [[None, None]] * (width - len(row.entropy))
                    for row in rows
                ],
                "zmin": 0,
                "zmax": 1,
                "colorscale": SCALE,
                "xgap": 1,
                "ygap": 1,
                "colorbar": colorbar("entropy / uniform"),
                "hovertemplate": "layer %{y}, head %{x}<br>%{customdata[0]} of %{customdata[1]} nats: %{z:.1%}"
                "<extra></extra>",
            }
        ],
        layout=head_axes("query head"),
    )


def unselectable(rows: Sequence[HeadStates]) -> Figure:
    """By layer, a dot for each key head."""
    series: dict[Key, list[tuple[float, ...] | None]] = {SCALED: [row.unselectable for row in rows]}
    if any(row.unselectable_unscaled for row in rows):
        series[UNSCALED] = [row.unselectable_unscaled for row in rows]
    traces = []
    for key, shares in series.items():
        cells = [
            (str(row.layer), head, part)
            for row, each in zip(rows, shares, strict=True)
            for head, part in enumerate(each or ())
        ]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": key.name,
                "x": [layer for layer, _, _ in cells],
                "y": [part for _, _, part in cells],
                "customdata": [head for _, head, _ in cells],
                "marker": {"color": key.colour, "symbol": key.symbol, "size": 7, "opacity": 0.9},
                "hovertemplate": f"layer %{{x}}, key head %{{customdata}}<br>%{{y:.2%}} {key.name}<extra></extra>",
            }
        )
    highest = max((y for trace in traces for y in trace["y"]), default=1.0)
    return Figure(
        id="unselectable",
        title="Keys that no query can select",
        caption="The share of a window's keys that lie in the convex hull of the others, so that no query gives them "
        "the highest score, a dot for each key head; unscaled: if norms left the tokens their lengths (Brody et al., "
        "2305.02582).",
        height=_height(rows),
        data=traces,
        layout={
            "hovermode": "closest",
            "scattermode": "group",
            "scattergap": 0.5,
            "xaxis": {"title": {"text": "layer"}, "type": "category", "tickangle": 0, "nticks": TICKS},
            "yaxis": {
                "title": {"text": "share of keys"},
                "tickformat": "~%",
                "range": [-0.04 * highest, 1.08 * highest],
                "zeroline": False,
            },
        },
        legend=tuple(series),
    )


def _height(rows: Sequence[HeadStates]) -> int:
    """Of both figures, which stand side by side."""
    return min(max(map_height(len(rows)), 340), 640)
