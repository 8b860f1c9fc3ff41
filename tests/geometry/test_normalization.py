"""LayerNorm, RMSNorm, DyT and Derf as maps: values, fibres, radii, and derivatives by autograd.

References are torch's own norms in float64. Weights are random.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn import normal, off, weight_of
from equivariance import assert_equivariant, orthogonal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from gaugekit.geometry import jacobians
from gaugekit.geometry import normalization as norms
from gaugekit.linalg import orthonormal_complement_of_ones

F32, F64 = torch.float32, torch.float64
EPSILONS = [0.0, 1e-12, 1e-5, 0.1, 1.0]
few = settings(max_examples=60, deadline=None)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32])
def test_eps_is_what_was_said_not_the_dtype_s(dtype: torch.dtype) -> None:
    """pytorch#155527, #189581: eps=None took the dtype's epsilon, and a half-precision eps lost its value."""
    assert torch.finfo(dtype).eps > 1e-8 and (dtype != torch.float16 or torch.tensor(1e-8, dtype=dtype) == 0)
    x = (1e-4 * normal(8, 64)).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-8).sqrt()
    assert off(norms.rms_norm(x, eps=1e-8), exact) <= 0.51 * torch.finfo(dtype).eps + 1e-6
    assert off(norms.rms_norm(x, eps=0.0), exact) > 0.2  # the eps matters here


def test_two_entries_leave_a_sign_and_three_a_circle() -> None:
    x = normal(50, 2)
    sign = (x[:, :1] - x[:, 1:]).sign()
    assert (norms.layer_norm(x) - sign * torch.tensor([1.0, -1.0], dtype=F64)).abs().max() < 1e-14
    assert jacobians.layer_norm_jacobian(x).abs().max() < 1e-12
    y = norms.layer_norm(normal(50, 3))
    assert (y.norm(dim=-1) - math.sqrt(3)).abs().max() < 1e-14 and y.sum(-1).abs().max() < 1e-14
    assert torch.linalg.matrix_rank(y) == 2


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
            ("standardize", lambda x, eps: norms.standardize(x, 0, eps), (X,)),
        )
    },
    "dyt": (norms.dyt, (X, ALPHA, GAMMA, BETA)),
    "derf": (norms.derf, (X, ALPHA, SHIFT, GAMMA, BETA)),
    "fibre": (norms.fibre, (X, ALPHA, SHIFT)),
    "fibre_coordinates": (norms.fibre_coordinates, (X, T)),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_first_and_second_derivatives(name: str) -> None:
    function, inputs = DIFFERENTIABLE[name]
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


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
