"""What figures share that follow the norms of a stream, from the first to the last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import isfinite
from typing import TYPE_CHECKING, Any

from gaugekit.report.findings import place
from gaugekit.report.plots.base import Key, norm_axis
from gaugekit.report.text import measure

if TYPE_CHECKING:
    from gaugekit.verbs.states import NormStates

Norms = Sequence["NormStates"]
Values = Iterable[float | None]
Trace = dict[str, Any]


def series(norms: Norms, key: Key, values: Values, *, least: float | None = None, **style: Any) -> Trace:
    """A dot for each norm that has a value. What is smaller than `least` is drawn there, but named as it is."""
    drawn = [value if value is not None and isfinite(value) else None for value in values]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": key.name,
        "x": list(range(len(norms))),
        "y": drawn if least is None else [None if value is None else max(value, least) for value in drawn],
        "customdata": [[escape(place(norm)), measure(value)] for norm, value in zip(norms, drawn, strict=True)],
        "hovertemplate": f"<b>%{{customdata[0]}}</b><br>{key.name}: %{{customdata[1]}}<extra></extra>",
        "marker": {"color": key.colour, "symbol": key.symbol, "size": 6},
        "line": {"color": key.colour, "width": 1},
        **style,
    }


def level(norms: Norms, key: Key, values: Values) -> Trace:
    """A dashed line to which the series are compared."""
    line = {"color": key.colour, "width": 2, "dash": "dash"}
    return series(norms, key, values, mode="lines", line=line)


def layout(norms: Norms, y: dict[str, Any], **more: Any) -> dict[str, Any]:
    """With the axis of norms below."""
    axis = norm_axis(len(norms), _starts(norms))
    return {"hovermode": "closest", "xaxis": axis, "yaxis": y, **more}


def _starts(norms: Norms) -> list[tuple[int, str]]:
    """Where each layer's norms begin."""
    layers = [norm.layer for norm in norms]
    previous = [None, *layers]
    return [(at, str(layer)) for at, layer in enumerate(layers) if layer is not None and layer != previous[at]]
