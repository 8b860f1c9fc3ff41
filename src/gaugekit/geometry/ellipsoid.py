"""The image of the sphere of normalized states under γ ⊙ n + β, and the directions along which it has no extent.

Legend
------
n          (..., d)      normalized states (see `normalization`): |n| = √d at ε = 0, and Σ n_i = 0 if LayerNorm's
γ, β       (d,)          weight and bias
P          (d, d)        I − 1 1ᵀ / d
kind       "layer" or "rms"

Sources: [SN] Shirodkar and Narayanan, arXiv 2606.19491.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugekit.geometry.rows import Kind, check_kind, check_shape, wide
from gaugekit.linalg import orthonormal_complement_of_ones
from gaugekit.linalg.scaling import power_of_two

__all__ = ["Ellipsoid", "ellipsoid", "kernel", "kernel_direction"]


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
    center = torch.zeros_like(gamma) if bias is None else check_shape(bias, d).to(gamma)
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
    gamma = wide(weight)
    inverse = power_of_two(gamma.detach().abs().amin(-1, keepdim=True)) / gamma  # at most 1 in size
    return (inverse / torch.linalg.vector_norm(inverse)).to(weight.dtype)


def _check_weight(weight: Tensor, kind: Kind) -> Tensor:
    """Where γ is 0, (d,)."""
    if not weight.is_floating_point():
        raise TypeError(f"weight must be floating point, got {weight.dtype}")
    if weight.ndim != 1 or weight.shape[0] == 0:
        raise ValueError(f"weight must have shape (d,), got {tuple(weight.shape)}")
    if not bool(weight.isfinite().all()):
        raise ValueError("weight has NaN or inf entries")
    check_kind(kind, weight.shape[0])
    return weight == 0
