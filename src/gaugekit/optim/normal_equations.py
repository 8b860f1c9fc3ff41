"""The normal equations of vertical parts: min |(dA, dB) − tangent of X| in a metric, solved for X.

Legend, groups, metrics and the treatment of zeros: `gaugekit.optim.horizontal`. All of this is float64 or complex128.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gaugekit.linalg import double

__all__ = ["Form", "Group", "Metric", "Tangent", "dot", "generator", "gram", "tangent_of", "weights"]

Group = Literal["gl", "o", "scale"]
Metric = Literal["euclidean", "mixed", "invariant"]
Tangent = tuple[Tensor, Tensor]
"""(dA, dB), or (A, B)."""

TOLERANCE = 1e-14
"""Where conjugate gradients stop: residual over right-hand side, in the norm of the preconditioner."""


@dataclass(frozen=True)
class Form:
    """axes · diag(values) · axesᴴ, (..., r, r), positive or semidefinite; axes of None are the rows' own."""

    values: Tensor
    axes: Tensor | None = None

    @property
    def basis(self) -> Tensor:
        assert self.axes is not None, "rows are a basis that is not written down"
        return self.axes

    def apply(self, x: Tensor) -> Tensor:
        if self.axes is None:
            return self.values.unsqueeze(-1) * x
        return self.axes @ (self.values.unsqueeze(-1) * (self.axes.mH @ x))

    def diagonal(self, frame: Tensor) -> Tensor:
        """That of frameᴴ · form · frame, (..., r)."""
        inside = frame if self.axes is None else self.axes.mH @ frame
        return (self.values.unsqueeze(-1) * inside.abs().square()).sum(-2)

    def inverse(self) -> Form:
        return Form(1 / self.values, self.axes)

    def range(self) -> Form:
        """The orthogonal projector onto the range."""
        return Form((self.values > 0).to(self.values), self.axes)

    def filled(self) -> Form:
        """Zeros replaced, by the largest value or else by 1; rows have nothing to do with one another's values."""
        top = self.values if self.axes is None else self.values.amax(-1, keepdim=True)
        return Form(torch.where(self.values > 0, self.values, torch.where(top > 0, top, 1.0)), self.axes)


def gram(x: Tensor, name: str, group: Group) -> Form:
    """X Xᴴ, or the squares of its rows for "scale", with what is zero to rounding of x's dtype set to zero."""
    values = double(x)
    squares = values.abs().square().sum(-1) if group == "scale" else values @ values.mH
    if not bool(torch.isfinite(squares).all()):
        raise ValueError(f"{name} has entries that are NaN, infinite or beyond 1e150: no orbit passes through it")
    return Form(squares) if group == "scale" else _cut(squares, torch.finfo(x.dtype).eps)


def _cut(gram: Tensor, eps: float) -> Form:
    values, basis = torch.linalg.eigh(gram)
    size = 4 * values.shape[-1]
    cutoff = max(size * torch.finfo(values.dtype).eps, (size * eps) ** 2)
    return Form(torch.where(values > cutoff * values[..., -1:], values, 0.0), basis)


def weights(k: Form, el: Form, metric: Metric) -> tuple[Form, Form]:
    if metric == "euclidean":
        return Form(torch.ones_like(k.values)), Form(torch.ones_like(k.values))
    return (el.filled(), k.filled()) if metric == "mixed" else (k.filled().inverse(), el.filled().inverse())


def tangent_of(a: Tensor, b: Tensor, x: Tensor, group: Group, degree: float) -> Tangent:
    if group == "scale":
        return x.unsqueeze(-1) * a, -degree * x.unsqueeze(-1) * b
    return x @ a, -x.mH @ b


def generator(a: Tensor, b: Tensor, da: Tensor, db: Tensor, group: Group, metric: Metric, degree: float) -> Tensor:
    k, el = gram(a, "a", group), gram(b, "b", group)
    w_a, w_b = weights(k, el, metric)
    a, b, da, db = (double(x) for x in (a, b, da, db))
    if group == "scale":
        along_a, along_b = (w.values * (x.conj() * dx).real.sum(-1) for w, x, dx in ((w_a, a, da), (w_b, b, db)))
        return _over(along_a - degree * along_b, w_a.values * k.values + degree**2 * w_b.values * el.values)
    of_a, of_b = a @ da.mH, b @ db.mH
    if group == "o":
        return _skew_solution(k, el, w_a, w_b, w_a.apply(of_a.mH) + w_b.apply(of_b.mH), metric)
    # W_A X K + L X W_B = W_A dA Aᴴ − B dBᴴ W_B is diagonal between a basis for (W_A, L) and one for (K, W_B).
    right = w_a.apply(of_a.mH) - w_b.apply(of_b.mH).mH
    if metric == "invariant":
        (left, d), (other, e) = _whitened(k, el), _whitened(el, k)
        weight = d.unsqueeze(-1) + e.unsqueeze(-2)
    else:
        left, other = el.basis, k.basis
        weight = _outer(w_a.values, k.values) + _outer(el.values, w_b.values)
    x = left @ _over(left.mH @ right @ other, weight) @ other.mH
    idle = x - k.range().apply(x.mH).mH
    return x - idle + el.range().apply(idle)  # without the part of X that moves neither factor


def _whitened(form: Form, other: Form) -> tuple[Tensor, Tensor]:
    """M (..., r, r) and d (..., r) with Mᴴ F⁻¹ M = I and Mᴴ other M = diag(d), F being form with its zeros filled."""
    root = form.filled().values.sqrt().unsqueeze(-2)
    # Squared last: where one form is large and the other small, their product is not, but a sum of both terms would be.
    factor = other.values.sqrt().unsqueeze(-1) * (other.basis.mH @ form.basis) * root
    d, vectors = torch.linalg.eigh(factor.mH @ factor)
    return (form.basis * root) @ vectors, torch.maximum(d, torch.finfo(d.dtype).eps * d[..., -1:])


def _skew_solution(k: Form, el: Form, w_a: Form, w_b: Form, half: Tensor, metric: Metric) -> Tensor:
    """The skew X of W_A X K + K X W_A + W_B X L + L X W_B = half − halfᴴ.

    By conjugate gradients, preconditioned by the equation's diagonal in a frame. In "euclidean" and, for full rank, in
    "mixed" the equation is diagonal there, and one step does. In "invariant" no such frame is known: the eigenbasis of
    the worse conditioned Gram is the best of those tried.
    """
    one = torch.eye(half.shape[-1], dtype=half.dtype, device=half.device)
    matrices = [form.apply(one) for form in (w_a, k, w_b, el)]
    both = _cut(matrices[1] + matrices[3], 0.0)
    idle = one - both.range().apply(one)
    if metric == "euclidean":
        frame = both.basis
    elif metric == "mixed":
        frame = _whitened(k.filled().inverse(), el)[0]
    else:
        spread_k, spread_l = (f.filled().values.amax(-1) / f.filled().values.amin(-1) for f in (k, el))
        frame = torch.where((spread_k > spread_l)[..., None, None], k.basis, el.basis)
    at_a, at_k, at_b, at_l = (form.diagonal(frame) for form in (w_a, k, w_b, el))
    weight = _outer(at_a, at_k) + _outer(at_b, at_l)
    weight = weight + weight.mT
    # Nothing to divide by where neither factor moves: rounding must not grow there.
    top = weight.amax((-2, -1), keepdim=True)
    weight = torch.where(weight > 4 * half.shape[-1] * torch.finfo(weight.dtype).eps * top, weight, top)

    def equation(x: Tensor) -> Tensor:
        product = matrices[0] @ x @ matrices[1] + matrices[2] @ x @ matrices[3]
        return product - product.mH

    def preconditioned(x: Tensor) -> Tensor:
        x = frame @ _over(frame.mH @ x @ frame, weight) @ frame.mH
        return (x - x.mH) / 2

    # Relative to half itself: where its skew part is nothing but rounding there is nothing to solve.
    enough = TOLERANCE**2 * _over((frame.mH @ half @ frame).abs().square(), weight).sum((-2, -1), keepdim=True)
    x = _conjugate_gradients(equation, half - half.mH, preconditioned, enough)
    return x - idle @ x @ idle


def _conjugate_gradients(
    equation: Callable[[Tensor], Tensor], right: Tensor, preconditioned: Callable[[Tensor], Tensor], enough: Tensor
) -> Tensor:
    """x with equation(x) = right, for every matrix of a batch at once; those that are done wait for the others."""
    x, residual = torch.zeros_like(right), right
    direction = preconditioned(residual)
    size = dot(residual, direction)
    for _ in range(100 + 20 * right.shape[-1]):
        active = size > enough
        if not bool(active.any()):
            break
        image = equation(direction)
        length = torch.where(active, _over(size, dot(direction, image)), 0.0)
        x, residual = x + length * direction, residual - length * image
        ahead = preconditioned(residual)
        new = dot(residual, ahead)
        direction = ahead + _over(new, size) * direction
        size = torch.where(active, new, size)
    return x


def _over(x: Tensor, weight: Tensor) -> Tensor:
    """x / weight, 0 where the weight is 0."""
    return torch.where(weight > 0, x / torch.where(weight > 0, weight, 1.0), 0.0)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x.unsqueeze(-1) * y.unsqueeze(-2)


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Re tr(xᴴ y), (..., 1, 1)."""
    return (x.conj() * y).real.sum((-2, -1), keepdim=True)
