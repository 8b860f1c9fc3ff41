"""Products in pivot coordinates against products that are formed."""

from __future__ import annotations

import pytest
import torch
from drawn import normal

from gaugekit.linalg import random_invertible
from gaugekit.nn.pivoted import PivotedProduct, pivots_first

F64 = torch.float64
SHAPES = [(4, 4, 3, 9, 3), (4, 2, 3, 9, 5), (4, 1, 3, 9, 9), (2, 2, 4, 4, 4), (2, 1, 1, 5, 1), (2, 1, 6, 4, 4)]


@pytest.mark.parametrize(("h", "g", "k", "d", "rank"), SHAPES)
def test_product_and_coordinates_of_what_was_set(h: int, g: int, k: int, d: int, rank: int) -> None:
    """k is the factors' size; two more answers than the width has entries come back as coordinates."""
    a, b = normal(g, k, d), normal(h, k, d + 2, seed=1)
    product = PivotedProduct(d, h, g, rank, dtype=F64)
    more = product.set_(a, b)
    wide = a.repeat_interleave(h // g, 0)
    torch.testing.assert_close(product.product(), b[..., :d].mT @ wide, rtol=0, atol=1e-11)
    reader = product.reader().repeat_interleave(h // g, 0)
    assert more.shape == (h, rank, 2)
    torch.testing.assert_close(more.mT @ reader, b[..., d:].mT @ wide, rtol=0, atol=1e-11)
    assert product.complete == (rank == d)
    for one, pivots in zip(product.reader(), product.pivots, strict=True):
        assert pivots.tolist() == sorted(set(pivots.tolist()))
        assert torch.equal(one[:, pivots], torch.eye(rank, dtype=F64))
    columns = [g_i[:, product.pivots[i // (h // g)]] for i, g_i in enumerate(product.product())]
    torch.testing.assert_close(product.columns.mT, torch.stack(columns), rtol=0, atol=0)
    stored = sum(p.numel() for p in product.parameters())
    assert stored == h * d * rank + g * rank * (d - rank)


@pytest.mark.parametrize(("h", "g", "k", "d", "rank"), SHAPES)
def test_reading_is_multiplying(h: int, g: int, k: int, d: int, rank: int) -> None:
    product = PivotedProduct(d, h, g, rank, dtype=F64)
    product.set_(normal(g, k, d), normal(h, k, d, seed=1))
    x = normal(2, 6, d, seed=2)
    expected = x.unsqueeze(1) @ product.reader().repeat_interleave(h // g, 0).mT
    torch.testing.assert_close(product.read(x), expected, rtol=0, atol=1e-12)
    assert (product.read(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == (rank == d)


def test_no_other_factors_of_one_product_store_anything_else() -> None:
    a, b, one, other = normal(2, 3, 9), normal(4, 3, 9, seed=1), *(PivotedProduct(9, 4, 2, 3, dtype=F64) for _ in "ab")
    one.set_(a, b)
    s = random_invertible(3, torch.Generator().manual_seed(2), batch=(2,))
    other.set_(s @ a, torch.linalg.inv(s).mT.repeat_interleave(2, 0) @ b)
    assert torch.equal(one.pivots, other.pivots)
    torch.testing.assert_close(other.columns, one.columns, rtol=0, atol=1e-11)
    torch.testing.assert_close(other.coefficients, one.coefficients, rtol=0, atol=1e-11)
    other.set_(s @ a, b)
    assert (other.columns - one.columns).abs().max() > 1e-3


def test_pivots_first() -> None:
    assert pivots_first(torch.tensor([[4, 1], [0, 2]]), 5).tolist() == [[1, 4, 0, 2, 3], [0, 2, 1, 3, 4]]
