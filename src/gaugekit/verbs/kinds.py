"""What must agree for two models to be comparable at all."""

from __future__ import annotations

from typing import Any

from gaugekit.models import Spec
from gaugekit.symmetry import Observable, circuits
from gaugekit.verbs.matching import mlps


def kind(spec: Spec, observable: Observable) -> dict[str, Any]:
    """Shapes, positions, ties and activations, by the words in which a difference is reported; plain JSON values."""
    every = list(circuits(spec, observable))
    units = list(mlps(spec, observable))
    return {
        "families": spec.family,
        "numbers of layers": [len(stream.blocks) for stream in spec.streams],
        "widths": [stream.width for stream in spec.streams],
        "vocabularies": [t.rows.shape[0] for s in spec.streams for t in s.tables if t.name == "tokens"],
        "heads": [
            list(shape)
            for shape in sorted({(e.attention.heads, e.attention.kv_heads, e.attention.head_dim) for e in every})
        ],
        "rotary positions": sorted({e.attention.rotary.scheme for e in every if e.attention.rotary is not None}),
        "ties": spec.main.head is not None and spec.main.head.tied,
        "hidden units": sorted({each.mlp.up.weight.shape[0] for each in units}),
        "activations": sorted({each.mlp.activation for each in units}),
    }


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The first thing in which two kinds differ, in words, or None."""
    for what, value in ours.items():
        if theirs.get(what) != value:
            return f"different {what}: {value} and {theirs.get(what)}"
    return None
