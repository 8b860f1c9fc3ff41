"""Learning rates over the course of training."""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["logarithmic_decay"]


def logarithmic_decay(
    optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, rho: float = 0.1, final: float = 0.0
) -> LambdaLR:
    """η(r) = η_min + (η_max − η_min) [1 − log(1 + r/ρ) / log(1 + 1/ρ)] after a linear warm-up.

    Args:
        optimizer: each of its groups has its own η_max, the lr it has now, and η_min = final · η_max.
        total_steps: T, after which the rate is η_min; it stays there.
        warmup_steps: W; step t < W has η_max (t + 1) / (W + 1), so that no step is lost to a rate of zero.
        rho: ρ > 0, in shares of the decay: it falls steeply until r is some ρ. math.inf, the limit, is linear decay.
        final: η_min / η_max, from 0 to 1.

    Progress is r = (t − W) / (T − W), from 0 to 1, of step t = 0, 1, ...; η is exactly η_max at t = W and η_min at T.
    Call `step()` of the result once after each step of the optimizer.

    Raises: ValueError for T < 1, W outside [0, T), ρ not above 0, or `final` outside [0, 1].
    """
    if total_steps < 1:
        raise ValueError(f"total_steps must be at least 1, got {total_steps}")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warmup_steps must be from 0 to total_steps - 1 = {total_steps - 1}, got {warmup_steps}")
    if not (rho > 0 and math.isfinite(1 / rho)):
        raise ValueError(f"rho must be above 0, and math.inf for a linear decay, got {rho}")
    if not 0 <= final <= 1:
        raise ValueError(f"final is a share of the largest rate, from 0 to 1, got {final}")
    return LambdaLR(optimizer, partial(_factor, total=total_steps, warmup=warmup_steps, rho=rho, final=final))


def _factor(step: int, total: int, warmup: int, rho: float, final: float) -> float:
    """η(step) / η_max."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    r = min((step - warmup) / (total - warmup), 1.0)
    fallen = r if math.isinf(rho) else math.log1p(r / rho) / math.log1p(1 / rho)
    return (1 - fallen) + final * fallen
