"""The sphere's maps in any frame, of any shape, dtype and size, and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from drawn import gap, normal, points, tangents
from equivariance import assert_equivariant
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from gaugekit.geometry import sphere

F32, F64 = torch.float32, torch.float64


# --- frames, shapes, dtypes ---------------------------------------------------------------------------------


TURNING: dict[str, Callable[[Tensor], Tensor]] = {
    "to_tangent": lambda x: sphere.to_tangent(x[0], x[1]),
    "exp": lambda x: sphere.exp(x[0], sphere.to_tangent(x[0], x[1]), 2.0),
    "log": lambda x: sphere.log(x[0], x[1], 2.0),
    "retract": lambda x: sphere.retract(x[0], x[1], 2.0),
    "slerp": lambda x: sphere.slerp(x[0], x[1], 0.3, 2.0),
    "transport": lambda x: sphere.transport(x[0], x[1], x[2]),
    "step": lambda x: sphere.step(x[0], x[1], 2.0, "exp"),
    "lerp": lambda x: sphere.lerp(x[0], x[1], 0.3, 2.0),
    "project": lambda x: sphere.project(x, 2.0),
}


@pytest.mark.parametrize("name", TURNING)
def test_everything_turns_along(name: str) -> None:
    assert_equivariant(TURNING[name], normal(3, 4, 6, seed=9))


def test_distances_do_not_turn_and_rates_by_coordinate_break_the_frame() -> None:
    x, alpha = normal(2, 4, 6), normal(6, seed=2).abs()
    assert_equivariant(lambda x: sphere.distance(x[0], x[1], 2.0), x, invariant=True)
    with pytest.raises(AssertionError, match="off by"):
        assert_equivariant(lambda x: sphere.lerp(x[0], x[1], alpha), x)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (4,), (1, 1, 4), (3, 2)])
def test_any_leading_axes(shape: tuple[int, ...]) -> None:
    x, y = normal(*shape), normal(*shape, seed=1)
    for z in (
        sphere.project(x),
        sphere.to_tangent(x, y),
        sphere.exp(x, y),
        sphere.log(x, y),
        sphere.retract(x, y),
        sphere.slerp(x, y, 0.5),
        sphere.transport(x, y, y),
        sphere.step(x, y),
        sphere.lerp(x, y, 0.5),
    ):
        assert z.shape == shape
    assert sphere.angle(x, y).shape == sphere.distance(x, y).shape == shape[:-1]
    assert sphere.log(normal(3, 1, 4), normal(5, 4)).shape == (3, 5, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32])
def test_low_precision_against_float64(dtype: torch.dtype) -> None:
    radius = math.sqrt(64)
    x, y = (radius * points(9, 64, seed=seed).to(dtype) for seed in (0, 1))
    v = (0.5 * normal(9, 64, seed=2)).to(dtype)
    for function in (
        lambda x, y, v: sphere.project(x, radius),
        lambda x, y, v: sphere.to_tangent(x, v),
        lambda x, y, v: sphere.exp(x, v, radius),
        lambda x, y, v: sphere.log(x, y, radius),
        lambda x, y, v: sphere.retract(x, v, radius),
        lambda x, y, v: sphere.slerp(x, y, 0.3, radius),
        lambda x, y, v: sphere.transport(x, y, v),
        lambda x, y, v: sphere.step(x, v, radius),
        lambda x, y, v: sphere.lerp(x, y, 0.3, radius),
        lambda x, y, v: sphere.angle(x, y),
    ):
        low, exact = function(x, y, v), function(x.double(), y.double(), v.double())
        assert low.dtype == dtype and exact.dtype == F64
        half_ulp = 0.501 * torch.finfo(dtype).eps if dtype != F32 else 0.0
        assert ((low.double() - exact).abs() <= half_ulp * exact.abs() + 1e-6 * exact.abs().max()).all()


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_points_of_any_length_count_by_their_direction(size: float) -> None:
    x, y = (size * normal(3, 6)).float(), (normal(3, 6, seed=1) / size).float()
    assert gap(sphere.project(x), sphere.project(x.double())) < 1e-6
    assert gap(sphere.angle(x, y), sphere.angle(x.double(), y.double())) < 1e-6
    assert gap(sphere.slerp(x, y, 0.3), sphere.slerp(x.double(), y.double(), 0.3)) < 1e-6


def test_bad_input_is_refused_by_name() -> None:
    x = torch.ones(2, 4)
    for radius in (0.0, -1.0, math.nan, math.inf):
        for function in (
            lambda r: sphere.project(x, r),
            lambda r: sphere.exp(x, x, r),
            lambda r: sphere.log(x, x, r),
            lambda r: sphere.retract(x, x, r),
            lambda r: sphere.slerp(x, x, 0.5, r),
            lambda r: sphere.distance(x, x, r),
            lambda r: sphere.step(x, x, r),
            lambda r: sphere.lerp(x, x, 0.5, r),
        ):
            with pytest.raises(ValueError, match="radius must be positive"):
                function(radius)
    with pytest.raises(TypeError, match=r"floating point is needed, got torch\.int64"):
        sphere.project(torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"floating point is needed, got torch\.int64"):
        sphere.exp(x, torch.ones(2, 4, dtype=torch.int64))


# --- derivatives --------------------------------------------------------------------------------------------


H, Y, V = points(2, 4), points(2, 4, seed=1), normal(2, 4, seed=2)
ZERO = torch.zeros(2, 4, dtype=F64)
T, RATE = torch.tensor([0.3, 0.8], dtype=F64), normal(4, seed=3).abs()
DIFFERENTIABLE: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "project": (lambda x: sphere.project(x, 2.0), (V,)),
    "to_tangent": (sphere.to_tangent, (H, V)),
    "exp": (lambda h, v: sphere.exp(h, v, 2.0), (H, V)),
    "exp, short": (sphere.exp, (H, 1e-3 * V)),
    "exp at 0": (lambda h, v: sphere.exp(h, v, 2.0), (H, ZERO)),
    "log": (lambda h, y: sphere.log(h, y, 2.0), (H, Y)),
    "log, near": (sphere.log, (H, H + 1e-3 * V)),
    "log, far": (sphere.log, (H, V - 2 * H)),
    "log at h": (lambda h, y: sphere.log(h, y, 2.0), (H, H)),
    "retract": (lambda h, v: sphere.retract(h, v, 2.0), (H, V)),
    "slerp": (lambda x, y, t: sphere.slerp(x, y, t, 2.0), (H, Y, T)),
    "slerp at x": (lambda x, y, t: sphere.slerp(x, y, t, 2.0), (H, H, T)),
    "transport": (sphere.transport, (H, Y, V)),
    "transport at h": (sphere.transport, (H, H, V)),
    "angle": (sphere.angle, (H, Y)),
    "distance": (lambda x, y: sphere.distance(x, y, 2.0), (H, V)),
    "step": (lambda h, v: sphere.step(h, v, 2.0), (H, V)),
    "step at 0": (lambda h, v: sphere.step(h, v, 2.0, "exp"), (H, ZERO)),
    "step by exp": (lambda h, v: sphere.step(h, v, 2.0, "exp"), (H, V)),
    "lerp": (lambda h, f, alpha: sphere.lerp(h, f, alpha, 2.0), (H, V, RATE)),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_first_and_second_derivatives(name: str) -> None:
    function, inputs = DIFFERENTIABLE[name]
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


def test_derivatives_of_exp_at_zero_to_fourth_order() -> None:
    """exp(h, t v) = cos(t) h + sin(t) v for |v| = 1, so that its derivatives at t = 0 go h, v, −h, −v, h."""
    h = points(4)
    v = tangents(h, 1.0)
    t = torch.zeros((), dtype=F64, requires_grad=True)
    for i in range(4):
        derivative = sphere.exp(h, t * v)[i]
        for expected in (h[i], v[i], -h[i], -v[i], h[i]):
            assert abs(float(derivative.detach()) - float(expected)) < 1e-14
            (derivative,) = torch.autograd.grad(derivative, t, create_graph=True)


def test_the_squared_distance_is_smooth_where_the_distance_has_a_cone() -> None:
    h = points(5)
    y = h.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(sphere.distance(h, y), y)
    assert not gradient.any()  # the stated choice
    (gradient,) = torch.autograd.grad(sphere.distance(h, -y), y)
    assert not gradient.any()

    def energy(y: Tensor) -> Tensor:
        return sphere.log(h, y).square().sum() / 2

    hessian = torch.autograd.functional.hessian(energy, y.detach())
    assert gap(hessian, torch.eye(5, dtype=F64) - torch.outer(h, h)) < 1e-14  # pyright: ignore


def test_gradients_without_a_direction_are_finite() -> None:
    zero, x = torch.zeros(1, 5, dtype=F64, requires_grad=True), points(1, 5).requires_grad_()
    for y in (
        sphere.project(zero),
        sphere.angle(zero, x),
        sphere.angle(zero, zero),
        sphere.angle(x, x),
        sphere.step(zero, x),
        sphere.lerp(zero, x, 0.5),
        sphere.lerp(x, -x, 0.5),
        sphere.log(zero, x),
        sphere.transport(zero, x, x),
    ):
        assert y.isfinite().all()
        for gradient in torch.autograd.grad(y.sum(), (zero, x), allow_unused=True, create_graph=True):
            if gradient is not None:
                assert gradient.isfinite().all()
                for second in torch.autograd.grad(
                    gradient.square().sum(), (zero, x), allow_unused=True, retain_graph=True
                ):
                    assert second is None or second.isfinite().all()
