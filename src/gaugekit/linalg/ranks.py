"""How many directions a spectrum s (..., r) has, and which of its values are tied."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ZERO_TIE", "degenerate_blocks", "effective_rank", "numerical_rank", "stable_rank"]

EPS = torch.finfo(torch.float64).eps

ZERO_TIE = 1e-12
"""Share of the largest singular value at or below which `degenerate_blocks` takes one for zero."""


def effective_rank(s: Tensor) -> Tensor:
    """exp of the entropy of s / Σ s: how many directions carry the spectrum, from 1 to r.

    Args:
        s: singular values, (..., r), nonnegative and finite, in any order and unit.

    Returns:
        (...) float64, a pure number; 0 for the zero matrix.

    Raises:
        TypeError: the dtype is not floating point.
        ValueError: no dimension, or a negative, NaN or inf value.

    Source: Roy and Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.
    """
    unit = _unit_spectrum(s)
    total = unit.sum(-1)
    share = unit / total.clamp_min(1.0)[..., None]  # total >= 1 unless the matrix is zero
    return torch.where(total > 0, torch.special.entr(share).sum(-1).exp(), 0.0)


def stable_rank(s: Tensor) -> Tensor:
    """‖G‖_F² / ‖G‖₂² = Σ s² / max(s)², from 1 to the rank.

    Args:
        s: singular values, (..., r), nonnegative and finite, in any order and unit.

    Returns:
        (...) float64, a pure number; 0 for the zero matrix.

    Raises:
        TypeError: the dtype is not floating point.
        ValueError: no dimension, or a negative, NaN or inf value.

    Source: Rudelson and Vershynin, "Sampling from large matrices", J. ACM 54 (2007), where it is the
        numerical rank.
    """
    unit = _unit_spectrum(s)
    return unit.square().sum(-1)


def numerical_rank(s: Tensor, size: int) -> Tensor:
    """How many singular values exceed max(s) · size · eps, with the eps of float64.

    `product_spectrum` is accurate to rounding relative to ‖A‖ ‖B‖, not to max(s): where the factors all but
    cancel, max(s) ≪ ‖A‖ ‖B‖, values that are truly zero may be counted.

    Args:
        s: singular values, (..., r), nonnegative and finite, in any order and unit.
        size: max(m, n), the larger side of the matrix.

    Returns:
        (...) int64; 0 for the zero matrix.

    Raises:
        TypeError: the dtype is not floating point.
        ValueError: no dimension, a negative, NaN or inf value, or a size below 1.

    Source: the default tolerance of `torch.linalg.matrix_rank` and `numpy.linalg.matrix_rank`.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    unit = _unit_spectrum(s)
    return (unit > size * EPS).sum(-1)


def degenerate_blocks(s: Tensor, rtol: float = 1e-4) -> list[tuple[int, int]]:
    """Maximal runs of two or more neighbouring singular values that are tied.

    Inside a run the singular vectors are unique, or stable, only as a subspace.

    Neighbours are tied where s_i − s_{i+1} <= rtol · s_i, or where both are zero: at or below `ZERO_TIE` ·
    max(s). Ties chain, so the ends of a long run may differ by more than rtol.

    Args:
        s: one spectrum, (r,), descending, nonnegative and finite, in any unit.
        rtol: largest relative gap of a tie, at least 0.

    Returns:
        (start, size) of each run, in order: s[start : start + size] are tied, size >= 2.

    Raises:
        TypeError: the dtype is not floating point.
        ValueError: not one-dimensional, not descending, a negative, NaN or inf value, or a negative rtol.
    """
    if s.ndim != 1:
        raise ValueError(f"one spectrum, (r,), is needed, got shape {tuple(s.shape)}")
    if not rtol >= 0:
        raise ValueError(f"rtol must be at least 0, got {rtol}")
    values: list[float] = _unit_spectrum(s).tolist()
    blocks: list[tuple[int, int]] = []
    start = 0
    for i in range(1, len(values) + 1):
        if i < len(values):
            above, below = values[i - 1], values[i]
            if below > above:
                raise ValueError("singular values must be descending")
            if above - below <= rtol * above or above <= ZERO_TIE:
                continue
        if i - start >= 2:
            blocks.append((start, i - start))
        start = i
    return blocks


def _unit_spectrum(s: Tensor) -> Tensor:
    """s / max(s) in float64, (..., r); zeros for a zero matrix."""
    if not s.is_floating_point():
        raise TypeError(f"singular values must be real floating point, got {s.dtype}")
    if s.ndim < 1:
        raise ValueError("singular values must have at least one dimension")
    s = s.detach().to(torch.float64)
    if not bool(((s >= 0) & s.isfinite()).all()):
        raise ValueError("singular values must be nonnegative and finite")
    if s.shape[-1] == 0:
        return s
    top = s.amax(-1, keepdim=True)
    return s / torch.where(top > 0, top, 1.0)
