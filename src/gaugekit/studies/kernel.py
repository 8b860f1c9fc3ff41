"""Is the null direction of a LayerNorm's outputs read off its weight, through all of training, and do others open?

n of a LayerNorm sums to zero, so y = γ ⊙ n + β does not vary along v = γ⁻¹/|γ⁻¹|. That is algebra; what can fail is
that the eigenvector measured in float32 outputs is v, that it is the only one, and that an RMSNorm has none. At the
start γ = 1 and v is the uniform direction, so the rival prediction is that one, for good: only where training has
turned v away from it is anything tested.

Rule, fixed before the first run. For each norm, point of training and seed, |cos| of v with the eigenvector of least
variance (with the whole null space where more than one direction is null). Null is a variance below 1e-8 of the mean
one. Not confirmed if any |cos| of the LayerNorm arm is below 0.9999, or a norm of the RMSNorm arm has a null direction
at the start, or later one that is along its own γ⁻¹ to 0.9999. Inconclusive if a run broke off, or |cos| of the uniform
direction is 0.9999 or more at every norm at the end of some LayerNorm run. Else confirmed. Further null directions,
which the paper reports of trained models, are counted and said, and so is how near the next one came: they are no part
of the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gaugekit.studies.figures import COLOURS, band, panels
from gaugekit.studies.fitting import SIZE
from gaugekit.studies.stats import interval
from gaugekit.studies.study import Arm, ArmResult, Budget, Conclusion, Measured, Result, Study, Table, Verdict
from gaugekit.studies.watching import Passage, passages, place_names, watched

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from gaugekit.training.decoder import Decoder

LOST = 1e-4
"""1 − |cos| of the claim: four decimal places, as in the paper."""

NULL = 1e-8

LAYER, RMS = "LayerNorm", "RMSNorm"
ALIKE = {"norm_options": {"eps": 1e-5, "bias": True}}


def kernel_of(passage: Passage) -> Measured:
    """Of one norm's outputs, with v = γ⁻¹/|γ⁻¹| of its weight whatever its kind; variances as shares of the mean one.

    lost        1 − |cos| of v and the eigenvector of least variance, or all null ones if these are more than one
    rival       the same of the uniform direction in place of v
    turned      degrees from the uniform direction to v
    variance    along v
    next        least variance but one
    null        directions below the threshold
    own         1 where there are any and v is among them to `LOST`, else 0
    """
    from gaugekit.geometry.ellipsoid import kernel_direction
    from gaugekit.geometry.normalization import uniform_direction
    from gaugekit.geometry.sphere import angle
    from gaugekit.verbs.moments import Covariance
    from gaugekit.verbs.states import measured_kernel

    weight = passage.norm.get_parameter("weight").detach().double()
    v, uniform = kernel_direction(weight), uniform_direction(len(weight))
    covariance = Covariance()
    covariance.add(passage.after)
    matrix = covariance.matrix()
    found, rival = (measured_kernel(matrix, each.unsqueeze(-1), NULL) for each in (v, uniform))
    if found is None or rival is None:
        raise ValueError(f"the outputs of the norm at {passage.place} do not vary")

    def lost(cosine: float | None, cosine_null: float | None) -> float:
        return 1 - (cosine_null if found.null > 1 and cosine_null is not None else cosine or 0.0)

    # Along v itself: what is left of it in the matrix is the matrix's own rounding.
    along = (passage.after - passage.after.mean(0)) @ v
    missed = lost(found.cosine, found.cosine_null)
    return {
        "lost": missed,
        "rival": lost(rival.cosine, rival.cosine_null),
        "turned": float(angle(v, uniform).rad2deg()),
        "variance": float(along.square().mean() / matrix.diagonal().mean()),
        "next": found.smallest[1],
        "null": found.null,
        "own": int(found.null > 0 and missed <= LOST),
    }


def measure(model: Decoder, windows: Sequence[Tensor]) -> Measured:
    """By key of `kernel_of` a list over norms; exact: "variance" where a window is read in float64."""
    from copy import deepcopy

    found = [kernel_of(passage) for passage in passages(model, windows)]
    exact = [kernel_of(passage)["variance"] for passage in passages(deepcopy(model).double(), windows[:1])]
    return {key: [each[key] for each in found] for key in found[0]} | {"exact": exact}


def worst(found: Measured) -> Measured:
    """Over the norms: the largest of each, and the least of "lost" and "next" as "least" and "nearest"."""
    over = {key: max(values) for key, values in found.items() if key != "next"}
    over |= {"least": min(found["lost"]), "nearest": min(found["next"])}
    return {key: value if key in ("null", "own") else float(f"{value:.4g}") for key, value in over.items()}


def run(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
    measured = watched(arm, rate, seed, budget, measure)
    through = measured["through"]
    end = {key: [float(f"{each:.4g}") for each in values] for key, values in through[-1][1].items()}
    return {**measured, "through": [[step, worst(found)] for step, found in through], "end": end}


def all_points(arm: ArmResult, key: str) -> list[float]:
    return [found[key] for each in arm.whole for _, found in each["through"]]


def conclude(result: Result) -> Conclusion:
    layer, rms = result[LAYER], result[RMS]
    broken = sum(len(arm.runs) - len(arm.whole) for arm in result.arms)
    if not (layer.whole and rms.whole):
        return Conclusion("inconclusive", "an arm broke off in every run", tables(result))
    lost = max(all_points(layer, "lost"))
    absent = not any(each["through"][0][1]["null"] for each in rms.whole) and not any(all_points(rms, "own"))
    rival = [each["through"][-1][1]["rival"] for each in layer.whole]
    verdict: Verdict = "confirmed"
    if lost > LOST or not absent:
        verdict = "not confirmed"
    elif broken or min(rival) <= LOST:
        verdict = "inconclusive"
    turned = interval([each["through"][-1][1]["turned"] for each in layer.whole])
    further = max(all_points(layer, "null")) - 1
    line = (
        f"|cos| of γ⁻¹ and the measured null direction is at least 1 − {lost:.0e} at every norm and point of training, "
        f"while at the norm where it turns most γ⁻¹ turns by {turned.text(1, '°')}; RMSNorm "
        f"{'has no such direction' if absent else 'has one too'}. Further null directions: {further:.0f} (the next "
        f"variance is at least {min(all_points(layer, 'nearest')):.0e} of the mean)"
    )
    return Conclusion(verdict, line, tables(result))


def tables(result: Result) -> tuple[Table, ...]:
    over, placed = [], []
    for arm in result.arms:
        start, end = ([each["through"][i][1] for each in arm.whole] for i in (0, -1))
        cells = ["broke off"] * 8
        if end:
            cells = [
                f"{max(all_points(arm, 'lost')):.1e}",
                f"{min(each['rival'] for each in end):.1e}",
                interval([each["turned"] for each in end]).text(2),
                *(f"{max(each['variance'] for each in point):.1e}" for point in (start, end)),
                f"{max(each['exact'] for each in end):.1e}",
                f"{min(all_points(arm, 'nearest')):.1e}",
                f"{max(all_points(arm, 'null')):.0f}",
            ]
        rate = arm.told_rate
        over.append((arm.arm.name, rate, interval(arm.values("held_out")).text(), *cells))
        for i, place in enumerate(place_names(result.budget.options["layers"])):
            ends = [each["end"] for each in arm.whole]
            means = {key: math.fsum(each[key][i] for each in ends) / len(ends) for key in ends[0]} if ends else {}
            forms = {"lost": ".1e", "rival": ".1e", "turned": ".2f", "variance": ".1e", "next": ".1e", "null": ".1f"}
            cells = [format(means[key], form) if means else "broke off" for key, form in forms.items()]
            placed.append((arm.arm.name, place, *cells))
    return (
        Table(
            "By arm, over all points of training where none is named. Of norms and seeds the largest, of the next "
            "variance the least; of the uniform direction the largest of norms and the least of seeds; of the turn the "
            "largest of norms, and its mean over seeds",
            (
                "arm",
                "learning rate",
                "held-out loss (nats)",
                "1 − |cos| of γ⁻¹",
                "1 − |cos| of the uniform direction, end",
                "turn of γ⁻¹, end (°)",
                "variance along γ⁻¹, start (of the mean)",
                "variance along γ⁻¹, end",
                "variance along γ⁻¹, end, in float64",
                "next variance (of the mean)",
                "null directions",
            ),
            tuple(over),
        ),
        Table(
            "By norm at the end of training, means over seeds",
            (
                "arm",
                "norm",
                "1 − |cos| of γ⁻¹",
                "1 − |cos| of the uniform direction",
                "turn of γ⁻¹ (°)",
                "variance along γ⁻¹",
                "next variance",
                "null directions",
            ),
            tuple(placed),
        ),
    )


def draw(result: Result) -> Figure:
    figure, axes = panels(3)
    cosines, turns, variances = axes[0]

    def line(axis, arm: ArmResult, key: str, colour: str, label: str) -> None:
        # Rounding may leave exactly nothing, which a logarithm does not show.
        runs = [[(max(step, 0.5), max(found[key], 1e-33)) for step, found in each["through"]] for each in arm.whole]
        band(axis, runs, colour, label)

    layer, rms = result[LAYER], result[RMS]
    line(cosines, layer, "lost", COLOURS[0], "LayerNorm, γ⁻¹")
    line(cosines, layer, "rival", COLOURS[4], "LayerNorm, uniform direction")
    line(cosines, rms, "least", COLOURS[1], "RMSNorm, γ⁻¹ (the nearest)")
    cosines.axhline(LOST, color="black", linewidth=0.8, linestyle=":", label="|cos| = 0.9999")
    cosines.set(title="1 − |cos| with the measured direction", yscale="log", ylim=(1e-16, 30))
    line(turns, layer, "turned", COLOURS[0], "LayerNorm")
    line(turns, rms, "turned", COLOURS[1], "RMSNorm")
    turns.set(title="Turn of γ⁻¹ from the uniform direction")
    turns.set_ylabel("degrees", fontsize=8)
    line(variances, rms, "variance", COLOURS[1], "RMSNorm, along γ⁻¹")
    line(variances, layer, "nearest", COLOURS[2], "LayerNorm, next direction")
    line(variances, layer, "variance", COLOURS[0], "LayerNorm, along γ⁻¹")
    line(variances, layer, "exact", COLOURS[3], "the same in float64")
    variances.axhline(NULL, color="black", linewidth=0.8, linestyle=":", label="null below this")
    variances.set(title="Variance, share of the mean", yscale="log", ylim=(1e-34, 1e3))
    for axis in axes[0]:
        axis.set_xscale("log")
        axis.set_xlabel("steps (the start at 0.5)", fontsize=8)
        axis.title.set_fontsize(9)
        axis.legend(fontsize=6, frameon=False)
    variances.legend(fontsize=6, frameon=False, loc="center", bbox_to_anchor=(0.5, 0.34))
    return figure


STUDY = Study(
    name="kernel",
    title="The kernel of a norm",
    question=(
        "The outputs of a LayerNorm have no variance along γ⁻¹/|γ⁻¹|, and it is the measured null direction to four "
        "decimal places, at the start and through training; RMSNorm has none."
    ),
    source="Shirodkar and Narayanan, arXiv 2606.19491",
    setting=(
        "A pre-norm decoder with learned positions, trained by AdamW without weight decay to predict characters of "
        "Python's documentation. Its norms have a weight and a bias. At the output of every norm the covariance of "
        "4096 held-out tokens (64 a dimension) is taken in float64, at 12 points of training. Weights start with a "
        "standard deviation of 1/√width. Rates are chosen on validation text; held-out text shares no line of 40 "
        "characters or more with training."
    ),
    equal="equal parameters, steps and tokens",
    metric="held_out",
    not_tested=(
        "Large models and long training, of which the paper reports that further directions open and that the variance "
        "along γ⁻¹ falls; norms with a weight of zero, which has no inverse; outputs in half precision, which have "
        "variance everywhere; post-norm models."
    ),
    arms=(Arm(LAYER, {"norm": "layer", **ALIKE}), Arm(RMS, {"norm": "rms", **ALIKE})),
    full=Budget(
        steps=500,
        rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
        seeds=(0, 1, 2, 3, 4),
        options={**SIZE, "points": 12},
    ),
    quick=Budget(
        steps=6,
        rates=(2e-3, 4e-3),
        seeds=(0,),
        options={"width": 16, "layers": 2, "heads": 2, "context": 16, "batch": 16, "points": 4, "held_out": 4},
    ),
    run=run,
    conclude=conclude,
    draw=draw,
)
