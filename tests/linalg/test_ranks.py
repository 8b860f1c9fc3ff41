"""Ranks between one and the count of values, by hand, and ties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gaugekit.linalg import degenerate_blocks, effective_rank, numerical_rank, stable_rank

F64 = torch.float64
few = settings(max_examples=60, deadline=None)


@few
@given(
    values=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8),
    zeros=st.integers(0, 4),
    scale=st.sampled_from([1e-290, 1.0, 1e290]),
)
def test_ranks_lie_between_one_and_the_count_and_ignore_scale(values: list[float], zeros: int, scale: float) -> None:
    s = torch.tensor(values + [0.0] * zeros, dtype=F64)
    effective, stable, count = (float(f) for f in (effective_rank(s), stable_rank(s), numerical_rank(s, 20)))
    assert 1 - 1e-12 <= effective <= len(values) * (1 + 1e-12)
    assert 1 - 1e-12 <= stable <= len(values) * (1 + 1e-12)
    assert count == len(values)
    assert float(effective_rank(s * scale)) == pytest.approx(effective, rel=1e-12)
    assert float(stable_rank(s * scale)) == pytest.approx(stable, rel=1e-12)
    assert float(numerical_rank(s * scale, 20)) == count


def test_ranks_by_hand() -> None:
    s = torch.tensor([[2.0, 2.0, 2.0, 2.0], [4.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [2.0, 1.0, 1.0, 0.0]])
    expected = torch.tensor([4.0, 1.0, 0.0, 2 * math.sqrt(2)], dtype=F64)  # entropy of 1/2, 1/4, 1/4: 3/2 log 2
    torch.testing.assert_close(effective_rank(s), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(stable_rank(s), torch.tensor([4.0, 1.0, 0.0, 1.5], dtype=F64), rtol=1e-14, atol=0)
    assert numerical_rank(s, 4).tolist() == [4, 1, 0, 3]
    assert effective_rank(s[:, :0]).tolist() == [0.0] * 4 == stable_rank(s[:, :0]).tolist()
    eps = torch.finfo(F64).eps
    assert int(numerical_rank(torch.tensor([1.0, 11 * eps, 10 * eps], dtype=F64), 10)) == 2


@pytest.mark.parametrize("function", [effective_rank, stable_rank, lambda s: numerical_rank(s, 3), degenerate_blocks])
def test_ranks_refuse_what_is_no_spectrum(function) -> None:
    with pytest.raises(TypeError, match="floating point"):
        function(torch.ones(3, dtype=torch.int64))
    for bad in ([1.0, -1.0], [math.inf, 1.0], [math.nan, 1.0]):
        with pytest.raises(ValueError, match="nonnegative and finite"):
            function(torch.tensor(bad))
    with pytest.raises(ValueError, match="one"):
        function(torch.tensor(1.0))


def test_numerical_rank_refuses_no_size() -> None:
    with pytest.raises(ValueError, match="size"):
        numerical_rank(torch.ones(2), 0)


@pytest.mark.parametrize(
    ("s", "blocks"),
    [
        ([], []),
        ([3.0], []),
        ([3.0, 2.0, 1.0], []),
        ([3.0, 3.0, 1.0], [(0, 2)]),
        ([3.0, 2.0, 2.0, 1.0, 1.0, 1.0], [(1, 2), (3, 3)]),
        ([1.0, 1.0, 1.0], [(0, 3)]),
        ([1.0, 0.99995, 0.9999, 0.5], [(0, 3)]),  # ties chain
        ([1.0, 0.9998], []),
        ([1.0, 1e-3, 0.0, 0.0], [(2, 2)]),
        ([1.0, 1e-13, 1e-15, 0.0], [(1, 3)]),
        ([1.0, 1e-11, 0.0], []),
        ([0.0, 0.0], [(0, 2)]),
        ([1e-300, 1e-300, 5e-301], [(0, 2)]),
    ],
)
def test_degenerate_blocks(s: list[float], blocks: list[tuple[int, int]]) -> None:
    assert degenerate_blocks(torch.tensor(s, dtype=F64)) == blocks


def test_degenerate_blocks_tolerance_and_refusals() -> None:
    s = torch.tensor([1.0, 0.95, 0.5], dtype=F64)
    assert degenerate_blocks(s) == [] == degenerate_blocks(s, 0.0)
    assert degenerate_blocks(s, 0.06) == [(0, 2)]
    assert degenerate_blocks(s, 1.0) == [(0, 3)]
    with pytest.raises(ValueError, match="descending"):
        degenerate_blocks(torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="one spectrum"):
        degenerate_blocks(torch.ones(2, 2))
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="rtol"):
            degenerate_blocks(s, bad)
