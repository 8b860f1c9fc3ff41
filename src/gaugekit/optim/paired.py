"""What optimizers that know pairs share: pairs are read, moved together in batches and written back, and every other
parameter goes to one of torch's optimizers.

Pairs of like shape are moved in one batch: no loop over heads, and none over small adapters. Of a pair with frozen
parameters the others move. State lies with the first parameter of a pair that requires gradients, under the pair's
name, and stays there.
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

from gaugekit.optim.opened import HALF, Opened, ParamGroup
from gaugekit.optim.pairs import Pair, check_cover, check_held
from gaugekit.optim.wrapping import Wrapper, check_gradients

__all__ = ["Moved", "Paired", "ParamGroup"]

BATCH = 2**18
"""Numbers of one factor in a batch: small pairs are moved together, large ones one by one, in cache."""

MASTER = "master"


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
            of pairs is float32 all the same, but what a step adds below a half's rounding is lost. A parameter's master
            is made at its first step and written over whatever is put in the parameter later, loaded weights say.

    Raises:
        ValueError: pairs that overlap, share a name, cover a parameter only in part, or can be trained without a
            parameter in `inner`: `fully_shard`, or a move from the meta device, puts new parameters in a model.
    """

    def __init__(self, inner: Optimizer, pairs: Iterable[Pair], masters: bool = False) -> None:
        super().__init__(inner)
        self.pairs = tuple(pairs)
        self.masters = masters
        self._stacks: dict[tuple[str, int], _Stack] = {}
        check_held(self.pairs, {id(p) for _, p in self.parameters()})
        check_cover(self.pairs)

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
            opened = [Opened(self, pair, groups) for pair in self.pairs]
            check_gradients((pair.name, p) for pair in self.pairs for p in pair.parameters if id(p) in groups)
            paired = {id(p): p for pair in self.pairs for p in pair.parameters}
            self._step_others(paired)
            for batch in batches([each for each in opened if each.anchor is not None]):
                self._step_batch(batch)
            self._count(paired)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which casts state to the parameter's dtype; what is float32 beside half parameters stays so."""
        given: list[dict[str, Any]] = []
        last = self.register_load_state_dict_pre_hook(lambda _, state: given.append(state))  # as other hooks leave it
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        for group, saved in zip(self.param_groups, given[0]["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                for key, value in given[0]["state"].get(index, {}).items():
                    if parameter.dtype in HALF and isinstance(value, Tensor) and value.dtype == torch.float32:
                        self.state[parameter][key] = value.to(parameter.device, copy=True)

    def value(self, parameter: Tensor) -> Tensor:
        """The parameter, or its float32 master, which is made with the first gradient."""
        if not self.masters or parameter.dtype not in HALF:
            return parameter.detach()
        if MASTER not in self.state.get(parameter, {}):
            if parameter.grad is None:
                return parameter.detach()
            self.state[parameter][MASTER] = parameter.detach().float()
        return self.state[parameter][MASTER]

    def _count(self, paired: dict[int, Tensor]) -> None:
        """An entry of state for every parameter with a gradient, as checkpoints of torch.distributed demand; in pairs
        with "step", which torch's Adam demands of every entry, be its parameter idle and hold its pair's state only."""
        if not paired:
            return
        for parameter in (p for group in self.param_groups for p in group["params"]):
            trained = parameter.grad is not None
            if trained or self.state.get(parameter):
                state = self.state[parameter]
                if id(parameter) in paired:
                    state.setdefault("step", torch.zeros(())).add_(int(trained))

    def _step_others(self, paired: dict[int, Tensor]) -> None:
        """The inner optimizer's step on parameters outside pairs: it passes over parameters without a gradient, and is
        given masters in place of halves."""
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

    def _step_batch(self, batch: list[Opened]) -> None:
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

    def _stacked(self, batch: list[Opened], number: int) -> dict[str, Tensor]:
        """The state of one block of all pairs of a batch, side by side: as the last step left it, or put together."""
        stack = self._stacks.get((batch[0].pair.name, number))
        if stack is None or not stack.is_that_of(batch):
            states = [each.load(number) for each in batch]
            return {key: _side_by_side([state[key] for state in states]) for key in states[0]}
        return stack.state

    def _keep(
        self,
        batch: list[Opened],
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

    def is_that_of(self, batch: list[Opened]) -> bool:
        """Whether the pairs still have these parts for their state: a checkpoint may have been loaded since."""
        return len(self.kept) == len(batch) and all(
            each.state.get(name) is part
            for each, parts in zip(batch, self.kept, strict=True)
            for name, part in parts.items()
        )


def batches(opened: Iterable[Opened]) -> Iterator[list[Opened]]:
    """Pairs that can be moved together, up to BATCH numbers at once, in a fixed order."""
    alike: dict[tuple[Any, ...], list[Opened]] = {}
    for each in opened:
        alike.setdefault(each.signature, []).append(each)
    for found in alike.values():
        size = max(prod(factor.shape) for factor in (found[0].pair.a, found[0].pair.b))
        together = max(1, BATCH // max(1, size))
        for start in range(0, len(found), together):
            yield found[start : start + together]


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]
