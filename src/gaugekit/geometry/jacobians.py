"""Closed-form derivatives of LayerNorm, RMSNorm, DyT and Derf, and products with them that form no matrix.

Legend
------
x, t, c    (..., d)      states, tangents and cotangents
J          (..., d, d)   ∂y_i / ∂x_j for y as in `normalization`; it does not depend on the bias
P, s, γ, ε               as in `normalization`: P = I − 1 1ᵀ / d, x_c = P x, s² = mean(x_c²) + ε or mean(x²) + ε

`*_jvp` is J t and `*_vjp` is Jᵀ c. Where s = 0 all of them are zero. What `normalization` says of ε, dtypes, ranges and
errors holds here, and its sources are those of these formulas. Functions are differentiable in all tensor arguments, to
every order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gaugekit.geometry.rows import Kind, as_rows, check_shape, normalize, plus, prepare, subtract_mean, times, weighted

__all__ = [
    "derf_derivative",
    "derf_jacobian",
    "derf_jvp",
    "derf_vjp",
    "dyt_derivative",
    "dyt_jacobian",
    "dyt_jvp",
    "dyt_vjp",
    "layer_norm_jacobian",
    "layer_norm_jvp",
    "layer_norm_vjp",
    "rms_norm_jacobian",
    "rms_norm_jvp",
    "rms_norm_vjp",
]


# --- LayerNorm and RMSNorm ----------------------------------------------------------------------------------


def layer_norm_jacobian(x: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """∂y_i/∂x_j = (γ_i / s) (P − x_c x_cᵀ / (d s²))_ij, (..., d, d). Arguments and errors as `layer_norm`.

    J 1 = 0 for every ε, J x_c = 0 at ε = 0: rank d − 2 there.
    """
    return _jacobian(x, weight, eps, "layer")


def rms_norm_jacobian(x: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """∂y_i/∂x_j = (γ_i / s) (I − x xᵀ / (d s²))_ij, (..., d, d). J x = 0 at ε = 0: rank d − 1 there."""
    return _jacobian(x, weight, eps, "rms")


def layer_norm_jvp(x: Tensor, tangent: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """J t, (..., d), for a tangent t (..., d), in O(d)."""
    return weighted(_symmetric_part(x, as_rows(tangent), eps, "layer"), weight).to(x.dtype)


def layer_norm_vjp(x: Tensor, cotangent: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Jᵀ c, (..., d), for a cotangent c (..., d), in O(d)."""
    return _symmetric_part(x, weighted(as_rows(cotangent), weight), eps, "layer").to(x.dtype)


def rms_norm_jvp(x: Tensor, tangent: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """J t, (..., d), for a tangent t (..., d), in O(d)."""
    return weighted(_symmetric_part(x, as_rows(tangent), eps, "rms"), weight).to(x.dtype)


def rms_norm_vjp(x: Tensor, cotangent: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Jᵀ c, (..., d), for a cotangent c (..., d), in O(d)."""
    return _symmetric_part(x, weighted(as_rows(cotangent), weight), eps, "rms").to(x.dtype)


def _jacobian(x: Tensor, weight: Tensor | None, eps: float, kind: Kind) -> Tensor:
    n, root, scale, zero = normalize(prepare(x, kind), eps)
    d = n.shape[-1]
    flat = torch.eye(d, dtype=n.dtype, device=n.device) - (1 / d if kind == "layer" else 0.0)
    inner = (flat - n.unsqueeze(-1) * n.unsqueeze(-2) / d) / root.unsqueeze(-1)
    inner = torch.where(zero.unsqueeze(-1), 0.0, inner) / scale.unsqueeze(-1)
    return (inner if weight is None else check_shape(weight, d).to(inner).unsqueeze(-1) * inner).to(x.dtype)


def _symmetric_part(x: Tensor, vector: Tensor, eps: float, kind: Kind) -> Tensor:
    """(1/s) (P v − n (n·v) / d), or with I for P: the Jacobian without γ times a vector."""
    n, root, scale, zero = normalize(prepare(x, kind), eps)
    flat = subtract_mean(vector) if kind == "layer" else vector
    inner = (flat - n * (n * flat).mean(-1, keepdim=True)) / root
    return torch.where(zero, 0.0, inner) / scale


# --- DyT and Derf -------------------------------------------------------------------------------------------


def dyt_derivative(x: Tensor, alpha: float | Tensor, weight: Tensor | None = None) -> Tensor:
    """∂y_i/∂x_i = γ_i α / cosh²(α x_i), (..., d): the diagonal of the Jacobian, which is all there is."""
    z = 2 * times(alpha, as_rows(x))
    steepness = 4 * torch.sigmoid(z) * torch.sigmoid(-z)  # 1 − tanh² would round to 0 for large arguments
    return weighted(times(alpha, steepness), weight).to(x.dtype)


def derf_derivative(x: Tensor, alpha: float | Tensor, shift: float | Tensor, weight: Tensor | None = None) -> Tensor:
    """∂y_i/∂x_i = γ_i α (2/√π) exp(−(α x_i + s)²), (..., d): the diagonal of the Jacobian."""
    z = plus(times(alpha, as_rows(x)), shift)
    return weighted(times(alpha, 2 / math.sqrt(math.pi) * torch.exp(-z.square())), weight).to(x.dtype)


def dyt_jacobian(x: Tensor, alpha: float | Tensor, weight: Tensor | None = None) -> Tensor:
    """`dyt_derivative` on the diagonal of (..., d, d)."""
    return torch.diag_embed(dyt_derivative(x, alpha, weight))


def derf_jacobian(x: Tensor, alpha: float | Tensor, shift: float | Tensor, weight: Tensor | None = None) -> Tensor:
    """`derf_derivative` on the diagonal of (..., d, d)."""
    return torch.diag_embed(derf_derivative(x, alpha, shift, weight))


def dyt_jvp(x: Tensor, vector: Tensor, alpha: float | Tensor, weight: Tensor | None = None) -> Tensor:
    """J t, (..., d). J is diagonal, so that `dyt_vjp` is the same function."""
    return (dyt_derivative(as_rows(x), alpha, weight) * as_rows(vector)).to(x.dtype)


def derf_jvp(
    x: Tensor, vector: Tensor, alpha: float | Tensor, shift: float | Tensor, weight: Tensor | None = None
) -> Tensor:
    """J t, (..., d). J is diagonal, so that `derf_vjp` is the same function."""
    return (derf_derivative(as_rows(x), alpha, shift, weight) * as_rows(vector)).to(x.dtype)


dyt_vjp = dyt_jvp
derf_vjp = derf_jvp
