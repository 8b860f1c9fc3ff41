"""Every family, every shape: the census is what the Jacobian says, and every symmetry is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases import CASES
from oracle import Case, Tiny
from torch import Tensor

from gaugekit.models import Edit, View
from gaugekit.symmetry import Symmetry
from gaugekit.symmetry.constants import KeyConstant
from gaugekit.symmetry.readers import Reader

GAP = 1e4


@pytest.fixture(scope="module", params=CASES, ids=str)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    case: Case = request.param
    return Tiny(case)


def dead_indices(tiny: Tiny) -> Tensor:
    parts = [dead.view.window(tiny.index[dead.view.name]).reshape(-1) for dead in tiny.symmetries.dead]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)


def tangents(tiny: Tiny) -> Tensor:
    """All tangent vectors, (dimension, parameters), each of unit length."""
    tensors = tiny.tensors()
    rows = []
    for symmetry in tiny.symmetries.continuous:
        for unit in torch.eye(symmetry.dimension, dtype=torch.float64):
            rows.append(tiny.flat(symmetry.tangent(tensors, unit), torch.zeros(tiny.size, dtype=torch.float64)))
    stacked = torch.stack(rows)
    return stacked / stacked.norm(dim=1, keepdim=True)


def test_parameters_are_counted_as_the_class_counts_them(tiny: Tiny) -> None:
    assert tiny.spec.parameters == tiny.size


def test_census_is_the_corank_of_the_jacobian(tiny: Tiny) -> None:
    total = tiny.symmetries.dimension + dead_indices(tiny).numel()
    assert_corank(tiny, total)
    if tiny.case.total is not None:
        assert total == tiny.case.total


@pytest.mark.parametrize("case", CASES, ids=str)
def test_at_zero_eps_the_norm_input_scales_are_symmetries_too(case: Case) -> None:
    tiny = Tiny(case, eps=0.0)
    near = tiny.symmetries.at_zero_eps
    total = tiny.symmetries.dimension + sum(s.dimension for s in near) + dead_indices(tiny).numel()
    assert_corank(tiny, total)
    before = tiny.observe(tiny.theta)
    generator = torch.Generator().manual_seed(4)
    for symmetry in near:
        moved = tiny.observe(finite(tiny, symmetry, tiny.theta, generator))
        assert float((moved - before).abs().max()) < 1e-9, symmetry.where


def assert_corank(tiny: Tiny, total: int) -> None:
    spectrum = torch.linalg.svdvals(tiny.jacobian)
    spectrum = torch.cat([spectrum, torch.zeros(max(0, tiny.size - spectrum.numel()), dtype=torch.float64)])
    rank = tiny.size - total
    assert spectrum[rank - 1] > GAP * spectrum[rank], (
        f"census {total}; the spectrum falls by most at {gap_position(spectrum, tiny.size)}"
    )
    assert spectrum[rank] < 1e-12 * spectrum[0]


def gap_position(spectrum: Tensor, size: int) -> int:
    ratios = spectrum[:-1] / spectrum[1:].clamp_min(1e-17 * float(spectrum[0]))
    return size - 1 - int(ratios.argmax())


def test_tangents_span_the_kernel_of_the_jacobian(tiny: Tiny) -> None:
    rows = tangents(tiny)
    moved = tiny.jacobian @ rows.mT
    assert moved.norm(dim=0).max() < 1e-11 * torch.linalg.matrix_norm(tiny.jacobian, 2)
    dead = torch.eye(tiny.size, dtype=torch.float64)[dead_indices(tiny)]
    spectrum = torch.linalg.svdvals(torch.cat([rows, dead]))
    assert spectrum[-1] > 1e-8 * spectrum[0], "two symmetries count the same direction"


def finite(tiny: Tiny, symmetry: Symmetry, theta: Tensor, generator: torch.Generator) -> Tensor:
    changed = symmetry.act(tiny.tensors(theta), symmetry.sample(generator))
    assert set(changed) == set(symmetry.touches)
    return tiny.flat(changed, theta)


def test_random_elements_leave_the_observable(tiny: Tiny) -> None:
    before = tiny.observe(tiny.theta)
    generator = torch.Generator().manual_seed(3)
    everything = tiny.theta
    for symmetry in (*tiny.symmetries.continuous, *tiny.symmetries.discrete):
        alone = finite(tiny, symmetry, tiny.theta, generator)
        difference = float((tiny.observe(alone) - before).abs().max())
        assert difference < 1e-9, f"{symmetry.name} at {symmetry.where} moves the observable by {difference}"
        everything = finite(tiny, symmetry, everything, generator)
    assert (everything - tiny.theta).abs().max() > 0.1
    assert float((tiny.observe(everything) - before).abs().max()) < 1e-9


def test_elements_outside_the_group_move_the_observable(tiny: Tiny) -> None:
    """A random element with noise on one of its weights, or with one of them left behind."""
    before = tiny.observe(tiny.theta)
    generator = torch.Generator().manual_seed(5)
    for symmetry in one_of_each(tiny):
        worst = max(float((tiny.observe(theta) - before).abs().max()) for theta in outside(tiny, symmetry, generator))
        assert worst > 1e-3, f"leaving the group of {symmetry.name} at {symmetry.where} is not noticed"


def one_of_each(tiny: Tiny) -> list[Symmetry]:
    everything = (*tiny.symmetries.continuous, *tiny.symmetries.discrete)
    return list({symmetry.name: symmetry for symmetry in everything}.values())


def outside(tiny: Tiny, symmetry: Symmetry, generator: torch.Generator) -> Iterator[Tensor]:
    tensors = tiny.tensors()
    if isinstance(symmetry, KeyConstant):
        # Any constant of the keys is legal without rotary positions; a constant of the queries is not.
        query = Reader(symmetry.attention.q, symmetry.reader.norm)
        edit = Edit(tensors)
        query.shift(edit, torch.randn(query.rows, generator=generator, dtype=torch.float64))
        yield tiny.flat(edit.changed, tiny.theta)
        return
    changed = dict(tensors)
    while all(torch.equal(changed[name], tensors[name]) for name in symmetry.touches):  # a permutation may be trivial
        changed = symmetry.act(tensors, symmetry.sample(generator))
    views: tuple[View, ...] = tuple(dict.fromkeys(symmetry.views))
    for view in views:
        edit = Edit({**tensors, **changed})
        old, new = view.read(tensors[view.name]), view.read(changed[view.name])
        edit[view] = new + 0.1 * torch.randn(old.shape, generator=generator, dtype=torch.float64)
        yield tiny.flat({**changed, **edit.changed}, tiny.theta)
        if len(views) > 1:
            edit[view] = old
            yield tiny.flat({**changed, **edit.changed}, tiny.theta)
