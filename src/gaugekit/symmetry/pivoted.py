"""Another representative for the bases of heads: k columns of the values, and of the keys, become the identity.

These columns need not be stored. Which ones is decided by QR with column pivoting of an orthonormal basis of the head's
row space, so the choice does not depend on the place in the orbit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gaugekit.linalg import column_pivots
from gaugekit.models.view import Edit
from gaugekit.symmetry.heads import QueryKey, ValueOutput, place_complex

# Entries of the identity come out of a division; nearer than this they are what they should be.
SNAP = 1e-12


@dataclass(frozen=True)
class PivotedValueOutput(ValueOutput):
    """W_V[:, pivots] becomes the identity, head by head. Heads of less than full rank stay as they are."""

    def fix(self, edit: Edit) -> Tensor:
        return pivoting(edit[self.attention.v.weight])

    def move(self, edit: Edit, element: Tensor) -> None:
        super().move(edit, element)
        edit.update(self.attention.v.weight, snapped)

    @property
    def saved(self) -> int:
        """Numbers that need not be stored."""
        return self.attention.kv_heads * self.attention.head_dim**2


@dataclass(frozen=True)
class PivotedQueryKey(QueryKey):
    """W_K[:, pivots] becomes the identity on the dimensions that never turn, and the largest complex entry of each
    pair that turns becomes one."""

    def fix(self, edit: Edit) -> Tensor:
        a = self.attention
        keys = edit[a.k.weight]
        own = torch.zeros(a.kv_heads, a.head_dim, a.head_dim, dtype=keys.dtype)
        turning, still = self.blocks
        for pairs in turning:
            first, second = (list(side) for side in zip(*pairs, strict=True))
            place_complex(own, first, second, pivoting(torch.complex(keys[:, first], keys[:, second])))
        if still:
            index = torch.tensor(still)
            own[:, index.unsqueeze(-1), index] = pivoting(keys[:, index])
        # Found for the keys, which move by the inverse transpose of what moves the queries.
        return torch.linalg.inv(own).mT

    def move(self, edit: Edit, element: Tensor) -> None:
        super().move(edit, element)
        edit.update(self.attention.k.weight, snapped)

    @property
    def saved(self) -> int:
        """Numbers that need not be stored."""
        turning, still = self.blocks
        return self.attention.kv_heads * (sum(2 * len(pairs) ** 2 for pairs in turning) + len(still) ** 2)


def pivoting(rows: Tensor) -> Tensor:
    """S (..., k, k) such that k columns of S A are the identity, for A (..., k, m) real or complex; the identity where
    A has not full rank, since then there is no such S."""
    k, m = rows.shape[-2:]
    one = torch.eye(k, dtype=rows.dtype).expand(*rows.shape[:-1], k)
    if m < k:
        return one
    pivots = column_pivots(torch.linalg.qr(rows.mH).Q.mH).sort(-1).values
    square = rows.gather(-1, pivots.unsqueeze(-2).expand(one.shape))
    full = torch.linalg.matrix_rank(square) == k
    return torch.linalg.inv(torch.where(full[..., None, None], square, one))


def snapped(weight: Tensor) -> Tensor:
    near = weight.round()
    return torch.where((weight - near).abs() < SNAP, near, weight)
