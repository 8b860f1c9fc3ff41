"""Arithmetic that the maps of states share: inputs checked and widened, scales that neither overflow nor vanish, means.

Shapes: x (..., d), rows along the last axis; X (..., n, d), tokens by width; γ (d,). Symbols are as in `normalization`.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gaugekit.linalg.scaling import power_of_two

__all__ = [
    "Kind",
    "Normalized",
    "as_rows",
    "as_tokens",
    "check_kind",
    "check_shape",
    "largest",
    "normalize",
    "plus",
    "prepare",
    "subtract_mean",
    "times",
    "weighted",
    "wide",
]

Kind = Literal["layer", "rms"]
"""Which norm: LayerNorm or RMSNorm."""


# --- inputs -------------------------------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is that; TypeError if it is not floating point."""
    if not x.is_floating_point():
        raise TypeError(f"floating point is needed, got {x.dtype}: convert with .float() or .double()")
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def as_rows(x: Tensor) -> Tensor:
    """`wide` of x (..., d); ValueError unless d is at least 1."""
    x = wide(x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"the last axis is the feature axis and needs an entry, got shape {tuple(x.shape)}")
    return x


def as_tokens(x: Tensor) -> Tensor:
    """`wide` of X (..., n, d); ValueError if an axis is missing or an entry is not finite."""
    x = wide(x)
    if x.ndim < 2:
        raise ValueError(f"states are tokens by width, (..., n, d), got shape {tuple(x.shape)}")
    if not bool(x.isfinite().all()):
        raise ValueError("states have NaN or inf entries; a frame cannot be chosen by them")
    return x


def prepare(x: Tensor, kind: Kind) -> Tensor:
    """What the norm divides by its length, `as_rows`: P x for LayerNorm, x for RMSNorm."""
    x = as_rows(x)
    check_kind(kind, x.shape[-1])
    return subtract_mean(x) if kind == "layer" else x


def check_kind(kind: str, d: int) -> None:
    """ValueError for another kind, and for LayerNorm of one entry."""
    if kind not in ("layer", "rms"):
        raise ValueError(f'kind must be "layer" or "rms", got {kind!r}')
    if kind == "layer" and d < 2:
        raise ValueError("the sphere is empty: a vector of one entry has no variance, so LayerNorm needs d >= 2")


def check_shape(parameter: Tensor, d: int) -> Tensor:
    """The weight or bias itself; ValueError if it is not (d,)."""
    if parameter.shape != (d,):
        raise ValueError(f"weight and bias must have shape ({d},) like the last axis, got {tuple(parameter.shape)}")
    return parameter


# --- scales -------------------------------------------------------------------------------------------------


def largest(x: Tensor, *dim: int) -> Tensor:
    """max|x| along the axes given, which stay with size 1; 0 where they hold no entry. It carries no gradient."""
    size = x.detach().abs()
    return size.sum(dim, keepdim=True) if 0 in [x.shape[axis] for axis in dim] else size.amax(dim, keepdim=True)


class Normalized(NamedTuple):
    """n = x / s and s = scale · root; where s is `zero`, n = 0 and root = 1."""

    n: Tensor
    root: Tensor
    scale: Tensor
    zero: Tensor


def normalize(x: Tensor, eps: float) -> Normalized:
    """x (..., d) divided by s, s² = mean(x²) + ε; ValueError for an eps that is negative or not finite."""
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps must be finite and at least 0, got {eps}")
    # n is a function of x / scale and √ε / scale alone, whatever the scale, so that no gradient passes through it.
    scale = power_of_two(largest(x, -1).clamp_min(math.sqrt(eps)))
    unit = x / scale
    total = unit.square().mean(-1, keepdim=True) + (math.sqrt(eps) / scale).square()
    zero = total == 0
    root = torch.where(zero, 1.0, total).sqrt()
    return Normalized(torch.where(zero, 0.0, unit / root), root, scale, zero)


# --- sums and products --------------------------------------------------------------------------------------


def subtract_mean(x: Tensor) -> Tensor:
    """P x = x − mean(x) · 1, (..., d), in two passes."""
    d = x.shape[-1]
    low, high = torch.aminmax(x.detach(), dim=-1, keepdim=True)
    # Rounding may carry a mean outside the entries' range: clamped, a constant vector leaves exactly zero. Entries are
    # divided before they are summed, so that the sum of large ones does not overflow.
    y = x - (x.detach() / d).sum(-1, keepdim=True).clamp(low, high)
    return y - (y / d).sum(-1, keepdim=True)


def times(factor: float | Tensor, x: Tensor) -> Tensor:
    """factor · x, in the dtype of x."""
    return x * (factor.to(x) if isinstance(factor, Tensor) else factor)


def plus(x: Tensor, term: float | Tensor) -> Tensor:
    """x + term, in the dtype of x."""
    return x + (term.to(x) if isinstance(term, Tensor) else term)


def weighted(x: Tensor, weight: Tensor | None) -> Tensor:
    """γ ⊙ x, in the dtype of x; x where γ is None."""
    return x if weight is None else x * check_shape(weight, x.shape[-1]).to(x)
