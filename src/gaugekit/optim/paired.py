"""What optimizers that know pairs share: pairs are read, moved together in batches and written back, and every other
parameter goes to one of torch's optimizers.

Pairs of like shape are moved in one batch: no loop over heads, and none over small adapters. Of a pair with frozen
parameters the others move. State lies with the first trained parameter of a pair, under the pair's name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gaugekit.optim.frames import deficient
from gaugekit.optim.pairs import Factor, Pair, check_cover, check_held
from gaugekit.optim.sharding import as_share, layout_of, local, rows_like, share, united, whole
from gaugekit.optim.wrapping import Wrapper, check_gradients

__all__ = ["Moved", "Paired", "ParamGroup"]

BATCH = 2**18
"""Numbers of one factor in a batch: small pairs are moved together, large ones one by one, in cache."""

GOVERNING = ("lr", "betas", "eps", "momentum", "dampening", "nesterov", "maximize")
"""What of a parameter group decides how a factor moves; weight decay is usually zero for biases and not for weights."""

HALF = (torch.float16, torch.bfloat16)
MASTER = "master"
COMPLEX = " (re, im)"
"""Marks complex state, kept as real numbers: torch casts state to the parameter's dtype when it loads it."""

ParamGroup = dict[str, Any]


@dataclass
class Moved:
    """A batch of blocks in one step: A (N, r, m) and B (N, r, n), their gradients (None where the factor is frozen),
    the parameter groups that govern them, and the state that `Paired.move` keeps, tensors of N rows each; what
    belongs to A is called ..._a, to B ..._b."""

    a: Tensor
    b: Tensor
    grad_a: Tensor | None
    grad_b: Tensor | None
    group_a: ParamGroup
    group_b: ParamGroup
    state: dict[str, Tensor]


class Paired(Wrapper):
    """Base of optimizers that move pairs of factors by `move`, and all other parameters by `inner`.

    Args:
        inner: one of torch's optimizers, over all parameters.
        pairs: of parameters that `inner` holds; every parameter in whole or not at all.
        masters: keep parameters of half precision in float32 as well, and round after each step. Without it the algebra
            of pairs is float32 all the same, but what a step adds below a half's rounding is lost.

    Raises:
        ValueError: pairs that overlap, share a name, cover a parameter only in part, or can be trained without a
            parameter in `inner`: `fully_shard`, or a move from the meta device, puts new parameters in a model.
    """

    def __init__(self, inner: Optimizer, pairs: Iterable[Pair], masters: bool = False) -> None:
        super().__init__(inner)
        self.pairs = tuple(pairs)
        self.masters = masters
        self._stacks: dict[tuple[str, int], _Stack] = {}
        check_cover(self.pairs)
        check_held(self.pairs, {id(p) for _, p in self.parameters()})

    @abstractmethod
    def move(self, moved: Moved) -> tuple[Tensor, Tensor]:
        """The factors after the step. `moved.state` is empty at first; what is put there is kept."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. The closure is evaluated once; its loss is returned.

        Raises:
            ValueError: a gradient in a pair has NaN or inf entries, or parameters of one factor have different learning
                rates. Nothing has moved then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            groups = {id(p): group for group in self.param_groups for p in group["params"]}
            opened = [_Open(self, pair, groups) for pair in self.pairs]
            check_gradients((pair.name, p) for pair in self.pairs for p in pair.parameters if id(p) in groups)
            self._step_others()
            self._count()
            for batch in batches([each for each in opened if each.anchor is not None]):
                self._step_batch(batch)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which casts state to the parameter's dtype; what is float32 beside half parameters stays so."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                for key, value in state_dict["state"].get(index, {}).items():
                    if parameter.dtype in HALF and isinstance(value, Tensor) and value.dtype == torch.float32:
                        self.state[parameter][key] = value.to(parameter.device, copy=True)

    def value(self, parameter: Tensor) -> Tensor:
        """The parameter, or its float32 master."""
        if not self.masters or parameter.dtype not in HALF:
            return parameter.detach()
        if MASTER not in self.state[parameter]:
            self.state[parameter][MASTER] = parameter.detach().float()
        return self.state[parameter][MASTER]

    def _count(self) -> None:
        """An entry of state for every parameter with a gradient, as checkpoints of torch.distributed demand; in pairs
        with "step", which torch's Adam demands of every entry."""
        if not self.pairs:
            return
        paired = {id(p) for pair in self.pairs for p in pair.parameters}
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if id(parameter) in paired:
                state.setdefault("step", torch.zeros(())).add_(1)

    def _step_others(self) -> None:
        """The inner optimizer's step on parameters outside pairs: it passes over parameters without a gradient, and is
        given masters in place of halves."""
        paired = {id(p): p for pair in self.pairs for p in pair.parameters}
        hidden = [(p, p.grad) for p in paired.values()]
        lists = [(group, group["params"]) for group in self.param_groups]
        masters = {
            p: self.value(p)
            for _, parameters in lists
            for p in parameters
            if self.masters and p.dtype in HALF and p.grad is not None and id(p) not in paired
        }
        try:
            for parameter, _ in hidden:
                parameter.grad = None
            for parameter, master in masters.items():
                master.grad = parameter.grad.float()
                # A state with the master alone would look initialised to the inner optimizer.
                self.state[master] = {key: x for key, x in self.state[parameter].items() if key != MASTER}
            for group, parameters in lists:
                group["params"] = [masters.get(p, p) for p in parameters]
            self.inner.step()
        finally:
            for group, parameters in lists:
                group["params"] = parameters
            for parameter, master in masters.items():
                master.grad = None
                self.state[parameter] = {**self.state.pop(master, {}), MASTER: master}
                parameter.copy_(master)
            for parameter, gradient in hidden:
                parameter.grad = gradient

    def _step_batch(self, batch: list[_Open]) -> None:
        first, heads = batch[0], [each.read(copy=len(batch) == 1) for each in batch]
        values = [_side_by_side([each.values[side] for each in batch]) for side in (0, 1)]
        gradients = [_side_by_side([each.gradients[side] for each in batch]) for side in (0, 1) if first.moving[side]]
        for number, block in enumerate(first.pair.blocks):
            found = iter(gradients)
            sides = [
                (block.take(values[i]), block.take(next(found)) if first.moving[i] else None, first.groups[i])
                for i in (0, 1)
            ]
            if first.swapped:
                sides.reverse()
            (a, grad_a, group_a), (b, grad_b, group_b) = sides
            before = self._stacked(batch, number)
            moved = Moved(a, b, grad_a, grad_b, group_a, group_b, dict(before))
            new = self.move(moved)
            for into, value in zip(values, reversed(new) if first.swapped else new, strict=True):
                block.put(into, value)
            self._keep(batch, number, before, moved.state, [count * len(a) // max(1, sum(heads)) for count in heads])
        for each, *new in zip(batch, *(value.split(heads) for value in values), strict=True):
            each.write(new)

    def _stacked(self, batch: list[_Open], number: int) -> dict[str, Tensor]:
        """The state of one block of all pairs of a batch, side by side: as the last step left it, or put together."""
        stack = self._stacks.get((batch[0].pair.name, number))
        if stack is None or not stack.is_that_of(batch):
            states = [each.load(number) for each in batch]
            return {key: _side_by_side([state[key] for state in states]) for key in states[0]}
        return stack.state

    def _keep(
        self,
        batch: list[_Open],
        number: int,
        before: dict[str, Tensor],
        after: dict[str, Tensor],
        sizes: list[int],
    ) -> None:
        """Write new state into the memory of the old; where there is none yet, give each pair its part of the new."""
        key = batch[0].pair.name, number
        stack = self._stacks.get(key)
        if stack is not None and stack.state is before and after.keys() == before.keys():
            for name, value in after.items():
                if value is not before[name]:
                    before[name].copy_(value)
            return
        after = {name: value.contiguous() for name, value in after.items()}  # lest a shared part be a copy
        split = {name: value.split(sizes) for name, value in after.items()}
        kept = [each.keep(number, {name: parts[i] for name, parts in split.items()}) for i, each in enumerate(batch)]
        self._stacks[key] = _Stack(after, kept)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stacks": {}}  # a copy's own state is elsewhere


@dataclass
class _Stack:
    """State of a batch side by side, and the parts of it that lie with each pair's anchor, by name."""

    state: dict[str, Tensor]
    kept: list[dict[str, Tensor]]

    def is_that_of(self, batch: list[_Open]) -> bool:
        """Whether the pairs still have these parts for their state: a checkpoint may have been loaded since."""
        return len(self.kept) == len(batch) and all(
            each.state.get(name) is part
            for each, parts in zip(batch, self.kept, strict=True)
            for name, part in parts.items()
        )


class _Open:
    """A pair during a step: what is trained of it and by which groups, and its values, read and to be written.

    `anchor` is the parameter that holds the state, None where nothing is trained. `moving`: which of A and B has a
    gradient. With sharded parameters, all tensors are this process's share of the heads.
    """

    def __init__(self, optimizer: Paired, pair: Pair, groups: dict[int, ParamGroup]) -> None:
        self.optimizer, self.pair = optimizer, pair
        self.sides = (pair.a, pair.b)
        self.layout = layout_of(pair.parameters)
        held = [p for p in pair.parameters if id(p) in groups]
        self.held = {id(p) for p in held}
        self.trained = {id(p) for p in held if p.grad is not None}
        kept = [p for p in held if self._swap in optimizer.state.get(p, {})]
        self.anchor = (kept or held)[0] if self.trained else None
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
        lacking = [(deficient(a), deficient(b)) for a, b in self.pair.factors(lambda p: _wide(p.detach()))]
        return any(bool(a.any()) for a, _ in lacking) and not any(bool(b.any()) for _, b in lacking)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What pairs of one batch have in common."""
        assert self.anchor is not None
        shapes = self.pair.a.shape[1:], self.pair.b.shape[1:], self.pair.turning, self.moving, self.swapped
        return (
            *shapes,
            *map(id, self.groups),
            frozenset(self._own(0)),
            self.anchor.dtype,
            self.anchor.device,
            self.layout,
        )

    def read(self, copy: bool) -> int:
        """Read values and gradients of A and B, at least float32. The number of heads."""
        wholes = self.wholes = {id(p): whole(self.value(p)) for p in self.pair.parameters}
        found = {id(p): whole(p.grad) for p in self.pair.parameters if p.grad is not None and id(p) in self.trained}
        self.values = [share(_wide(side.read(lambda p: wholes[id(p)], copy)), self.layout) for side in self.sides]
        self.gradients = [
            share(_wide(side.read(lambda p: found.get(id(p)), copy)), self.layout) if moving else torch.empty(0)
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


def batches(opened: Iterable[_Open]) -> Iterator[list[_Open]]:
    """Pairs that can be moved together, up to BATCH numbers at once, in a fixed order."""
    alike: dict[tuple[Any, ...], list[_Open]] = {}
    for each in opened:
        alike.setdefault(each.signature, []).append(each)
    for found in alike.values():
        size = max(prod(factor.shape) for factor in (found[0].pair.a, found[0].pair.b))
        together = max(1, BATCH // max(1, size))
        for start in range(0, len(found), together):
            yield found[start : start + together]


def _one_group(factor: Factor, name: str, trained: set[int], groups: dict[int, ParamGroup]) -> ParamGroup | None:
    """The parameter group that governs a factor: that of its first trained parameter. Those of the others must agree,
    except in weight decay."""
    found = [groups[id(w.parameter)] for w in factor.windows if id(w.parameter) in trained]
    for group in found[1:]:
        for key in GOVERNING:
            if group.get(key) != found[0].get(key):
                raise ValueError(f"parameters of one factor of {name} have different {key}: put them in like groups")
    return found[0] if found else None


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]
