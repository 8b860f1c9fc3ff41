"""The largest curvature of a loss in the parameters that a model has, as they are or as Adam scales them.

H is the Hessian of the mean loss of one batch; tokens and targets (b, n).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from gaugekit.errors import TrainingError
from gaugekit.training.steps import IGNORED

__all__ = ["adam_limit", "adam_scales", "largest"]

TOLERANCE, VECTORS, RESTARTS = 1e-3, 10, 100


def largest(
    model: nn.Module, batch: tuple[Tensor, Tensor], scales: Mapping[Tensor, Tensor] | None = None, seed: int = 0
) -> float:
    """The largest eigenvalue of H, or of S H S, with its sign: a negative one that is larger in size does not count.

    By Lanczos steps from a random vector of `seed`, until the residual is a thousandth of the eigenvalue, whose own
    error is smaller. The vectors are float64, products with H what the model's dtype makes of them.

    Args:
        scales: the diagonal S, by parameter.

    Raises: TrainingError where a product with H is not finite; ArpackNoConvergence after 100 restarts, where rounding
        is larger than the tolerance.
    """
    tokens, targets = batch
    parameters = [p for p in model.parameters() if p.requires_grad]
    sizes = [p.numel() for p in parameters]
    start = torch.randn(sum(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    with sdpa_kernel(SDPBackend.MATH):  # fused kernels have no second derivative
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)

        def product(x: np.ndarray) -> np.ndarray:
            parts = torch.from_numpy(x.ravel()).split(sizes)
            vector = [scaled(p, part.view_as(p).to(p)) for p, part in zip(parameters, parts, strict=True)]
            image = torch.autograd.grad(gradients, parameters, vector, retain_graph=True, materialize_grads=True)
            found = [scaled(p, y).double().flatten() for p, y in zip(parameters, image, strict=True)]
            wide = torch.cat(found).numpy()
            if not np.isfinite(wide).all():
                raise TrainingError("the curvature of the loss is not finite")
            return wide

        def scaled(parameter: Tensor, x: Tensor) -> Tensor:
            return x if scales is None else scales[parameter] * x

        first = start.numpy()
        if not product(first).any():
            return 0.0  # H is zero, of which ARPACK makes an error
        operator = LinearOperator(shape=(len(first), len(first)), dtype=np.float64, matvec=product)  # type: ignore[call-arg]
        options: Mapping[str, Any] = {"tol": TOLERANCE, "maxiter": RESTARTS, "ncv": min(VECTORS, len(first))}
        values = eigsh(operator, 1, which="LA", v0=first, return_eigenvectors=False, **options)
    return float(values[0])


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
