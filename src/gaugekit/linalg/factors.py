"""Pairs of factors A (..., r, m) and B (..., r, n) of one product Bᵀ A, and the factors of heads that share one."""

from __future__ import annotations

import torch
from torch import Tensor

from gaugekit.linalg.scaling import check_pair, scaled_grams

__all__ = ["apart", "balance", "balance_defect", "beside", "product_svd"]


@torch.no_grad()
def balance_defect(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """How far two factors are from balanced, A Aᵀ = B Bᵀ.

    Args:
        a: A, (..., r, m), any floating dtype.
        b: B, (..., r, n), on the same device. The leading dimensions broadcast.

    Returns:
        (absolute, relative), each (...) float64: ‖A Aᵀ − B Bᵀ‖_F, in the square of the factors' unit, and the
        same over ‖A Aᵀ + B Bᵀ‖_F, a pure number from 0 (balanced) to 1 (say, one factor zero, or orthogonal
        Grams); 0 where both factors are zero. Rounding leaves some r · eps of relative defect in balanced
        factors.

    Raises:
        TypeError: a dtype is not floating point.
        ValueError: fewer than two dimensions, different r, leading dimensions that do not broadcast, or NaN
            or inf entries.

    Source: the conserved quantity of gradient flow in Arora, Cohen and Hazan, "On the optimization of deep
        networks", ICML 2018, and Du, Hu and Lee, "Algorithmic regularization in learning deep homogeneous
        models", NeurIPS 2018.
    """
    check_pair(a, b)
    gram_a, scale_a = scaled_grams(a, "a")
    gram_b, scale_b = scaled_grams(b, "b")
    scale = torch.maximum(scale_a, scale_b)  # one for both
    gram_a, gram_b = gram_a * (scale_a / scale).square(), gram_b * (scale_b / scale).square()
    absolute = torch.linalg.matrix_norm(gram_a - gram_b)
    total = torch.linalg.matrix_norm(gram_a + gram_b)
    relative = absolute / torch.where(total > 0, total, 1.0)
    return absolute * scale[..., 0, 0] * scale[..., 0, 0], relative


def balance(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """S and T, both (..., k, k), with S A and T B as short as they can be while (T B)ᴴ (S A) = Bᴴ A.

    With Bᴴ A = U Σ Vᴴ they are Σ^½ Vᴴ and Σ^½ Uᴴ, from QR of Aᴴ and Bᴴ; T = S⁻ᴴ unless a factor has not full rank: then
    the directions that the product does not show become zero in both. Real or complex, (..., k, m) and (..., k, n).
    """
    k = a.shape[-2]
    r_a, r_b = (torch.linalg.qr(padded(x).mH, mode="r").R for x in (a, b))
    u, s, vh = torch.linalg.svd(r_b @ r_a.mH)
    # Heads of one layer have been through the same sums, so the largest of them says what is rounding.
    sizes = torch.linalg.matrix_norm(r_a) * torch.linalg.matrix_norm(r_b)
    largest = sizes.amax() if sizes.numel() else 0.0
    floor = 16 * k * torch.finfo(s.dtype).eps * largest
    root = torch.where(s > floor, s, 0.0).sqrt().unsqueeze(-1).to(a.dtype)
    return root * (vh @ torch.linalg.pinv(r_a.mH)), root * (u.mH @ torch.linalg.pinv(r_b.mH))


def product_svd(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values and vectors of every G = Bᵀ A, without forming G.

    Args:
        a: A, (..., r, m), float32 or float64.
        b: B, (..., r, n), of the same dtype and device. The leading dimensions broadcast.

    Returns:
        (s, left, right) with G = leftᵀ diag(s) right, in the dtype of the factors. s (..., p), p = min(r, m, n),
        descending, in the unit of A times the unit of B; left (..., p, n) and right (..., p, m), of orthonormal rows,
        pure numbers. Rows whose values are zero, or tied, are unique only as far as that allows. The absolute error of
        s and of the product is some eps ‖A‖₂ ‖B‖₂, whatever the factors' condition.

    Source: Golub, Sølna and Van Dooren, "Computing the SVD of a general matrix product/quotient", SIAM J. Matrix Anal.
        Appl. 22 (2000): with QR of both, Aᵀ = Q_A R_A and Bᵀ = Q_B R_B, G is Q_B (R_B R_Aᵀ) Q_Aᵀ.
    """
    (q_a, r_a), (q_b, r_b) = torch.linalg.qr(a.mT), torch.linalg.qr(b.mT)
    u, s, vh = torch.linalg.svd(r_b @ r_a.mT, full_matrices=False)
    return s, (q_b @ u).mT, vh @ q_a.mT


def beside(factors: Tensor, groups: int) -> Tensor:
    """(h, r, n) → (g, r, h/g · n): the factors of the h/g heads that share one partner, side by side, so that one
    product holds all of theirs. Head i belongs to group i // (h/g)."""
    return factors.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)


def apart(factors: Tensor, heads: int) -> Tensor:
    """(g, r, h/g · n) → (h, r, n): what `beside` put together."""
    return factors.unflatten(-1, (heads // len(factors), -1)).transpose(1, 2).flatten(0, 1)


def padded(x: Tensor) -> Tensor:
    """At least as many columns as rows, by zeros."""
    missing = x.shape[-2] - x.shape[-1]
    return x if missing <= 0 else torch.nn.functional.pad(x, (0, missing))
