"""Optimizers from starts that are one function: does the path depend on the coordinates, and who gets furthest?

Rule, fixed before the reported runs; trials at other seeds chose the rates. Two claims, and one verdict of both:
confirmed if both hold, not confirmed if one fails, else inconclusive.

(a) The losses of all steps are compared with those from the start as drawn. It holds if QuotientAdam stays within
    `SAME` of them from every other start in every seed, and AdamW parts by more than `APART` from all of them in every
    seed. It fails if QuotientAdam parts by more than `APART` anywhere, or AdamW nowhere. A run that broke off as drawn
    has no path to be compared with, and is left out; from elsewhere, it is infinitely far. Half of this is algebra: the
    steps of QuotientAdam are functions of the products, so that only rounding and mistakes could part its paths. How
    far AdamW's part is what is measured.
(b) Held-out loss from the start as drawn, AdamW's less QuotientAdam's, seed by seed. It holds if the 95 % interval lies
    above `GAIN`, and fails if it lies below. A run that broke off counts as infinite.

The same as (b) of QuotientSGD and SGD is shown and decides nothing; it has no verdict where one of the two rates is the
least or largest of the grid.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from gaugekit.errors import TrainingError
from gaugekit.models.pairs import pairs
from gaugekit.optim.horizontal import Tangent, drift
from gaugekit.optim.pairs import Pair, balance_, scramble_
from gaugekit.studies.figures import COLOURS, panels
from gaugekit.studies.fitting import SIZE, Task, fit, language, made, sized, thinned
from gaugekit.studies.stats import Interval, interval, paired
from gaugekit.studies.study import Arm, ArmResult, Budget, Conclusion, Measured, Result, Study, Table, Verdict
from gaugekit.training.config import OptimizerConfig
from gaugekit.training.optimizers import make

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SAME = 1e-6
"""Nats: float64's rounding, carried along some hundred steps."""

APART = 1e-2
"""Nats, of the largest difference between two losses of one step."""

GAIN = 1e-2
"""Nats of held-out loss: less is not worth an optimizer."""

CONDITION, FACTOR = 10.0, 10.0
DRAWN, UNBALANCED = "as drawn", "unbalanced"
GAUGES = ("gauge 1", "gauge 2")
MOVED = (*GAUGES, UNBALANCED)

SHOWN = 1
"""The seed whose curves are kept, for the figure."""

ADAM, QUOTIENT_ADAM = "AdamW", "QuotientAdam"
SGD, QUOTIENT_SGD = "SGD, momentum", "QuotientSGD, momentum"

ARMS = (
    Arm(ADAM, {"optimizer": "adamw", "base": 2e-3}),
    Arm("AdamW, balanced first", {"optimizer": "adamw", "base": 2e-3, "balanced": True}),
    Arm("Horizontal(AdamW)", {"optimizer": "horizontal_adamw", "base": 2e-3}),
    Arm(QUOTIENT_ADAM, {"optimizer": "quotient_adam", "base": 2e-3}),
    Arm("Muon", {"optimizer": "muon", "base": 1.6e-2, "momentum": 0.95}),
    Arm("Horizontal(Muon)", {"optimizer": "horizontal_muon", "base": 1.6e-2, "momentum": 0.95}),
    Arm(SGD, {"optimizer": "sgd", "base": 3e-2, "momentum": 0.9}),
    Arm(QUOTIENT_SGD, {"optimizer": "quotient_sgd", "base": 3e-2, "momentum": 0.9}),
)


def run(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
    """The path from the start as drawn and, but for seeds that choose the rate, from the others: held-out loss, and the
    largest difference of losses to the first path. A start other than the first that breaks off has "failed"."""
    task = language(budget, seed)
    first = path(arm, rate, seed, budget, task, DRAWN)
    losses = first.pop("losses")
    starts: dict[str, Measured] = {DRAWN: first}
    for start in () if seed in budget.tuning else MOVED:
        try:
            measured = path(arm, rate, seed, budget, task, start)
        except TrainingError as error:
            starts[start] = {"failed": str(error)}
            continue
        measured["apart"] = max(abs(a - b) for a, b in zip(measured.pop("losses"), losses, strict=True))
        starts[start] = measured
    return {"held_out": first["held_out"], "seconds": first["seconds"], "starts": starts}


def path(arm: Arm, rate: float, seed: int, budget: Budget, task: Task, start: str) -> Measured:
    """One training run, in float64, with all its losses. As drawn, `charges`: [steps, largest drift over heads]."""
    settings = dict(arm.settings)
    rate *= settings.pop("base")
    balanced = settings.pop("balanced", False)
    config = OptimizerConfig(settings.pop("optimizer"), lr=rate, **settings)
    model = made(sized(budget, task.vocab), seed, torch.float64)
    found = pairs(model)
    move(found, start, seed)
    charges: list[tuple[int, float]] = []
    origin: list[list[Tangent]] = []

    def optimizer(model: nn.Module) -> Optimizer:
        if balanced:
            balance_(found)
        return make(model, config)

    def watch(step: int, *_: object) -> None:
        if step == 0:
            origin.extend(pair.factors() for pair in found)
        if start == DRAWN and step % max(1, budget.steps // 10) == 0:
            charges.append((step, float(f"{moved(origin, found):.4g}")))

    # The norm of the whole gradient depends on the coordinates: clipping would, too.
    fitted = fit(model, optimizer, task, budget, seed, watch, clip=0.0)
    measured: Measured = {"held_out": fitted.held_out, "seconds": round(fitted.seconds, 3), "losses": fitted.losses}
    if charges:
        measured["charges"] = charges
    if seed == SHOWN:
        measured["curve"] = thinned(fitted.losses, 30)
    return measured


def move(found: list[Pair], start: str, seed: int) -> None:
    """To a start, in place: random gauges of condition `CONDITION`, or A → FACTOR · A, B → B / FACTOR."""
    if start in GAUGES:
        generator = torch.Generator().manual_seed(10 * seed + GAUGES.index(start))
        scramble_(found, generator, CONDITION)
    elif start == UNBALANCED:
        for pair in found:
            eyes = [torch.eye(a.shape[1], dtype=a.dtype).expand(len(a), -1, -1) for a, _ in pair.factors()]
            pair.move_([FACTOR * eye for eye in eyes])


def moved(origin: list[list[Tangent]], found: list[Pair]) -> float:
    return max(
        float(drift(before, after).max())
        for then, pair in zip(origin, found, strict=True)
        for before, after in zip(then, pair.factors(), strict=True)
    )


def of(arm: ArmResult, start: str, key: str) -> list[float]:
    """A number a seed; inf where that start, or the whole run, broke off."""
    runs = [run.get("starts", {}).get(start, {"failed": ""}) for run in arm.runs]
    return [math.inf if "failed" in run else float(run[key]) for run in runs]


def apart(arm: ArmResult, starts: tuple[str, ...] = MOVED) -> list[float]:
    """The largest distance from the path as drawn, over starts and steps: one number a seed."""
    return [max(each) for each in zip(*(of(arm, start, "apart") for start in starts), strict=True)]


def spread(arm: ArmResult, starts: tuple[str, ...]) -> list[float]:
    """Held-out losses at the end, the largest less the least of these starts: one number a seed."""
    ends = zip(*(of(arm, start, "held_out") for start in starts), strict=True)
    return [max(each) - min(each) if math.isfinite(max(each)) else math.inf for each in ends]


def independent(result: Result) -> Verdict:
    """Claim (a). Runs that broke off from the start as drawn say nothing about it."""
    distances: list[list[float]] = []
    for name in (QUOTIENT_ADAM, ADAM):
        arm = replace(result[name], runs=result[name].whole)
        distances.append([each for start in MOVED for each in of(arm, start, "apart")])
    quotient, adam = distances
    if not (quotient and adam):
        return "inconclusive"
    if max(quotient) > APART or max(adam) <= APART:
        return "not confirmed"
    return "confirmed" if max(quotient) <= SAME and min(adam) > APART else "inconclusive"


def gain(result: Result, better: str = QUOTIENT_ADAM, than: str = ADAM) -> Interval:
    return paired(of(result[than], DRAWN, "held_out"), of(result[better], DRAWN, "held_out"))


def lower(difference: Interval) -> Verdict:
    """Claim (b)."""
    if difference.low > GAIN:
        return "confirmed"
    return "not confirmed" if difference.high < GAIN else "inconclusive"


def conclude(result: Result) -> Conclusion:
    paths, difference = independent(result), gain(result)
    parts = paths, lower(difference)
    verdict: Verdict = "inconclusive"
    if "not confirmed" in parts:
        verdict = "not confirmed"
    elif parts == ("confirmed", "confirmed"):
        verdict = "confirmed"
    line = (
        f"(a) {paths}: from other starts QuotientAdam {parting(apart(result[QUOTIENT_ADAM]))}, AdamW "
        f"{parting(apart(result[ADAM]))}; (b) {parts[1]}: AdamW's held-out loss from the start as drawn less "
        f"QuotientAdam's: {difference.text(unit=' nats')}"
    )
    return Conclusion(verdict, line, (claims(result, paths), losses_table(result), paths_table(result)))


def parting(distances: list[float]) -> str:
    """How far from the path as drawn, of one number a seed."""
    found = [each for each in distances if math.isfinite(each)]
    if not found:
        return "broke off in every seed"
    words = f"parts by {small(min(found))} to {small(max(found))} nats"
    broken = len(distances) - len(found)
    return f"{words} (broke off in {broken} of {len(distances)} seeds)" if broken else words


def claims(result: Result, paths: Verdict) -> Table:
    rows = [("(a) QuotientAdam's path does not depend on the gauge, AdamW's does", "", str(paths))]
    rows.append(("(b) QuotientAdam ends below AdamW", gain(result).text(), lower(gain(result))))
    found = gain(result, QUOTIENT_SGD, SGD)
    edge = any(result[name].at_edge for name in (QUOTIENT_SGD, SGD))
    rows.append(
        ("(beside them) QuotientSGD ends below SGD", found.text(), "a rate at the edge" if edge else lower(found))
    )
    columns = ("claim", "held-out loss of the latter less that of the former", "holds")
    return Table("The claims, nats; the verdict is that of (a) and (b)", columns, tuple(rows))


def losses_table(result: Result) -> Table:
    rows = []
    for arm in result.arms:
        base = arm.arm.settings["base"]
        rate = f"{base:g} × {arm.told_rate}"
        ends = (interval(of(arm, start, "held_out")).text() for start in (DRAWN, *MOVED))
        rows.append((arm.arm.name, rate, *ends, interval(arm.values("seconds")).text(1)))
    names = (DRAWN, *(f"{gauge}, condition {CONDITION:g}" for gauge in GAUGES), f"A × {FACTOR:g}, B / {FACTOR:g}")
    columns = ("optimizer", "learning rate", *names, "CPU seconds")
    return Table("Held-out loss at the end, nats a character, by start; CPU seconds of one path", columns, tuple(rows))


def paths_table(result: Result) -> Table:
    rows = []
    for arm in result.arms:
        whole = arm.whole
        charges = max((run["starts"][DRAWN]["charges"][-1][1] for run in whole), default=math.inf)
        ends = spread(arm, (DRAWN, *GAUGES)), spread(arm, (DRAWN, UNBALANCED))
        numbers = (max(apart(arm, GAUGES)), max(apart(arm, (UNBALANCED,))), *map(max, ends), charges)
        rows.append((arm.arm.name, *map(small, numbers)))
    columns = (
        "optimizer",
        "apart, gauges",
        "apart, unbalanced",
        "spread, gauges",
        "spread, unbalanced",
        "drift of A Aᵀ − B Bᵀ",
    )
    title = (
        "Largest over seeds: difference of losses to the path as drawn, over all steps, and of held-out losses at the "
        "end, nats; drift over |A Aᵀ + B Bᵀ|, as drawn"
    )
    return Table(title, columns, tuple(rows))


def small(value: float) -> str:
    return "broke off" if not math.isfinite(value) else f"{value:.1e}" if value < 1e-2 else f"{value:.2f}"


KINDS = {
    DRAWN: ("o", "-", COLOURS[0]),
    GAUGES[0]: ("^", "--", COLOURS[4]),
    GAUGES[1]: ("v", ":", COLOURS[2]),
    UNBALANCED: ("x", "-.", COLOURS[1]),
}
"""Marker, line and colour of a start."""


def draw(result: Result) -> Figure:
    figure, axes = panels(3, 2, width=3.6, height=3.0)
    strips(axes[0, 0], axes[0, 1], result)
    drifts(axes[0, 2], result)
    for axis, name in zip(axes[1], (ADAM, QUOTIENT_ADAM, "Muon"), strict=True):
        for start, (_, style, colour) in KINDS.items():
            kept = (run["starts"][start].get("curve") for run in result[name].whole)
            points: Any = next(filter(None, kept), [])
            axis.plot([x for x, _ in points], [y for _, y in points], style, color=colour, linewidth=1.2, label=start)
        axis.set_title(f"{name}: loss of steps, nats, one seed", fontsize=8)
        axis.set_xlabel("step", fontsize=7)
        axis.legend(fontsize=6)
    return figure


def strips(ends: Axes, distance: Axes, result: Result) -> None:
    """A row an optimizer: where it ends, and how far from its path as drawn it goes; a mark for each seed and start."""
    for i, (start, (marker, _, colour)) in enumerate(KINDS.items()):
        for axis, key in ((ends, "held_out"), (distance, "apart")):
            if (start, key) == (DRAWN, "apart"):
                continue
            shown = [
                (value, row + (i - 1.5) / 6)
                for row, arm in enumerate(result.arms)
                for value in of(arm, start, key)
                if math.isfinite(value)
            ]
            x, y = [max(value, 1e-17) for value, _ in shown], [at for _, at in shown]
            axis.plot(x, y, marker, color=colour, markersize=3.5, alpha=0.7, label=start)
    distance.set_xscale("log")
    for value, style, text in ((SAME, ":", "the same"), (APART, "--", "apart")):
        distance.axvline(value, color="black", linestyle=style, linewidth=0.8, label=text)
    for axis, title in ((ends, "held-out loss at the end, nats"), (distance, "largest distance to the path as drawn")):
        axis.set_yticks(range(len(result.arms)), [arm.arm.name if axis is ends else "" for arm in result.arms])
        axis.set_ylim(len(result.arms) - 0.5, -0.5)
        axis.set_title(title, fontsize=8)
        axis.grid(axis="y", linewidth=0.3)
        axis.legend(fontsize=6)


def drifts(axis: Axes, result: Result) -> None:
    """Means over seeds, from the start as drawn."""
    for arm, colour in zip(result.arms, COLOURS, strict=True):
        each = [run["starts"][DRAWN]["charges"][1:] for run in arm.whole]
        means = [(at[0][0], math.fsum(y for _, y in at) / len(at)) for at in zip(*each, strict=True)]
        axis.plot([x for x, _ in means], [y for _, y in means], color=colour, linewidth=1.2, label=arm.arm.name)
    axis.set_yscale("log")
    axis.set_title("drift of A Aᵀ − B Bᵀ over |A Aᵀ + B Bᵀ|, as drawn", fontsize=8)
    axis.set_xlabel("step", fontsize=7)
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))


STUDY = Study(
    name="paths",
    title="Paths from equivalent starts",
    question=(
        "QuotientAdam takes a path that does not depend on the gauge, whereas AdamW's depends on it, and it ends lower "
        "than AdamW in as many steps."
    ),
    source=(
        "François and Ravera, arXiv 2602.18948, and Hide & Seek, arXiv 2505.05409, for the quotient; Knight, arXiv "
        "2606.02328, finds that its optimizers do not conclusively outperform AdamW"
    ),
    setting=(
        "A decoder of 2 layers, width 64 and 4 heads, with learned positions (so that all of GL(16) acts on queries "
        "and keys, and on values and outputs), LayerNorm, GELU, no biases, in float64, learns characters of Python's "
        "documentation: 300 steps of 12 windows of 48, cosine after a warm-up of a twentieth, no weight decay, no "
        "clipping; weights start with a standard deviation of 1/√width. Each seed starts as it is drawn, in two random "
        "gauges of condition 10, and with all A ten times as large and B a tenth: one function. All four have one "
        "rate, chosen as drawn by the mean of two seeds on validation text; held-out text shares no line of 40 "
        "characters or more with training. The grid is, for all, the same multiples of a base that belongs to the "
        "optimizer: 0.002 for those like Adam, 0.016 like Muon, 0.03 like SGD."
    ),
    equal="Equal parameters, steps and batches. CPU seconds are not, see the table.",
    metric="held_out",
    not_tested=(
        "Rotary positions, where a smaller group acts and balancing first does not free AdamW; float32, where paths "
        "of QuotientAdam agree to some 1e-6; clipping, which sees the gauge; weight decay; larger models, longer runs "
        "and worse gauges; scales of hidden units."
    ),
    arms=ARMS,
    full=Budget(
        steps=300,
        rates=(0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
        seeds=(1, 2, 3, 4, 5),
        tuning=(1000, 1001),
        options={**SIZE, "layers": 2, "context": 48, "batch": 12},
    ),
    quick=Budget(
        steps=6,
        rates=(0.5, 1.0),
        seeds=(1,),
        options={"width": 16, "layers": 1, "heads": 2, "context": 16, "batch": 2, "held_out": 2},
    ),
    run=run,
    conclude=conclude,
    draw=draw,
    rates_are="multiples of the optimizer's base rate",
)
