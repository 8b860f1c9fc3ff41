"""Streamed statistics against the same on all numbers at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gaugekit.verbs.moments import Covariance, Pairs, Scalars, Spectra, Variances


@pytest.fixture
def rows() -> Tensor:
    """A large mean and a small variance (pytorch#51102, #40302): one pass over squares would lose every digit."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    return torch.randn(500, 6, generator=generator, dtype=torch.float64) @ mixing * 1e-2 + 1e6


@pytest.mark.parametrize("size", [1, 7, 500])
def test_moments(rows: Tensor, size: int) -> None:
    covariance, variances, scalars = Covariance(), Variances(), Scalars()
    for part in rows.split(size):
        covariance.add(part)
        variances.add(part)
        scalars.add(part[:, 0])
    expected = torch.cov(rows.mT, correction=0)
    assert torch.allclose(covariance.matrix(), expected, rtol=1e-6, atol=1e-10)
    assert torch.allclose(variances.variance(), expected.diagonal(), rtol=1e-6)
    spread = scalars.spread()
    first = rows[:, 0]
    assert spread.mean == pytest.approx(float(first.mean()), rel=1e-14)
    assert spread.std == pytest.approx(float(first.std(correction=0)), rel=1e-6)
    assert (spread.smallest, spread.largest) == (float(first.min()), float(first.max()))


def pairs(function, noise: float = 0.0) -> Pairs:
    generator = torch.Generator().manual_seed(1)
    kept = Pairs()
    for _ in range(5):
        x = 50 * torch.randn(40, 100, generator=generator, dtype=torch.float64)
        kept.add(x, function(x) + noise * torch.randn(x.shape, generator=generator, dtype=torch.float64))
    return kept


def test_a_tanh_is_found() -> None:
    curve = pairs(lambda x: 3 * (0.02 * x).tanh()).curve()
    assert curve is not None
    assert curve.tanh == pytest.approx(1, abs=1e-3)
    assert curve.scale == pytest.approx(0.02, rel=1e-2)
    assert curve.linear < 0.95


def test_a_line_is_a_tanh_too() -> None:
    curve = pairs(lambda x: 2 * x).curve()
    assert curve is not None
    assert curve.linear == pytest.approx(1, abs=1e-3)
    assert curve.tanh == pytest.approx(curve.linear, abs=1e-6)


def test_what_is_no_tanh_is_called_none() -> None:
    curve = pairs(lambda x: (x / 20).sin()).curve()
    assert curve is not None
    assert curve.tanh < 0.5 < 0.99 < curve.best


def test_noise_is_not_explained() -> None:
    curve = pairs(lambda x: (x / 50).tanh(), noise=1.0).curve()
    assert curve is not None
    assert curve.best == pytest.approx(0.28, abs=0.05)
    assert curve.tanh <= curve.best


def test_what_does_not_vary_has_no_curve() -> None:
    assert pairs(torch.zeros_like).curve() is None
    kept = Pairs()
    kept.add(torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64))
    assert kept.curve() is None


def test_spectra() -> None:
    states = torch.eye(5, 8, dtype=torch.float64)
    spectra = Spectra()
    spectra.add((states @ states.mT).unsqueeze(0))
    spectrum = spectra.spectrum()
    assert spectrum.rank == 5
    assert spectrum.effective_rank == pytest.approx(5)
    assert spectrum.shares == pytest.approx((0.2,) * 5)
    states[1:] = states[0]
    spectra.add((states @ states.mT).unsqueeze(0))
    assert spectra.spectrum().rank == pytest.approx(3)
    assert spectra.spectrum().shares[0] == pytest.approx(0.6)
