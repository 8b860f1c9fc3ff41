"""Random group elements: of the group, from its measure, seeded; and the basis of vectors that sum to zero."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gaugekit.linalg import orthonormal_complement_of_ones, random_invertible, random_orthogonal

F64 = torch.float64
few = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)
batches = st.sampled_from([(), (1,), (3,), (1, 1), (2, 3), (1, 4, 1), (0,), (2, 0)])


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@few
@given(seed=seeds, n=st.integers(1, 8), batch=batches)
def test_random_orthogonal(seed: int, n: int, batch: tuple[int, ...]) -> None:
    q = random_orthogonal(n, rng(seed), batch=batch)
    assert q.shape == (*batch, n, n)
    assert q.dtype == F64
    torch.testing.assert_close(q @ q.mT, torch.eye(n, dtype=F64).expand(*batch, n, n), rtol=0, atol=1e-14)
    assert torch.equal(q, random_orthogonal(n, rng(seed), batch=batch))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_random_orthogonal_is_haar(n: int) -> None:
    """Determinants are ± alike; moments of the entries are those of Haar measure: E q = 0, E q² = 1/n, and
    for the trace E t² = 1, to five standard errors of 4000 draws.
    """
    q = random_orthogonal(n, rng(5), batch=(4000,))
    assert abs(float(torch.linalg.det(q).mean())) < 5 / math.sqrt(4000)
    assert bool((q.mean(0).abs() < 5 / math.sqrt(4000 * n)).all())
    assert bool((q.square().mean(0) - 1 / n).abs().max() < 5 / math.sqrt(4000))
    trace = q.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert abs(float(trace.square().mean()) - 1) < 5 * math.sqrt(2 / 4000)


def test_random_orthogonal_dtype_and_refusals() -> None:
    q = random_orthogonal(4, rng(), dtype=torch.float32)
    assert q.dtype == torch.float32
    assert torch.equal(q, random_orthogonal(4, rng()).to(torch.float32))
    with pytest.raises(TypeError, match="floating point"):
        random_orthogonal(2, rng(), dtype=torch.int64)
    with pytest.raises(ValueError, match="n must be"):
        random_orthogonal(0, rng())


@few
@given(seed=seeds, n=st.integers(1, 8), batch=batches, condition=st.sampled_from([1.0, 10.0, 1e3, 1e6]))
def test_random_invertible(seed: int, n: int, batch: tuple[int, ...], condition: float) -> None:
    x = random_invertible(n, rng(seed), condition, batch)
    assert x.shape == (*batch, n, n)
    assert x.dtype == F64
    s = torch.linalg.svdvals(x)
    spans = condition if n > 1 else 1.0
    torch.testing.assert_close(s[..., 0] / s[..., -1], torch.full(batch, spans, dtype=F64), rtol=1e-14 * spans, atol=0)
    torch.testing.assert_close(s.log().mean(-1), torch.zeros(batch, dtype=F64), rtol=0, atol=1e-14 * spans)
    assert torch.equal(x, random_invertible(n, rng(seed), condition, batch))


@pytest.mark.parametrize("n", [1, 4])
def test_random_invertible_has_both_determinants(n: int) -> None:
    sign = torch.linalg.det(random_invertible(n, rng(6), batch=(1000,))).sign()
    assert abs(float(sign.mean())) < 5 / math.sqrt(1000)


@pytest.mark.parametrize("condition", [0.5, math.inf, math.nan, -1.0])
def test_random_invertible_refuses(condition: float) -> None:
    with pytest.raises(ValueError, match="condition"):
        random_invertible(3, rng(), condition)


@pytest.mark.parametrize("d", [1, 2, 3, 64, 1000])
def test_orthonormal_complement_of_ones(d: int) -> None:
    basis = orthonormal_complement_of_ones(d)
    assert basis.shape == (d, d - 1)
    assert basis.dtype == F64
    torch.testing.assert_close(basis.mT @ basis, torch.eye(d - 1, dtype=F64), rtol=0, atol=1e-14)
    torch.testing.assert_close(basis.sum(0), torch.zeros(d - 1, dtype=F64), rtol=0, atol=1e-13)


def test_orthonormal_complement_of_ones_refuses() -> None:
    with pytest.raises(ValueError, match="d must be"):
        orthonormal_complement_of_ones(0)
