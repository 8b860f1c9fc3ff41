"""Low-rank approximations of products from their factors, with errors weighted by second moments of what they act on.

Shapes
------
A, B   (..., k, m), (..., k, n)   factors of G = Bᴴ A
S, T   (..., k, k)                rows of a new basis for A, and of its dual for B
s      (..., k)                   singular values, descending
M      (..., k, k)                second moment E v vᴴ of vectors v (k,)

Real or complex, in the dtype and on the device of the factors; float64 and complex128 are meant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gaugekit.linalg.factors import padded

__all__ = ["moment_factor", "product_truncation", "square_factor"]


def product_truncation(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The bases in which every best low-rank approximation of G = Bᴴ A is a cut.

    For every r, with S_r and T_r the first r rows of S and T, (T_r B)ᴴ (S_r A) is the matrix of rank r nearest to G in
    the Frobenius norm, at a distance of √(Σ_{i>r} s_i²). Its factors are balanced, both with the Gram matrix
    diag(s_1 ... s_r), and S_r T_rᴴ is the identity, so that Π = T_rᴴ S_r is the projector that does it. G is never
    formed.

    Where A is a factor of a second moment, M = A Aᴴ of vectors v, the same Π has the least E‖Bᴴ (1 − Π) v‖² among all
    matrices of rank r, which is then Σ_{i>r} s_i²: that is the squared Frobenius norm of Bᴴ (1 − Π) A.

    Args:
        a: A, (..., k, m).
        b: B, (..., k, n).

    Returns:
        (s, S, T). Rows of S and T whose singular value is zero to rounding (some k · eps of ‖A‖ ‖B‖) are zero, as s is
        there: these directions are not in the product. An error of relative size eps in s_1 is one of eps · s_1 / s_i
        in row i.

    Source: Eckart and Young, "The approximation of one matrix by another of lower rank", Psychometrika 1 (1936), on the
        core of the product's QR factors (Golub, Sølna and Van Dooren, SIAM J. Matrix Anal. Appl. 22, 2000).
    """
    k = a.shape[-2]
    a, b = square_factor(a), square_factor(b)
    u, s, vh = torch.linalg.svd(b.mH @ a)
    sizes = torch.linalg.matrix_norm(a) * torch.linalg.matrix_norm(b)
    live = s > 16 * k * torch.finfo(s.dtype).eps * sizes.unsqueeze(-1)
    # S A = Σ^½ Vᴴ, and Bᴴ A V = U Σ: with Uᴴ Bᴴ for Σ Vᴴ A⁻¹ no factor has to be inverted.
    scale = torch.where(live, s, 1.0).rsqrt() * live
    scale = scale.unsqueeze(-1).to(a.dtype)
    return s * live, scale * (u.mH @ b.mH), scale * (vh @ a.mH)


def square_factor(x: Tensor) -> Tensor:
    """L (..., k, k) with L Lᴴ = X Xᴴ for X (..., k, m), by QR: in place of X where only products of its rows count."""
    return torch.linalg.qr(padded(x).mH, mode="r").R.mH


def moment_factor(moment: Tensor) -> Tensor:
    """L (..., k, k) with L Lᴴ = M, for positive semidefinite M; what is negative by rounding counts as zero.

    Directions below √eps of the largest in L are lost in the rounding of M.
    """
    values, vectors = torch.linalg.eigh(moment)
    return vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2).to(moment.dtype)
