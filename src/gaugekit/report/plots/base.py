"""What every plot of a page is made of: plain plotly dictionaries, without the page's colours, which may be dark.

Every figure has a sentence that says in plain words what is seen. Text that reaches plotly must be escaped, because
plotly reads a little HTML in labels.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

# Okabe and Ito's colours without black and yellow, which vanish on a dark and on a light page. What comes after
# the seventh takes the same colours again with a pattern or another symbol, never a colour that looks like one.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C")
PATTERNS = ("", "/", "x", ".")
SYMBOLS = ("circle", "diamond", "square", "triangle-up")
SCALE = "Viridis"
TICKS = 12  # labels on an axis of many places
DECADES = 8  # labels on an axis of many powers of ten


@dataclass(frozen=True)
class Key:
    """One entry of a figure's legend, which the page draws itself so that it wraps on a narrow screen."""

    name: str
    colour: str
    pattern: str = ""  # of a bar
    symbol: str = ""  # of a dot; "" for a bar


@dataclass(frozen=True)
class Figure:
    id: str
    title: str
    caption: str
    height: int
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    legend: tuple[Key, ...] = ()

    def to_plotly(self) -> dict[str, Any]:
        return {"id": self.id, "data": self.data, "layout": {**self.layout, "height": self.height}}


def bar(name: str, index: int) -> Key:
    """How the bars of the series with this index look; no two of the first 28 are alike."""
    again, colour = divmod(index, len(COLOURS))
    return Key(name, COLOURS[colour], pattern=PATTERNS[again % len(PATTERNS)])


def dot(name: str, index: int) -> Key:
    """How the dots of the series with this index look; no two of the first 28 are alike."""
    return Key(name, COLOURS[index % len(COLOURS)], symbol=SYMBOLS[index % len(SYMBOLS)])


def packed(values: np.ndarray) -> dict[str, str]:
    """A matrix as plotly.js reads it from base64: a fifth of what its digits would take."""
    data = base64.b64encode(values.astype("<f4").tobytes()).decode()
    return {"dtype": "f4", "bdata": data, "shape": f"{values.shape[0]}, {values.shape[1]}"}


def thinned(items: list[T]) -> list[T]:
    """At most `TICKS` of them, evenly spaced, the first included."""
    return items[:: -(-len(items) // TICKS) or 1]


def norm_axis(count: int, starts: list[tuple[int, str]]) -> dict[str, Any]:
    """The axis of so many norms, in their order; `starts` are where each layer's begin, and its label."""
    ticks = thinned(starts)
    return {
        "title": {"text": "norms, labelled by layer"},
        "tickvals": [at for at, _ in ticks],
        "ticktext": [label for _, label in ticks],
        "tickangle": 0,
        "showgrid": False,
        "zeroline": False,
        "range": [-0.8, count - 0.2],
    }


def log_axis(title: str, values: Iterable[float | None]) -> dict[str, Any]:
    """A logarithmic axis on which all of these positive numbers lie."""
    powers = [log10(value) for value in values if value is not None]
    # From one power of ten to another, for between them a logarithmic axis has no good labels.
    low = floor(min(powers, default=0))
    high = max(ceil(max(powers, default=0)), low + 1)
    room = 0.01 * max(high - low, 8)  # for half a dot
    return {
        "title": {"text": title},
        "type": "log",
        "range": [low - room, high + room],
        "dtick": ceil((high - low) / DECADES),
        "exponentformat": "power",
        "zeroline": False,
    }


def head_axes(x: str) -> dict[str, Any]:
    """Of a map of layers and heads."""
    return {
        "xaxis": {"title": {"text": x}, "type": "category", "tickangle": 0, "nticks": TICKS, "showgrid": False},
        "yaxis": {"title": {"text": "layer"}, "type": "category", "autorange": "reversed", "showgrid": False},
    }


def map_height(lines: int) -> int:
    """Of a map with that many rows, in pixels."""
    return 100 + min(max(16 * lines, 120), 1200)


def colorbar(title: str) -> dict[str, Any]:
    return {"title": {"text": title, "side": "right"}, "thickness": 12, "outlinewidth": 0, "len": 1, "ypad": 0}
