"""A model moved piece by piece is the model moved as a whole, and every model of an orbit comes home to the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from cases import CASES, first_of_each
from oracle import Case, Tiny
from torch import Tensor

from gaugekit.models import view
from gaugekit.symmetry import Symmetry
from gaugekit.symmetry.base import Discrete
from gaugekit.symmetry.heads import QueryKey, ValueOutput, invertible
from gaugekit.symmetry.orbit import Homeward, Path, Step, pieces


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pieces_add_up(case: Case) -> None:
    tiny = Tiny(case)
    generator = torch.Generator().manual_seed(11)
    everything = (*tiny.symmetries.continuous, *tiny.symmetries.discrete)
    steps = [Step(symmetry, symmetry.sample(generator)) for symmetry in everything]
    path = Path(steps)
    whole = tiny.tensors()
    for step in steps:
        whole.update(step.symmetry.act(whole, step.element))
    tensors, seen = tiny.tensors(), set()
    largest = max(len(piece) for piece in pieces(tiny.spec))
    for piece in pieces(tiny.spec):
        assert not seen & set(piece)
        seen |= set(piece)
        moved = path.move(piece, tensors.__getitem__)
        assert set(moved) == set(piece) & path.touches
        for name, value in moved.items():
            assert torch.allclose(value, whole[name], rtol=1e-12, atol=1e-12), name
        # What else must be at hand are norms (vectors), never another layer.
        extra = [name for name in path.needs(piece) if name not in piece]
        assert all(tensors[name].dim() == 1 for name in extra)
    assert seen == set(tiny.spec.tensors)
    assert largest < len(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", first_of_each(CASES), ids=str)
def test_rows_at_a_time(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are changed some rows at a time, and in place only where nobody else has them."""
    tiny = Tiny(case)
    generator = torch.Generator().manual_seed(17)
    every = (*tiny.symmetries.continuous, *tiny.symmetries.discrete)
    path = Path([Step(symmetry, symmetry.sample(generator)) for symmetry in every])
    given = {name: value.to(dtype) for name, value in tiny.tensors().items()}
    kept = {name: value.clone() for name, value in given.items()}
    names = tuple(tiny.spec.tensors)
    whole = path.move(names, given.__getitem__)
    monkeypatch.setattr(view, "PART", 1)
    parts = path.move(names, given.__getitem__)
    assert whole.keys() == parts.keys()
    for name in whole:
        assert torch.allclose(parts[name], whole[name], rtol=1e-12, atol=1e-12), name
        assert torch.equal(given[name], kept[name]), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_element_has_an_inverse(case: Case) -> None:
    tiny = Tiny(case)
    generator = torch.Generator().manual_seed(13)
    for symmetry in (*tiny.symmetries.continuous, *tiny.symmetries.discrete, *tiny.symmetries.at_zero_eps):
        tensors, element = tiny.tensors(), symmetry.sample(generator)
        there = symmetry.act(tensors, element)
        back = symmetry.act(tensors | there, symmetry.inverse(element))
        moved = any((there[name] - tensors[name]).abs().max() > 1e-3 for name in there)
        assert moved or isinstance(symmetry, Discrete), symmetry  # an order may be drawn as it is
        for name, value in back.items():
            assert (value - tensors[name]).abs().max() < 1e-9, (symmetry, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_way_home_can_be_gone_back(case: Case) -> None:
    tiny = Tiny(case)

    def gone(symmetries: Sequence[Symmetry]) -> tuple[Homeward, dict[str, Tensor]]:
        path = Homeward(symmetries, tiny.tensors().__getitem__, keep=True)
        moved = tiny.tensors()
        for piece in pieces(tiny.spec):
            moved |= path.move(piece, tiny.tensors().__getitem__)
        assert [step.symmetry for step in path.steps] == list(path.symmetries)
        return path, moved

    def whole(step: Step) -> bool:
        return not isinstance(step.symmetry, ValueOutput | QueryKey) or invertible(step.element)

    path, tensors = gone(tiny.symmetries.continuous)
    if not all(map(whole, path.steps)):  # heads that are wider than what they show have no way back
        path, tensors = gone([step.symmetry for step in path.steps if whole(step)])
    back = Path([Step(step.symmetry, step.symmetry.inverse(step.element)) for step in reversed(path.steps)])
    for piece in pieces(tiny.spec):
        for name, value in back.move(piece, tensors.__getitem__).items():
            assert (value - tiny.tensors()[name]).abs().max() < 1e-7, name


def home(tiny: Tiny, theta: Tensor) -> Tensor:
    """The representative, found piece by piece."""
    everything = (*tiny.symmetries.continuous, *tiny.symmetries.discrete)
    tensors = tiny.tensors(theta)
    path = Homeward(everything, tensors.__getitem__)
    for piece in pieces(tiny.spec):
        theta = tiny.flat(path.move(piece, tensors.__getitem__), theta)
    return theta


def scrambled(tiny: Tiny, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    theta = tiny.theta
    for symmetry in (*tiny.symmetries.continuous, *tiny.symmetries.discrete):
        theta = tiny.flat(symmetry.act(tiny.tensors(theta), symmetry.sample(generator)), theta)
    return theta


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_model_of_an_orbit_has_one_representative(case: Case) -> None:
    tiny = Tiny(case)
    dead = torch.zeros(tiny.size, dtype=torch.bool)
    for item in tiny.symmetries.dead:
        dead[item.view.window(tiny.index[item.view.name]).reshape(-1)] = True
    first = home(tiny, tiny.theta)
    assert float((tiny.observe(first) - tiny.observe(tiny.theta)).abs().max()) < 1e-9, "the observable moved"
    assert float((home(tiny, first) - first)[~dead].abs().max()) < 1e-9, "not idempotent"
    for seed in (1, 2):
        again = home(tiny, scrambled(tiny, seed))
        worst = int(((again - first).abs() * ~dead).argmax())
        name = next(n for n, index in tiny.index.items() if worst in index.reshape(-1))
        assert float((again - first)[~dead].abs().max()) < 1e-8, f"{name} depends on the place in the orbit"
    other = tiny.theta + 1e-3 * torch.randn(tiny.size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    assert float((home(tiny, other) - first)[~dead].abs().max()) > 1e-4, "another model comes to the same place"
