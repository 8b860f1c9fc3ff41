"""AdamW with its step scaled by how far a gradient's size stands out of ε.

Legend
------
g                    a gradient; all quantities are per entry of a parameter
m, v                 moving averages of g and g², m̂ and v̂ without their bias to zero: AdamW's
r = √v̂               the size of gradients lately, in their unit, as is ε
a                    the gate's sharpness, a pure number

AdamW's step m̂ / (r + ε) is m̂ / r · σ(log(r/ε)): the sign-like step m̂ / r, through a gate that opens where r passes ε.
Here the gate is σ(a log(r/ε)) = r^a / (r^a + ε^a), and the step

    m̂ / r · σ(a log(r/ε)) = m̂ / (r + ε (r/ε)^(1−a)).

a = 1 is AdamW. A smaller a opens over a wider range: at r = 100 ε AdamW holds 1 % of the step back, a = 1/2 holds 9 %;
at r = ε/100 AdamW lets 1 % of it pass, a = 1/2 lets 9 %.

Source of AdamW: Loshchilov and Hutter, arXiv 1711.05101.
"""

# torch documents its fused operations on lists of tensors under names that begin with an underscore, for this use.
# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from gaugekit.geometry.rows import wide

__all__ = ["GatedAdamW"]


class GatedAdamW(Optimizer):
    """AdamW with the gate above: p ← (1 − lr · weight_decay) p − lr · m̂ / (r + ε (r/ε)^(1−a)).

    Args:
        params, lr, betas, eps, weight_decay, maximize: as `torch.optim.AdamW`'s; eps must be above 0.
        gate: a ≥ 0; 1 is AdamW, 1/2 opens over twice as many decades, 0 halves all steps. Groups may have their own.
        foreach: False takes parameters one by one, which needs less memory; otherwise those of one kind go together.

    Where r = 0 the step is zero, for every a but 1: there it is AdamW's m̂ / ε, and m̂ is zero too unless squares of
    gradients underflow (below 1e-23 in float32). At a = 1 float32 and float64 steps are those of torch's AdamW to
    rounding; half precisions take m and v in their own dtype, as torch does, and compute the step in float32.

    State is "step", "exp_avg" and "exp_avg_sq", as AdamW's, so that its checkpoints load, and keep this gate.

    Raises:
        ValueError: an argument out of range; a checkpoint with amsgrad, or of Adam with coupled weight decay.
        TypeError: complex parameters, or sparse gradients.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        gate: float = 1.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "gate": gate,
            "maximize": maximize,
            "foreach": foreach,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = self.__dict__.get("param_groups", [])  # none yet when a pickle is read, which has gates of its own
        for group, before in zip(state["param_groups"], own, strict=False):
            group.setdefault("gate", before["gate"])
            _check(group)
        super().__setstate__(state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            together: dict[Any, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                count = self._count(p)
                alone = id(p) if group["foreach"] is False else None
                together[type(p), p.device, p.dtype, getattr(p, "device_mesh", None), count, alone].append(p)
            for (*_, count, _), parameters in together.items():
                self._update(parameters, count, group)
        return loss

    def _count(self, p: Tensor) -> int:
        """How many steps p has made, this one included."""
        if p.is_complex() or (p.grad is not None and p.grad.layout != torch.strided):
            raise TypeError("GatedAdamW needs real parameters with dense gradients")
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1
        return int(state["step"])

    def _update(self, parameters: list[Tensor], count: int, group: dict[str, Any]) -> None:
        lr, eps, gate, (beta1, beta2) = float(group["lr"]), group["eps"], group["gate"], group["betas"]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        m, v = ([self.state[p][key] for p in parameters] for key in ("exp_avg", "exp_avg_sq"))
        if group["weight_decay"] != 0:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(m, gradients, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, value=1 - beta2)
        r = list(torch._foreach_sqrt([wide(x) for x in v]))
        torch._foreach_div_(r, math.sqrt(1 - beta2**count))
        if gate == 1:
            torch._foreach_add_(r, eps)
        else:
            floor = torch._foreach_div(r, eps)
            torch._foreach_pow_(floor, 1 - gate)
            torch._foreach_mul_(floor, eps)
            torch._foreach_add_(r, floor)
            for x in r:
                x.masked_fill_(x == 0, math.inf)
        torch._foreach_addcdiv_(parameters, [wide(x) for x in m], r, value=-lr / (1 - beta1**count))


def _check(group: dict[str, Any]) -> None:
    lr, eps, gate = float(group["lr"]), group["eps"], group["gate"]
    if not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"lr must be finite and at least 0, got {lr}")
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas must be two numbers in [0, 1), got {group['betas']}")
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps must be finite and above 0, the gate compares with it, got {eps}")
    if not (math.isfinite(group["weight_decay"]) and group["weight_decay"] >= 0):
        raise ValueError(f"weight_decay must be finite and at least 0, got {group['weight_decay']}")
    if not (math.isfinite(gate) and gate >= 0):
        raise ValueError(f"gate must be finite and at least 0, got {gate}")
    if group.get("amsgrad", False):
        raise ValueError("GatedAdamW has no amsgrad: load a state without it")
    if not group.get("decoupled_weight_decay", True):
        raise ValueError("GatedAdamW decouples weight decay: load a state of AdamW, not of Adam")
