"""The round sphere in R^d without coordinates: geodesics, transport, and residual updates that stay on it.

Legend
------
h, x, y    (..., d)      points; leading axes broadcast, and may be empty
v          (..., d)      a tangent vector at h: v · h = 0
u, w       (..., d)      directions, |u| = 1
R          radius        1 unless said otherwise: nGPT's. Normalized states have √d, so pass math.sqrt(d) with them
θ                        the angle between two points, in radians; distances are R θ, in the unit of R

A point counts by its direction alone: each function puts its points on the sphere of the radius given before it uses
them. So results are on that sphere to rounding however long the chain of steps, and derivatives with respect to a point
are tangential. Tangent vectors are taken at their length, in the unit of R. The zero vector has no direction and counts
as itself: what comes of it is finite, or an error, and of no meaning.

Zero-sum points (outputs of LayerNorm) form a great sphere of dimension d − 2: with zero-sum arguments, all results stay
zero-sum.

float64 and float32 are kept; half precisions are computed in float32 and rounded to the dtype of the first argument.
Everything is differentiable to every order, at v = 0 and at y = h as well, except `angle` and `distance`, which have
a cone there (their squares do not: take the square of |log|).

Sources: Absil, Mahony and Sepulchre, Optimization Algorithms on Matrix Manifolds (2008), 4.1, 5.4 and 8.1 · slerp:
Shoemake, SIGGRAPH 1985 · angle: Kahan, "How futile are mindless assessments of roundoff in floating-point computation?"
(2006), section 12 · [nGPT] Loshchilov et al., arXiv 2410.01131 · [S] "Every Transformer Lives on a Sphere".
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from gaugekit.geometry.normalization import rms_norm
from gaugekit.geometry.rows import wide

__all__ = [
    "angle",
    "distance",
    "exp",
    "lerp",
    "log",
    "project",
    "retract",
    "slerp",
    "step",
    "to_tangent",
    "transport",
]

ANTIPODAL = 16
"""Two points are antipodal when |u + w| is at most this many roundings (of the dtype that the sum is computed in)."""


def project(x: Tensor, radius: float = 1.0) -> Tensor:
    """R x / |x|, (..., d): nGPT's Norm at R = 1, RMSNorm without weight at R = √d. Zero stays zero.

    Raises (as all functions here): TypeError if x is not floating point; ValueError if the radius is not positive.
    """
    _check_radius(radius)
    return (radius * _unit(x)).to(x.dtype)


def to_tangent(h: Tensor, v: Tensor) -> Tensor:
    """v − u (u · v), (..., d): the part of any vector v that is tangent at h; u = h / |h|."""
    return _tangent_part(_unit(h), wide(v)).to(h.dtype)


def exp(h: Tensor, v: Tensor, radius: float = 1.0) -> Tensor:
    """Where the geodesic that leaves h with velocity v is at time 1: R (cos θ u + sin θ v / |v|), θ = |v| / R.

    Inverse of `log` for θ < π. v is taken to be tangent (`to_tangent` makes it so; `step` does that by itself).
    """
    _check_radius(radius)
    return _exp(_unit(h), wide(v) / radius, radius).to(h.dtype)


def log(h: Tensor, y: Tensor, radius: float = 1.0) -> Tensor:
    """The shortest tangent vector at h with exp(h, v) = y, (..., d): |v| = `distance`. Zero at y = h.

    Raises: ValueError where y is the antipode of h, to rounding: every direction leads there.
    """
    _check_radius(radius)
    return (radius * _log(_unit(h), _unit(y))).to(h.dtype)


def retract(h: Tensor, v: Tensor, radius: float = 1.0) -> Tensor:
    """R (h + v) / |h + v| with |h| = R: equals exp(h, v) for tangent v up to terms of third order in |v| / R."""
    _check_radius(radius)
    return (radius * _unit(_unit(h) + wide(v) / radius)).to(h.dtype)


def slerp(x: Tensor, y: Tensor, t: float | Tensor, radius: float = 1.0) -> Tensor:
    """The point at share t of the shortest arc from x (t = 0) to y (t = 1), (..., d); t a number or (...), of any size.

    Raises: ValueError where x and y are antipodal: no arc is shortest.
    """
    _check_radius(radius)
    u = _unit(x)
    share = t.to(u).unsqueeze(-1) if isinstance(t, Tensor) else t
    return _exp(u, share * _log(u, _unit(y)), radius).to(x.dtype)


def transport(h: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """v carried parallel along the shortest arc from h to y, (..., d): v − (w · v) / (1 + u · w) (u + w).

    An isometry from the tangent space at h onto that at y, inverted by exchanging h and y, whatever the radius.

    Raises: ValueError where h and y are antipodal.
    """
    u, w, v_wide = _unit(h), _unit(y), wide(v)
    total = u + w
    length_squared = total.square().sum(-1, keepdim=True)  # 2 (1 + u · w), and accurate near the antipode
    _refuse_antipodes(length_squared)
    return (v_wide - 2 * (w * v_wide).sum(-1, keepdim=True) / length_squared * total).to(h.dtype)


def angle(x: Tensor, y: Tensor) -> Tensor:
    """The angle between x and y in radians, (...), from 0 to π: 2 atan2(|u − w|, |u + w|).

    Accurate to rounding everywhere, 0 and π included, where acos(u · w) has lost half of the digits or is NaN; |u − w|
    below the root of the smallest number (1e-19 in float32) counts as 0. At 0 and π the angle has no derivative; it is
    given 0. A zero vector is at π/2 to all others.
    """
    u, w = _unit(x), _unit(y)
    return (2 * torch.atan2(_length(u - w), _length(u + w))).to(x.dtype)


def distance(x: Tensor, y: Tensor, radius: float = 1.0) -> Tensor:
    """The length of the shortest arc from x to y, R · `angle`, (...), from 0 to π R."""
    _check_radius(radius)
    return radius * angle(x, y)


def step(h: Tensor, v: Tensor, radius: float = 1.0, method: Literal["retract", "exp"] = "retract") -> Tensor:
    """A residual update that stays on the sphere: h ← R_h(tangent part of v), (..., d), for any v [S].

    R_h is `retract` or `exp`. The first turns by atan(|v| / R), always less than a quarter; the second by |v| / R.
    """
    _check_radius(radius)
    u = _unit(h)
    tangent = _tangent_part(u, wide(v) / radius)
    if method == "retract":
        return (radius * _unit(u + tangent)).to(h.dtype)
    if method == "exp":
        return _exp(u, tangent, radius).to(h.dtype)
    raise ValueError(f'method must be "retract" or "exp", got {method!r}')


def lerp(h: Tensor, f: Tensor, alpha: float | Tensor, radius: float = 1.0) -> Tensor:
    """nGPT's update, h ← N(h + α ⊙ (N(f) − h)), (..., d), N the projection to the sphere [nGPT].

    α is a number, or a tensor that broadcasts against (..., d), such as nGPT's rates (d,). One result is off the
    sphere: zero, where the sum is zero (α = 1/2 and antipodes).
    """
    _check_radius(radius)
    u = _unit(h)
    rate = alpha.to(u) if isinstance(alpha, Tensor) else alpha
    return (radius * _unit(u + rate * (_unit(f) - u))).to(h.dtype)


# --- arithmetic on the unit sphere --------------------------------------------------------------------------


def _unit(x: Tensor) -> Tensor:
    return rms_norm(wide(x)) / math.sqrt(x.shape[-1])


def _tangent_part(u: Tensor, v: Tensor) -> Tensor:
    return v - u * (u * v).sum(-1, keepdim=True)


def _exp(u: Tensor, v: Tensor, radius: float) -> Tensor:
    cosine, sinc = _cos_and_sinc(v.square().sum(-1, keepdim=True))
    return radius * (cosine * u + sinc * v)


def _log(u: Tensor, w: Tensor) -> Tensor:
    difference, total = u - w, u + w
    far, near = (z.square().sum(-1, keepdim=True) for z in (difference, total))
    _refuse_antipodes(near)
    # w − u, or w + u beyond the quarter, has the tangent part of w and loses fewer digits.
    tangent = _tangent_part(u, torch.where(far < near, -difference, total))
    ratio = far / near  # tan²(θ/2), and sin θ = 2 tan(θ/2) / (1 + tan²(θ/2))
    return _atan_over(ratio) * (1 + ratio) * tangent


def _refuse_antipodes(length_squared: Tensor) -> None:
    limit = (ANTIPODAL * torch.finfo(length_squared.dtype).eps) ** 2
    if bool((length_squared <= limit).any()):
        raise ValueError("antipodal points: no shortest arc between them; move one of them aside")


def _cos_and_sinc(q: Tensor) -> tuple[Tensor, Tensor]:
    """cos √q and sin √q / √q, smooth at q = 0 where √q is not: power series below 1, of relative error 1e-19."""
    small = q < 1
    series, root = torch.where(small, q, 0.0), torch.where(small, 1.0, q).sqrt()
    terms = range(11)
    cosine = _power_series(series, [(-1) ** k / math.factorial(2 * k) for k in terms])
    sinc = _power_series(series, [(-1) ** k / math.factorial(2 * k + 1) for k in terms])
    return torch.where(small, cosine, root.cos()), torch.where(small, sinc, root.sin() / root)


def _atan_over(q: Tensor) -> Tensor:
    """atan √q / √q, smooth at q = 0: power series below 1/16, of relative error 1e-20."""
    small = q < 1 / 16
    series, root = torch.where(small, q, 0.0), torch.where(small, 1.0, q).sqrt()
    return torch.where(
        small, _power_series(series, [(-1) ** k / (2 * k + 1) for k in range(16)]), torch.atan(root) / root
    )


def _power_series(q: Tensor, coefficients: list[float]) -> Tensor:
    result = torch.full_like(q, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = coefficient + q * result
    return result


def _length(x: Tensor) -> Tensor:
    """|x|, (...), of derivative 0 at 0."""
    square = x.square().sum(-1)
    zero = square == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())


def _check_radius(radius: float) -> None:
    if not (math.isfinite(radius) and radius > 0):
        raise ValueError(f"radius must be positive and finite, got {radius}")
