"""Truncated products against dense singular value decompositions, and the weighting by moments against samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gaugekit.linalg import moment_factor, product_truncation, random_invertible, square_factor

DTYPES = (torch.float64, torch.complex128)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def norm(x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "k", "m", "n"), [((), 4, 9, 7), ((2, 3), 5, 8, 5), ((1,), 3, 2, 6), ((0,), 2, 4, 4)])
def test_every_cut_is_the_nearest_matrix(batch: tuple[int, ...], k: int, m: int, n: int, dtype: torch.dtype) -> None:
    """TransformerLens#226: a factored decomposition that was wrong with leading dimensions of one."""
    a, b = drawn(1, *batch, k, m, dtype=dtype), drawn(2, *batch, k, n, dtype=dtype)
    s, own, dual = product_truncation(a, b)
    u, dense, vh = torch.linalg.svd(b.mH @ a)
    rank = min(k, m, n)
    torch.testing.assert_close(s[..., :rank], dense[..., :rank], rtol=1e-10, atol=1e-12)
    for r in range(1, rank + 1):
        first, second = own[..., :r, :] @ a, dual[..., :r, :] @ b
        nearest = (u[..., :r] * dense[..., None, :r]) @ vh[..., :r, :]
        torch.testing.assert_close(second.mH @ first, nearest, rtol=0, atol=1e-10)
        tail = dense[..., r:].square().sum(-1).sqrt()
        torch.testing.assert_close(norm(b.mH @ a - second.mH @ first), tail, rtol=1e-9, atol=1e-10)
        gram = torch.diag_embed(s[..., :r]).to(dtype)
        torch.testing.assert_close(first @ first.mH, gram, rtol=0, atol=1e-10)
        torch.testing.assert_close(second @ second.mH, gram, rtol=0, atol=1e-10)
        one = torch.eye(r, dtype=dtype).expand(*batch, r, r)
        torch.testing.assert_close(own[..., :r, :] @ dual[..., :r, :].mH, one, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_directions_that_are_not_in_the_product_are_zero(dtype: torch.dtype) -> None:
    a, b = drawn(1, 5, 9, dtype=dtype), drawn(2, 5, 7, dtype=dtype)
    a[3] = a[0] + 2 * a[1]  # the values reach four dimensions,
    b[4] = -b[2]  # and the outputs see three of these
    s, own, dual = product_truncation(a, b)
    rank = int(torch.linalg.matrix_rank(b.mH @ a))
    assert rank == 3
    assert bool((s[:rank] > 1e-3).all())
    for rows in (s.unsqueeze(-1), own, dual):
        assert bool((rows[rank:] == 0).all())
    torch.testing.assert_close((dual @ b).mH @ (own @ a), b.mH @ a, rtol=0, atol=1e-10)
    zero = product_truncation(torch.zeros(3, 4, dtype=dtype), b[:3])
    assert all(bool((x == 0).all()) for x in zero)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cut_belongs_to_the_product_not_to_its_factors(dtype: torch.dtype) -> None:
    """A → g A, B → g⁻ᴴ B: the projector is carried along."""
    a, b = drawn(1, 6, 11, dtype=dtype), drawn(2, 6, 8, dtype=dtype)
    g = random_invertible(6, torch.Generator().manual_seed(3), 100.0, dtype=dtype)
    s, own, dual = product_truncation(a, b)
    moved, own_, dual_ = product_truncation(g @ a, torch.linalg.inv(g).mH @ b)
    torch.testing.assert_close(moved, s, rtol=1e-9, atol=0)
    for r in (1, 3, 5):
        projector = dual[:r].mH @ own[:r]
        again = torch.linalg.inv(g) @ dual_[:r].mH @ own_[:r] @ g
        torch.testing.assert_close(again, projector, rtol=0, atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_least_error_over_samples(dtype: torch.dtype) -> None:
    """With a factor of their moment for A the error over samples is the tail, and no other cut of its rank has less."""
    k, n = 6, 9
    b = drawn(1, k, n, dtype=dtype)
    samples = drawn(2, 400, k, dtype=dtype) @ drawn(3, k, k, dtype=dtype)
    moment = samples.mT @ samples.conj() / len(samples)
    s, own, dual = product_truncation(moment_factor(moment), b)
    _, own_plain, dual_plain = product_truncation(torch.eye(k, dtype=dtype), b)

    def error(projector: Tensor) -> float:
        rest = samples @ (torch.eye(k, dtype=dtype) - projector).mT
        return float((rest @ b.conj()).abs().square().sum(-1).mean())

    for r in range(1, k):
        least = error(dual[:r].mH @ own[:r])
        assert least == pytest.approx(float(s[r:].square().sum()), rel=1e-9)
        assert least < 0.99 * error(dual_plain[:r].mH @ own_plain[:r])
        for seed in range(20):
            nudged = own[:r] + 1e-2 * drawn(10 + seed, r, k, dtype=dtype) * own[:r].abs().mean()
            assert error(dual[:r].mH @ nudged) > least


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_of_moments(dtype: torch.dtype) -> None:
    x = drawn(1, 2, 4, 9, dtype=dtype)
    moment = x @ x.mH
    for factor in (square_factor(x), moment_factor(moment)):
        assert factor.shape == (2, 4, 4)
        torch.testing.assert_close(factor @ factor.mH, moment, rtol=1e-12, atol=1e-12)
    narrow = x[..., :2]  # fewer columns than rows: singular, and a little negative by rounding
    factor = moment_factor(narrow @ narrow.mH - 1e-16 * torch.eye(4, dtype=dtype))
    assert bool(factor.abs().isfinite().all())
    torch.testing.assert_close(factor @ factor.mH, narrow @ narrow.mH, rtol=0, atol=1e-13)
    torch.testing.assert_close(square_factor(narrow) @ square_factor(narrow).mH, narrow @ narrow.mH, rtol=0, atol=1e-13)
