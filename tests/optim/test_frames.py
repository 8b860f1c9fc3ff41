"""Frames in which factors are orthonormal: free of the gauge, continuous, turned as little as the factors ask."""

from __future__ import annotations

import math

import pytest
import torch
from drawn import gap, normal, off
from torch import Tensor

from gaugekit.linalg import random_invertible, random_orthogonal
from gaugekit.optim.frames import (
    NEAR,
    across,
    advance,
    deficient,
    first_frames,
    inverse_root,
    orthonormalizing,
    plus,
    times,
)

F64 = torch.float64
NOTHING = torch.zeros(1, 1, 1)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    x = normal(*shape, seed=seed)
    return torch.complex(x, normal(*shape, seed=seed + 1000)) if dtype.is_complex else x.to(dtype)


def identity(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-2], dtype=x.dtype).expand(x.shape[0], -1, -1)


def gram(x: Tensor) -> Tensor:
    return x @ x.mH


def slow_root(m: Tensor) -> Tensor:
    w, v = torch.linalg.eigh(m)
    return (v * w.rsqrt().unsqueeze(-2)) @ v.mH


def lacking(*shape: int, seed: int = 0) -> Tensor:
    """A factor whose last row is a mixture of the others."""
    x = normal(*shape, seed=seed)
    x[:, -1] = torch.einsum("i,nij->nj", normal(shape[1] - 1, seed=seed + 1), x[:, :-1])
    return x


# --- inverse roots ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.complex128])
@pytest.mark.parametrize("spread", [3.0, 30.0, 300.0])
@pytest.mark.parametrize("r", [1, 2, 7])
def test_inverse_root_far_from_the_identity(dtype: torch.dtype, spread: float, r: int) -> None:
    wide = torch.complex128 if dtype.is_complex else F64
    x = random_orthogonal(r, rng(), batch=(5,)).to(wide) * torch.logspace(0, math.log10(spread), r, dtype=F64)
    m = gram(x if r > 1 else spread * drawn(5, 1, 1, dtype=wide))
    got = inverse_root(m.to(dtype))
    assert got.dtype == dtype
    error = (got - slow_root(m)).abs().max() / slow_root(m).abs().max()
    assert float(error) < 10 * torch.finfo(dtype).eps * spread**2


@pytest.mark.parametrize("distance", [0.01, 0.1, 0.28])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_inverse_root_near_the_identity_is_right_to_fourth_order(distance: float, scale: float) -> None:
    h = drawn(4, 6, 6)
    h = h + h.mT
    h = h - h.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * identity(h)
    m = scale * (identity(h) + distance * h / torch.linalg.matrix_norm(h, keepdim=True))
    error = off(inverse_root(m), slow_root(m))
    assert 1e-3 * distance**4 < error < distance**4
    assert distance < NEAR


def test_inverse_root_takes_near_and_far_ones_in_one_batch() -> None:
    near = (identity(drawn(2, 4, 4)) + 0.001 * gram(drawn(2, 4, 4)))[:1]
    far = gram(drawn(1, 4, 9, seed=3))
    got = inverse_root(torch.cat([near, far, 0 * near]))
    assert torch.allclose(got[:1], inverse_root(near), rtol=1e-14)
    assert gap(got[1:2], slow_root(far)) < 1e-12
    assert torch.equal(got[2:], identity(near))  # of zero


def test_inverse_root_of_singular_matrices_is_finite() -> None:
    x = lacking(3, 4, 9)
    for dtype in (F64, torch.float32):
        got = inverse_root(gram(x.to(dtype)))
        top = torch.linalg.matrix_norm(gram(x), 2)
        limit = (4 * torch.finfo(dtype).eps * top) ** -0.5
        assert bool((torch.linalg.matrix_norm(got.double(), 2) < 1.01 * limit).all())


def test_roots_of_empty_batches_and_single_rows() -> None:
    assert inverse_root(torch.zeros(0, 3, 3)).shape == (0, 3, 3)
    assert orthonormalizing(torch.zeros(0, 3, 3)).shape == (0, 3, 3)
    assert inverse_root(torch.tensor([[[4.0]], [[0.0]]])).flatten().tolist() == [0.5, 1.0]


@pytest.mark.parametrize("dtype", [F64, torch.complex128])
@pytest.mark.parametrize("r", [1, 4])
def test_orthonormalizing(dtype: torch.dtype, r: int) -> None:
    x = drawn(3, r, 9, dtype=dtype)
    c = orthonormalizing(gram(x))
    assert gap((gram(c @ x) - identity(x)).abs(), torch.zeros(1)) < 1e-13
    assert bool(torch.isfinite(orthonormalizing(gram(lacking(3, 4, 9)))).all())


@pytest.mark.parametrize("dtype", [F64, torch.complex128])
@pytest.mark.parametrize("r", [1, 3])
def test_products(dtype: torch.dtype, r: int) -> None:
    x, y, c = drawn(2, r, 5, dtype=dtype), drawn(2, r, 5, seed=1, dtype=dtype), drawn(2, r, r, seed=2, dtype=dtype)
    for got, want in (
        (times(c, x), c @ x),
        (across(x, y), x @ y.mH),
        (plus(x, c, y), x + c @ y),
        (plus(x, c, y, keep=0.5, sign=-1), 0.5 * x - c @ y),
    ):
        assert got.shape == want.shape
        assert float((got - want).abs().max()) < 1e-14


# --- rank -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_deficient(dtype: torch.dtype) -> None:
    full, poor = normal(2, 3, 8), lacking(2, 3, 8)
    x = torch.cat([full, poor, 0 * full]).to(dtype)
    assert deficient(x).tolist() == [False] * 2 + [True] * 4
    assert deficient(normal(2, 5, 3).to(dtype)).tolist() == [True] * 2  # more rows than columns
    assert deficient(normal(2, 4, 4).to(dtype)).tolist() == [False] * 2
    assert deficient(torch.zeros(0, 3, 5, dtype=dtype)).shape == (0,)


# --- first frames -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, torch.complex128])
@pytest.mark.parametrize(("r", "m"), [(1, 6), (3, 8), (4, 4)])
@pytest.mark.parametrize("condition", [10.0, 1e3])
def test_first_frames_see_the_row_space_only(dtype: torch.dtype, r: int, m: int, condition: float) -> None:
    a, s = drawn(5, r, m, dtype=dtype), random_invertible(r, rng(1), condition, (5,), dtype)
    (c, d, added), (c2, *_) = first_frames(a), first_frames(s @ a)
    assert c.dtype == d.dtype == dtype
    assert added.dtype == F64
    assert not bool(added.any())
    assert float((gram(c @ a) - identity(a)).abs().max()) < 1e-12
    assert float((c @ d.mH - identity(a)).abs().max()) < 1e-12
    assert float((c2 @ s @ a - c @ a).abs().max()) < 1e-11 * condition
    assert float((c2 - c).abs().max()) > 0.01  # the frames themselves move along


def test_first_frames_are_continuous() -> None:
    """Singular vectors are not, where singular values meet: those of A = a random isometry all do."""
    a = random_orthogonal(8, rng(), batch=(6,))[:, :3]
    step = 1e-7 * normal(6, 3, 8, seed=1)
    q, moved = (first_frames(x)[0] @ x for x in (a, a + step))
    assert gap(q, moved) < 1e-4
    naive = [torch.linalg.svd(x, full_matrices=False).Vh for x in (a, a + step)]
    assert gap(*naive) > 0.1


@pytest.mark.parametrize("a", [lacking(2, 3, 8), normal(2, 5, 3), torch.zeros(2, 3, 8, dtype=F64)])
def test_first_frames_of_deficient_factors_are_finite(a: Tensor) -> None:
    c, d, added = first_frames(a)
    assert bool(torch.isfinite(c).all()) and bool(torch.isfinite(d).all())
    assert bool((added > 0).all()) == bool(a.any())
    if a.any():
        assert float(torch.linalg.cond(c).max()) < 1e4


def test_first_frames_do_not_depend_on_the_device_of_new_tensors() -> None:
    a = normal(2, 3, 8)
    with torch.device("meta"):
        found = first_frames(a)
    assert all(torch.equal(x, y) for x, y in zip(found, first_frames(a), strict=True))


def test_first_frames_of_float32_and_of_nothing() -> None:
    assert first_frames(normal(2, 3, 8).float())[0].dtype == torch.float32
    assert first_frames(torch.zeros(0, 3, 8))[0].shape == (0, 3, 3)


# --- frames carried along ---------------------------------------------------------------------------------------


def test_advance_turns_by_the_polar_factor() -> None:
    """Of all orthonormal bases of the new row space, the nearest to the frame before."""
    a, b, step = normal(4, 3, 8), normal(4, 3, 7, seed=1), 0.5 * normal(4, 3, 8, seed=2)
    at = advance(*first_frames(a)[:2], a, b, NOTHING, 0.0, None)
    before = times(at.root_a, at.q_a)
    after = advance(at.c_a, at.c_b, a + step, b, NOTHING, 0.0, None)
    u, _, vh = torch.linalg.svd(at.c_a @ (a + step), full_matrices=False)
    assert gap(after.c_a @ (a + step), u @ vh) < 1e-9
    for seed in range(20):
        other = random_orthogonal(3, rng(seed), batch=(4,)) @ u @ vh
        assert bool(((other - before).norm(dim=(1, 2)) > (u @ vh - before).norm(dim=(1, 2)) - 1e-9).all())


@pytest.mark.parametrize("dtype", [F64, torch.complex128])
@pytest.mark.parametrize("r", [1, 3])
def test_advanced_rows_are_orthonormal_and_free_of_the_gauge(dtype: torch.dtype, r: int) -> None:
    """Along a path of small steps, where each correction is an approximate one."""
    a, b = drawn(3, r, 8, dtype=dtype), drawn(3, r, 7, seed=1, dtype=dtype)
    s = random_invertible(r, rng(1), 100.0, (3,), dtype)
    t = torch.linalg.inv(s).mH
    frames, moved = first_frames(a)[:2], first_frames(s @ a)[:2]
    for seed in range(30):
        a = a + 0.02 * drawn(3, r, 8, seed=seed, dtype=dtype)
        b = b + 0.02 * drawn(3, r, 7, seed=seed + 50, dtype=dtype)
        at, at2 = (
            advance(*frames, a, b, NOTHING, 1e-3, None),
            advance(*moved, s @ a, t @ b, NOTHING, 1e-3, None),
        )
        frames, moved = (at.c_a, at.c_b), (at2.c_a, at2.c_b)
        for c, x, q, root in ((at.c_a, a, at.q_a, at.root_a), (at.c_b, b, at.q_b, at.root_b)):
            assert float((gram(c @ x) - identity(x)).abs().max()) < 1e-5
            assert float((times(root, q) - c @ x).abs().max()) < 1e-12
        assert float((at2.c_a @ s @ a - at.c_a @ a).abs().max()) < 1e-9
        assert float((at2.c_b @ t @ b - at.c_b @ b).abs().max()) < 1e-9


def test_advance_bounds_the_frame_of_a_short_factor_by_the_floor() -> None:
    """C_B with B = 0 has B Bᴴ + floor² K⁻¹ = I: floor times it is orthonormal where A is."""
    a, floor = normal(3, 4, 8), 1e-3
    c_a, c_b, _ = first_frames(a)
    at = advance(c_a, c_b, a, torch.zeros(3, 4, 6, dtype=F64), NOTHING, floor, None)
    assert gap(floor**2 * at.c_b @ torch.linalg.inv(gram(a)) @ at.c_b.mT, identity(a)) < 1e-12
    at = advance(c_a, c_b, a, torch.zeros(3, 4, 6, dtype=F64), NOTHING, 0.0, None)
    assert gap(at.c_b, c_b) < 1e-15  # nothing to go by: as it was


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_frame_of_a_deficient_factor_at_rest_does_not_grow(dtype: torch.dtype) -> None:
    a, b = normal(3, 4, 8).to(dtype), lacking(3, 4, 6, seed=3).to(dtype)
    c_a, c_b, _ = first_frames(a)
    sizes = []
    for _ in range(30):
        at = advance(c_a, c_b, a, b, NOTHING, 0.0, None)
        c_a, c_b = at.c_a, at.c_b
        sizes.append(float(c_b.abs().max()))
    assert sizes[-1] < 3 * sizes[1] < 100 * torch.finfo(dtype).eps ** -0.5


@pytest.mark.parametrize("r", [1, 3])
def test_unit_is_the_root_of_the_size_of_the_product(r: int) -> None:
    a, b = normal(3, r, 8), normal(3, r, 6, seed=1)
    c_a, c_b, _ = first_frames(a)
    own = torch.tensor([1.0, 0.0, 1.0])[:, None, None]
    for _ in range(2):  # in the first frames, and in those found from them
        at = advance(c_a, c_b, a, b, NOTHING, 1e-3, own)
        size = torch.linalg.svdvals(b.mT @ a)[:, :r].square().mean(-1) ** 0.25
        assert gap(at.unit.flatten(), torch.where(own.flatten() > 0, size, 1.0)) < 1e-12
        c_a, c_b = at.c_a, at.c_b
    assert torch.equal(advance(c_a, c_b, a, b, NOTHING, 1e-3, None).unit, torch.ones(3, 1, 1, dtype=F64))
