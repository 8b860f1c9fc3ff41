"""What a normalization does to a vector: the quotient map, its radius and its fibres.

Legend
------
x          (..., d)      states; the last axis is the feature axis, all others are batch, empty ones included
P          (d, d)        I − 1 1ᵀ / d, the projector onto the vectors of zero sum; x_c = P x
s          (..., 1)      s² = mean(x_c²) + ε for LayerNorm, mean(x²) + ε for RMSNorm
n          (..., d)      x_c / s, or x / s: the normalized state, |n| ≤ √d with equality at ε = 0
γ, β       (d,)          weight and bias; y = γ ⊙ n + β
kind       "layer" or "rms"

At ε = 0 LayerNorm is x → √d · P x / |P x|, onto the sphere of radius √d in the zero-sum hyperplane: S^{d−2}, two points
for d = 2, empty for d = 1 [S]. RMSNorm is x → √d · x / |x|, onto S^{d−1}. Closed forms of the derivatives are in
`jacobians`, the image and the kernel of γ ⊙ n + β in `ellipsoid`.

ε is always said, never taken from a dtype. Where s = 0 (ε = 0, and a constant vector for LayerNorm or the zero vector
for RMSNorm) there is no direction: the result is zero and so are its derivatives of every order. With ε > 0 the
derivatives are the true ones, 1/√ε at those points.

float64 and float32 are kept; half precisions are computed in float32 and the result rounded to the input's dtype. Each
vector is divided by a power of two near its largest entry, under which the functions are invariant, so that entries
up to half of the largest number and down to the smallest normal one keep their direction. Functions are differentiable
in all tensor arguments, to every order, unless they say otherwise.

Sources: [S] "Every Transformer Lives on a Sphere" · [DyT] Zhu et al., arXiv 2503.10622 · [Derf] Chen et al., 2512.10938
· LayerNorm: Ba et al., 1607.06450 · RMSNorm: Zhang and Sennrich, 1910.07467.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gaugekit.geometry.rows import Kind, as_rows, check_shape, normalize, plus, prepare, subtract_mean, times, weighted

__all__ = [
    "centre",
    "derf",
    "dyt",
    "fibre",
    "fibre_coordinates",
    "layer_norm",
    "projector",
    "radius",
    "rms_norm",
    "standardize",
    "uniform_direction",
]


# --- the zero-sum hyperplane --------------------------------------------------------------------------------


def centre(x: Tensor) -> Tensor:
    """P x = x − mean(x) · 1, (..., d), in two passes: the mean, then the mean of what is left.

    The sum is zero to rounding in |P x|, however large the mean; a constant vector becomes exactly zero. The
    derivative is P.
    """
    return subtract_mean(as_rows(x)).to(x.dtype)


def projector(d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """P = I − 1 1ᵀ / d, (d, d): symmetric, P² = P, P 1 = 0, of rank d − 1."""
    _check_d(d)
    return torch.eye(d, dtype=dtype) - 1 / d


def uniform_direction(d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """1/√d, (d,): the unit vector that LayerNorm projects out."""
    _check_d(d)
    return torch.full((d,), 1 / math.sqrt(d), dtype=dtype)


# --- the maps -----------------------------------------------------------------------------------------------


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """γ ⊙ P x / s + β with s² = mean((P x)²) + ε: RMSNorm of P x.

    Args:
        x: (..., d), d at least 2.
        weight, bias: γ and β, (d,) each; 1 and 0 where None.
        eps: ε, in the square of the unit of x.

    Returns:
        (..., d) in the dtype of x. At ε = 0 it is the quotient map by x → a x + b 1: exactly invariant for a > 0, and
        n changes sign for a < 0 (see `fibre`).

    Raises:
        TypeError: x is not floating point. ValueError: d < 2 ("the sphere is empty"), a weight or bias of another
        shape, or an eps that is negative or not finite.
    """
    return _affine(normalize(prepare(x, "layer"), eps).n, weight, bias).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """γ ⊙ x / s with s² = mean(x²) + ε. Arguments, dtype and errors as `layer_norm`; d may be 1.

    At ε = 0 it is the quotient map by x → a x, a > 0; equivariant under O(d) where γ = 1, for every ε.
    """
    return _affine(normalize(prepare(x, "rms"), eps).n, weight, None).to(x.dtype)


def dyt(x: Tensor, alpha: float | Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """γ ⊙ tanh(α x) + β, (..., d): Dynamic Tanh [DyT]. α is a number, or a tensor that broadcasts to x.

    No quotient: it is injective where γ and α are not 0, and its image is a box with |y − β| < |γ|.
    """
    return _affine(torch.tanh(times(alpha, as_rows(x))), weight, bias).to(x.dtype)


def derf(
    x: Tensor, alpha: float | Tensor, shift: float | Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """γ ⊙ erf(α x + s) + β, (..., d) [Derf]. α and s are numbers, or tensors that broadcast to x."""
    return _affine(torch.erf(plus(times(alpha, as_rows(x)), shift)), weight, bias).to(x.dtype)


def standardize(x: Tensor, dim: int, eps: float = 0.0) -> Tensor:
    """(x − mean) / √(var + ε) along `dim`: mean 0 and, at ε = 0, variance 1 (the biased one) along it.

    The axis is all that separates two normalizations. Along −1, the features of one token, this is LayerNorm: each
    token lands on a sphere by itself. Along the axis of tokens it is BatchNorm in training: each feature lands on a
    sphere of radius √(number of tokens), a token's result depends on the others, and no token has a fixed radius.

    Raises: as `layer_norm`; ValueError if there is one entry along `dim`.
    """
    return layer_norm(x.movedim(dim, -1), eps=eps).movedim(-1, dim)


# --- radius and fibres --------------------------------------------------------------------------------------


def radius(x: Tensor, eps: float, kind: Kind = "layer") -> Tensor:
    """|n| = √d · √(v / (v + ε)), (...), with v the variance of x ("layer") or mean(x²) ("rms").

    √d at ε = 0. At v = 0 it is 0 and, having no derivative there for ε > 0, it is given derivative 0.
    """
    return (math.sqrt(x.shape[-1]) * _root_mean_square(normalize(prepare(x, kind), eps).n)).to(x.dtype)


def fibre(x: Tensor, scale: float | Tensor, shift: float | Tensor) -> Tensor:
    """a x + b 1, (..., d), a and b numbers or (...): for a > 0 all that LayerNorm at ε = 0 takes to the same point [S].

    LN(a x + b 1) = LN(x) for a > 0, and −LN(x) for a < 0.

    Raises: ValueError where a = 0, which leaves the fibre.
    """
    a, b = (torch.as_tensor(value, dtype=x.dtype, device=x.device).unsqueeze(-1) for value in (scale, shift))
    if bool((a == 0).any()):
        raise ValueError("a scale of 0 makes the vector constant: fibres are a x + b 1 with a other than 0")
    return a * x + b


def fibre_coordinates(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The a and b for which a x + b 1 comes nearest to y, and how near that is: (a, b, residual), each (...).

    residual = |P y − a P x| / |P y| is the sine of the angle between P x and P y, from 0 (y on the fibre of x if a > 0,
    on the opposite one if a < 0) to 1. A constant x has a = 0; a constant y has a = 0 and residual 0.
    """
    wide_x, wide_y = as_rows(x), as_rows(y)
    of_x, of_y = (normalize(subtract_mean(wide), 0.0) for wide in (wide_x, wide_y))
    cosine = (of_x.n * of_y.n).mean(-1, keepdim=True)
    a = cosine * of_y.root / of_x.root * (of_y.scale / of_x.scale)
    b = (wide_y - a * wide_x).mean(-1)
    residual = _root_mean_square(of_y.n - cosine * of_x.n)
    return a.squeeze(-1).to(x.dtype), b.to(x.dtype), residual.to(x.dtype)


# --- arithmetic ---------------------------------------------------------------------------------------------


def _root_mean_square(x: Tensor) -> Tensor:
    """√mean(x²), (...), of derivative 0 where x = 0."""
    _, root, scale, zero = normalize(x, 0.0)
    return torch.where(zero, 0.0, root * scale).squeeze(-1)


def _affine(n: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = weighted(n, weight)
    return y if bias is None else y + check_shape(bias, y.shape[-1]).to(y)


def _check_d(d: int) -> None:
    if d < 1:
        raise ValueError(f"d must be at least 1, got {d}")
