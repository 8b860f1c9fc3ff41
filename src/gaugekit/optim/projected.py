"""Any optimizer, without the part of its steps that runs along the orbits of pairs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from torch import Tensor
from torch.optim import Optimizer

from gaugekit.geometry.rows import wide
from gaugekit.optim.horizontal import Metric, horizontal_part
from gaugekit.optim.pairs import Pair, check_cover, check_held
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
        TypeError, ValueError: as `Wrapper`; a negative `rebalance`; an unknown metric; a pair of which the optimizer
            holds nothing; pairs that overlap. From `step`, ValueError: a gradient of a pair has NaN or inf entries;
            nothing has moved then.
    """

    def __init__(
        self, inner: Optimizer, pairs: Iterable[Pair], metric: Metric = "euclidean", rebalance: int = 0
    ) -> None:
        super().__init__(inner)
        if rebalance < 0:
            raise ValueError(f"rebalance is a number of steps, or 0 for never, got {rebalance}")
        if metric not in get_args(Metric):  # not after the first step has been taken
            raise ValueError(f"metric must be one of {', '.join(get_args(Metric))}, got {metric!r}")
        self.pairs, self.rebalance = tuple(pairs), rebalance
        check_held(self.pairs, {id(p) for _, p in self.parameters()})
        check_cover(self.pairs, whole_parameters=False)  # two projections of one entry would undo each other
        self.metric: Metric = metric
        self.points: list[tuple[Pair, list[Tensor]]] = []

    def before(self) -> None:
        held = {id(p) for _, p in self.parameters()}
        moving = [p for p in self.pairs if all(id(x) in held and x.grad is not None for x in p.parameters)]
        check_gradients((pair.name, p) for pair in moving for p in pair.parameters)
        self.points = [(pair, [wide(x) for x in pair.read()]) for pair in moving]

    def after(self) -> None:
        first = self.param_groups[0]
        first[STEPS] = first.get(STEPS, 0) + 1
        for pair, (a, b) in self.points:
            new_a, new_b = (wide(x) for x in pair.read())
            for block in pair.blocks:
                point_a, point_b = block.take(a), block.take(b)
                step_a, step_b = block.take(new_a) - point_a, block.take(new_b) - point_b
                step_a, step_b = horizontal_part(point_a, point_b, step_a, step_b, metric=self.metric)
                block.put(new_a, point_a + step_a)
                block.put(new_b, point_b + step_b)
            pair.write(new_a, new_b)
            if self.rebalance and first[STEPS] % self.rebalance == 0:
                self._rebalance(pair)
        self.points = []

    def _rebalance(self, pair: Pair) -> None:
        moves = pair.balancing()
        pair.move_by_(moves)
        for key in MOMENTA:
            if all(key in self.state[p] for p in pair.parameters):
                pair.move_by_([(t, s) for s, t in moves], lambda p, key=key: self.state[p][key])
