"""What cutting heads costs and saves, attention by attention and in all.

Shapes: g key/value heads, k head dimension, r ≤ k value dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from gaugekit.checkpoint.reader import DTYPES, TensorHeader
from gaugekit.models import Spec
from gaugekit.symmetry import Circuits
from gaugekit.verbs.reducing import Cut, Kept

__all__ = ["LayerReduction", "kv_bytes", "layer_reductions", "parameters"]

Headers = Mapping[str, TensorHeader]


@dataclass(frozen=True)
class LayerReduction:
    """One attention: dimensions kept by each key/value head, and what is lost of each circuit, √(lost / all) of its
    energy: over all inputs (`plain`), and on the text (`weighted`). None where a circuit was not to be cut."""

    where: str
    head_dim: int
    vo: tuple[int, ...] | None
    vo_plain: float | None
    vo_weighted: float | None
    qk: tuple[int, ...] | None
    qk_plain: float | None
    qk_weighted: float | None


def layer_reductions(
    spec: Spec,
    every: Sequence[Circuits],
    of_values: tuple[Sequence[Cut], Sequence[Kept]],
    of_keys: tuple[Sequence[Cut], Sequence[Kept]],
) -> Iterator[LayerReduction]:
    """For each attention, from its cuts and what they keep; both empty where a circuit was not to be cut."""
    for number, each in enumerate(every):
        found: dict[str, Any] = {}
        for name, (cuts, kept) in (("vo", of_values), ("qk", of_keys)):
            plain, weighted = cuts[number].errors(kept[number]) if cuts else (None, None)
            dimensions = cuts[number].dimensions(kept[number]) if cuts else None
            found |= {name: dimensions, f"{name}_plain": plain, f"{name}_weighted": weighted}
        place = "" if len(spec.streams) == 1 else f"{each.stream} "
        kind = "cross-attention" if each.attention.memory is not None else "attention"
        yield LayerReduction(f"{place}layer {each.layer} {kind}", each.attention.head_dim, **found)


def parameters(spec: Spec, headers: Headers) -> int:
    """Numbers in weight files, those that are stored twice because they are tied counted once. Where the identity in
    pivoted values stands is no parameter."""
    copies = {copy for copy, _ in spec.copies}
    return sum(
        prod(header.shape)
        for name, header in headers.items()
        if name not in copies and DTYPES[header.dtype].is_floating_point
    )


def kv_bytes(spec: Spec, every: Sequence[Circuits], headers: Headers, ranks: Sequence[int] | None = None) -> int | None:
    """Keys and values of one token in the cache, in the dtype of the keys' weights; `ranks`: value dimensions of the
    layers, where these are smaller. None for a model that is no decoder of text alone, and has no such cache."""
    if spec.main.head is None or len(spec.streams) > 1:
        return None
    total = 0
    for each, rank in zip(every, ranks or [each.attention.head_dim for each in every], strict=True):
        a = each.attention
        total += a.kv_heads * (a.head_dim + rank) * DTYPES[headers[a.k.weight.name].dtype].itemsize
    return total
