"""Without normalization: the rule, what arms share, and the learned number behind the embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import matplotlib.pyplot as plt
import pytest
import torch

from gaugekit.studies.fitting import made, sized
from gaugekit.studies.study import Arm, ArmResult, Budget, Measured, Result
from gaugekit.studies.without_normalization import (
    DERF,
    DYT,
    LAYER,
    NORMS,
    PLAIN,
    SCALED,
    STUDY,
    best,
    built,
    excess,
    percent,
    run,
)

TINY = Budget(
    4,
    (1e-2,),
    (0,),
    options={"width": 16, "layers": 1, "heads": 2, "context": 12, "batch": 3, "init_std": 0.25, "held_out": 1},
)
BROKEN: Measured = {"failed": "the loss is nan"}


def made_up(held_out: float) -> Measured:
    numbers = {"held_out": held_out, "training": held_out, "seconds": 1.0, "parameters": 9}
    return {**numbers, "curve": [(i, 3.0 - i / 10) for i in range(8)], "alphas": [0.9, 1.1]}


def result(
    noise: float = 0.001,
    shares: Mapping[str, float] = MappingProxyType({}),
    broken: tuple[str, ...] = (),
    tuning: Mapping[str, float] = MappingProxyType({}),
) -> Result:
    """`shares`: excess over LayerNorm by name; `tuning`: loss at the seed for tuning by key, 2 for others."""
    arms = []
    for arm in STUDY.arms:
        heights = [2.0 + 0.1 * seed for seed in range(5)]
        share = 1 + shares.get(arm.name, 0.0)
        runs = [made_up(height * share + noise * (-1) ** seed * seed) for seed, height in enumerate(heights)]
        metric = {"0.01": tuning.get(arm.key, 2.0), "0.1": math.inf}
        arms.append(ArmResult(arm, metric, 0.01, False, tuple([BROKEN] * 5 if arm.name in broken else runs)))
    return Result(STUDY.name, False, STUDY.full, tuple(arms), {})


@pytest.mark.parametrize(
    ("dyt", "derf", "noise", "verdict"),
    [
        (0.003, -0.02, 0.001, "confirmed"),
        (0.05, 0.02, 0.001, "not confirmed"),
        (0.05, 0.0, 0.001, "inconclusive"),  # one of them
        (0.01, 0.01, 0.001, "inconclusive"),
        (0.05, 0.02, 0.0, "not confirmed"),
    ],
)
def test_each_verdict_can_come_out(dyt: float, derf: float, noise: float, verdict: str) -> None:
    found = result(noise, {DYT: dyt, DERF: derf})
    said = STUDY.conclude(found)
    assert said.verdict == verdict
    assert DYT in said.line and DERF in said.line
    assert all(len(row) == len(table.columns) for table in said.tables for row in table.rows)
    plt.close(STUDY.draw(found))


def test_noise_says_nothing() -> None:
    found = result(0.0, {DYT: 0.0, DERF: 0.0})
    noisy = [
        ArmResult(a.arm, a.tuning, a.rate, False, a.runs[::-1] if a.arm.name in (DYT, DERF) else a.runs)
        for a in found.arms
    ]
    assert STUDY.conclude(found).verdict == "confirmed"
    assert STUDY.conclude(Result(found.study, False, found.budget, tuple(noisy), {})).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("broken", "verdict", "words"),
    [
        ((DYT, DERF), "not confirmed", "DyT broke off (worse), Derf broke off (worse), none +0.0 ± 0.0 % (as well)"),
        (
            (LAYER,),
            "confirmed",
            "DyT the other broke off (as well), Derf the other broke off (as well), none the other",
        ),
        ((LAYER, DYT, DERF), "inconclusive", "DyT both broke off (open), Derf both broke off (open), none the other"),
        (("none",), "confirmed", "DyT +0.0 ± 0.0 % (as well), Derf +0.0 ± 0.0 % (as well), none broke off (worse)"),
    ],
)
def test_runs_that_broke_off(broken: tuple[str, ...], verdict: str, words: str) -> None:
    found = result(broken=broken)
    said = STUDY.conclude(found)
    assert said.verdict == verdict
    assert said.line.startswith(f"held-out loss against LayerNorm's, 1 % allowed: {words}")
    plt.close(STUDY.draw(found))


def test_the_embedding_is_chosen_at_the_seed_for_tuning() -> None:
    found = result(tuning={f"{SCALED} / {DYT}": 1.9, f"{PLAIN} / {DERF}": 1.9})
    assert best(found, DYT).arm.group == SCALED
    assert best(found, DERF).arm.group == PLAIN


def test_excess_is_a_share() -> None:
    found = result(0.0, {DYT: 0.03})
    interval = excess(best(found, DYT), best(found, LAYER))
    assert interval.mean == pytest.approx(math.log(1.03)) and interval.half < 1e-12
    assert percent(interval) == "+3.0 ± 0.0 %"


def count(arm: Arm, budget: Budget) -> int:
    return sum(p.numel() for p in built(arm, 0, budget, 96).parameters())


def test_parameters_are_equal() -> None:
    sizes = [count(arm, STUDY.full) for arm in STUDY.arms]
    assert max(sizes) / min(sizes) - 1 < 0.01
    assert len(set(sizes)) > 1


def test_arms_differ_in_the_norm_alone() -> None:
    """All other weights start the same, and are of the same names."""
    for group in (PLAIN, SCALED):
        arms = [arm for arm in STUDY.arms if arm.group == group]
        assert [arm.name for arm in arms] == list(NORMS)
        first, *others = (dict(built(arm, 3, TINY, 11).named_parameters()) for arm in arms)
        shared = {name for name in first if "norm" not in name}
        for other in others:
            assert {name for name in other if "norm" not in name} == shared
            assert all(torch.equal(first[name], other[name]) for name in shared)


def test_the_number_behind_the_embedding() -> None:
    """√d at the start, learned, and nothing else about the model."""
    plain, scaled = (next(a for a in STUDY.arms if (a.name, a.group) == (DYT, group)) for group in (PLAIN, SCALED))
    first, second = (built(arm, 1, TINY, 11) for arm in (plain, scaled))
    tokens = torch.arange(11).unsqueeze(0)
    assert torch.allclose(second.embedding(tokens), 4.0 * first.embedding(tokens))
    assert count(scaled, TINY) == count(plain, TINY) + 1
    second(tokens).sum().backward()
    gain = dict(second.named_parameters())["embedding.gain"]
    assert gain.grad is not None and gain.grad != 0
    config = sized(TINY, 11, positions="rotary", **plain.settings["model"])
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), made(config, 1).parameters(), strict=True))


@pytest.mark.parametrize("arm", STUDY.arms, ids=lambda arm: arm.key)
def test_a_run_tells_its_alphas(arm: Arm) -> None:
    measured = run(arm, 1e-2, 0, TINY)
    assert math.isfinite(measured["held_out"])
    assert len(measured["alphas"]) == (3 if arm.name in (DYT, DERF) else 0)
    assert any(alpha != 1.0 for alpha in measured["alphas"]) == (arm.name in (DYT, DERF))
