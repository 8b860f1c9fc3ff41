"""Dressed states: a sequence of token vectors in a frame that the tokens choose themselves [FR IV.1].

Tokens are rows, X is (..., n, d). A change of frame g acts as X → X gᵀ. A dressing is a map u with

    u(X gᵀ) = u(X) g⁻¹,   X̂ = X u(X)ᵀ,   hence   X̂(X gᵀ) = X̂(X),

so the dressed states X̂ are the same in whatever frame X was written. Where u has orthonormal rows that span the
tokens, X = X̂ u. Each dressing names the group of its g; outside that group X̂ does change. The one here is the
singular frame; others are in `frames`.

Legend: n tokens, d width, m rows of the frame, u (..., m, d), V = uᵀ, X = U Σ Vᵀ, λ = σ².

Everything is computed in float32 or better and returned in the dtype of X. Gradients of any order are finite; the
derivative of a library SVD, which is NaN at ties, is never taken.

Sources: [FR] François and Ravera, arXiv 2602.18948. The derivative is first-order perturbation theory of XᵀX.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gaugekit.geometry.rows import as_tokens, largest
from gaugekit.linalg import ZERO_TIE, degenerate_blocks
from gaugekit.linalg.scaling import power_of_two

__all__ = ["SVD", "Ambiguity", "Dressed", "Dressing", "ambiguity", "dress"]

TIE = 1e-4
"""Neighbouring singular values are tied where their gap is at most this share of the larger."""


@dataclass(frozen=True)
class Dressed:
    """States X̂ (..., n, m), in the unit of X, and the frame u (..., m, d) they are written in: X̂ = X uᵀ."""

    states: Tensor
    frame: Tensor


class Dressing(ABC):
    """A frame chosen by the tokens. A new one needs its `group` and its `frame`."""

    group: str
    """The frame changes g for which u(X gᵀ) = u(X) g⁻¹."""

    @abstractmethod
    def frame(self, x: Tensor) -> Tensor:
        """u (..., m, d) for x (..., n, d), float32 or float64 and finite."""

    def __call__(self, x: Tensor) -> Dressed:
        """X̂ and u, in the dtype of x (..., n, d).

        Raises:
            TypeError: the dtype is not floating point.
            ValueError: fewer than two dimensions, NaN or inf entries, or no such frame (see the class).
        """
        wide = as_tokens(x)
        u = self.frame(wide)
        return Dressed((wide @ u.mT).to(x.dtype), u.to(x.dtype))


# --- the singular frame -------------------------------------------------------------------------------------


def dress(x: Tensor) -> Dressed:
    """X̂ = U Σ and u = Vᵀ of the singular value decomposition X = U Σ Vᵀ; group O(d).

    Signs are decided on U, which no frame change touches: in every column of X̂, the first entry within a share √ε of
    the column's largest magnitude is positive (ε of float32 or float64: 3.5e-4 or 1.5e-8). Any sign rule jumps
    somewhere; this one jumps where two entries of opposite sign come that close to sharing the largest magnitude.

    Preserved: X = X̂ u, and X̂(X gᵀ) = X̂(X) for g in O(d), both to rounding, for any n, d and rank, where the singular
    values are apart. Where they are tied, X̂ is defined up to the group that `ambiguity` reports.

    Singular values at or below max(n, d) ε (at least 1e-12) of the largest count as zero: their columns of X̂ are
    exactly zero and so have no sign to decide by. Their rows of u are some orthonormal vectors outside the row space.

    Gradients are those of X̂ and u wherever singular values are apart and not zero. Elsewhere the policy is: inside a
    block of tied values the frame is held still, as if it did not turn within the block; a zero singular value passes
    no gradient from its column of X̂, and its row of u turns only so far as staying orthogonal to the others
    demands. So gradients are finite always: of the order of 1 / (`TIE` σ) at most, for the smallest σ that is not zero.

    Args:
        x: X, (..., n, d), any floating dtype; n < d and rank-deficient X are allowed.

    Returns:
        `Dressed` with m = min(n, d).

    Raises:
        TypeError: the dtype is not floating point.
        ValueError: fewer than two dimensions, or NaN or inf entries.

    Source: [FR IV.1].
    """
    wide = as_tokens(x)
    # u does not depend on the unit of X, so that squares of σ need neither overflow nor vanish.
    unit = wide / power_of_two(largest(wide, -2, -1))
    with torch.no_grad():
        left, s, u = torch.linalg.svd(unit, full_matrices=False)
        s = _without_zeros(s, unit)
        u = u * _token_signs(left).unsqueeze(-1)
    u = _Turning.apply(unit, u, _block(s), s > 0)
    states = torch.where((s > 0).unsqueeze(-2), wide @ u.mT, 0.0)
    return Dressed(states.to(x.dtype), u.to(x.dtype))


class SVD(Dressing):
    """`dress` as a `Dressing`; there is such a frame for every finite X."""

    group = "O(d)"

    def frame(self, x: Tensor) -> Tensor:
        return dress(x).frame

    def __call__(self, x: Tensor) -> Dressed:
        return dress(x)


class _Turning(Function):
    """u, constant as far as autograd has seen, given the derivative that makes it follow X.

    dV = V Ω + (I − V Vᵀ) dXᵀ A Λ⁻¹ with A = X V, K = Aᵀ dX V + (…)ᵀ and Ω_ij = K_ij / (λ_j − λ_i), but 0 for i, j of
    one block. The backward is the adjoint of this, written in X and u alone, so that it can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, u: Tensor, block: Tensor, live: Tensor) -> Tensor:
        u = u.clone()
        ctx.save_for_backward(x, u, block, live)
        return u

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, u, block, live = ctx.saved_tensors
        (g,) = grads
        a = x @ u.mT
        squares = a.square().sum(-2)
        apart = block.unsqueeze(-1) != block.unsqueeze(-2)
        place = torch.arange(u.shape[-2], device=u.device)
        order = (place.unsqueeze(-1) - place).sign().to(squares.dtype)  # [i, j]: that of λ_j − λ_i
        gap = order * (squares.unsqueeze(-2) - squares.unsqueeze(-1))
        # Values that are apart have twice this gap at least; rounding may leave less of it, nothing, or the reverse.
        gap = torch.maximum(gap, TIE * torch.maximum(squares.unsqueeze(-2), squares.unsqueeze(-1)))
        n = torch.where(apart, order * (u @ g.mT) / torch.where(apart, gap, 1.0), 0.0)
        grad = a @ ((n + n.mT) @ u)
        if u.shape[-2] < u.shape[-1]:
            inverse = torch.where(live, 1 / torch.where(live, squares, 1.0), 0.0)
            outside = inverse.unsqueeze(-1) * (g - g @ u.mT @ u)
            # X outsideᵀ is zero, but its derivative is not where the rank is deficient.
            grad = grad + a @ outside + x @ outside.mT @ u
        return grad, None, None, None


def _token_signs(left: Tensor) -> Tensor:
    """±1 for each column of U (..., n, m): (..., m)."""
    if left.shape[-2] == 0:
        return left.new_ones((*left.shape[:-2], left.shape[-1]))
    size = left.abs()
    near = size >= size.amax(-2, keepdim=True) * (1 - torch.finfo(left.dtype).eps ** 0.5)
    first = near.to(torch.uint8).argmax(-2, keepdim=True)
    return torch.where(left.gather(-2, first) < 0, -1.0, 1.0).to(left.dtype).squeeze(-2)


def _without_zeros(s: Tensor, x: Tensor) -> Tensor:
    """Singular values of x with those that count as zero made so."""
    floor = max(max(x.shape[-2:]) * torch.finfo(x.dtype).eps, ZERO_TIE)
    return torch.where(s > floor * s[..., :1], s, 0.0)


def _block(s: Tensor) -> Tensor:
    """A number for each singular value, (..., m) to (..., m), shared exactly where `degenerate_blocks` ties them."""
    s = s.to(torch.float64)
    starts = s[..., :-1] - s[..., 1:] > TIE * s[..., :-1]
    return torch.nn.functional.pad(starts.cumsum(-1), (min(1, s.shape[-1]), 0))


# --- what the singular frame leaves open --------------------------------------------------------------------


@dataclass(frozen=True)
class Ambiguity:
    """What is left undecided in `dress(X)` [FR, residual ambiguity].

    Attributes:
        blocks: (first, size) of each run of tied singular values, zero ones included. Within a block of size k, the
            columns of X̂ and the rows of u are defined, or stable, only up to one element of O(k) for both.
        null: the block of the zero singular values, of any size from 1, or None; it is the last of `blocks`. Its
            columns of X̂ are zero, so that only its rows of u are open.
        group: all blocks together, such as "O(3) × O(2)", or "1" if nothing is open. The null block's factor is
            O(d − rank), which also turns the directions that u leaves out when n < d.
    """

    blocks: tuple[tuple[int, int], ...]
    null: tuple[int, int] | None
    group: str


@torch.no_grad()
def ambiguity(x: Tensor) -> Ambiguity:
    """The residual ambiguity of `dress(x)`, by the same rule and tolerances as its gradients.

    Args:
        x: one X, (n, d), any floating dtype. For a batch, ask for each.

    Raises:
        TypeError: the dtype is not floating point.
        ValueError: not two-dimensional, or NaN or inf entries.
    """
    if x.ndim != 2:
        raise ValueError(f"ambiguity is reported for one X of shape (n, d), got {tuple(x.shape)}; ask for each in turn")
    wide = as_tokens(x)
    s = _without_zeros(torch.linalg.svdvals(wide / power_of_two(largest(wide, -2, -1))), wide)
    rank = int((s > 0).sum())
    null = (rank, len(s) - rank) if rank < len(s) else None
    live = tuple(degenerate_blocks(s[:rank], TIE))
    factors = [f"O({size})" for _, size in live] + ([f"O({x.shape[-1] - rank})"] if null else [])
    return Ambiguity((*live, null) if null else live, null, " × ".join(factors) or "1")
