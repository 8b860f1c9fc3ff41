"""A function of states against a change of their frame."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gaugekit.linalg import random_orthogonal


def orthogonal(d: int, determinant: int, generator: torch.Generator) -> Tensor:
    """A random element of O(d), (d, d) in float64, with the determinant asked for."""
    element = random_orthogonal(d, generator)
    if torch.linalg.det(element).sign() != determinant:
        element[0] = -element[0]
    return element


def assert_equivariant(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    tolerance: float = 1e-10,
    invariant: bool = False,
    function_at: Callable[[Tensor], Callable[[Tensor], Tensor]] | None = None,
) -> None:
    """f(X Uᵀ) = f(X) Uᵀ for both determinants of U in O(d), or f(X Uᵀ) = f(X) if `invariant`; d is x's last axis.

    Gradients turn along, so they are compared as well. `function_at(u)` is the function whose own parameters have been
    turned by u, for functions that are covariant only with these.
    """
    generator = torch.Generator().manual_seed(0)
    x = x.detach().double().requires_grad_()
    y = function(x)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((y * weights).sum(), x)
    scale, gradient_scale = y.abs().max().clamp_min(1e-300), gradient.abs().max().clamp_min(1e-300)
    for determinant in (1, -1):
        u = orthogonal(x.shape[-1], determinant, generator)
        turned = (x.detach() @ u.mT).requires_grad_()
        z = (function if function_at is None else function_at(u))(turned)
        (turned_gradient,) = torch.autograd.grad((z * (weights if invariant else weights @ u.mT)).sum(), turned)
        off = (z - (y if invariant else y @ u.mT)).abs().max() / scale
        assert off <= tolerance, f"off by {off:.1e} for a U of determinant {determinant}"
        off = (turned_gradient - gradient @ u.mT).abs().max() / gradient_scale
        assert off <= tolerance, f"gradient off by {off:.1e} for a U of determinant {determinant}"
