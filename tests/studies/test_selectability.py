"""Averaging and selectability: that each verdict can come out, of each claim, and what is alike in the arms."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest

from gaugekit.studies.majority import BATCH
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
    times,
)
from gaugekit.studies.stats import Interval
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
        (FASTER | {SCALING: [BROKEN, learnt(90.0), learnt(80.0)]}, "inconclusive"),  # worse, but not by the steps
        (FASTER | {NEITHER: [BROKEN] * 3}, "inconclusive"),
        (FASTER | {BOTH: [BROKEN, learnt(40.0), learnt(40.0)]}, "not confirmed"),
    ],
)
def test_averaging(majority: dict[str, list[Measured]], verdict: str) -> None:
    found = result(majority, HELD)
    assert averages(found)[0] == verdict
    conclusion = STUDY.conclude(found)
    assert conclusion.verdict == verdict
    assert ("broke off" in conclusion.line) == any(BROKEN in runs for runs in majority.values())
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
        (HELD | {NEITHER: [BROKEN, read(0.4), read(0.41), read(0.4)]}, "inconclusive"),
        (HELD | {BOTH: [BROKEN, read(0.0), read(0.0)]}, "inconclusive"),
        (HELD | {NEITHER: [BROKEN, read(0.01), read(0.011), read(0.01)]}, "not confirmed"),
    ],
)
def test_selectability(language: dict[str, list[Measured]], verdict: str) -> None:
    found = result(FASTER, language)
    assert selects(found)[0] == verdict
    conclusion = STUDY.conclude(found)
    assert conclusion.verdict == verdict
    assert all(len(row) == len(table.columns) for table in conclusion.tables for row in table.rows)


def test_words_of_what_was_not_reached() -> None:
    """By one of a pair, by the other, by both; and of a single seed, which has no interval."""
    never = (None, None, None)
    for majority, words in (
        (steps(FAST, never, FAST, SLOW), "over without: reached in every run only with it among scaled"),
        (steps(never, SLOW, FAST, SLOW), "over without: reached in every run only without it among scaled"),
        (steps(never, never, FAST, SLOW), "over without: not reached in every run by either among scaled"),
        (steps((50.0,), (100.0,), (25.0,), (100.0,)), "over without: 0.50 among scaled norms, 0.25 among others"),
    ):
        assert words in averages(result(majority, HELD))[1]
    assert times(Interval(-1.0, 1.0)) == "0.50 (0.25 to 1.00)"


def test_shares_are_told_in_percent_and_what_broke_off_is_not() -> None:
    found = STUDY.conclude(result(FASTER, keys(0.0, 0.4, 0.3) | {NEITHER: [BROKEN] * 3})).tables[1]
    at_end = {row[0]: row[4] for row in found.rows}
    assert found.columns[4] == "inputs at the end"
    assert at_end[PROJECTION] == "30.0 ± 3.7" and at_end[NEITHER] == "broke off"  # of layers with 40 and 20 %


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


def test_the_setting_says_the_sizes() -> None:
    o = STUDY.full.options
    for words in (
        f"in {o['majority_steps']} steps of {BATCH} sequences",
        f"the mean of {o['models']} models",
        f"of {o['layers']} layers, width {o['width']} and {o['heads']} heads",
        f"reads {o['context']} characters",
        f"in {STUDY.full.steps} steps of {o['batch']} windows",
    ):
        assert words in STUDY.setting, words


def test_models_of_different_seeds_share_none() -> None:
    models, seeds = STUDY.full.options["models"], (*STUDY.full.seeds, *STUDY.full.tuning)
    drawn = [seed * models + i for seed in seeds for i in range(models)]
    assert len(set(drawn)) == len(drawn)
