"""Steps of training: however a batch is split it is one batch, and a step that would do harm is not taken."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn import gap
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from gaugekit.errors import TrainingError
from gaugekit.optim.schedules import cosine_decay
from gaugekit.training.config import ModelConfig
from gaugekit.training.decoder import Decoder
from gaugekit.training.steps import IGNORED, Batches, Step, evaluate, steps

VOCAB, CONTEXT = 7, 6


def decoder(dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab": VOCAB, "context": CONTEXT, "width": 8, "layers": 1, "heads": 2, "init_std": 0.3}
    return Decoder(ModelConfig(**sizes, **changes)).to(dtype)


def windows(step: int, count: int = 12) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(VOCAB, (count, CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def holed(step: int) -> tuple[Tensor, Tensor]:
    """Targets that count for nothing, more of them in some windows than in others."""
    tokens, targets = windows(step)
    targets = targets.clone()
    for row in range(len(targets)):
        targets[row, : row // 2] = IGNORED
    targets[3] = IGNORED
    return tokens, targets


def taken(model: nn.Module, batches: Batches, stop: int, optimizer: Any = None, **options: Any) -> list[Step]:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9) if optimizer is None else optimizer
    return list(steps(model, optimizer, batches, 0, stop, **options))


def apart(a: nn.Module, b: nn.Module) -> float:
    return max(gap(p.detach(), q.detach()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("batches", [windows, holed])
def test_against_a_plain_loop(batches: Batches) -> None:
    model, twin = decoder(), decoder()
    found = taken(model, batches, 4, clip=0.5)
    optimizer = SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for index, step in enumerate(found):
        tokens, targets = batches(index)
        loss = F.cross_entropy(twin(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        size = math.sqrt(sum(float(p.grad.square().sum()) for p in twin.parameters() if p.grad is not None))
        for p in twin.parameters():
            assert p.grad is not None
            p.grad.mul_(min(1, 0.5 / (size + 1e-6)))  # as torch has it
        optimizer.step()
        assert step.index == index
        assert step.loss == pytest.approx(loss.item(), rel=1e-12)
        assert step.gradient == pytest.approx(size, rel=1e-12)
        assert step.gradient > 0.5  # the clip has done something
        assert step.tokens == tokens.numel()
        assert step.seconds > 0
    assert apart(model, twin) < 1e-12
    assert apart(model, decoder()) > 1e-2


@pytest.mark.parametrize("batches", [windows, holed])
@pytest.mark.parametrize("parts", [2, 3, 12])
def test_accumulation_is_one_pass(parts: int, batches: Batches) -> None:
    """The mean is over all targets of the batch, not one of means over parts that have more or fewer of them."""
    whole, split = decoder(), decoder()
    first = taken(whole, batches, 4, clip=1.0)
    second = taken(split, batches, 4, clip=1.0, accumulation=parts)
    assert apart(whole, split) < 1e-12
    for one, other in zip(first, second, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-12)
        assert one.gradient == pytest.approx(other.gradient, rel=1e-12)
        assert one.tokens == other.tokens
    if batches is holed and parts == 3:
        tokens, targets = holed(0)
        rows = [slice(start, start + 4) for start in (0, 4, 8)]
        means = [F.cross_entropy(decoder()(tokens[r]).flatten(0, 1), targets[r].flatten()) for r in rows]
        assert abs(sum(float(mean.detach()) for mean in means) / 3 - first[0].loss) > 1e-4


def test_ignored_targets_do_not_count() -> None:
    model, twin = decoder(), decoder()

    def without(step: int) -> tuple[Tensor, Tensor]:
        tokens, targets = holed(step)
        kept = [row for row in range(12) if row != 3]
        return tokens[kept], targets[kept]

    found = taken(model, holed, 2), taken(twin, without, 2)
    assert found[0][1].loss == pytest.approx(found[1][1].loss, rel=1e-12)
    assert apart(model, twin) < 1e-12


# --- steps that are not taken ---------------------------------------------------------------------------------


class Spoiled(nn.Module):
    """A decoder whose logits are spoiled from some step on: in the forward pass, or in the backward one."""

    def __init__(self, at: int, by: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.decoder, self.at, self.by, self.calls = decoder(), at, by, 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        logits = self.decoder(tokens)
        return self.by(logits) if self.calls > self.at else logits


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * math.inf


def first_alone(logits: Tensor) -> Tensor:
    """All other tokens are impossible: a loss of inf."""
    return torch.where(torch.arange(VOCAB) == 0, logits, -math.inf)


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (lambda x: x * math.nan, r"the loss is nan at step 3: lower optimizer\.lr, or look at the data"),
        (first_alone, r"the loss is inf at step 3: lower optimizer\.lr"),
        (lambda x: BadGradient.apply(x), r"the gradient is (nan|inf) at step 3: lower optimizer\.lr"),
    ],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_not_finite_is_refused_before_the_step(by: Any, message: str, parts: int) -> None:
    model = Spoiled(2 * parts, by)
    optimizer = AdamW(model.parameters(), lr=0.01)
    scheduler = cosine_decay(optimizer, 10)
    seen: list[Step] = []
    after: dict[str, Any] = {}

    def go_on() -> None:
        for step in steps(model, optimizer, windows, 0, 5, scheduler=scheduler, accumulation=parts, clip=1.0):
            seen.append(step)
            after.update(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))

    with pytest.raises(TrainingError, match=message):
        go_on()
    assert [step.index for step in seen] == [0, 1]
    assert scheduler.last_epoch == 2
    for name, value in model.state_dict().items():
        assert torch.equal(value, after["model"][name])
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, after["optimizer"]["state"][index][key])


def test_batches_that_do_not_do() -> None:
    model = decoder()
    before = copy.deepcopy(model)
    with pytest.raises(TrainingError, match=r"12 windows do not split into 5 parts: change run\.batch"):
        taken(model, windows, 1, accumulation=5)

    def empty(step: int) -> tuple[Tensor, Tensor]:
        return windows(step)[0], torch.full((12, CONTEXT), IGNORED)

    with pytest.raises(TrainingError, match="step 1 has no target"):
        taken(model, empty, 1)
    assert apart(model, before) == 0


# --- clip, schedule, precision --------------------------------------------------------------------------------


def test_clip() -> None:
    """A step says the gradient's norm before the clip, and is taken with what the clip leaves."""
    said, left = {}, {}
    for clip in (0.0, 1e9, 0.1):
        model = decoder()
        (step,) = taken(model, windows, 1, SGD(model.parameters(), lr=1.0), clip=clip)
        said[clip] = step.gradient
        left[clip] = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    assert said[0.0] == said[1e9] == said[0.1] == pytest.approx(left[0.0], rel=1e-12)
    assert left[0.0] == left[1e9] > 0.3
    assert left[0.1] == pytest.approx(0.1, rel=1e-4)


def test_the_rate_is_that_of_the_step() -> None:
    model = decoder()
    optimizer = SGD(model.parameters(), lr=0.2)
    scheduler = cosine_decay(optimizer, 4, final=0.5)
    found = taken(model, windows, 5, optimizer, scheduler=scheduler)
    rates = [0.1 + 0.05 * (1 + math.cos(math.pi * t / 4)) for t in range(5)]
    assert [step.rate for step in found] == pytest.approx(rates)
    assert scheduler.last_epoch == 5


def test_a_run_can_be_cut_anywhere() -> None:
    """Batches are a function of the step alone."""
    whole, cut = decoder(), decoder()
    optimizers = [AdamW(model.parameters(), lr=0.01) for model in (whole, cut)]
    first = list(steps(whole, optimizers[0], windows, 0, 6))
    second = [*steps(cut, optimizers[1], windows, 0, 2), *steps(cut, optimizers[1], windows, 2, 6)]
    assert [step.loss for step in first] == [step.loss for step in second]
    assert [step.index for step in second] == list(range(6))
    assert apart(whole, cut) == 0


def test_frozen_parameters_have_no_part() -> None:
    model = decoder()
    model.embedding.requires_grad_(False)
    before = model.embedding.weight.clone()
    trained = [p for p in model.parameters() if p.requires_grad]
    (step,) = taken(model, windows, 1, SGD(trained, lr=0.1))
    assert torch.equal(model.embedding.weight, before)
    assert step.gradient == pytest.approx(
        math.sqrt(sum(float(p.grad.square().sum()) for p in trained if p.grad is not None)), rel=1e-9
    )


COMPOSITIONS: list[dict[str, Any]] = [
    {},
    {"positions": "rotary", "norm": "rms", "mlp": "swiglu", "kv_heads": 1},
    {"residual": "sphere", "norm": "none", "positions": "rotary", "mlp": "swiglu"},
    {"attention": "invariant", "norm": "dyt", "placement": "sandwich"},
    {"attention": "relational", "score": "learned", "norm": "scale"},
    {"attention": "relational", "score": "rbf", "residual": "sphere", "norm": "layer"},
]


@pytest.mark.parametrize("changes", COMPOSITIONS, ids=str)
def test_bfloat16(changes: dict[str, Any]) -> None:
    """Autocast, with weights in float32: losses are those of float32 to the rounding of a half, and still fall."""
    models = decoder(torch.float32, **changes), decoder(torch.float32, **changes)
    optimizers = [AdamW(model.parameters(), lr=0.02) for model in models]

    def again(step: int) -> tuple[Tensor, Tensor]:
        return windows(0)

    half = taken(models[0], again, 12, optimizers[0], precision="bfloat16")
    single = taken(models[1], again, 12, optimizers[1])
    assert {p.dtype for p in models[0].parameters()} == {torch.float32}
    assert 0 < abs(half[0].loss - single[0].loss) < 0.02
    assert half[-1].loss < half[0].loss - 0.1
    assert half[-1].loss == pytest.approx(single[-1].loss, abs=0.1)
    assert evaluate(models[0], [windows(0)], "bfloat16") == pytest.approx(evaluate(models[0], [windows(0)]), abs=0.05)


# --- evaluation -----------------------------------------------------------------------------------------------


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.drop = decoder(), nn.Dropout(0.5)
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.modes.append((self.training, torch.is_grad_enabled()))
        return self.decoder.head(self.drop(self.decoder.states(tokens)))


def test_evaluation() -> None:
    model = decoder()
    before = copy.deepcopy(model)
    batches = [holed(0), windows(1), holed(2)]
    losses = [
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none") for tokens, targets in batches
    ]
    counted = sum(int((targets != IGNORED).sum()) for _, targets in batches)
    expected = sum(float(loss.detach().sum()) for loss in losses) / counted
    assert evaluate(model, batches) == pytest.approx(expected, rel=1e-12)
    assert abs(sum(float(loss.detach().mean()) for loss in losses) / 3 - expected) > 1e-3
    assert apart(model, before) == 0
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(TrainingError, match="nothing to evaluate"):
        evaluate(model, [])
    with pytest.raises(TrainingError, match="nothing to evaluate"):
        evaluate(model, [(windows(0)[0], torch.full((12, CONTEXT), IGNORED))])


def test_evaluation_between_steps_leaves_training_mode() -> None:
    model = Watched()
    optimizer = SGD(model.parameters(), lr=0.1)
    model.eval()
    for _ in steps(model, optimizer, windows, 0, 2):
        assert model.training
        values = {evaluate(model, [windows(5)]) for _ in range(2)}
        assert len(values) == 1  # no dropout
        assert model.training
    assert model.modes == [(True, True), (False, False), (False, False)] * 2
    model.eval()
    evaluate(model, [windows(5)])
    assert not model.training
