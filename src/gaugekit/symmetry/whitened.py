"""Another representative for the bases of heads whose product shows less than their dimensions, and which cannot be
balanced: one of the two factors is made orthonormal. What is left free turns, as in balanced heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gaugekit.linalg import beside
from gaugekit.models.view import Edit
from gaugekit.symmetry.heads import QueryKey, ValueOutput, place_complex, with_bias

Factor = Literal["first", "second", "both"]
FULL = 1e-12  # of the squares of singular values, relative: below it a factor has not full rank


@dataclass(frozen=True)
class WhitenedValueOutput(ValueOutput):
    """Values (the first factor) or outputs (the second) of each head are orthonormal rows; see `whitening`."""

    factor: Factor = "first"

    def fix(self, edit: Edit) -> Tensor:
        a = self.attention
        return whitening(with_bias(edit, a.v), beside(edit[a.o.weight], a.kv_heads), self.factor)


@dataclass(frozen=True)
class WhitenedQueryKey(QueryKey):
    """Queries (the first factor) or keys of each head are orthonormal rows: complex ones for pairs that turn alike, and
    real ones for the dimensions that never turn."""

    factor: Factor = "first"

    def fix(self, edit: Edit) -> Tensor:
        a = self.attention
        turning, still = self.blocks
        queries, keys = beside(with_bias(edit, a.q), a.kv_heads), with_bias(edit, a.k)
        element = torch.eye(a.head_dim, dtype=keys.dtype).repeat(2, a.kv_heads, 1, 1)
        for size in {len(pairs) for pairs in turning}:  # all blocks of one size at once
            first, second = torch.tensor([pairs for pairs in turning if len(pairs) == size]).unbind(-1)
            q, k = (torch.complex(x[:, first], x[:, second]) for x in (queries, keys))
            place_complex(element, first, second, whitening(q, k, self.factor))
        if still:
            index = torch.tensor(still)
            element[:, :, index.unsqueeze(-1), index] = whitening(queries[:, index], keys[:, index], self.factor)
        return element


def whitening(first: Tensor, second: Tensor, factor: Factor) -> Tensor:
    """S and T = S⁻ᴴ (2, ..., k, k), Hermitian, with orthonormal rows of S A, or of T B, for factors A and B, real
    or complex (..., k, n); both zero where that cannot be.

    With "both" A lacks as many dimensions as B: its rows are made orthonormal in those it has, and the vectors that B
    does not show complete them. Their lengths are free, since neither factor feels them.
    """
    rows = second if factor == "second" else first
    gram = rows @ rows.mH
    size, axes = torch.linalg.eigh(gram)
    shown = size > FULL * size[..., -1:]
    if factor == "both":
        other, unseen = torch.linalg.eigh(second @ second.mH)
        hidden = (other <= FULL * other[..., -1:]).to(size.dtype) * size.mean(-1, keepdim=True)
        matched = (shown.sum(-1) + (hidden > 0).sum(-1) == size.shape[-1]).unsqueeze(-1)
        size, axes = torch.linalg.eigh(gram + (unseen * hidden.unsqueeze(-2)) @ unseen.mH)
        shown = (size > FULL * size[..., -1:]) & matched
    full = shown.all(-1, keepdim=True).to(size.dtype)
    root = full * size.clamp_min(1e-300).sqrt()
    pair = [(axes * scale.unsqueeze(-2)) @ axes.mH for scale in (full / root.clamp_min(1e-300), root)]
    return torch.stack(pair[::-1] if factor == "second" else pair)
