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
from gaugekit.studies.hypersphere import (
    GROUPS,
    RMS,
    SPHERE,
    STUDY,
    TANGENT,
    WHOLE,
    bound,
    config,
    reached,
    run,
    speed,
    speeds,
    times,
)
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


@pytest.mark.parametrize(
    ("broken", "verdict", "words"),
    [
        ((f"{WHOLE} / {RMS}",), "confirmed", "the other broke off with a quarter"),
        ((f"half the steps / {SPHERE}",), "not confirmed", "broke off with half of them"),
        (
            (f"{WHOLE} / {RMS}", f"half the steps / {SPHERE}", f"{list(GROUPS)[2]} / {SPHERE}"),
            "inconclusive",
            "nats: both broke off with a quarter of the steps, both broke off with half of them",
        ),
    ],
)
def test_runs_that_broke_off(broken: tuple[str, ...], verdict: str, words: str) -> None:
    """RMSNorm with all steps; nGPT with half of them; both."""
    found = result(SLOW, {0.25: 2.2, 0.5: 2.1, 1.0: 1.9}, broken)
    said = STUDY.conclude(found)
    assert said.verdict == verdict
    assert "nothing can be said of steps" in said.line and words in said.line
    assert not {"nan", "inf"} & {word for table in said.tables for row in table.rows for word in " ".join(row).split()}
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
    """Steps of nGPT take twice as long in these results."""
    found = result(SLOW, {share: loss - 0.2 for share, loss in SLOW.items()})
    assert [steps for steps, _ in speeds(found)] == pytest.approx([2.0] * 5, rel=0.2)  # the losses have noise
    assert all(seconds == pytest.approx(steps / 2) for steps, seconds in speeds(found))


def test_speeds_have_an_interval_and_bounds_none() -> None:
    values = [2.0, 2.5, 2.2]
    logs = [math.log(x) for x in values]
    half = 4.302653 * torch.tensor(logs, dtype=torch.float64).std().item() / math.sqrt(3)
    mean = sum(logs) / 3
    expected = f"{math.exp(mean):.2f} ({math.exp(mean - half):.2f} to {math.exp(mean + half):.2f})"
    assert times(values, bound(values)) == expected
    assert times([2.0], "") == "2.00"
    assert bound([3.0, 4.0]) == "at least " and times([4.0, 4.0], "at least ") == "at least 4.00"
    assert bound([0.25, 3.0]) == "at most " and bound([0.26, 3.99]) == ""
    assert "some bound above, some below" in bound([0.25, 4.0])


@pytest.mark.parametrize(
    ("fast", "words"),
    [({0.25: 1.5, 0.5: 1.4, 1.0: 1.3}, "at least 4.00"), ({0.25: 9.0, 0.5: 8.0, 1.0: 7.0}, "at most")],
)
def test_bounds_are_said_to_be_bounds(fast: Losses, words: str) -> None:
    line = STUDY.conclude(result(SLOW, fast)).line
    assert f"nGPT is {words}" in line and line.count(words[:8]) == 2  # of seconds, too


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


def test_arms_differ_in_what_the_setting_says() -> None:
    """nGPT has no norms, but spheres, no weight decay and no warm-up; its tangent steps are an option of the optimizer;
    and of one model, groups have other shares of the steps."""
    settings = {arm.key: dict(arm.settings) for arm in STUDY.arms}
    for group, share in GROUPS.items():
        names = [arm.name for arm in STUDY.arms if arm.group == group]
        assert names == [RMS, SPHERE, TANGENT][: len(names)] and len(names) >= 2
        assert settings[f"{group} / {RMS}"] == {
            "model": {"norm": "rms"},
            "optimizer": {"weight_decay": 0.1},
            "warmup": 0.05,
            "share": share,
        }
        assert settings[f"{group} / {SPHERE}"] == {
            "model": {"norm": "none", "residual": "sphere"},
            "optimizer": {},
            "warmup": 0.0,
            "share": share,
        }
    plain, tangent = (settings[f"{WHOLE} / {name}"] for name in (SPHERE, TANGENT))
    assert tangent == {**plain, "optimizer": {"options": {"mode": "tangent"}}}
    configs = {arm.name: config(arm, STUDY.full, 96) for arm in STUDY.arms}
    changed = replace(configs[RMS], norm="none", residual="sphere")
    assert changed == configs[SPHERE] == configs[TANGENT] != configs[RMS]
    assert {each.init_std for each in configs.values()} == {64**-0.5}


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
