"""Spectra of low-rank products from their factors, and random elements of the groups that move the factors.

A head's circuit is G = Bᵀ A with A (..., r, m) and B (..., r, n), where r is the head dimension and m, n the
widths it reads and writes. G itself, (..., n, m), is never formed: a head costs O(r² (m + n)).

Shapes
------
A          (..., r, m)   first factor; G acts on vectors of length m
B          (..., r, n)   second factor; G answers vectors of length n
K = A Aᵀ   (..., r, r)   Gram matrix
L          (..., r, r)   lower Cholesky factor, K = L Lᵀ
s          (..., r)      singular values of G, descending, zeros included
...        any leading dimensions (layer, head, ...), sizes of one and of zero included

Spectra, Gram matrices and what is computed from them are float64 whatever the floating dtype of the input,
lie on the input's device, and carry no gradient. Factors are widened to float64 a few heads at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = [
    "balance",
    "balance_defect",
    "degenerate_blocks",
    "effective_rank",
    "grams",
    "numerical_rank",
    "orthonormal_complement_of_ones",
    "product_spectrum",
    "random_invertible",
    "random_orthogonal",
    "spectrum_from_grams",
    "stable_rank",
]

EPS = torch.finfo(torch.float64).eps

CONDITION_LIMIT = 1e4
"""Largest ‖L‖_F ‖L⁻¹‖_F, an upper bound on cond₂ of the factor, at which its Cholesky factor is used."""

CHUNK = 2**20
"""Elements of a factor that are held in float64 at once, or one matrix if that is larger."""

ZERO_TIE = 1e-12
"""Share of the largest singular value at or below which `degenerate_blocks` takes one for zero."""


# --- spectra of products ------------------------------------------------------------------------------------


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
    _check_factor(factors, "factors")

    def gram(part: Tensor) -> tuple[Tensor]:
        wide = part.to(torch.float64)
        return (wide @ wide.mT,)

    return _in_chunks(gram, factors)[0]


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
    batch = _check_pair(a, b)
    r = a.shape[-2]
    if 0 in (r, a.shape[-1], b.shape[-1]) or 0 in batch:
        return torch.zeros((*batch, r), dtype=torch.float64, device=a.device)
    if not batch:
        return product_spectrum(a[None], b[None])[0]
    gram_a, scale_a = _scaled_grams(a, "a")
    gram_b, scale_b = _scaled_grams(b, "b")
    core, sound = _cholesky_core(gram_a, gram_b)
    a, b = (x.expand(*batch, *x.shape[-2:]) for x in (a, b))
    per_chunk = max(1, CHUNK // (r * max(a.shape[-1], b.shape[-1])))
    for redo in (~sound).nonzero().split(per_chunk):
        items = redo.unbind(-1)
        core[items] = _qr_core(_scaled(a[items], "a")[0], _scaled(b[items], "b")[0])
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
    batch = _check_pair(gram_a, gram_b)
    r = gram_a.shape[-2]
    if gram_a.shape[-1] != r or gram_b.shape[-1] != r:
        raise ValueError(f"Gram matrices are square, got {tuple(gram_a.shape)} and {tuple(gram_b.shape)}")
    if r == 0 or 0 in batch:
        empty = torch.zeros((*batch, r), dtype=torch.float64, device=gram_a.device)
        return empty, torch.ones(batch, dtype=torch.bool, device=gram_a.device)
    gram_a, scale_a = _scaled(gram_a, "gram_a")
    gram_b, scale_b = _scaled(gram_b, "gram_b")
    core, sound = _cholesky_core(gram_a, gram_b)
    core = torch.where(sound[..., None, None], core, 0.0)
    s = torch.linalg.svdvals(core) * scale_a[..., 0].sqrt() * scale_b[..., 0].sqrt()
    return torch.where(sound[..., None], s, math.nan), sound


def _check_factor(x: Tensor, name: str) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{name} must be real floating point, got {x.dtype}")
    if x.ndim < 2:
        raise ValueError(f"{name} must have at least two dimensions, got shape {tuple(x.shape)}")


def _check_pair(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """The common leading dimensions of two factors of the same r."""
    _check_factor(a, "the first factor")
    _check_factor(b, "the second factor")
    if a.shape[-2] != b.shape[-2]:
        raise ValueError(f"factors must share r = shape[-2], got {tuple(a.shape)} and {tuple(b.shape)}")
    try:
        return tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    except RuntimeError:
        raise ValueError(f"leading dimensions do not broadcast: {tuple(a.shape)} and {tuple(b.shape)}") from None


def _largest(x: Tensor, name: str) -> Tensor:
    """max|x| of every matrix, (..., 1, 1); 0 for an empty one."""
    if 0 in x.shape[-2:]:
        return x.new_zeros((*x.shape[:-2], 1, 1))
    top = torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True))
    if not bool(top.isfinite().all()):
        raise ValueError(f"{name} has NaN or inf entries")
    return top


def _scaled(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """x / p in float64, (..., r, m), and the power of two p <= max|x| < 2p of every matrix, (..., 1, 1).

    p is the smallest normal number for a zero matrix, so that the larger of two scales suits both matrices.
    """
    wide = x.detach().to(torch.float64)
    top = _largest(wide, name)
    mantissa, _ = torch.frexp(top)  # in [1/2, 1)
    scale = torch.where(top > 0, top / (2 * mantissa), torch.finfo(torch.float64).tiny)
    return (wide / scale if x.dtype == torch.float64 else wide.div_(scale)), scale  # never in place on x


def _scaled_grams(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Gram matrices of x / p, (..., r, r), and p, (..., 1, 1), as `_scaled` has it."""

    def gram(part: Tensor) -> tuple[Tensor, Tensor]:
        wide, scale = _scaled(part, name)
        return wide @ wide.mT, scale

    gram_, scale = _in_chunks(gram, x)
    return gram_, scale


def _in_chunks(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> tuple[Tensor, ...]:
    """function(x), (..., r, m) to any (..., p, q), on at most `CHUNK` elements, or one matrix, at a time."""
    if x.ndim == 2 or x.numel() <= CHUNK:
        return function(x)
    if x.shape[0] == 1:
        return tuple(result[None] for result in _in_chunks(function, x[0]))
    parts = x.split(max(1, CHUNK // x[0].numel()))
    return tuple(torch.cat(results) for results in zip(*(_in_chunks(function, part) for part in parts), strict=True))


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


# --- summaries of a spectrum and of a pair of factors -------------------------------------------------------


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
    _check_pair(a, b)
    gram_a, scale_a = _scaled_grams(a, "a")
    gram_b, scale_b = _scaled_grams(b, "b")
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
    largest = (torch.linalg.matrix_norm(r_a) * torch.linalg.matrix_norm(r_b)).amax()
    floor = 16 * k * torch.finfo(s.dtype).eps * largest
    root = torch.where(s > floor, s, 0.0).sqrt().unsqueeze(-1).to(a.dtype)
    return root * (vh @ torch.linalg.pinv(r_a.mH)), root * (u.mH @ torch.linalg.pinv(r_b.mH))


def padded(x: Tensor) -> Tensor:
    """At least as many columns as rows, by zeros."""
    missing = x.shape[-2] - x.shape[-1]
    return x if missing <= 0 else torch.nn.functional.pad(x, (0, missing))


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


# --- random group elements and fixed bases ------------------------------------------------------------------


def random_orthogonal(
    n: int, generator: torch.Generator, dtype: torch.dtype = torch.float64, batch: Sequence[int] = ()
) -> Tensor:
    """Orthogonal matrices from the Haar measure of O(n), so that either determinant has probability one half.

    Args:
        n: size, at least 1.
        generator: source of randomness; the result lies on its device.
        dtype: floating dtype of the result. Drawn and orthogonalised in float64, then rounded.
        batch: leading dimensions.

    Returns:
        (*batch, n, n), Q Qᵀ = I to rounding in dtype, a pure number.

    Raises:
        TypeError: dtype is not floating point.
        ValueError: n < 1.

    Source: Mezzadri, "How to generate random matrices from the classical compact groups", Notices AMS 54
        (2007): Q of the QR of a Gaussian matrix, with the signs that make the diagonal of R positive.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be real floating point, got {dtype}")
    device = generator.device
    gaussian = torch.randn((*batch, n, n), generator=generator, dtype=torch.float64, device=device)
    q, r = torch.linalg.qr(gaussian)
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(torch.float64)
    return (q * sign[..., None, :]).to(dtype)


def random_invertible(n: int, generator: torch.Generator, condition: float = 10.0, batch: Sequence[int] = ()) -> Tensor:
    """Invertible matrices Q₁ diag(s) Q₂ of a given condition number, of either sign of determinant alike.

    Q₁ and Q₂ are Haar-orthogonal. log s is uniform between its two ends, which are always taken, so that
    max(s) / min(s) is the condition number; s is then scaled to geometric mean 1, so that |det| = 1.

    Args:
        n: size, at least 1. For n = 1 the condition number is 1 whatever is asked, and the result ±1.
        generator: source of randomness; the result lies on its device.
        condition: cond₂ of the result, to rounding; finite, at least 1.
        batch: leading dimensions.

    Returns:
        (*batch, n, n) float64, a pure number.

    Raises:
        ValueError: n < 1, or a condition that is not finite or below 1.
    """
    if not (math.isfinite(condition) and condition >= 1):
        raise ValueError(f"condition must be finite and at least 1, got {condition}")
    left = random_orthogonal(n, generator, batch=batch)
    right = random_orthogonal(n, generator, batch=batch)
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
