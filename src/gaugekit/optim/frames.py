"""Frames in which the factors of G = BᴴA are orthonormal, carried along as the factors move.

Legend
------
N            products, a batch;  r rank;  m, n columns
A (N, r, m), B (N, r, n)   real or complex;  A → S A, B → S⁻ᴴ B is the group
C (N, r, r)  a frame of a factor: C A has orthonormal rows;  A → S A takes C to C S⁻¹, so C A does not change

What is computed from C A, C B and products of gradients with the partner's frame does not see the group. Frames of A
and B serve each other's updates: a gradient for A is ∂A = B ∂G, so C_B ∂A = (C_B B) ∂G, and a step U of the invariant
product in that frame is lifted to A as C_Bᴴ U, since Bᴴ C_Bᴴ U = (C_B B)ᴴ U.

Source: the frame of an orthonormal partner is that of LoRA-RITE [Yen et al., arXiv 2410.20625]; there it is found anew
by QR at each step, and moments are projected. Here it is turned as little as the factor's motion asks (the polar
factor), so that elementwise moments can be kept in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gaugekit.linalg import double

__all__ = [
    "Lifted",
    "across",
    "advance",
    "deficient",
    "first_frames",
    "inverse_root",
    "orthonormalizing",
    "plus",
    "rounding",
    "times",
]

NEAR = 0.3
"""Two Newton-Schulz steps are taken from where |M − I| (Frobenius) is at most this; eigenvectors beyond."""

DEFICIENT = 1e-4
"""Share of its mean square that is added to a factor without full rank, where its partner has not either: no step can
be free of the gauge there."""


@dataclass(frozen=True)
class Lifted:
    """Frames c_a, c_b (N, r, r), and the factors in the frames before: c_a A = root_a q_a, with q_a (N, r, m) and
    root_a (N, r, r) near the identity, and c_b B = root_b q_b. They are not multiplied, as root_a goes to a smaller
    matrix in every product. `unit` (N, 1, 1): √σ, σ the root of the mean square of G's singular values, or 1."""

    c_a: Tensor
    q_a: Tensor
    root_a: Tensor
    c_b: Tensor
    q_b: Tensor
    root_b: Tensor
    unit: Tensor


def times(c: Tensor, x: Tensor) -> Tensor:
    """C X, (N, r, r) and (N, r, m)."""
    return c * x if c.shape[-1] == 1 else c @ x


def plus(x: Tensor, c: Tensor, y: Tensor, keep: float = 1.0, sign: float = 1.0) -> Tensor:
    """keep · X + sign · C Y, (N, r, m)."""
    if c.shape[-1] == 1:
        return torch.addcmul(x if keep == 1 else keep * x, c.expand_as(y), y, value=sign)
    return torch.baddbmm(x, c, y, beta=keep, alpha=sign)


def across(x: Tensor, y: Tensor) -> Tensor:
    """X Yᴴ, (N, r, r)."""
    return torch.linalg.vecdot(y, x).unsqueeze(-1) if x.shape[-2] == 1 else x @ y.mH


def inverse_root(m: Tensor) -> Tensor:
    """M^(−1/2) of Hermitian M ≥ 0 (N, r, r): to |M/μ − I|⁴ where that is at most 0.3, μ the mean eigenvalue, and by
    eigenvectors elsewhere, with eigenvalues below rounding raised to it. Zero M gives the identity."""
    r = m.shape[-1]
    size = m.diagonal(dim1=-2, dim2=-1).real.mean(-1)[..., None, None]
    size = torch.where(size > 0, size, 1.0)
    if r == 1:
        return torch.where(m.real > 0, size.rsqrt(), 1.0).to(m.dtype)
    eye = torch.eye(r, dtype=m.dtype, device=m.device)
    unit = m / size
    z = 1.5 * eye - 0.5 * unit
    z = z @ (1.5 * eye - 0.5 * unit @ (z @ z))
    far = torch.linalg.matrix_norm(unit - eye) > NEAR
    if bool(far.any()):
        w, v = torch.linalg.eigh(unit[far])
        floor = r * torch.finfo(w.dtype).eps * w[..., -1:]
        w = torch.where(w[..., -1:] > 0, torch.maximum(w, floor), 1.0)
        z[far] = (v * w.rsqrt().unsqueeze(-2).to(v.dtype)) @ v.mH
    return z * size.rsqrt()


def orthonormalizing(m: Tensor) -> Tensor:
    """Some C (N, r, r) with C M Cᴴ = I, for Hermitian M > 0: triangular, or that of `inverse_root` where M is singular
    to rounding."""
    if m.shape[-1] == 1:
        return inverse_root(m)
    factor, failed = torch.linalg.cholesky_ex(m)
    if bool(failed.any()):
        return inverse_root(m)
    eye = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device).expand_as(m)
    return torch.linalg.solve_triangular(factor, eye, upper=False)


def deficient(x: Tensor) -> Tensor:
    """(N,) bool: whether a factor (N, r, m) has less than full row rank, to rounding of its dtype."""
    s = torch.linalg.svdvals(reduced(finite(x)))
    return s[..., -1] <= max(x.shape[-2:]) * torch.finfo(x.dtype).eps * s[..., 0]


def first_frames(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Frames (c_a, c_b) to begin with, and what is to be added to A Aᴴ (N, 1, 1) where A has not full rank.

    C A is the orthonormal basis of A's row space that comes nearest to a fixed one in general position, so it depends
    on that space alone, continuously. C_B is C_A^(−H), B seen where A is orthonormal, before `advance`.
    """
    rank, columns = a.shape[-2:]
    wide = finite(double(a))
    u, s, _ = torch.linalg.svd(reduced(wide))
    added = DEFICIENT * s.square().mean(-1, keepdim=True) * deficient(a).unsqueeze(-1)
    s = (s.square() + added).sqrt()
    frame = (u / torch.where(s > 0, s, 1.0).unsqueeze(-2)).mH
    seed = Generator("cpu").manual_seed(columns)  # on every device the same
    probe = torch.randn(columns, rank, generator=seed, dtype=wide.dtype, device="cpu").to(a.device)
    left, _, right = torch.linalg.svd(frame @ (wide @ probe))
    frame = (left @ right).mH @ frame
    return frame.to(a.dtype), torch.linalg.inv(frame).mH.to(a.dtype), added.unsqueeze(-1).to(a.real.dtype)


def finite(x: Tensor) -> Tensor:
    """Zero where an entry is NaN or inf, which no decomposition takes: state is also made for parameters that await a
    checkpoint, in memory that was never written."""
    return torch.where(x.isfinite(), x, 0)


def reduced(x: Tensor) -> Tensor:
    """(N, r, r) with the same X Xᴴ."""
    missing = x.shape[-2] - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing >= 0 else torch.linalg.qr(x.mH, mode="r").R.mH


def rounding(squares: Tensor) -> Tensor:
    """What of the squares of singular values, of which `squares` is the sum, cannot be told from zero."""
    return torch.finfo(squares.dtype).eps * squares


def advance(c_a: Tensor, c_b: Tensor, a: Tensor, b: Tensor, added: Tensor, reach: float, own: Tensor | None) -> Lifted:
    """The frames carried to the factors where they are now: turned by the polar factor of C A, as little as possible.

    c_b makes B Bᴴ + floor² (A Aᴴ)⁻¹ the identity: a step of length 1 in its rows moves A by 1/floor of itself at most,
    however short B is. The floor is the length of a step of B, so this matters only for parts of the product that are
    not longer than that, LoRA's zero B above all. A and B are not alike in this: one of them must be free to leave
    zero. Without a step, what is below `rounding` is the floor: c_b would grow without end where B has not full rank.

    Args:
        c_a, c_b: the frames where the factors were.
        a, b: the factors.
        added: (N, 1, 1), goes to the diagonal of A Aᴴ.
        reach: the length of a step of B over its unit.
        own: which products (N, 1, 1) have a unit of their own, √σ; for others, and without it, the unit is 1.
    """
    q_a = times(c_a, a)
    m = across(q_a, q_a)
    root_a = inverse_root(m + added * across(c_a, c_a) if bool((added > 0).any()) else m)
    c_a = times(root_a, c_a)
    q_b = times(c_b, b)
    m, ratio = across(q_b, q_b), across(c_b, c_a)
    back = 1 / ratio if ratio.shape[-1] == 1 else torch.linalg.inv(ratio)  # to where A is orthonormal
    squares = (times(back, m) * back.conj()).real.sum((1, 2), keepdim=True)
    unit = torch.ones_like(squares)
    if own is not None:
        unit = torch.where(own > 0, (squares / m.shape[-1]) ** 0.25, unit)
    floor = (reach * unit) ** 2 if reach else rounding(squares)
    root_b = inverse_root(m + floor * across(ratio, ratio))
    return Lifted(c_a, q_a, root_a, times(root_b, c_b), q_b, root_b, unit)
