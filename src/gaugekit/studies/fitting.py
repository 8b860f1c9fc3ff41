"""One run of a decoder on a task, measured: what the studies that train have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gaugekit.studies.study import Budget, Measured
from gaugekit.training.config import DataConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from gaugekit.training.data import Windows, evaluation
from gaugekit.training.decoder import Decoder
from gaugekit.training.optimizers import make, schedule
from gaugekit.training.sources import texts
from gaugekit.training.steps import Batches, Step, evaluate, steps

__all__ = ["SIZE", "Fit", "Task", "fit", "language", "made", "sized", "thinned"]

SIZE: Mapping[str, Any] = {"width": 64, "layers": 3, "heads": 4, "context": 64, "batch": 16}
"""The decoder of most studies: 0.2 million parameters; its steps read 1024 characters."""

HELD_OUT = 32  # batches
POINTS = 60  # of a curve that is kept


@dataclass(frozen=True)
class Task:
    """`batches` of a seed for training, and `held_out` ones, never trained on."""

    vocab: int
    batches: Callable[[int], Batches]
    held_out: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Fit:
    """A trained model, and what its steps were."""

    model: nn.Module
    optimizer: Optimizer
    losses: tuple[float, ...]
    held_out: float
    seconds: float
    tokens: int

    def measured(self) -> Measured:
        """held_out and training (the mean of the last tenth), nats a target; steps' own seconds, one thread;
        parameters; and the curve, means of equal stretches as [last step, loss]."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return {
            "held_out": self.held_out,
            "training": math.fsum(last) / len(last),
            "seconds": round(self.seconds, 3),
            "tokens": self.tokens,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "curve": thinned(self.losses),
        }


@cache
def characters() -> tuple[Tensor, int]:
    """Python's own documentation, (tokens,): characters that occur, rare ones as one."""
    text = "".join(texts(DataConfig(source="pydoc")))
    found, counts = torch.tensor([ord(c) for c in text]).unique(return_counts=True)
    common = found[counts >= 20]
    known = {int(c): i + 1 for i, c in enumerate(common)}
    return torch.tensor([known.get(ord(c), 0) for c in text]), len(known) + 1


def language(budget: Budget) -> Task:
    """The next character of Python's own documentation; the last tenth of it is held out."""
    context, batch = budget.options["context"], budget.options["batch"]
    found, vocab = characters()
    tokens = found.numpy()
    cut = len(tokens) * 9 // 10
    return Task(
        vocab,
        lambda seed: Windows(tokens[:cut], context, batch, seed),
        tuple(evaluation(tokens[cut:], context, batch, budget.options.get("held_out", HELD_OUT))),
    )


def sized(budget: Budget, vocab: int, **changes: Any) -> ModelConfig:
    """The model of a budget's sizes, changed."""
    sizes = {key: budget.options[key] for key in ("width", "layers", "heads", "context") if key in budget.options}
    return replace(ModelConfig(vocab=vocab, **sizes), **changes)


def made(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder that a seed draws."""
    torch.manual_seed(seed)
    return Decoder(config).to(dtype)


def fit(
    model: nn.Module,
    optimizer: OptimizerConfig | Callable[[nn.Module], Optimizer],
    task: Task,
    budget: Budget,
    seed: int,
    watch: Callable[[int, nn.Module, Optimizer], None] | None = None,
    cosine: bool = True,
    clip: float = 1.0,
    warmup: float = 0.05,
) -> Fit:
    """Train a model for the budget's steps on the task's batches of this seed.

    Args:
        optimizer: a config, or what makes one for the model.
        watch: called with the number of steps taken, before the first and after each.
        cosine: the rate falls to a tenth after a warm-up; else it stays, from the first step on.
        clip: largest norm of the whole gradient; 0: no limit.
        warmup: share of the steps, of a cosine.

    Raises: TrainingError where a loss or gradient is not finite.
    """
    stepper = make(model, optimizer) if isinstance(optimizer, OptimizerConfig) else optimizer(model)
    plan = ScheduleConfig("cosine" if cosine else "constant", warmup=round(budget.steps * warmup) if cosine else 0)
    taken = steps(
        model, stepper, task.batches(seed), 0, budget.steps, scheduler=schedule(stepper, plan, budget.steps), clip=clip
    )
    if watch is not None:
        watch(0, model, stepper)
    done: list[Step] = []
    for step in taken:
        done.append(step)
        if watch is not None:
            watch(step.index + 1, model, stepper)
    return Fit(
        model,
        stepper,
        tuple(step.loss for step in done),
        evaluate(model, task.held_out),
        math.fsum(step.seconds for step in done),
        sum(step.tokens for step in done),
    )


def thinned(losses: tuple[float, ...] | list[float], points: int = POINTS) -> list[tuple[int, float]]:
    """A curve of at most `points` means: (steps taken, mean loss since the point before)."""
    stretch = max(1, -(-len(losses) // points))
    return [(start + len(part), round(math.fsum(part) / len(part), 5)) for start, part in stretches(losses, stretch)]


def stretches(losses: tuple[float, ...] | list[float], length: int) -> Iterator[tuple[int, list[float]]]:
    for start in range(0, len(losses), length):
        yield start, list(losses[start : start + length])
