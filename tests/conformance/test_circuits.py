"""Spectra of G_QK and G_VO do not change under any symmetry, and do change under what is none."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from cases import CASES
from oracle import Case, Tiny
from torch import Tensor

from gaugekit.linalg import product_spectrum
from gaugekit.symmetry import circuits


def spectra(tiny: Tiny, tensors: Mapping[str, Tensor]) -> Tensor:
    """Singular values of every circuit of every head, heads of a layer in the order of their largest one."""
    rows = []
    for each in circuits(tiny.spec, tiny.case.observable):
        for a, b in (each.query_key(tensors), each.value_output(tensors)):
            values = product_spectrum(a, b)
            rows.append(values[values[:, 0].argsort()].reshape(-1))
    return torch.cat(rows)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_spectra_are_invariants(case: Case) -> None:
    """TransformerLens PR#47: refactored attention changed W_QᵀW_K, and only outputs were asserted."""
    tiny = Tiny(case)
    before = spectra(tiny, tiny.tensors())
    generator = torch.Generator().manual_seed(7)
    theta = tiny.theta
    for symmetry in (*tiny.symmetries.continuous, *tiny.symmetries.discrete):
        theta = tiny.flat(symmetry.act(tiny.tensors(theta), symmetry.sample(generator)), theta)
    assert (theta - tiny.theta).abs().max() > 0.1
    assert torch.allclose(spectra(tiny, tiny.tensors(theta)), before, rtol=1e-9, atol=1e-11)
    # The same after one more step that is no symmetry.
    noisy = theta + 0.01 * torch.randn(theta.shape, generator=generator, dtype=torch.float64)
    assert not torch.allclose(spectra(tiny, tiny.tensors(noisy)), before, rtol=1e-4, atol=1e-6)
