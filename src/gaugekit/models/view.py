"""How to see a tensor on disk as what it means, readable and writable.

A `View` records a chain of torch view operations (never a copy), so that reading gives a strided window into the
disk tensor and writing through the window changes the disk tensor itself, whatever the layout: transposed
(Conv1D), fused and interleaved qkv, fused gate and up, sliced tables, norms stored as w − 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from gaugekit.checkpoint import PART


@dataclass(frozen=True)
class View:
    """A named disk tensor and the window through which it is seen.

    `offset` is added on reading and taken off on writing (Gemma stores norm weights as w with 1 + w in use).
    """

    name: str
    disk_shape: tuple[int, ...]
    steps: tuple[tuple[Any, ...], ...] = ()
    offset: float = 0.0

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is seen."""
        return tuple(self.window(torch.empty(self.disk_shape, device="meta")).shape)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def transpose(self, first: int, second: int) -> View:
        return self._then("transpose", first, second)

    def permute(self, *dims: int) -> View:
        return self._then("permute", dims)

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> View:
        return self._then("unflatten", dim, sizes)

    def select(self, dim: int, index: int) -> View:
        return self._then("select", dim, index)

    def narrow(self, dim: int, start: int, length: int) -> View:
        return self._then("narrow", dim, start, length)

    def unsqueeze(self, dim: int) -> View:
        return self._then("unsqueeze", dim)

    def plus(self, offset: float) -> View:
        return replace(self, offset=self.offset + offset)

    def window(self, base: Tensor) -> Tensor:
        """The strided window into `base` (disk_shape), without the offset; shares its memory."""
        for step in self.steps:
            base = getattr(base, step[0])(*step[1:])
        return base

    def read(self, base: Tensor) -> Tensor:
        """What the weight means: the window plus the offset."""
        seen = self.window(base)
        return seen + self.offset if self.offset else seen

    def write(self, base: Tensor, value: Tensor) -> None:
        """Change `base` in place so that `read(base)` gives `value` (any shape with as many entries)."""
        seen = self.window(base)
        value = value.reshape(seen.shape)
        seen.copy_(value - self.offset if self.offset else value)

    def _then(self, *step: Any) -> View:
        return replace(self, steps=(*self.steps, step))


class Edit:
    """Reads and writes views over a mapping of tensors, copying a tensor the first time it is written.

    The given tensors are never changed, but for `own`, which nobody else holds; `changed` holds the new ones.
    Differentiable: derivatives of the values written flow into the changed tensors. The mapping may hold a part of a
    model: `update` passes over the rest, so that a model can be moved in pieces.
    """

    def __init__(self, tensors: Mapping[str, Tensor], own: Collection[str] = ()) -> None:
        self._tensors = tensors
        self._own = own
        self.changed: dict[str, Tensor] = {}

    def __getitem__(self, view: View) -> Tensor:
        base = self.changed.get(view.name)
        return view.read(self._tensors[view.name] if base is None else base)

    def __contains__(self, view: View) -> bool:
        return view.name in self._tensors

    def update(self, view: View | None, change: Callable[[Tensor], Tensor]) -> None:
        """Change what is seen, if there is such a weight and this part of the model holds it. `change` gives a tensor
        of its own, or what it was given."""
        if view is None or view not in self:
            return
        seen = self[view]
        value = change(seen)
        new = value is not seen and not value._is_view() and value.dtype == seen.dtype and value.is_contiguous()
        if new and not view.steps and value.shape == view.disk_shape:  # a large tensor is not copied once more
            self.changed[view.name] = value - view.offset if view.offset else value
        else:
            self[view] = value

    def update_rows(self, view: View | None, change: Callable[..., Tensor], *beside: Tensor) -> None:
        """As `update`, where a row (..., d) becomes what `change` makes of it and of the entry of each of `beside`
        (..., 1) next to it. A large tensor is changed some rows at a time, so that no copy of a table is held."""
        if view is None or view.steps or view.offset or view.numel <= PART or len(view.shape) == 1:
            self.update(view, lambda rows: change(rows, *beside))
            return
        if view not in self:
            return
        base = self[view]
        mine = view.name in self.changed or view.name in self._own
        new = base if mine and not base.requires_grad else torch.empty_like(base)
        step = max(PART * view.shape[0] // view.numel, 1)
        for one, place, *others in zip(*(each.split(step) for each in (base, new, *beside)), strict=True):
            place.copy_(change(one, *others))
        self.changed[view.name] = new

    def __setitem__(self, view: View, value: Tensor) -> None:
        base = self.changed.get(view.name, self._tensors.get(view.name))
        assert base is not None
        if not view.steps:
            value = value.reshape(base.shape).to(base.dtype, copy=True, memory_format=torch.contiguous_format)
            self.changed[view.name] = value - view.offset if view.offset else value
            return
        # What was read of a tensor must still be what it was when derivatives go backward.
        if view.name not in self.changed or value.requires_grad or base.requires_grad:
            base = base.clone()
        view.write(base, value)
        self.changed[view.name] = base
