"""Pivot columns against LAPACK's, in all bases of the rows, behind the rank and at ties."""

from __future__ import annotations

from typing import Any

import pytest
import scipy.linalg
import torch
from torch import Tensor

from gaugekit.linalg import column_pivots, random_orthogonal

F64 = torch.float64
DTYPES = [torch.float32, F64, torch.complex64, torch.complex128]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthonormal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """Rows (..., r, m)."""
    return torch.linalg.qr(torch.randn(shape, generator=rng(seed), dtype=dtype).mH).Q.mH.resolve_conj()


def unitary(r: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return orthonormal(r, r, seed=seed + 99, dtype=dtype)


def lapack(rows: Tensor) -> list[int]:
    wide = rows.to(torch.complex128 if rows.is_complex() else F64)
    factors: tuple[Any, ...] = scipy.linalg.qr(wide.numpy(), mode="r", pivoting=True)
    return factors[1][: len(rows)].tolist()


@pytest.mark.parametrize(("r", "m"), [(1, 1), (1, 7), (4, 5), (5, 23), (16, 40), (40, 41)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pivots_are_those_of_lapack(r: int, m: int, dtype: torch.dtype) -> None:
    rows = orthonormal(3, r, m, seed=m, dtype=dtype)
    found = column_pivots(rows)
    assert found.tolist() == [lapack(one) for one in rows]
    assert torch.equal(column_pivots(unitary(r, dtype) @ rows), found)


@pytest.mark.parametrize("dtype", [F64, torch.complex128])
def test_as_many_columns_as_rows_all_tie(dtype: torch.dtype) -> None:
    """All columns of a unitary matrix are equally long: LAPACK takes them in an order that rounding gives."""
    rows = orthonormal(3, 6, 6, dtype=dtype)
    assert column_pivots(rows).tolist() == [list(range(6))] * 3
    assert [sorted(lapack(one)) for one in rows] == [list(range(6))] * 3
    assert [lapack(one) for one in rows] != [list(range(6))] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_fewer_digits_break_ties_but_repeat_no_column(dtype: torch.dtype) -> None:
    found = column_pivots(orthonormal(3, 6, 6, dtype=dtype))
    assert found.sort(-1).values.tolist() == [list(range(6))] * 3


@pytest.mark.parametrize("batch", [(), (1,), (3,), (1, 1), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_each_matrix_of_a_batch_has_its_own(batch: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = orthonormal(*batch, 4, 11, dtype=dtype)
    kept = rows.clone()
    found = column_pivots(rows.requires_grad_())
    assert found.shape == (*batch, 4)
    assert found.dtype == torch.int64
    each = [lapack(one) for one in kept.reshape(-1, 4, 11)]
    assert found.reshape(-1, 4).tolist() == each
    assert len({tuple(pivots) for pivots in each}) == len(each)
    assert torch.equal(rows, kept)


def test_layout_does_not_matter() -> None:
    rows = orthonormal(4, 11)
    found = column_pivots(rows)
    assert torch.equal(column_pivots(rows.expand(3, 4, 11)), found.expand(3, 4))
    assert torch.equal(column_pivots(rows.mT.contiguous().mT), found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 1, 3, 5])
def test_behind_the_rank_the_lowest_columns_fill_up(rank: int, dtype: torch.dtype) -> None:
    rows = orthonormal(2, 5, 12, seed=rank, dtype=dtype)
    rows[:, rank:] = 0.0
    expected = []
    for one in rows:
        pivots = lapack(one)[:rank]
        expected.append(pivots + [i for i in range(12) if i not in pivots][: 5 - rank])
    assert column_pivots(rows).tolist() == expected
    # Zero rows may stand anywhere; and a basis in which none is zero has the same pivots.
    assert column_pivots(rows.flip(-2)).tolist() == expected
    assert column_pivots(unitary(5, dtype) @ rows.to(dtype)).tolist() == expected


@pytest.mark.parametrize("dtype", [F64, torch.complex128])
def test_ties_are_settled_alike_in_all_bases(dtype: torch.dtype) -> None:
    """Every column comes twice, the second time first in size by rounding and with another phase."""
    once = orthonormal(4, 9, dtype=dtype) / 2**0.5
    rows = torch.cat([once, -once * (1 + 1e-14)], -1)
    found = column_pivots(rows)
    assert found.tolist() == lapack(once)
    for seed in range(20):
        assert torch.equal(column_pivots(unitary(4, dtype, seed) @ rows), found)
    # Twice as far apart as a tie may be, the longer one is taken.
    assert column_pivots(torch.cat([once, -once * (1 + 1e-7)], -1)).tolist() == [i + 9 for i in lapack(once)]


def test_no_rows_and_refusals() -> None:
    assert column_pivots(torch.ones(2, 0, 3)).shape == (2, 0)
    assert column_pivots(torch.ones(0, 0)).shape == (0,)
    with pytest.raises(TypeError, match="floating point or complex"):
        column_pivots(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"r <= m, got \(3, 2\)"):
        column_pivots(random_orthogonal(3, rng())[:, :2])
    with pytest.raises(ValueError, match="must be"):
        column_pivots(torch.ones(3))
