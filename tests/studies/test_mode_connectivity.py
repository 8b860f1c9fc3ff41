"""Mode connectivity: the rule, the control, and what a barrier is."""

from __future__ import annotations

import pytest
import torch

from gaugekit.models.registry import describe
from gaugekit.studies.fitting import SIZE
from gaugekit.studies.mode_connectivity import STUDY, WAYS, barrier, disguised, run, weights
from gaugekit.studies.study import ArmResult, Budget, Measured, Result
from gaugekit.symmetry import derive
from gaugekit.training.config import ModelConfig
from gaugekit.training.decoder import Decoder
from gaugekit.training.export import as_transformers

TINY = Budget(3, (1e-3,), (0,), options={**SIZE, "width": 16, "layers": 1, "heads": 2, "held_out": 1, "walk": 1})


def made_up(naive: float, permutations: float, everything: float) -> Measured:
    heights = dict(zip(WAYS, (naive, permutations, everything, 0.0), strict=True))
    ways = {way: [2.0, 2.0 + height, 2.0] for way, height in heights.items()}
    distances = {"permutations": [0.8, 0.7, 2], "all": [0.8, 0.5, 9]}
    return {f"barrier {way}": x for way, x in heights.items()} | {"ways": ways, "distances": distances, "held_out": 2.0}


def result(*runs: Measured) -> Result:
    arms = tuple(ArmResult(arm, {"0.001": 2.0}, 1e-3, False, runs) for arm in STUDY.arms)
    return Result(STUDY.name, False, STUDY.full, arms, {})


@pytest.mark.parametrize(
    ("left", "verdict"), [(0.02, "confirmed"), (0.5, "not confirmed"), (0.15, "inconclusive"), (0.9, "not confirmed")]
)
def test_each_verdict_can_come_out(left: float, verdict: str) -> None:
    """`left`: the share of the naive barrier that is left modulo all symmetries."""
    some = [made_up(x, x * 0.7, left * x) for x in (0.9, 1.0, 1.1)]
    assert STUDY.conclude(result(*some)).verdict == verdict
    STUDY.draw(result(*some))


def test_broken_runs_say_nothing() -> None:
    some = [made_up(1.0, 0.7, 0.01), {"failed": "the loss is nan"}]
    found = STUDY.conclude(result(*some))
    assert found.verdict == "inconclusive"
    assert "broke off" in found.line
    STUDY.draw(result(*some))


def test_one_group_that_fails_is_enough() -> None:
    good = [made_up(1.0, 0.7, 0.01 + i / 1000) for i in range(3)]
    bad = [made_up(1.0, 0.7, 0.5 + i / 1000) for i in range(3)]
    first, second = (result(*runs).arms[i] for i, runs in enumerate((good, bad)))
    assert STUDY.conclude(Result(STUDY.name, False, STUDY.full, (first, second), {})).verdict == "not confirmed"


def test_a_barrier_is_above_the_straight_line() -> None:
    assert barrier([1.0, 2.0, 3.0]) == 0.0
    assert barrier([1.0, 3.5, 3.0]) == pytest.approx(1.5)
    assert barrier([3.0, 1.0, 1.0]) == 0.0  # below the line all the way


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


def test_the_control_has_no_barrier() -> None:
    for arm in STUDY.arms:
        measured = run(arm, 1e-3, 0, TINY)
        assert abs(measured["barrier disguise"]) < 1e-4
        assert measured["distances"]["all"][1] < measured["distances"]["permutations"][1]
