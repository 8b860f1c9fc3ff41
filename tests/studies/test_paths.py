"""Paths from equivalent starts: the rule, the starts, and what is measured on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from drawn import normal
from torch import nn

from gaugekit.models.pairs import pairs
from gaugekit.optim.pairs import Pair
from gaugekit.studies.paths import (
    ADAM,
    CONDITION,
    DRAWN,
    FACTOR,
    GAUGES,
    MOVED,
    QUOTIENT_ADAM,
    QUOTIENT_SGD,
    SGD,
    STUDY,
    UNBALANCED,
    apart,
    move,
    moved,
    parting,
    run,
    spread,
)
from gaugekit.studies.study import Arm, ArmResult, Budget, Measured, Result
from gaugekit.training.config import ModelConfig
from gaugekit.training.decoder import Decoder

QUOTIENT = (QUOTIENT_ADAM, QUOTIENT_SGD)
TINY = Budget(8, (1.0,), (0,), options={"width": 16, "layers": 1, "heads": 2, "context": 12, "batch": 3, "held_out": 1})
BROKEN: Measured = {"failed": "the loss is nan"}


def made_up(held_out: float, distance: float, **starts: Any) -> Measured:
    path = {"seconds": 1.0, "curve": [(1, 3.0), (2, held_out)]}
    each = {DRAWN: {**path, "held_out": held_out, "charges": [(0, 0.0), (1, 0.2), (2, 0.1)]}}
    each |= {start: {**path, "held_out": held_out + distance, "apart": distance} for start in MOVED}
    return {"held_out": held_out, "seconds": 1.0, "starts": each | starts}


def result(quotient: list[Measured], adam: list[Measured]) -> Result:
    def arm(each: Arm) -> ArmResult:
        return ArmResult(each, {"1": 2.0}, 1.0, False, tuple(quotient if each.name in QUOTIENT else adam))

    return Result(STUDY.name, False, STUDY.full, tuple(arm(each) for each in STUDY.arms), {})


def seeds(height: float, distance: float) -> list[Measured]:
    return [made_up(height + 0.001 * i * i, distance * (1 + i)) for i in range(5)]


@pytest.mark.parametrize(
    ("quotient", "adam", "verdict"),
    [
        (seeds(2.0, 1e-13), seeds(2.1, 0.1), "confirmed"),
        (seeds(2.0, 1e-13), seeds(2.0, 0.1), "not confirmed"),  # a tie
        (seeds(2.2, 1e-13), seeds(2.1, 0.1), "not confirmed"),
        (seeds(2.0, 0.02), seeds(2.1, 0.1), "not confirmed"),  # depends on the gauge
        (seeds(2.0, 1e-13), seeds(2.1, 1e-4), "not confirmed"),  # so does nothing
        (seeds(2.0, 1e-4), seeds(2.1, 0.1), "inconclusive"),
        (seeds(2.0, 1e-13), seeds(2.1, 4e-3), "inconclusive"),  # AdamW in some seeds only
        (seeds(2.0, 1e-13), [made_up(2.0 + 0.05 * i, 0.1) for i in range(5)], "inconclusive"),
        (seeds(2.0, 1e-13), [BROKEN, *seeds(2.1, 0.1)[1:]], "confirmed"),
        (seeds(2.0, 1e-13), [BROKEN] * 5, "inconclusive"),  # where would its paths have gone?
        ([BROKEN] * 5, seeds(2.1, 0.1), "not confirmed"),
        ([BROKEN] * 5, [BROKEN] * 5, "inconclusive"),
    ],
)
def test_each_verdict_can_come_out(quotient: list[Measured], adam: list[Measured], verdict: str) -> None:
    found = STUDY.conclude(result(quotient, adam))
    assert found.verdict == verdict
    assert "(a)" in found.line and "(b)" in found.line and "broke off nats" not in found.line
    assert "by broke off" not in found.line and "at most broke off" not in found.line
    assert all(len(row) == len(table.columns) for table in found.tables for row in table.rows)
    plt.close(STUDY.draw(result(quotient, adam)))


def test_one_start_that_breaks_off_is_far_apart() -> None:
    some = [*seeds(2.0, 1e-13)[1:], made_up(2.0, 1e-13, **{UNBALANCED: BROKEN})]
    assert STUDY.conclude(result(some, seeds(2.1, 0.1))).verdict == "not confirmed"
    plt.close(STUDY.draw(result(some, seeds(2.1, 0.1))))


def test_words_of_what_broke_off() -> None:
    """Of one optimizer, of the other, and of both."""
    good, bad, last = seeds(2.0, 1e-13), [BROKEN] * 5, "less QuotientAdam's: "
    for quotient, adam, words in (
        (good, seeds(2.1, 0.1), last + "0.100 ± 0.000 nats"),
        (good, bad, last + "broke off"),
        (bad, good, last + "the other broke off"),
        (bad, bad, last + "both broke off"),
    ):
        assert STUDY.conclude(result(quotient, adam)).line.endswith(words)
    line = STUDY.conclude(result([*good[1:], BROKEN], bad)).line
    assert "QuotientAdam parts by 2.0e-13 to 5.0e-13 nats (broke off in 1 of 5 seeds)" in line
    assert "AdamW broke off in every seed" in line
    assert parting([0.25, 0.5]) == "parts by 0.25 to 0.50 nats"


def test_quotient_sgd_decides_nothing_and_says_nothing_at_an_edge() -> None:
    good = result(seeds(2.0, 1e-13), seeds(2.1, 0.1))

    def changed(**changes: Any) -> Result:
        return replace(good, arms=tuple(replace(a, **changes) if a.arm.name == QUOTIENT_SGD else a for a in good.arms))

    assert STUDY.conclude(good).tables[0].rows[2][2] == "confirmed"
    for worse in (seeds(3.0, 0.1), [BROKEN] * 5):  # its path depends on the gauge, and it ends above; it broke off
        found = STUDY.conclude(changed(runs=tuple(worse)))
        assert found.verdict == "confirmed" and found.tables[0].rows[2][2] == "not confirmed"
    for name in (QUOTIENT_SGD, SGD):
        arms = tuple(replace(each, at_edge=each.arm.name == name) for each in good.arms)
        found = STUDY.conclude(replace(good, arms=arms))
        assert found.tables[0].rows[2][2] == "a rate at the edge"
        assert found.verdict == "confirmed" and found.tables[0].rows[1][2] == "confirmed"


def test_distances_and_spreads() -> None:
    runs = [made_up(2.0, 0.25), made_up(1.0, 0.125, **{GAUGES[0]: {"held_out": 0.5, "apart": 3.0}})]
    arm = ArmResult(STUDY.arms[0], {}, 1.0, False, tuple(runs))
    assert apart(arm) == [0.25, 3.0]
    assert apart(arm, (UNBALANCED,)) == [0.25, 0.125]
    assert spread(arm, (DRAWN, *GAUGES)) == [0.25, 0.625]


def decoder(seed: int) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(ModelConfig(vocab=11, context=8, width=16, layers=2, heads=2, init_std=0.3))
    return model.double()


@pytest.mark.parametrize("start", MOVED)
@pytest.mark.parametrize("seed", [0, 1])
def test_starts_are_one_function_of_other_weights(start: str, seed: int) -> None:
    tokens = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(seed))
    plain, other = decoder(seed), decoder(seed)
    move(pairs(other), start, seed)
    assert (plain(tokens) - other(tokens)).abs().max() < 1e-12
    for pair, elsewhere in zip(pairs(plain), pairs(other), strict=True):
        for (a, b), (a_there, b_there) in zip(pair.factors(), elsewhere.factors(), strict=True):
            ratio = torch.linalg.lstsq(a.mT, a_there.mT).solution  # S, transposed
            values = torch.linalg.svdvals(ratio)
            expected = 1.0 if start == UNBALANCED else CONDITION
            assert values[:, 0] / values[:, -1] == pytest.approx([expected] * len(a), rel=1e-9)
            if start == UNBALANCED:
                assert torch.allclose(a_there, FACTOR * a) and torch.allclose(b_there, b / FACTOR)


def test_the_two_gauges_differ_and_so_do_those_of_seeds() -> None:
    def weight(start: str, seed: int) -> torch.Tensor:
        model = decoder(0)
        move(pairs(model), start, seed)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    found = [weight(start, seed) for start in (DRAWN, *GAUGES) for seed in (0, 1)]
    assert torch.equal(found[0], found[1])
    for i, first in enumerate(found[1:]):
        assert all((first - second).abs().max() > 1e-2 for second in found[i + 2 :])


def test_drift_of_charges_is_what_it_says() -> None:
    a, b = (nn.Parameter(normal(3, 2, 5, seed=seed)) for seed in (1, 2))
    pair = Pair.of(a, b)
    origin = [pair.factors()]
    assert moved(origin, [pair]) == 0.0
    with torch.no_grad():
        a.mul_(2.0)
    before, after = (scale * a.detach() @ a.detach().mT / 4 for scale in (1, 4))
    other = b.detach() @ b.detach().mT
    size = (after + other).flatten(1).norm(dim=1)
    assert moved(origin, [pair]) == pytest.approx(float(((after - before).flatten(1).norm(dim=1) / size).max()))


@pytest.mark.parametrize("arm", STUDY.arms, ids=lambda arm: arm.name)
def test_a_run_sees_the_gauge_where_it_should(arm: Arm) -> None:
    """Within rounding for optimizers of the products, and for AdamW from balanced factors: unique, but for signs."""
    measured = run(arm, 1.0, 0, TINY)
    largest = max(measured["starts"][start]["apart"] for start in MOVED)
    assert (largest < 1e-10) == (arm.name in (*QUOTIENT, "AdamW, balanced first")), largest
    assert largest < 1e-10 or largest > 1e-5
    charges = measured["starts"][DRAWN]["charges"]
    assert charges[0] == (0, 0.0) and charges[-1][1] > 0
    assert measured["held_out"] == measured["starts"][DRAWN]["held_out"]


def test_rates_are_tuned_as_drawn() -> None:
    arm = next(arm for arm in STUDY.arms if arm.name == QUOTIENT_ADAM)
    tuned, reported = (run(arm, 1.0, 0, budget) for budget in (replace(TINY, tuning=(5, 0)), TINY))
    assert list(tuned["starts"]) == [DRAWN] and list(reported["starts"]) == [DRAWN, *MOVED]
    assert tuned["starts"][DRAWN]["charges"] == reported["starts"][DRAWN]["charges"]  # the same path
    assert tuned["held_out"] != reported["held_out"]  # on other text


def test_the_rate_is_a_multiple_of_the_base() -> None:
    arm = next(arm for arm in STUDY.arms if arm.name == ADAM)
    half = Arm(ADAM, {**arm.settings, "base": arm.settings["base"] / 2})
    budget = replace(TINY, tuning=(0,))
    assert run(arm, 1.0, 0, budget)["held_out"] == run(half, 2.0, 0, budget)["held_out"]
    assert run(arm, 1.0, 0, budget)["held_out"] != run(half, 1.0, 0, budget)["held_out"]
