"""Heads in invariants: that each verdict can come out, that arms start alike, and what Adam sees of curvature."""

from __future__ import annotations

import math
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from drawn import gap
from torch import Tensor, nn

from gaugekit.linalg import balance_defect
from gaugekit.nn.decoding import MLP
from gaugekit.studies.curvature import adam_limit, adam_scales
from gaugekit.studies.fitting import made
from gaugekit.studies.parameters import (
    ARMS,
    BALANCED,
    FULL,
    INVARIANT,
    STANDARD,
    STUDY,
    WIDER,
    condition,
    difference,
    heads_of,
    rewrite,
    told,
    widened,
)
from gaugekit.studies.study import ArmResult, Measured, Result
from gaugekit.training.config import ModelConfig
from gaugekit.training.decoder import Decoder

# --- verdicts ---------------------------------------------------------------------------------------------------

BROKEN: Measured = {"failed": "the loss is nan"}


def run(loss: float, seed: int) -> Measured:
    return {
        "held_out": loss + 0.05 * seed,
        "training": loss,
        "tokens": 1000,
        "seconds": 0.5,
        "parameters": 1000,
        "curve": [[i, loss + 1 / i] for i in (100, 200, 300, 400, 500)],
        "conditions": [[0, 8.0], [500, 20.0]],
        "sharp_start": 40.0,
        "sharp": 50.0,
        "edge": 0.1,
    }


def result(invariant: list[Measured], standard: list[Measured]) -> Result:
    good = [run(2.0, seed) for seed in range(len(standard))]
    by_name = {STANDARD: standard, INVARIANT: invariant}
    arms = tuple(
        ArmResult(a, {"0.001": 2.0, "0.1": math.inf}, 1e-3, False, tuple(by_name.get(a.name, good))) for a in ARMS
    )
    return Result(STUDY.name, False, STUDY.full, arms, {})


def runs(*losses: float) -> list[Measured]:
    return [run(loss, seed) for seed, loss in enumerate(losses)]


STEADY = runs(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("invariant", "standard", "verdict", "said"),
    [
        (runs(1.9, 1.91, 1.9), STEADY, "confirmed", "(better)"),
        (runs(2.0, 2.001, 1.999), STEADY, "confirmed", "(no clear difference)"),
        (runs(2.01, 2.01, 2.011), STEADY, "confirmed", "(worse)"),  # by half a percent, which does not matter
        (runs(2.1, 2.11, 2.12), STEADY, "not confirmed", "(worse)"),
        (runs(1.9, 2.0, 2.2), STEADY, "inconclusive", "(no clear difference)"),
        (runs(2.02, 2.025, 2.0), STEADY, "inconclusive", ""),
        ([*runs(1.9, 1.9), BROKEN], STEADY, "not confirmed", "equal steps: broke off (worse)"),
        (STEADY, [*runs(1.9, 1.9), BROKEN], "confirmed", "equal steps: the other broke off (better)"),
        ([BROKEN] * 3, [BROKEN] * 3, "inconclusive", "equal steps: both broke off (no clear difference)"),
    ],
)
def test_each_verdict_can_come_out(
    invariant: list[Measured], standard: list[Measured], verdict: str, said: str
) -> None:
    found = result(invariant, standard)
    conclusion = STUDY.conclude(found)
    assert conclusion.verdict == verdict and said in conclusion.line
    for table in conclusion.tables:
        for row in table.rows:
            assert len(row) == len(table.columns) and not {"nan", "inf"} & {w for cell in row for w in cell.split()}
    plt.close(STUDY.draw(found))


def test_differences_are_percent_of_the_standard_loss() -> None:
    """Of losses that go up by 0.05 a seed: 2.05 in the mean."""
    found = result(runs(2.041, 2.041, 2.041), STEADY)
    assert told(difference(found, INVARIANT)) == "+2.00 ± 0.00 %"
    assert told(difference(found, WIDER)) == "+0.00 ± 0.00 %"
    assert told(difference(result(runs(1.959, 2.0, 2.041), STEADY), INVARIANT)) == "+0.00 ± 4.97 %"


# --- arms -------------------------------------------------------------------------------------------------------

NAMED = {arm.name: arm for arm in ARMS}
TOKENS = torch.randint(13, (3, 10), generator=torch.Generator().manual_seed(0))


def rewritten(name: str, **sizes: Any) -> Decoder:
    given = {"vocab": 13, "context": 10, "width": 24, "layers": 2, "heads": 3, "init_std": 0.2, **sizes}
    model = made(ModelConfig(**given), 1, torch.float64)
    rewrite(model, NAMED[name])
    return model


@torch.no_grad()
def test_arms_start_from_one_function() -> None:
    logits = {name: rewritten(name)(TOKENS) for name in NAMED}
    other = made(rewritten(STANDARD).config, 2, torch.float64)(TOKENS)
    for name in (BALANCED, INVARIANT, FULL):
        assert gap(logits[name], logits[STANDARD]) < 1e-11
    assert gap(other, logits[STANDARD]) > 1e-2


def test_parameters() -> None:
    """Of rank k: fewer by what is redundant, 2 h k² a layer; made up for by units to less than one; d² a product."""
    o = {key: value for key, value in STUDY.full.options.items() if key in ("width", "layers", "heads", "context")}
    count = {name: sum(p.numel() for p in rewritten(name, vocab=97, **o).parameters()) for name in NAMED}
    d, h, layers = o["width"], o["heads"], o["layers"]
    k = d // h
    assert count[BALANCED] == count[STANDARD]
    assert count[INVARIANT] == count[STANDARD] - layers * 2 * h * k**2
    assert abs(count[WIDER] - count[STANDARD]) < layers * 2 * d
    assert count[FULL] == count[STANDARD] + layers * (2 * h * d**2 - 4 * d**2)


def test_balanced_heads_are_balanced() -> None:
    for name, balanced in ((STANDARD, False), (BALANCED, True)):
        blocks: list[Any] = list(rewritten(name).blocks)
        for block in blocks:
            heads = heads_of(block.attention)
            for a, b in ((heads.w_q, heads.w_k), (heads.w_v, heads.w_o)):
                assert bool((balance_defect(a, b)[1] < 1e-9).all()) == balanced


@torch.no_grad()
def test_widened() -> None:
    mlp = MLP(4, 6)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert gap(widened(mlp, 3, 0.5, 0.0)(x), mlp(x)) < 1e-6
    more = widened(mlp, 500, 0.5, 0.25)
    assert gap(more.up.weight[:6], mlp.up.weight) == gap(more.down.weight[:, :6], mlp.down.weight) == 0
    assert float(more.up.weight[6:].std()) == pytest.approx(0.5, rel=0.1)
    assert float(more.down.weight[:, 6:].std()) == pytest.approx(0.25, rel=0.1)


def test_condition_is_that_of_the_products() -> None:
    blocks: list[Any] = list(rewritten(STANDARD).blocks)
    ratios = []
    for block in blocks:
        heads = heads_of(block.attention)
        for product in (heads.w_q.mT @ heads.w_k, heads.w_o.mT @ heads.w_v):
            s = torch.linalg.svdvals(product)
            ratios += (s[:, 0] / s[:, 7]).tolist()
    expected = torch.tensor(ratios, dtype=torch.float64).median().item()
    for name in (STANDARD, BALANCED, INVARIANT, FULL):
        assert condition(rewritten(name)) == pytest.approx(expected, rel=1e-8)


# --- what Adam sees ----------------------------------------------------------------------------------------------


class Softmax(nn.Module):
    """Logits are rows of a table: the loss is convex in it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


def test_what_adam_sees() -> None:
    """Gradient descent without momentum in coordinates S⁻¹θ moves θ by S² g: Adam's own step, β₁ = 0."""
    model = Softmax()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.0, 0.9), eps=1e-3, weight_decay=0.0)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        model.table.grad = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        before = model.table.detach().clone()
        optimizer.step()
    s = adam_scales(optimizer)
    assert model.table.grad is not None
    assert gap(before - 0.5 * s[model.table] ** 2 * model.table.grad, model.table.detach()) < 1e-12
    assert gap(s[model.unused], torch.zeros(2)) == 0  # it has had no gradient and does not move


@pytest.mark.parametrize(("beta", "rate"), [(0.0, 0.5), (0.9, 0.01), (0.5, 2.0)])
def test_limit_of_adam_with_momentum(beta: float, rate: float) -> None:
    """On a parabola, steps along the mean of gradients settle just below the limit and leave just above it."""

    def end(curvature: float) -> float:
        x, m = 1.0, 0.0
        for _ in range(4000):
            m = beta * m + (1 - beta) * curvature * x
            x -= rate * m
        return abs(x)

    limit = adam_limit(beta, rate)
    assert end(0.99 * limit) < 1e-3 and end(1.01 * limit) > 1e3
