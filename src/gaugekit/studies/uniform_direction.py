"""Do the states of a trained model keep away from the direction 1 = (1, ..., 1), and without a norm that removes it?

What is measured at the input x of every norm is the share of squared length along 1, as a multiple of chance:
d · mean over tokens of cos²(x, 1). For random vectors cos² has the distribution Beta(1/2, (d − 1)/2) of mean 1/d, so
that the multiple is 1 and the angle 90°, with a spread of nearly 1/√d rad. 90° therefore says nothing, and neither does
one direction alone: states fill a cone, not the sphere, and miss most directions. So the same is measured for 999
fixed random directions.

Rule, fixed before the first run. Over the norms of a run the multiples have a geometric mean, at the end of training;
the rank of 1 is the share of the random directions of which the same mean is smaller. An arm keeps away from 1 if the
95 % interval of the log₂ of the mean, over seeds, lies below −1 (less than half of chance) and that of the rank below
5 %. It does not if the first interval lies above −1 or the second above 5 %. Confirmed: both arms keep away. Not
confirmed: one does not. Else inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gaugekit.studies.figures import COLOURS, curve, panels
from gaugekit.studies.stats import Interval, interval
from gaugekit.studies.study import Arm, ArmResult, Budget, Conclusion, Measured, Result, Study, Table, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from gaugekit.training.decoder import Decoder

HALF = -1.0
"""log₂ of the multiple of chance below which states count as keeping away."""

SPECIAL = 0.05
"""Rank among random directions below which 1 counts as special."""

DIRECTIONS = 999

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
    from gaugekit.studies.watching import passages

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
    from gaugekit.studies.watching import watched

    return watched(arm, rate, seed, budget, measure)


def last(run: Measured) -> Measured:
    return run["through"][-1][1]


def judged(arm: ArmResult) -> tuple[Verdict, str, Interval, Interval]:
    """Whether the arm keeps away from 1, in words, with the intervals of log₂ of the multiple and of the rank."""
    whole = [last(run) for run in arm.runs if "failed" not in run]
    if not whole:
        return "inconclusive", "broke off", Interval(math.inf, math.inf), Interval(math.inf, math.inf)
    share, rank = interval([math.log2(each["share"]) for each in whole]), interval([each["rank"] for each in whole])
    if share.low > HALF or rank.low > SPECIAL:
        verdict: Verdict = "not confirmed"
    elif share.high < HALF and rank.high < SPECIAL:
        verdict = "confirmed"
    else:
        verdict = "inconclusive"
    words = f"{2**share.mean:.2f} of chance, less than along {100 * (1 - rank.mean):.0f} % of random directions"
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
    line = "; ".join(f"{name}: squared length along 1 is {each[1]}" for name, each in found.items())
    return Conclusion(verdict, f"{line}. Random vectors: 90° ± {null_spread(d):.1f}°", tables(result, found))


def tables(result: Result, found: dict[str, tuple[Verdict, str, Interval, Interval]]) -> tuple[Table, ...]:
    rows, placed = [], []
    for arm in result.arms:
        _, _, share, rank = found[arm.arm.name]
        whole = [run for run in arm.runs if "failed" not in run]
        start = interval([math.log2(run["through"][0][1]["share"]) for run in whole]) if whole else share
        middle = interval([last(run)["random"][1] for run in whole]) if whole else share
        rows.append(
            (
                arm.arm.name,
                f"{arm.rate:g}{' (edge)' if arm.at_edge else ''}",
                interval(arm.values("held_out")).text(),
                start.text(2),
                share.text(2),
                middle.text(2),
                rank.text(2),
            )
        )
        for i, place in enumerate(names(result)):
            each = [last(run)["places"][i] for run in whole]
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


def names(result: Result) -> list[str]:
    layers = result.budget.options["layers"]
    return [f"{i} {branch}" for i in range(layers) for branch in ("attention", "MLP")] + ["final"]


def draw(result: Result) -> Figure:
    figure, axes = panels(3)
    angles, through, ends = axes[0]
    d = result.budget.options["width"]
    spread, places = null_spread(d), names(result)
    angles.axhspan(90 - spread, 90 + spread, color="#bbbbbb", alpha=0.4, linewidth=0, label="random vectors")
    through.axhline(1.0, color="black", linewidth=0.8, linestyle=":", label="chance")
    for arm, colour in zip(result.arms, COLOURS, strict=False):
        whole = [run for run in arm.runs if "failed" not in run]
        lines = [{"curve": [[max(step, 0.5), each["share"]] for step, each in run["through"]]} for run in whole]
        curve(through, ArmResult(arm.arm, {}, None, False, tuple(lines)), colour)
        if not whole:
            continue
        ends_of = [last(run)["places"] for run in whole]
        mean = [[math.fsum(run[i][k] for run in ends_of) / len(ends_of) for k in range(3)] for i in range(len(places))]
        angles.errorbar(
            [i + 0.15 * (arm is result.arms[0]) for i in range(len(places))],
            [m[0] for m in mean],
            [m[1] for m in mean],
            color=colour,
            fmt="o",
            markersize=3,
            linewidth=1,
            label=arm.arm.name,
        )
        ends.plot(range(len(places)), [m[2] for m in mean], "o-", color=colour, markersize=3, label=arm.arm.name)
        band = [
            [math.fsum(run["through"][j][1]["random"][k] for run in whole) / len(whole) for k in (0, 2)]
            for j in range(len(whole[0]["through"]))
        ]
        steps = [max(step, 0.5) for step, _ in whole[0]["through"]]
        through.plot(steps, band, color=colour, linewidth=0.8, linestyle="--")
    through.plot([], [], color="black", linewidth=0.8, linestyle="--", label="5 and 95 % of random directions")
    through.set(xscale="log", yscale="log", xlabel="steps (the start at 0.5)", title="Over all norms")
    through.set_ylabel("squared length along 1, chance = 1", fontsize=8)
    ends.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    ends.set(yscale="log", title="Each norm's input, at the end")
    angles.set(title="Angle to 1 at the end, ± spread", ylabel="degrees")
    for axis in (angles, ends):
        axis.set_xticks(range(len(places)), places, rotation=60, ha="right")
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
        "4096 held-out tokens, at 12 points of training; 1 is compared with chance and with 999 fixed random directions. "
        "(In the LayerNorm arm gradients have no part along 1: what is written along it stays as it was drawn.)"
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
        seeds=(0, 1, 2, 3, 4),
        options={"width": 64, "layers": 3, "heads": 4, "context": 64, "batch": 16, "points": 12},
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
