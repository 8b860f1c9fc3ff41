"""Words and numbers that the terminal and the page share."""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gaugekit.verbs.inspect import InspectReport

OBSERVABLES = {
    "logprobs": "log-probabilities",
    "logits": "logits",
    "hidden": "final hidden states",
    "similarities": "inner products of final hidden states",
}
OUTSIDE = "outside layers"


def plain(text: str) -> str:
    """`text` on one line, with nothing in it that a terminal would obey: names and paths come from outside."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def count(number: int) -> str:
    return f"{number:,}"


def share(fraction: float) -> str:
    """A share as a percentage of three digits."""
    percent = 100 * fraction
    if 0 < percent < 0.001:
        return "<0.001 %"
    return f"{percent:.3g} %" if percent < 99.95 else f"{percent:.0f} %"


def percent(fraction: float) -> str:
    """A share as a column of them shows it: every number with the same decimals."""
    return "<0.001 %" if 0 < fraction < 0.000005 else f"{100 * fraction:.3f} %"


def measure(value: float | None) -> str:
    """A distance or a divergence, which may be of any size: 0.123, 4.5e-07; "" if there is none."""
    if not value:
        return "" if value is None else "0"
    return f"{value:.3f}" if 0.001 <= abs(value) < 1e6 else f"{value:.1e}"


def size(nbytes: int) -> str:
    """A size in decimal units, in which disks are sold and shards are given."""
    value, unit = float(nbytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.95:
            break
        value, unit = value / 1000, larger
    return f"{count(nbytes)} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def plural(number: int, thing: str) -> str:
    return f"{count(number)} {thing}" if number == 1 else f"{count(number)} {thing}s"


def shorten(group: str, limit: int) -> str:
    """A group that fits in `limit` characters: its first factors and how many more there are."""
    if len(group) <= limit:
        return group
    factors = _factors(group)
    for shown in range(len(factors) - 1, 0, -1):
        short = " x ".join(factors[:shown]) + f" x … {len(factors) - shown} more"
        if len(short) <= limit:
            return short
    half = (limit - 1) // 2
    return f"{group[: limit - 1 - half]}…{group[-half:]}"


def _factors(group: str) -> list[str]:
    """Split at every " x " that stands outside brackets."""
    factors, start, depth = [], 0, 0
    for at, character in enumerate(group):
        depth += (character in "([") - (character in ")]")
        if depth == 0 and group.startswith(" x ", at):
            factors.append(group[start:at])
            start = at + 3
    return [*factors, group[start:]]


def model_name(report: InspectReport) -> str:
    """What a reader would call this checkpoint."""
    return path_name(report.model["path"])


def path_name(where: str) -> str:
    """What a reader would call the checkpoint that lies there."""
    path = PurePath(os.path.abspath(where))
    for part in reversed(path.parts):
        # A snapshot of the hub's cache is named by a commit; the model's name stands two folders up.
        if hub := re.fullmatch(r"models--(.+?)--(.+)", part):
            return plain(f"{hub[1]}/{hub[2]}")
    # A folder that is called "model" says nothing; the one above it does.
    return plain("/".join(path.parts[-2:]) if path.name in ("model", "checkpoint") else path.name)


def facts(report: InspectReport) -> list[tuple[str, str]]:
    """The model in a few lines of (what, value)."""
    model = report.model
    heads = plural(model["heads"], "head")
    if model["kv_heads"] != model["heads"]:
        heads += f" on {plural(model['kv_heads'], 'key/value head')}"
    shape = f"{plural(model['layers'], 'layer')}, d_model {count(model['d_model'])}, "
    shape += f"{heads} of dimension {model['head_dim']}"
    lines = [
        ("family", f"{model['family']} ({model['format']})"),
        ("path", plain(model["path"])),
        ("shape", shape),
    ]
    if len(model["streams"]) > 1:
        streams = (f"{s['name']} {s['layers']} x {count(s['d_model'])}" for s in model["streams"])
        lines.append(("streams", ", ".join(streams)))
    if model["vocabulary"] is not None:
        tied = "tied to the embedding" if model["tied"] else "separate head"
        lines.append(("vocabulary", f"{count(model['vocabulary'])}, {tied}"))
    lines.append(("parameters", count(report.parameters)))
    lines.append(("observable", f"{report.observable} ({OBSERVABLES[report.observable]})"))
    return lines


def total(report: InspectReport) -> str:
    return (
        f"redundant dimensions {count(report.redundancy)} of {count(report.parameters)} parameters "
        f"({share(report.fraction)})"
    )


def layer_label(layer: str) -> str:
    """A layer as an axis shows it: "layer 3" → "3", "encoder layer 3" → "encoder 3", "" → "outside layers"."""
    return layer.replace("layer ", "") if layer else OUTSIDE
