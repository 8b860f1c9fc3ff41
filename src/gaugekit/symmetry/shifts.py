"""Constants that two places of a model can trade, and shifts of the unembedding that a softmax does not see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gaugekit.linalg import orthonormal_complement_of_ones
from gaugekit.models.view import Edit, View
from gaugekit.symmetry.base import Exactness, Translation, present


def along(element: Tensor, width: int) -> Tensor:
    """Coordinates (d,) or, where the direction 1 belongs to another symmetry, (d − 1,) as a vector (d,)."""
    return element if element.shape[0] == width else orthonormal_complement_of_ones(width) @ element


@dataclass(frozen=True)
class TableConstant(Translation):
    """A constant moves from one embedding table to another: rows + c, rows − c.

    With `centred` c has mean zero: the mean belongs to the writers. `through_head`: the first table is also the
    unembedding, so the logits of a token shift alike. `dead_rows` of the second table are never read; `mean_free`: the
    means of its rows are lost in LayerNorms.
    """

    first: View
    second: View
    centred: bool
    through_head: bool
    dead_rows: tuple[int, ...] = ()
    mean_free: bool = False

    name: ClassVar[str] = "table constant"

    @property
    def exactness(self) -> Exactness:
        return "exact in logprobs" if self.through_head else "exact"

    @property
    def dimension(self) -> int:
        return self.first.shape[-1] - self.centred

    @property
    def views(self) -> tuple[View, ...]:
        return (self.first, self.second)

    def fix(self, edit: Edit) -> Tensor:
        """The rows of the second table sum to zero. Where their means are free, the mean of all entries of the first
        becomes zero instead."""
        rows = edit[self.second].reshape(-1, self.second.shape[-1])
        live = torch.ones(len(rows), dtype=torch.bool)
        live[list(self.dead_rows)] = False
        constant = rows[live].mean(0)
        if self.centred:
            return orthonormal_complement_of_ones(len(constant)).mT @ constant
        if self.mean_free:
            return constant - constant.mean() - edit[self.first].mean()
        return constant

    def move(self, edit: Edit, element: Tensor) -> None:
        constant = along(element, self.first.shape[-1])
        edit.update_rows(self.first, lambda rows: rows + constant)
        edit.update_rows(self.second, lambda rows: rows - constant)


@dataclass(frozen=True)
class ParallelBias(Translation):
    """Branches in parallel trade a constant between their output biases: b + c / λ, b' − c / λ' (λ a LayerScale)."""

    first: View
    second: View
    centred: bool
    scales: tuple[View | None, View | None] = (None, None)

    name: ClassVar[str] = "parallel bias"

    @property
    def dimension(self) -> int:
        return self.first.shape[0] - self.centred

    @property
    def views(self) -> tuple[View, ...]:
        return (self.first, self.second)

    @property
    def context(self) -> tuple[View, ...]:
        return present(*self.scales)

    @property
    def divisors(self) -> tuple[View, ...]:
        return present(*self.scales)

    def fix(self, edit: Edit) -> Tensor:
        """The second bias becomes zero, but for its mean where that is free."""
        scale = self.scales[1]
        constant = edit[self.second] if scale is None else edit[self.second] * edit[scale]
        return orthonormal_complement_of_ones(len(constant)).mT @ constant if self.centred else constant

    def move(self, edit: Edit, element: Tensor) -> None:
        constant = along(element, self.first.shape[0])
        for view, scale, sign in zip((self.first, self.second), self.scales, (1.0, -1.0), strict=True):
            step = sign * (constant if scale is None else constant / edit[scale])
            edit.update(view, lambda bias, step=step: bias + step)


@dataclass(frozen=True)
class HeadConstant(Translation):
    """Every row of the unembedding + c, and every entry of its bias + one number: logits shift alike, log-probabilities
    do not move. `weight` is None where the unembedding is tied and only the bias is free; with `mean_only` it is tied
    too, but c may be a multiple of 1, which the LayerNorms behind the token table do not see."""

    weight: View | None
    bias: View | None
    mean_only: bool = False

    name: ClassVar[str] = "head constant"

    @property
    def exactness(self) -> Exactness:
        return "exact in logprobs"

    @property
    def dimension(self) -> int:
        rows = 0 if self.weight is None else 1 if self.mean_only else self.weight.shape[-1]
        return rows + (self.bias is not None)

    @property
    def views(self) -> tuple[View, ...]:
        return present(self.weight, self.bias)

    def fix(self, edit: Edit) -> Tensor:
        """Rows and bias sum to zero over the tokens."""
        parts = []
        if self.weight is not None:
            rows = edit[self.weight]
            parts.append(-rows.mean().reshape(1) if self.mean_only else -rows.mean(0))
        if self.bias is not None:
            parts.append(-edit[self.bias].mean().reshape(1))
        return torch.cat(parts)

    def move(self, edit: Edit, element: Tensor) -> None:
        if self.bias is not None:
            last, element = element[-1], element[:-1]
            edit.update(self.bias, lambda bias: bias + last)
        rows = element
        edit.update_rows(self.weight, lambda weight: weight + rows)
