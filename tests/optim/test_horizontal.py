"""Vertical and horizontal parts against least squares over a written-out basis of the orbit, real models' symmetries,
autograd, and pymanopt's quotient and embedded manifolds."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from cases import gpt_like, llama_like
from drawn import gap
from oracle import Case, Tiny
from torch import Tensor, nn

from gaugekit.linalg import beside, random_invertible, random_orthogonal
from gaugekit.models.view import Edit
from gaugekit.optim.horizontal import (
    Group,
    Metric,
    Tangent,
    charges,
    drift,
    horizontal_part,
    inner,
    orbit_tangent,
    raised,
    tangential,
    vertical_generator,
    vertical_part,
)
from gaugekit.symmetry.heads import QueryKey, ValueOutput
from gaugekit.symmetry.norms import NormInputScale
from gaugekit.symmetry.units import ActivationScale, GatedUnitScale

F64, C128 = torch.float64, torch.complex128
GROUPS: tuple[Group, ...] = ("gl", "o", "scale")
METRICS: tuple[Metric, ...] = ("euclidean", "mixed", "invariant")
EACH = list(product(GROUPS, METRICS))
DTYPES = pytest.mark.parametrize("dtype", [F64, C128])


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=dtype)


def drawn(*batch: int, r: int = 3, m: int = 7, n: int = 6, dtype: torch.dtype = F64) -> Any:
    """A, B, dA and dB."""
    return tuple(normal(*batch, r, k, seed=i, dtype=dtype) for i, k in enumerate((m, n, m, n)))


def algebra(group: Group, r: int, dtype: torch.dtype) -> Tensor:
    """A real-orthonormal basis of the group's Lie algebra, (dimension, r, r)."""
    units = torch.eye(r * r, dtype=dtype).reshape(-1, r, r)
    if group == "scale":
        return units[:: r + 1]
    if group == "gl":
        return torch.cat([units, 1j * units]) if dtype.is_complex else units
    basis = [(x - x.mT) / 2**0.5 for x in units if x.triu(1).any()]
    if dtype.is_complex:
        basis += [1j * (x + x.mT) / (2**0.5 if x.triu(1).any() else 2) for x in units if x.triu().any()]
    return torch.stack(basis) if basis else units[:0]


def random_generator(group: Group, *shape: int, seed: int = 9, dtype: torch.dtype = F64) -> Tensor:
    """X (..., r, r), or (..., r), for shape (..., r)."""
    if group == "scale":
        return normal(*shape, seed=seed, dtype=dtype).real
    x = normal(*shape, shape[-1], seed=seed, dtype=dtype)
    return x - x.mH if group == "o" else x


def power_of(gram: Tensor, exponent: float, rows: bool) -> Tensor:
    """A power of a Gram matrix whose zeros count as its largest eigenvalue, or as 1."""
    values, basis = torch.linalg.eigh(gram)
    if rows:
        values, basis = gram.diagonal().real, torch.eye(len(gram), dtype=gram.dtype)
        filled = torch.where(values > 0, values, 1.0)
    else:
        top = values[-1] if values[-1] > 0 else 1.0
        filled = torch.where(values > 1e-12 * top, values, top)
    return (basis * filled**exponent) @ basis.mH


def least_squares(
    a: Tensor, b: Tensor, da: Tensor, db: Tensor, group: Group, metric: Metric, degree: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(hA, hB, X) by `lstsq` over every direction of the orbit, weighted by the roots of W_A and W_B."""
    r = a.shape[-2]
    basis = algebra(group, r, a.dtype)
    if a.ndim > 2:
        shape = a.shape[:-2]
        flat = [x.reshape(-1, *x.shape[-2:]) for x in (a, b, da, db)]
        parts = [least_squares(*each, group, metric, degree) for each in zip(*flat, strict=True)]
        if not parts:
            return da, db, a.new_zeros(*shape, r, r)
        ha, hb, x = (torch.stack(part).reshape(*shape, r, -1) for part in zip(*parts, strict=True))
        return ha, hb, x
    k, el = a @ a.mH, b @ b.mH
    if group == "scale":
        k, el = torch.diag(k.diagonal()), torch.diag(el.diagonal())
    one = torch.eye(r, dtype=a.dtype)
    rows = group == "scale"
    root_a, root_b = {
        "euclidean": lambda: (one, one),
        "mixed": lambda: (power_of(el, 0.5, rows), power_of(k, 0.5, rows)),
        "invariant": lambda: (power_of(k, -0.5, rows), power_of(el, -0.5, rows)),
    }[metric]()

    def column(x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([(root_a @ x).flatten(-2), (root_b @ y).flatten(-2)], -1)
        return torch.view_as_real(both.to(C128)).flatten(-2)

    directions = column(basis @ a, -degree * (basis.mH @ b)).mT
    x = torch.zeros(r, r, dtype=a.dtype)
    if len(basis) and directions.numel():
        solution = torch.linalg.lstsq(directions, column(da, db), driver="gelsd", rcond=1e-10).solution
        x = (solution.to(a.dtype)[:, None, None] * basis).sum(0)
    return da - x @ a, db + degree * x.mH @ b, x


def degree_of(group: Group) -> float:
    return 2.0 if group == "scale" else 1.0


# --- against least squares ----------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize(("group", "metric"), EACH)
@pytest.mark.parametrize(("r", "m", "n"), [(1, 5, 4), (3, 7, 6), (4, 4, 4), (5, 3, 4)])
@pytest.mark.parametrize("batch", [(), (1,), (2, 1, 3), (0,)])
def test_parts_are_the_least_squares_solution(
    batch: tuple[int, ...], r: int, m: int, n: int, group: Group, metric: Metric, dtype: torch.dtype
) -> None:
    """Square factors (pymanopt#34), rows beyond the widths, and leading axes of one and of zero."""
    a, b, da, db = drawn(*batch, r=r, m=m, n=n, dtype=dtype)
    degree = degree_of(group)
    ha, hb = horizontal_part(a, b, da, db, group, metric, degree)
    x = vertical_generator(a, b, da, db, group, metric, degree)
    want_a, want_b, want_x = least_squares(a, b, da, db, group, metric, degree)
    assert (ha.shape, hb.shape) == (da.shape, db.shape)
    assert x.shape == ((*batch, r) if group == "scale" else (*batch, r, r))
    if group == "scale":
        assert not x.is_complex()
        x = torch.diag_embed(x).to(dtype)
    for mine, theirs in ((ha, want_a), (hb, want_b), (x, want_x)):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-8)


@DTYPES
@pytest.mark.parametrize(("group", "metric"), EACH)
@pytest.mark.parametrize("ranks", [(0, 4), (4, 0), (0, 0), (4, 2), (2, 4), (2, 1), (1, 1)])
def test_zero_and_deficient_factors(ranks: tuple[int, int], group: Group, metric: Metric, dtype: torch.dtype) -> None:
    """All is finite, the solution of least norm, idempotent, and without any vertical direction left."""
    a, b = (
        normal(2, 4, k, seed=i, dtype=dtype) @ normal(2, k, 6, seed=i + 5, dtype=dtype) for i, k in enumerate(ranks)
    )
    if group == "scale" and 0 not in ranks:
        a[:, 1], b[:, 2] = 0.0, 0.0
    da, db = normal(2, 4, 6, seed=20, dtype=dtype), normal(2, 4, 6, seed=21, dtype=dtype)
    h = horizontal_part(a, b, da, db, group, metric)
    x = vertical_generator(a, b, da, db, group, metric)
    *want, want_x = least_squares(a, b, da, db, group, metric)
    x = torch.diag_embed(x).to(dtype) if group == "scale" else x
    for mine, theirs in zip((*h, x), (*want, want_x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-8)
    for mine, again in zip(h, horizontal_part(a, b, *h, group, metric), strict=True):
        torch.testing.assert_close(mine, again, rtol=0, atol=1e-10)
    tangent = orbit_tangent(a, b, random_generator(group, 2, 4, dtype=dtype), group)
    for left in horizontal_part(a, b, *tangent, group, metric):
        assert left.abs().max() < 1e-10


@DTYPES
@pytest.mark.parametrize("metric", METRICS)
def test_where_lora_starts(metric: Metric, dtype: torch.dtype) -> None:
    """B = 0: the vertical space is (X A, 0), so dA keeps what is orthogonal to the rows of A, and dB everything."""
    a, b, da, db = drawn(5, r=4, m=9, n=6, dtype=dtype)
    b = torch.zeros_like(b)
    ha, hb = horizontal_part(a, b, da, db, "gl", metric)
    torch.testing.assert_close(ha, da - da @ torch.linalg.pinv(a) @ a, rtol=0, atol=1e-12)
    assert torch.equal(hb, db)
    # Nearly zero is not zero: "mixed" then shares a vertical dA between both, whatever the size of B.
    near_a, _ = horizontal_part(a, 1e-9 * drawn(5, r=4, m=9, n=6, dtype=dtype)[1], da, db * 1e-9, "gl", metric)
    assert (gap(near_a.abs(), ha.abs()) > 0.1) == (metric != "euclidean")


def test_the_rotary_commutant_is_one_complex_row() -> None:
    """Two real rows that turn together: the matrices that commute with turns are a + bJ, of least squares by hand."""
    a, b, da, db = drawn(r=2, m=5, n=4)
    one, turn = torch.eye(2, dtype=F64), torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=F64)
    k, el = a.square().sum(), b.square().sum()
    for metric, (w_a, w_b) in {"euclidean": (1, 1), "mixed": (el, k), "invariant": (1 / k, 1 / el)}.items():
        columns = [torch.cat([(w_a**0.5 * g @ a).flatten(), (-(w_b**0.5) * g.mT @ b).flatten()]) for g in (one, turn)]
        target = torch.cat([(w_a**0.5 * da).flatten(), (w_b**0.5 * db).flatten()])
        s, t = torch.linalg.lstsq(torch.stack(columns, 1), target).solution
        x = s * one + t * turn
        pair = [torch.complex(y[:1], y[1:]) for y in (a, b, da, db)]
        ha, hb = horizontal_part(*pair, "gl", metric)
        torch.testing.assert_close(torch.cat([ha.real, ha.imag]), da - x @ a, rtol=0, atol=1e-13)
        torch.testing.assert_close(torch.cat([hb.real, hb.imag]), db + x.mT @ b, rtol=0, atol=1e-13)


# --- projections --------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize(("group", "metric"), EACH)
def test_the_two_parts(group: Group, metric: Metric, dtype: torch.dtype) -> None:
    """They add up, repeat, and are orthogonal; tangents are vertical, and only they."""
    a, b, da, db = drawn(2, 3, r=5, m=9, n=8, dtype=dtype)
    degree = degree_of(group)
    h = horizontal_part(a, b, da, db, group, metric, degree)
    v = vertical_part(a, b, da, db, group, metric, degree)
    x = vertical_generator(a, b, da, db, group, metric, degree)
    for total, *parts in zip((da, db), h, v, orbit_tangent(a, b, x, group, degree), strict=True):
        torch.testing.assert_close(parts[0] + parts[1], total, rtol=0, atol=1e-14)
        torch.testing.assert_close(parts[1], parts[2], rtol=0, atol=1e-12)
    if group == "o":
        torch.testing.assert_close(x, -x.mH, rtol=0, atol=1e-14)
    for part, again in zip(h, horizontal_part(a, b, *h, group, metric, degree), strict=True):
        torch.testing.assert_close(part, again, rtol=0, atol=1e-11)
    tangent = orbit_tangent(a, b, random_generator(group, 2, 3, 5, dtype=dtype), group, degree)
    for left in horizontal_part(a, b, *tangent, group, metric, degree):
        assert left.abs().max() < 1e-11
    size = (inner(a, b, tangent, tangent, metric, group) * inner(a, b, (da, db), (da, db), metric, group)).sqrt()
    assert (inner(a, b, h, tangent, metric, group).abs() / size).max() < 1e-13
    assert (inner(a, b, (da, db), tangent, metric, group).abs() / size).max() > 1e-2
    wrong = "mixed" if metric == "euclidean" else "euclidean"
    assert (inner(a, b, h, tangent, wrong, group).abs() / size).max() > 1e-4


@pytest.mark.parametrize(("group", "metric"), EACH)
def test_a_batch_is_its_items(group: Group, metric: Metric) -> None:
    """Items of unlike rank and condition side by side, whose solvers end at unlike times, give what each gives alone
    (TransformerLens#226)."""
    a, b, da, db = drawn(4, 1, r=4, m=8, n=7)
    a = random_invertible(4, rng(1), 100.0) @ a
    b[0], a[1, :, 2:] = 0.0, 0.0
    a[2], b[2] = a[2] * 1e5, b[2] * 1e-5
    together = horizontal_part(a, b, da, db, group, metric)
    for i in range(4):
        alone = horizontal_part(a[i, 0], b[i, 0], da[i, 0], db[i, 0], group, metric)
        for mine, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(mine[i, 0], theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("group", "metric"), EACH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("condition", [1.0, 10.0, 100.0])
def test_float32(condition: float, group: Group, metric: Metric, dtype: torch.dtype) -> None:
    """Within 4 eps of the projection in float64, relative to |(dA, dB)|, to condition 100; twice is once, to 16 eps."""
    a, b = (
        random_invertible(16, rng(i), condition, (3,)) @ random_orthogonal(24, rng(i + 2), batch=(3,))[:, :16]
        for i in range(2)
    )
    a, b = a.to(dtype), b.to(dtype)
    da, db = normal(3, 16, 24, seed=7, dtype=dtype), normal(3, 16, 24, seed=8, dtype=dtype)
    h = horizontal_part(a, b, da, db, group, metric)
    wide = [x.to(C128 if dtype.is_complex else F64) for x in (a, b, da, db)]
    want = horizontal_part(*wide, group, metric)
    assert {x.dtype for x in h} == {dtype}
    assert inner(a, b, h, h, metric, group).dtype == torch.float32
    assert vertical_generator(a, b, da, db, group, metric).dtype == (torch.float32 if group == "scale" else dtype)
    error, size = (
        torch.cat([x.flatten(1) for x in pair], 1).norm(dim=1)
        for pair in ([x - y for x, y in zip(h, want, strict=True)], wide[2:])
    )
    assert (error / size).max() < 4 * torch.finfo(torch.float32).eps
    again = horizontal_part(a, b, *h, group, metric)
    error = torch.cat([(x - y).flatten(1) for x, y in zip(h, again, strict=True)], 1).norm(dim=1)
    assert (error / size).max() < 16 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("group", ["gl", "o"])
@pytest.mark.parametrize("metric", METRICS)
def test_float64_to_condition_100(group: Group, metric: Metric) -> None:
    a, b = (random_invertible(16, rng(i), 100.0, (3,)) for i in range(2))
    da, db = normal(3, 16, 16, seed=7), normal(3, 16, 16, seed=8)
    h = horizontal_part(a, b, da, db, group, metric)
    for x, y in zip(h, horizontal_part(a, b, *h, group, metric), strict=True):
        assert (x - y).norm() < 1e-10 * torch.cat([da, db]).norm()


@pytest.mark.parametrize(("group", "metric"), EACH)
def test_factors_that_are_deficient_but_for_rounding(group: Group, metric: Metric) -> None:
    """What some roundings leave of a missing rank is no direction: parts and X stay short, tangents vertical."""
    noise = 4 * torch.finfo(torch.float32).eps
    a, b = (
        (normal(3, 8, 4, seed=i) @ normal(3, 4, 12, seed=i + 2) * (1 + noise * normal(3, 8, 12, seed=i + 6))).float()
        for i in range(2)
    )
    da, db = normal(3, 8, 12, seed=4).float(), normal(3, 8, 12, seed=5).float()
    assert int(torch.linalg.matrix_rank(a.double(), rtol=1e-12).min()) == 8
    h = horizontal_part(a, b, da, db, group, metric)
    assert all(x.norm() < 3 * torch.cat([da, db]).norm() for x in h)
    assert vertical_generator(a, b, da, db, group, metric).abs().max() < 100
    tangent = orbit_tangent(a, b, random_generator(group, 3, 8).float(), group)
    size = torch.cat(tangent).norm()
    assert all(x.norm() < 1e-5 * size for x in horizontal_part(a, b, *tangent, group, metric))


def test_conjugate_gradients_where_one_gram_is_worse_conditioned() -> None:
    """The eigenbasis of that one serves: of the other it would take thousands of steps."""
    for conditions in ((1000.0, 3.0), (3.0, 1000.0)):
        a, b = (random_invertible(32, rng(i), condition) for i, condition in enumerate(conditions))
        tangent = orbit_tangent(a, b, random_generator("o", 32), "o")
        for left in horizontal_part(a, b, *tangent, "o", "invariant"):
            assert left.norm() < 1e-8 * torch.cat(tangent).norm()


def test_parts_hold_no_graph() -> None:
    """That of the generator would go through eigenvectors, and without it the derivative would be another one."""
    a, b, da, db = (x.requires_grad_() for x in drawn(2))
    for part in (vertical_part, horizontal_part, vertical_generator):
        found = part(a, b, da, db)
        assert not any(x.requires_grad for x in (found if isinstance(found, tuple) else (found,)))


# --- equivariance -------------------------------------------------------------------------------------------


def moved(s: Tensor, pair: Tangent) -> Tangent:
    return s @ pair[0], torch.linalg.inv(s).mH @ pair[1]


def deviation(s: Tensor, group: Group, metric: Metric, dtype: torch.dtype) -> float:
    """How far the projection is from moving along with the factors, relative."""
    a, b, da, db = drawn(len(s), r=4, m=8, n=6, dtype=dtype)
    want = moved(s, horizontal_part(a, b, da, db, group, metric))
    got = horizontal_part(*moved(s, (a, b)), *moved(s, (da, db)), group, metric)
    return max(float((x - y).norm() / y.norm()) for x, y in zip(got, want, strict=True))


@DTYPES
@pytest.mark.parametrize("condition", [10.0, 100.0])
def test_gl_moves_invariant_metrics_along_and_not_the_euclidean(condition: float, dtype: torch.dtype) -> None:
    s = random_invertible(4, rng(3), condition, (6,)).to(dtype)
    if dtype.is_complex:
        s = s @ torch.linalg.matrix_exp(1j * normal(6, 4, 4, seed=11))
    assert deviation(s, "gl", "mixed", dtype) < 1e-9
    assert deviation(s, "gl", "invariant", dtype) < 1e-9
    assert deviation(s, "gl", "euclidean", dtype) > 0.1


@pytest.mark.parametrize(("group", "metric"), [pair for pair in EACH if pair[0] != "scale"])
def test_orthogonal_elements_of_both_determinants_move_all_along(group: Group, metric: Metric) -> None:
    """geoopt#230, pymanopt#301: O(n) has two components."""
    s = random_orthogonal(4, rng(1), batch=(8,))
    assert set(torch.linalg.det(s).sign().tolist()) == {1.0, -1.0}
    assert deviation(s, group, metric, F64) < 1e-11


@DTYPES
def test_inner_products_and_raised_gradients_move_along(dtype: torch.dtype) -> None:
    a, b, da, db = drawn(3, r=4, m=8, n=6, dtype=dtype)
    s = random_invertible(4, rng(3), 10.0, (3,)).to(dtype)
    for metric in METRICS:
        before = inner(a, b, (da, db), (db @ db.mH @ a, db), metric)
        tangents = moved(s, (da, db)), moved(s, (db @ db.mH @ a, db))
        after = inner(*moved(s, (a, b)), *tangents, metric)
        assert not before.is_complex()
        assert (gap(before / after, torch.ones(3)) < 1e-10) == (metric != "euclidean")
        # A gradient is a covector: it moves by the inverse adjoint, and raised it is a tangent.
        back = torch.linalg.inv(s).mH
        want = moved(s, raised(a, b, da, db, metric))
        got = raised(*moved(s, (a, b)), back @ da, s @ db, metric)
        error = max(float((x - y).norm() / y.norm()) for x, y in zip(got, want, strict=True))
        assert (error < 1e-10) == (metric != "euclidean")


@pytest.mark.parametrize("degree", [1.0, 2.0])
def test_scales_of_rows_move_along(degree: float) -> None:
    """Row by row "mixed" is "invariant" times a number: the same parts, though it is unchanged at degree 1 only."""
    a, b, da, db = drawn(3, r=4, m=8, n=6)
    s = normal(3, 4, 1, seed=12).exp()
    for metric in METRICS:
        ha, hb = horizontal_part(a, b, da, db, "scale", metric, degree)
        got = horizontal_part(s * a, s**-degree * b, s * da, s**-degree * db, "scale", metric, degree)
        fits = gap(got[0] / (s * ha), torch.ones(1)) < 1e-9 and gap(got[1] / (s**-degree * hb), torch.ones(1)) < 1e-9
        assert fits == (metric != "euclidean")
        before = inner(a, b, (da, db), (da, db), metric, "scale")
        after = inner(s * a, s**-degree * b, *[(s * da, s**-degree * db)] * 2, metric, "scale")
        unchanged = gap(before / after, torch.ones(1)) < 1e-9
        assert unchanged == (metric == "invariant" or (metric == "mixed" and degree == 1))


def test_raised_gradients_represent_the_derivative() -> None:
    for (group, metric), dtype in product(EACH, (F64, C128)):
        a, b, ga, gb = drawn(2, r=3, dtype=dtype)
        da, db = ga.flip(-1), gb.flip(0)
        derivative = ((ga.conj() * da).real.sum((-2, -1))) + ((gb.conj() * db).real.sum((-2, -1)))
        up = raised(a, b, ga, gb, metric, group)
        torch.testing.assert_close(inner(a, b, up, (da, db), metric, group), derivative, rtol=0, atol=1e-10)
    a, b, ga, gb = drawn(r=3)
    up = raised(a, b, ga, gb, "mixed")
    torch.testing.assert_close(up[0], torch.linalg.inv(b @ b.mT) @ ga, rtol=0, atol=1e-12)
    torch.testing.assert_close(up[1], torch.linalg.inv(a @ a.mT) @ gb, rtol=0, atol=1e-12)
    up = raised(a, torch.zeros_like(b), torch.zeros_like(ga), gb, "mixed")  # LoRA's start
    torch.testing.assert_close(up[1], torch.linalg.inv(a @ a.mT) @ gb, rtol=0, atol=1e-12)
    assert not up[0].any()


# --- symmetries of real models ------------------------------------------------------------------------------


def with_column(weight: Tensor, bias: Tensor | None) -> Tensor:
    return weight if bias is None else torch.cat([weight, bias.unsqueeze(-1)], -1)


def pair_of(symmetry: Any, tensors: dict[str, Tensor]) -> Tangent:
    """The factors on which it acts, or the same places in a tangent; units are rows."""
    edit = Edit(tensors)
    if isinstance(symmetry, ValueOutput):
        at = symmetry.attention
        bias = None if at.v.bias is None else edit[at.v.bias]
        return with_column(edit[at.v.weight], bias), beside(edit[at.o.weight], at.kv_heads)
    if isinstance(symmetry, QueryKey):
        at = symmetry.attention
        q, k = (with_column(edit[x.weight], None if x.bias is None else edit[x.bias]) for x in (at.q, at.k))
        q = beside(q, at.kv_heads)
        turning, still = symmetry.blocks
        if not turning:
            return q, k
        assert not still
        first, second = torch.tensor([pairs[0] for pairs in turning]).unbind(-1)
        q, k = (torch.complex(x[:, first], x[:, second]).unsqueeze(-2) for x in (q, k))
        return q, k
    linear = symmetry.active if isinstance(symmetry, ActivationScale) else symmetry.mlp.up
    bias = None if linear.bias is None else edit[linear.bias]
    return with_column(edit[linear.weight], bias), edit[symmetry.mlp.down.weight]


def tiny(kind: str) -> Tiny:
    if kind == "llama":
        return Tiny(Case("llama", llama_like(num_attention_heads=4, num_key_value_heads=2, head_dim=4)))
    return Tiny(Case("gpt2", gpt_like(tie_word_embeddings=False, activation_function="relu2")))


@pytest.mark.parametrize(
    ("kind", "type_", "group", "degree"),
    [
        ("llama", ValueOutput, "gl", 1),
        ("llama", QueryKey, "gl", 1),
        ("llama", GatedUnitScale, "scale", 1),
        ("gpt2", ValueOutput, "gl", 1),
        ("gpt2", QueryKey, "gl", 1),
        ("gpt2", ActivationScale, "scale", 2),
    ],
)
def test_symmetries_of_real_models_are_vertical(kind: str, type_: type, group: Group, degree: float) -> None:
    """Rotary pairs as complex rows, biases as one more column, queries that share a key side by side; the tangent of
    another head, or unit, is not vertical."""
    model = tiny(kind)
    tensors = model.tensors()
    found = [s for s in model.symmetries.continuous if type(s) is type_]
    assert len(found) == 2
    for symmetry in found:
        coordinates = normal(symmetry.dimension, seed=4)
        velocity = {name: torch.zeros_like(x) for name, x in tensors.items()} | symmetry.tangent(tensors, coordinates)
        (a, b), (da, db) = pair_of(symmetry, tensors), pair_of(symmetry, velocity)
        assert a.is_complex() == (kind == "llama" and type_ is QueryKey)
        assert da.abs().max() > 0.1 and db.abs().max() > 0.1
        axis = -2 if group == "scale" else 0
        for metric in METRICS:
            size = inner(a, b, (da, db), (da, db), metric, group)
            h = horizontal_part(a, b, da, db, group, metric, degree)
            assert (inner(a, b, h, h, metric, group) / size).max() < 1e-20
            others = da.roll(1, axis), db.roll(1, axis)
            h = horizontal_part(a, b, *others, group, metric, degree)
            assert (inner(a, b, h, h, metric, group) / inner(a, b, others, others, metric, group)).min() > 1e-2


def test_scales_under_a_norm_are_radial() -> None:
    """Sphere radii: queries and keys of each head before their norm, whose length it undoes but for eps; the same
    tangent of another head is not radial."""
    model = Tiny(Case("qwen3", llama_like(num_attention_heads=4, num_key_value_heads=2, head_dim=4)), eps=0.0)
    tensors = model.tensors()
    found = [s for s in model.symmetries.at_zero_eps if isinstance(s, NormInputScale) and s.count > 1]
    assert sorted(s.count for s in found) == [2, 2, 4, 4]
    for symmetry in found:
        (view,) = symmetry.grow
        velocity = symmetry.tangent(tensors, normal(symmetry.dimension, seed=4))
        w, dw = (Edit(x)[view].flatten(1) for x in (tensors, velocity))
        assert dw.norm(dim=1).min() > 0.1
        assert tangential(w, dw).abs().max() < 1e-13
        assert tangential(w, dw.roll(1, 0)).norm(dim=1).min() > 0.1


def heads_of(module: nn.MultiheadAttention, values: list[Tensor]) -> dict[str, Tangent]:
    """QK and VO factors (h, k, d + 1) and (h, k, d) from in_proj weight and bias and the output weight."""
    weight, bias, out = values
    split = (module.num_heads, module.head_dim)
    w_q, w_k, w_v = (w.unflatten(0, split) for w in weight.chunk(3))
    b_q, b_k, b_v = (x.unflatten(0, split) for x in bias.chunk(3))
    qk = with_column(w_q, b_q), with_column(w_k, b_k)
    return {"qk": qk, "vo": (with_column(w_v, b_v), out.mT.unflatten(0, split))}


def test_gradients_of_attention_are_horizontal_and_adams_step_is_not() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(12, 3, batch_first=True, dtype=F64)
    parameters = [module.in_proj_weight, module.in_proj_bias, module.out_proj.weight]
    with torch.no_grad():
        for p in parameters:
            p.copy_(0.5 * torch.randn_like(p))
    x, y = normal(4, 7, 12), normal(4, 7, 12, seed=1)
    before = [p.detach().clone() for p in parameters]
    (module(x, x, x)[0] - y).square().mean().backward()
    grads = [p.grad for p in parameters if p.grad is not None]
    torch.optim.Adam(parameters, lr=1e-3).step()
    steps = [p.detach() - q for p, q in zip(parameters, before, strict=True)]
    for name, (a, b) in heads_of(module, before).items():
        g, step = heads_of(module, grads)[name], heads_of(module, steps)[name]
        for metric in METRICS:
            # Horizontal in each metric, once raised; without that, in the Euclidean one only.
            up = raised(a, b, *g, metric)
            v = vertical_part(a, b, *up, "gl", metric)
            assert (inner(a, b, v, v, metric) / inner(a, b, up, up, metric)).max() < 1e-24
            v = vertical_part(a, b, *step, "gl", metric)
            assert (inner(a, b, v, v, metric) / inner(a, b, step, step, metric)).min() > 1e-3
        v = vertical_part(a, b, *g, "gl", "mixed")
        assert (inner(a, b, v, v, "mixed") / inner(a, b, g, g, "mixed")).min() > 1e-3


# --- charges ------------------------------------------------------------------------------------------------


def flowed(a: Tensor, b: Tensor, group: Group, metric: Metric, steps: int) -> Tangent:
    """Euler's method to time 0.2 on ½ |Bᴴ A − target|², or on units that square what they read."""
    x, target = normal(40, a.shape[-1], seed=30, dtype=a.dtype), normal(40, b.shape[-1], seed=31, dtype=a.dtype)
    for _ in range(steps):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        hidden = x @ a.mT
        out = (hidden.relu().square() if group == "scale" else hidden) @ b.conj()
        ((out - target).abs().square().mean() / 2).backward()
        assert a.grad is not None and b.grad is not None
        da, db = raised(a, b, a.grad, b.grad, metric, group)
        a, b = a.detach() - 0.2 / steps * da, b.detach() - 0.2 / steps * db
    return a, b


@pytest.mark.parametrize(("group", "dtype"), [("gl", F64), ("gl", C128), ("scale", F64)])
def test_gradient_flow_conserves_charges(group: Group, dtype: torch.dtype) -> None:
    """Their drift is the integrator's error, of first order in its step; in the mixed metric the flow itself drifts."""
    a, b, *_ = drawn(r=3, m=5, n=4, dtype=dtype)
    degree = degree_of(group)
    drifts = [float(drift((a, b), flowed(a, b, group, "euclidean", n), group, degree)) for n in (50, 100, 200)]
    assert 0 < drifts[2] < 1e-3
    assert drifts[0] / drifts[1] == pytest.approx(2, abs=0.1)
    assert drifts[1] / drifts[2] == pytest.approx(2, abs=0.1)
    mixed = [float(drift((a, b), flowed(a, b, group, "mixed", n), group, degree)) for n in (100, 200)]
    assert mixed[0] == pytest.approx(mixed[1], rel=0.05)
    assert mixed[1] > 20 * drifts[2]


def test_charges_and_drift_by_hand() -> None:
    a, b = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 4.0], [2.0, 0.0]])
    assert charges(a, b).tolist() == [[-7.0, 0.0], [0.0, -3.0]]
    assert charges(a, b, "scale", 2.0).tolist() == [-23.0, -7.0]
    # The charges move by 27 and 3; K + L is diag(25, 5), then diag(52, 8).
    after = drift((a, b), (2 * a, b))
    assert float(after) == pytest.approx((27**2 + 3**2) ** 0.5 / (52**2 + 8**2) ** 0.5, rel=1e-6)
    assert float(drift((2 * a, b), (a, b))) == pytest.approx(float(after), rel=1e-6)
    zero = torch.zeros(2, 3, 4)
    assert drift((zero, zero), (zero, zero)).tolist() == [0.0, 0.0]
    assert drift((zero, zero), (zero + 1, zero)).tolist() == [1.0, 1.0]
    turned = random_orthogonal(2, rng(), torch.float32)
    assert drift((a, b), (turned @ a, turned @ b)) > 0.1  # charges turn along: they are not a scalar


# --- pymanopt -----------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize(("n", "k"), [(6, 3), (4, 4), (5, 1)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_quotient_by_o_is_that_of_pymanopt(sign: float, n: int, k: int, dtype: torch.dtype) -> None:
    """PSDFixedRank(Complex) identifies Y and Y Q: A = B = Yᴴ. Its square case (pymanopt#34) has two components, one
    for either sign of the determinant (geoopt#230, pymanopt#301)."""
    from pymanopt.manifolds import PSDFixedRank, PSDFixedRankComplex

    manifold = (PSDFixedRankComplex if dtype.is_complex else PSDFixedRank)(n, k)
    y, z = normal(n, k, dtype=dtype), normal(n, k, seed=1, dtype=dtype)
    if n == k:
        y[0] *= sign * (torch.linalg.det(y).real.sign())
    want = manifold.projection(y.numpy(), z.numpy())
    ha, hb = horizontal_part(y.mH, y.mH, z.mH, z.mH, "o", "euclidean")
    np.testing.assert_allclose(ha.mH.resolve_conj().numpy(), want, atol=1e-12)
    np.testing.assert_allclose(hb.mH.resolve_conj().numpy(), want, atol=1e-12)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("n", "m", "k"), [(7, 6, 3), (5, 5, 5)])
def test_steps_along_horizontal_lifts_agree_with_the_embedded_manifold(n: int, m: int, k: int, metric: Metric) -> None:
    """At any factors of pymanopt's point, the horizontal lift of its tangent vector Z changes G by Z; a step differs
    from its retraction by O(t²), and by O(t³) across the manifold, where curvature alone decides."""
    from pymanopt.manifolds import FixedRankEmbedded

    np.random.seed(0)
    manifold = FixedRankEmbedded(n, m, k)
    point = manifold.random_point()
    vector = manifold.random_tangent_vector(point)
    u, s, vt = (torch.from_numpy(np.array(x)) for x in point)
    up, middle, vp = (torch.from_numpy(np.array(x)) for x in vector)
    z = u @ middle @ vt + up @ vt + u @ vp.mT
    a, b = moved(random_invertible(k, rng(2)), (s.sqrt()[:, None] * vt, s.sqrt()[:, None] * u.mT))
    da = torch.linalg.pinv(b.mT) @ z
    db = ((z - b.mT @ da) @ torch.linalg.pinv(a)).mT
    ha, hb = horizontal_part(a, b, da, db, "gl", metric)
    torch.testing.assert_close(b.mT @ ha + hb.mT @ a, z, rtol=0, atol=1e-11)
    v = orbit_tangent(a, b, normal(k, k, seed=3))
    again = horizontal_part(a, b, da + v[0], db + v[1], "gl", metric)
    torch.testing.assert_close(again, (ha, hb), rtol=0, atol=1e-10)

    def off(t: float) -> Tensor:
        there = manifold.retraction(point, t * vector)
        want = there.u @ np.diag(there.s) @ there.vt
        return (b + t * hb).mT @ (a + t * ha) - torch.from_numpy(want)

    def across(x: Tensor) -> Tensor:
        return x - u @ (u.mT @ x) - (x - u @ (u.mT @ x)) @ vt.mT @ vt

    if k == n == m:  # all matrices are near: the retraction is a straight line, and nothing is across
        assert off(0.01).norm() / off(0.005).norm() == pytest.approx(4, abs=0.1)
        assert across(off(0.01)).norm() < 1e-12
        return
    assert off(0.002).norm() / off(0.001).norm() == pytest.approx(4, abs=0.2)
    assert across(off(0.002)).norm() / across(off(0.001)).norm() == pytest.approx(8, abs=0.4)


# --- radial parts, and what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_tangential(dim: int) -> None:
    """No component along w in any slice; the gradient of a loss behind a normalization is tangential already."""
    w, dw = normal(5, 4, 6).requires_grad_(), normal(5, 4, 6, seed=1)
    left = tangential(w.detach(), dw, dim)
    assert (left * w).sum(dim).abs().max() < 1e-13
    torch.testing.assert_close(tangential(w.detach(), left, dim), left, rtol=0, atol=1e-14)
    assert gap(left + w.detach() * ((dw * w).sum(dim, True) / w.square().sum(dim, True)).detach(), dw) < 1e-14
    (w / w.norm(dim=dim, keepdim=True) * dw).sum().backward()
    assert w.grad is not None
    torch.testing.assert_close(tangential(w.detach(), w.grad, dim), w.grad, rtol=0, atol=1e-13)
    assert torch.equal(tangential(torch.zeros_like(dw), dw, dim), dw)
    assert tangential(w.detach().float(), dw.float(), dim).dtype == torch.float32
    with pytest.raises(ValueError, match="one shape"):
        tangential(w, dw[:1], dim)


def test_what_is_refused() -> None:
    a, b, da, db = drawn(2)
    for wrong, message in (
        ((a, b[:1], da, db[:1]), "last axis only"),
        ((a[:, :0], b[:, :0], da[:, :0], db[:, :0]), "r > 0"),
        ((a[0, 0], b, da, db), "last axis only"),
        ((a, b, db, da), "factors' shapes"),
        ((a * torch.nan, b, da, db), "a has entries"),
        ((a, b * torch.inf, da, db), "b has entries"),
    ):
        with pytest.raises(ValueError, match=message):
            horizontal_part(*wrong)
    for wrong in ((a, b.float(), da, db), (a, b, da.float(), db), tuple(x.half() for x in (a, b, da, db))):
        with pytest.raises(TypeError, match="one dtype"):
            vertical_generator(*wrong)
    with pytest.raises(ValueError, match='"gl", "o" or "scale"'):
        horizontal_part(a, b, da, db, "sl")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match='"mixed" or "invariant"'):
        inner(a, b, (da, db), (da, db), "round")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r'degree 2\.0 is for group "scale"'):
        charges(a, b, "gl", 2.0)
    for degree in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="degree must be positive and finite"):
            horizontal_part(a, b, da, db, "scale", degree=degree)
    for other in (a[:1], b[:1]), (a[:, :2], b[:, :2]):
        with pytest.raises(ValueError, match="the same rows"):
            drift((a, b), other)
    with pytest.raises(ValueError, match="x must be"):
        orbit_tangent(a, b, normal(2, 3), "gl")
