"""A model moved piece by piece is the model moved as a whole."""

from __future__ import annotations

import pytest
import torch
from cases import CASES
from oracle import Case, Tiny

from gaugekit.symmetry.orbit import Path, Step, pieces


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pieces_add_up(case: Case) -> None:
    tiny = Tiny(case)
    generator = torch.Generator().manual_seed(11)
    everything = (*tiny.symmetries.continuous, *tiny.symmetries.discrete)
    path = Path([Step(symmetry, symmetry.sample(generator)) for symmetry in everything])
    whole = tiny.tensors()
    for step in path.steps:
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
