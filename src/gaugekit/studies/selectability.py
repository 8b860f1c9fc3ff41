"""LayerNorm projects and scales: does projecting help attention to average, and does scaling make all keys selectable?

Four norms that differ in one thing each stand before attention: with and without projection, with and without scaling.
All start with the same radius √d in the mean (in the published code the arm without projection had another one), and
none has weights. Averaging is asked with the paper's majority task, selectability with a language model of its width
and heads, at the inputs of the key maps, by `gaugekit.geometry.keys`. Scaled inputs lie on a sphere, where none is in
the hull of others: that half is a theorem, and what it is worth depends on how many are in the hull without it. All
inputs of a window are taken as rivals of each other, though attention is causal and most queries see fewer. The keys
that heads make of the inputs have few dimensions, and hardly anything changes there: they are shown, and no claim is
made of them.

Rule, fixed before the study was run, after trial runs of single seeds that chose sizes and rates. The verdict is that
of both claims together: confirmed if both hold, not confirmed if one fails, else inconclusive.
(a) Averaging: log₂ of the ratio of steps to an accuracy of 0.9, with projection over without, seed by seed, among
    scaled norms and among unscaled ones. It holds if both 95 % intervals lie below log₂ 0.9 (a tenth fewer steps), and
    fails if one lies above it. Where attention averages evenly in all arms this has little power: see its evenness.
(b) Selectability: share of unselectable inputs after training, all layers together. It holds if no run with scaling has
    more than 0.1 %, and the 95 % intervals of both arms without lie above 5 %. It fails if a run with scaling has more
    than 1 %, or an interval of an arm without lies below 5 %.
A claim of which a run broke off does not hold: it is inconclusive at best. A model that does not reach the accuracy has
not broken off, and counts as infinitely many steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gaugekit.studies.figures import COLOURS, curve, panels
from gaugekit.studies.stats import Interval, interval, paired
from gaugekit.studies.study import Arm, ArmResult, Budget, Conclusion, Measured, Result, Study, Table, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GOAL = 0.9
FASTER = math.log2(0.9)
NONE_AT_ALL, SOME, MATTERS = 0.001, 0.01, 0.05
MAJORITY, LANGUAGE = "majority", "language"
BOTH, SCALING, PROJECTION, NEITHER = "projection and scaling", "scaling only", "projection only", "neither"
PARTS = {BOTH: (True, True), SCALING: (False, True), PROJECTION: (True, False), NEITHER: (False, False)}


def run(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
    """`score` is of the majority task the mean over training of the held-out loss, as speed is asked for, and of
    language the one at the end; see `learning` and `unselectable_shares` for the rest."""
    import torch

    from gaugekit.studies.fitting import fit, language
    from gaugekit.studies.majority import learning
    from gaugekit.studies.parts import PartNorm, decoder, unselectable_shares
    from gaugekit.training.config import OptimizerConfig

    options = budget.options
    if arm.group == MAJORITY:
        # Some models a seed: one alone is soon trained and says little.
        seeds = range(seed * options["models"], (seed + 1) * options["models"])
        norm, steps = (lambda: PartNorm(**arm.settings)), options["majority_steps"]
        validation = seed in budget.tuning
        found = learning(norm, options["width"], rate, seeds, steps, GOAL, validation=validation)
        return {**found, "score": found["loss"]}
    task = language(budget, seed)
    model = decoder(task.vocab, seed, budget, **arm.settings)
    windows = [tokens[:1] for tokens, _ in task.held_out[:: max(1, len(task.held_out) // options["windows"])]]
    with torch.no_grad():
        model(task.held_out[0][0])  # sets the size that unscaled norms divide by
    before = unselectable_shares(model, windows)
    measured = fit(model, OptimizerConfig(lr=rate), task, budget, seed).measured()
    del measured["curve"]  # of the training loss: in the majority task the curve is of the accuracy
    return {**measured, "score": measured["held_out"], "before": before, "after": unselectable_shares(model, windows)}


def steps_to_goal(arm: ArmResult) -> list[float]:
    """log₂, inf where the accuracy was not reached."""
    return [math.inf if run.get("to_goal") is None else math.log2(run["to_goal"]) for run in arm.runs]


def share(run: Measured, when: str, what: str) -> float:
    layers = run[when][what]
    return math.fsum(layers) / len(layers)


def shares(arm: ArmResult, when: str, what: str) -> Interval:
    return interval([share(run, when, what) for run in arm.whole] or [math.inf])


def chance(result: Result) -> tuple[float, float]:
    """Unselectable ones (%) among normal random keys, as many as a window has: in the width, and in that of a head."""
    from gaugekit.studies.parts import by_chance

    keys, width, heads = (result.budget.options[key] for key in ("context", "width", "heads"))
    return 100 * by_chance(keys, width), 100 * by_chance(keys, width // heads)


def at_best(verdict: Verdict, arms: Sequence[ArmResult]) -> Verdict:
    """A claim does not hold by what is left of arms that broke off in a run."""
    broken = any(len(arm.whole) < len(arm.runs) for arm in arms)
    return "inconclusive" if broken and verdict == "confirmed" else verdict


def averages(result: Result) -> tuple[Verdict, str]:
    found: list[Interval] = []
    for pair in ((BOTH, SCALING), (PROJECTION, NEITHER)):
        first, second = (steps_to_goal(result[f"{MAJORITY} / {name}"]) for name in pair)
        found.append(paired(first, second))
    verdict: Verdict = "inconclusive"
    if any(each.low > FASTER for each in found):
        verdict = "not confirmed"
    elif all(each.high < FASTER for each in found):
        verdict = at_best("confirmed", result.groups()[MAJORITY])
    scaled, unscaled = (times(each) for each in found)
    words = f"steps to {GOAL} with projection over without: {scaled} among scaled norms, {unscaled} among others"
    return verdict, words


def times(logs: Interval) -> str:
    if math.isnan(logs.mean):
        return "not reached in every run by either"
    if not math.isfinite(logs.mean):
        return f"reached in every run only {'with' if logs.mean < 0 else 'without'} it"
    return f"{2**logs.mean:.2f}" + (f" ({2**logs.low:.2f} to {2**logs.high:.2f})" if math.isfinite(logs.half) else "")


def selects(result: Result) -> tuple[Verdict, str]:
    scaled, unscaled = (
        [result[f"{LANGUAGE} / {name}"] for name in pair] for pair in ((BOTH, SCALING), (PROJECTION, NEITHER))
    )
    if not all(arm.whole for arm in (*scaled, *unscaled)):
        return "inconclusive", "an arm broke off in every run"
    most = max(share(run, "after", "inputs") for arm in scaled for run in arm.whole)
    without = [shares(arm, "after", "inputs") for arm in unscaled]
    verdict: Verdict = "inconclusive"
    if most > SOME or any(each.high < MATTERS for each in without):
        verdict = "not confirmed"
    elif most <= NONE_AT_ALL and all(each.low > MATTERS for each in without):
        verdict = at_best("confirmed", result.groups()[LANGUAGE])
    means = [100 * each.mean for each in without]
    heads = [100 * shares(arm, "after", "heads").mean for arm in (scaled[0], unscaled[0])]
    words = (
        f"{100 * most:.1f} % of inputs are unselectable with scaling, {min(means):.0f} to {max(means):.0f} % without; "
        f"among the keys that a head makes of them {heads[0]:.0f} and {heads[1]:.0f} %"
    )
    return verdict, words


def conclude(result: Result) -> Conclusion:
    found = averages(result), selects(result)
    verdicts = [verdict for verdict, _ in found]
    verdict: Verdict = "inconclusive"
    if "not confirmed" in verdicts:
        verdict = "not confirmed"
    elif all(each == "confirmed" for each in verdicts):
        verdict = "confirmed"
    line = ". ".join(
        f"{claim}, {each}: {words}" for claim, (each, words) in zip(("Averaging", "Selectability"), found, strict=True)
    )
    broken = sum(len(arm.runs) - len(arm.whole) for arm in result.arms)
    if broken:
        line += f". {broken} of {sum(len(arm.runs) for arm in result.arms)} runs broke off"
    return Conclusion(verdict, line, tables(result))


def tables(result: Result) -> tuple[Table, ...]:
    groups = result.groups()

    def head(arm: ArmResult) -> tuple[str, str]:
        return arm.arm.name, arm.told_rate

    averaged = []
    for arm in groups[MAJORITY]:
        logs = interval(steps_to_goal(arm))
        reached = "not in every run"
        if math.isfinite(logs.mean):
            reached = f"{2**logs.mean:.0f}"
            reached += f" ({2**logs.low:.0f} to {2**logs.high:.0f})" if math.isfinite(logs.half) else ""
        columns = [interval(arm.values(key)).text() for key in ("accuracy", "score", "evenness")]
        averaged.append((*head(arm), reached, *columns))
    selected = []
    for arm in groups[LANGUAGE]:
        percent = [
            shares(arm, when, what).percent().text(1)
            for when, what in (("before", "inputs"), ("after", "inputs"), ("after", "unscaled"), ("after", "heads"))
        ]
        selected.append((*head(arm), interval(arm.values("score")).text(), *percent))
    random = [f"{share:.1f}" for share in chance(result)]
    width, heads = result.budget.options["width"], result.budget.options["heads"]
    selected.append(("normal random keys", "", "", random[0], random[0], random[0], random[1]))
    return (
        Table(
            f"Majority task, width {width}: means over seeds, ± or from to at 95 %",
            (
                "norm before attention",
                "learning rate",
                f"steps to {GOAL}",
                "accuracy at the end",
                "held-out loss, mean over training (nats)",
                "evenness of attention (1: uniform)",
            ),
            tuple(averaged),
        ),
        Table(
            f"Language, unselectable ones (%) of {result.budget.options['context']} inputs of the key map, all rivals "
            "of each other; mean ± 95 % over seeds",
            (
                "norm before attention",
                "learning rate",
                "held-out loss (nats)",
                "inputs at the start",
                "inputs at the end",
                "the same states at the end, without scaling",
                f"keys of a head at the end ({width // heads} dimensions)",
            ),
            tuple(selected),
        ),
    )


def draw(result: Result) -> Figure:
    figure, axes = panels(3)
    learning, selecting, losses = axes[0]
    groups = result.groups()
    for arm, colour in zip(groups[MAJORITY], COLOURS, strict=False):
        curve(learning, arm, colour)
    learning.axhline(GOAL, color="black", linewidth=0.8, linestyle=":")
    learning.set(title="Majority task", xlim=(0, result.budget.options["majority_steps"] / 2))
    learning.set_xlabel("steps", fontsize=8)
    learning.set_ylabel("accuracy", fontsize=8)
    width, heads = result.budget.options["width"], result.budget.options["heads"]
    sizes, tones = (width, width // heads), (COLOURS[0], COLOURS[4])
    for what, label, colour, aside in zip(("inputs", "heads"), ("inputs", "a head"), tones, (-0.2, 0.2), strict=True):
        bars = [shares(arm, "after", what) for arm in groups[LANGUAGE]]
        means, halves = ([100 * x if math.isfinite(x) else 0.0 for x in each] for each in columns(bars))
        at = [i + aside for i in range(len(bars))]
        selecting.bar(at, means, 0.36, yerr=halves, color=colour, error_kw={"linewidth": 0.8}, label=label)
    for percent, k, colour in zip(chance(result), sizes, tones, strict=True):
        selecting.axhline(percent, color=colour, linewidth=0.8, linestyle=":", label=f"random, {k} dimensions")
    selecting.set(title="Unselectable after training", ylim=(0, 150), yticks=range(0, 101, 20))
    selecting.set_ylabel("%", fontsize=8)
    for i, (arm, colour) in enumerate(zip(groups[LANGUAGE], COLOURS, strict=False)):
        found = [run["score"] for run in arm.whole]
        losses.plot([i] * len(found), found, "o", color=colour, markersize=3, alpha=0.6)
        losses.plot([i - 0.2, i + 0.2], [sum(found) / len(found)] * 2 if found else [math.nan] * 2, color=colour)
    losses.set(title="Language, each seed and the mean")
    losses.set_ylabel("held-out loss (nats)", fontsize=8)
    for axis in (selecting, losses):
        axis.set_xticks(range(4), [arm.arm.name for arm in groups[LANGUAGE]], rotation=25, ha="right")
    for axis in axes[0]:
        axis.title.set_fontsize(9)
    learning.legend(fontsize=6, frameon=False)
    selecting.legend(fontsize=6, frameon=False, ncols=2)
    return figure


def columns(intervals: list[Interval]) -> tuple[list[float], list[float]]:
    return [each.mean for each in intervals], [each.half for each in intervals]


STUDY = Study(
    name="selectability",
    title="Averaging and selectability",
    question=(
        "LayerNorm's projection lets attention average, so that the majority task is learnt faster, and its scaling "
        "makes every input of the key map selectable, where without it a share of them cannot win whatever the query."
    ),
    source="Brody, Alon and Yahav, arXiv 2305.02582",
    setting=(
        "Four norms before attention, with and without projection and scaling, of one mean radius at the start and "
        "without weights. Majority: one encoder layer of width 8 and one head names the most frequent of 20 classes at "
        "each of 50 tokens, in 240 steps of 128 sequences at a constant rate, with PyTorch's own initial weights; a "
        "seed is the mean of 3 models. Language: a pre-norm decoder of 3 layers, width 8 and 4 heads with learned "
        "positions reads 256 characters of Python's documentation, in 600 steps of 4 windows, one model a seed; its "
        "other norms are LayerNorm, and weights start with a standard deviation of 1/√width. Rates are chosen on "
        "sequences and text for validation; held-out text shares no line of 40 characters or more with training. (The "
        "paper's windows have about 1000 tokens, where half of normal random keys are unselectable in 8 dimensions.)"
    ),
    equal="equal parameters, steps and tokens within each of the two tasks",
    metric="score",
    not_tested=(
        "Selectability among the keys that a causal query sees, which are fewer than the 256 of a window; the keys of "
        "heads, of which no claim is made: in their 2 dimensions nearly all are unselectable with scaling as without "
        "it, as random ones are. Averaging where it is hard: if attention is even in all arms, there is little for "
        "projection to help with. Wider models, where hardly an input is unselectable in any case; norms with weights; "
        "post-norm models; whether a difference in loss between scaled and unscaled norms comes of selectability or of "
        "what else scaling does."
    ),
    arms=tuple(
        Arm(name, {"project": project, "scale": scale}, group)
        for group in (MAJORITY, LANGUAGE)
        for name, (project, scale) in PARTS.items()
    ),
    full=Budget(
        steps=600,
        rates=(1e-2, 2e-2, 4e-2, 8e-2, 1.6e-1, 3.2e-1),
        seeds=(0, 1, 2, 3, 4),
        options={
            "width": 8,
            "layers": 3,
            "heads": 4,
            "context": 256,
            "batch": 4,
            "held_out": 16,
            "windows": 4,
            "majority_steps": 240,  # of 128 sequences; the others are of the language model
            "models": 3,  # of the majority task, a seed
        },
    ),
    quick=Budget(
        steps=4,
        rates=(1e-2, 2e-2),
        seeds=(0,),
        options={
            "width": 8,
            "layers": 1,
            "heads": 4,
            "context": 48,
            "batch": 2,
            "held_out": 2,
            "windows": 1,
            "majority_steps": 4,
            "models": 1,
        },
    ),
    run=run,
    conclude=conclude,
    draw=draw,
)
