"""Watching norms: what is caught, when, and that watching changes nothing."""

from __future__ import annotations

import pytest
import torch

from gaugekit.studies.fitting import Task, fit
from gaugekit.studies.study import Budget
from gaugekit.studies.watching import Through, passages, places, points
from gaugekit.training.config import ModelConfig, OptimizerConfig
from gaugekit.training.decoder import Decoder

CONFIG = ModelConfig(vocab=11, context=8, width=12, layers=2, heads=2)


def windows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(11, (3, 8), generator=generator) for _ in range(2)]


def test_what_is_caught_is_what_each_norm_reads_and_writes() -> None:
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    found = passages(model, windows())
    assert [each.place for each in found] == ["0 attention", "0 MLP", "1 attention", "1 MLP", "final"]
    assert [each.norm for each in found] == list(places(model).values())
    tokens = torch.cat(windows())
    first = (model.embedding(tokens) + model.positions.weight).double().flatten(0, 1)
    assert found[0].before.dtype == torch.float64
    assert torch.equal(found[0].before, first)
    for each in found:
        again = each.norm.double()(each.before)
        torch.testing.assert_close(each.after, again, rtol=1e-5, atol=1e-5)
    states = model.float().states(tokens).double().flatten(0, 1)
    torch.testing.assert_close(found[-1].after, states, rtol=1e-5, atol=1e-6)


def test_no_hook_is_left() -> None:
    model = Decoder(CONFIG)
    passages(model, windows())
    with pytest.raises(IndexError):
        passages(model, [torch.full((1, 8), 99)])
    assert all(not norm._forward_hooks for norm in places(model).values())


@pytest.mark.parametrize("steps", [1, 2, 6, 500, 1000])
def test_points_begin_at_the_start_and_end_at_the_end(steps: int) -> None:
    found = points(steps, 12)
    assert found[0] == 0 and found[-1] == steps
    assert list(found) == sorted(set(found)) and len(found) <= 12


def test_points_are_even_in_the_logarithm() -> None:
    assert points(10_000, 6) == (0, 1, 10, 100, 1000, 10_000)


def test_through_measures_at_its_steps_alone_and_changes_nothing() -> None:
    tokens = torch.cat(windows())
    task = Task(11, lambda seed: lambda step: (tokens, tokens.roll(seed + step, 0)), ((tokens, tokens),))
    losses = []
    for at in ((), (0, 2, 3)):
        torch.manual_seed(0)
        model = Decoder(CONFIG)
        start = model.head.weight.detach().clone()
        through = Through(at, lambda model: (passages(model, windows())[0].after, model.head.weight.detach().clone()))
        found = fit(model, OptimizerConfig(lr=1e-2), task, Budget(steps=3), 0, watch=through)
        assert tuple(through.kept) == at
        losses.append(found.losses)
    assert losses[0] == losses[1]
    assert torch.equal(through.kept[0][1], start)
    assert torch.equal(through.kept[3][1], model.head.weight)
    assert not torch.equal(through.kept[2][1], model.head.weight)
