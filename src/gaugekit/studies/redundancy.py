"""How much of a transformer is redundant: a census of thirty public architectures at their real sizes, without weights.

[FR] sets out from "substantial internal redundancy" of transformers, in the coordinates of their states and in their
heads, and reduces by symmetry what is redundant; it counts none of it. A count needs no training: the dimension of the
group that acts on generic weights follows from shapes, by rules whose results equal the corank of the Jacobian of real
`transformers` classes.

Rule. Substantial is read as a tenth of all parameters, which is what one would see in memory and time. The claim is
confirmed if the median of the architectures' shares is at least 10 %, not confirmed if no architecture reaches 5 %,
else inconclusive. Both thresholds are this project's, not the paper's, and they were set when the count of GPT-2 and
the range of a few others were already known: what the study adds is the counts, the verdict only names them. The share
of attention's own weights that the bases of heads make up is told beside it.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from gaugekit.models import Spec, quiet
from gaugekit.models.pairs import on_disk
from gaugekit.models.registry import describe, family_of
from gaugekit.studies.architectures import ARCHITECTURES
from gaugekit.studies.figures import COLOURS, panels
from gaugekit.studies.study import Arm, ArmResult, Budget, Conclusion, Measured, Result, Study, Table, Verdict
from gaugekit.symmetry import Symmetry, derive
from gaugekit.symmetry.base import present

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["STUDY", "census"]

SUBSTANTIAL, NEGLIGIBLE = 0.10, 0.05

PLACES = {
    "vo": "VO: values and outputs",
    "qk": "QK: queries and keys",
    "units": "units of MLPs",
    "norms": "norms: their weights",
    "frame": "frame of the stream",
    "head": "head: the unembedding",
    "shifts": "shifts of biases and means",
}
"""Where redundant dimensions lie. Shifts are constants that biases, LayerNorms or a softmax take up."""


def living(config: dict[str, Any]) -> Spec:
    """The model that a config names, as `transformers` builds it, without memory for its weights."""
    import transformers

    name = config["architectures"][0]
    with quiet(), torch.device("meta"):
        model = getattr(transformers, name)(transformers.AutoConfig.for_model(**config))
    raw = model.config.to_dict()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return describe(raw, {k: view.shape for k, view in on_disk(family_of(raw, name), shapes).items()}, name)


def census(config: dict[str, Any]) -> Measured:
    """Redundant dimensions of an architecture, in all and by place; parameters, and those of attention.

    For log-probabilities where there is a language-model head, else for the last hidden states.
    """
    spec = living(config)
    symmetries = derive(spec)
    head = spec.main.head
    unembedding = head.linear.weight.name if head is not None else ""
    places = dict.fromkeys(PLACES, 0)
    for symmetry in symmetries.continuous:
        places[place(symmetry, unembedding)] += symmetry.dimension
    linears = [linear for _, _, body, _ in spec.attentions() for linear in (body.q, body.k, body.v, body.o)]
    attention = sum(view.numel for linear in linears for view in present(linear.weight, linear.bias))
    return {
        "parameters": spec.parameters,
        "redundant": symmetries.dimension,
        "share": symmetries.dimension / spec.parameters,
        "places": places,
        "attention": attention,
        "attention_share": (places["vo"] + places["qk"]) / attention,
        "dead": sum(dead.view.numel for dead in symmetries.dead),
        "observable": symmetries.observable,
    }


def place(symmetry: Symmetry, unembedding: str) -> str:
    return "head" if symmetry.part == "shifts" and symmetry.where == unembedding else symmetry.part


def run(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:  # noqa: ARG001
    return census(dict(arm.settings))


def ordered(result: Result) -> list[ArmResult]:
    """The architecture with the largest share first."""
    return sorted(result.arms, key=lambda each: -each.runs[0]["share"])


def conclude(result: Result) -> Conclusion:
    arms = ordered(result)
    shares = [each.runs[0]["share"] for each in arms]
    own = [each.runs[0]["attention_share"] for each in arms]
    middle = median(shares)
    verdict: Verdict = "inconclusive"
    if middle >= SUBSTANTIAL:
        verdict = "confirmed"
    elif shares[0] < NEGLIGIBLE:
        verdict = "not confirmed"
    least, most = (f"{percent(shares[i])} ({arms[i].arm.name})" for i in (-1, 0))
    line = (
        f"{least} to {most} of all parameters are redundant, {percent(middle)} in the median; bases of heads are "
        f"{percent(median(own))} of attention's own weights in the median, at most {percent(max(own))}"
    )
    return Conclusion(verdict, line, (totals(arms), by_place(arms)))


def totals(arms: list[ArmResult]) -> Table:
    rows = []
    for each in arms:
        run = each.runs[0]
        counts = (f"{run[key]:,}" for key in ("parameters", "redundant"))
        rows.append((each.arm.name, *counts, percent(run["share"]), percent(run["attention_share"])))
    columns = ("architecture", "parameters", "redundant dimensions", "share", "heads' bases in attention's own weights")
    return Table("Redundant dimensions", columns, tuple(rows))


def by_place(arms: list[ArmResult]) -> Table:
    rows = []
    for each in arms:
        run = each.runs[0]
        rows.append((each.arm.name, *(part(run["places"][key] / run["redundant"]) for key in PLACES)))
    columns = tuple(name.split()[0].rstrip(":") for name in PLACES.values())
    return Table("Where they are, % of the redundant dimensions", ("architecture", *columns), tuple(rows))


def part(share: float) -> str:
    return "–" if share == 0 else "<1" if share < 0.005 else f"{100 * share:.0f}"


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def draw(result: Result) -> Figure:
    arms = ordered(result)[::-1]
    figure, axes = panels(2, width=4.2, height=0.17 * len(arms) + 1.0, sharey=True, width_ratios=(3, 2))
    stacks(axes[0, 0], arms)
    against(axes[0, 1], arms)
    return figure


def stacks(axis: Axes, arms: list[ArmResult]) -> None:
    """Shares of all parameters, by place."""
    left = [0.0] * len(arms)
    for colour, (key, name) in zip(COLOURS, PLACES.items(), strict=False):
        width = [100 * each.runs[0]["places"][key] / each.runs[0]["parameters"] for each in arms]
        axis.barh(range(len(arms)), width, left=left, color=colour, label=name, height=0.75)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axis.set_yticks(range(len(arms)), [each.arm.name for each in arms])
    axis.set_ylim(-0.6, len(arms) - 0.4)
    axis.set_xlabel("redundant dimensions, % of all parameters", fontsize=8)
    axis.legend(fontsize=7, frameon=False, loc="lower right")


def against(axis: Axes, arms: list[ArmResult]) -> None:
    """The same totals, and the heads' share of attention's own weights, beside what is read as substantial."""
    rows = range(len(arms))
    for key, name, colour, mark in (
        ("share", "of all parameters", COLOURS[0], "o"),
        ("attention_share", "bases of heads, of\nattention's own weights", COLOURS[4], "D"),
    ):
        values = [100 * each.runs[0][key] for each in arms]
        axis.plot(values, rows, mark, color=colour, markersize=3.5, label=name)
    for value, style in ((SUBSTANTIAL, "-"), (NEGLIGIBLE, ":")):
        axis.axvline(100 * value, color="#777777", linewidth=0.9, linestyle=style)
        axis.text(103 * value, 0.0, f"{100 * value:.0f} %", fontsize=7, va="bottom", color="#555555")
    axis.set_xscale("log")
    axis.set_xlim(0.01, 30)
    axis.set_xticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    axis.set_xlabel("%, logarithmic", fontsize=8)
    axis.legend(fontsize=7, frameon=False, loc="upper left")


STUDY = Study(
    name="redundancy",
    title="How much of a transformer is redundant",
    question=(
        "The redundancy of transformers is substantial, read here as a tenth of all parameters: so many dimensions do "
        "continuous symmetries move without changing what the model computes."
    ),
    source=(
        'François and Ravera, arXiv 2602.18948, who set out from "substantial internal redundancy" to reduce it by '
        "symmetry, and count none"
    ),
    setting=(
        "Thirty public architectures at their real sizes, from their configs; no weights. Counted are the dimensions "
        "of all continuous symmetries of generic weights that leave log-probabilities (without a language-model head: "
        "the last hidden states) as they are, each direction once. The thresholds, 10 % in the median and 5 % at most, "
        'are this project\'s reading of "substantial", set when the count of GPT-2 and the range of a few others were '
        "already known."
    ),
    equal="nothing is trained, and nothing compared but shares: every architecture has the size it was published with",
    metric="share",
    not_tested=(
        "What trained weights have besides: low rank, dead units, directions that nearly do not matter. Scales that "
        "only the eps of norms breaks, and orders and signs, which have no dimension, are not counted. The thirty were "
        "chosen by hand, for families and sizes; a median over others would differ. Whether it helps training to "
        "remove what is redundant, however little it is, is asked by other studies."
    ),
    arms=tuple(Arm(each.name, each.config) for each in ARCHITECTURES),
    full=Budget(),
    quick=Budget(),
    run=run,
    conclude=conclude,
    draw=draw,
)
