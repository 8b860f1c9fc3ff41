"""Learning rates over the course of training: a linear warm-up, then one of three ways to go on.

All of them give each group of an optimizer its own largest rate η_max, the lr it has now, and η_min = final · η_max.
With T = `total_steps` and W = `warmup_steps`, step t < W has η_max (t + 1) / (W + 1), so that no step is lost to a rate
of zero; after it progress is r = (t − W) / (T − W), from 0 to 1, and

    η(r) = η_max (1 − s(r)) + η_min s(r),   s(0) = 0, s(1) = 1.

η is exactly η_max at t = W and η_min at t = T, and stays there. Call `step()` of the result once after each step of the
optimizer. ValueError for T < 1, W outside [0, T), or `final` outside [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["constant", "cosine_decay", "logarithmic_decay"]


def constant(optimizer: Optimizer, warmup_steps: int = 0) -> LambdaLR:
    """η_max from step W on. ValueError for W < 0."""
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be at least 0, got {warmup_steps}")
    return _scheduler(optimizer, warmup_steps + 1, warmup_steps, 1.0, _level)


def cosine_decay(optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> LambdaLR:
    """s(r) = (1 − cos π r) / 2, which is level at both ends.

    Source: Loshchilov and Hutter, arXiv 1608.03983, without restarts.
    """
    return _scheduler(optimizer, total_steps, warmup_steps, final, _cosine)


def logarithmic_decay(
    optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, rho: float = 0.1, final: float = 0.0
) -> LambdaLR:
    """s(r) = log(1 + r/ρ) / log(1 + 1/ρ), which falls steeply until r is some ρ.

    Args:
        rho: ρ > 0, in shares of the decay. math.inf, the limit, is linear decay. ValueError where it is not above 0.
    """
    if not (rho > 0 and math.isfinite(1 / rho)):
        raise ValueError(f"rho must be above 0, and math.inf for a linear decay, got {rho}")
    return _scheduler(optimizer, total_steps, warmup_steps, final, partial(_logarithmic, rho=rho))


def _scheduler(
    optimizer: Optimizer, total: int, warmup: int, final: float, fallen: Callable[[float], float]
) -> LambdaLR:
    if total < 1:
        raise ValueError(f"total_steps must be at least 1, got {total}")
    if not 0 <= warmup < total:
        raise ValueError(f"warmup_steps must be from 0 to total_steps - 1 = {total - 1}, got {warmup}")
    if not 0 <= final <= 1:
        raise ValueError(f"final is a share of the largest rate, from 0 to 1, got {final}")
    # A partial of functions at the top of a module, which can be pickled.
    return LambdaLR(optimizer, partial(_factor, total=total, warmup=warmup, final=final, fallen=fallen))


def _factor(step: int, total: int, warmup: int, final: float, fallen: Callable[[float], float]) -> float:
    """η(step) / η_max."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    s = fallen(min((step - warmup) / (total - warmup), 1.0))
    return (1 - s) + final * s


def _level(_: float) -> float:
    return 0.0


def _cosine(r: float) -> float:
    return math.sin(math.pi / 2 * r) ** 2


def _logarithmic(r: float, rho: float) -> float:
    return r if math.isinf(rho) else math.log1p(r / rho) / math.log1p(1 / rho)
