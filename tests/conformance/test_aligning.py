"""A model is found again behind a random disguise: aligned to itself it comes to lie on itself."""

from __future__ import annotations

import pytest
import torch
from cases import CASES
from conftest import first_of_each
from oracle import Case, Tiny
from torch import Tensor

from gaugekit.symmetry import Symmetry
from gaugekit.symmetry.base import Discrete
from gaugekit.symmetry.units import ExpertOrder
from gaugekit.verbs.aligning import align_weights


def disguised(tiny: Tiny, theta: Tensor, symmetries: tuple[Symmetry, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    for symmetry in symmetries:
        theta = tiny.flat(symmetry.act(tiny.tensors(theta), symmetry.sample(generator)), theta)
    return theta


def everything(tiny: Tiny) -> tuple[Symmetry, ...]:
    acting = (*tiny.symmetries.continuous, *tiny.symmetries.discrete)
    return tuple(s for s in acting if not isinstance(s, ExpertOrder))  # experts keep their order


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_is_found_behind_its_disguise(case: Case) -> None:
    tiny = Tiny(case)
    other = disguised(tiny, tiny.theta, everything(tiny), seed=3)
    found = align_weights(tiny.spec, tiny.symmetries, tiny.tensors(), tiny.tensors(other))
    assert found.distances[-1] < 1e-6, found.distances
    assert found.distances[0] > 1e-2  # before, they lay apart
    for tensors, theta in ((found.ours, tiny.theta), (found.theirs, other)):
        assert (tiny.observe(tiny.flat(tensors, theta)) - tiny.observe(theta)).abs().max() < 1e-8


@pytest.mark.parametrize("case", first_of_each(CASES), ids=str)
def test_two_models_keep_their_functions_and_come_nearer(case: Case) -> None:
    tiny, stranger = Tiny(case), Tiny(case, seed=7)
    for allowed in ("permutations", "all"):
        found = align_weights(tiny.spec, tiny.symmetries, tiny.tensors(), tiny.tensors(stranger.theta), allowed)
        assert found.distances[-1] < found.distances[0]
        theta = tiny.flat(found.theirs, stranger.theta)
        assert (tiny.observe(theta) - tiny.observe(stranger.theta)).abs().max() < 1e-8
        assert (tiny.observe(theta) - tiny.observe(tiny.theta)).abs().max() > 1e-3


@pytest.mark.parametrize(
    "case", [c for c in first_of_each(CASES) if c.model_type in ("gpt2", "llama", "bert")], ids=str
)
def test_permutations_are_found_by_permutations(case: Case) -> None:
    tiny = Tiny(case)
    discrete = tuple(s for s in everything(tiny) if isinstance(s, Discrete) and s.name != "stream order")
    other = disguised(tiny, tiny.theta, discrete, seed=5)
    found = align_weights(tiny.spec, tiny.symmetries, tiny.tensors(), tiny.tensors(other), "permutations")
    assert found.distances[-1] < 1e-6
