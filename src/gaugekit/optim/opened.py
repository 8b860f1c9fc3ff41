"""A pair during a step of an optimizer: what is trained of it, its values, and where its state lies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gaugekit.geometry.rows import wide
from gaugekit.optim.frames import deficient
from gaugekit.optim.pairs import Factor, Pair
from gaugekit.optim.sharding import as_share, layout_of, local, rows_like, share, united, whole

__all__ = ["HALF", "Opened", "ParamGroup"]

GOVERNING = ("lr", "betas", "eps", "momentum", "dampening", "nesterov", "maximize")
"""What of a parameter group decides how a factor moves; weight decay is usually zero for biases and not for weights."""

HALF = (torch.float16, torch.bfloat16)
COMPLEX = " (re, im)"
"""Marks complex state, kept as real numbers: torch casts state to the parameter's dtype when it loads it."""

ParamGroup = dict[str, Any]


class Holder(Protocol):
    """What a pair needs of its optimizer."""

    masters: bool

    @property
    def state(self) -> defaultdict[Tensor, Any]: ...

    def value(self, parameter: Tensor) -> Tensor:
        """The parameter, or its float32 master."""
        ...


class Opened:
    """A pair during a step: what is trained of it and by which groups, and its values, read and to be written.

    `anchor` is the parameter that holds the state, None where nothing is trained. `moving`: which of A and B has a
    gradient. With sharded parameters, all tensors are this process's share of the heads.
    """

    def __init__(self, optimizer: Holder, pair: Pair, groups: dict[int, ParamGroup]) -> None:
        self.optimizer, self.pair = optimizer, pair
        self.sides = (pair.a, pair.b)
        self.layout = layout_of(pair.parameters)
        held = [p for p in pair.parameters if id(p) in groups]
        self.held = {id(p) for p in held}
        self.trained = {id(p) for p in held if p.grad is not None}
        kept = [p for p in held if self._swap in optimizer.state.get(p, {})]
        self.anchor = (kept or [p for p in held if p.requires_grad] or held)[0] if self.trained else None
        self.state: dict[str, Any] = {} if self.anchor is None else optimizer.state.get(self.anchor, {})
        found = [_one_group(factor, pair.name, self.trained, groups) for factor in self.sides]
        self.moving = tuple(group is not None for group in found)
        self.groups = tuple(group or {} for group in found)
        self.swapped = self._is_swapped()

    def _is_swapped(self) -> bool:
        """Whether A and B change places: of the two, A is the one that must have full rank if one has."""
        if self.anchor is None:
            return False
        known = self.state.get(self._swap)
        if known is not None:
            return known
        lacking = [(deficient(a), deficient(b)) for a, b in self.pair.factors(lambda p: wide(p.detach()))]
        return any(bool(a.any()) for a, _ in lacking) and not any(bool(b.any()) for _, b in lacking)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What pairs of one batch have in common."""
        assert self.anchor is not None
        shapes = self.pair.a.shape[1:], self.pair.b.shape[1:], self.pair.turning, self.moving, self.swapped
        return (
            *shapes,
            *(id(group) for group, moving in zip(self.groups, self.moving, strict=True) if moving),
            frozenset(self._own(0)),
            self.anchor.dtype,
            self.anchor.device,
            self.layout,
        )

    def read(self, copy: bool) -> int:
        """Read values and gradients of A and B, at least float32. The number of heads."""
        wholes = self.wholes = {id(p): whole(self.value(p)) for p in self.pair.parameters}
        found = {id(p): whole(p.grad) for p in self.pair.parameters if p.grad is not None and id(p) in self.trained}
        self.values = [share(wide(side.read(lambda p: wholes[id(p)], copy)), self.layout) for side in self.sides]
        self.gradients = [
            share(wide(side.read(lambda p: found.get(id(p)), copy)), self.layout) if moving else torch.empty(0)
            for side, moving in zip(self.sides, self.moving, strict=True)
        ]
        return len(self.values[0])

    def write(self, new: Sequence[Tensor]) -> None:
        for side, value, moving in zip(self.sides, new, self.moving, strict=True):
            if moving:
                whole_value = united(value, self.layout, self.pair.a.shape[0])
                side.write(whole_value, lambda p: self.wholes[id(p)] if id(p) in self.trained else None)
        if self.layout is None and not self.optimizer.masters:
            return  # written where they lie
        for parameter in self.pair.parameters:
            if id(parameter) not in self.trained:
                continue
            value = self.value(parameter)
            if self.layout is not None:
                local(value).copy_(rows_like(self.wholes[id(parameter)], parameter))
            if value.dtype != parameter.dtype:
                local(parameter.detach()).copy_(local(value))

    def value(self, parameter: Tensor) -> Tensor:
        return self.optimizer.value(parameter) if id(parameter) in self.held else parameter.detach()

    def load(self, number: int) -> dict[str, Tensor]:
        """The state of one block: a row for each of its products, kept by heads, which can be shared."""
        found = {key: local(value) for key, value in self._own(number).items()}
        if self.pair.blocks[number].pairs is not None:
            found = {key: value.flatten(0, 1) for key, value in found.items()}
        return {
            self._named(key.removesuffix(COMPLEX)): torch.view_as_complex(value) if key.endswith(COMPLEX) else value
            for key, value in found.items()
        }

    def keep(self, number: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put the state of one block where `load` finds it; what was put there, by its full name."""
        assert self.anchor is not None
        self.state = self.optimizer.state[self.anchor]
        pairs, kept = self.pair.blocks[number].pairs, {}
        for key, value in state.items():
            name = f"{self._start(number)}{self._named(key)}{COMPLEX if value.is_complex() else ''}"
            real = torch.view_as_real(value) if value.is_complex() else value
            rows = real if pairs is None else real.unflatten(0, (-1, len(pairs)))
            kept[name] = as_share(rows, self.layout, self.pair.a.shape[0])
        self.state.update(kept)
        self.state[self._swap] = self.swapped
        return kept

    def _own(self, number: int) -> dict[str, Tensor]:
        start = self._start(number)
        return {key.removeprefix(start): value for key, value in self.state.items() if key.startswith(start)}

    @property
    def _swap(self) -> str:
        return f"{self.pair.name}.swapped"

    def _start(self, number: int) -> str:
        return f"{self.pair.name}[{number}]."

    def _named(self, key: str) -> str:
        """Names in an optimizer's state are those of the pair's own A and B: a checkpoint is loaded into state of the
        same names and shapes, which is made before the swap is known."""
        if not self.swapped or key[-2:] not in ("_a", "_b"):
            return key
        return key[:-1] + ("b" if key.endswith("a") else "a")


def _one_group(factor: Factor, name: str, trained: set[int], groups: dict[int, ParamGroup]) -> ParamGroup | None:
    """The parameter group that governs a factor: that of its first trained parameter. Those of the others must agree,
    except in weight decay."""
    found = [groups[id(w.parameter)] for w in factor.windows if id(w.parameter) in trained]
    for group in found[1:]:
        for key in GOVERNING:
            if group.get(key) != found[0].get(key):
                raise ValueError(f"parameters of one factor of {name} have different {key}: put them in like groups")
    return found[0] if found else None
