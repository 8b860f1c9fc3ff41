"""Closed-form derivatives of LayerNorm, RMSNorm, DyT and Derf against autograd's. Weights are random."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn import normal, off, weight_of
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.functional import jacobian

from gaugekit.geometry import jacobians
from gaugekit.geometry import normalization as norms

F32, F64 = torch.float32, torch.float64
EPSILONS = [0.0, 1e-12, 1e-5, 0.1, 1.0]


def rows_jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∂f(x)_i/∂x_j of every row, (n, d, d), by autograd."""
    return torch.stack([jacobian(function, row) for row in x])  # pyright: ignore


# --- against autograd ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", EPSILONS)
@pytest.mark.parametrize("d", [2, 3, 16])
def test_closed_form_jacobians_against_autograd_of_torch_s_norms(d: int, eps: float) -> None:
    x, weight = normal(5, d) + 0.5, weight_of(d)
    t, c = normal(5, d, seed=4), normal(5, d, seed=5)
    for kind, closed, jvp, vjp, reference in (
        ("layer", jacobians.layer_norm_jacobian, jacobians.layer_norm_jvp, jacobians.layer_norm_vjp, F.layer_norm),
        ("rms", jacobians.rms_norm_jacobian, jacobians.rms_norm_jvp, jacobians.rms_norm_vjp, F.rms_norm),
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
            jacobians.dyt_derivative(x, alpha, weight),
            jacobians.dyt_jacobian(x, alpha, weight),
            jacobians.dyt_jvp(x, t, alpha, weight),
            jacobians.dyt_vjp(x, t, alpha, weight),
            lambda row: norms.dyt(row, alpha, weight),
        ),
        (
            jacobians.derf_derivative(x, alpha, 0.3, weight),
            jacobians.derf_jacobian(x, alpha, 0.3, weight),
            jacobians.derf_jvp(x, t, alpha, 0.3, weight),
            jacobians.derf_vjp(x, t, alpha, 0.3, weight),
            lambda row: norms.derf(row, alpha, 0.3, weight),
        ),
    ):
        assert off(closed, rows_jacobian(function, x)) < 1e-14
        assert torch.equal(closed.diagonal(dim1=-2, dim2=-1), derivative)
        assert off(jvp, (closed @ t[..., None])[..., 0]) < 1e-15 and torch.equal(jvp, vjp)


def test_the_derivative_of_dyt_keeps_its_digits_in_the_tails() -> None:
    x = torch.tensor([12.0])
    exact = 1 / torch.cosh(x.double()) ** 2
    assert off(jacobians.dyt_derivative(x, 1.0), exact) < 1e-5
    assert off(1 - torch.tanh(x).square(), exact) > 0.1
    assert jacobians.dyt_derivative(torch.tensor([1e30, -1e30]), 1.0).isfinite().all()


def test_forward_mode_and_vmap() -> None:
    x, t, weight = normal(4, 6), normal(4, 6, seed=3), weight_of(6)
    _, pushed = torch.func.jvp(lambda x: norms.layer_norm(x, weight, eps=0.1), (x,), (t,))
    assert off(pushed, jacobians.layer_norm_jvp(x, t, weight, 0.1)) < 1e-14
    assert off(torch.func.vmap(torch.func.jacrev(norms.rms_norm))(x), jacobians.rms_norm_jacobian(x)) < 1e-13


# --- without a direction ------------------------------------------------------------------------------------


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
        assert off(jacobians.layer_norm_jacobian(x, weight, eps), expected) < 1e-6
    zero = torch.zeros(d, dtype=dtype)
    expected = weight.double()[:, None] * identity / math.sqrt(eps)
    assert off(jacobian(lambda x: norms.rms_norm(x, weight, eps), zero), expected) < 1e-6  # pyright: ignore
    assert off(jacobians.rms_norm_jacobian(zero, weight, eps), expected) < 1e-6
    x = torch.zeros(2, d, dtype=F64, requires_grad=True)
    assert gradgradcheck(lambda x: norms.layer_norm(x / math.sqrt(1 / eps), eps=eps), (x,))


def test_jacobians_and_products_are_zero_without_a_direction() -> None:
    x = torch.full((1, 5), 0.1, dtype=F64)
    zero, t = torch.zeros_like(x), normal(1, 5)
    for result in (jacobians.layer_norm_jacobian(x), jacobians.layer_norm_jvp(x, t), jacobians.layer_norm_vjp(x, t)):
        assert not result.any()
    for result in (jacobians.rms_norm_jacobian(zero), jacobians.rms_norm_jvp(zero, t), jacobians.rms_norm_vjp(zero, t)):
        assert not result.any()
    assert jacobians.rms_norm_jacobian(x).any()


# --- their own derivatives ----------------------------------------------------------------------------------


D = 4
X, T, GAMMA = normal(3, D), normal(3, D, seed=3), weight_of(D)
ALPHA, SHIFT = torch.tensor(0.6, dtype=F64), torch.tensor(0.2, dtype=F64)
DIFFERENTIABLE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    **{
        f"{name} eps={eps}": (lambda *a, f=function, eps=eps: f(*a, eps), inputs)
        for eps in (0.0, 0.1)
        for name, function, inputs in (
            ("layer_norm_jacobian", jacobians.layer_norm_jacobian, (X, GAMMA)),
            ("rms_norm_jacobian", jacobians.rms_norm_jacobian, (X, GAMMA)),
            ("layer_norm_jvp", jacobians.layer_norm_jvp, (X, T, GAMMA)),
            ("layer_norm_vjp", jacobians.layer_norm_vjp, (X, T, GAMMA)),
            ("rms_norm_jvp", jacobians.rms_norm_jvp, (X, T, GAMMA)),
            ("rms_norm_vjp", jacobians.rms_norm_vjp, (X, T, GAMMA)),
        )
    },
    "dyt_derivative": (jacobians.dyt_derivative, (X, ALPHA, GAMMA)),
    "derf_derivative": (jacobians.derf_derivative, (X, ALPHA, SHIFT, GAMMA)),
    "dyt_jvp": (jacobians.dyt_jvp, (X, T, ALPHA, GAMMA)),
    "derf_jvp": (jacobians.derf_jvp, (X, T, ALPHA, SHIFT, GAMMA)),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_first_and_second_derivatives(name: str) -> None:
    function, inputs = DIFFERENTIABLE[name]
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)
