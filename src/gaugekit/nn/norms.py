"""Norms as modules, drop-in for `torch.nn`, and one constructor by name.

    layer   γ (x − mean x)/√(var x + eps) + β       rms     γ x/√(mean x² + eps) + β
    prms    as rms, the mean over the first p d     crms    as rms, of (x, −Σx) in d + 1 coordinates
    l2      r x/√(|x|² + d eps), r fixed            scale   the same with r learned
    dyt     γ tanh(αx) + β                          derf    γ erf(αx + s) + β
    none    x

All act on the last axis of (..., d), over any leading axes, empty ones included, and return the input's dtype.
Parameters: weight γ (d,), bias β (d,), alpha α (1,), shift s (1,); ScaleNorm's weight is r (1,).

Arguments that several have
---------------------------
normalized_shape     d, or (d,)
eps                  added to the variance or mean square: positive, or 0 with `robust`; never None
elementwise_affine   whether there is a γ, and a β if `bias`
robust               for rows that torch's fused kernels, the default, get wrong. These are right while the length |x|
                     of a row is below 1.8e19 in float32 (1.3e154 in float64), and give zeros or NaN beyond; that of
                     `layer` is off by 1e-7 |mean| / standard deviation in float32. `robust` is
                     `gaugekit.geometry.normalization`: rows are divided by powers of two and means taken in two
                     passes, right to rounding for entries up to 1.7e38 and any mean, but eager some ten times slower.
ValueError           for these out of range, or an input whose last axis is not d. TypeError: not floating point.

Halves (float16, bfloat16) and mixed dtypes are computed in float32 and rounded once. Halves go to the fused kernels
of `layer` and `rms` only where these do so themselves: on an accelerator, with parameters of the input's dtype. The
CPU's LayerNorm sums the gradient of γ in half precision.

At the zero vector, and for `layer` at every constant one, the output is β and the Jacobian γ/√eps (for `layer` times
the projector, for `l2` and `scale` times r/√d): finite, 1000 γ at eps = 1e-6. At eps = 0 the Jacobian there is 0.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from gaugekit.geometry import normalization
from gaugekit.nn.affine import Affine, Dtype, Shape, check_input, one_axis
from gaugekit.nn.pointwise import Derf, DyT

__all__ = [
    "NORMS",
    "CompressedRMSNorm",
    "Derf",
    "DyT",
    "Identity",
    "L2Norm",
    "LayerNorm",
    "PartialRMSNorm",
    "RMSNorm",
    "ScaleNorm",
    "norm",
]


def norm(name: str, width: int, **options: Any) -> nn.Module:
    """The norm of that name over `width` features: layer, rms, prms, crms, l2, scale, dyt, derf or none.

    Args:
        name: a key of `NORMS`.
        width: size of the last axis of the input.
        options: keyword arguments of that norm's class; `device` and `dtype` suit every one of them.

    Raises:
        ValueError: an unknown name, or an option that this norm does not have.
    """
    kind = NORMS.get(name)
    if kind is None:
        raise ValueError(f"unknown norm {name!r}: choose one of {', '.join(NORMS)}")
    known = list(inspect.signature(kind).parameters)[1:]
    for option in options:
        if option not in known:
            raise ValueError(f"norm {name!r} has no option {option!r}: it takes {', '.join(known)}")
    return kind(width, **options)


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` over the last axis. At least 2 features: of one, x less its mean is 0.

    Source: Ba, Kiros and Hinton, arXiv 1607.06450. A state_dict is that of `torch.nn.LayerNorm`.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Dtype = None,
        *,
        robust: bool = False,
    ) -> None:
        width = one_axis(normalized_shape)
        if width < 2:
            raise ValueError("LayerNorm of 1 feature: x less its mean is 0, the sphere is empty; take 2 or more")
        super().__init__(width, _explicit(eps, robust), elementwise_affine, bias, device, dtype)
        self.robust = robust

    def forward(self, input: Tensor) -> Tensor:
        check_input(input, self.normalized_shape)
        if self.robust:
            return normalization.layer_norm(input, self.weight, self.bias, self.eps)
        dtype = _working_dtype(input, self.weight, self.bias)
        weight, bias = _to(self.weight, dtype), _to(self.bias, dtype)
        return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps).to(input.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, robust={self.robust}"


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last axis; with a bias, and on rows of zero mean, LayerNorm.

    torch's eps=None is another number for another dtype, so that eps is explicit here.

    Source: Zhang and Sennrich, arXiv 1910.07467. Without bias, a state_dict is that of `torch.nn.RMSNorm`.
    """

    bias: Parameter | None

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Dtype = None,
        *,
        bias: bool = False,
        robust: bool = False,
    ) -> None:
        width = one_axis(normalized_shape)
        super().__init__(width, _explicit(eps, robust), elementwise_affine, device, dtype)
        there = bias and elementwise_affine
        self.register_parameter("bias", Parameter(torch.zeros(width, device=device, dtype=dtype)) if there else None)
        self.robust = robust

    def reset_parameters(self) -> None:
        super().reset_parameters()
        bias = getattr(self, "bias", None)  # the constructor above comes by before there is one
        if bias is not None:
            nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> Tensor:
        check_input(x, self.normalized_shape)
        bias = self.bias
        dtype = _working_dtype(x, self.weight) if bias is None else _at_least_float32(x)
        y = _rms(x.to(dtype), _to(self.weight, dtype), self.eps, self.robust)
        return (y if bias is None else y + bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bias={self.bias is not None}, robust={self.robust}"


class PartialRMSNorm(Affine):
    """pRMSNorm: x over the root mean square of its first ⌈p d⌉ features, 0 < p ≤ 1; RMSNorm at p = 1.

    Not bounded: where those features are all small, the output is as large as γ x/√eps. Their squares overflow in
    float32 past 1e19.

    Source: Zhang and Sennrich, arXiv 1910.07467, section 4, who take p = 6.25 %.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Dtype = None,
        *,
        bias: bool = False,
        p: float = 0.0625,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine, bias, device, dtype)
        if not 0 < p <= 1:
            raise ValueError(f"p is the share of features that give the scale, in (0, 1], got {p}")
        self.eps, self.p = _explicit(eps), p

    def forward(self, x: Tensor) -> Tensor:
        check_input(x, self.normalized_shape)
        wide = x.to(_at_least_float32(x))
        first = wide[..., : math.ceil(self.p * x.shape[-1])]
        scale = torch.rsqrt(first.square().mean(-1, keepdim=True) + self.eps)
        return self.affine(wide * scale).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, eps={self.eps}, p={self.p}"


class CompressedRMSNorm(Affine):
    """CRMSNorm: RMSNorm of a vector of zero mean that is stored without its last coordinate.

    x (..., d) stands for z = (x, −Σx) of d + 1 coordinates, and the output is the first d coordinates of RMSNorm(z),
    which is LayerNorm(z) since z has zero mean. d is the size of the input, and γ and β are of those d coordinates.

    Source: Jiang, Gu, Zhu and Pan, arXiv 2305.14858, who fold γ and β into the maps that read the norm.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Dtype = None,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine, bias, device, dtype)
        self.eps = _explicit(eps)

    def forward(self, x: Tensor) -> Tensor:
        check_input(x, self.normalized_shape)
        wide = x.to(_at_least_float32(x))
        squares = wide.square().sum(-1, keepdim=True) + wide.sum(-1, keepdim=True).square()
        return self.affine(wide * torch.rsqrt(squares / (x.shape[-1] + 1) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, eps={self.eps}"


class L2Norm(nn.Module):
    """x on the sphere of a fixed radius r > 0, √d if None; RMSNorm without weight at √d.

    r x/√(|x|² + d eps), of length r √(m/(m + eps)) with m the mean square; r x/|x| at eps = 0, with `robust`.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-6,
        device: Any = None,
        dtype: Dtype = None,
        *,
        radius: float | None = None,
        robust: bool = False,
    ) -> None:
        super().__init__()
        width = one_axis(normalized_shape)
        self.normalized_shape = (width,)
        self.radius = math.sqrt(width) if radius is None else float(radius)
        if not 0 < self.radius < math.inf:
            raise ValueError(f"a radius is positive and finite, got {radius}")
        self.eps, self.robust = _explicit(eps, robust), robust

    def forward(self, x: Tensor) -> Tensor:
        return self.on_sphere(x, self.radius)

    def on_sphere(self, x: Tensor, radius: float | Tensor) -> Tensor:
        check_input(x, self.normalized_shape)
        unit = _rms(x.to(_at_least_float32(x)), None, self.eps, self.robust)  # of length √d
        return (unit * (radius / math.sqrt(x.shape[-1]))).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, radius={self.radius:.6g}, robust={self.robust}"


class ScaleNorm(L2Norm):
    """L2Norm with a learned radius, which starts at √d or the `radius` given.

    Source: Nguyen and Salazar, arXiv 1910.05895.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-6,
        device: Any = None,
        dtype: Dtype = None,
        *,
        radius: float | None = None,
        robust: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, radius=radius, robust=robust)
        self.weight = Parameter(torch.full((1,), self.radius, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.radius)

    def forward(self, x: Tensor) -> Tensor:
        return self.on_sphere(x, self.weight.to(_at_least_float32(x)))


class Identity(nn.Identity):
    """x itself: no norm, with the constructor of the others."""

    def __init__(self, normalized_shape: Shape, device: Any = None, dtype: Dtype = None) -> None:
        one_axis(normalized_shape)
        super().__init__()


NORMS: dict[str, type[nn.Module]] = {
    "layer": LayerNorm,
    "rms": RMSNorm,
    "prms": PartialRMSNorm,
    "crms": CompressedRMSNorm,
    "l2": L2Norm,
    "scale": ScaleNorm,
    "dyt": DyT,
    "derf": Derf,
    "none": Identity,
}


def _rms(x: Tensor, weight: Tensor | None, eps: float | None, robust: bool) -> Tensor:
    return normalization.rms_norm(x, weight, eps or 0.0) if robust else F.rms_norm(x, x.shape[-1:], weight, eps)


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _working_dtype(x: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """The one dtype that a fused kernel gets: see the head of this file."""
    alike = all(p is None or p.dtype == x.dtype for p in parameters)
    return x.dtype if alike and x.device.type != "cpu" else _at_least_float32(x)


def _to(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)


def _explicit(eps: float, robust: bool = False) -> float:
    if eps is None or not math.isfinite(eps) or eps < 0 or (eps == 0 and not robust):
        at_zero = "" if robust else "; where the norm takes robust=True, 0 is allowed with it"
        raise ValueError(f"eps is a positive number that you choose, such as 1e-6, got {eps}{at_zero}")
    return float(eps)
