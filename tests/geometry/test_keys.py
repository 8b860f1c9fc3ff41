"""Keys against linear programs, convex hulls and the theorems about spheres."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.spatial import ConvexHull
from torch import Tensor
from torch.nn.functional import layer_norm, normalize

from gaugekit.geometry import keys as module
from gaugekit.geometry.keys import uniform_query, uniform_query_of_head, unselectable
from gaugekit.linalg import random_invertible, random_orthogonal

F64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=F64)


def on_the_hull(keys: Tensor) -> Tensor:
    """Selectable keys in general position by Qhull: the vertices."""
    mask = torch.zeros(len(keys), dtype=torch.bool)
    mask[torch.as_tensor(ConvexHull(keys.numpy()).vertices).long()] = True
    return mask


def largest_lead(keys: Tensor, i: int) -> float:
    """max t with q·(k_i − k_j) >= t for all j, |q|_∞ <= 1, from the keys as they are."""
    others = np.delete(keys.numpy(), i, 0)
    k = keys.shape[1]
    a = np.column_stack([others - keys[i].numpy(), np.ones(len(others))])
    bounds = [(-1, 1)] * k + [(None, None)]
    result = linprog(np.append(np.zeros(k), -1.0), A_ub=a, b_ub=np.zeros(len(others)), bounds=bounds, method="highs")
    return float(-result.fun)


# --- the uniform query --------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_uniform_query_scores_every_normalized_key_alike(eps: float) -> None:
    d = 12
    weight, bias = 1 + 0.3 * normal(d, seed=1), normal(d, seed=2)
    keys = layer_norm(3 * normal(50, d) + 7, (d,), weight, bias, eps)
    query = uniform_query(weight)
    assert float(torch.linalg.vector_norm(query)) == pytest.approx(1)
    scores = keys @ query
    torch.testing.assert_close(scores, (bias @ query).expand(50), rtol=0, atol=1e-13)
    ones = torch.full((d,), d**-0.5, dtype=F64)  # it is along 1 only where γ is constant
    assert float((keys @ ones).std()) > 0.1
    assert float((layer_norm(normal(50, d), (d,)) @ ones).std()) < 1e-14


def test_uniform_query_of_head_is_the_least_squares_answer() -> None:
    w_k, weight = normal(2, 3, 4, 9), 1 + 0.3 * normal(9, seed=1)
    query, cosine = uniform_query_of_head(w_k, weight)
    assert query.shape == (2, 3, 4) and cosine.shape == (2, 3)
    target = uniform_query(weight)
    for index in product(range(2), range(3)):
        best = torch.linalg.lstsq(w_k[index].mT, target.unsqueeze(1)).solution.squeeze(1)
        torch.testing.assert_close(query[index], best)
        seen = w_k[index].mT @ best
        assert float(cosine[index]) == pytest.approx(float(torch.cosine_similarity(seen, target, dim=0)))
    expected = math.sqrt(64 / 576)
    _, cosine = uniform_query_of_head(normal(200, 64, 576), torch.ones(576, dtype=F64))
    assert float(cosine.mean()) == pytest.approx(expected, rel=0.02)


def test_a_head_that_holds_the_direction_asks_uniformly() -> None:
    d = 9
    weight, bias = 1 + 0.3 * normal(d, seed=1), normal(d, seed=2)
    w_k = normal(4, d)
    w_k[2] = 5 / weight - w_k[0]
    keys = layer_norm(normal(30, d), (d,), weight, bias) @ w_k.mT + normal(4, seed=3)
    query, cosine = uniform_query_of_head(w_k, weight)
    assert float(cosine) == pytest.approx(1, abs=1e-12)
    assert float((keys @ query).std()) < 1e-12 < float((keys @ normal(4, seed=4)).std())


def test_uniform_query_of_a_deficient_head() -> None:
    weight = 1 + 0.3 * normal(6, seed=1)
    w_k = torch.cat([normal(1, 6), normal(1, 6), torch.zeros(2, 6, dtype=F64)])
    query, cosine = uniform_query_of_head(w_k, weight)
    torch.testing.assert_close(query[2:], torch.zeros(2, dtype=F64), rtol=0, atol=1e-14)
    assert 0 < float(cosine) < 1
    query, cosine = uniform_query_of_head(torch.zeros(4, 6), weight)
    assert not bool(query.any()) and float(cosine) == 0
    assert uniform_query_of_head(torch.zeros(0, 4, 6), weight)[0].shape == (0, 4)


def test_uniform_query_refuses() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        uniform_query_of_head(normal(4, 6), torch.ones(5))
    with pytest.raises(TypeError, match="W_K must be real"):
        uniform_query_of_head(torch.ones(4, 6, dtype=torch.int64), torch.ones(6))
    with pytest.raises(ValueError, match="W_K has NaN"):
        uniform_query_of_head(torch.full((4, 6), math.nan), torch.ones(6))
    with pytest.raises(ValueError, match="zeros"):
        uniform_query_of_head(normal(4, 6), torch.zeros(6))


# --- unselectable keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_against_the_convex_hull(d: int, spread: float) -> None:
    keys = normal(60, d, seed=d) * (spread * normal(60, 1, seed=9)).exp()
    result = unselectable(keys)
    assert torch.equal(~result.mask, on_the_hull(keys))
    assert 0 < result.share < 1
    assert result.share == pytest.approx(float(result.mask.double().mean()))


@pytest.mark.parametrize(
    "keys",
    [
        normal(40, 8) * normal(40, 1, seed=1).exp(),
        normal(50, 3) @ normal(3, 20, seed=1),
        normal(30, 1) @ normal(1, 5, seed=1),
        normal(10, 20),
    ],
    ids=["heavy tails", "rank 3 of 20", "a line", "fewer than k"],
)
def test_against_a_linear_program_for_every_key(keys: Tensor) -> None:
    leads = torch.tensor([largest_lead(keys, i) for i in range(len(keys))], dtype=F64)
    result = unselectable(keys, margins=True)
    assert torch.equal(result.mask, leads < 1e-9)
    assert result.margins is not None
    torch.testing.assert_close(result.margins, leads.clamp_min(0), rtol=1e-6, atol=1e-8)
    assert bool((result.margins[result.mask] == 0).all()) and bool((result.margins[~result.mask] > 0).all())
    assert unselectable(keys).margins is None


def test_keys_on_the_boundary_of_the_hull() -> None:
    """Of the grid {−1, 0, 1}³ only the corners can win; the others lie on edges and faces, or inside."""
    grid = torch.tensor(list(product([-1.0, 0.0, 1.0], repeat=3)), dtype=F64)
    corners = (grid.abs() == 1).all(1)
    for keys in (grid, grid @ random_invertible(3, rng(1)) + 5):
        assert torch.equal(~unselectable(keys).mask, corners)


def test_margins_of_a_square() -> None:
    square = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]], dtype=F64)
    result = unselectable(square, margins=True)
    assert result.margins is not None
    torch.testing.assert_close(result.margins, torch.tensor([2.0, 2.0, 2.0, 2.0, 0.0], dtype=F64))


def test_how_near_the_hull_counts_as_in_it() -> None:
    face = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, -1.0]], dtype=F64)
    for height, expected in ((1e-3, False), (1e-8, False), (1e-14, True), (0.0, True), (-1e-3, True)):
        keys = torch.cat([face, torch.tensor([[0.1, height]], dtype=F64)])
        assert bool(unselectable(keys).mask[-1]) == expected, height


@pytest.mark.parametrize("d", [2, 3, 8, 64])
def test_distinct_keys_on_a_sphere_are_all_selectable(d: int) -> None:
    """Whatever its centre and radius, evenly spread or crowded; and under an injective linear map, on its ellipsoid."""
    even = normalize(normal(20 * min(d, 8), d), dim=-1)
    crowded = normalize(even + 30, dim=-1)
    for sphere in (even, crowded, torch.cat([even, crowded])):
        assert unselectable(3 * sphere + normal(d, seed=1)).share == 0
        assert unselectable(1e3 * sphere @ random_invertible(d, rng(2)) + 7).share == 0


def test_one_product_finds_all_keys_of_a_sphere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leads for the query from the centre, which is not the keys' mean."""

    def nothing_left(left: Tensor, s: Tensor, own: Tensor) -> Tensor:
        assert len(own) == 0
        return own.bool()

    monkeypatch.setattr(module, "_by_reflection", nothing_left)
    sphere = normalize(normal(200, 8), dim=-1)
    lopsided = torch.cat([sphere, normalize(sphere + 3, dim=-1)])
    assert unselectable(5 * lopsided + normal(8, seed=1)).share == 0
    with pytest.raises(AssertionError):
        unselectable(lopsided @ random_invertible(8, rng(1)))


def test_layer_norm_makes_every_key_selectable() -> None:
    x = normal(3, 80, 8) * normal(3, 80, 1, seed=1).exp()
    assert unselectable(x).share > 0.1
    normalized = layer_norm(x, (8,))
    assert unselectable(normalized).share == 0
    assert unselectable(normalized @ random_invertible(8, rng(1)).mT).share == 0
    assert unselectable(normalized @ normal(8, 3, seed=2)).share > 0  # not if k < d


def test_equal_keys_cannot_win() -> None:
    keys = normalize(normal(6, 3), dim=-1)
    doubled = torch.cat([keys, keys[2:3], keys[2:3]])
    result = unselectable(doubled, margins=True)
    assert result.mask.nonzero().flatten().tolist() == [2, 6, 7]
    assert result.margins is not None and bool((result.margins[[2, 6, 7]] == 0).all())
    # An unselectable pair still stands in the way of others.
    line = torch.tensor([[0.0], [1.0], [2.0], [2.0], [-0.0]], dtype=F64)
    assert unselectable(line).mask.all()
    assert unselectable(torch.ones(4, 3)).mask.all()


@pytest.mark.parametrize("unit", [1e-200, 1e-3, 1e3, 1e200])
def test_answers_do_not_depend_on_unit_origin_or_axes(unit: float) -> None:
    keys = normal(60, 5) * normal(60, 1, seed=1).exp()
    expected = unselectable(keys, margins=True)
    assert 0 < expected.share < 1
    scaled = unselectable(unit * keys, margins=True)
    assert torch.equal(scaled.mask, expected.mask)
    assert scaled.margins is not None and expected.margins is not None
    torch.testing.assert_close(scaled.margins / unit, expected.margins, rtol=1e-6, atol=1e-8)
    assert torch.equal(unselectable(keys + 1000).mask, expected.mask)
    assert torch.equal(unselectable(keys @ random_orthogonal(5, rng(1))).mask, expected.mask)
    assert torch.equal(unselectable(keys @ random_invertible(5, rng(2), 1e4)).mask, expected.mask)


HARD = torch.stack([normal(60, 6) * normal(60, 1, seed=1).exp(), normal(60, 3, seed=2) @ normal(3, 6, seed=3)])


@pytest.mark.parametrize("without", ["_from_the_centre", "_by_reflection", "_from_the_centre _by_reflection"])
def test_short_cuts_change_nothing(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = unselectable(HARD).mask
    for name in without.split():
        monkeypatch.setattr(module, name, lambda left, s, own: torch.zeros(len(own), dtype=torch.bool))
    assert torch.equal(unselectable(HARD).mask, expected)


def test_the_program_decides_where_least_squares_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = unselectable(HARD).mask

    def gives_up(*_: object) -> None:
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr(module, "nnls", gives_up)
    assert torch.equal(unselectable(HARD).mask, expected)


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 1, 2), (0,), (2, 0)])
@pytest.mark.parametrize("n", [0, 1, 2, 12])
def test_batches(batch: tuple[int, ...], n: int) -> None:
    """TransformerLens#226: leading dimensions of one; empty batches and sequences."""
    keys = normal(*batch, n, 2)
    result = unselectable(keys, margins=True)
    assert result.margins is not None
    assert result.mask.shape == result.margins.shape == (*batch, n)
    assert result.mask.dtype == torch.bool and result.margins.dtype == F64
    for index in product(*map(range, batch)):
        single = unselectable(keys[index], margins=True)
        assert single.margins is not None
        assert torch.equal(result.mask[index], single.mask) and torch.equal(result.margins[index], single.margins)
    if n == 1:
        assert not bool(result.mask.any()) and bool(result.margins.isinf().all())
    if keys.numel() == 0:
        assert math.isnan(result.share)


def test_any_floating_dtype_is_taken_as_exact() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        keys = normal(40, 4).to(dtype)
        assert torch.equal(unselectable(keys).mask, unselectable(keys.double()).mask)
    keys = normal(8, 4).requires_grad_()
    assert not unselectable(keys, margins=True).mask.requires_grad


def test_bad_keys_are_refused() -> None:
    with pytest.raises(TypeError, match="floating point"):
        unselectable(torch.ones(3, 2, dtype=torch.int64))
    for shape in ((3,), (3, 0)):
        with pytest.raises(ValueError, match="keys must be"):
            unselectable(torch.ones(shape))
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN or inf"):
            unselectable(torch.full((3, 2), bad))
