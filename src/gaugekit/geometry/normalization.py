"""What a normalization does to a vector: the quotient map, its fibres, Jacobian, image and kernel.

Legend
------
x          (..., d)      states; the last axis is the feature axis, all others are batch, empty ones included
P          (d, d)        I − 1 1ᵀ / d, the projector onto the vectors of zero sum; x_c = P x
s          (..., 1)      s² = mean(x_c²) + ε for LayerNorm, mean(x²) + ε for RMSNorm
n          (..., d)      x_c / s, or x / s: the normalized state, |n| ≤ √d with equality at ε = 0
γ, β       (d,)          weight and bias; y = γ ⊙ n + β
kind       "layer" or "rms"

At ε = 0 LayerNorm is x → √d · P x / |P x|, onto the sphere of radius √d in the zero-sum hyperplane: S^{d−2}, two points
for d = 2, empty for d = 1 [S]. RMSNorm is x → √d · x / |x|, onto S^{d−1}.

ε is always said, never taken from a dtype. Where s = 0 (ε = 0, and a constant vector for LayerNorm or the zero vector
for RMSNorm) there is no direction: the result is zero and so are its derivatives of every order. With ε > 0 the
derivatives are the true ones, 1/√ε at those points.

float64 and float32 are kept; half precisions are computed in float32 and the result rounded to the input's dtype. Each
vector is divided by a power of two near its largest entry, under which the functions are invariant, so that entries
up to half of the largest number and down to the smallest normal one keep their direction. Functions are differentiable
in all tensor arguments, to every order, unless they say otherwise.

Sources: [S] "Every Transformer Lives on a Sphere" · [SN] Shirodkar and Narayanan, arXiv 2606.19491 · [DyT] Zhu et al.,
2503.10622 · [Derf] Chen et al., 2512.10938 · LayerNorm: Ba et al., 1607.06450 · RMSNorm: Zhang and Sennrich,
1910.07467.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gaugekit.linalg import orthonormal_complement_of_ones

__all__ = [
    "Ellipsoid",
    "Kind",
    "centre",
    "derf",
    "derf_derivative",
    "derf_jacobian",
    "derf_jvp",
    "derf_vjp",
    "dyt",
    "dyt_derivative",
    "dyt_jacobian",
    "dyt_jvp",
    "dyt_vjp",
    "ellipsoid",
    "fibre",
    "fibre_coordinates",
    "kernel",
    "kernel_direction",
    "layer_norm",
    "layer_norm_jacobian",
    "layer_norm_jvp",
    "layer_norm_vjp",
    "projector",
    "radius",
    "rms_norm",
    "rms_norm_jacobian",
    "rms_norm_jvp",
    "rms_norm_vjp",
    "standardize",
    "uniform_direction",
]

Kind = Literal["layer", "rms"]


# --- the zero-sum hyperplane --------------------------------------------------------------------------------


def centre(x: Tensor) -> Tensor:
    """P x = x − mean(x) · 1, (..., d), in two passes: the mean, then the mean of what is left.

    The sum is zero to rounding in |P x|, however large the mean; a constant vector becomes exactly zero. The
    derivative is P.
    """
    return _centre(_wide(x)).to(x.dtype)


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
    return _affine(_normalize(_prepare(x, "layer"), eps).n, weight, bias).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """γ ⊙ x / s with s² = mean(x²) + ε. Arguments, dtype and errors as `layer_norm`; d may be 1.

    At ε = 0 it is the quotient map by x → a x, a > 0; equivariant under O(d) where γ = 1, for every ε.
    """
    return _affine(_normalize(_prepare(x, "rms"), eps).n, weight, None).to(x.dtype)


def dyt(x: Tensor, alpha: float | Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """γ ⊙ tanh(α x) + β, (..., d): Dynamic Tanh [DyT]. α is a number, or a tensor that broadcasts to x.

    No quotient: it is injective where γ and α are not 0, and its image is a box with |y − β| < |γ|.
    """
    return _affine(torch.tanh(_times(alpha, _wide(x))), weight, bias).to(x.dtype)


def derf(
    x: Tensor, alpha: float | Tensor, shift: float | Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """γ ⊙ erf(α x + s) + β, (..., d) [Derf]. α and s are numbers, or tensors that broadcast to x."""
    return _affine(torch.erf(_plus(_times(alpha, _wide(x)), shift)), weight, bias).to(x.dtype)


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
    return (math.sqrt(x.shape[-1]) * _root_mean_square(_normalize(_prepare(x, kind), eps).n)).to(x.dtype)


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
    wide_x, wide_y = _wide(x), _wide(y)
    of_x, of_y = (_normalize(_centre(wide), 0.0) for wide in (wide_x, wide_y))
    cosine = (of_x.n * of_y.n).mean(-1, keepdim=True)
    a = cosine * of_y.root / of_x.root * (of_y.scale / of_x.scale)
    b = (wide_y - a * wide_x).mean(-1)
    residual = _root_mean_square(of_y.n - cosine * of_x.n)
    return a.squeeze(-1).to(x.dtype), b.to(x.dtype), residual.to(x.dtype)


# --- Jacobians ----------------------------------------------------------------------------------------------


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
    return _weighted(_symmetric_part(x, _wide(tangent), eps, "layer"), weight).to(x.dtype)


def layer_norm_vjp(x: Tensor, cotangent: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Jᵀ c, (..., d), for a cotangent c (..., d), in O(d)."""
    return _symmetric_part(x, _weighted(_wide(cotangent), weight), eps, "layer").to(x.dtype)


def rms_norm_jvp(x: Tensor, tangent: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """J t, (..., d), for a tangent t (..., d), in O(d)."""
    return _weighted(_symmetric_part(x, _wide(tangent), eps, "rms"), weight).to(x.dtype)


def rms_norm_vjp(x: Tensor, cotangent: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Jᵀ c, (..., d), for a cotangent c (..., d), in O(d)."""
    return _symmetric_part(x, _weighted(_wide(cotangent), weight), eps, "rms").to(x.dtype)


def dyt_derivative(x: Tensor, alpha: float | Tensor, weight: Tensor | None = None) -> Tensor:
    """∂y_i/∂x_i = γ_i α / cosh²(α x_i), (..., d): the diagonal of the Jacobian, which is all there is."""
    z = 2 * _times(alpha, _wide(x))
    steepness = 4 * torch.sigmoid(z) * torch.sigmoid(-z)  # 1 − tanh² would round to 0 for large arguments
    return _weighted(_times(alpha, steepness), weight).to(x.dtype)


def derf_derivative(x: Tensor, alpha: float | Tensor, shift: float | Tensor, weight: Tensor | None = None) -> Tensor:
    """∂y_i/∂x_i = γ_i α (2/√π) exp(−(α x_i + s)²), (..., d): the diagonal of the Jacobian."""
    z = _plus(_times(alpha, _wide(x)), shift)
    return _weighted(_times(alpha, 2 / math.sqrt(math.pi) * torch.exp(-z.square())), weight).to(x.dtype)


def dyt_jacobian(x: Tensor, alpha: float | Tensor, weight: Tensor | None = None) -> Tensor:
    """`dyt_derivative` on the diagonal of (..., d, d)."""
    return torch.diag_embed(dyt_derivative(x, alpha, weight))


def derf_jacobian(x: Tensor, alpha: float | Tensor, shift: float | Tensor, weight: Tensor | None = None) -> Tensor:
    """`derf_derivative` on the diagonal of (..., d, d)."""
    return torch.diag_embed(derf_derivative(x, alpha, shift, weight))


def dyt_jvp(x: Tensor, vector: Tensor, alpha: float | Tensor, weight: Tensor | None = None) -> Tensor:
    """J t, (..., d). J is diagonal, so that `dyt_vjp` is the same function."""
    return (dyt_derivative(_wide(x), alpha, weight) * _wide(vector)).to(x.dtype)


def derf_jvp(
    x: Tensor, vector: Tensor, alpha: float | Tensor, shift: float | Tensor, weight: Tensor | None = None
) -> Tensor:
    """J t, (..., d). J is diagonal, so that `derf_vjp` is the same function."""
    return (derf_derivative(_wide(x), alpha, shift, weight) * _wide(vector)).to(x.dtype)


dyt_vjp = dyt_jvp
derf_vjp = derf_jvp


# --- image and kernel of the affine part --------------------------------------------------------------------


@dataclass(frozen=True)
class Ellipsoid:
    """{center + axes · (semiaxes ⊙ u)} with |u| = 1: the image of the sphere of normalized states under γ ⊙ n + β.

    With ε > 0 outputs lie inside, on the copy shrunk by `radius` / √d. Where γ has zeros the sphere is flattened: its
    image is the surface still if the sphere is LayerNorm's and one γ_i is 0, else the solid, |u| ≤ 1.

    Attributes (all float64):
        center: β, (d,).
        axes: (d, m), orthonormal directions, the largest entry of each positive.
        semiaxes: (m,), positive, descending, in the unit of γ.
    """

    center: Tensor
    axes: Tensor
    semiaxes: Tensor

    def point(self, u: Tensor) -> Tensor:
        """The point of coordinates u, (..., m) → (..., d) float64; |u| = 1 on the ellipsoid, < 1 inside."""
        return self.center + (u.to(self.axes) * self.semiaxes) @ self.axes.mT

    def coordinates(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """(u, distance) of points y (..., d): u (..., m) as in `point`, and the distance (...) from the axes' span.

        y is on the ellipsoid where distance = 0 and |u| = 1.
        """
        offset = y.to(self.center) - self.center
        along = offset @ self.axes
        return along / self.semiaxes, torch.linalg.vector_norm(offset - along @ self.axes.mT, dim=-1)


@torch.no_grad()
def ellipsoid(weight: Tensor, bias: Tensor | None = None, kind: Kind = "layer") -> Ellipsoid:
    """The ellipsoid of y = γ ⊙ n + β: m = d − 1 axes for LayerNorm, d for RMSNorm, fewer where γ has zeros.

    With z zeros, m = d − max(z, 1) for LayerNorm and d − z for RMSNorm. RMSNorm's semi-axes are √d |γ_i| along e_i;
    LayerNorm's are √d times the singular values of diag(γ) P, which lie between neighbouring |γ_i| (one SVD of
    d × (d − 1)). In float64 whatever the dtype of γ; not differentiable.

    Raises: TypeError, ValueError: γ is not floating point, not (d,), or not finite; d < 2 for LayerNorm.
    """
    zero = _check_weight(weight, kind)
    gamma = weight.to(torch.float64)
    d = gamma.shape[0]
    zeros = int(zero.sum())
    if kind == "rms":
        order = gamma.abs().argsort(descending=True, stable=True)[: d - zeros]
        axes = torch.eye(d, dtype=gamma.dtype, device=gamma.device)[:, order]
        semiaxes = math.sqrt(d) * gamma.abs()[order]
    else:
        basis = orthonormal_complement_of_ones(d).to(gamma)
        left, singular, _ = torch.linalg.svd(gamma.unsqueeze(-1) * basis, full_matrices=False)
        m = d - max(zeros, 1)
        top = left.gather(0, left.abs().argmax(0, keepdim=True))
        axes, semiaxes = (left * top.sign())[:, :m], math.sqrt(d) * singular[:m]
    center = torch.zeros_like(gamma) if bias is None else _check_shape(bias, d).to(gamma)
    return Ellipsoid(center, axes, semiaxes)


def kernel(weight: Tensor, kind: Kind = "layer") -> Tensor:
    """Orthonormal directions along which y = γ ⊙ n + β is the same for every input and every ε, (d, m) [SN].

    For LayerNorm γ⁻¹/|γ⁻¹|, since Σ n_i = 0, if no γ_i is 0; otherwise, and for RMSNorm, e_i for each γ_i = 0, so that
    RMSNorm without zeros has (d, 0). Real states may leave more directions empty; these are the ones that γ imposes.

    Raises: as `ellipsoid`.
    """
    zero = _check_weight(weight, kind)
    if kind == "layer" and not bool(zero.any()):
        return kernel_direction(weight).unsqueeze(-1)
    return torch.eye(weight.shape[0], dtype=weight.dtype, device=weight.device)[:, zero]


def kernel_direction(weight: Tensor) -> Tensor:
    """γ⁻¹/|γ⁻¹|, (d,), with the signs of γ: LayerNorm's zero-variance direction [SN], without overflow for tiny γ.

    Raises: as `ellipsoid`; ValueError if some γ_i = 0 (then `kernel` has the directions).
    """
    zero = _check_weight(weight, "layer")
    if bool(zero.any()):
        raise ValueError(f"weight has {int(zero.sum())} zeros and so no inverse: use kernel(weight)")
    gamma = _wide(weight)
    inverse = _power_of_two(gamma.detach().abs().amin(-1, keepdim=True)) / gamma  # at most 1 in size
    return (inverse / torch.linalg.vector_norm(inverse)).to(weight.dtype)


# --- arithmetic ---------------------------------------------------------------------------------------------


class _Normalized(NamedTuple):
    """n = x / s and s = scale · root; where s is `zero`, n = 0 and root = 1."""

    n: Tensor
    root: Tensor
    scale: Tensor
    zero: Tensor


def _normalize(x: Tensor, eps: float) -> _Normalized:
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be finite and at least 0, got {eps}")
    # n is a function of x / scale and √ε / scale alone, whatever the scale, so that no gradient passes through it.
    top = x.detach().abs().amax(-1, keepdim=True).clamp_min(math.sqrt(eps))
    scale = _power_of_two(top)
    unit = x / scale
    total = unit.square().mean(-1, keepdim=True) + (math.sqrt(eps) / scale).square()
    zero = total == 0
    root = torch.where(zero, 1.0, total).sqrt()
    return _Normalized(torch.where(zero, 0.0, unit / root), root, scale, zero)


def _root_mean_square(x: Tensor) -> Tensor:
    """√mean(x²), (...), of derivative 0 where x = 0."""
    _, root, scale, zero = _normalize(x, 0.0)
    return torch.where(zero, 0.0, root * scale).squeeze(-1)


def _power_of_two(top: Tensor) -> Tensor:
    """The p with p ≤ top < 2p; 1 where top is 0."""
    mantissa, _ = torch.frexp(top)  # in [1/2, 1)
    return torch.where(top == 0, 1.0, top / (2 * mantissa))


def _centre(x: Tensor) -> Tensor:
    d = x.shape[-1]
    low, high = torch.aminmax(x.detach(), dim=-1, keepdim=True)
    # Rounding may carry a mean outside the entries' range: clamped, a constant vector leaves exactly zero. Entries are
    # divided before they are summed, so that the sum of large ones does not overflow.
    y = x - (x.detach() / d).sum(-1, keepdim=True).clamp(low, high)
    return y - (y / d).sum(-1, keepdim=True)


def _jacobian(x: Tensor, weight: Tensor | None, eps: float, kind: Kind) -> Tensor:
    n, root, scale, zero = _normalize(_prepare(x, kind), eps)
    d = n.shape[-1]
    flat = torch.eye(d, dtype=n.dtype, device=n.device) - (1 / d if kind == "layer" else 0.0)
    inner = (flat - n.unsqueeze(-1) * n.unsqueeze(-2) / d) / root.unsqueeze(-1)
    inner = torch.where(zero.unsqueeze(-1), 0.0, inner) / scale.unsqueeze(-1)
    return (inner if weight is None else _check_shape(weight, d).to(inner).unsqueeze(-1) * inner).to(x.dtype)


def _symmetric_part(x: Tensor, vector: Tensor, eps: float, kind: Kind) -> Tensor:
    """(1/s) (P v − n (n·v) / d), or with I for P: the Jacobian without γ times a vector."""
    n, root, scale, zero = _normalize(_prepare(x, kind), eps)
    flat = _centre(vector) if kind == "layer" else vector
    inner = (flat - n * (n * flat).mean(-1, keepdim=True)) / root
    return torch.where(zero, 0.0, inner) / scale


def _wide(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        raise TypeError(f"floating point is needed, got {x.dtype}: convert with .float() or .double()")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"the last axis is the feature axis and needs an entry, got shape {tuple(x.shape)}")
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _prepare(x: Tensor, kind: Kind) -> Tensor:
    """x or P x, at least float32."""
    wide = _wide(x)
    _check_kind(kind, wide.shape[-1])
    return _centre(wide) if kind == "layer" else wide


def _times(factor: float | Tensor, x: Tensor) -> Tensor:
    return x * (factor.to(x) if isinstance(factor, Tensor) else factor)


def _plus(x: Tensor, term: float | Tensor) -> Tensor:
    return x + (term.to(x) if isinstance(term, Tensor) else term)


def _weighted(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * _check_shape(weight, x.shape[-1]).to(x)


def _affine(n: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = _weighted(n, weight)
    return y if bias is None else y + _check_shape(bias, y.shape[-1]).to(y)


def _check_shape(parameter: Tensor, d: int) -> Tensor:
    if parameter.shape != (d,):
        raise ValueError(f"weight and bias must have shape ({d},) like the last axis, got {tuple(parameter.shape)}")
    return parameter


def _check_d(d: int) -> None:
    if d < 1:
        raise ValueError(f"d must be at least 1, got {d}")


def _check_kind(kind: str, d: int) -> None:
    if kind not in ("layer", "rms"):
        raise ValueError(f'kind must be "layer" or "rms", got {kind!r}')
    if kind == "layer" and d < 2:
        raise ValueError("the sphere is empty: a vector of one entry has no variance, so LayerNorm needs d >= 2")


def _check_weight(weight: Tensor, kind: Kind) -> Tensor:
    """Where γ is 0, (d,)."""
    if not weight.is_floating_point():
        raise TypeError(f"weight must be floating point, got {weight.dtype}")
    if weight.ndim != 1 or weight.shape[0] == 0:
        raise ValueError(f"weight must have shape (d,), got {tuple(weight.shape)}")
    if not bool(weight.isfinite().all()):
        raise ValueError("weight has NaN or inf entries")
    _check_kind(kind, weight.shape[0])
    return weight == 0
