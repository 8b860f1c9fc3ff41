"""Random elements of the groups that move factors, and a fixed basis of the vectors that sum to zero."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["orthonormal_complement_of_ones", "random_invertible", "random_orthogonal"]


def random_orthogonal(
    n: int, generator: torch.Generator, dtype: torch.dtype = torch.float64, batch: Sequence[int] = ()
) -> Tensor:
    """Orthogonal matrices from the Haar measure of O(n), so that either determinant has probability one half; for a
    complex dtype unitary ones, from that of U(n).

    Args:
        n: size, at least 1.
        generator: source of randomness; the result lies on its device.
        dtype: floating or complex dtype of the result. Drawn and orthogonalised in double precision, then rounded.
        batch: leading dimensions.

    Returns:
        (*batch, n, n), Q Qᴴ = I to rounding in dtype, a pure number.

    Raises:
        TypeError: dtype is neither floating point nor complex.
        ValueError: n < 1.

    Source: Mezzadri, "How to generate random matrices from the classical compact groups", Notices AMS 54
        (2007): Q of the QR of a Gaussian matrix, with the signs (phases) that make the diagonal of R positive.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"dtype must be floating point or complex, got {dtype}")
    wide = torch.complex128 if dtype.is_complex else torch.float64
    gaussian = torch.randn((*batch, n, n), generator=generator, dtype=wide, device=generator.device)
    q, r = torch.linalg.qr(gaussian)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    size = diagonal.abs()
    phase = torch.where(size > 0, diagonal / torch.where(size > 0, size, 1.0), 1.0)
    return (q * phase[..., None, :]).to(dtype)


def random_invertible(
    n: int,
    generator: torch.Generator,
    condition: float = 10.0,
    batch: Sequence[int] = (),
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Invertible matrices Q₁ diag(s) Q₂ of a given condition number, of either sign of determinant alike.

    Q₁ and Q₂ are Haar-orthogonal, or unitary. log s is uniform between its two ends, which are always taken, so that
    max(s) / min(s) is the condition number; s is then scaled to geometric mean 1, so that |det| = 1.

    Args:
        n: size, at least 1. For n = 1 the condition number is 1 whatever is asked, and the result ±1, or a phase.
        generator: source of randomness; the result lies on its device.
        condition: cond₂ of the result, to rounding; finite, at least 1.
        batch: leading dimensions.
        dtype: float64 or complex128.

    Returns:
        (*batch, n, n), a pure number.

    Raises:
        ValueError: n < 1, or a condition that is not finite or below 1.
    """
    if not (math.isfinite(condition) and condition >= 1):
        raise ValueError(f"condition must be finite and at least 1, got {condition}")
    left = random_orthogonal(n, generator, dtype, batch)
    right = random_orthogonal(n, generator, dtype, batch)
    logs = torch.rand((*batch, n), generator=generator, dtype=torch.float64, device=generator.device)
    logs[..., 0] = 0.0
    logs[..., -1] = 1.0
    logs = (logs - logs.mean(-1, keepdim=True)) * math.log(condition)
    return left * logs.exp()[..., None, :] @ right


def orthonormal_complement_of_ones(d: int) -> Tensor:
    """An orthonormal basis of 1^⊥, the vectors of R^d whose entries sum to zero.

    Args:
        d: dimension, at least 1.

    Returns:
        C (d, d − 1) float64 on the CPU, a pure number: Cᵀ C = I and 1ᵀ C = 0 to rounding,
        so C Cᵀ = I − 1 1ᵀ / d.

    Raises:
        ValueError: d < 1.

    Source: all but the first column of the Householder reflection that takes e₁ to −1/√d (Golub and Van Loan,
        Matrix Computations, 4th ed., 5.1), in closed form: −1/√d in the first row, δᵢⱼ − 1/(d + √d) below.
    """
    if d < 1:
        raise ValueError(f"d must be at least 1, got {d}")
    root = math.sqrt(d)
    basis = torch.full((d, d - 1), -1 / (d + root), dtype=torch.float64)
    basis[0] = -1 / root
    basis[1:].diagonal().add_(1.0)
    return basis
