"""Factors checked, and widened to float64 a few at a time, each divided by a power of two near its largest entry.

Shapes: x (..., r, m), a factor, and p (..., 1, 1), its power of two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 2**20
"""Elements of a factor that are held in float64 at once, or one matrix if that is larger."""


def double(x: Tensor) -> Tensor:
    """x in float64, or complex128 if it is complex."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def check_factor(x: Tensor, name: str) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{name} must be real floating point, got {x.dtype}")
    if x.ndim < 2:
        raise ValueError(f"{name} must have at least two dimensions, got shape {tuple(x.shape)}")


def check_pair(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """The common leading dimensions of two factors of the same r."""
    check_factor(a, "the first factor")
    check_factor(b, "the second factor")
    if a.shape[-2] != b.shape[-2]:
        raise ValueError(f"factors must share r = shape[-2], got {tuple(a.shape)} and {tuple(b.shape)}")
    try:
        return tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    except RuntimeError:
        raise ValueError(f"leading dimensions do not broadcast: {tuple(a.shape)} and {tuple(b.shape)}") from None


def power_of_two(top: Tensor) -> Tensor:
    """The p with p <= top < 2p for every top >= 0, in its dtype; 1 where top is 0."""
    mantissa, _ = torch.frexp(top)  # in [1/2, 1)
    return torch.where(top == 0, 1.0, top / (2 * mantissa))


def scaled(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """x / p in float64, (..., r, m), and the power of two p <= max|x| < 2p of every matrix, (..., 1, 1).

    p is the smallest normal number for a zero matrix, so that the larger of two scales suits both matrices.
    """
    wide = x.detach().to(torch.float64)
    top = _largest(wide, name)
    scale = torch.where(top > 0, power_of_two(top), torch.finfo(torch.float64).tiny)
    return (wide / scale if x.dtype == torch.float64 else wide.div_(scale)), scale  # never in place on x


def _largest(x: Tensor, name: str) -> Tensor:
    """max|x| of every matrix, (..., 1, 1); 0 for an empty one."""
    if 0 in x.shape[-2:]:
        return x.new_zeros((*x.shape[:-2], 1, 1))
    top = torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True))
    if not bool(top.isfinite().all()):
        raise ValueError(f"{name} has NaN or inf entries")
    return top


def scaled_grams(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Gram matrices of x / p, (..., r, r), and p, (..., 1, 1), as `scaled` has it."""

    def gram(part: Tensor) -> tuple[Tensor, Tensor]:
        wide, scale = scaled(part, name)
        return wide @ wide.mT, scale

    gram_, scale = in_chunks(gram, x)
    return gram_, scale


def at_once(elements: int) -> int:
    """How many items of so many elements are held in float64 at once."""
    return max(1, CHUNK // elements)


def in_chunks(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    """function(x), (..., r, m) to any (..., p, q), on at most `CHUNK` elements, or one matrix, at a time."""
    if x.ndim == 2 or x.numel() <= CHUNK:
        return function(x)
    if x.shape[0] == 1:
        return tuple(result[None] for result in in_chunks(function, x[0]))
    parts = x.split(at_once(x[0].numel()))
    return tuple(torch.cat(results) for results in zip(*(in_chunks(function, part) for part in parts), strict=True))
