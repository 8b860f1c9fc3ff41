"""LayerNorm, RMSNorm, DyT and Derf as maps: values, derivatives, fibres, images and kernels.

References are torch's own norms in float64, autograd's Jacobians, and covariances of drawn states. Weights are random.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivariance import assert_equivariant, orthogonal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.functional import jacobian

from gaugekit.geometry import normalization as norms
from gaugekit.linalg import orthonormal_complement_of_ones

F32, F64 = torch.float32, torch.float64
EPSILONS = [0.0, 1e-12, 1e-5, 0.1, 1.0]
few = settings(max_examples=60, deadline=None)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def weight_of(d: int, seed: int = 1) -> Tensor:
    """Random, of both signs, away from 0."""
    raw = normal(d, seed=seed)
    return raw + raw.sign() * 0.3


def off(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest entry of b."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


# --- the hyperplane -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 3, 64])
def test_the_projector_removes_the_uniform_direction_and_nothing_else(d: int) -> None:
    p, uniform = norms.projector(d), norms.uniform_direction(d)
    x = normal(5, d)
    assert (p @ p - p).abs().max() < 1e-15 and torch.equal(p, p.mT)
    assert abs(float(uniform.norm()) - 1) < 1e-15 and (p @ uniform).abs().max() < 1e-15
    assert torch.linalg.matrix_rank(p) == d - 1
    assert (norms.centre(x) - x @ p).abs().max() < 1e-14
    assert norms.projector(d, F32).dtype == norms.uniform_direction(d, F32).dtype == F32


def test_a_large_mean_does_not_swamp_a_small_variance() -> None:
    """pytorch#51102, #40302: one pass, E[x²] − E[x]², is wrong where the mean is large and the variance small."""
    x = (1e4 + normal(8, 512)).float()
    exact = x.double()
    reference = F.layer_norm(exact, (512,), eps=0.0)
    one_pass = (x - x.mean(-1, keepdim=True)) / (
        x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
    ).sqrt()
    assert not off(one_pass, reference) < 1e-2  # this is an input on which the fault shows
    assert off(norms.layer_norm(x), reference) < 1e-6
    assert off(norms.centre(x), exact - exact.mean(-1, keepdim=True)) < 1e-6
    assert (norms.centre(x).double().sum(-1).abs() < 1e-4).all()


@pytest.mark.parametrize("value", [0.1, -0.3, 1e30, 1e-30, 7e4, 3.3e38])
@pytest.mark.parametrize("d", [3, 7, 768, 1000])
def test_a_constant_vector_is_exactly_zero_once_centred(value: float, d: int) -> None:
    x = torch.full((2, d), value)
    assert torch.equal(norms.centre(x), torch.zeros(2, d))
    assert torch.equal(norms.layer_norm(x), torch.zeros(2, d))
    assert torch.equal(norms.layer_norm(x, eps=1e-12), torch.zeros(2, d))


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", EPSILONS)
def test_values_are_those_of_torch_in_float64(eps: float) -> None:
    d = 24
    x, weight, bias = 3 * normal(4, 5, d) + 2, weight_of(d), normal(d, seed=2)
    assert off(norms.layer_norm(x, weight, bias, eps), F.layer_norm(x, (d,), weight, bias, eps)) < 1e-14
    assert off(norms.rms_norm(x, weight, eps), F.rms_norm(x, (d,), weight, eps)) < 1e-14
    assert off(norms.layer_norm(x, eps=eps), norms.rms_norm(x, eps=eps)) > 0.1


def test_tanh_and_erf_forms() -> None:
    d = 9
    x, weight, bias = normal(4, d), weight_of(d), normal(d, seed=2)
    alpha, shift = torch.tensor(0.7, dtype=F64), torch.tensor(-0.2, dtype=F64)
    assert off(norms.dyt(x, alpha, weight, bias), weight * torch.tanh(0.7 * x) + bias) < 1e-15
    assert off(norms.derf(x, alpha, shift, weight, bias), weight * torch.erf(0.7 * x - 0.2) + bias) < 1e-15
    assert torch.equal(norms.dyt(x, 0.7), norms.dyt(x, alpha)) and torch.equal(norms.dyt(x, 1.0), torch.tanh(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_the_float64_result_rounded_once(dtype: torch.dtype) -> None:
    """pytorch PR#133085, #66707, #41527: squares and sums of half-precision entries overflow or lose digits."""
    d = 256
    weight, bias = weight_of(d).to(dtype), normal(d, seed=2).to(dtype)
    maps: list[Callable[[Tensor], Tensor]] = [
        lambda x: norms.layer_norm(x, weight.to(x), bias.to(x), 1e-5),
        lambda x: norms.rms_norm(x, weight.to(x), 1e-5),
        lambda x: norms.dyt(x, 0.5, weight.to(x), bias.to(x)),
        lambda x: norms.derf(x, 0.5, 0.1, weight.to(x), bias.to(x)),
        lambda x: norms.layer_norm_jvp(x, weight.to(x).expand_as(x), weight.to(x), 1e-5),
        lambda x: norms.rms_norm_vjp(x, weight.to(x).expand_as(x), weight.to(x), 1e-5),
        lambda x: norms.dyt_jvp(x, weight.to(x).expand_as(x), 0.5, weight.to(x)),
        lambda x: norms.radius(x, 1e-5),
        norms.centre,
    ]
    for scale in (1e-3, 1.0, 2e4):  # the last one overflows when squared in float16
        x = (scale * normal(16, d).clamp(-3, 3)).to(dtype)
        for apply in maps:
            half, exact = apply(x), apply(x.double())
            assert half.dtype == dtype and exact.dtype == F64
            # Half an ulp (a whole one of the smallest number) and what float32 adds to it.
            bound = (
                0.501 * torch.finfo(dtype).eps * exact.abs()
                + 2e-6 * exact.abs().max()
                + torch.finfo(dtype).smallest_normal
            )
            assert ((half.double() - exact).abs() <= bound).all()


def test_float32_stays_float32_and_is_close_to_float64() -> None:
    x = normal(16, 100).float()
    for apply in (norms.layer_norm, norms.rms_norm):
        assert apply(x).dtype == F32 and off(apply(x), apply(x.double())) < 1e-6
        assert apply(x.double()).dtype == F64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32])
def test_eps_is_what_was_said_not_the_dtype_s(dtype: torch.dtype) -> None:
    """pytorch#155527, #189581: eps=None took the dtype's epsilon, and a half-precision eps lost its value."""
    assert torch.finfo(dtype).eps > 1e-8 and (dtype != torch.float16 or torch.tensor(1e-8, dtype=dtype) == 0)
    x = (1e-4 * normal(8, 64)).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-8).sqrt()
    assert off(norms.rms_norm(x, eps=1e-8), exact) <= 0.51 * torch.finfo(dtype).eps + 1e-6
    assert off(norms.rms_norm(x, eps=0.0), exact) > 0.2  # the eps matters here


@pytest.mark.parametrize("size", [1e30, 1e-30, 1.5e38, 1e-37])
def test_very_large_and_very_small_entries_keep_their_direction(size: float) -> None:
    """pytorch PR#178123: entries of 1e30 gave zeros or NaN."""
    d = 96
    x = (size * normal(6, d).clamp(-1, 1)).float()
    assert not (x.square().mean(-1) > 0).all() or not x.square().mean(-1).isfinite().all()  # the plain formula cannot
    for apply in (norms.layer_norm, norms.rms_norm):
        y = apply(x)
        assert y.isfinite().all() and off(y, apply(x.double())) < 1e-6
        assert off(y.norm(dim=-1), torch.full((6,), math.sqrt(d))) < 1e-6
        assert off(apply(x.double() * 2.0**300), apply(x.double())) == 0.0
    assert off(norms.radius(x, 0.0), torch.full((6,), math.sqrt(d))) < 1e-6
    jacobian_ = norms.layer_norm_jacobian(x.double())
    assert (
        off(
            norms.layer_norm_vjp(x, torch.ones_like(x), norms.centre(x)[0] / size),
            jacobian_.mT @ (norms.centre(x.double())[0] / size),
        )
        < 1e-5
    )


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_gradients_at_very_large_and_very_small_entries(size: float) -> None:
    base, cotangent = normal(3, 20), normal(3, 20, seed=3)
    for apply in (norms.layer_norm, norms.rms_norm):
        x = (size * base).float().requires_grad_()
        wide = (size * base).float().double().requires_grad_()
        (gradient,) = torch.autograd.grad((apply(x) * cotangent.float()).sum(), x)
        (expected,) = torch.autograd.grad((apply(wide) * cotangent).sum(), wide)
        assert off(gradient / expected.abs().max().float(), expected / expected.abs().max()) < 1e-5


# --- small and empty dimensions -----------------------------------------------------------------------------


def test_the_sphere_of_a_single_entry_is_empty() -> None:
    """pytorch#108956: LayerNorm over one entry must say what is wrong."""
    x = torch.ones(4, 1)
    for function in (norms.layer_norm, norms.layer_norm_jacobian, lambda x: norms.radius(x, 0.1)):
        with pytest.raises(ValueError, match="the sphere is empty"):
            function(x)
    for function in (norms.kernel, norms.kernel_direction, norms.ellipsoid):
        with pytest.raises(ValueError, match="the sphere is empty"):
            function(torch.ones(1))
    with pytest.raises(ValueError, match="the sphere is empty"):
        norms.standardize(torch.ones(1, 5), 0)
    assert torch.equal(norms.rms_norm(torch.tensor([[-3.0], [2.0]])), torch.tensor([[-1.0], [1.0]]))


def test_two_entries_leave_a_sign_and_three_a_circle() -> None:
    x = normal(50, 2)
    sign = (x[:, :1] - x[:, 1:]).sign()
    assert (norms.layer_norm(x) - sign * torch.tensor([1.0, -1.0], dtype=F64)).abs().max() < 1e-14
    assert norms.layer_norm_jacobian(x).abs().max() < 1e-12
    y = norms.layer_norm(normal(50, 3))
    assert (y.norm(dim=-1) - math.sqrt(3)).abs().max() < 1e-14 and y.sum(-1).abs().max() < 1e-14
    assert torch.linalg.matrix_rank(y) == 2


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (4,), (1, 1, 4)])
def test_any_leading_axes(shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape), weight_of(4)
    for y in (
        norms.centre(x),
        norms.layer_norm(x, weight, weight),
        norms.rms_norm(x, weight),
        norms.dyt(x, 1.0, weight),
        norms.derf(x, 1.0, 0.0, weight),
        norms.layer_norm_jvp(x, x, weight),
        norms.rms_norm_vjp(x, x, weight),
        norms.fibre(x, 2.0, 1.0),
    ):
        assert y.shape == shape
    assert norms.layer_norm_jacobian(x).shape == norms.dyt_jacobian(x, 1.0).shape == (*shape, 4)
    assert norms.radius(x, 0.0).shape == norms.fibre_coordinates(x, x)[0].shape == shape[:-1]


# --- derivatives --------------------------------------------------------------------------------------------


D = 4
X, T, GAMMA, BETA = normal(3, D), normal(3, D, seed=3), weight_of(D), normal(D, seed=2)
ALPHA, SHIFT = torch.tensor(0.6, dtype=F64), torch.tensor(0.2, dtype=F64)
DIFFERENTIABLE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "centre": (norms.centre, (X,)),
    **{
        f"{name} eps={eps}": (lambda *a, f=function, eps=eps: f(*a, eps), inputs)
        for eps in (0.0, 0.1)
        for name, function, inputs in (
            ("layer_norm", norms.layer_norm, (X, GAMMA, BETA)),
            ("rms_norm", norms.rms_norm, (X, GAMMA)),
            ("radius layer", lambda x, eps: norms.radius(x, eps, "layer"), (X,)),
            ("radius rms", lambda x, eps: norms.radius(x, eps, "rms"), (X,)),
            ("layer_norm_jacobian", norms.layer_norm_jacobian, (X, GAMMA)),
            ("rms_norm_jacobian", norms.rms_norm_jacobian, (X, GAMMA)),
            ("layer_norm_jvp", norms.layer_norm_jvp, (X, T, GAMMA)),
            ("layer_norm_vjp", norms.layer_norm_vjp, (X, T, GAMMA)),
            ("rms_norm_jvp", norms.rms_norm_jvp, (X, T, GAMMA)),
            ("rms_norm_vjp", norms.rms_norm_vjp, (X, T, GAMMA)),
            ("standardize", lambda x, eps: norms.standardize(x, 0, eps), (X,)),
        )
    },
    "dyt": (norms.dyt, (X, ALPHA, GAMMA, BETA)),
    "derf": (norms.derf, (X, ALPHA, SHIFT, GAMMA, BETA)),
    "dyt_derivative": (norms.dyt_derivative, (X, ALPHA, GAMMA)),
    "derf_derivative": (norms.derf_derivative, (X, ALPHA, SHIFT, GAMMA)),
    "dyt_jvp": (norms.dyt_jvp, (X, T, ALPHA, GAMMA)),
    "derf_jvp": (norms.derf_jvp, (X, T, ALPHA, SHIFT, GAMMA)),
    "fibre": (norms.fibre, (X, ALPHA, SHIFT)),
    "fibre_coordinates": (norms.fibre_coordinates, (X, T)),
    "kernel_direction": (norms.kernel_direction, (GAMMA,)),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_first_and_second_derivatives(name: str) -> None:
    function, inputs = DIFFERENTIABLE[name]
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


def rows_jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∂f(x)_i/∂x_j of every row, (n, d, d), by autograd."""
    return torch.stack([jacobian(function, row) for row in x])  # pyright: ignore


@pytest.mark.parametrize("eps", EPSILONS)
@pytest.mark.parametrize("d", [2, 3, 16])
def test_closed_form_jacobians_against_autograd_of_torch_s_norms(d: int, eps: float) -> None:
    x, weight = normal(5, d) + 0.5, weight_of(d)
    t, c = normal(5, d, seed=4), normal(5, d, seed=5)
    for kind, closed, jvp, vjp, reference in (
        ("layer", norms.layer_norm_jacobian, norms.layer_norm_jvp, norms.layer_norm_vjp, F.layer_norm),
        ("rms", norms.rms_norm_jacobian, norms.rms_norm_jvp, norms.rms_norm_vjp, F.rms_norm),
    ):
        expected = rows_jacobian(lambda row, f=reference: f(row, (d,), weight=weight, eps=eps), x)
        size = 1 / x.std(-1).min()  # not the Jacobian's own, which is zero for d = 2
        got = closed(x, weight, eps)
        assert (got - expected).abs().max() < 1e-13 * size
        assert (jvp(x, t, weight, eps) - (got @ t[..., None])[..., 0]).abs().max() < 1e-13 * size
        assert (vjp(x, c, weight, eps) - (got.mT @ c[..., None])[..., 0]).abs().max() < 1e-13 * size
        assert (closed(x, None, eps) - closed(x, torch.ones(d, dtype=F64), eps)).abs().max() < 1e-14 * size
        if d > 2:
            assert (closed(x, weight, eps + 0.01) - expected).abs().max() > 1e-4
            assert (vjp(x, c, weight, eps) - jvp(x, c, weight, eps)).abs().max() > 1e-3  # γ is on one side
        if eps == 0:
            lost = 2 if kind == "layer" else 1
            assert (torch.linalg.matrix_rank(got, atol=1e-11, rtol=0.0) == d - lost).all()


def test_diagonal_jacobians_against_autograd() -> None:
    d = 7
    x, weight, t = normal(5, d), weight_of(d), normal(5, d, seed=4)
    alpha = weight_of(d, seed=6)
    for derivative, closed, jvp, vjp, function in (
        (
            norms.dyt_derivative(x, alpha, weight),
            norms.dyt_jacobian(x, alpha, weight),
            norms.dyt_jvp(x, t, alpha, weight),
            norms.dyt_vjp(x, t, alpha, weight),
            lambda row: norms.dyt(row, alpha, weight),
        ),
        (
            norms.derf_derivative(x, alpha, 0.3, weight),
            norms.derf_jacobian(x, alpha, 0.3, weight),
            norms.derf_jvp(x, t, alpha, 0.3, weight),
            norms.derf_vjp(x, t, alpha, 0.3, weight),
            lambda row: norms.derf(row, alpha, 0.3, weight),
        ),
    ):
        assert off(closed, rows_jacobian(function, x)) < 1e-14
        assert torch.equal(closed.diagonal(dim1=-2, dim2=-1), derivative)
        assert off(jvp, (closed @ t[..., None])[..., 0]) < 1e-15 and torch.equal(jvp, vjp)


def test_the_derivative_of_dyt_keeps_its_digits_in_the_tails() -> None:
    x = torch.tensor([12.0])
    exact = 1 / torch.cosh(x.double()) ** 2
    assert off(norms.dyt_derivative(x, 1.0), exact) < 1e-5
    assert off(1 - torch.tanh(x).square(), exact) > 0.1
    assert norms.dyt_derivative(torch.tensor([1e30, -1e30]), 1.0).isfinite().all()


@pytest.mark.parametrize("apply", [norms.layer_norm, norms.rms_norm])
def test_where_there_is_no_direction_everything_is_zero_and_finite(apply: Callable[..., Tensor]) -> None:
    """pytorch#184575, #2421: gradients of 1e12, or NaN, at the zero vector."""
    ordinary = normal(5)
    rows = [torch.zeros(5, dtype=F64), ordinary]
    if apply is norms.layer_norm:
        rows.append(torch.full((5,), 0.1, dtype=F64))
    x = torch.stack(rows).requires_grad_()
    weight = weight_of(5).requires_grad_()
    y = apply(x, weight)
    (first,) = torch.autograd.grad((y * normal(5, seed=8)).sum(), x, create_graph=True)
    second = torch.autograd.grad((first * normal(5, seed=9)).sum(), (x, weight))
    for tensor in (y, first, second[0]):
        assert tensor.isfinite().all() and tensor[1].abs().max() > 1e-3
        assert not tensor[0].any() and not tensor[2:].any()
    assert second[1].isfinite().all()
    (of_radius,) = torch.autograd.grad(norms.radius(x, 0.1).sum(), x)
    assert of_radius.isfinite().all() and not of_radius[0].any() and of_radius[1].any()


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1.0])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_with_eps_the_derivative_at_zero_is_the_true_one(eps: float, dtype: torch.dtype) -> None:
    d = 6
    weight = weight_of(d).to(dtype)
    flat, identity = norms.projector(d), torch.eye(d, dtype=F64)
    for start in (0.0, 0.1, 1e30):
        x = torch.full((d,), start, dtype=dtype)
        expected = weight.double()[:, None] * flat / math.sqrt(eps)
        assert off(jacobian(lambda x: norms.layer_norm(x, weight, None, eps), x), expected) < 1e-6  # pyright: ignore
        assert off(norms.layer_norm_jacobian(x, weight, eps), expected) < 1e-6
    zero = torch.zeros(d, dtype=dtype)
    expected = weight.double()[:, None] * identity / math.sqrt(eps)
    assert off(jacobian(lambda x: norms.rms_norm(x, weight, eps), zero), expected) < 1e-6  # pyright: ignore
    assert off(norms.rms_norm_jacobian(zero, weight, eps), expected) < 1e-6
    x = torch.zeros(2, d, dtype=F64, requires_grad=True)
    assert gradgradcheck(lambda x: norms.layer_norm(x / math.sqrt(1 / eps), eps=eps), (x,))


def test_jacobians_and_products_are_zero_without_a_direction() -> None:
    x = torch.full((1, 5), 0.1, dtype=F64)
    t = normal(1, 5)
    for result in (norms.layer_norm_jacobian(x), norms.layer_norm_jvp(x, t), norms.layer_norm_vjp(x, t)):
        assert not result.any()
    for result in (norms.rms_norm_jacobian(0 * x), norms.rms_norm_jvp(0 * x, t), norms.rms_norm_vjp(0 * x, t)):
        assert not result.any()
    assert norms.rms_norm_jacobian(x).any()


def test_forward_mode_and_vmap() -> None:
    x, t, weight = normal(4, 6), normal(4, 6, seed=3), weight_of(6)
    _, pushed = torch.func.jvp(lambda x: norms.layer_norm(x, weight, eps=0.1), (x,), (t,))
    assert off(pushed, norms.layer_norm_jvp(x, t, weight, 0.1)) < 1e-14
    assert off(torch.func.vmap(torch.func.jacrev(norms.rms_norm))(x), norms.rms_norm_jacobian(x)) < 1e-13


# --- the quotient -------------------------------------------------------------------------------------------


@few
@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.floats(1e-3, 1e3), st.booleans(), st.floats(-1e3, 1e3))
def test_layer_norm_forgets_scale_and_shift_and_keeps_the_sign(
    seed: int, d: int, scale: float, negative: bool, shift: float
) -> None:
    x = normal(3, d, seed=seed)
    a = -scale if negative else scale
    n = norms.layer_norm(x)
    moved = norms.fibre(x, a, shift)
    # Rounding of a x + b, seen from the size of a P x.
    rounding = 2e-16 * moved.abs().amax(-1) / (scale * norms.centre(x).square().mean(-1).sqrt())
    assert (
        (norms.layer_norm(moved) - (-n if negative else n)).norm(dim=-1) <= 20 * math.sqrt(d) * rounding + 1e-14
    ).all()
    assert (n.norm(dim=-1) - math.sqrt(d)).abs().max() < 1e-13 * d
    assert n.sum(-1).abs().max() < 1e-13 * d
    found, b, residual = norms.fibre_coordinates(x, moved)
    assert ((found - a).abs() <= 20 * d * rounding * scale + 1e-13 * scale).all()
    assert ((b - shift).abs() <= (20 * d * rounding + 1e-13) * (scale * x.abs().amax(-1) + abs(shift))).all()
    assert (residual <= 20 * d * rounding + 1e-14).all()


def test_what_is_not_a_symmetry_of_layer_norm() -> None:
    x = normal(3, 8)
    assert off(norms.layer_norm(norms.fibre(x, 0.1, 0.0), eps=0.1), norms.layer_norm(x, eps=0.1)) > 0.1
    assert off(norms.layer_norm(norms.fibre(x, 1.0, 5.0), eps=0.1), norms.layer_norm(x, eps=0.1)) < 1e-13
    assert off(norms.rms_norm(norms.fibre(x, 1.0, 5.0)), norms.rms_norm(x)) > 0.1
    assert off(norms.dyt(2 * x, 0.5), norms.dyt(x, 0.5)) > 0.1
    with pytest.raises(ValueError, match="scale of 0"):
        norms.fibre(x, torch.tensor([1.0, 0.0, 2.0]), 0.0)


def test_fibre_coordinates_off_the_fibre_and_of_constants() -> None:
    x, y = normal(4, 9), normal(4, 9, seed=3)
    a, b, residual = norms.fibre_coordinates(x, y)
    design = torch.stack([x, torch.ones_like(x)], -1)
    solution = torch.linalg.lstsq(design, y[..., None]).solution[..., 0]
    assert off(torch.stack([a, b], -1), solution) < 1e-13
    rest = y - norms.fibre(x, a, b)
    assert off(residual, rest.norm(dim=-1) / norms.centre(y).norm(dim=-1)) < 1e-13 and residual.min() > 0.1
    constant = torch.full((9,), 0.1, dtype=F64)
    assert [float(z) for z in norms.fibre_coordinates(constant, y[0])] == pytest.approx([0, float(y[0].mean()), 1])
    assert [float(z) for z in norms.fibre_coordinates(x[0], constant)] == pytest.approx([0, 0.1, 0])
    a, _, residual = norms.fibre_coordinates((1e-30 * x).float(), (1e3 * x).float())
    assert off(a, torch.full((4,), 1e33)) < 1e-5 and residual.max() < 1e-6


def test_a_scale_and_shift_for_each_vector() -> None:
    x = normal(2, 3, 5)
    a, b = weight_of(3), normal(2, 1, seed=4)
    assert off(norms.fibre(x, a, b), a[:, None] * x + b[..., None]) < 1e-15


def test_rms_norm_turns_along_and_layer_norm_only_about_the_uniform_direction() -> None:
    x = normal(4, 6) + 0.3
    for eps in (0.0, 0.1):
        assert_equivariant(lambda x, eps=eps: norms.rms_norm(x, eps=eps), x)
        with pytest.raises(AssertionError, match="off by"):
            assert_equivariant(lambda x, eps=eps: norms.layer_norm(x, eps=eps), x)
    basis = orthonormal_complement_of_ones(6)
    generator = torch.Generator().manual_seed(1)
    uniform = norms.uniform_direction(6)
    for sign, determinant in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        u = sign * torch.outer(uniform, uniform) + basis @ orthogonal(5, determinant, generator) @ basis.mT
        assert off(norms.layer_norm(x @ u.mT, eps=0.1), norms.layer_norm(x, eps=0.1) @ u.mT) < 1e-14


@pytest.mark.parametrize("eps", EPSILONS)
def test_the_radius_is_the_length_of_the_normalized_state(eps: float) -> None:
    """x-transformers#246: the scale began at d^-1/2 where d^1/2 is the radius."""
    d = 16
    x = torch.cat([normal(3, d) + 0.4, 1e-3 * normal(3, d), torch.zeros(1, d, dtype=F64)])
    for kind, y, v in (
        ("layer", norms.layer_norm(x, eps=eps), x.var(-1, correction=0)),
        ("rms", norms.rms_norm(x, eps=eps), x.square().mean(-1)),
    ):
        r = norms.radius(x, eps, kind)  # pyright: ignore
        assert (r - y.norm(dim=-1)).abs().max() < 1e-14
        assert off(r[:-1], (math.sqrt(d) * (v / (v + eps)).sqrt())[:-1]) < 1e-14 and r[-1] == 0
        assert eps > 0 or (r[:-1] - math.sqrt(d)).abs().max() < 1e-14
        assert eps < 0.1 or (r < math.sqrt(d)).all()
    tiny = norms.radius(torch.full((1, 4), 1e-30), 1.0, "rms")
    assert off(tiny, torch.full((1,), 2e-30)) < 1e-6


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_the_axis_of_batch_norm(eps: float) -> None:
    x = 3 * normal(20, 6) + 1
    # torch has no eps of 0 here; 1e-300 is no other number beside a variance of 9.
    along_tokens = F.batch_norm(x, None, None, training=True, eps=eps or 1e-300)
    assert off(norms.standardize(x, 0, eps), along_tokens) < 1e-14
    assert off(norms.standardize(x, -1, eps), norms.layer_norm(x, eps=eps)) == 0
    assert norms.standardize(x, 0).mean(0).abs().max() < 1e-15
    assert (norms.standardize(x, 0).square().mean(0) - 1).abs().max() < 1e-14
    assert norms.standardize(x, 0).norm(dim=-1).std() > 0.1  # no radius for a token
    deep = x.reshape(4, 5, 6)
    assert off(norms.standardize(deep, 1, eps)[2], norms.standardize(deep[2], 0, eps)) < 1e-15


# --- image and kernel ---------------------------------------------------------------------------------------


def with_zeros(d: int, zeros: int) -> Tensor:
    weight = weight_of(d)
    weight[1 : 1 + zeros] = 0.0
    return weight


def states(d: int, kind: str, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    x = 2 * normal(500, d, seed=11) + normal(d, seed=12)
    if kind == "layer":
        return norms.layer_norm(x, weight, bias, eps)
    return norms.rms_norm(x, weight, eps) + bias


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("d", [3, 8])
def test_the_ellipsoid_holds_what_the_norm_puts_out(d: int, zeros: int, kind: norms.Kind) -> None:
    weight, bias = with_zeros(d, zeros), normal(d, seed=2)
    shape = norms.ellipsoid(weight, bias, kind)
    m = d - max(zeros, 1) if kind == "layer" else d - zeros
    assert shape.axes.shape == (d, m) and shape.semiaxes.shape == (m,) and torch.equal(shape.center, bias)
    assert (shape.axes.mT @ shape.axes - torch.eye(m)).abs().max() < 1e-14
    assert (shape.semiaxes > 0).all() and (shape.semiaxes.diff() <= 0).all()
    y = states(d, kind, weight, bias, 0.0)
    u, distance = shape.coordinates(y)
    assert distance.max() < 1e-13 and off(shape.point(u), y) < 1e-14
    surface = zeros == 0 or (zeros == 1 and kind == "layer")
    assert u.norm(dim=-1).max() < 1 + 1e-13
    assert (u.norm(dim=-1).min() > 1 - 1e-13) if surface else (u.norm(dim=-1).min() < 0.9)
    if surface:  # and it shrinks with eps, as the radius does
        x = 2 * normal(500, d, seed=11) + normal(d, seed=12)
        u, _ = shape.coordinates(states(d, kind, weight, bias, 0.5))
        assert off(u.norm(dim=-1), norms.radius(x, 0.5, kind) / math.sqrt(d)) < 1e-13
    u, distance = shape.coordinates(y + 0.1 * normal(500, d, seed=5))
    assert (u.norm(dim=-1) - 1).abs().max() > 1e-2
    assert m == d or distance.max() > 1e-2


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_every_point_of_the_ellipsoid_is_an_output(kind: norms.Kind) -> None:
    d = 6
    weight, bias = weight_of(d), normal(d, seed=2)
    shape = norms.ellipsoid(weight, bias, kind)
    u = norms.rms_norm(normal(40, shape.semiaxes.shape[0])) / math.sqrt(shape.semiaxes.shape[0])
    y = shape.point(u)
    n = (y - bias) / weight  # the only candidate, and it is its own normalized state
    again = norms.layer_norm(n, weight, bias) if kind == "layer" else norms.rms_norm(n, weight) + bias
    assert off(again, y) < 1e-13
    assert (n.sum(-1).abs().max() < 1e-12) == (kind == "layer")


def test_semiaxes() -> None:
    d = 12
    weight = weight_of(d)
    sorted_weight = weight.abs().sort(descending=True).values
    layer, rms = norms.ellipsoid(weight), norms.ellipsoid(weight, kind="rms")
    assert torch.equal(rms.semiaxes, math.sqrt(d) * sorted_weight)
    assert (layer.semiaxes <= math.sqrt(d) * sorted_weight[:-1] + 1e-14).all()
    assert (layer.semiaxes >= math.sqrt(d) * sorted_weight[1:] - 1e-14).all()
    expected = torch.linalg.svdvals(weight[:, None] * norms.projector(d))[:-1] * math.sqrt(d)
    assert off(layer.semiaxes, expected) < 1e-14
    two = norms.ellipsoid(torch.tensor([3.0, -4.0], dtype=F64))
    assert off(two.semiaxes, torch.tensor([5.0])) < 1e-15
    assert off(two.axes[:, 0], torch.tensor([0.6, 0.8], dtype=F64)) < 1e-15
    assert norms.ellipsoid(weight.float()).axes.dtype == F64
    empty = norms.ellipsoid(torch.zeros(4))
    assert empty.axes.shape == (4, 0) and empty.point(torch.zeros(2, 0)).shape == (2, 4)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("zeros", [0, 1, 3])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0])
def test_the_kernel_is_where_the_measured_covariance_vanishes(zeros: int, eps: float, kind: norms.Kind) -> None:
    d = 10
    weight, bias = with_zeros(d, zeros), normal(d, seed=2)
    directions = norms.kernel(weight, kind)
    m = directions.shape[1]
    assert m == (max(zeros, 1) if kind == "layer" else zeros)
    assert torch.allclose(directions.mT @ directions, torch.eye(m, dtype=F64), rtol=0, atol=1e-14)
    values, vectors = torch.linalg.eigh(torch.cov(states(d, kind, weight, bias, eps).mT))
    assert (values < 1e-14).sum() == m and values[m] > 1e-3  # no direction is missing
    assert off(vectors[:, :m] @ vectors[:, :m].mT + 1.0, directions @ directions.mT + 1.0) < 1e-12
    if kind == "layer" and zeros == 0:
        assert abs(float(vectors[:, 0] @ norms.kernel_direction(weight))) > 1 - 1e-12
        assert abs(float(vectors[:, 0] @ norms.uniform_direction(d))) < 0.9  # γ is not a multiple of 1


def test_the_kernel_direction_of_tiny_weights() -> None:
    for dtype, size in ((F32, 1e-40), (F64, 1e-310), (F32, 1e38)):
        weight = (size * weight_of(6)).to(dtype)
        scaled = weight.double() / size  # as rounded
        expected = (1 / scaled) / (1 / scaled).norm()
        got = norms.kernel_direction(weight)
        assert got.dtype == dtype and got.isfinite().all() and off(got, expected) < 1e-6
    uneven = norms.kernel_direction(torch.tensor([1e-300, 1e300], dtype=F64))
    assert torch.equal(uneven, torch.tensor([1.0, 0.0], dtype=F64))
    with pytest.raises(ValueError, match="2 zeros and so no inverse"):
        norms.kernel_direction(with_zeros(5, 2))


# --- refusals -----------------------------------------------------------------------------------------------


def test_bad_input_is_refused_by_name() -> None:
    x = torch.ones(2, 4)
    for eps in (-1e-5, math.nan, math.inf):
        with pytest.raises(ValueError, match="eps must be finite and at least 0"):
            norms.layer_norm(x, eps=eps)
    for bad in (torch.ones(3), torch.ones(2, 4), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"must have shape \(4,\)"):
            norms.rms_norm(x, bad)
    with pytest.raises(ValueError, match=r"must have shape \(4,\)"):
        norms.layer_norm(x, None, torch.ones(1))
    with pytest.raises(TypeError, match=r"floating point is needed, got torch\.int64"):
        norms.layer_norm(torch.ones(2, 4, dtype=torch.int64))
    for shape in ((), (3, 0)):
        with pytest.raises(ValueError, match="the last axis is the feature axis"):
            norms.rms_norm(torch.ones(shape))
    with pytest.raises(ValueError, match='kind must be "layer" or "rms"'):
        norms.radius(x, 0.0, "batch")  # pyright: ignore
    with pytest.raises(ValueError, match="d must be at least 1"):
        norms.projector(0)
    for weight, error, message in (
        (torch.ones(3, dtype=torch.int64), TypeError, "must be floating point"),
        (torch.ones(3, 3), ValueError, r"must have shape \(d,\)"),
        (torch.tensor([1.0, math.nan]), ValueError, "NaN or inf"),
    ):
        for function in (norms.ellipsoid, norms.kernel, norms.kernel_direction):
            with pytest.raises(error, match=message):
                function(weight)


def test_nan_and_inf_are_not_hidden() -> None:
    x = torch.tensor([[1.0, math.nan, 2.0], [1.0, math.inf, 2.0], [1.0, 2.0, 4.0]])
    for apply in (norms.layer_norm, norms.rms_norm):
        y = apply(x, eps=1e-5)
        assert y[:2].isnan().any(-1).all() and y[2].isfinite().all()
