"""A model is found again behind a random disguise: aligned to itself it comes to lie on itself."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, first_of_each
from oracle import Case, Tiny
from torch import Tensor

from gaugekit.symmetry import Symmetry
from gaugekit.symmetry.base import Discrete
from gaugekit.symmetry.orbit import pieces
from gaugekit.verbs.mates import Allowed
from gaugekit.verbs.nearing import Meter, Way, bring


def disguised(tiny: Tiny, theta: Tensor, symmetries: tuple[Symmetry, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    for symmetry in symmetries:
        theta = tiny.flat(symmetry.act(tiny.tensors(theta), symmetry.sample(generator)), theta)
    return theta


def everything(tiny: Tiny) -> tuple[Symmetry, ...]:
    return (*tiny.symmetries.continuous, *tiny.symmetries.discrete)


def brought(tiny: Tiny, theta: Tensor, allowed: Allowed = "all", keep: bool = True) -> tuple[Way, Tensor]:
    """The way of a model to `tiny`, and its parameters there."""
    tensors = tiny.tensors(theta)
    way = bring(tiny.spec, tiny.symmetries, tiny.tensors().__getitem__, tensors.__getitem__, allowed, keep=keep)
    for names in pieces(tiny.spec):
        theta = tiny.flat(way.tensors(names), theta)
    return way, theta


def apart(tiny: Tiny, theta: Tensor) -> float:
    meter = Meter(dead.view for dead in tiny.spec.dead)
    meter.add(tiny.tensors(), tiny.tensors(theta))
    return meter.distance


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_is_found_behind_its_disguise(case: Case) -> None:
    tiny = Tiny(case)
    other = disguised(tiny, tiny.theta, everything(tiny), seed=3)
    way, theta = brought(tiny, other)
    assert apart(tiny, other) > 1e-2
    assert way.distances[-1] < 1e-6, way.distances
    assert (tiny.observe(theta) - tiny.observe(tiny.theta)).abs().max() < 1e-8
    if not way.left or all(left.symmetry == "residual frame" for left in way.left):
        assert apart(tiny, theta) < 1e-6


@pytest.mark.parametrize("case", first_of_each(CASES), ids=str)
def test_a_place_does_not_depend_on_the_disguise(case: Case) -> None:
    """Of another model, which is not found again: the same point of its way, from wherever it came."""
    tiny, stranger = Tiny(case), Tiny(case, seed=7)
    near = tiny.theta + 0.1 * (stranger.theta - tiny.theta)
    _, first = brought(tiny, near)
    _, second = brought(tiny, disguised(tiny, near, everything(tiny), seed=4))
    assert apart(tiny, first) > 1e-3
    live = Tiny.flat(tiny, {}, torch.ones(tiny.size, dtype=torch.float64))
    for dead in tiny.symmetries.dead:
        live[dead.view.window(tiny.index[dead.view.name]).reshape(-1)] = 0.0
    assert ((first - second) * live).abs().max() < 1e-6


@pytest.mark.parametrize("case", first_of_each(CASES), ids=str)
def test_two_models_keep_their_functions_and_come_nearer(case: Case) -> None:
    tiny, stranger = Tiny(case), Tiny(case, seed=7)
    for allowed in ("permutations", "all"):
        way, theta = brought(tiny, stranger.theta, allowed)
        assert way.distances[-1] < way.distances[0]
        assert (tiny.observe(theta) - tiny.observe(stranger.theta)).abs().max() < 1e-8
        assert (tiny.observe(theta) - tiny.observe(tiny.theta)).abs().max() > 1e-3


@pytest.mark.parametrize("case", first_of_each(CASES), ids=str)
def test_reading_and_keeping_find_the_same(case: Case) -> None:
    tiny, stranger = Tiny(case), Tiny(case, seed=7)
    kept, read = (brought(tiny, stranger.theta, keep=keep)[1] for keep in (True, False))
    assert (kept - read).abs().max() < 1e-9


@pytest.mark.parametrize(
    "case", [c for c in first_of_each(CASES) if c.model_type in ("gpt2", "llama", "bert")], ids=str
)
def test_permutations_are_found_by_permutations(case: Case) -> None:
    tiny = Tiny(case)
    discrete = tuple(s for s in everything(tiny) if isinstance(s, Discrete) and s.name != "stream order")
    other = disguised(tiny, tiny.theta, discrete, seed=5)
    _, theta = brought(tiny, other, "permutations")
    assert apart(tiny, other) > 1e-2
    assert apart(tiny, theta) < 1e-9
