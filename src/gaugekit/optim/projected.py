"""Any optimizer, without the part of its steps that runs along the orbits of pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from gaugekit.linalg import balance
from gaugekit.optim.horizontal import Metric, horizontal_part
from gaugekit.optim.pairs import Pair
from gaugekit.optim.sharding import layout_of, local, rows_like, whole
from gaugekit.optim.wrapping import MOMENTA, Wrapper, check_gradients

__all__ = ["Horizontal"]

STEPS = "horizontal_steps"
"""Kept in the first parameter group, which a checkpoint holds, so that a resumed run rebalances when it would have."""


class Horizontal(Wrapper):
    """An optimizer whose steps have no part along the orbits of pairs, A → S A, B → S⁻ᴴ B.

    After the inner step, the displacement of every pair is replaced by its horizontal part at the point before:
    products G = BᴴA move as they would have, to first order, on the shortest way. What the inner optimizer remembers is
    its own.

    This does not make a path free of the gauge: Adam's step depends on the coordinates before anything is taken out of
    it (`QuotientAdam` does not). It keeps factors from drifting apart: with "euclidean", A Aᴴ − B Bᴴ changes by the
    square of the step only, so momentum, weight decay and elementwise scaling no longer unbalance them.

    Pairs with a frozen or unused parameter are left as the inner optimizer moves them: their orbits are not open.

    Args:
        inner: the optimizer, of any class, over parameters that include the pairs'.
        pairs: see `gaugekit.pairs`.
        metric: in which the vertical part is orthogonal to what is kept; see `gaugekit.optim.horizontal`.
        rebalance: every so many steps, move each pair to where A Aᴴ = B Bᴴ, along its orbit, with the inner optimizer's
            momentum (`momentum_buffer`, `exp_avg`), which moves as gradients do. Elementwise second moments cannot be
            moved and stay. 0: never.

    Raises:
        TypeError, ValueError: as `Wrapper`; a negative `rebalance`. From `step`, ValueError: a gradient of a pair has
            NaN or inf entries; nothing has moved then.
    """

    def __init__(
        self, inner: Optimizer, pairs: Iterable[Pair], metric: Metric = "euclidean", rebalance: int = 0
    ) -> None:
        super().__init__(inner)
        if rebalance < 0:
            raise ValueError(f"rebalance is a number of steps, or 0 for never, got {rebalance}")
        self.pairs, self.rebalance = tuple(pairs), rebalance
        self.metric: Metric = metric
        self.points: list[tuple[Pair, Tensor, Tensor]] = []

    def before(self) -> None:
        held = {id(p) for _, p in self.parameters()}
        moving = [p for p in self.pairs if all(id(x) in held and x.grad is not None for x in p.parameters)]
        check_gradients((pair.name, p) for pair in moving for p in pair.parameters)
        self.points = [(pair, *_read(pair)) for pair in moving]

    def after(self) -> None:
        first = self.param_groups[0]
        first[STEPS] = first.get(STEPS, 0) + 1
        for pair, a, b in self.points:
            new_a, new_b = _read(pair)
            for block in pair.blocks:
                point_a, point_b = block.take(a), block.take(b)
                step_a, step_b = block.take(new_a) - point_a, block.take(new_b) - point_b
                step_a, step_b = horizontal_part(point_a, point_b, step_a, step_b, metric=self.metric)
                block.put(new_a, point_a + step_a)
                block.put(new_b, point_b + step_b)
            _write(pair, new_a, new_b)
            if self.rebalance and first[STEPS] % self.rebalance == 0:
                self._rebalance(pair)
        self.points = []

    def _rebalance(self, pair: Pair) -> None:
        a, b = (x.double() for x in _read(pair))
        moves = [balance(block.take(a), block.take(b)) for block in pair.blocks]
        _move(pair, torch.Tensor.detach, moves)
        for key in MOMENTA:
            if all(key in self.state[p] for p in pair.parameters):
                _move(pair, lambda p, key=key: self.state[p][key], [(t, s) for s, t in moves])


def _read(pair: Pair, tensor_of: Callable[[Tensor], Tensor] = torch.Tensor.detach) -> tuple[Tensor, Tensor]:
    """A and B, whole, at least float32."""
    a, b = (factor.read(lambda p: whole(tensor_of(p))) for factor in (pair.a, pair.b))
    return (a, b) if a.dtype in (torch.float32, torch.float64) else (a.float(), b.float())


def _write(pair: Pair, a: Tensor, b: Tensor, tensor_of: Callable[[Tensor], Tensor] = torch.Tensor.detach) -> None:
    wholes = {id(p): whole(tensor_of(p)) for p in pair.parameters}
    for factor, value in ((pair.a, a), (pair.b, b)):
        factor.write(value, lambda p: wholes[id(p)])
    for parameter in pair.parameters if layout_of(pair.parameters) is not None else ():
        into = tensor_of(parameter)
        local(into).copy_(rows_like(wholes[id(parameter)], into))


def _move(pair: Pair, tensor_of: Callable[[Tensor], Tensor], moves: list[tuple[Tensor, Tensor]]) -> None:
    """A → S A and B → T B with (S, T) for every block, of the factors in `tensor_of(parameter)`."""
    a, b = (x.double() for x in _read(pair, tensor_of))
    for block, (s, t) in zip(pair.blocks, moves, strict=True):
        block.put(a, s @ block.take(a))
        block.put(b, t @ block.take(b))
    _write(pair, a, b, tensor_of)
