"""Is there a low road between two seeds of one model, once their coordinates agree?

The rule, set before any run. Two models A, B of different seeds, B moved along its orbit to A; the barrier is the
largest rise of the loss above the straight line between its ends, on the way (1 − t) A + t B. Confirmed where, in every
group, the barrier modulo all symmetries, the element learned on training text from where weights lie nearest, is at
most a twentieth of the naive one at the upper end of its interval. Not
confirmed where in some group it is above a quarter at the lower end: the way is lower at best, but not low.
Inconclusive otherwise, and of a group in which a run broke off, a barrier is not finite, or a naive one is not above
zero, so that there is nothing to take a share of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gaugekit.models.registry import describe
from gaugekit.studies.figures import COLOURS, band, panels
from gaugekit.studies.fitting import SIZE, fit, language, made, sized
from gaugekit.studies.stats import Interval, interval, paired
from gaugekit.studies.study import Arm, ArmResult, Budget, Conclusion, Measured, Result, Study, Table, Verdict
from gaugekit.symmetry import Symmetries, derive
from gaugekit.symmetry.orbit import pieces
from gaugekit.training.config import OptimizerConfig
from gaugekit.training.decoder import Decoder
from gaugekit.training.export import as_transformers
from gaugekit.training.steps import evaluate
from gaugekit.verbs.barriers import barrier
from gaugekit.verbs.mates import Allowed
from gaugekit.verbs.nearing import Meter, Way, bring
from gaugekit.verbs.refining import learn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 11  # on the way, ends included
LOW, HIGH = 1 / 20, 1 / 4  # of the naive barrier
WAYS = {
    "naive": "as trained",
    "permutations": "permutations",
    "all": "all symmetries",
    "learned": "all symmetries, then learned",
    "disguise": "all symmetries, B = a disguise of A",
}


class Logits(nn.Module):
    """A model of `transformers` as the decoder is called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


def run(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
    """Train seeds `seed` and `seed` + 500, and walk from one to the other in every way."""
    task = language(budget, seed)
    config = sized(budget, task.vocab, **arm.settings)
    models = [made(config, each) for each in (seed, seed + 500)]
    optimizer = OptimizerConfig(lr=rate, weight_decay=0.1)
    fits = [fit(model, optimizer, task, budget, each) for model, each in zip(models, (seed, seed + 500), strict=True)]
    kind, described, _ = as_transformers(models[0])
    first, second = (weights(model) for model in models)
    spec = describe(described.to_dict(), {name: tuple(x.shape) for name, x in first.items()}, kind.__name__)
    symmetries = derive(spec)
    walker = Logits(kind(described).eval())
    held_out = task.held_out[: budget.options["walk"]]

    def way(other: Mapping[str, Tensor], allowed: Allowed = "all") -> Way:
        return bring(spec, symmetries, first.__getitem__, other.__getitem__, allowed, keep=True)

    nearest = way(second)
    batches, count = task.batches(seed + 1000), budget.options["learned"]
    learnt = [batches(step)[0] for step in range(count)]
    found = learn(spec, symmetries, kind(described).eval(), first.__getitem__, nearest, learnt, learnt[:4], count, seed)
    aligned = {
        "permutations": way(second, "permutations"),
        "all": nearest,
        "learned": nearest.turned(found.steps),
        "disguise": way(disguised(first, symmetries, seed)),
    }
    others = {"naive": second} | {
        name: {each: x for names in pieces(spec) for each, x in to.tensors(names).items()}
        for name, to in aligned.items()
    }
    ways = {way: walk(walker, first, other, held_out) for way, other in others.items()}
    distances = {way: apart(first, other) for way, other in others.items()}
    measured: Measured = {"held_out": fits[0].held_out, "ways": ways, "distances": distances}
    return measured | {f"barrier {way}": barrier(losses) for way, losses in ways.items()}


def walk(
    walker: Logits, first: Mapping[str, Tensor], second: Mapping[str, Tensor], held_out: Iterable[tuple[Tensor, Tensor]]
) -> list[float]:
    """Held-out losses on the straight way from one to the other, which the walker's weights are left at."""
    losses = []
    for t in torch.linspace(0, 1, POINTS).tolist():
        mixed = {name: ((1 - t) * x + t * second[name]).float() for name, x in first.items()}
        walker.model.load_state_dict(mixed, strict=False)
        losses.append(round(evaluate(walker, held_out), 6))
    return losses


def apart(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    meter = Meter()
    meter.add(first, second)
    return meter.distance


def weights(model: Decoder) -> dict[str, Tensor]:
    """Every tensor by its name in `transformers`, in float64."""
    return {name: x.detach().double().clone() for name, x in as_transformers(model)[2].items()}


def disguised(tensors: Mapping[str, Tensor], symmetries: Symmetries, seed: int) -> dict[str, Tensor]:
    """Another model of the same orbit: what alignment finds at best."""
    generator = torch.Generator().manual_seed(seed)
    moved = dict(tensors)
    for symmetry in (*symmetries.continuous, *symmetries.discrete):
        moved |= symmetry.act(moved, symmetry.sample(generator))
    return moved


def shares(arm: ArmResult, way: str) -> Interval:
    """The barrier of a way as a share of the naive one, over pairs of seeds."""
    return interval([run[f"barrier {way}"] / run["barrier naive"] for run in arm.runs])


def judged(arm: ArmResult) -> tuple[Verdict, str]:
    """The verdict of one group, and why."""
    if len(arm.whole) < len(arm.runs):
        return "inconclusive", "training broke off"
    if not all(math.isfinite(height) for way in WAYS for height in arm.values(f"barrier {way}")):
        return "inconclusive", "a barrier is not finite"
    if min(arm.values("barrier naive")) <= 0:
        return "inconclusive", "a naive barrier is not above zero, and has no shares"
    share = shares(arm, "learned")
    verdict: Verdict = "confirmed" if share.high <= LOW else "not confirmed" if share.low > HIGH else "inconclusive"
    gain = paired(arm.values("barrier permutations"), arm.values("barrier all"))
    return verdict, (
        f"{share.text(2)} of the naive barrier is left modulo all symmetries where the element is learned, "
        f"{shares(arm, 'all').text(2)} where weights lie nearest, {shares(arm, 'permutations').text(2)} modulo "
        f"permutations (the other symmetries take {gain.text(2)} nats more)"
    )


def conclude(result: Result) -> Conclusion:
    verdicts: list[Verdict] = []
    rows, lengths, said = [], [], []
    for arm in result.arms:
        rows.append((arm.arm.name, *(interval(arm.values(f"barrier {way}")).text() for way in WAYS)))
        lengths.append((arm.arm.name, *distances(arm)))
        each, why = judged(arm)
        verdicts.append(each)
        said.append(f"{arm.arm.name}, {each}: {why}")
    verdict: Verdict = "inconclusive"
    if "not confirmed" in verdicts:
        verdict = "not confirmed"
    elif all(v == "confirmed" for v in verdicts):
        verdict = "confirmed"
    tables = (
        Table("Barriers in nats, over pairs of seeds", ("model", *WAYS.values()), tuple(rows)),
        Table(
            "How far apart, ‖A − B‖/‖A‖, median of the pairs",
            ("model", *WAYS.values()),
            tuple(lengths),
        ),
    )
    return Conclusion(verdict, "; ".join(said), tables)


def distances(arm: ArmResult) -> tuple[str, ...]:
    """Medians over seeds, of every way."""
    whole = [run["distances"] for run in arm.whole]
    if not whole:
        return ("–",) * len(WAYS)
    forms = {way: ".0e" if way == "disguise" else ".2f" for way in WAYS}
    return tuple(format(median(distances[way] for distances in whole), form) for way, form in forms.items())


def draw(result: Result) -> Figure:
    """Mean loss on the way, and the range of the seeds."""
    figure, axes = panels(len(result.arms), sharey=True)
    for axis, arm in zip(axes.flat, result.arms, strict=True):
        for (way, label), colour in zip(WAYS.items(), COLOURS, strict=False):
            ways = [run["ways"][way] for run in arm.whole]
            band(axis, [[(i / (len(way) - 1), y) for i, y in enumerate(way)] for way in ways], colour, label)
        axis.set_title(arm.arm.name, fontsize=9)
        axis.set_xlabel("t, from A to B", fontsize=8)
    axes[0, 0].set_ylabel("held-out loss, nats", fontsize=8)
    axes[0, 0].legend(fontsize=6, frameon=False)
    return figure


RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)

STUDY = Study(
    name="mode_connectivity",
    title="Mode connectivity modulo symmetry",
    question="Two trained transformers of different seeds are joined by a straight way without a barrier once one has "
    "been moved along its symmetry orbit to the other.",
    source="Generalized linear mode connectivity for transformers, arXiv 2506.22712 (Tiny Shakespeare: barrier 2.02 as "
    "trained, 0.34 by weight matching, 0.02 by learned matching); permutations: Ainsworth et al., arXiv 2209.04836",
    setting="Two decoders, trained from other weights on other batches of the same text (characters of Python's "
    "documentation), as `transformers` has them: GPT-2 (LayerNorm, learned positions, GELU), Llama (RMSNorm, rotary, "
    "SwiGLU). B is brought to A by weights. Permutations: of heads, of units, of the dimensions of a head and of the "
    "coordinates of the stream, by assignment, norm weights folded into their readers. All symmetries: scales, bases "
    "and constants of both are settled first, then frame and bases are found by Procrustes, heads and units by "
    "assignment, by turns until nothing moves. Learned: from there, frame and bases are turned by Adam so that the "
    "loss of the mean of both falls on training text. As a control, B is a random member of A's own orbit. Weights "
    "start with a standard deviation of 1/√width. Rates are chosen on validation text; held-out text, on which ways "
    "are walked, shares no line of 40 characters or more with training.",
    equal="the same pair of models on every way",
    metric="held_out",
    not_tested="Matching by activations, orders (of heads and units) that are learned too, curved ways, wider models "
    "(barriers are known to fall with width), longer training, and pairs that share their first steps.",
    arms=(
        Arm("GPT-2", {"norm": "layer", "positions": "learned", "mlp": "gelu"}),
        Arm("Llama", {"norm": "rms", "positions": "rotary", "mlp": "swiglu"}),
    ),
    full=Budget(600, RATES, (0, 1, 2, 3, 4), options={**SIZE, "walk": 8, "learned": 200}),
    quick=Budget(
        4,
        (2e-3,),
        (0,),
        options={
            "width": 16,
            "layers": 1,
            "heads": 2,
            "context": 8,
            "batch": 4,
            "held_out": 1,
            "walk": 1,
            "learned": 2,
        },
    ),
    run=run,
    conclude=conclude,
    draw=draw,
)
