"""Singular values of G = Bᵀ A from its factors or from their Gram matrices; G is never formed.

Shapes
------
A, B       (..., r, m), (..., r, n)   factors
K = A Aᵀ   (..., r, r)                Gram matrix
L          (..., r, r)                lower Cholesky factor, K = L Lᵀ
s          (..., r)                   singular values of G, descending, zeros included

All results are float64, lie on the input's device, and carry no gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gaugekit.linalg.scaling import at_once, check_factor, check_pair, in_chunks, scaled, scaled_grams

__all__ = ["grams", "product_spectrum", "spectrum_from_grams"]

CONDITION_LIMIT = 1e4
"""Largest ‖L‖_F ‖L⁻¹‖_F, an upper bound on cond₂ of the factor, at which its Cholesky factor is used."""


@torch.no_grad()
def grams(factors: Tensor) -> Tensor:
    """Gram matrices A Aᵀ of the rows of each factor.

    Args:
        factors: A, (..., r, m), any floating dtype.

    Returns:
        (..., r, r) float64, in the square of the unit of A. Inputs of 32 bits or fewer are converted to
        float64 without loss and their pairwise products are exact, so that only the sum over m is rounded.
        float64 entries beyond about 1e±150 overflow or underflow (`product_spectrum` rescales and does not).

    Raises:
        TypeError: the dtype is not floating point.
        ValueError: fewer than two dimensions.
    """
    check_factor(factors, "factors")

    def gram(part: Tensor) -> tuple[Tensor]:
        wide = part.to(torch.float64)
        return (wide @ wide.mT,)

    return in_chunks(gram, factors)[0]


@torch.no_grad()
def product_spectrum(a: Tensor, b: Tensor) -> Tensor:
    """Singular values of every G = Bᵀ A, without forming G.

    With K_A = A Aᵀ = L_A L_Aᵀ and K_B = B Bᵀ = L_B L_Bᵀ (Cholesky), A = L_A U and B = L_B V with U, V of
    orthonormal rows, so that G = Vᵀ (L_Bᵀ L_A) U has the singular values of the (r, r) core L_Bᵀ L_A. The
    core's absolute error grows as eps · cond(A), since forming K squares the condition. So for items in which
    either factor is ill-conditioned or rank-deficient (Cholesky fails, or ‖L‖_F ‖L⁻¹‖_F > `CONDITION_LIMIT`)
    the core is R_B R_Aᵀ instead, with the triangular factors of QR of Aᵀ and Bᵀ, whose error does not depend
    on the condition.

    Args:
        a: A, (..., r, m), any floating dtype.
        b: B, (..., r, n), on the same device. The leading dimensions broadcast against those of `a`.

    Returns:
        (..., r) float64, descending, in the unit of A times the unit of B. Always r values: where G has
        smaller rank (r > min(m, n) included) the trailing ones are zero, to rounding. The absolute error is
        below 1e-12 ‖A‖₂ ‖B‖₂ (some 1e-15 ‖A‖₂ ‖B‖₂ where QR is used or cond ≲ 10). Each factor is divided by
        a power of two near its largest entry first, which is exact, so that entries as large as 1e±300 are
        harmless; a singular value beyond the float64 range comes out as inf.

    Raises:
        TypeError: a dtype is not floating point.
        ValueError: fewer than two dimensions, different r, leading dimensions that do not broadcast, or NaN
            or inf entries.

    Source: the QR core is Golub, Sølna and Van Dooren, "Computing the SVD of a general matrix
        product/quotient", SIAM J. Matrix Anal. Appl. 22 (2000), with two factors; the Cholesky core is the
        same with R from the normal equations (Golub and Van Loan, Matrix Computations, 4th ed., 5.3).
    """
    batch = check_pair(a, b)
    r = a.shape[-2]
    if 0 in (r, a.shape[-1], b.shape[-1]) or 0 in batch:
        return torch.zeros((*batch, r), dtype=torch.float64, device=a.device)
    if not batch:
        return product_spectrum(a[None], b[None])[0]
    gram_a, scale_a = scaled_grams(a, "a")
    gram_b, scale_b = scaled_grams(b, "b")
    core, sound = _cholesky_core(gram_a, gram_b)
    a, b = (x.expand(*batch, *x.shape[-2:]) for x in (a, b))
    for redo in (~sound).nonzero().split(at_once(r * max(a.shape[-1], b.shape[-1]))):
        items = redo.unbind(-1)
        core[items] = _qr_core(scaled(a[items], "a")[0], scaled(b[items], "b")[0])
    s = torch.linalg.svdvals(core)
    s[..., min(r, a.shape[-1], b.shape[-1]) :] = 0.0
    # The smaller scale first: no step overflows unless the result does.
    return s * torch.minimum(scale_a, scale_b)[..., 0] * torch.maximum(scale_a, scale_b)[..., 0]


@torch.no_grad()
def spectrum_from_grams(gram_a: Tensor, gram_b: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values of every G = Bᵀ A from the Gram matrices of its factors alone, where these suffice.

    For callers who hold K_A and K_B already, or whose B is too wide to hold: if B = [B₁ B₂ ...] is stacked
    along its columns (query heads that share one key head), K_B = Σ K_Bᵢ. The values are those of
    `product_spectrum` where both factors are well-conditioned. Elsewhere the Gram matrices have lost the
    answer to rounding; pass those items' factors to `product_spectrum`.

    Args:
        gram_a: K_A = A Aᵀ, (..., r, r), symmetric, any floating dtype (float64 for the stated accuracy).
        gram_b: K_B = B Bᵀ, (..., r, r), on the same device. The leading dimensions broadcast.

    Returns:
        (s, sound). s (..., r) float64, descending, in the unit of A times the unit of B, with absolute error
        below 1e-12 ‖A‖₂ ‖B‖₂ if the Gram matrices are accurate to rounding; NaN where unsound. sound (...)
        bool: both Cholesky factors exist with ‖L‖_F ‖L⁻¹‖_F <= `CONDITION_LIMIT`.

    Raises:
        TypeError: a dtype is not floating point.
        ValueError: not square, different r, leading dimensions that do not broadcast, or NaN or inf entries.

    Source: see `product_spectrum`.
    """
    batch = check_pair(gram_a, gram_b)
    r = gram_a.shape[-2]
    if gram_a.shape[-1] != r or gram_b.shape[-1] != r:
        raise ValueError(f"Gram matrices are square, got {tuple(gram_a.shape)} and {tuple(gram_b.shape)}")
    if r == 0 or 0 in batch:
        empty = torch.zeros((*batch, r), dtype=torch.float64, device=gram_a.device)
        return empty, torch.ones(batch, dtype=torch.bool, device=gram_a.device)
    gram_a, scale_a = scaled(gram_a, "gram_a")
    gram_b, scale_b = scaled(gram_b, "gram_b")
    core, sound = _cholesky_core(gram_a, gram_b)
    core = torch.where(sound[..., None, None], core, 0.0)
    s = torch.linalg.svdvals(core) * scale_a[..., 0].sqrt() * scale_b[..., 0].sqrt()
    return torch.where(sound[..., None], s, math.nan), sound


def _cholesky_core(gram_a: Tensor, gram_b: Tensor) -> tuple[Tensor, Tensor]:
    """L_Bᵀ L_A, (..., r, r), and whether both were sound, (...). Unsound items hold anything."""
    lower_a, sound_a = _cholesky(gram_a)
    lower_b, sound_b = _cholesky(gram_b)
    return lower_b.mT @ lower_a, sound_a & sound_b


def _cholesky(gram: Tensor) -> tuple[Tensor, Tensor]:
    """L (..., r, r), and whether it is there and well-conditioned, (...)."""
    lower, info = torch.linalg.cholesky_ex(gram)
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    condition = torch.linalg.matrix_norm(lower) * torch.linalg.matrix_norm(inverse)
    return lower, (info == 0) & (condition <= CONDITION_LIMIT)  # NaN compares false


def _qr_core(a: Tensor, b: Tensor) -> Tensor:
    """R_B R_Aᵀ, padded with zeros to (..., r, r)."""
    core = torch.linalg.qr(b.mT, mode="r").R @ torch.linalg.qr(a.mT, mode="r").R.mT
    r = a.shape[-2]
    return torch.nn.functional.pad(core, (0, r - core.shape[-1], 0, r - core.shape[-2]))
