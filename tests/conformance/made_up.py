"""A study that trains nothing: its metric is a known function of rate and seed. Other processes find it here."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from gaugekit.errors import TrainingError
from gaugekit.studies.figures import COLOURS, curve, panels
from gaugekit.studies.study import Arm, Budget, Conclusion, Measured, Result, Study, Table

RATES = (0.01, 0.1, 1.0)


def run(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
    """`best` is the rate of the least loss; from `breaks` on runs break off, and those of `seed_breaks` always."""
    if rate >= arm.settings.get("breaks", math.inf) or seed in arm.settings.get("seed_breaks", ()):
        raise TrainingError(f"the loss is nan at step {seed}")
    if arm.settings.get("bug"):
        raise ZeroDivisionError("a bug")
    loss = arm.settings["height"] + math.log10(rate / arm.settings["best"]) ** 2 + 0.01 * seed
    return {"loss": loss, "curve": [(1, loss + 1), (2, loss)], "threads": torch.get_num_threads(), "grid": budget.rates}


def untrained(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
    """At the best rate, for studies without rates."""
    return run(arm, arm.settings["best"], seed, budget)


def conclude(result: Result) -> Conclusion:
    rows = tuple((a.arm.key, f"{a.values('loss')[0]:.2f}", "a|b <c>") for a in result.arms)
    return Conclusion("inconclusive", "nothing was [asked]", (Table("Losses", ("arm", "loss", "note"), rows),))


def draw(result: Result) -> Any:
    figure, axes = panels(1)
    for arm, colour in zip(result.arms, COLOURS, strict=False):
        curve(axes[0, 0], arm, colour)
    return figure


STUDY = Study(
    name="made_up",
    title="A parabola",
    question="Parabolas have a lowest point.",
    source="Apollonius of Perga",
    setting="A function.",
    equal="all of it",
    metric="loss",
    not_tested="Hyperbolas.",
    arms=(
        Arm("inside", {"best": 0.1, "height": 1.0}, "first"),
        Arm("edge", {"best": 3.0, "height": 2.0}, "first"),
        Arm("breaks", {"best": 0.1, "height": 3.0, "breaks": 0.1}, "second"),
        Arm("seed", {"best": 0.1, "height": 4.0, "seed_breaks": [2]}, "second"),
        Arm("never", {"best": 0.1, "height": 4.0, "breaks": 0.0}, "second"),
    ),
    full=Budget(steps=2, rates=RATES, seeds=(1, 2, 3), options={"width": 4}),
    quick=Budget(steps=1, rates=RATES[:2], seeds=(1,)),
    run=run,
    conclude=conclude,
    draw=draw,
)


def strict(text: str) -> Any:
    """JSON without infinities."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)
