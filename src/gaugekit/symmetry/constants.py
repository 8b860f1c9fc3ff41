"""Constants of keys and values that a softmax does not see, or that leave every head alike.

Shapes: k and v (g, k, d), o (h, k, d).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from gaugekit.models.spec import Attention
from gaugekit.models.view import Edit, View
from gaugekit.symmetry.base import Translation, present, probe
from gaugekit.symmetry.heads import still_dimensions
from gaugekit.symmetry.readers import Reader


@dataclass(frozen=True)
class KeyConstant(Translation):
    """A constant added to every key on the dimensions that never turn: each query's scores shift alike, which the
    softmax does not see. It enters through the key bias, or, without one, through the reader's free direction."""

    attention: Attention
    reader: Reader

    name: ClassVar[str] = "key constant"

    @cached_property
    def still(self) -> tuple[int, ...]:
        return still_dimensions(self.attention.rotary, self.attention.head_dim)

    @property
    def dimension(self) -> int:
        return self.attention.kv_heads * len(self.still)

    @property
    def views(self) -> tuple[View, ...]:
        return self.reader.shift_views

    @property
    def context(self) -> tuple[View, ...]:
        return self.reader.context

    @property
    def divisors(self) -> tuple[View, ...]:
        return self.reader.divisors

    def fix(self, edit: Edit) -> Tensor:
        """The constant part of the keys becomes zero where it is free."""
        constant = self.reader.constant(edit).reshape(self.attention.kv_heads, -1)
        return -constant[:, list(self.still)].reshape(-1)

    def move(self, edit: Edit, element: Tensor) -> None:
        g, k = self.attention.kv_heads, self.attention.head_dim
        scatter = torch.eye(k, dtype=element.dtype)[list(self.still)]
        self.reader.shift(edit, (element.reshape(g, -1) @ scatter).reshape(-1))


@dataclass(frozen=True)
class ValueConstant(Translation):
    """A constant c added to every value: rows of the softmax sum to one, so Σ_h W_O c leaves every head, and comes off
    the output bias again.

    `sink`: a bias (d,) that reaches the stream together with the output, and `sink_scale` its LayerScale over the
    output's. Without a sink, c runs over the kernel of Σ_h W_O (of its centred part if `centred`: the stream is
    read by LayerNorms only).
    """

    attention: Attention
    reader: Reader
    sink: View | None
    centred: bool
    scales: tuple[View | None, View | None] = (None, None)

    name: ClassVar[str] = "value constant"

    @property
    def dimension(self) -> int:
        values = self.attention.kv_heads * self.attention.head_dim
        if self.sink is not None:
            return values
        seen = self.attention.o.weight.shape[-1] - self.centred
        return max(0, values - seen)

    @property
    def views(self) -> tuple[View, ...]:
        return self.reader.shift_views + present(self.sink)

    @property
    def context(self) -> tuple[View, ...]:
        return (*self.reader.context, self.attention.o.weight, *present(*self.scales))

    @property
    def divisors(self) -> tuple[View, ...]:
        return self.reader.divisors + present(self.scales[1])

    def fix(self, edit: Edit) -> Tensor:
        """The constant part of the values becomes zero, as far as it is free."""
        constant = self.reader.constant(edit)
        return -constant if self.sink is not None else -self._kernel(self._summed(edit)).mT @ constant

    def _summed(self, edit: Edit) -> Tensor:
        """Each value head feeds every query head of its group: (g k, d), the sum over the group."""
        a = self.attention
        g, k = a.kv_heads, a.head_dim
        return edit[a.o.weight].reshape(g, a.heads // g, k, -1).sum(1).reshape(g * k, -1)

    def _kernel(self, summed: Tensor) -> Tensor:
        """An orthonormal basis (g k, dimension) of the constants that reach nothing that is read: the projections of
        fixed vectors, made orthonormal one after the other, so that it moves no more than the constants do."""
        seen = summed - summed.mean(-1, keepdim=True) if self.centred else summed
        kernel = torch.linalg.svd(seen)[0][:, len(summed) - self.dimension :]
        fixed = probe(kernel.numel()).reshape(kernel.shape)
        basis, triangle = torch.linalg.qr(kernel @ (kernel.mT @ fixed))
        return basis * torch.where(triangle.diagonal() < 0, -1.0, 1.0)

    def move(self, edit: Edit, element: Tensor) -> None:
        summed = self._summed(edit)
        if self.sink is None:
            constant = self._kernel(summed) @ element
        else:
            constant = element
            written = constant @ summed
            own, others = self.scales
            if own is not None:
                written = written * edit[own]
            if others is not None:
                written = written / edit[others]
            edit.update(self.sink, lambda bias: bias - written)
        self.reader.shift(edit, constant)
