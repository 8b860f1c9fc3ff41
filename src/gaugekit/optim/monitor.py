"""What an optimizer's steps do to pairs of factors, step by step: how much of them does nothing to the function.

Legend
------
A (N, r, m), B (N, r, n)   factors of G = BᴴA before the step; dA, dB what the step adds; ∂A, ∂B gradients
K, L (N, r, r)             A Aᴴ and B Bᴴ
mixed metric               |(dA, dB)|² = tr(L dA dAᴴ) + tr(K dB dBᴴ), unchanged by A → S A, B → S⁻ᴴ B  [HS]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, nan, sqrt
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gaugekit.geometry.rows import wide
from gaugekit.linalg import double
from gaugekit.optim.frames import reduced
from gaugekit.optim.horizontal import drift, raised, vertical_part
from gaugekit.optim.normal_equations import dot
from gaugekit.optim.pairs import Pair
from gaugekit.optim.sharpness import Sharpness, sharpness

__all__ = ["Motion", "OrbitMonitor", "OrbitRecord"]

Factors = list[tuple[Tensor, Tensor]]
"""(A, B) of every block of a pair."""


@dataclass(frozen=True)
class Motion:
    """One step of one pair, or of all. NaN where there is nothing to divide by, or where factors are not finite.

    Args:
        vertical_share: of the step's squared length, the share along orbits, from 0 to 1, in the Euclidean metric.
            Depends on the gauge. What rounding of the parameters adds to the step is part of it.
        vertical_share_mixed: the same in the mixed metric: of the motion of G that the factors' parts would make by
            themselves, the share that cancels between them. Unchanged when factors and step move along with an S. At
            LoRA's start, B = 0, A moves nothing and counts as such.
        gradient_norm: (|∂A|² + |∂B|²)^½, in the unit of the loss over the factors'. Depends on the gauge.
        quotient_gradient_norm: (tr(∂Aᴴ L⁻¹ ∂A) + tr(∂Bᴴ K⁻¹ ∂B))^½, in the unit of the loss over that of G; a property
            of the function.
        charge_drift: how far A Aᴴ − B Bᴴ has moved since the start, |change| / |A Aᴴ + B Bᴴ|, the largest over heads;
            gradient flow conserves it. Depends on the gauge, as does
        imbalance: |A Aᴴ − B Bᴴ| / |A Aᴴ + B Bᴴ|, the largest over heads; from 0 to 1.
    """

    vertical_share: float
    vertical_share_mixed: float
    gradient_norm: float
    quotient_gradient_norm: float
    charge_drift: float
    imbalance: float


@dataclass(frozen=True)
class OrbitRecord:
    """One monitored step: `total` over all pairs, `pairs` by name; charges and imbalance are those after the step, all
    else belongs to the point before it."""

    step: int
    total: Motion
    pairs: dict[str, Motion]
    sharpness: Sharpness | None = None

    def to_dict(self) -> dict[str, Any]:
        """Nested, for JSON: numbers that are NaN or infinite become None."""
        return _plain(asdict(self))

    def metrics(self) -> dict[str, float]:
        """Flat, for loggers: "orbits/charge_drift", "orbits/sharpness/invariant", "orbits/layers.0.vo/imbalance", ...;
        without what is NaN or infinite."""
        groups = {"": self.total, **{f"{name}/": motion for name, motion in self.pairs.items()}}
        sharp = {} if self.sharpness is None else {"sharpness/": self.sharpness}
        named = [(f"orbits/{k}{key}", v) for k, group in {**groups, **sharp}.items() for key, v in vars(group).items()]
        return {key: value for key, value in named if isfinite(value)}


class OrbitMonitor:
    """Watches an optimizer's steps, through hooks, without changing them.

        with OrbitMonitor(optimizer, find_pairs(model), every=10, path="orbits.jsonl") as monitor:
            train()
        monitor.history[-1].total.vertical_share_mixed

        OrbitMonitor(optimizer, pairs, log=wandb.log)     # after wandb.init(...)
        OrbitMonitor(optimizer, pairs, log=trackio.log)   # after trackio.init(...)

    A monitored step costs a copy of the pairs' parameters and, in float64, several products with them and r × r
    eigenvectors for each head: many times an Adam step on them, so choose `every`. Other steps cost nothing.
    Gradients are read when the step is done, so they must be those that it took: optimizers that evaluate a closure
    several times (LBFGS) leave others. A step that is refused is not counted. Copies of the optimizer are not watched.

    With sharded parameters (FSDP2) factors are made whole, one pair at a time, so every process must have a monitor;
    give `path` and `log` to one of them.

    Args:
        optimizer: any; of one that wraps another (`Horizontal`), the outer.
        pairs: see `gaugekit.pairs`. Parameters that do not move, or have no gradient, count as such.
        every: steps 0, every, 2 · every, ... are monitored. `step`, the number of the next one, can be set: after a
            restart, say.
        path: a file to which each record is appended, one line of JSON, see `OrbitRecord.to_dict`.
        log: is called with (`OrbitRecord.metrics()`, step).
        loss: evaluates the loss on a fixed batch; then `sharpness` is measured before each monitored step, at the cost
            of five or so evaluations.

    Raises:
        ValueError: no pairs, two of one name, `every` below 1, sharded parameters together with `loss`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pairs: Iterable[Pair],
        every: int = 1,
        path: str | PathLike[str] | None = None,
        log: Callable[[dict[str, float], int], Any] | None = None,
        loss: Callable[[], Tensor] | None = None,
    ) -> None:
        self.pairs = tuple(pairs)
        names = [pair.name for pair in self.pairs]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a monitor needs pairs, each of its own name, got {', '.join(names) or 'none'}")
        if every < 1:
            raise ValueError(f"every must be 1 or more steps, got {every}")
        if loss is not None and any(isinstance(p, DTensor) for pair in self.pairs for p in pair.parameters):
            raise ValueError("parameters are sharded: sharpness needs whole ones, so leave out loss")
        self.every, self.path, self.log, self.loss = every, path, log, loss
        self.step = 0
        self.history: list[OrbitRecord] = []
        if path is not None:
            open(path, "a").close()  # a wrong path is better found now
        # r × r matrices with the Gram matrices of the start are all that is kept of it.
        self._start = [[(reduced(double(a)), reduced(double(b))) for a, b in _values(pair)] for pair in self.pairs]
        self._before: tuple[dict[int, Tensor], Sharpness | None] | None = None
        self._hooks = (optimizer.register_step_pre_hook(self._pre), optimizer.register_step_post_hook(self._post))

    def detach(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> OrbitMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _pre(self, *_: object) -> None:
        self._before = None
        if self.step % self.every == 0:
            kept = {id(p): p.detach().clone() for pair in self.pairs for p in pair.parameters}
            sharp = None
            if self.loss is not None:
                finite = all(bool(torch.isfinite(p).all()) for p in kept.values())
                sharp = sharpness(self.loss, self.pairs) if finite else Sharpness(nan, nan, nan)
            self._before = kept, sharp

    @torch.no_grad()
    def _post(self, *_: object) -> None:
        number, self.step = self.step, self.step + 1
        if self._before is None:
            return
        kept, sharp = self._before
        self._before = None
        rows = torch.stack([_measure(pair, start, kept) for pair, start in zip(self.pairs, self._start, strict=True)])
        total = torch.cat([rows[:, :SUMS].sum(0), rows[:, SUMS:].amax(0)])
        by_name = {pair.name: _motion(row) for pair, row in zip(self.pairs, rows.tolist(), strict=True)}
        record = OrbitRecord(number, _motion(total.tolist()), by_name, sharp)
        self.history.append(record)
        if self.path is not None:
            with open(self.path, "a") as file:
                file.write(json.dumps(record.to_dict(), allow_nan=False) + "\n")
        if self.log is not None:
            self.log(record.metrics(), number)


SUMS = 6
"""Of the numbers that `_measure` finds, the first are summed over heads, and of the others the largest is taken."""


def _measure(pair: Pair, start: Factors, kept: dict[int, Tensor]) -> Tensor:
    """(8,) float64: squared lengths of the vertical part and of the step, Euclidean and then mixed, of the gradient and
    of the raised one; the drift and the imbalance."""
    before, after = _values(pair, lambda p: kept[id(p)]), _values(pair)
    slopes = _values(pair, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
    rows = []
    for origin, (a, b), (a_new, b_new), (grad_a, grad_b) in zip(start, before, after, slopes, strict=True):
        if not bool(torch.isfinite(a).all() & torch.isfinite(b).all()):
            return torch.full((SUMS + 2,), torch.nan, dtype=torch.float64)
        step = a_new - a, b_new - b
        row = [_square(v) for v in (vertical_part(a, b, *step), step)]
        # Seen through the partner: tr(L dA dAᴴ) = |Rᴴ dA|² with R Rᴴ = L.
        seen = reduced(b).mH, reduced(a).mH
        for v in (vertical_part(a, b, *step, metric="mixed"), step):
            row.append(_square([s @ x for s, x in zip(seen, v, strict=True)]))
        xi = raised(a, b, grad_a, grad_b, "mixed")
        row += [_square((grad_a, grad_b)), sum(_dot(x, g) for x, g in zip(xi, (grad_a, grad_b), strict=True))]
        now = double(a_new), double(b_new)
        nothing = torch.zeros_like(now[0]), torch.zeros_like(now[1])
        row += [_largest(drift(origin, now)), _largest(drift(nothing, now))]  # imbalance: all of A Aᴴ − B Bᴴ
        rows.append(torch.stack(row))
    blocks = torch.stack(rows)
    return torch.cat([blocks[:, :SUMS].sum(0), blocks[:, SUMS:].amax(0)]).cpu()


def _motion(row: Sequence[float]) -> Motion:
    vertical, step, vertical_mixed, step_mixed, gradient, quotient, moved, imbalance = row
    return Motion(
        vertical_share=vertical / step if step else nan,
        vertical_share_mixed=vertical_mixed / step_mixed if step_mixed else nan,
        gradient_norm=sqrt(gradient),
        quotient_gradient_norm=sqrt(max(quotient, 0.0)),
        charge_drift=moved,
        imbalance=imbalance,
    )


def _values(pair: Pair, tensor_of: Callable[[Tensor], Tensor] = torch.Tensor.detach) -> Factors:
    return pair.factors(lambda p: wide(tensor_of(p)))


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return dot(double(x), double(y)).sum()


def _square(tangent: Iterable[Tensor]) -> Tensor:
    return torch.stack([_dot(x, x) for x in tangent]).sum()


def _largest(x: Tensor) -> Tensor:
    return torch.cat([x.flatten(), x.new_zeros(1)]).amax()


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    return None if isinstance(x, float) and not isfinite(x) else x
