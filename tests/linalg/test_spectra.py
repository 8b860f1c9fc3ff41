"""Spectra from factors against dense SVD.

Tolerances are relative to ‖A‖₂ ‖B‖₂, the scale in which the spectrum is promised. Worst seen over these strategies and
an adversarial search just inside the Cholesky limit: 6e-13; with QR, 2e-15.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gaugekit.linalg import (
    balance_defect,
    effective_rank,
    grams,
    numerical_rank,
    product_spectrum,
    random_invertible,
    random_orthogonal,
    scaling,
    spectrum_from_grams,
)

F64 = torch.float64
few = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)
batches = st.sampled_from([(), (1,), (3,), (1, 1), (2, 3), (1, 4, 1), (0,), (2, 0)])


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=F64)


def factor(generator: torch.Generator, batch: tuple[int, ...], r: int, m: int, condition: float, rank: int) -> Tensor:
    """A (*batch, r, m) of the given rank <= min(r, m), nonzero singular values 1 ... 1 / condition."""
    exponent = torch.rand((*batch, rank), generator=generator, dtype=F64)
    if rank:
        exponent[..., 0] = 0.0
    if rank > 1:
        exponent[..., -1] = 1.0
    left = random_orthogonal(r, generator, batch=batch)[..., :rank]
    right = random_orthogonal(m, generator, batch=batch)[..., :rank, :]
    return left * (condition**-exponent)[..., None, :] @ right


def dense(a: Tensor, b: Tensor) -> Tensor:
    """The r leading singular values of the formed product, padded with zeros."""
    r = a.shape[-2]
    s = torch.linalg.svdvals(b.to(F64).mT @ a.to(F64))[..., :r]
    return torch.nn.functional.pad(s, (0, r - s.shape[-1]))


def norms(a: Tensor, b: Tensor) -> Tensor:
    """‖A‖₂ ‖B‖₂, (..., 1)."""
    return (torch.linalg.matrix_norm(a.to(F64), 2) * torch.linalg.matrix_norm(b.to(F64), 2))[..., None]


def assert_spectrum(s: Tensor, a: Tensor, b: Tensor, tolerance: float) -> None:
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    assert s.shape == (*batch, a.shape[-2])
    assert s.dtype == F64
    assert bool((s[..., 1:] <= s[..., :-1]).all())
    assert bool((s >= 0).all())
    assert bool(((s - dense(a, b)).abs() <= tolerance * norms(a, b)).all())


# --- product_spectrum ----------------------------------------------------------------------------------------


@few
@given(seed=seeds, batch=batches, r=st.integers(1, 9), m=st.integers(1, 14), n=st.integers(1, 14), data=st.data())
def test_spectrum_is_that_of_the_dense_product(
    seed: int, batch: tuple[int, ...], r: int, m: int, n: int, data: st.DataObject
) -> None:
    """All shapes (r > m, n included), ranks (0 included) and conditions to 1e8."""
    generator = rng(seed)
    conditions = st.sampled_from([1.0, 10.0, 1e3, 5e3, 1e5, 1e8])
    a = factor(generator, batch, r, m, data.draw(conditions), data.draw(st.integers(0, min(r, m))))
    b = factor(generator, batch, r, n, data.draw(conditions), data.draw(st.integers(0, min(r, n))))
    assert_spectrum(product_spectrum(a, b), a, b, 1e-12)


@few
@given(
    seed=seeds,
    batch=batches,
    r=st.integers(1, 9),
    m=st.integers(9, 30),
    n=st.integers(9, 30),
    condition=st.floats(1.0, 30.0),
)
def test_well_conditioned_spectrum_is_accurate_to_rounding(
    seed: int, batch: tuple[int, ...], r: int, m: int, n: int, condition: float
) -> None:
    generator = rng(seed)
    a, b = (factor(generator, batch, r, size, condition, r) for size in (m, n))
    assert bool(spectrum_from_grams(grams(a), grams(b))[1].all())
    assert_spectrum(product_spectrum(a, b), a, b, 1e-13)


@pytest.mark.parametrize("condition", [1e5, 1e8, 1e12])
def test_ill_conditioned_factors_of_one_matrix(condition: float) -> None:
    """Right to 1e-14 of the largest value, also where the Gram matrix has lost the small ones."""
    generator = rng(1)
    a = factor(generator, (4,), 8, 20, condition, 8)
    b = random_orthogonal(8, generator, batch=(4,))
    s = product_spectrum(a, b)
    assert bool(((s - torch.linalg.svdvals(a)).abs() <= 1e-14 * s[:, :1]).all())
    assert bool(((s[:, -1] * condition - 1).abs() <= 1e-14 * condition).all())


def test_just_inside_the_cholesky_limit() -> None:
    """The worst case of the promise: one small singular value in A, met by all of B at full strength."""
    generator = rng(2)
    singular = torch.ones(50, 2, dtype=F64)
    singular[:, 1] = 1.6e-4
    a = random_orthogonal(2, generator, batch=(50,)) * singular[:, None, :]
    b = random_orthogonal(2, generator, batch=(50,))
    assert bool(spectrum_from_grams(grams(a), grams(b))[1].all())
    assert_spectrum(product_spectrum(a, b), a, b, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [(), (1,), (1, 1), (2, 1, 3), (0,)])
def test_computes_in_float64_whatever_the_dtype_and_leaves_inputs_alone(
    dtype: torch.dtype, batch: tuple[int, ...]
) -> None:
    a, b = normal(*batch, 4, 11).to(dtype), normal(*batch, 4, 7, seed=1).to(dtype)
    kept = a.clone(), b.clone()
    assert_spectrum(product_spectrum(a, b), a, b, 1e-14)
    assert torch.equal(a, kept[0])
    assert torch.equal(b, kept[1])


def test_leading_dimensions_broadcast_on_both_paths() -> None:
    """One key head (1) against its query heads (3), in two layers, one of which needs QR."""
    a, b = normal(2, 1, 4, 9), normal(2, 3, 4, 6, seed=1)
    a[1, 0, 3] = a[1, 0, 2] * (1 + 1e-9)
    s = product_spectrum(a, b)
    assert_spectrum(s, a, b, 1e-14)
    for layer in range(2):
        for head in range(3):
            alone = product_spectrum(a[layer, 0], b[layer, head])
            assert bool(((s[layer, head] - alone).abs() <= 1e-14 * norms(a[layer, 0], b[layer, head])).all())
    assert_spectrum(product_spectrum(a[:, 0], b[0, 0]), a[:, 0], b[0, 0], 1e-14)


@pytest.mark.parametrize("chunk", [1, 40, 100, 2**20])
def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Many heads widened a few at a time, on both paths, give what each gives alone."""
    monkeypatch.setattr(scaling, "CHUNK", chunk)
    a, b = normal(2, 1, 5, 4, 9), normal(1, 3, 5, 4, 6, seed=1)
    a[:, :, 1:3, 0] = 0.0
    assert_spectrum(product_spectrum(a, b), a, b, 1e-14)
    torch.testing.assert_close(grams(a), a @ a.mT, rtol=1e-14, atol=1e-14)
    expected = torch.linalg.matrix_norm(a @ a.mT - b @ b.mT)
    torch.testing.assert_close(balance_defect(a, b)[0], expected, rtol=1e-14, atol=0)


def test_one_bad_head_does_not_touch_the_others() -> None:
    a, b = normal(5, 4, 9), normal(5, 4, 6, seed=1)
    clean = product_spectrum(a, b)
    a[2] = 0.0
    s = product_spectrum(a, b)
    assert torch.equal(s[2], torch.zeros(4, dtype=F64))
    assert torch.equal(s[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_zero_factors_give_exact_zeros() -> None:
    zero = torch.zeros(2, 3, 5)
    assert torch.equal(product_spectrum(zero, zero), torch.zeros(2, 3, dtype=F64))
    assert torch.equal(product_spectrum(zero, normal(2, 3, 2)), torch.zeros(2, 3, dtype=F64))
    assert torch.equal(product_spectrum(zero[..., :0], zero), torch.zeros(2, 3, dtype=F64))
    assert product_spectrum(zero[:, :0], zero[:, :0]).shape == (2, 0)


def test_more_rows_than_columns_pads_with_exact_zeros() -> None:
    s = product_spectrum(normal(2, 6, 3), normal(2, 6, 4, seed=1))
    assert bool((s[:, :3] > 0.0).all())
    assert torch.equal(s[:, 3:], torch.zeros(2, 3, dtype=F64))


def test_rank_deficiency_is_zero_to_rounding() -> None:
    a, b = normal(3, 2) @ normal(2, 10, seed=1), normal(3, 8, seed=2)
    s = product_spectrum(a, b)
    assert_spectrum(s, a, b, 1e-14)
    assert float(s[2]) <= 1e-14 * float(norms(a, b))
    assert int(numerical_rank(s, 10)) == 2


def test_cancelling_factors() -> None:
    """Factors that meet in no direction: the product is zero to rounding of the factors."""
    q = random_orthogonal(6, rng())
    a, b = q[:, :3] @ normal(3, 9), q[:, 3:] @ normal(3, 8, seed=1)
    assert_spectrum(product_spectrum(a, b), a, b, 1e-14)


@pytest.mark.parametrize("exponents", [(99, -99), (99, 99), (-99, -99), (1000, -1000), (-1000, 1000), (990, 3)])
@pytest.mark.parametrize("r", [1, 3, 9])
def test_scale_by_a_power_of_two_is_exact(r: int, exponents: tuple[int, int]) -> None:
    """r = 9 > min(m, n) takes QR, the others Cholesky. Zeros do not turn into NaN beside large values."""
    a, b = normal(2, r, 7), normal(2, r, 5, seed=1)
    a[1] = 0.0
    s = product_spectrum(a, b)
    scaled = product_spectrum(a * 2.0 ** exponents[0], b * 2.0 ** exponents[1])
    assert torch.equal(scaled, s * 2.0 ** sum(exponents))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_within_a_batch(dtype: torch.dtype) -> None:
    scale = torch.tensor([1e30, 1.0, 1e-30], dtype=dtype)[:, None, None]
    a, b = normal(3, 4, 9).to(dtype) * scale, normal(3, 4, 6, seed=1).to(dtype) * scale
    assert_spectrum(product_spectrum(a, b), a, b, 1e-14)


def test_beyond_the_float64_range_is_inf_and_zero() -> None:
    a = torch.diag(torch.tensor([1.0, 0.0], dtype=F64))
    assert product_spectrum(a * 2.0**1000, a * 2.0**1000).tolist() == [math.inf, 0.0]
    assert product_spectrum(a * 2.0**-1000, a * 2.0**-1000).tolist() == [0.0, 0.0]
    assert product_spectrum(a * 2.0**-1074, a * 2.0**1000).tolist() == [2.0**-74, 0.0]


@few
@given(seed=seeds, batch=batches, r=st.integers(1, 8), condition=st.sampled_from([1.0, 10.0, 1e3, 1e6]))
def test_gauge_invariance(seed: int, batch: tuple[int, ...], r: int, condition: float) -> None:
    """A → S A, B → S⁻ᵀ B leaves G, and so its spectrum."""
    generator = rng(seed)
    a, b = factor(generator, batch, r, 12, 5.0, r), factor(generator, batch, r, 10, 5.0, r)
    gauge = random_invertible(r, generator, condition, batch)
    moved_a, moved_b = gauge @ a, torch.linalg.solve(gauge.mT, b)
    change = (product_spectrum(moved_a, moved_b) - product_spectrum(a, b)).abs()
    assert bool((change <= (1e-12 + 1e-15 * condition) * norms(moved_a, moved_b)).all())


def test_orthogonal_maps_outside_leave_the_spectrum() -> None:
    a, b, generator = normal(4, 9), normal(4, 6, seed=1), rng(3)
    s = product_spectrum(a @ random_orthogonal(9, generator), b @ random_orthogonal(6, generator))
    torch.testing.assert_close(s, product_spectrum(a, b), rtol=1e-13, atol=0)


def test_symmetric_in_the_factors_and_free_of_gradient() -> None:
    a, b = normal(2, 4, 9).requires_grad_(), normal(2, 4, 6, seed=1).requires_grad_()
    s = product_spectrum(a, b)
    assert not s.requires_grad
    torch.testing.assert_close(s, product_spectrum(b, a), rtol=1e-13, atol=0)
    assert not any(x.requires_grad for x in (grams(a), *balance_defect(a, b), effective_rank(s.requires_grad_())))


def test_noncontiguous_inputs() -> None:
    a, b = normal(9, 4, 2).permute(2, 1, 0), normal(2, 6, 8, seed=1)[..., ::2].mT
    assert_spectrum(product_spectrum(a, b), a, b, 1e-14)
    shared = normal(1, 4, 9).to(torch.float32)
    kept = shared.clone()
    assert_spectrum(product_spectrum(shared.expand(2, 4, 9), b), shared, b, 1e-14)
    assert torch.equal(shared, kept)


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3), TypeError, "floating point"),
        (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.complex64), TypeError, "floating point"),
        (torch.ones(3), torch.ones(2, 3), ValueError, "two dimensions"),
        (torch.ones(2, 3), torch.ones(3, 3), ValueError, "share r"),
        (torch.ones(2, 3, 3), torch.ones(4, 3, 3), ValueError, "broadcast"),
        (torch.full((2, 2), math.nan), torch.ones(2, 2), ValueError, "NaN or inf"),
        (torch.ones(2, 2), torch.tensor([[1.0, 1.0], [-math.inf, 1.0]]), ValueError, "b has NaN or inf"),
    ],
)
def test_refusals(a: Tensor, b: Tensor, error: type[Exception], message: str) -> None:
    for function in (product_spectrum, balance_defect):
        with pytest.raises(error, match=message):
            function(a, b)


# --- grams and spectrum_from_grams ---------------------------------------------------------------------------


def test_grams() -> None:
    a = normal(2, 1, 3, 5).to(torch.bfloat16)
    assert torch.equal(grams(a), a.to(F64) @ a.to(F64).mT)
    assert grams(a).dtype == F64
    assert torch.equal(grams(torch.ones(2, 0)), torch.zeros(2, 2, dtype=F64))
    with pytest.raises(TypeError, match="factors must be real floating point"):
        grams(torch.ones(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="two dimensions"):
        grams(torch.ones(3))


def test_grams_of_stacked_query_heads_add() -> None:
    a, queries = normal(2, 4, 9), normal(2, 3, 4, 6, seed=1)
    stacked = queries.transpose(1, 2).flatten(2)  # (2, 4, 3 * 6)
    s, sound = spectrum_from_grams(grams(a), grams(queries).sum(1))
    assert bool(sound.all())
    assert_spectrum(s, a, stacked, 1e-14)


def test_grams_that_do_not_suffice_are_nan_and_named() -> None:
    a, b = normal(4, 3, 9), normal(3, 6, seed=1)
    a[1] = 0.0
    a[2, 2] = a[2, 1] * (1 + 1e-9)
    a[3] *= 1e60
    s, sound = spectrum_from_grams(grams(a), grams(b))
    assert sound.tolist() == [True, False, False, True]
    assert bool(s[~sound].isnan().all())
    assert_spectrum(s[sound], a[sound], b, 1e-14)


def test_grams_of_no_heads_and_refusals() -> None:
    s, sound = spectrum_from_grams(torch.ones(0, 2, 2), torch.ones(2, 2))
    assert s.shape == (0, 2)
    assert sound.shape == (0,)
    with pytest.raises(ValueError, match="square"):
        spectrum_from_grams(torch.ones(2, 3), torch.ones(2, 2))
    with pytest.raises(ValueError, match="gram_a has NaN or inf"):
        spectrum_from_grams(torch.full((2, 2), math.nan), torch.ones(2, 2))
