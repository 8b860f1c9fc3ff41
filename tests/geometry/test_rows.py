"""What all maps of rows share: precision, range, leading axes, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from drawn import normal, off, weight_of
from torch import Tensor

from gaugekit.geometry import jacobians
from gaugekit.geometry import normalization as norms
from gaugekit.geometry.ellipsoid import ellipsoid, kernel, kernel_direction

F32, F64 = torch.float32, torch.float64


# --- precision ----------------------------------------------------------------------------------------------


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
        lambda x: jacobians.layer_norm_jvp(x, weight.to(x).expand_as(x), weight.to(x), 1e-5),
        lambda x: jacobians.rms_norm_vjp(x, weight.to(x).expand_as(x), weight.to(x), 1e-5),
        lambda x: jacobians.dyt_jvp(x, weight.to(x).expand_as(x), 0.5, weight.to(x)),
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


# --- range --------------------------------------------------------------------------------------------------


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
    jacobian_ = jacobians.layer_norm_jacobian(x.double())
    assert (
        off(
            jacobians.layer_norm_vjp(x, torch.ones_like(x), norms.centre(x)[0] / size),
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


def test_nan_and_inf_are_not_hidden() -> None:
    x = torch.tensor([[1.0, math.nan, 2.0], [1.0, math.inf, 2.0], [1.0, 2.0, 4.0]])
    for apply in (norms.layer_norm, norms.rms_norm):
        y = apply(x, eps=1e-5)
        assert y[:2].isnan().any(-1).all() and y[2].isfinite().all()


# --- axes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (4,), (1, 1, 4)])
def test_any_leading_axes(shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape), weight_of(4)
    for y in (
        norms.centre(x),
        norms.layer_norm(x, weight, weight),
        norms.rms_norm(x, weight),
        norms.dyt(x, 1.0, weight),
        norms.derf(x, 1.0, 0.0, weight),
        jacobians.layer_norm_jvp(x, x, weight),
        jacobians.rms_norm_vjp(x, x, weight),
        norms.fibre(x, 2.0, 1.0),
    ):
        assert y.shape == shape
    assert jacobians.layer_norm_jacobian(x).shape == jacobians.dyt_jacobian(x, 1.0).shape == (*shape, 4)
    assert norms.radius(x, 0.0).shape == norms.fibre_coordinates(x, x)[0].shape == shape[:-1]


def test_the_sphere_of_a_single_entry_is_empty() -> None:
    """pytorch#108956: LayerNorm over one entry must say what is wrong."""
    x = torch.ones(4, 1)
    for function in (norms.layer_norm, jacobians.layer_norm_jacobian, lambda x: norms.radius(x, 0.1)):
        with pytest.raises(ValueError, match="the sphere is empty"):
            function(x)
    for function in (kernel, kernel_direction, ellipsoid):
        with pytest.raises(ValueError, match="the sphere is empty"):
            function(torch.ones(1))
    with pytest.raises(ValueError, match="the sphere is empty"):
        norms.standardize(torch.ones(1, 5), 0)
    assert torch.equal(norms.rms_norm(torch.tensor([[-3.0], [2.0]])), torch.tensor([[-1.0], [1.0]]))


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
        for function in (ellipsoid, kernel, kernel_direction):
            with pytest.raises(error, match=message):
                function(weight)
