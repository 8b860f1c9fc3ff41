"""One run of a decoder on a task, measured: what the studies that train have in common."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gaugekit.errors import TrainingError
from gaugekit.studies.study import Budget, Measured
from gaugekit.training.config import DataConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from gaugekit.training.data import Windows, evaluation
from gaugekit.training.decoder import Decoder
from gaugekit.training.optimizers import make, schedule
from gaugekit.training.sources import texts
from gaugekit.training.steps import Batches, Step, evaluate, steps

__all__ = ["HELD_OUT", "POINTS", "SIZE", "Fit", "Task", "fit", "language", "made", "sized", "thinned"]

SIZE: Mapping[str, Any] = {"width": 64, "layers": 3, "heads": 4, "context": 64, "batch": 16, "init_std": 64**-0.5}
"""The decoder of most studies: 0.2 million parameters; its steps read 1024 characters. Matrices start with a standard
deviation of 1/√width: at GPT-2's 0.02 so narrow a model starts with hardly any signal."""

HELD_OUT = 32  # batches
POINTS = 60  # of a curve that is kept
LONG = 40  # characters of a line that may not stand in two parts of the text


@dataclass(frozen=True)
class Task:
    """`batches` of a seed for training, and those that one run is evaluated on, never trained on: `held_out` ones, or
    others, for validation, where the run is one that chooses a rate."""

    vocab: int
    batches: Callable[[int], Batches]
    held_out: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Fit:
    """A trained model, and what its steps were; `seconds`: of CPU time, watching excluded."""

    model: nn.Module
    optimizer: Optimizer
    losses: tuple[float, ...]
    held_out: float
    seconds: float
    tokens: int

    def measured(self) -> Measured:
        """held_out and training (the mean of the last tenth), nats a target; CPU seconds of the steps alone;
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
def characters() -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], int]:
    """Python's own documentation in three parts, (tokens,) each: eight tenths for training, and one each for validation
    and held out, without their lines that also stand in the first. Tokens are characters that are common in the first;
    all others are one."""
    text = "".join(texts(DataConfig(source="pydoc")))
    cuts = [len(text) * tenths // 10 for tenths in (0, 8, 9, 10)]
    trained, *others = (text[start:stop] for start, stop in pairwise(cuts))
    parts = [trained, *(without(part, trained) for part in others)]
    found, counts = torch.tensor([ord(c) for c in trained]).unique(return_counts=True)
    known = {int(c): i + 1 for i, c in enumerate(found[counts >= 20])}
    training, validation, held_out = (np.array([known.get(ord(c), 0) for c in part]) for part in parts)
    return (training, validation, held_out), len(known) + 1


def without(part: str, trained: str) -> str:
    """The lines of a part but the `LONG` ones that the text for training has, too, however they are indented."""
    known = {line for each in trained.splitlines() if len(line := each.strip()) >= LONG}
    return "".join(line for line in part.splitlines(keepends=True) if line.strip() not in known)


def language(budget: Budget, seed: int) -> Task:
    """The next character of Python's own documentation, for a run of this seed: if it is one of the budget's tuning
    seeds it is evaluated on windows for validation, else on those held out. Neither has a long line that is trained on.
    """
    context, batch = budget.options["context"], budget.options["batch"]
    (training, validation, held_out), vocab = characters()
    evaluated = validation if seed in budget.tuning else held_out
    return Task(
        vocab,
        lambda seed: Windows(training, context, batch, seed),
        tuple(evaluation(evaluated, context, batch, budget.options.get("held_out", HELD_OUT))),
    )


def sized(budget: Budget, vocab: int, **changes: Any) -> ModelConfig:
    """The model of a budget's sizes and standard deviation at the start, changed."""
    keys = ("width", "layers", "heads", "context", "init_std")
    sizes = {key: budget.options[key] for key in keys if key in budget.options}
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

    Raises: TrainingError where a loss or gradient is not finite; or a weight or the held-out loss at the end; or a
        weight before `watch` is called, which may therefore count on them.
    """
    stepper = make(model, optimizer) if isinstance(optimizer, OptimizerConfig) else optimizer(model)
    plan = ScheduleConfig("cosine" if cosine else "constant", warmup=round(budget.steps * warmup) if cosine else 0)
    taken = steps(
        model, stepper, task.batches(seed), 0, budget.steps, scheduler=schedule(stepper, plan, budget.steps), clip=clip
    )
    if watch is not None:
        check_finite(model, 0)
        watch(0, model, stepper)
    done: list[Step] = []
    seconds = 0.0
    while True:
        began = time.process_time()  # which a busy machine does not stretch
        step = next(taken, None)
        seconds += time.process_time() - began
        if step is None:
            break
        done.append(step)
        if watch is not None:
            check_finite(model, len(done))
            watch(len(done), model, stepper)
    check_finite(model, len(done))
    held_out = evaluate(model, task.held_out)
    if not math.isfinite(held_out):
        raise TrainingError(f"the held-out loss is {held_out} after step {len(done)}")
    losses, tokens = tuple(step.loss for step in done), sum(step.tokens for step in done)
    return Fit(model, stepper, losses, held_out, seconds, tokens)


def check_finite(model: nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise TrainingError(f"{name} is not finite after step {step}")


def thinned(losses: tuple[float, ...] | list[float], points: int = POINTS) -> list[tuple[int, float]]:
    """A curve of at most `points` means: (steps taken, mean loss since the point before)."""
    stretch = max(1, -(-len(losses) // points))
    return [(start + len(part), round(math.fsum(part) / len(part), 5)) for start, part in stretches(losses, stretch)]


def stretches(losses: tuple[float, ...] | list[float], length: int) -> Iterator[tuple[int, list[float]]]:
    for start in range(0, len(losses), length):
        yield start, list(losses[start : start + length])
