"""Frames that tokens can choose beside the singular one: Gram–Schmidt, a basis of tokens, the nearest to a reference.

Legend: n tokens, d width, m rows of the frame, X (..., n, d), u (..., m, d), X̂ = X uᵀ. What a frame is: `dressing`.

Gradients of any order are finite; the derivative of a library SVD, which is NaN at ties, is never taken. That of the
polar factor is first-order perturbation theory of Y = u H; ∂ of a solution of the Sylvester equation Z H + H Z = C
follows by differentiating the equation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gaugekit.geometry.dressing import Dressing
from gaugekit.geometry.rows import as_tokens, largest
from gaugekit.linalg.scaling import power_of_two

__all__ = ["GramSchmidt", "Polar", "TokenCoordinates"]


# --- frames of chosen tokens --------------------------------------------------------------------------------


class GramSchmidt(Dressing):
    """Chosen tokens, orthonormalised in their order; group O(d).

    With the chosen rows T of X, T = L u where L is lower triangular with a positive diagonal: the first chosen token
    points along the first axis, the second lies in the plane of the first two, on the positive side, and so on. With
    d chosen tokens X = X̂ u; with fewer, X̂ keeps only what lies in their span.

    Fails with ValueError where the chosen tokens are linearly dependent (a zero token included).

    Args:
        tokens: positions along n, at most d of them.
    """

    group = "O(d)"

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def frame(self, x: Tensor) -> Tensor:
        q, r = torch.linalg.qr(_independent(x, self.tokens).mT)
        sign = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(x.dtype)
        return sign.detach().unsqueeze(-1) * q.mT


class TokenCoordinates(Dressing):
    """Every token in the basis that d chosen tokens make; group GL(d).

    With the chosen rows T of X, X̂ = X T⁻¹ and u = T⁻ᵀ: the chosen tokens become rows of the identity. X = X̂ T, and
    since the group is larger, X̂ forgets lengths and angles as well.

    Fails with ValueError where the chosen tokens are linearly dependent. X̂ is the less accurate the nearer they are
    to being so.

    Args:
        tokens: d positions along n.
    """

    group = "GL(d)"

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def frame(self, x: Tensor) -> Tensor:
        if len(self.tokens) != x.shape[-1]:
            raise ValueError(f"a basis of {x.shape[-1]} dimensions needs as many tokens, got {len(self.tokens)}")
        return torch.linalg.inv(_independent(x, self.tokens)).mT


def _independent(x: Tensor, tokens: list[int]) -> Tensor:
    """The chosen rows of x, (..., k, d), if they are linearly independent."""
    n = x.shape[-2]
    if not all(-n <= token < n for token in tokens):
        raise ValueError(f"tokens {tokens} are not all among the {n} given")
    chosen = x[..., tokens, :]
    with torch.no_grad():
        scale = chosen.abs().amax(-1, keepdim=True)
        unit = torch.nn.functional.normalize(chosen / torch.where(scale > 0, scale, 1.0), dim=-1)
        dependent = len(tokens) > x.shape[-1] or _singular(torch.linalg.svdvals(unit))
    if dependent:
        raise ValueError(f"tokens {tokens} are linearly dependent and make no frame; choose others")
    return chosen


# --- the frame nearest to a reference -----------------------------------------------------------------------


class Polar(Dressing):
    """The frame in which X comes nearest to a reference; group O(d).

    u is the orthogonal matrix that minimises ‖X uᵀ − R‖_F (Procrustes): the polar factor of RᵀX. X = X̂ u. Tied
    singular values of RᵀX do no harm: u and its gradients are smooth wherever RᵀX is invertible.

    Fails with ValueError where RᵀX is singular, since u is then not unique: n < d, X or R without full column rank.

    Args:
        reference: R, (n, d), or with leading dimensions that broadcast against those of X.
    """

    group = "O(d)"

    def __init__(self, reference: Tensor) -> None:
        self.reference = reference

    def frame(self, x: Tensor) -> Tensor:
        reference = as_tokens(self.reference).to(x)
        if reference.shape[-2:] != x.shape[-2:]:
            raise ValueError(f"states {tuple(x.shape)} and reference {tuple(reference.shape)} differ in (n, d)")
        y = (reference / power_of_two(largest(reference, -2, -1))).mT @ (x / power_of_two(largest(x, -2, -1)))
        with torch.no_grad():
            left, s, right = torch.linalg.svd(y)
        if _singular(s):
            raise ValueError(
                "RᵀX is singular, so that no nearest frame is unique; it needs d independent tokens in both"
            )
        return _PolarFactor.apply(y, left @ right)


class _PolarFactor(Function):
    """u of Y = u H, given the derivative of the polar factor: du = u Z with Z H + H Z = uᵀ dY − dYᵀ u."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, u: Tensor) -> Tensor:
        u = u.clone()
        ctx.save_for_backward(y, u)
        return u

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, u = ctx.saved_tensors
        h = u.mT @ y
        w = u.mT @ grads[0]
        return u @ _Sylvester.apply((h + h.mT) / 2, w - w.mT), None


class _Sylvester(Function):
    """Z of Z H + H Z = C for a symmetric, positive definite H."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, c: Tensor) -> Tensor:
        s, b = torch.linalg.eigh(h)
        z = b @ (b.mT @ c @ b / (s.unsqueeze(-1) + s.unsqueeze(-2))) @ b.mT
        ctx.save_for_backward(h, z)
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        h, z = ctx.saved_tensors
        grad_c = _Sylvester.apply(h, grads[0])
        return -(z.mT @ grad_c + grad_c @ z.mT), grad_c


def _singular(s: Tensor) -> bool:
    """Whether any spectrum (..., k), descending, has a zero to rounding."""
    return s.shape[-1] > 0 and bool((s[..., -1] <= s.shape[-1] * torch.finfo(s.dtype).eps * s[..., 0]).any())
