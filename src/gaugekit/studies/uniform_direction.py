"""Do the states of a trained model keep away from the direction 1 = (1, ..., 1), and without a norm that removes it?

What is measured at the input x of every norm is the share of squared length along 1, as a multiple of chance:
d · mean over tokens of cos²(x, 1). For random vectors cos² has the distribution Beta(1/2, (d − 1)/2) of mean 1/d, so
that the multiple is 1 and the angle 90°, with a spread of nearly 1/√d rad. 90° therefore says nothing, and neither does
one direction alone: states fill a cone, not the sphere, and miss most directions. So the same is measured for 999
fixed random directions.

Rule, fixed before the first run; a trial run of each arm was seen before the number of seeds was. Over the norms of a
run the multiples have a geometric mean, at the end of training; the rank of 1 is the share of the random directions of
which the same mean is smaller. An arm keeps away from 1 if the 95 % interval of the log₂ of the mean, over seeds, lies
below −1 (less than half of chance) and that of the rank below 5 %. It does not if the first interval lies above −1 or
the second above 5 %. Runs that broke off have no such numbers, and an arm that has any is undecided at best.
Confirmed: both arms keep away. Not confirmed: one does not. Else inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gaugekit.studies.figures import COLOURS, band, panels
from gaugekit.studies.fitting import SIZE
from gaugekit.studies.stats import Interval, interval
from gaugekit.studies.study import Arm, ArmResult, Budget, Conclusion, Measured, Result, Study, Table, Verdict
from gaugekit.studies.watching import passages, place_names, watched

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from gaugekit.training.decoder import Decoder

HALF = -1.0
"""log₂ of the multiple of chance below which states count as keeping away."""

SPECIAL = 0.05
"""Rank among random directions below which 1 counts as special."""

DIRECTIONS = 999

WORDS = {"confirmed": "keeps away", "not confirmed": "does not keep away", "inconclusive": "undecided"}

LAYER, RMS = "LayerNorm", "RMSNorm"
ALIKE = {"norm_options": {"eps": 1e-5, "bias": False}}


def shares(states: Tensor, directions: Tensor) -> Tensor:
    """d · mean cos² of states (n, d) and directions (m, d): (m,), 1 in the mean over all directions."""
    import torch.nn.functional as F

    unit, along = F.normalize(states, dim=-1), F.normalize(directions, dim=-1)
    moment = unit.mT @ unit / len(unit)
    return states.shape[-1] * (along @ moment * along).sum(-1)


def null_spread(d: int) -> float:
    """Standard deviation of the angle between random vectors and a fixed one in degrees, exact: the density of what an
    angle has over 90° is proportional to cos^(d−2)."""
    from scipy.integrate import quad

    weight, square = (quad(lambda t, k=k: t**k * math.cos(t) ** (d - 2), -math.pi / 2, math.pi / 2)[0] for k in (0, 2))
    return math.degrees(math.sqrt(square / weight))


def measure(model: Decoder, windows: Sequence[Tensor]) -> Measured:
    """places: [mean angle to 1, its spread (degrees), multiple] of each norm's input; share: geometric mean of the
    multiples; rank of 1; random: 5, 50 and 95 % quantiles of what `share` is for random directions."""
    import torch

    from gaugekit.geometry.normalization import uniform_direction
    from gaugekit.geometry.sphere import angle

    rows, logs = [], []
    for passage in passages(model, windows):
        d = passage.before.shape[-1]
        generator = torch.Generator().manual_seed(d)
        drawn = torch.randn(DIRECTIONS, d, dtype=torch.float64, generator=generator)
        found = shares(passage.before, torch.cat([uniform_direction(d).unsqueeze(0), drawn]))
        angles = angle(passage.before, uniform_direction(d)).rad2deg()
        rows.append([round(float(angles.mean()), 3), round(float(angles.std()), 3), round(float(found[0]), 5)])
        logs.append(found.log())
    means = torch.stack(logs).mean(0).exp()
    one, random = means[0], means[1:]
    quantiles = random.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64))
    return {
        "share": float(one),
        "rank": float((random < one).double().mean()),
        "random": [round(float(q), 5) for q in quantiles],
        "places": rows,
    }


def run(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
    measured = watched(arm, rate, seed, budget, measure)
    end = measured["through"][-1][1]["places"]
    for _, found in measured["through"]:
        found["angles"] = [row[0] for row in found.pop("places")]
    return {**measured, "end": end}


def last(run: Measured) -> Measured:
    return run["through"][-1][1]


def judged(arm: ArmResult) -> tuple[Verdict, str, Interval, Interval]:
    """Whether the arm keeps away from 1, in words, with the intervals of log₂ of the multiple and of the rank."""
    whole = [last(run) for run in arm.whole]
    if not whole:
        return "inconclusive", "broke off", Interval(math.inf, math.inf), Interval(math.inf, math.inf)
    share, rank = interval([math.log2(each["share"]) for each in whole]), interval([each["rank"] for each in whole])
    if share.low > HALF or rank.low > SPECIAL:
        verdict: Verdict = "not confirmed"
    elif share.high < HALF and rank.high < SPECIAL and len(whole) == len(arm.runs):
        verdict = "confirmed"
    else:
        verdict = "inconclusive"
    angles = [angle for each in whole for angle in each["angles"]]
    words = (
        f"mean angles {min(angles):.0f}° to {max(angles):.0f}°, squared length along 1 {2**share.mean:.2f} of chance, "
        f"less than along {100 * (1 - rank.mean):.0f} % of random directions"
    )
    broken = len(arm.runs) - len(whole)
    if broken:
        words += f" ({broken} of {len(arm.runs)} runs broke off)"
    return verdict, words, share, rank


def conclude(result: Result) -> Conclusion:
    found = {arm.arm.name: judged(arm) for arm in result.arms}
    verdicts = [each[0] for each in found.values()]
    verdict: Verdict = "inconclusive"
    if "not confirmed" in verdicts:
        verdict = "not confirmed"
    elif all(each == "confirmed" for each in verdicts):
        verdict = "confirmed"
    d = result.budget.options["width"]
    line = "; ".join(f"{name} {WORDS[each[0]]}: {each[1]}" for name, each in found.items())
    return Conclusion(verdict, f"{line}. Random vectors: 90° ± {null_spread(d):.1f}°", tables(result, found))


def tables(result: Result, found: dict[str, tuple[Verdict, str, Interval, Interval]]) -> tuple[Table, ...]:
    rows, placed = [], []
    for arm in result.arms:
        _, _, share, rank = found[arm.arm.name]
        whole = arm.whole
        start = interval([math.log2(run["through"][0][1]["share"]) for run in whole]) if whole else share
        middle = interval([last(run)["random"][1] for run in whole]) if whole else share
        rows.append(
            (
                arm.arm.name,
                arm.told_rate,
                interval(arm.values("held_out")).text(),
                start.text(2),
                share.text(2),
                middle.text(2),
                rank.text(2),
            )
        )
        for i, place in enumerate(place_names(result.budget.options["layers"])):
            each = [run["end"][i] for run in whole]
            columns = [interval([row[k] for row in each]).text(2) for k in range(3)] if each else ["broke off"] * 3
            placed.append((arm.arm.name, place, *columns))
    d = result.budget.options["width"]
    placed.append(("random vectors", "", "90.00", f"{null_spread(d):.2f}", "1.00"))
    return (
        Table(
            "The direction 1 at the inputs of norms: over all norms, mean ± 95 % over seeds",
            (
                "arm",
                "learning rate",
                "held-out loss (nats)",
                "share along 1 at the start (log₂ of chance)",
                "share at the end (log₂ of chance)",
                "median of random directions at the end (chance = 1)",
                "rank of 1 at the end",
            ),
            tuple(rows),
        ),
        Table(
            "By place, at the end of training",
            ("arm", "norm", "mean angle to 1 (°)", "its spread over tokens (°)", "share along 1 (chance = 1)"),
            tuple(placed),
        ),
    )


def draw(result: Result) -> Figure:
    figure, axes = panels(3)
    angles, through, ends = axes[0]
    spread, places = null_spread(result.budget.options["width"]), place_names(result.budget.options["layers"])
    angles.axhspan(90 - spread, 90 + spread, color="#bbbbbb", alpha=0.4, linewidth=0, label="random vectors")
    for axis in (through, ends):
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":", label="chance")
    for arm, colour in zip(result.arms, COLOURS, strict=False):
        whole = arm.whole
        lines = [[(max(step, 0.5), each["share"]) for step, each in run["through"]] for run in whole]
        band(through, lines, colour, arm.arm.name)
        if not whole:
            continue
        steps = [max(step, 0.5) for step, _ in whole[0]["through"]]
        points = range(len(steps))

        def mean(key: str, point: int, i: int, whole: tuple[Measured, ...] = whole) -> float:
            return math.fsum(run["through"][point][1][key][i] for run in whole) / len(whole)

        for i in range(len(places)):
            label = f"{arm.arm.name}, each norm" if i == 0 else None
            angles.plot(steps, [mean("angles", j, i) for j in points], color=colour, linewidth=0.7, label=label)
        for i in (0, 2):
            through.plot(steps, [mean("random", j, i) for j in points], color=colour, linewidth=0.8, linestyle="--")
        for run in whole:
            ends.plot([row[2] for row in run["end"]], "o", color=colour, markersize=2, alpha=0.5)
        middle = [
            math.exp(math.fsum(math.log(run["end"][i][2]) for run in whole) / len(whole)) for i in range(len(places))
        ]
        ends.plot(middle, color=colour, linewidth=1.3, label=arm.arm.name)
    through.plot([], [], color="black", linewidth=0.8, linestyle="--", label="5 and 95 % of random directions")
    angles.set(title="Mean angle to 1", ylim=(90 - 2.5 * spread, 90 + 1.5 * spread))
    angles.set_ylabel("degrees", fontsize=8)
    through.set(yscale="log", title="Squared length along 1, all norms")
    ends.set(yscale="log", title="The same by norm, at the end, each seed")
    for axis in (through, ends):
        axis.set_ylabel("chance = 1", fontsize=8)
    for axis in (angles, through):
        axis.set_xscale("log")
        axis.set_xlabel("steps (the start at 0.5)", fontsize=8)
    ends.set_xticks(range(len(places)), places, rotation=60, ha="right")
    for axis in axes[0]:
        axis.title.set_fontsize(9)
        axis.legend(fontsize=6, frameon=False)
    return figure


STUDY = Study(
    name="uniform_direction",
    title="The uniform direction",
    question=(
        "Hidden states of trained models are orthogonal to the uniform vector 1, also in RMSNorm models, where nothing "
        "subtracts the mean."
    ),
    source="Gupta, Ozdemir, Gong and Anumanchipalli, arXiv 2409.12951",
    setting=(
        "A pre-norm decoder with learned positions, trained by AdamW without weight decay to predict characters of "
        "Python's documentation. Its norms have a weight and no bias. States are read at the input of every norm on "
        "4096 held-out tokens, at 12 points of training; 1 is compared with chance and 999 fixed random directions. "
        "Weights start with a standard deviation of 1/√width. Rates are chosen on validation text; held-out text "
        "shares no line of 40 characters or more with training. (In the LayerNorm arm gradients have no part along 1: "
        "what is written along it stays as it was drawn.)"
    ),
    equal="equal parameters, steps and tokens",
    metric="held_out",
    not_tested=(
        "Large models, long training and weight decay, which in a LayerNorm model shrinks what is written along 1 and "
        "nothing reads; models whose states have a few enormous entries; whether leaving out the projection changes "
        "the loss beyond the one difference that the table shows."
    ),
    arms=(Arm(LAYER, {"norm": "layer", **ALIKE}), Arm(RMS, {"norm": "rms", **ALIKE})),
    full=Budget(
        steps=500,
        rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
        seeds=(0, 1, 2, 3, 4, 5, 6, 7),
        options={**SIZE, "points": 12},
    ),
    quick=Budget(
        steps=6,
        rates=(2e-3, 4e-3),
        seeds=(0,),
        options={"width": 16, "layers": 2, "heads": 2, "context": 16, "batch": 4, "points": 4, "held_out": 4},
    ),
    run=run,
    conclude=conclude,
    draw=draw,
)
