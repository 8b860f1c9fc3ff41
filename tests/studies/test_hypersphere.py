"""The normalized transformer against RMSNorm: the rule, steps to equal loss, and what arms share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch

from gaugekit.nn.hypersphere import HypersphereTransformer
from gaugekit.nn.spheres import spheres
from gaugekit.studies import hypersphere
from gaugekit.studies.hypersphere import GROUPS, RMS, SPHERE, STUDY, TANGENT, WHOLE, config, reached, run, speed, speeds
from gaugekit.studies.study import Arm, ArmResult, Budget, Measured, Result
from gaugekit.training.decoder import Decoder

TINY = Budget(
    8, (1e-2,), (0,), options={"width": 16, "layers": 1, "heads": 2, "context": 12, "batch": 3, "held_out": 1}
)
BROKEN: Measured = {"failed": "the loss is nan"}
Losses = dict[float, float]


def made_up(held_out: float, seconds: float) -> Measured:
    curve = [(2, 3.0), (4, held_out)]
    return {
        "held_out": held_out,
        "training": held_out,
        "seconds": seconds,
        "parameters": 9,
        "tokens": 9,
        "curve": curve,
    }


def result(slow: Losses, fast: Losses, broken: tuple[str, ...] = ()) -> Result:
    arms = []
    for arm in STUDY.arms:
        share = arm.settings["share"]
        loss, cost = (slow[share], 10.0) if arm.name == RMS else (fast[share], 20.0)
        runs = [made_up(loss + 0.1 * i + 0.02 * share * (-1) ** i * i, cost * share) for i in range(5)]
        arms.append(ArmResult(arm, {"0.01": 2.0}, 0.01, False, tuple([BROKEN] * 5 if arm.key in broken else runs)))
    return Result(STUDY.name, False, STUDY.full, tuple(arms), {})


SLOW = {0.25: 2.4, 0.5: 2.2, 1.0: 2.0}


@pytest.mark.parametrize(
    ("fast", "verdict"),
    [
        ({0.25: 1.9, 0.5: 1.8, 1.0: 1.7}, "confirmed"),
        ({0.25: 2.2, 0.5: 1.9, 1.0: 1.7}, "inconclusive"),  # faster than twice, slower than four times
        ({0.25: 2.2, 0.5: 2.1, 1.0: 1.9}, "not confirmed"),
        ({0.25: 2.6, 0.5: 2.4, 1.0: 2.2}, "not confirmed"),
        ({0.25: 2.2, 0.5: 2.004, 1.0: 1.9}, "inconclusive"),
    ],
)
def test_each_verdict_can_come_out(fast: Losses, verdict: str) -> None:
    found = result(SLOW, fast)
    said = STUDY.conclude(found)
    assert said.verdict == verdict
    assert all(len(row) == len(table.columns) for table in said.tables for row in table.rows)
    plt.close(STUDY.draw(found))


@pytest.mark.parametrize("verdict", ["confirmed", "not confirmed", "inconclusive"])
def test_runs_that_broke_off(verdict: str) -> None:
    """RMSNorm with all steps; nGPT with half of them; both."""
    slow, fast = f"{WHOLE} / {RMS}", f"half the steps / {SPHERE}"
    broken = {
        "confirmed": (slow,),
        "not confirmed": (fast,),
        "inconclusive": (slow, fast, f"{list(GROUPS)[2]} / {SPHERE}"),
    }
    found = result(SLOW, {0.25: 2.2, 0.5: 2.1, 1.0: 1.9}, broken[verdict])
    said = STUDY.conclude(found)
    assert said.verdict == verdict
    assert "nothing can be said" in said.line
    plt.close(STUDY.draw(found))


def test_steps_to_equal_loss() -> None:
    assert speed(SLOW, SLOW) == 1.0
    assert speed(SLOW, {0.25: 2.2, 0.5: 2.0, 1.0: 1.8}) == pytest.approx(2.0)
    assert speed({0.25: 2.2, 0.5: 2.0, 1.0: 1.8}, SLOW) == pytest.approx(0.5)
    assert speed(SLOW, {0.25: 2.1, 0.5: 1.9, 1.0: 1.8}) == pytest.approx(
        4 / math.sqrt(2)
    )  # half way between logarithms
    assert speed(SLOW, {0.25: 1.0, 0.5: 0.9, 1.0: 0.8}) == 4.0  # a bound
    assert speed(SLOW, {0.25: 9.0, 0.5: 8.0, 1.0: 7.0}) == 0.25
    assert speed(SLOW, {0.25: math.inf, 0.5: 2.5, 1.0: 2.0}) == 1.0
    assert reached({0.25: math.inf, 0.5: 2.0, 1.0: 1.0}, 2.0) == 0.5
    assert reached({0.25: 1.5, 0.5: 2.5, 1.0: 1.0}, 1.5) == 0.25  # not monotonic


def test_speeds_in_steps_and_seconds() -> None:
    found = result(SLOW, {share: loss - 0.2 for share, loss in SLOW.items()})
    assert speeds(found) == pytest.approx([2.0] * 5, rel=0.2)  # the losses have noise
    assert hypersphere.dearer(found) == pytest.approx(0.5)


@pytest.mark.parametrize("budget", [STUDY.full, STUDY.quick], ids=["full", "quick"])
def test_parameters_are_equal(budget: Budget) -> None:
    sizes = {arm.name: sum(p.numel() for p in Decoder(config(arm, budget, 96)).parameters()) for arm in STUDY.arms}
    assert len(sizes) == 3
    limit = 0.01 if budget is STUDY.full else 0.05  # of a tiny width, scales are a larger part
    assert max(sizes.values()) / min(sizes.values()) - 1 < limit
    assert sizes[SPHERE] == sizes[TANGENT] > sizes[RMS]


def test_the_sphere_is_the_published_model() -> None:
    arm = next(arm for arm in STUDY.arms if arm.name == SPHERE)
    own = Decoder(config(arm, TINY, 11))
    width, layers, heads = (TINY.options[key] for key in ("width", "layers", "heads"))
    other = HypersphereTransformer(11, width, layers, heads, own.config.units)
    state = dict(zip(other.state_dict(), own.state_dict().values(), strict=True))
    other.load_state_dict(state)
    tokens = torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(0))
    assert torch.equal(own(tokens), other(tokens))


def test_arms_differ_in_one_thing_within_a_group() -> None:
    for group, share in GROUPS.items():
        arms = [arm for arm in STUDY.arms if arm.group == group]
        assert all(arm.settings["share"] == share for arm in arms)
        names = [arm.name for arm in arms]
        assert names[:2] == [RMS, SPHERE] and len(set(names)) == len(names)


@pytest.mark.parametrize("arm", STUDY.arms, ids=lambda arm: arm.key)
def test_a_run_has_its_share_of_the_steps(arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps to the spheres, if there are any."""
    kept: list[Any] = []
    fit = hypersphere.fit

    def keep(*arguments: Any, **options: Any) -> Any:
        kept.append((fit(*arguments, **options), options))
        return kept[-1][0]

    monkeypatch.setattr(hypersphere, "fit", keep)
    measured = run(arm, 1e-2, 0, TINY)
    fitted, options = kept[0]
    assert measured["tokens"] == 8 * arm.settings["share"] * 36
    assert options["warmup"] == (0.05 if arm.name == RMS else 0.0)
    decays = {group["weight_decay"] for group in fitted.optimizer.param_groups}
    assert decays == ({0.0, 0.1} if arm.name == RMS else {0.0})
    on_spheres = spheres(fitted.model)
    assert bool(on_spheres) == (arm.name != RMS)
    for sphere in on_spheres:
        assert (sphere.parameter.norm(dim=sphere.dim) - 1).abs().max() < 1e-5


def test_tangent_steps_are_others() -> None:
    plain, tangent = (next(a for a in STUDY.arms if (a.name, a.group) == (n, WHOLE)) for n in (SPHERE, TANGENT))
    first, second, again = (run(arm, 1e-2, 0, replace(TINY, steps=4))["held_out"] for arm in (plain, tangent, plain))
    assert first == again != second
