"""Do heads train better where their parameters are the invariants G_QK and G_VO?

All arms start from the function of the same standard heads, as drawn: these themselves; the same, moved to where A and
B of each product BᵀA are equally long in every direction; and `InvariantAttention`, of rank k (2dk − k² numbers a
product, each function once) or in the full form (whole products, d² numbers). One more arm is that of rank k, with
units added to the MLP until parameters are as many as with standard heads.

Rule, fixed before the first run. The difference of held-out loss after equal steps, invariants of rank k less standard
heads, seed by seed, in percent of the standard arm's mean. Confirmed if the 95 % interval ends below 1 %: better, or as
good for all that matters. Not confirmed if it begins above 1 %. Else inconclusive. A run that broke off is infinitely
bad. Invariants are called better, or worse, if the interval ends below 0, or begins above it. The other arms, and the
measures of conditioning, are shown and decide nothing.

Shapes: d, h, k width, heads, head dimension; a product G (h, d, d) is of A and B (h, r, d), r = k or d.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gaugekit.studies.figures import COLOURS, band, curve, panels
from gaugekit.studies.fitting import SIZE
from gaugekit.studies.stats import Interval, interval, paired
from gaugekit.studies.study import EDGE, Arm, ArmResult, Budget, Conclusion, Measured, Result, Study, Table, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from gaugekit.nn.decoding import MLP, CausalAttention
    from gaugekit.nn.invariant import Heads
    from gaugekit.training.decoder import Decoder

MARGIN = 1.0
"""Percent of the standard arm's held-out loss."""

STANDARD, BALANCED, INVARIANT = "standard heads", "standard heads, balanced first", "invariants of rank k"
WIDER, FULL = "invariants of rank k, more units", "invariants, full form"

ARMS = (
    Arm(STANDARD, {"form": "standard"}),
    Arm(BALANCED, {"form": "standard", "balanced": True}),
    Arm(INVARIANT, {"form": "invariant"}),
    Arm(WIDER, {"form": "invariant", "wider": True}),
    Arm(FULL, {"form": "invariant", "full": True}),
)


# --- one run ------------------------------------------------------------------------------------------------------


def run(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
    """What `Fit.measured` says; `conditions`, [steps, median of σ₁/σ_k over all products]; and the largest eigenvalue
    of the Hessian in the arm's parameters, with its sign, `sharp_start` and `sharp`. `edge`: that of the Hessian which
    Adam sees at the end, over the largest at which its steps are stable at the rate that it has there."""
    from gaugekit.studies.curvature import adam_limit, adam_scales, largest
    from gaugekit.studies.fitting import fit, language, made, sized, thinned
    from gaugekit.studies.watching import points
    from gaugekit.training.config import OptimizerConfig

    task = language(budget, seed)
    model = made(sized(budget, task.vocab), seed)
    rewrite(model, arm)
    batch = task.held_out[0]
    sharp_start = largest(model, batch)
    conditions: list[tuple[int, float]] = []
    at = points(budget.steps, budget.options["points"])

    def watch(step: int, *_: object) -> None:
        if step in at:
            conditions.append((step, float(f"{condition(model):.4g}")))

    # The norm of the whole gradient depends on the coordinates: clipping would, too.
    found = fit(model, OptimizerConfig(lr=rate), task, budget, seed, watch, clip=0.0)
    group = found.optimizer.param_groups[0]
    limit = adam_limit(group["betas"][0], group["lr"])
    return {
        **found.measured(),
        "curve": thinned(found.losses, 40),
        "conditions": conditions,
        "sharp_start": sharp_start,
        "sharp": largest(model, batch),
        "edge": largest(model, batch, adam_scales(found.optimizer)) / limit,
    }


def rewrite(model: Decoder, arm: Arm) -> None:
    """Standard heads become what the arm has, in place; the function stays, but for what units that are added do."""
    import torch

    from gaugekit.nn.invariant import InvariantAttention
    from gaugekit.optim.finding import find_pairs
    from gaugekit.optim.pairs import balance_
    from gaugekit.training.decoder import Causal

    settings, config = arm.settings, model.config
    if settings.get("balanced"):
        balance_(find_pairs(model, ("vo", "qk")))
    if settings["form"] == "standard":
        return
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        heads, rank = heads_of(block.attention), config.width if settings.get("full") else None
        block.attention = Causal(InvariantAttention.from_heads(heads, rank))
        if settings.get("wider"):
            # 2 h k² numbers less, at 2 d a unit
            more = round(config.heads * config.head_dim**2 / config.width)
            with torch.no_grad():
                block.mlp = widened(block.mlp, more, config.init_std, config.init_std / math.sqrt(2 * config.layers))


def heads_of(attention: CausalAttention) -> Heads:
    from gaugekit.nn.invariant import Heads

    a = attention
    rows = (a.query.weight, a.key.weight, a.value.weight, a.out.weight.mT)
    return Heads(*(w.detach().unflatten(0, (-1, a.head_dim)) for w in rows))


def widened(mlp: MLP, more: int, up: float, down: float) -> MLP:
    """Its units, and `more` that are drawn normal(0, up) and normal(0, down)."""
    from gaugekit.nn.decoding import MLP

    hidden, width = mlp.up.weight.shape
    wide = MLP(width, hidden + more, dtype=mlp.up.weight.dtype)
    for into, old, std in ((wide.up.weight, mlp.up.weight, up), (wide.down.weight, mlp.down.weight, down)):
        into.normal_(std=std)
        into[: old.shape[0], : old.shape[1]] = old
    return wide


def condition(model: Decoder) -> float:
    """The median of σ₁/σ_k over the products G_QK and G_VO of all heads."""
    import torch

    from gaugekit.linalg import product_spectrum
    from gaugekit.nn.decoding import CausalAttention

    ratios: list[Tensor] = []
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        if isinstance(block.attention, CausalAttention):
            heads = heads_of(block.attention)
            pairs = ((heads.w_k, heads.w_q), (heads.w_v, heads.w_o))
        else:
            inner = block.attention.attention
            pairs = ((p.reader().detach(), p.columns.detach()) for p in (inner.qk, inner.vo))
        spectra = [product_spectrum(a, b) for a, b in pairs]
        ratios += [s[:, 0] / s[:, model.config.head_dim - 1] for s in spectra]
    return float(torch.cat(ratios).median())


# --- all runs -----------------------------------------------------------------------------------------------------


def difference(result: Result, name: str) -> Interval:
    """Held-out loss less that of standard heads, in percent of its mean."""
    standard = result[STANDARD].values("held_out")
    return paired(result[name].values("held_out"), standard).percent(interval(standard).mean)


def conclude(result: Result) -> Conclusion:
    found = difference(result, INVARIANT)
    verdict: Verdict = "inconclusive"
    if found.high < MARGIN:
        verdict = "confirmed"
    elif found.low > MARGIN:
        verdict = "not confirmed"
    standing = "better" if found.high < 0 else "worse" if found.low > 0 else "no clear difference"
    paces = [pace(result[name]) for name in (INVARIANT, STANDARD)]
    line = (
        f"held-out loss of invariants against standard heads after equal steps: {told(found)} ({standing}); with the "
        f"parameters made equal {told(difference(result, WIDER))}, in the full form {told(difference(result, FULL))}"
    )
    if all(map(math.isfinite, paces)):
        line += f"; a step takes {paces[0] / paces[1]:.2f} times the CPU time"
    return Conclusion(verdict, line, tables(result))


def told(found: Interval) -> str:
    return found.text(2, " %", signed=True)


def pace(arm: ArmResult) -> float:
    """CPU seconds a token."""
    runs = arm.whole
    return math.fsum(each["seconds"] for each in runs) / sum(each["tokens"] for each in runs) if runs else math.inf


def tables(result: Result) -> tuple[Table, ...]:
    rows = []
    for arm in result.arms:
        runs, name = arm.whole, arm.arm.name
        cells = ["broke off"] * 7
        if runs:
            ends = [interval([each["conditions"][i][1] for each in runs]) for i in (0, -1)]
            sharp = [interval([each[key] for each in runs]) for key in ("sharp_start", "sharp", "edge")]
            digits = (1, 1, 2)
            cells = [
                f"{runs[0]['parameters']}",
                *(each.text(1) for each in ends),
                *(each.text(n) for each, n in zip(sharp, digits, strict=True)),
                f"{1e-3 / pace(arm):.1f}",
            ]
        rate = arm.told_rate
        loss = interval(arm.values("held_out")).text()
        rows.append(
            (name, cells[0], rate, loss, "" if name == STANDARD else told(difference(result, name)), *cells[1:])
        )
    columns = (
        "heads",
        "parameters",
        "learning rate",
        "held-out loss (nats)",
        "against standard heads",
        "σ₁/σ_k of products, start",
        "σ₁/σ_k of products, end",
        "largest eigenvalue of the Hessian, start (nats)",
        "largest eigenvalue of the Hessian, end (nats)",
        "largest eigenvalue that Adam sees, of its limit, end",
        "1000 tokens a CPU second",
    )
    return (Table(EDGE, columns, tuple(rows)),)


def draw(result: Result) -> Figure:
    figure, axes = panels(2, 2, width=4.2)
    (by_step, by_time), (by_rate, conditions) = axes
    for colour, arm in zip(COLOURS, result.arms, strict=False):
        curve(by_step, arm, colour)
        runs, seconds = arm.whole, pace(arm)
        timed = [
            [(step * seconds * each["tokens"] / result.budget.steps, loss) for step, loss in each["curve"]]
            for each in runs
        ]
        band(by_time, timed, colour, arm.arm.name)
        curve(conditions, arm, colour, key="conditions")
        tried = [(float(rate), loss) for rate, loss in arm.tuning.items() if math.isfinite(loss)]
        by_rate.plot([x for x, _ in tried], [y for _, y in tried], "o-", markersize=3, linewidth=1, color=colour)
    for axis, x in ((by_step, "steps"), (by_time, "CPU seconds of steps")):
        losses = [loss for arm in result.arms for each in arm.whole for _, loss in each["curve"]]
        early = [loss for arm in result.arms for each in arm.whole for _, loss in each["curve"][2:]] or losses
        if losses:
            axis.set_ylim(0.97 * min(losses), 1.03 * max(early))
        label(axis, "Training", x, "training loss (nats)")
    by_rate.set(xscale="log", xticks=result.budget.rates, xticklabels=[f"{rate:g}" for rate in result.budget.rates])
    by_rate.minorticks_off()
    label(by_rate, "Choice of the rate", "learning rate", "validation loss (nats), one seed")
    conditions.set(xscale="symlog", yscale="log")
    conditions.tick_params(which="both", labelsize=7)
    label(conditions, "Condition of products G_QK and G_VO", "steps", "median of σ₁/σ_k")
    for axis in (by_step, by_time, conditions):
        axis.legend(fontsize=6, frameon=False)
    return figure


def label(axis: Axes, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)


STUDY = Study(
    name="parameters",
    title="Heads in their invariants",
    question=(
        "Heads whose parameters are the invariants G_QK and G_VO, without redundancy, train as well as standard heads "
        "or better: after equal steps their held-out loss is not higher by 1 % or more."
    ),
    source="François and Ravera, arXiv 2602.18948, table 1",
    setting=(
        "A pre-norm decoder of 3 layers, width 64 and 4 heads with LayerNorm and learned positions, trained by AdamW "
        "without weight decay and clipping to predict characters of Python's documentation. Arms start from the same "
        "function, of weights with a standard deviation of 1/√width. Rank k: k columns of a product and the "
        "combinations that its other columns are of these. Rates are chosen on validation text; held-out text shares "
        "no line of 40 characters or more with training."
    ),
    equal=(
        "equal models, steps and tokens; the invariants of rank k have as many parameters less as standard heads have "
        "redundant ones, and are shown at equal parameters, too; the full form has more"
    ),
    metric="held_out",
    not_tested=(
        "Other optimizers, for which see the study of paths; rates of their own for columns and combinations; larger "
        "heads and models; rotary positions, which G_QK does not see; pivots that are chosen anew in training. Speeds "
        "are of CPU time on one thread."
    ),
    arms=ARMS,
    full=Budget(
        steps=500,
        rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
        seeds=(0, 1, 2, 3, 4),
        options={**SIZE, "points": 12},
    ),
    quick=Budget(
        steps=4,
        rates=(2e-3, 4e-3),
        seeds=(0,),
        options={
            "width": 16,
            "layers": 2,
            "heads": 2,
            "context": 16,
            "batch": 4,
            "points": 4,
            "held_out": 2,
        },
    ),
    run=run,
    conclude=conclude,
    draw=draw,
)
