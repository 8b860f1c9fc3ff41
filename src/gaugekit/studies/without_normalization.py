"""Functions of each feature by itself in place of norms: do transformers train as well?

The authors of DyT put a learned number behind the embedding of language models, √d at the start. It is tried in all
arms that are compared, and whether a norm or its stand-in has it is chosen as the learning rate is, at the seed for
tuning.

Rule, fixed before the reported runs; trials at the seed for tuning chose rates, the spread of weights at the start, and
α. Of each stand-in, the excess of its held-out loss over LayerNorm's, as a share, is averaged over seeds, pairwise (of
logarithms). It does as well if the 95 % interval lies below `MARGIN`, and worse if it lies above. Confirmed: DyT and
Derf both do as well. Not confirmed: both do worse. Else inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn, tensor

from gaugekit.studies.figures import COLOURS, curve, panels
from gaugekit.studies.fitting import SIZE, fit, language, made, sized, thinned
from gaugekit.studies.stats import Interval, interval, paired
from gaugekit.studies.study import Arm, ArmResult, Budget, Conclusion, Measured, Result, Study, Table, Verdict
from gaugekit.training.config import OptimizerConfig
from gaugekit.training.decoder import Decoder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGIN = math.log(1.01)
"""1 %: the claims are of losses that differ by 1 % (2.94, 2.97 and 2.94 of GPT-2 with LayerNorm, DyT and Derf)."""

LAYER, RMS, DYT, DERF, NONE = "LayerNorm", "RMSNorm", "DyT", "Derf", "none"
PLAIN, SCALED = "embedding as drawn", "embedding times a learned √d"
STAND_INS = (DYT, DERF)

NORMS: dict[str, dict[str, Any]] = {
    LAYER: {"norm": "layer"},
    RMS: {"norm": "rms"},
    DYT: {"norm": "dyt", "norm_options": {"alpha": 0.5}},
    DERF: {"norm": "derf", "norm_options": {"alpha": 0.5}},
    NONE: {"norm": "none"},
}

ARMS = tuple(
    Arm(name, {"model": model, "scaled": group == SCALED}, group)
    for group in (PLAIN, SCALED)
    for name, model in NORMS.items()
)


class Amplified(nn.Embedding):
    """An embedding of given vectors (V, d), times a learned number."""

    def __init__(self, vectors: Tensor, gain: float) -> None:
        super().__init__(len(vectors), vectors.shape[-1], _weight=vectors)
        self.gain = nn.Parameter(tensor(gain))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.gain


def built(arm: Arm, seed: int, budget: Budget, vocab: int) -> Decoder:
    config = sized(budget, vocab, positions="rotary", **arm.settings["model"])
    model = made(config, seed)
    if arm.settings["scaled"]:
        model.embedding = Amplified(model.embedding.weight.detach(), math.sqrt(config.width))
    return model


def run(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
    """With the learned α of each place, where there are any."""
    task = language(budget, seed)
    model = built(arm, seed, budget, task.vocab)
    fitted = fit(model, OptimizerConfig("adamw", lr=rate), task, budget, seed)
    alphas = [round(float(p.detach()), 3) for name, p in model.named_parameters() if name.endswith("alpha")]
    return {**fitted.measured(), "curve": thinned(fitted.losses, 30), "alphas": alphas}


def best(result: Result, name: str) -> ArmResult:
    """Of the arms of a norm, the one with the least loss at the seed for tuning."""
    return min((arm for arm in result.arms if arm.arm.name == name), key=lambda arm: min(arm.tuning.values()))


def excess(arm: ArmResult, over: ArmResult) -> Interval:
    """Mean of log(held-out loss / the other's)."""
    own, other = ([math.log(value) for value in each.values("held_out")] for each in (arm, over))
    return paired(own, other)


def judged(found: Interval) -> str:
    if found.high < MARGIN:
        return "as well"
    return "worse" if found.low > MARGIN else "open"


def percent(found: Interval) -> str:
    """Logarithms as percentages."""
    share = Interval(math.expm1(found.mean), found.half) if math.isfinite(found.mean) else found
    return share.percent().text(1, " %", signed=True)


def conclude(result: Result) -> Conclusion:
    found = {name: excess(best(result, name), best(result, LAYER)) for name in (*STAND_INS, NONE)}
    parts = {judged(found[name]) for name in STAND_INS}
    verdict: Verdict = "inconclusive"
    if parts == {"as well"}:
        verdict = "confirmed"
    elif parts == {"worse"}:
        verdict = "not confirmed"
    told = (f"{name} {percent(each)} ({judged(each)})" for name, each in found.items())
    line = f"held-out loss against LayerNorm's, 1 % allowed: {', '.join(told)}"
    return Conclusion(verdict, line, (losses(result), shares(result)))


def losses(result: Result) -> Table:
    rows = []
    for arm in result.arms:
        whole = arm.whole
        alphas = [alpha for run in whole for alpha in run["alphas"]]
        rows.append(
            (
                arm.arm.name,
                arm.arm.group,
                arm.told_rate,
                interval(arm.values("held_out")).text(),
                interval(arm.values("training")).text(),
                interval(arm.values("seconds")).text(1),
                f"{whole[0]['parameters']}" if whole else "",
                f"{min(alphas):.2f} to {max(alphas):.2f}" if alphas else "",
            )
        )
    columns = ("norm", "embedding", "learning rate", "held-out loss", "training loss", "CPU seconds", "parameters", "α")
    title = "Losses, nats a character; CPU seconds of the steps; α at the end, over places and seeds"
    return Table(title, columns, tuple(rows))


def shares(result: Result) -> Table:
    rows = []
    for name in NORMS:
        arm = best(result, name)
        found = excess(arm, best(result, LAYER))
        rows.append(
            (name, arm.arm.group, percent(found) if name != LAYER else "0 %", judged(found) if name != LAYER else "")
        )
    title = "Held-out loss against LayerNorm's, each with the embedding that is best at the seed for tuning"
    return Table(title, ("norm", "embedding", "excess", "trains"), tuple(rows))


def draw(result: Result) -> Figure:
    figure, axes = panels(3)
    colours: dict[str, str] = dict(zip(NORMS, COLOURS, strict=False))
    curves = [run["curve"] for arm in result.arms for run in arm.whole]
    shown = [loss for each in curves for _, loss in each[len(each) // 6 :]]  # the first drop is alike in all
    for axis, group in zip(axes[0], (PLAIN, SCALED), strict=False):
        for arm in result.groups()[group]:
            curve(axis, arm, colours[arm.arm.name])
        if shown:
            axis.set_ylim(min(shown) - 0.05, max(shown))
        axis.set_title(f"{group}: loss of steps, nats", fontsize=8)
        axis.set_xlabel("step", fontsize=7)
        axis.legend(fontsize=6)
    against(axes[0][2], result, colours)
    return figure


def against(axis: Any, result: Result, colours: dict[str, str]) -> None:
    """Excess over LayerNorm in percent: the interval of each arm, and its seeds."""
    rows = list(labelled(result))
    for row, (_, arm) in enumerate(rows):
        found = excess(arm, best(result, LAYER))
        if not math.isfinite(found.mean):
            continue
        values = zip(arm.values("held_out"), best(result, LAYER).values("held_out"), strict=True)
        seeds = [100 * (own / other - 1) for own, other in values]
        half = 100 * found.half if math.isfinite(found.half) else 0.0
        colour = colours[arm.arm.name]
        axis.errorbar(100 * math.expm1(found.mean), row, xerr=half, color=colour, marker="o", markersize=4, capsize=2)
        axis.plot(seeds, [row + 0.22] * len(seeds), "|", color=colour, markersize=4)
    axis.axvspan(-1, 1, color="#777777", alpha=0.15, linewidth=0)
    axis.axvline(0, color="black", linewidth=0.6)
    axis.set_yticks(range(len(rows)), [label for label, _ in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_title("held-out loss against LayerNorm's best, %", fontsize=8)


def labelled(result: Result) -> Iterator[tuple[str, ArmResult]]:
    for arm in result.arms:
        yield f"{arm.arm.name}{', √d' if arm.arm.group == SCALED else ''}", arm


STUDY = Study(
    name="without_normalization",
    title="Without normalization",
    question=(
        "Transformers whose norms are replaced by functions of each feature, DyT or Derf, train as well as those with "
        "LayerNorm."
    ),
    source=(
        "DyT: Zhu, Chen, He, LeCun and Liu, arXiv 2503.10622; Derf: arXiv 2512.10938, with losses of GPT-2 of 2.94 "
        "(LayerNorm), 2.97 (DyT) and 2.94 (Derf)"
    ),
    setting=(
        "A pre-norm decoder of 3 layers, width 64 and 4 heads, with rotary positions and GELU, learns characters of "
        "Python's documentation: 600 steps of 16 windows of 64, AdamW without weight decay, cosine after a warm-up of "
        "a twentieth, clipping at 1. Weights start with a standard deviation of 1/√width, α at 0.5. Arms differ in "
        "what stands in the place of norms, the last one included. The second group has, as the authors of DyT do it "
        "for language models, a learned number behind the embedding, √width at the start. Rates are chosen on "
        "validation text; held-out text shares no line of 40 characters or more with training."
    ),
    equal="Equal parameters within 1 % (norms have more or fewer of their own), steps and batches.",
    metric="held_out",
    not_tested=(
        "Wider and deeper models and longer training, of which the claims are, and where no norm at all is said to "
        "fail; other α at the start than the 0.5 of the authors' code (in single trials of DyT, 0.25 and 1 ended "
        "within 1 % of it), or different ones by place; weight decay; speed on an accelerator."
    ),
    arms=ARMS,
    full=Budget(
        steps=600,
        rates=(2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
        seeds=(0, 1, 2, 3, 4),
        options=SIZE,
    ),
    quick=Budget(
        steps=6,
        rates=(2e-3, 4e-3),
        seeds=(0,),
        options={"width": 16, "layers": 1, "heads": 2, "context": 16, "batch": 2, "held_out": 2},
    ),
    run=run,
    conclude=conclude,
    draw=draw,
)
