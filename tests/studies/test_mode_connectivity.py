"""Mode connectivity: the rule, the control, and what a barrier is."""

from __future__ import annotations

import math
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch

from gaugekit.models.registry import describe
from gaugekit.studies.fitting import SIZE, fit, language, made, sized
from gaugekit.studies.mode_connectivity import STUDY, WAYS, Logits, apart, barrier, disguised, run, walk, weights
from gaugekit.studies.study import Arm, ArmResult, Budget, Measured, Result
from gaugekit.symmetry import derive
from gaugekit.training.config import ModelConfig, OptimizerConfig
from gaugekit.training.decoder import Decoder
from gaugekit.training.export import as_transformers

TINY = Budget(
    20,
    (1e-2,),
    (0,),
    options={**SIZE, "width": 16, "layers": 1, "heads": 2, "init_std": 0.3, "held_out": 1, "walk": 1, "learned": 4},
)


def made_up(naive: float, permutations: float, learned: float) -> Measured:
    heights = dict(zip(WAYS, (naive, permutations, 0.6 * naive, learned, 0.0), strict=True))
    ways = {way: [2.0, 2.0 + height, 2.0] for way, height in heights.items()}
    distances = {"naive": 0.8, "permutations": 0.7, "all": 0.5, "learned": 0.6, "disguise": 1e-13}
    return {f"barrier {way}": x for way, x in heights.items()} | {"ways": ways, "distances": distances, "held_out": 2.0}


def result(*runs: Measured, second: tuple[Measured, ...] | None = None) -> Result:
    """Of both groups alike, or of the second one by itself."""
    groups = (runs, runs if second is None else second)
    arms = tuple(ArmResult(a, {"0.001": 2.0}, 1e-3, False, each) for a, each in zip(STUDY.arms, groups, strict=True))
    return Result(STUDY.name, False, STUDY.full, arms, {})


def pairs(left: float) -> list[Measured]:
    """Three, with this share of the naive barrier left modulo all symmetries."""
    return [made_up(x, x * 0.7, left * x) for x in (0.9, 1.0, 1.1)]


@pytest.mark.parametrize(
    ("left", "verdict"), [(0.02, "confirmed"), (0.5, "not confirmed"), (0.15, "inconclusive"), (0.9, "not confirmed")]
)
def test_each_verdict_can_come_out(left: float, verdict: str) -> None:
    found = STUDY.conclude(result(*pairs(left)))
    assert found.verdict == verdict
    assert f"GPT-2, {verdict}: {left:.2f} ± 0.00 of the naive barrier" in found.line
    assert f"Llama, {verdict}: {left:.2f} ± 0.00 of the naive barrier" in found.line
    assert all(len(row) == len(table.columns) for table in found.tables for row in table.rows)
    assert found.tables[1].rows[0] == ("GPT-2", "0.80", "0.70", "0.50", "0.60", "1e-13")
    plt.close(STUDY.draw(result(*pairs(left))))


def test_broken_runs_say_nothing() -> None:
    some = [made_up(1.0, 0.7, 0.01), {"failed": "the loss is nan"}]
    found = STUDY.conclude(result(*some))
    assert found.verdict == "inconclusive"
    assert found.line == "GPT-2, inconclusive: training broke off; Llama, inconclusive: training broke off"
    plt.close(STUDY.draw(result(*some)))
    plt.close(STUDY.draw(result(some[1], some[1])))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (made_up(0.0, 0.0, 0.0), "a naive barrier is not above zero"),
        (made_up(-0.1, 0.0, 0.0), "a naive barrier is not above zero"),
        (made_up(math.inf, 0.7, 0.01), "a barrier is not finite"),
        (made_up(1.0, 0.7, math.nan), "a barrier is not finite"),
        (made_up(1.0, math.inf, 0.01), "a barrier is not finite"),
    ],
)
def test_no_share_is_taken_of_what_is_no_barrier(bad: Measured, why: str) -> None:
    """That group is inconclusive, and says so; the other one is what it is."""
    found = STUDY.conclude(result(*pairs(0.02)[:2], bad, second=tuple(pairs(0.02))))
    assert found.verdict == "inconclusive"
    assert f"GPT-2, inconclusive: {why}" in found.line and "Llama, confirmed: 0.02" in found.line
    assert STUDY.conclude(result(*pairs(0.02)[:2], bad, second=tuple(pairs(0.9)))).verdict == "not confirmed"


def test_one_group_that_fails_is_enough() -> None:
    found = STUDY.conclude(result(*pairs(0.01), second=tuple(pairs(0.5))))
    assert found.verdict == "not confirmed"
    assert "GPT-2, confirmed" in found.line and "Llama, not confirmed" in found.line


def test_a_barrier_is_above_the_straight_line() -> None:
    assert barrier([1.0, 2.0, 3.0]) == 0.0
    assert barrier([1.0, 3.5, 3.0]) == pytest.approx(1.5)
    assert barrier([3.0, 1.0, 1.0]) == 0.0  # below the line all the way
    assert barrier([1.0, math.nan, 1.0]) == barrier([1.0, 1.0, math.inf]) == math.inf


@pytest.mark.parametrize("arm", STUDY.arms, ids=lambda arm: arm.name)
def test_a_disguise_computes_the_same_from_other_weights(arm) -> None:
    torch.manual_seed(0)
    model = Decoder(ModelConfig(vocab=11, context=8, width=16, layers=2, heads=2, **arm.settings))
    kind, config, _ = as_transformers(model)
    first = weights(model)
    spec = describe(config.to_dict(), {name: tuple(x.shape) for name, x in first.items()}, kind.__name__)
    second = disguised(first, derive(spec), seed=1)
    tokens = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(2))
    logprobs = []
    for tensors in (first, second):
        built = kind(config).double().eval()
        built.load_state_dict(tensors, strict=False)
        logprobs.append(built(tokens).logits.log_softmax(-1))
    assert (logprobs[0] - model.double()(tokens).log_softmax(-1)).abs().max() < 1e-5
    assert (logprobs[0] - logprobs[1]).abs().max() < 1e-5
    assert max(float((x - second[name]).abs().max()) for name, x in first.items()) > 0.1


@pytest.mark.parametrize("arm", STUDY.arms, ids=lambda arm: arm.name)
def test_the_control_has_no_barrier_once_it_is_aligned(arm: Arm) -> None:
    """As it is, the way from a model to its disguise has one, though both ends compute the same."""
    rate = TINY.rates[0]
    measured = run(arm, rate, 0, TINY)
    task = language(TINY, 0)
    model = made(sized(TINY, task.vocab, **arm.settings), 0)
    fit(model, OptimizerConfig(lr=rate, weight_decay=0.1), task, TINY, 0)
    kind, config, _ = as_transformers(model)
    first = weights(model)
    spec = describe(config.to_dict(), {name: tuple(x.shape) for name, x in first.items()}, kind.__name__)
    second, walker = disguised(first, derive(spec), 0), Logits(kind(config).eval())
    as_it_is = walk(walker, first, second, task.held_out)
    assert as_it_is[0] == pytest.approx(measured["held_out"], abs=1e-5)  # the same model
    assert as_it_is[0] == pytest.approx(as_it_is[-1], abs=1e-4)
    assert barrier(as_it_is) > 0.5
    assert abs(measured["barrier disguise"]) < 1e-4
    distances: dict[str, Any] = measured["distances"]
    assert distances["disguise"] < 1e-6
    assert apart(first, second) > 0.1
    assert 0.1 < distances["all"] < distances["permutations"] < distances["naive"]
