"""The image of a norm and its kernel, against outputs of the norms and covariances of drawn states."""

from __future__ import annotations

import math

import pytest
import torch
from drawn import normal, off, weight_of
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from gaugekit.geometry import normalization as norms
from gaugekit.geometry.ellipsoid import ellipsoid, kernel, kernel_direction
from gaugekit.geometry.rows import Kind

F32, F64 = torch.float32, torch.float64


def with_zeros(d: int, zeros: int) -> Tensor:
    weight = weight_of(d)
    weight[1 : 1 + zeros] = 0.0
    return weight


def states(d: int, kind: str, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    x = 2 * normal(500, d, seed=11) + normal(d, seed=12)
    if kind == "layer":
        return norms.layer_norm(x, weight, bias, eps)
    return norms.rms_norm(x, weight, eps) + bias


# --- the ellipsoid ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("d", [3, 8])
def test_the_ellipsoid_holds_what_the_norm_puts_out(d: int, zeros: int, kind: Kind) -> None:
    weight, bias = with_zeros(d, zeros), normal(d, seed=2)
    shape = ellipsoid(weight, bias, kind)
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
def test_every_point_of_the_ellipsoid_is_an_output(kind: Kind) -> None:
    d = 6
    weight, bias = weight_of(d), normal(d, seed=2)
    shape = ellipsoid(weight, bias, kind)
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
    layer, rms = ellipsoid(weight), ellipsoid(weight, kind="rms")
    assert torch.equal(rms.semiaxes, math.sqrt(d) * sorted_weight)
    assert (layer.semiaxes <= math.sqrt(d) * sorted_weight[:-1] + 1e-14).all()
    assert (layer.semiaxes >= math.sqrt(d) * sorted_weight[1:] - 1e-14).all()
    expected = torch.linalg.svdvals(weight[:, None] * norms.projector(d))[:-1] * math.sqrt(d)
    assert off(layer.semiaxes, expected) < 1e-14
    two = ellipsoid(torch.tensor([3.0, -4.0], dtype=F64))
    assert off(two.semiaxes, torch.tensor([5.0])) < 1e-15
    assert off(two.axes[:, 0], torch.tensor([0.6, 0.8], dtype=F64)) < 1e-15
    assert ellipsoid(weight.float()).axes.dtype == F64
    empty = ellipsoid(torch.zeros(4))
    assert empty.axes.shape == (4, 0) and empty.point(torch.zeros(2, 0)).shape == (2, 4)


# --- the kernel ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("zeros", [0, 1, 3])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0])
def test_the_kernel_is_where_the_measured_covariance_vanishes(zeros: int, eps: float, kind: Kind) -> None:
    d = 10
    weight, bias = with_zeros(d, zeros), normal(d, seed=2)
    directions = kernel(weight, kind)
    m = directions.shape[1]
    assert m == (max(zeros, 1) if kind == "layer" else zeros)
    assert torch.allclose(directions.mT @ directions, torch.eye(m, dtype=F64), rtol=0, atol=1e-14)
    values, vectors = torch.linalg.eigh(torch.cov(states(d, kind, weight, bias, eps).mT))
    assert (values < 1e-14).sum() == m and values[m] > 1e-3  # no direction is missing
    assert off(vectors[:, :m] @ vectors[:, :m].mT + 1.0, directions @ directions.mT + 1.0) < 1e-12
    if kind == "layer" and zeros == 0:
        assert abs(float(vectors[:, 0] @ kernel_direction(weight))) > 1 - 1e-12
        assert abs(float(vectors[:, 0] @ norms.uniform_direction(d))) < 0.9  # γ is not a multiple of 1


def test_the_kernel_direction_of_tiny_weights() -> None:
    for dtype, size in ((F32, 1e-40), (F64, 1e-310), (F32, 1e38)):
        weight = (size * weight_of(6)).to(dtype)
        scaled = weight.double() / size  # as rounded
        expected = (1 / scaled) / (1 / scaled).norm()
        got = kernel_direction(weight)
        assert got.dtype == dtype and got.isfinite().all() and off(got, expected) < 1e-6
    uneven = kernel_direction(torch.tensor([1e-300, 1e300], dtype=F64))
    assert torch.equal(uneven, torch.tensor([1.0, 0.0], dtype=F64))
    with pytest.raises(ValueError, match="2 zeros and so no inverse"):
        kernel_direction(with_zeros(5, 2))


def test_first_and_second_derivatives_of_the_kernel_direction() -> None:
    weight = weight_of(4).requires_grad_()
    assert gradcheck(kernel_direction, weight)
    assert gradgradcheck(kernel_direction, weight)
