"""Dressings against what defines them, whatever their frame, and each of the others against what is its own."""

from __future__ import annotations

import math

import pytest
import torch
from equivariance import assert_equivariant, orthogonal
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from gaugekit.geometry.dressing import SVD, Dressing, ambiguity, dress
from gaugekit.geometry.frames import GramSchmidt, Polar, TokenCoordinates
from gaugekit.linalg import random_invertible, random_orthogonal

F64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=F64)


REFERENCE = normal(6, 3, seed=12)
OTHERS = [GramSchmidt([2, 0, 5]), GramSchmidt([1, -1]), Polar(REFERENCE), TokenCoordinates([0, 3, 4])]


def named(dressing: Dressing) -> str:
    return type(dressing).__name__


# --- every dressing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dressing", [SVD(), *OTHERS], ids=named)
def test_every_dressing_is_one(dressing: Dressing) -> None:
    x = normal(6, 3)
    assert_equivariant(lambda x: dressing(x).states, x, invariant=True)
    dressed = dressing(x)
    for determinant in (1, -1):
        g = orthogonal(3, determinant, rng(1))
        torch.testing.assert_close(dressing.frame(x @ g.mT), dressing.frame(x) @ torch.linalg.inv(g))
    torch.testing.assert_close(dressed.states, x @ dressed.frame.mT)
    g = random_invertible(3, rng(2))
    same = (dressing(x @ g.mT).states - dressed.states).abs().max() < 1e-12
    assert bool(same) == (dressing.group == "GL(d)")
    if dressing.group == "GL(d)":
        torch.testing.assert_close(dressing.frame(x @ g.mT), dressed.frame @ torch.linalg.inv(g))


@pytest.mark.parametrize("dressing", OTHERS, ids=named)
def test_gradients_of_other_frames(dressing: Dressing) -> None:
    x = normal(2, 6, 3).requires_grad_()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        dressed = dressing(x)
        return dressed.states, dressed.frame

    assert gradcheck(function, x)
    assert gradgradcheck(function, x)


@pytest.mark.parametrize("dressing", [SVD(), *OTHERS], ids=named)
def test_batches_precision_and_units_of_other_frames(dressing: Dressing) -> None:
    x = normal(2, 1, 6, 3)
    dressed = dressing(x)
    torch.testing.assert_close(dressed.states[1, 0], dressing(x[1, 0]).states)
    assert dressing(x[:0]).states.shape == (0, 1, *dressed.states.shape[-2:])
    half = dressing(x.bfloat16())
    assert half.states.dtype == half.frame.dtype == torch.bfloat16
    assert torch.equal(half.states, dressing(x.bfloat16().float()).states.bfloat16())
    y = (x.float() * 1e30).requires_grad_()
    large = dressing(y)
    unit = 1 if dressing.group == "GL(d)" else 1e30
    torch.testing.assert_close(large.states.double() / unit, dressed.states, rtol=1e-3, atol=1e-3)
    (gradient,) = torch.autograd.grad(large.states.sum(), y)
    assert bool(gradient.isfinite().all())


def test_bad_states_are_refused() -> None:
    for dressing in (dress, *OTHERS):
        with pytest.raises(TypeError, match="floating point"):
            dressing(torch.ones(6, 3, dtype=torch.int64))
        with pytest.raises(ValueError, match="tokens by width"):
            dressing(torch.ones(3))
        for bad in (math.nan, math.inf):
            with pytest.raises(ValueError, match="NaN or inf"):
                dressing(torch.full((6, 3), bad))
    with pytest.raises(ValueError, match="one X"):
        ambiguity(normal(2, 3, 3))


# --- chosen tokens ------------------------------------------------------------------------------------------


def test_gram_schmidt_takes_tokens_in_their_order() -> None:
    x = normal(6, 4)
    dressed = GramSchmidt([5, 1, 2, 0])(x)
    chosen = dressed.states[[5, 1, 2, 0]]
    torch.testing.assert_close(chosen.triu(1), torch.zeros(4, 4, dtype=F64), rtol=0, atol=1e-13)
    assert bool((chosen.diagonal() > 0).all())
    torch.testing.assert_close(dressed.states @ dressed.frame, x)


def test_token_coordinates_are_coordinates() -> None:
    x = normal(6, 3)
    tokens = [4, 0, 2]
    states = TokenCoordinates(tokens)(x).states
    torch.testing.assert_close(states[tokens], torch.eye(3, dtype=F64), rtol=0, atol=1e-12)
    torch.testing.assert_close(states @ x[tokens], x)


def test_dependent_tokens_are_refused() -> None:
    x = normal(6, 3)
    x[4] = 2 * x[0] - x[3]
    x[5] = 0
    for dressing in (GramSchmidt([0, 3, 4]), GramSchmidt([5]), GramSchmidt([0, 0]), GramSchmidt([0, 1, 2, 3])):
        with pytest.raises(ValueError, match="linearly dependent"):
            dressing(x)
    for tokens in ([0, 3, 4], [0, 1, 5]):
        with pytest.raises(ValueError, match="linearly dependent"):
            TokenCoordinates(tokens)(x)
    with pytest.raises(ValueError, match="needs as many tokens, got 2"):
        TokenCoordinates([0, 1])(x)
    with pytest.raises(ValueError, match="not all among the 6"):
        GramSchmidt([6])(x)
    small = normal(6, 3)
    small[1] *= 1e-200  # a short token points as well as a long one
    assert bool(GramSchmidt([1, 0])(small).states.isfinite().all())


# --- the nearest to a reference -----------------------------------------------------------------------------


def test_polar_is_the_nearest_frame() -> None:
    x = normal(6, 3)
    dressed = Polar(REFERENCE)(x)
    best = torch.linalg.matrix_norm(dressed.states - REFERENCE)
    for seed in range(50):
        near = torch.linalg.matrix_exp(0.1 * (normal(3, 3, seed=seed) - normal(3, 3, seed=seed).mT))
        for u in (random_orthogonal(3, rng(seed)), near @ dressed.frame):
            assert torch.linalg.matrix_norm(x @ u.mT - REFERENCE) > best
    g = orthogonal(3, -1, rng(1))
    torch.testing.assert_close(Polar(REFERENCE)(REFERENCE @ g.mT).states, REFERENCE)


def test_polar_gradients_at_tied_singular_values() -> None:
    """pytorch#116394: U Vᵀ is smooth at ties, though the derivative of the SVD is not."""
    reference = random_orthogonal(5, rng(3))[:, :3]
    x = reference.clone().requires_grad_()
    dressing = Polar(reference)
    assert gradcheck(lambda x: dressing(x).frame, x)
    assert gradgradcheck(lambda x: dressing(x).frame, x)
    y = torch.eye(3, dtype=F64).requires_grad_()
    left, _, right = torch.linalg.svd(y)
    (plain,) = torch.autograd.grad((left @ right * normal(3, 3)).sum(), y)
    assert not bool(plain.isfinite().all())


def test_polar_refuses_a_singular_product() -> None:
    with pytest.raises(ValueError, match="no nearest frame is unique"):
        Polar(REFERENCE)(normal(6, 2, seed=3) @ normal(2, 3, seed=4))
    with pytest.raises(ValueError, match="no nearest frame is unique"):
        Polar(normal(2, 3))(normal(2, 3, seed=1))
    with pytest.raises(ValueError, match="differ in"):
        Polar(REFERENCE)(normal(5, 3))
