"""Which part of a step runs along the orbit of a pair of factors, and which part changes what the pair computes.

Legend
------
A, B       (..., r, m), (..., r, n)   factors, real or complex, of G = Bᴴ A; leading axes (layer, head, ...) are alike
dA, dB     tangents: of the shapes of A and B
X          (..., r, r), or (..., r) real for "scale"   an element of the group's Lie algebra
K, L       (..., r, r)   A Aᴴ and B Bᴴ

An element S of the group takes A to S A and B to S⁻ᴴ B and leaves G alone, so the tangent of X, (X A, −Xᴴ B), is
vertical. Groups: "gl", all invertible S (complex ones for complex factors: a rotary pair of rows is one complex row,
r = 1); "o", orthogonal or unitary S, X skew; "scale", every row is a unit by itself and takes a real scale, of tangent
(x A, −degree · x B); degree 2 belongs to the squared ReLU.

Metrics ⟨(dA, dB), (eA, eB)⟩ = Re tr(W_A dA eAᴴ) + Re tr(W_B dB eBᴴ), of weights (W_A, W_B):
"euclidean" (I, I) · "mixed" (L, K) [HS] · "invariant" (K⁻¹, L⁻¹). The last two are unchanged by GL(r), so horizontal
parts move along with factors of full rank, and with B = 0 beside such an A. For "scale" K and L are the
rows' squared lengths, k and l, and "mixed" is "invariant" times k l: the same parts, but unchanged at degree 1 only.

Zero and rank-deficient factors: eigenvalues of K below max(4 r eps₆₄, (4 r eps)²) of its largest one count as zero, eps
being that of the factors' dtype: singular values of A some 1e-7 of the largest or less, or 4 r eps in float32. Of rows
of "scale" only zero itself does. Inside a weight a zero counts as the largest eigenvalue, or as 1 where all are zero,
so weights are positive and vertical parts determined: at B = 0, LoRA's start, all of (X A, 0), whatever the metric.
Along directions that move neither factor X is zero: it is the solution of least norm.

r×r algebra is float64 and batched, results have the dtype of A. No derivatives go through eigenvectors.

Sources: [HS] "Hide & Seek", arXiv 2505.05409; [FR] François & Ravera, arXiv 2602.18948, Table 1, for G and its group.
The equations for X are the normal equations of min |(dA, dB) − tangent of X| in the metric.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gaugekit.geometry.sphere import to_tangent
from gaugekit.linalg import double
from gaugekit.optim.normal_equations import Group, Metric, Tangent, dot, generator, gram, tangent_of, weights

__all__ = [
    "Group",
    "Metric",
    "Tangent",
    "charges",
    "drift",
    "horizontal_part",
    "inner",
    "orbit_tangent",
    "raised",
    "tangential",
    "vertical_generator",
    "vertical_part",
]


@torch.no_grad()
def vertical_generator(
    a: Tensor, b: Tensor, da: Tensor, db: Tensor, group: Group = "gl", metric: Metric = "euclidean", degree: float = 1.0
) -> Tensor:
    """X of the vertical part of (dA, dB): its tangent is the orbit direction nearest to (dA, dB) in the metric.

    Closed forms from eigenvectors of K and L, but for "o" in the "invariant" metric: that takes conjugate gradients,
    tens of steps, or hundreds where A and B both have condition 100.

    Returns:
        X (..., r, r), skew(-Hermitian) for "o", or (..., r) real for "scale"; a pure number.

    Raises (as all functions here):
        TypeError: not float32, float64, complex64 or complex128, or not all of one dtype.
        ValueError: shapes that do not fit, an unknown group or metric, a degree that is not positive and finite, or
            other than 1 without "scale", factors with NaN or inf entries.
    """
    _check(a, b, da, db, group, metric, degree)
    x = generator(a, b, da, db, group, metric, degree)
    return x.to(a.real.dtype if group == "scale" else a.dtype)


def orbit_tangent(a: Tensor, b: Tensor, x: Tensor, group: Group = "gl", degree: float = 1.0) -> Tangent:
    """(X A, −Xᴴ B), or (x A, −degree · x B) row by row for "scale": the velocity of (A, B) along its orbit."""
    _check(a, b, a, b, group, "euclidean", degree)
    shape = a.shape[:-1] if group == "scale" else (*a.shape[:-1], a.shape[-2])
    if x.shape != shape:
        raise ValueError(f'x must be {tuple(shape)} for group "{group}" beside these factors, got {tuple(x.shape)}')
    return tangent_of(a, b, x, group, degree)


@torch.no_grad()
def vertical_part(
    a: Tensor, b: Tensor, da: Tensor, db: Tensor, group: Group = "gl", metric: Metric = "euclidean", degree: float = 1.0
) -> Tangent:
    """The part of (dA, dB) along the orbit, orthogonal in the metric to what `horizontal_part` leaves."""
    ha, hb = horizontal_part(a, b, da, db, group, metric, degree)
    return da - ha, db - hb


@torch.no_grad()
def horizontal_part(
    a: Tensor, b: Tensor, da: Tensor, db: Tensor, group: Group = "gl", metric: Metric = "euclidean", degree: float = 1.0
) -> Tangent:
    """(dA, dB) without its vertical part: it changes G as (dA, dB) does, to first order, and is the shortest that does.

    The gradient of a loss of G alone is horizontal in the "euclidean" metric as it is, and in the others once `raised`.
    Rounding, where A and B have condition 100: within 4 eps of |(dA, dB)| in float32, and 1e-10 of it in float64.
    """
    _check(a, b, da, db, group, metric, degree)
    x = generator(a, b, da, db, group, metric, degree)
    va, vb = tangent_of(double(a), double(b), x, group, degree)
    return (da - va).to(a.dtype), (db - vb).to(a.dtype)


@torch.no_grad()
def inner(
    a: Tensor, b: Tensor, first: Tangent, second: Tangent, metric: Metric = "euclidean", group: Group = "gl"
) -> Tensor:
    """⟨first, second⟩ of two tangents (dA, dB) at (A, B), (...) real. The group tells whether weights are by rows."""
    for tangent in (first, second):
        _check(a, b, *tangent, group, metric)
    w_a, w_b = weights(gram(a, "a", group), gram(b, "b", group), metric)
    (da, db), (ea, eb) = ((double(x) for x in pair) for pair in (first, second))
    return (dot(w_a.apply(da), ea) + dot(w_b.apply(db), eb))[..., 0, 0].to(a.real.dtype)


@torch.no_grad()
def raised(
    a: Tensor, b: Tensor, grad_a: Tensor, grad_b: Tensor, metric: Metric = "euclidean", group: Group = "gl"
) -> Tangent:
    """The gradient as a tangent vector of the metric, (W_A⁻¹ ∂A, W_B⁻¹ ∂B): in "mixed" (L⁻¹ ∂A, K⁻¹ ∂B) [HS], scaled
    gradient descent's direction. `inner` of it with any (dA, dB) is the loss's derivative, Re tr(∂Aᴴ dA + ∂Bᴴ dB)."""
    _check(a, b, grad_a, grad_b, group, metric)
    w_a, w_b = weights(gram(a, "a", group), gram(b, "b", group), metric)
    return w_a.inverse().apply(double(grad_a)).to(a.dtype), w_b.inverse().apply(double(grad_b)).to(a.dtype)


def charges(a: Tensor, b: Tensor, group: Group = "gl", degree: float = 1.0) -> Tensor:
    """A Aᴴ − B Bᴴ, (..., r, r), or |a_i|² − degree · |b_i|² of each row, (..., r), for "scale": what gradient flow of
    an invariant loss conserves in the Euclidean metric. In the square of the factors' unit."""
    of_a, of_b = _squares(a, b, group, degree)
    return of_a - of_b


def drift(before: Tangent, after: Tangent, group: Group = "gl", degree: float = 1.0) -> Tensor:
    """How far the charges have moved between two pairs, (...) real: |Q' − Q| / |A Aᴴ + B Bᴴ|, in Frobenius norms, the
    larger one of the two sums; for "scale" in norms over rows. A pure number, 0 where all is zero."""
    (a, b), (a_after, b_after) = (_squares(*pair, group, degree) for pair in (before, after))
    if a.shape != a_after.shape:
        raise ValueError(f"both pairs must have the same rows, got {_shapes(*before)}, then {_shapes(*after)}")
    dims = -1 if group == "scale" else (-2, -1)
    change, size, size_after = (
        torch.linalg.vector_norm(x, dim=dims) for x in ((a_after - b_after) - (a - b), a + b, a_after + b_after)
    )
    size = torch.maximum(size, size_after)
    return change / torch.where(size > 0, size, 1.0)


def tangential(w: Tensor, dw: Tensor, dim: int = -1) -> Tensor:
    """dw without its component along w, slice by slice along `dim`: what is horizontal for weights whose length a norm
    undoes, or that keep to spheres. A zero slice of w has no direction: dw stays. The shape and dtype of w."""
    if w.shape != dw.shape:
        raise ValueError(f"w and dw must have one shape, got {_shapes(w, dw)}")
    return to_tangent(w.movedim(dim, -1), dw.movedim(dim, -1)).movedim(-1, dim)


def _squares(a: Tensor, b: Tensor, group: Group, degree: float) -> Tangent:
    _check(a, b, a, b, group, "euclidean", degree)
    if group == "scale":
        return a.abs().square().sum(-1), degree * b.abs().square().sum(-1)
    return a @ a.mH, b @ b.mH


def _check(
    a: Tensor, b: Tensor, da: Tensor, db: Tensor, group: Group, metric: Metric = "euclidean", degree: float = 1.0
) -> None:
    kinds = (torch.float32, torch.float64, torch.complex64, torch.complex128)
    if a.dtype not in kinds or any(x.dtype != a.dtype for x in (b, da, db)):
        found = ", ".join(str(x.dtype) for x in (a, b, da, db))
        raise TypeError(f"factors and tangents must be all of one dtype, float32, float64 or complex, got {found}")
    if a.ndim < 2 or b.ndim < 2 or a.shape[:-1] != b.shape[:-1] or a.shape[-2] == 0:
        raise ValueError(f"a (..., r, m), b (..., r, n) may differ in the last axis only, r > 0, got {_shapes(a, b)}")
    if da.shape != a.shape or db.shape != b.shape:
        raise ValueError(f"tangents must be of the factors' shapes, {_shapes(a, b)}, got {_shapes(da, db)}")
    if group not in ("gl", "o", "scale"):
        raise ValueError(f'group must be "gl", "o" or "scale", got {group!r}')
    if metric not in ("euclidean", "mixed", "invariant"):
        raise ValueError(f'metric must be "euclidean", "mixed" or "invariant", got {metric!r}')
    if not (math.isfinite(degree) and degree > 0):
        raise ValueError(f"degree must be positive and finite, got {degree}")
    if degree != 1 and group != "scale":
        raise ValueError(f'degree {degree} is for group "scale": other groups act on both factors alike')


def _shapes(*tensors: Tensor) -> str:
    return " and ".join(str(tuple(x.shape)) for x in tensors)
