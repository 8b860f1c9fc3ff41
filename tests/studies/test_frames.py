"""Relational scores: that each verdict can come out, that arms are equal, that tasks and turns are what they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
import torch
from drawn import gap

from gaugekit.studies.fitting import Task, made
from gaugekit.studies.frames import ARMS, LANGUAGE, PLAIN, SCORES, STANDARD, STUDY, configured, told
from gaugekit.studies.recalling import copying, recall, wrong
from gaugekit.studies.study import Arm, ArmResult, Budget, Measured, Result
from gaugekit.studies.turning import turned, weights
from gaugekit.training.config import ModelConfig
from gaugekit.training.decoder import Causal, Decoder
from gaugekit.training.steps import IGNORED

# --- verdicts ---------------------------------------------------------------------------------------------------

BROKEN: Measured = {"failed": "the loss is nan"}


def run(arm: Arm, seed: int, loss: float, error: float) -> Measured:
    common = {"held_out": loss + 0.1 * seed, "tokens": 1000, "seconds": 0.1, "parameters": 100000}
    common |= {"turned": 1e-16, "turned_whole": 0.5}
    if arm.settings["task"] == LANGUAGE:
        return common
    return common | {"error": error, "curve": [[400, 2.0], [800, loss]]}


def result(worse: Callable[[Arm, int], tuple[float, float] | None]) -> Result:
    """`worse`: by how much (share of the loss, error) a run is worse than standard; None: it broke off."""
    arms = []
    for arm in ARMS:
        runs = []
        for seed in STUDY.full.seeds:
            by = worse(arm, seed)
            runs.append(BROKEN if by is None else run(arm, seed, 2.0 * (1 + by[0]), 0.01 + by[1]))
        arms.append(ArmResult(arm, {"0.001": 2.0}, 1e-3, arm.name == PLAIN, tuple(runs)))
    return Result(STUDY.name, False, STUDY.full, tuple(arms), {})


def one_group_each(arm: Arm, _: int) -> tuple[float, float] | None:
    places = {"dot": "language, LayerNorm", "cosine": "recall, no norm", "rbf": "copying, LayerNorm"}
    if arm.name == "learned" and arm.group == "copying, no norm":
        return None
    return (0.05, 0.2) if places.get(arm.name) == arm.group else (0.0, 0.0)


@pytest.mark.parametrize(
    ("worse", "verdict"),
    [
        (lambda arm, _: (0.0, 0.0), "confirmed"),
        (lambda arm, _: (0.01, 0.03), "confirmed"),  # within the margins
        (lambda arm, _: (0.0, 0.0) if arm.name in (STANDARD, "cosine") else (0.3, 0.9), "confirmed"),
        (lambda arm, _: (0.0, 0.0) if arm.name not in SCORES else (0.05, 0.0), "not confirmed"),
        (lambda arm, _: (0.0, 0.0) if arm.name not in SCORES else (0.0, 0.06), "not confirmed"),
        (one_group_each, "not confirmed"),  # no score everywhere, though another one each time
        (lambda arm, seed: (0.0, 0.3 * (seed == 1 and arm.name in SCORES)), "inconclusive"),  # one seed in three
        # Standard attention has not learnt recall: what scores do there decides nothing.
        (lambda arm, _: (0.0, 0.5 * (arm.settings["task"] == "recall")), "inconclusive"),
        (lambda arm, _: (0.1 * (arm.name in SCORES), 0.5 * (arm.settings["task"] == "recall")), "not confirmed"),
        (lambda arm, _: (0.0, 0.0 if arm.name in SCORES else 0.5), "inconclusive"),
        (lambda arm, _: None if arm.name == STANDARD else (0.0, 0.0), "inconclusive"),
        (lambda arm, _: None if arm.name in SCORES else (0.0, 0.0), "not confirmed"),
        (lambda arm, _: None, "inconclusive"),
    ],
)
def test_each_verdict_can_come_out(worse: Callable[[Arm, int], tuple[float, float] | None], verdict: str) -> None:
    found = result(worse)
    conclusion = STUDY.conclude(found)
    assert conclusion.verdict == verdict
    assert "inf" not in conclusion.line and "nan" not in conclusion.line
    for table in conclusion.tables:
        for row in table.rows:
            assert len(row) == len(table.columns) and not {"nan", "inf"} & {w for cell in row for w in cell.split()}
    plt.close(STUDY.draw(found))


@pytest.mark.parametrize("group", ["language, RMSNorm", "recall, no norm"])
def test_words_of_what_broke_off(group: str) -> None:
    """Of an arm, of the standard one, and of both."""
    for broken, words in (
        ({"dot"}, "broke off"),
        ({STANDARD}, "the other broke off"),
        ({"dot", STANDARD}, "both broke off"),
    ):
        found = result(lambda arm, _, broken=broken: None if arm.name in broken else (0.01, 0.03))
        assert told(found[f"{group} / dot"], found[f"{group} / {STANDARD}"]) == words
        STUDY.conclude(found)
    found = result(lambda arm, seed: (0.01 * seed, 0.01 * seed) if arm.name == "dot" else (0.0, 0.0))
    # 1, 2 and 3 % of 2 nats where the standard arm has 2.2 in the mean, or points.
    percent = group.startswith("language")
    mean, half = (2 / 1.1, 2.484 / 1.1) if percent else (2.0, 2.484)
    expected = f"+{mean:.1f} ± {half:.1f} {'%' if percent else 'points'}"
    assert told(found[f"{group} / dot"], found[f"{group} / {STANDARD}"]) == expected


def test_arms_with_a_frame_of_their_own_decide_nothing() -> None:
    good = STUDY.conclude(result(lambda arm, _: (0.0, 0.0) if arm.name in (STANDARD, *SCORES) else None))
    bad = STUDY.conclude(result(lambda arm, _: (0.5, 0.5) if arm.name in SCORES else (0.0, 0.0)))
    assert (good.verdict, bad.verdict) == ("confirmed", "not confirmed")


# --- arms -------------------------------------------------------------------------------------------------------


def budget_of(task: str, budget: Budget = STUDY.full) -> Budget:
    return replace(budget, options={**budget.options, **budget.options[task]})


@pytest.mark.parametrize("group", list(dict.fromkeys(arm.group for arm in ARMS)))
def test_parameters_are_equal_to_a_percent_and_norms_alike(group: str) -> None:
    models = {}
    for arm in ARMS:
        if arm.group == group:
            task = Task(97, lambda seed: lambda step: (torch.zeros(0), torch.zeros(0)), ())
            models[arm.name] = Decoder(configured(arm, budget_of(arm.settings["task"]), task))
    counts = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert len(counts) == 7
    assert max(abs(count / counts[STANDARD] - 1) for count in counts.values()) < 0.01
    assert len({model.config.norm for model in models.values()}) == 1
    units = {name: model.config.units for name, model in models.items()}
    assert units[STANDARD] == 256 and units["dot"] == 320 and units[PLAIN] == 384  # W_Q, W_K; and W_V, W_O


# --- tasks ------------------------------------------------------------------------------------------------------


def test_recall_asks_for_the_value_that_stood_after_the_key() -> None:
    budget = budget_of("recall")
    o = budget.options
    task = recall(budget, 0)
    tokens, targets = task.batches(3)(5)
    assert tokens.shape == targets.shape == (o["batch"], o["context"]) and task.vocab == o["keys"] + o["values"]
    start = 2 * o["pairs"]
    for row, asked in zip(tokens.tolist(), targets.tolist(), strict=True):
        value = dict(zip(row[0:start:2], row[1:start:2], strict=True))
        assert len(value) == o["pairs"] and min(value.values()) >= o["keys"] > max(value)
        assert asked == [IGNORED if i < start or i % 2 else value[key] for i, key in enumerate(row)]
        assert sorted(row[start::2]) == sorted(list(value) * o["queries"])


def test_copying_asks_for_the_string_again() -> None:
    budget = budget_of("copying")
    length = budget.options["length"]
    task = copying(budget, 0)
    tokens, targets = task.batches(3)(5)
    assert torch.equal(targets[:, length:], tokens[:, :length]) and bool((targets[:, :length] == IGNORED).all())
    assert bool((tokens[:, length] == task.vocab - 1).all()) and int(tokens[:, :length].max()) < task.vocab - 1


@pytest.mark.parametrize("task", [recall, copying])
def test_batches_depend_on_seed_and_step_alone(task: Callable[[Budget, int], Task]) -> None:
    budget = budget_of(task.__name__)
    first, again, tuned = task(budget, 1), task(budget, 2), task(budget, budget.tuning[0])
    assert all(torch.equal(a, b) for a, b in zip(first.batches(1)(2), again.batches(1)(2), strict=True))
    drawn = [first.batches(seed)(step)[0] for seed in range(4) for step in range(8)]
    drawn += [tokens for each in (first, tuned) for tokens, _ in each.held_out]
    assert len({tuple(tokens.flatten().tolist()) for tokens in drawn}) == len(drawn) == 96
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first.held_out, again.held_out, strict=True))
    with pytest.raises(ValueError, match="context must be"):
        task(replace(budget, options={**budget.options, "context": 7}), 0)


def test_wrong_counts_answers_alone() -> None:
    tokens = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
    targets = torch.tensor([[IGNORED, 1, 3, IGNORED], [IGNORED, IGNORED, 1, 1]])

    class Echo(torch.nn.Module):  # says the token that it sees
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(x, 4).float()

    assert wrong(Echo(), [(tokens, targets)]) == 0.5
    assert wrong(Echo(), [(tokens, torch.where(targets == IGNORED, targets, tokens))]) == 0.0


# --- turns ------------------------------------------------------------------------------------------------------

SPLIT = {"attention": "relational"}
KINDS = {
    "standard": {},
    "dot": {**SPLIT, "score": "dot"},
    "cosine": {**SPLIT, "score": "cosine"},
    "rbf": {**SPLIT, "score": "rbf"},
    "learned": {**SPLIT, "score": "learned"},
    "bilinear": {**SPLIT, "score": "bilinear"},
    "plain": {**SPLIT, "frame": "full", "values": "plain"},
}


def drawn_model(kind: str) -> tuple[Decoder, torch.Tensor]:
    """Off the start, where A is the identity and the learned score is the dot product."""
    model = made(ModelConfig(vocab=11, context=8, width=12, layers=2, heads=3, init_std=0.3, **KINDS[kind]), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model, torch.randint(11, (3, 8), generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("kind", list(KINDS))
def test_weights_are_those_of_the_attention(kind: str) -> None:
    model, _ = drawn_model(kind)
    attention = model.double().blocks[0].attention
    x = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = weights(attention, x)
    inner = attention.attention if isinstance(attention, Causal) else attention
    assert found.shape == (3, 3, 8, 8) and gap(found.sum(-1), torch.ones(3, 3, 8)) < 1e-12
    assert gap(found.triu(1), torch.zeros(())) == 0
    if kind == "plain":
        y = torch.einsum("bhij,bjd,h->bid", found, x, inner.mix)
    else:
        values = inner.value(x).unflatten(-1, (3, 4)).transpose(1, 2)
        y = inner.out((found @ values).transpose(1, 2).flatten(2))
    assert gap(y, attention(x)) < 1e-12


@pytest.mark.parametrize("kind", list(KINDS))
def test_turns_of_the_states(kind: str) -> None:
    """Scores of G see no turn of what their head reads; W_QᵀW_K and A do, as does a head that reads a part of it."""
    model, tokens = drawn_model(kind)
    before = [p.clone() for p in model.parameters()]
    blocks, whole = (turned(model, tokens, n, torch.Generator().manual_seed(3)) for n in (3, 1))
    free = 1e-12
    assert (blocks < free) == (kind not in ("standard", "bilinear")) and (whole < free) == (kind == "plain")
    assert max(blocks, whole) < free or 1e-3 < max(blocks, whole) < 2 * math.sqrt(8)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.dtype == torch.float32 for p in model.parameters())
