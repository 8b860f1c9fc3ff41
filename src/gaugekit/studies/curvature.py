"""The largest curvature of a loss in the parameters that a model has, as they are or as Adam scales them.

H is the Hessian of the mean loss of one batch; tokens and targets (b, n).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from gaugekit.training.steps import IGNORED

__all__ = ["adam_limit", "adam_scales", "largest"]


def largest(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    scales: Mapping[Tensor, Tensor] | None = None,
    iterations: int = 20,
    seed: int = 0,
) -> float:
    """The eigenvalue of H, or of S H S, that is largest in size, by power iteration from a random vector: from below,
    good to some percent. `scales`: the diagonal S, by parameter."""
    tokens, targets = batch
    parameters = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    vector = [torch.randn(p.shape, generator=generator).to(p) for p in parameters]

    def scaled(x: Sequence[Tensor]) -> list[Tensor]:
        return list(x) if scales is None else [scales[p] * y for p, y in zip(parameters, x, strict=True)]

    def product(x: Sequence[Tensor], y: Sequence[Tensor]) -> float:
        return math.fsum(float(torch.dot(a.flatten(), b.flatten())) for a, b in zip(x, y, strict=True))

    with sdpa_kernel(SDPBackend.MATH):  # fused kernels have no second derivative
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
        found = 0.0
        for _ in range(iterations):
            size = math.sqrt(product(vector, vector))
            if size == 0:  # H is zero on all that is left
                return 0.0
            vector = [v / size for v in vector]
            image = torch.autograd.grad(
                gradients, parameters, scaled(vector), retain_graph=True, materialize_grads=True
            )
            image = scaled(image)
            found, vector = product(vector, image), image
    return found


def adam_scales(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """S by parameter, such that Adam without momentum is gradient descent in S⁻¹ times its parameters:
    (√v + eps)^(-1/2), of the bias-corrected mean square v of the gradient."""
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:  # it has had no gradient, and stands still
                found[parameter] = torch.zeros_like(parameter)
                continue
            v = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
            found[parameter] = (v.sqrt() + group["eps"]).rsqrt()
    return found


def adam_limit(beta: float, rate: float) -> float:
    """The eigenvalue of S H S beyond which Adam with momentum β₁ is unstable on a quadratic, (2 + 2 β₁) / ((1 − β₁) η).

    Source: Cohen et al., arXiv 2207.14484.
    """
    return (2 + 2 * beta) / ((1 - beta) * rate)
