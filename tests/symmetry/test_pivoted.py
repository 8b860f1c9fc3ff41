"""What makes k columns of a head the identity, real or complex, and where there is no such thing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gaugekit.linalg import random_invertible
from gaugekit.symmetry.pivoted import pivoting

DTYPES = [torch.float64, torch.complex128]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 6), (3, 9), (4, 4)])
def test_one_representative_for_all_bases(k: int, m: int, dtype: torch.dtype) -> None:
    heads = normal(3, k, m, dtype=dtype)
    canonical = pivoting(heads) @ heads
    one = torch.eye(k, dtype=dtype)
    for head in canonical:
        is_unit = (head.unsqueeze(-1) - one.unsqueeze(1)).abs().amax(0) < 1e-12  # (m, k): which column is which
        assert bool(is_unit.any(0).all())
        places = is_unit.int().argmax(0).tolist()
        assert places == sorted(places)
    for seed in range(5):
        base = random_invertible(k, torch.Generator().manual_seed(seed), 100.0, (3,)).to(dtype)
        moved = base * torch.tensor(1.7 + 0.4j if dtype.is_complex else -1.7, dtype=dtype) @ heads
        torch.testing.assert_close(pivoting(moved) @ moved, canonical, rtol=0, atol=1e-10)
    other = heads.clone()
    other[..., -1] *= 1.1
    assert m == k or (pivoting(other) @ other - canonical).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_less_than_full_rank_stay(dtype: torch.dtype) -> None:
    heads = normal(4, 3, 9, dtype=dtype)
    full = pivoting(heads)
    heads[0, 2] = 0.0
    heads[1] = 0.0
    heads[2, 2] = heads[2, 0] - heads[2, 1]
    found = pivoting(heads)
    assert torch.equal(found[:3], torch.eye(3, dtype=dtype).expand(3, 3, 3))
    torch.testing.assert_close(found[3], full[3], rtol=0, atol=1e-14)
    assert (found[3] - torch.eye(3)).abs().max() > 0.1
    narrow = normal(2, 3, 2, dtype=dtype)
    assert torch.equal(pivoting(narrow), torch.eye(3, dtype=dtype).expand(2, 3, 3))


def test_entries_stay_small() -> None:
    """Columns taken as they come would be divided by what may be tiny."""
    heads = normal(50, 8, 40)
    assert (pivoting(heads) @ heads).abs().max() < 4
    assert (torch.linalg.inv(heads[..., :8]) @ heads).abs().max() > 40
