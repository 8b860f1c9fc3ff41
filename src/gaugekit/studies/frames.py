"""Can attention that knows the states by lengths and angles alone stand in for queries and keys?

The weights of relational attention [FR IV] are a function of a Gram matrix, so that turns of the states do not move
them: there is no W_Q and no W_K. What these would hold goes to the MLP as further units. In the arms that decide, with
the scores dot, cosine, rbf and learned, each of the h heads has the G = X Xᵀ of its own k channels, not of all: weights
are unchanged by O(k) in each head, and not by O(d). A frame is left, up to O(k) a head, in which channels make up a
head; and W_V and W_O know one in any case. Two more arms are shown beside them and decide nothing: bilinear, X A Xᵀ,
whose A is a frame of its own, half way back to W_QᵀW_K; and "plain values", the paper's layer in full, Σ_j a_ij x_j
with the one G of all channels and without W_V and W_O, whose output turns along with the states. It does not decide
because all its heads share one pattern, but for their temperatures: where it falls short, that may be for want of heads
and not of a frame.

Rule, fixed before the first run. A group is one task and one norm. By how much an arm is behind standard attention,
seed by seed: held-out loss on language, in percent of the standard arm's mean; accuracy of the answers on recall and
copying, in points. It stands in if the 95 % interval ends below the margin, 2 % of the loss or 5 points, and falls
short if the interval begins above it. A group in which standard attention broke off, or answers less than 90 %, decides
nothing. Confirmed if one and the same score stands in in all groups that decide, and each of the three tasks has such a
group. Not confirmed if every score falls short in at least one of them. Else inconclusive. Intervals are not widened
for the number of comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gaugekit.studies.figures import COLOURS, curve, panels
from gaugekit.studies.fitting import SIZE
from gaugekit.studies.stats import Interval, interval, paired
from gaugekit.studies.study import EDGE, Arm, ArmResult, Budget, Conclusion, Measured, Result, Study, Table, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gaugekit.studies.fitting import Task
    from gaugekit.training.config import ModelConfig

LOSS, ACCURACY = 2.0, 5.0
"""Margins: percent of the standard arm's held-out loss, and points of accuracy."""

LEARNT = 0.9

LANGUAGE, RECALL, COPYING = "language", "recall", "copying"
NORMS = {"layer": "LayerNorm", "rms": "RMSNorm", "none": "no norm"}
PLACES = (
    *((LANGUAGE, norm) for norm in NORMS),
    *((task, norm) for task in (RECALL, COPYING) for norm in ("layer", "none")),
)

STANDARD, BILINEAR, PLAIN = "standard", "bilinear", "dot, plain values"
SCORES = ("dot", "cosine", "rbf", "learned")

ATTENTIONS: Mapping[str, Mapping[str, str]] = {
    STANDARD: {"attention": "standard"},
    **{score: {"attention": "relational", "score": score} for score in (*SCORES, BILINEAR)},
    PLAIN: {"attention": "relational", "score": "dot", "frame": "full", "values": "plain"},
}


def group(task: str, norm: str) -> str:
    return f"{task}, {NORMS[norm]}"


ARMS = tuple(
    Arm(name, {"task": task, "norm": norm, **settings}, group(task, norm))
    for task, norm in PLACES
    for name, settings in ATTENTIONS.items()
)


# --- one run ------------------------------------------------------------------------------------------------------


def run(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
    """What `Fit.measured` says, the curve only of recall and copying, with `error`, the share of wrong answers; and the
    change of weights where states are turned, each head's channels or all of them."""
    import torch

    from gaugekit.studies.fitting import fit, language, made, thinned
    from gaugekit.studies.recalling import copying, recall, wrong
    from gaugekit.studies.turning import turned
    from gaugekit.training.config import OptimizerConfig

    name = arm.settings["task"]
    budget = replace(budget, options={**budget.options, **budget.options[name]})
    task = {LANGUAGE: language, RECALL: recall, COPYING: copying}[name](budget, seed)
    config = configured(arm, budget, task)
    model = made(config, seed)
    found = fit(model, OptimizerConfig(lr=rate), task, budget, seed)
    measured = found.measured()
    del measured["curve"]
    if name != LANGUAGE:
        measured["error"], measured["curve"] = wrong(model, task.held_out), thinned(found.losses, 16)
    generator, tokens = torch.Generator().manual_seed(seed), task.held_out[0][0]
    return {
        **measured,
        "turned": turned(model, tokens, config.heads, generator),
        "turned_whole": turned(model, tokens, 1, generator),
    }


def configured(arm: Arm, budget: Budget, task: Task) -> ModelConfig:
    """The arm's model, its MLP with as many units more as make up for what the attention does not have."""
    from gaugekit.studies.fitting import made, sized

    def parameters(config: ModelConfig) -> int:
        return sum(p.numel() for p in made(config, 0).parameters())

    standard = sized(budget, task.vocab, norm=arm.settings["norm"])
    config = replace(standard, **{key: value for key, value in arm.settings.items() if key not in ("task", "norm")})
    missing = parameters(standard) - parameters(config)
    return replace(config, hidden=config.units + round(missing / (config.layers * 2 * config.width)))


# --- all runs -----------------------------------------------------------------------------------------------------


def behind(arm: ArmResult, standard: ArmResult) -> Interval:
    """Percent of the standard arm's mean loss, or points of accuracy; positive is worse."""
    key, base = ("held_out", mean(standard, "held_out")) if of_language(arm) else ("error", 1.0)
    return paired(arm.values(key), standard.values(key)).percent(base)


def told(arm: ArmResult, standard: ArmResult) -> str:
    return behind(arm, standard).text(1, " %" if of_language(arm) else " points", signed=True)


def of_language(arm: ArmResult) -> bool:
    return arm.arm.settings["task"] == LANGUAGE


def mean(arm: ArmResult, key: str) -> float:
    return interval(arm.values(key)).mean


def margin(arm: ArmResult) -> float:
    return LOSS if of_language(arm) else ACCURACY


def decides(standard: ArmResult) -> bool:
    """Whether anything can be told from a group."""
    return math.isfinite(mean(standard, "held_out")) and (
        of_language(standard) or mean(standard, "error") <= 1 - LEARNT
    )


def standing(arm: ArmResult, standard: ArmResult) -> str:
    found = behind(arm, standard)
    if not decides(standard):
        return "undecided"
    if found.high < margin(arm):
        return "stands in"
    return "falls short" if found.low > margin(arm) else "open"


def conclude(result: Result) -> Conclusion:
    standards = {name: result[f"{name} / {STANDARD}"] for name in result.groups()}
    standards = {name: arm for name, arm in standards.items() if decides(arm)}
    if not standards:
        return Conclusion("inconclusive", "standard attention learnt nothing at this size", tables(result))
    counts, furthest, able, short = [], [], [], []
    for score in SCORES:
        pairs = [(result[f"{name} / {score}"], standard) for name, standard in standards.items()]
        found = [standing(*pair) for pair in pairs]
        able += [score] * (set(found) == {"stands in"})
        short += [score] * ("falls short" in found)
        counts.append(f"{score} in {found.count('stands in')}")
        worst = max(pairs, key=lambda pair: behind(*pair).mean / margin(pair[0]))
        furthest.append(f"{score} {told(*worst)} ({worst[0].arm.group})")
    verdict: Verdict = "inconclusive"
    if able and {arm.arm.settings["task"] for arm in standards.values()} == {LANGUAGE, RECALL, COPYING}:
        verdict = "confirmed"
    elif len(short) == len(SCORES):
        verdict = "not confirmed"
    line = (
        f"of the {len(standards)} groups that decide, scores stand in for standard attention: {', '.join(counts)}; "
        f"furthest behind it: {', '.join(furthest)}"
    )
    return Conclusion(verdict, line, tables(result))


def tables(result: Result) -> tuple[Table, ...]:
    rows = []
    for name, arms in result.groups().items():
        standard = result[f"{name} / {STANDARD}"]
        for arm in arms:
            whole = arm.whole
            cells = ["broke off"] * 5
            if whole:
                means = {key: math.fsum(each[key] for each in whole) / len(whole) for key in whole[0] if key != "curve"}
                cells = [
                    f"{means['parameters']:.0f}",
                    f"{means['tokens'] / means['seconds'] / 1e3:.1f}",
                    interval([100 * (1 - each["error"]) for each in whole]).text(1) if "error" in means else "",
                    f"{means['turned']:.0e}",
                    f"{means['turned_whole']:.0e}",
                ]
            alone = arm is standard
            rows.append(
                (
                    name,
                    arm.arm.name,
                    arm.told_rate,
                    interval(arm.values("held_out")).text(),
                    cells[2],
                    "" if alone else told(arm, standard),
                    "" if alone else standing(arm, standard) if arm.arm.name in SCORES else "not asked",
                    *cells[3:],
                    *cells[:2],
                )
            )
    columns = (
        "group",
        "attention",
        "learning rate",
        "held-out loss (nats)",
        "accuracy (%)",
        "behind standard (% of the loss, points)",
        "standing",
        "change of weights, heads' channels turned",
        "change of weights, all channels turned",
        "parameters",
        "1000 tokens a CPU second",
    )
    return (Table(f"By group. {EDGE}", columns, tuple(rows)),)


# --- the figure ---------------------------------------------------------------------------------------------------


def draw(result: Result) -> Figure:
    figure, axes = panels(3, 2, width=3.8)
    names = list(ATTENTIONS)
    lags(axes[0][0], result, (LANGUAGE,), names[1:], "Held-out loss above standard, language", "% of the loss")
    lags(axes[0][1], result, (RECALL, COPYING), names[1:], "Accuracy below standard", "points")
    changes(axes[0][2], result, names)
    for axis, name in zip(
        axes[1], (group(RECALL, "layer"), group(RECALL, "none"), group(COPYING, "none")), strict=True
    ):
        for colour, each in zip(COLOURS, names, strict=False):
            curve(axis, result[f"{name} / {each}"], colour)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("steps", fontsize=8)
        axis.set_ylabel("training loss (nats)", fontsize=8)
        axis.legend(fontsize=6, frameon=False)
    return figure


def lags(axis: Axes, result: Result, tasks: Sequence[str], names: Sequence[str], title: str, unit: str) -> None:
    """A point with its interval for every arm and group; what broke off is left out."""
    places = [place for place in PLACES if place[0] in tasks]
    for i, (task, norm) in enumerate(places):
        name = group(task, norm)
        standard = result[f"{name} / {STANDARD}"]
        found = [behind(result[f"{name} / {each}"], standard) for each in names]
        shown = [j for j, each in enumerate(found) if math.isfinite(each.mean)]
        y = [len(names) - 1 - j + 0.16 * ((len(places) - 1) / 2 - i) for j in shown]
        half = [found[j].half if math.isfinite(found[j].half) else 0.0 for j in shown]
        label = NORMS[norm] if len(tasks) == 1 else name
        colour = COLOURS[(i if len(tasks) == 1 else i + 3) % len(COLOURS)]
        axis.errorbar(
            [found[j].mean for j in shown], y, xerr=half, fmt="o", markersize=3, linewidth=1, color=colour, label=label
        )
    allowed = LOSS if tasks == (LANGUAGE,) else ACCURACY
    axis.axvline(0, color="black", linewidth=0.8)
    axis.axvline(allowed, color="black", linewidth=0.8, linestyle=":", label=f"margin, {allowed:g}")
    axis.set_yticks(range(len(names)), names[::-1])
    axis.set_xlabel(unit, fontsize=8)
    axis.set_title(title, fontsize=9)
    below(axis)


def changes(axis: Axes, result: Result, names: Sequence[str]) -> None:
    """Every run's change of weights, over all groups."""
    for key, colour, label, shift in (
        ("turned", COLOURS[0], "each head's channels", 0.12),
        ("turned_whole", COLOURS[1], "all channels", -0.12),
    ):
        points = [
            (max(each[key], 1e-17), len(names) - 1 - j + shift)
            for j, name in enumerate(names)
            for arm in result.arms
            if arm.arm.name == name
            for each in arm.whole
        ]
        axis.plot(
            [x for x, _ in points], [y for _, y in points], "o", markersize=2.5, alpha=0.5, color=colour, label=label
        )
    axis.set_yticks(range(len(names)), names[::-1])
    axis.set(xscale="log", xlim=(1e-17, 1e2))
    axis.set_xlabel("relative change", fontsize=8)
    axis.set_title("Change of weights under turns of states", fontsize=9)
    below(axis)


def below(axis: Axes) -> None:
    """The legend, outside, where it hides nothing."""
    axis.legend(fontsize=6, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncol=3)


STUDY = Study(
    name="frames",
    title="Attention without a frame",
    question=(
        "Attention whose weights depend, in each head, on the Gram matrix G = X Xᵀ of the head's own channels alone "
        "can stand in for standard attention: with one of its scores, and equal parameters, a model is not behind by "
        "more than 2 % of the held-out loss on language or 5 points of accuracy on recall and copying."
    ),
    source="François and Ravera, arXiv 2602.18948, section IV",
    setting=(
        "Pre-norm decoders of 2 layers, width 64 and 4 heads with learned positions, trained by AdamW without weight "
        "decay for 800 steps: on characters of Python's documentation (windows of 64), on associative recall (4 pairs "
        "of 4 keys and 8 values, then each key three times) and on copying (a string of 16 out of 16 symbols). Weights "
        "start with a standard deviation of 1/√width. Relational heads have linear values and outputs like standard "
        "ones, and each sees its own 16 channels of the states, so that weights are unchanged by turns within these "
        'alone. "Plain values" is the paper\'s layer in full, one G of all channels for all heads; it is shown and '
        "decides nothing, as its heads share one pattern but for a temperature. Rates are chosen on validation text, "
        "or on windows drawn for that; held-out text shares no line of 40 characters or more with training."
    ),
    equal=(
        "equal parameters to 1 %: what an attention has less than the standard one is given to the MLP as units; equal "
        "steps and tokens"
    ),
    metric="held_out",
    not_tested=(
        "Weights that are functions of the whole G, of all channels at once, with a pattern of its own for each head; "
        "larger models, longer training and longer texts; rotary positions, which turn queries and keys; other ways to "
        "spend the parameters that relational heads do not have. Speeds are of CPU time on one thread."
    ),
    arms=ARMS,
    full=Budget(
        steps=800,
        rates=(1e-3, 3e-3, 1e-2, 3e-2),
        seeds=(1, 2, 3),  # 0 was looked at to choose the sizes
        options={
            **SIZE,
            "layers": 2,
            LANGUAGE: {"context": 64, "batch": 8},
            RECALL: {"pairs": 4, "keys": 4, "values": 8, "queries": 3, "batch": 16, "context": 31},
            COPYING: {"length": 16, "symbols": 16, "batch": 16, "context": 32},
        },
    ),
    quick=Budget(
        steps=3,
        rates=(3e-3,),
        seeds=(0,),
        options={
            "width": 8,
            "layers": 2,
            "heads": 2,
            "held_out": 2,
            LANGUAGE: {"context": 8, "batch": 2},
            RECALL: {"pairs": 2, "keys": 2, "values": 2, "queries": 1, "batch": 2, "context": 7},
            COPYING: {"length": 4, "symbols": 4, "batch": 2, "context": 8},
        },
    ),
    run=run,
    conclude=conclude,
    draw=draw,
)
