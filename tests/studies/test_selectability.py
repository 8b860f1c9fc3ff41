"""Averaging and selectability: that each verdict can come out, of each claim, and what is alike in the arms."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest

from gaugekit.studies.selectability import (
    BOTH,
    LANGUAGE,
    MAJORITY,
    NEITHER,
    PROJECTION,
    SCALING,
    STUDY,
    averages,
    selects,
)
from gaugekit.studies.study import ArmResult, Measured, Result

BROKEN: Measured = {"failed": "the loss is nan"}
Steps = tuple[float | None, ...]


def learnt(steps: float | None) -> Measured:
    curve = [[0, 0.1], [10, 0.9]]
    return {"score": 0.5, "accuracy": 0.97, "to_goal": steps, "evenness": 0.99, "parameters": 576, "curve": curve}


def read(share: float, head: float = 0.95) -> Measured:
    layers = {"inputs": [share, share / 2], "unscaled": [0.3, 0.2], "heads": [head, head]}
    return {"score": 2.4, "before": layers, "after": layers}


def result(majority: dict[str, list[Measured]], language: dict[str, list[Measured]]) -> Result:
    runs = {MAJORITY: majority, LANGUAGE: language}
    arms = tuple(ArmResult(arm, {"0.01": 1.0}, 0.01, False, tuple(runs[arm.group][arm.name])) for arm in STUDY.arms)
    return Result(STUDY.name, False, STUDY.full, arms, {})


def steps(both: Steps, scaling: Steps, projection: Steps, neither: Steps) -> dict[str, list[Measured]]:
    given = {BOTH: both, SCALING: scaling, PROJECTION: projection, NEITHER: neither}
    return {name: [learnt(each) for each in values] for name, values in given.items()}


def keys(scaled: float, projection: float, neither: float) -> dict[str, list[Measured]]:
    given = {BOTH: scaled, SCALING: 0.0, PROJECTION: projection, NEITHER: neither}
    return {name: [read(share * factor) for factor in (0.95, 1.0, 1.05)] for name, share in given.items()}


SLOW, FAST = (100.0, 110.0, 95.0), (50.0, 56.0, 49.0)
FASTER = steps(FAST, SLOW, FAST, SLOW)
HELD = keys(0.0, 0.4, 0.3)


@pytest.mark.parametrize(
    ("majority", "verdict"),
    [
        (FASTER, "confirmed"),
        (steps(SLOW, SLOW, FAST, SLOW), "not confirmed"),  # no difference among scaled norms
        (steps(FAST, SLOW, SLOW, FAST), "not confirmed"),
        (steps((80.0, 110.0, 70.0), SLOW, FAST, SLOW), "inconclusive"),
        (steps(FAST, (None, None, None), FAST, (100.0, None, 90.0)), "confirmed"),
        (steps((None, None, None), SLOW, FAST, SLOW), "not confirmed"),
        (steps((None, None, None), (None, 90.0, None), FAST, SLOW), "inconclusive"),
    ],
)
def test_averaging(majority: dict[str, list[Measured]], verdict: str) -> None:
    found = result(majority, HELD)
    assert averages(found)[0] == verdict
    conclusion = STUDY.conclude(found)
    assert conclusion.verdict == verdict
    assert f"Averaging, {verdict}" in conclusion.line and "Selectability, confirmed" in conclusion.line
    assert all(len(row) == len(table.columns) for table in conclusion.tables for row in table.rows)


@pytest.mark.parametrize(
    ("language", "verdict"),
    [
        (HELD, "confirmed"),
        (keys(0.05, 0.4, 0.3), "not confirmed"),  # some keys cannot be selected with scaling
        (keys(0.0, 0.4, 0.01), "not confirmed"),  # hardly one cannot without
        (keys(0.005, 0.4, 0.3), "inconclusive"),
        (keys(0.0, 0.4, 0.067), "inconclusive"),
        (HELD | {NEITHER: [BROKEN] * 3}, "inconclusive"),
        (HELD | {NEITHER: [BROKEN, BROKEN, read(0.4)]}, "inconclusive"),  # one run is too few
        (HELD | {NEITHER: [BROKEN, read(0.4), read(0.41), read(0.4)]}, "confirmed"),
    ],
)
def test_selectability(language: dict[str, list[Measured]], verdict: str) -> None:
    found = result(FASTER, language)
    assert selects(found)[0] == verdict
    conclusion = STUDY.conclude(found)
    assert conclusion.verdict == verdict
    assert all(len(row) == len(table.columns) for table in conclusion.tables for row in table.rows)


def test_both_claims_make_the_verdict() -> None:
    slower, undecided = steps(SLOW, FAST, SLOW, FAST), keys(0.005, 0.4, 0.3)
    assert STUDY.conclude(result(slower, undecided)).verdict == "not confirmed"
    assert STUDY.conclude(result(slower, HELD)).verdict == "not confirmed"


def test_the_figure_is_drawn_also_of_runs_that_broke_off() -> None:
    broken = result(FASTER | {SCALING: [BROKEN] * 3}, HELD | {PROJECTION: [BROKEN] * 3, NEITHER: [read(0.3)]})
    for found in (result(FASTER, HELD), broken):
        plt.close(STUDY.draw(found))
        assert STUDY.conclude(found).line


def test_arms_of_a_group_differ_in_one_thing_each() -> None:
    for group in (MAJORITY, LANGUAGE):
        arms = {arm.name: arm.settings for arm in STUDY.arms if arm.group == group}
        for name, other in ((BOTH, SCALING), (BOTH, PROJECTION), (NEITHER, SCALING), (NEITHER, PROJECTION)):
            assert sum(arms[name][key] != arms[other][key] for key in ("project", "scale")) == 1
            assert set(arms[name]) == {"project", "scale"}


def test_models_of_different_seeds_share_none() -> None:
    models, seeds = STUDY.full.options["models"], (*STUDY.full.seeds, STUDY.full.tuning)
    drawn = [seed * models + i for seed in seeds for i in range(models)]
    assert len(set(drawn)) == len(drawn)
