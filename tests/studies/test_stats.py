"""Intervals against tables and scipy, and how often they hold what they should."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from gaugekit.studies.stats import Interval, interval, paired

INF = math.inf


def excludes(found: Interval, value: float) -> bool:
    return not found.low <= value <= found.high


def test_three_values_by_hand() -> None:
    """Student's quantile for two degrees of freedom is 4.302653 (0.975)."""
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert (found.low, found.high) == pytest.approx((2 - found.half, 2 + found.half))


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_against_scipy(n: int) -> None:
    values = np.random.default_rng(n).normal(3.0, 2.0, n)
    low, high = scipy_stats.t.interval(0.95, n - 1, values.mean(), scipy_stats.sem(values))
    found = interval(values.tolist())
    assert (found.low, found.high) == pytest.approx((low, high))
    others = values + np.random.default_rng(n + 100).normal(1.0, 0.1, n)
    difference = paired(others.tolist(), values.tolist())
    test = scipy_stats.ttest_rel(others, values).confidence_interval(0.95)
    assert (difference.low, difference.high) == pytest.approx((test.low, test.high))


def test_they_hold_the_mean_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    held = sum(not excludes(interval(generator.normal(1.0, 1.0, 3).tolist()), 1.0) for _ in range(4000))
    assert 0.95 * 4000 - 4 * math.sqrt(4000 * 0.95 * 0.05) < held < 0.95 * 4000 + 4 * math.sqrt(4000 * 0.95 * 0.05)


def test_what_seeds_share_drops_out() -> None:
    first, second = [1.0, 5.0, 9.0], [0.9, 4.91, 8.89]
    assert not excludes(interval(first), interval(second).mean)
    assert excludes(paired(first, second), 0.0) and paired(first, second).mean == pytest.approx(0.1)


def test_one_value_has_no_width() -> None:
    found = interval([2.0])
    assert (found.mean, found.half, found.low, found.high) == (2.0, INF, -INF, INF)
    assert not excludes(found, 1e9)


@pytest.mark.parametrize("bad", [[INF], [math.nan], [-INF], [INF, -INF]])
def test_what_is_not_finite_says_nothing(bad: list[float]) -> None:
    found = interval([1.0, *bad, 2.0])
    assert (found.mean, found.half) == (INF, INF)
    assert not excludes(found, 0.0)
    assert found.text() == "broke off"


def test_an_arm_that_broke_off_is_worse() -> None:
    whole, broken = [1.0, 2.0], [1.0, INF]
    assert paired(whole, broken) == Interval(-INF, 0.0)
    assert paired(broken, whole) == Interval(INF, 0.0)
    assert paired(whole, broken).high < 0 < paired(broken, whole).low
    assert paired(whole, broken).text(unit=" %") == "the other broke off"
    assert paired(broken, whole).text(unit=" %") == "broke off"


def test_of_two_arms_that_broke_off_nothing_is_said() -> None:
    """Also where they did in different runs."""
    for first, second in (([1.0, INF], [1.0, INF]), ([INF, 1.0], [1.0, math.nan])):
        found = paired(first, second)
        assert math.isnan(found.mean) and (found.half, found.low, found.high) == (INF, -INF, INF)
        assert found.text(unit=" %", signed=True) == "both broke off"


def test_pairs_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired([1.0, 2.0], [1.0])


def test_percent() -> None:
    assert Interval(0.5, 0.25).percent() == Interval(50.0, 25.0)
    assert Interval(0.5, 0.25).percent(of=2.0) == Interval(25.0, 12.5)
    assert Interval(0.5, INF).percent(of=2.0) == Interval(25.0, INF)
    for broken in (Interval(INF, 0.0), Interval(-INF, 0.0), Interval(math.nan, INF)):
        assert broken.percent(of=INF) is broken


def test_text() -> None:
    assert Interval(1.23456, 0.00123).text() == "1.235 ± 0.001"
    assert Interval(1.23456, 0.00123).text(1) == "1.2 ± 0.0"
    assert Interval(-0.5, INF).text() == "-0.500"
    assert Interval(1.23456, 0.1).text(2, " %", signed=True) == "+1.23 ± 0.10 %"
    assert Interval(-1.23456, INF).text(2, " %", signed=True) == "-1.23 %"
