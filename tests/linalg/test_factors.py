"""Balance of two factors, singular vectors of their product, and factors of heads side by side."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gaugekit.linalg import apart, balance, balance_defect, beside, product_svd, random_invertible, random_orthogonal

F64 = torch.float64
few = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)
batches = st.sampled_from([(), (1,), (3,), (1, 1), (2, 3), (1, 4, 1), (0,), (2, 0)])


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=dtype)


# --- balance ------------------------------------------------------------------------------------------------


def test_balance_defect_by_hand() -> None:
    a, b = torch.diag(torch.tensor([3.0, 0.0])), torch.diag(torch.tensor([0.0, 4.0]))
    absolute, relative = balance_defect(a, b)  # Grams diag(9, 0) and diag(0, 16)
    assert float(absolute) == pytest.approx(math.hypot(9, 16), rel=1e-14)
    assert float(relative) == 1.0
    absolute, relative = balance_defect(2 * a, a)  # 36 and 9
    assert float(absolute) == pytest.approx(27, rel=1e-14)
    assert float(relative) == pytest.approx(0.6, rel=1e-14)


def test_balance_defect_of_zeros_and_empties() -> None:
    zero = torch.zeros(2, 3, 4)
    for value in (*balance_defect(zero, zero), *balance_defect(zero[..., :0], zero)):
        assert torch.equal(value, torch.zeros(2, dtype=F64))
    assert balance_defect(zero, normal(3, 5))[1].tolist() == [1.0, 1.0]
    assert balance_defect(normal(3, 5), zero[..., :0])[1].tolist() == [1.0, 1.0]
    assert balance_defect(zero, normal(3, 5) * 2.0**-900)[1].tolist() == [1.0, 1.0]
    assert balance_defect(zero[:0], zero[:0])[0].shape == (0,)
    assert balance_defect(zero[:, :0], zero[:, :0])[0].tolist() == [0.0, 0.0]


@few
@given(seed=seeds, batch=batches, r=st.integers(1, 6), exponent=st.sampled_from([-500, -60, 0, 60, 500]))
def test_balanced_factors_and_their_rotations(seed: int, batch: tuple[int, ...], r: int, exponent: int) -> None:
    """B = A V with orthogonal V is balanced; O A and O B have the defect of A and B."""
    generator = rng(seed)

    def rows(m: int) -> Tensor:
        return random_invertible(r, generator, batch=batch) @ random_orthogonal(m, generator, batch=batch)[..., :r, :]

    a, b = rows(8) * 2.0**exponent, rows(7) * 2.0**exponent
    assert bool((balance_defect(a, a @ random_orthogonal(8, generator, batch=batch))[1] <= 1e-14 * r).all())
    turn = random_orthogonal(r, generator, batch=batch)
    for before, after in zip(balance_defect(a, b), balance_defect(turn @ a, turn @ b), strict=True):
        torch.testing.assert_close(before, after, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [F64, torch.complex128])
@pytest.mark.parametrize(("k", "m", "n"), [(1, 1, 1), (3, 8, 5), (4, 4, 9)])
def test_balance_keeps_the_product_and_equals_the_grams(k: int, m: int, n: int, dtype: torch.dtype) -> None:
    a, b = normal(2, k, m, dtype=dtype), normal(2, k, n, seed=1, dtype=dtype)
    s, t = balance(a, b)
    short_a, short_b = s @ a, t @ b
    torch.testing.assert_close(short_b.mH @ short_a, b.mH @ a, rtol=0, atol=1e-12)
    singular = torch.linalg.svdvals(b.mH @ a)[..., :k]
    diagonal = torch.diag_embed(singular).to(dtype)
    for factor in (short_a, short_b):
        torch.testing.assert_close(factor @ factor.mH, diagonal, rtol=0, atol=1e-12)
    torch.testing.assert_close(t.mH @ s, torch.eye(k, dtype=dtype).expand(2, k, k), rtol=0, atol=1e-11)
    assert (a @ a.mH - b @ b.mH).abs().max() > 0.1  # they were not so before


def test_balance_of_what_the_product_does_not_show() -> None:
    """A row that B answers nothing to becomes zero in both, in whatever basis; so do rows beyond the widths."""
    a, b = normal(1, 3, 8), normal(1, 3, 6, seed=1)
    b[:, 2] = 0.0
    move = random_invertible(3, rng(2))
    a, b = move @ a, torch.linalg.inv(move).mT @ b
    s, t = balance(a, b)
    torch.testing.assert_close((t @ b).mT @ (s @ a), b.mT @ a, rtol=0, atol=1e-12)
    assert s[:, 2].abs().max() == 0.0 == t[:, 2].abs().max()
    a, b = normal(1, 5, 3), normal(1, 5, 4, seed=1)
    s, t = balance(a, b)
    torch.testing.assert_close((t @ b).mT @ (s @ a), b.mT @ a, rtol=0, atol=1e-12)
    assert s[:, 3:].abs().max() == 0.0 == t[:, 3:].abs().max()


# --- singular vectors of products ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("batch", [(), (1,), (1, 1), (2, 1, 3), (0,)])
@pytest.mark.parametrize(("r", "m", "n"), [(1, 1, 1), (3, 9, 7), (5, 5, 5), (6, 4, 9), (6, 9, 4), (2, 1, 5)])
def test_product_svd_is_that_of_the_dense_product(
    r: int, m: int, n: int, batch: tuple[int, ...], dtype: torch.dtype
) -> None:
    a, b = normal(*batch, r, m, dtype=dtype), normal(*batch, r, n, seed=1, dtype=dtype)
    s, left, right = product_svd(a, b)
    p = min(r, m, n)
    assert (s.shape, left.shape, right.shape) == ((*batch, p), (*batch, p, n), (*batch, p, m))
    assert {x.dtype for x in (s, left, right)} == {dtype}
    assert bool((s[..., 1:] <= s[..., :-1]).all())
    tolerance = 300 * torch.finfo(dtype).eps
    g = b.double().mT @ a.double()
    torch.testing.assert_close(s.double(), torch.linalg.svdvals(g)[..., :p], rtol=0, atol=tolerance)
    torch.testing.assert_close(((left.mT * s[..., None, :]) @ right).double(), g, rtol=0, atol=tolerance)
    for rows in (left, right):
        one = torch.eye(p, dtype=dtype).expand(*batch, p, p)
        torch.testing.assert_close(rows @ rows.mT, one, rtol=0, atol=tolerance)


def test_product_svd_of_ill_conditioned_and_deficient_factors() -> None:
    """Small values as right as rounding of the largest allows, where Gram matrices have lost them; none too many."""
    q, generator = random_orthogonal(12, rng(3)), rng(4)
    size = torch.logspace(0, -11, 4, dtype=F64)
    a = size[:, None] * q[:4]
    b = random_orthogonal(4, generator)
    torch.testing.assert_close(product_svd(a, b)[0], size, rtol=0, atol=1e-15)
    gram = torch.linalg.eigvalsh(a.mT @ a).clamp_min(0).sqrt().flip(0)[:4]
    assert (gram - size).abs().max() > 1e-10
    a[2:] = 0.0
    s, left, right = product_svd(a, b)
    torch.testing.assert_close(s, torch.cat([size[:2], torch.zeros(2, dtype=F64)]), rtol=0, atol=1e-15)
    torch.testing.assert_close((left.mT * s) @ right, b.mT @ a, rtol=0, atol=1e-15)


def test_product_svd_broadcasts() -> None:
    a, b = normal(2, 1, 3, 8), normal(4, 3, 6, seed=1)
    s, left, right = product_svd(a, b)
    assert s.shape == (2, 4, 3)
    torch.testing.assert_close((left.mT * s[..., None, :]) @ right, b.mT @ a, rtol=0, atol=1e-12)


# --- side by side -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("h", "g"), [(6, 6), (6, 3), (6, 1), (1, 1)])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_heads_of_a_group_side_by_side(h: int, g: int, n: int) -> None:
    factors, readers = normal(h, 3, n), normal(g, 3, 5, seed=1)
    together = beside(factors, g)
    assert together.shape == (g, 3, h // g * n)
    assert torch.equal(apart(together, h), factors)
    products = together.mT @ readers  # (g, h/g · n, 5): the products of the heads, one below the other
    each = torch.stack([factors[i].mT @ readers[i // (h // g)] for i in range(h)])
    torch.testing.assert_close(products.reshape(h, n, 5), each, rtol=0, atol=1e-14)
