"""LayerNorm projects and scales: does projecting help attention to average, and does scaling make all keys selectable?

Four norms that differ in one thing each stand before attention: with and without projection, with and without scaling.
All start with the same radius √d in the mean (in the published code the arm without projection had another one), and
none has weights. Averaging is asked with the paper's majority task, selectability with a language model of its width
and heads, at the inputs of the key maps, by `gaugekit.geometry.keys`. Scaled keys lie on a sphere, where none is in the
hull of others: that half is a theorem, and what it is worth depends on how many keys are in the hull without it.

Rule, fixed before the first run; the verdict is that of both claims together: confirmed if both hold, not confirmed if
one fails, else inconclusive.
(a) Averaging: log₂ of the ratio of steps to an accuracy of 0.9, with projection over without, seed by seed, among scaled
    norms and among unscaled ones. Holds if both 95 % intervals lie below log₂ 0.9 (a tenth fewer steps), fails if one
    lies above it.
(b) Selectability: share of unselectable keys after training, all layers together. Holds if no run with scaling has more
    than 0.1 %, and the 95 % intervals of both arms without lie above 5 %. Fails if a run with scaling has more than 1 %,
    or an interval of an arm without lies below 5 %.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from gaugekit.studies.figures import COLOURS, curve, panels
from gaugekit.studies.stats import Interval, interval, paired
from gaugekit.studies.study import Arm, ArmResult, Budget, Conclusion, Measured, Result, Study, Table, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from gaugekit.training.decoder import Decoder

GOAL = 0.9
FASTER = math.log2(0.9)
NONE_AT_ALL, SOME, MATTERS = 0.001, 0.01, 0.05
EVERY = 2
"""Steps between looks at the accuracy."""

MAJORITY, LANGUAGE = "majority", "language"
BOTH, SCALING, PROJECTION, NEITHER = "projection and scaling", "scaling only", "projection only", "neither"
PARTS = {BOTH: (True, True), SCALING: (False, True), PROJECTION: (True, False), NEITHER: (False, False)}


def run(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
    return (averaging if arm.group == MAJORITY else selecting)(arm, rate, seed, budget)


def averaging(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
    """Means over some models, as one alone is soon trained and says little.

    score       held-out loss (nats), the mean over training
    accuracy    held-out, at the end
    to_goal     geometric mean of the steps to `GOAL`, None where a model did not reach it
    evenness    of attention at the end: exp(entropy) over the number of tokens
    curve       [step, accuracy]
    """
    import torch

    from gaugekit.studies.fitting import fit
    from gaugekit.studies.majority import Majority, PartNorm, accuracy_and_loss, evenness, majority
    from gaugekit.studies.watching import Through
    from gaugekit.training.config import OptimizerConfig

    task, models = majority(), budget.options["models"]
    budget = replace(budget, steps=budget.options["majority_steps"])
    curves, even, parameters = [], [], 0
    for model_seed in range(seed * models, (seed + 1) * models):
        torch.manual_seed(model_seed)
        model = Majority(PartNorm(**arm.settings), budget.options["width"])
        through = Through(range(0, budget.steps + 1, EVERY), lambda model: accuracy_and_loss(model, task))
        fit(model, OptimizerConfig(lr=rate), task, budget, model_seed, watch=through, cosine=False)
        curves.append(list(through.kept.items()))
        even.append(evenness(model, task))
        parameters = sum(p.numel() for p in model.parameters())
    first = [next((step for step, (right, _) in each if right >= GOAL), None) for each in curves]
    reached = [step for step in first if step is not None]
    means = [
        [points[0][0], *(math.fsum(found[k] for _, found in points) / models for k in (0, 1))]
        for points in zip(*curves, strict=True)
    ]
    return {
        "score": math.fsum(row[2] for row in means) / len(means),
        "accuracy": means[-1][1],
        "to_goal": math.exp(math.fsum(map(math.log, reached)) / models) if len(reached) == models else None,
        "evenness": math.fsum(even) / models,
        "parameters": parameters,
        "curve": [[row[0], round(row[1], 4)] for row in means[:: max(1, len(means) // 30)]],
    }


def selecting(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
    """`score` is the held-out loss at the end; "before" and "after" training, see `unselectable_shares`."""
    import torch

    from gaugekit.studies.fitting import fit, language
    from gaugekit.studies.majority import PartNorm
    from gaugekit.training.config import OptimizerConfig

    task = language(budget)
    model = decoder(arm, task.vocab, seed, budget)
    windows = [tokens[:1] for tokens, _ in task.held_out[:: max(1, len(task.held_out) // budget.options["windows"])]]
    with torch.no_grad():
        model(task.held_out[0][0])  # sets the size that unscaled norms divide by
    before = unselectable_shares(model, windows)
    fitted = fit(model, OptimizerConfig(lr=rate), task, budget, seed)
    return {
        **fitted.measured(),
        "score": fitted.held_out,
        "before": before,
        "after": unselectable_shares(model, windows),
    }


def decoder(arm: Arm, vocab: int, seed: int, budget: Budget) -> Decoder:
    """With the arm's norm before attention; all others are LayerNorm, as in the paper's models."""
    from gaugekit.studies.fitting import made, sized
    from gaugekit.studies.majority import PartNorm

    model = made(sized(budget, vocab, init_std=budget.options["width"] ** -0.5), seed)
    for block in model.blocks:
        block.norm_attention = PartNorm(**arm.settings)
    return model


def unselectable_shares(model: Decoder, windows: list[Tensor]) -> Measured:
    """By layer, over some windows, in float64: shares of unselectable keys at the input of the key map ("inputs"), of
    the same states projected alike but divided by one number ("unscaled"), and among the keys of a head ("heads")."""
    from copy import deepcopy

    from gaugekit.geometry.keys import unselectable
    from gaugekit.studies.watching import passages

    wide, tokens = deepcopy(model).double(), windows[0].shape[-1]
    found: Measured = {"inputs": [], "unscaled": [], "heads": []}
    for block, passage in zip(wide.blocks, passages(wide, windows)[0:-1:2], strict=True):
        states, inputs = (each.unflatten(0, (-1, tokens)) for each in (passage.before, passage.after))
        if block.norm_attention.project:
            states = states - states.mean(-1, keepdim=True)
        attention = block.attention
        heads = attention.key(inputs).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for key, keys in (("inputs", inputs), ("unscaled", states), ("heads", heads)):
            found[key].append(round(unselectable(keys.detach()).share, 4))
    return found


def chance(budget: Budget, dimensions: int) -> float:
    """Share of unselectable ones among as many normal random keys as a window has, in that many dimensions."""
    import torch

    from gaugekit.geometry.keys import unselectable

    generator = torch.Generator().manual_seed(0)
    shape = (4, budget.options["context"], dimensions)
    return unselectable(torch.randn(shape, generator=generator, dtype=torch.float64)).share


# --- what comes out -----------------------------------------------------------------------------------------


def whole(arm: ArmResult) -> list[Measured]:
    return [run for run in arm.runs if "failed" not in run]


def steps_to_goal(arm: ArmResult) -> list[float]:
    """log₂, inf where the accuracy was not reached."""
    return [math.inf if run.get("to_goal") is None else math.log2(run["to_goal"]) for run in arm.runs]


def share(run: Measured, when: str, what: str) -> float:
    layers = run[when][what]
    return math.fsum(layers) / len(layers)


def shares(arm: ArmResult, when: str, what: str) -> Interval:
    return interval([share(run, when, what) for run in whole(arm)] or [math.inf])


def averages(result: Result) -> tuple[Verdict, str]:
    pairs = ((BOTH, SCALING), (PROJECTION, NEITHER))
    found = [paired(*(steps_to_goal(result[f"{MAJORITY} / {name}"]) for name in pair)) for pair in pairs]
    verdict: Verdict = "inconclusive"
    if any(each.low > FASTER for each in found):
        verdict = "not confirmed"
    elif all(each.high < FASTER for each in found):
        verdict = "confirmed"
    scaled, unscaled = (ratio(each) for each in found)
    return (
        verdict,
        f"with projection {GOAL} is reached in {scaled} the steps among scaled norms, {unscaled} among others",
    )


def ratio(logs: Interval) -> str:
    if not math.isfinite(logs.mean) or not math.isfinite(logs.half):
        return f"{2**logs.mean:.2f} times" if math.isfinite(logs.mean) else ("0" if logs.mean < 0 else "∞") + " times"
    return f"{2**logs.mean:.2f} ({2**logs.low:.2f} to {2**logs.high:.2f}) times"


def selects(result: Result) -> tuple[Verdict, str]:
    scaled, unscaled = (
        [result[f"{LANGUAGE} / {name}"] for name in pair] for pair in ((BOTH, SCALING), (PROJECTION, NEITHER))
    )
    if not all(whole(arm) for arm in (*scaled, *unscaled)):
        return "inconclusive", "an arm broke off in every run"
    most = max(share(run, "after", "inputs") for arm in scaled for run in whole(arm))
    without = [shares(arm, "after", "inputs") for arm in unscaled]
    verdict: Verdict = "inconclusive"
    if most > SOME or any(each.high < MATTERS for each in without):
        verdict = "not confirmed"
    elif most <= NONE_AT_ALL and all(each.low > MATTERS for each in without):
        verdict = "confirmed"
    low, high = (f(each.mean for each in without) for f in (min, max))
    heads = [shares(arm, "after", "heads").mean for arm in (scaled[0], unscaled[0])]
    words = (
        f"{100 * most:.1f} % of keys are unselectable with scaling, {100 * low:.0f} to {100 * high:.0f} % without; but among "
        f"the keys of a head {100 * heads[0]:.0f} and {100 * heads[1]:.0f} %"
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
    return Conclusion(verdict, line, tables(result))


def tables(result: Result) -> tuple[Table, ...]:
    groups = result.groups()

    def head(arm: ArmResult) -> tuple[str, str]:
        return arm.arm.name, f"{arm.rate:g}{' (edge)' if arm.at_edge else ''}"

    averaged = []
    for arm in groups[MAJORITY]:
        logs = interval(steps_to_goal(arm))
        reached = ratio(logs).removesuffix(" times") if math.isfinite(logs.mean) else "not in every run"
        columns = [interval(arm.values(key)).text() for key in ("accuracy", "score", "evenness")]
        averaged.append((*head(arm), reached, *columns))
    selected = []
    for arm in groups[LANGUAGE]:
        percent = [
            Interval(100 * found.mean, 100 * found.half).text(1)
            for when, what in (("before", "inputs"), ("after", "inputs"), ("after", "unscaled"), ("after", "heads"))
            for found in (shares(arm, when, what),)
        ]
        selected.append((*head(arm), interval(arm.values("score")).text(), *percent))
    width, heads = result.budget.options["width"], result.budget.options["heads"]
    random = [f"{100 * chance(result.budget, k):.1f}" for k in (width, width // heads)]
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
            f"Language, {result.budget.options['context']} keys: unselectable ones (%), mean ± 95 % over seeds",
            (
                "norm before attention",
                "learning rate",
                "held-out loss (nats)",
                "at the start",
                "at the end",
                "the same states without scaling",
                f"keys of a head ({width // heads} dimensions)",
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
    learning.set(title="Majority task, best rates", xlabel="steps")
    learning.set_ylabel("accuracy", fontsize=8)
    width, heads = result.budget.options["width"], result.budget.options["heads"]
    kinds = (
        ("inputs", f"inputs of key maps, {width} dimensions", 0),
        ("heads", f"keys of a head, {width // heads}", 4),
    )
    for what, label, place in kinds:
        bars = [shares(arm, "after", what) for arm in groups[LANGUAGE]]
        offset = -0.2 if what == "inputs" else 0.2
        selecting.bar(
            [i + offset for i in range(len(bars))],
            [100 * each.mean if math.isfinite(each.mean) else 0 for each in bars],
            0.36,
            yerr=[100 * each.half if math.isfinite(each.half) else 0 for each in bars],
            color=COLOURS[place],
            error_kw={"linewidth": 0.8},
            label=label,
        )
    for k, colour in ((width, COLOURS[0]), (width // heads, COLOURS[4])):
        selecting.axhline(
            100 * chance(result.budget, k), color=colour, linewidth=0.8, linestyle=":", label=f"random keys, {k}"
        )
    selecting.set(title="Unselectable keys after training", ylabel="%", ylim=(0, 150))
    selecting.set_xticks(range(4), [arm.arm.name for arm in groups[LANGUAGE]], rotation=25, ha="right")
    for arm, colour in zip(groups[LANGUAGE], COLOURS, strict=False):
        curve(losses, arm, colour)
    losses.set(title="Language, best rates", xlabel="steps")
    losses.set_ylabel("training loss (nats)", fontsize=8)
    for axis in axes[0]:
        axis.title.set_fontsize(9)
        axis.legend(fontsize=6, frameon=False)
    return figure


STUDY = Study(
    name="selectability",
    title="Averaging and selectability",
    question=(
        "LayerNorm's projection lets attention average, so that the majority task is learnt faster, and its scaling makes "
        "every key selectable, where without it a share of them cannot win whatever the query."
    ),
    source="Brody, Alon and Yahav, arXiv 2305.02582",
    setting=(
        "Four norms before attention, with and without projection and scaling, of one mean radius at the start and "
        "without weights. Majority: one encoder layer of width 8 and one head names the most frequent of 20 classes at "
        "each of 50 tokens. Language: a pre-norm decoder of width 8 with 4 heads and learned positions reads 256 "
        "characters of Python's documentation; its other norms are LayerNorm."
    ),
    equal="equal parameters, steps and tokens",
    metric="score",
    not_tested=(
        "Wider models, where hardly a key is unselectable in any case; norms with weights; post-norm models; whether the "
        "difference in loss between scaled and unscaled norms comes of selectability or of anything else that scaling does."
    ),
    arms=tuple(
        Arm(name, {"project": project, "scale": scale}, group)
        for group in (MAJORITY, LANGUAGE)
        for name, (project, scale) in PARTS.items()
    ),
    full=Budget(
        steps=600,
        rates=(5e-3, 1e-2, 2e-2, 4e-2, 8e-2, 1.6e-1, 3.2e-1),
        seeds=(0, 1, 2, 3, 4),
        options={
            "width": 8,
            "layers": 3,
            "heads": 4,
            "context": 256,
            "batch": 4,
            "held_out": 16,
            "windows": 4,
            "majority_steps": 240,
            "models": 3,
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
