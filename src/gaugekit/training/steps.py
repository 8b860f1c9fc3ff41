"""Steps of training, one after the other: forward, backward, clip, step. What is done between them is the caller's.

Legend
------
b, n      windows of a step over all processes, tokens
W, A      processes, parts of a batch that run one after the other; each part has b / (W A) windows
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gaugekit.errors import TrainingError
from gaugekit.optim.sharding import whole

__all__ = ["IGNORED", "Batches", "Step", "evaluate", "loss_sum", "steps"]

IGNORED = -100
"""A target that counts for nothing."""

Batches = Callable[[int], tuple[Tensor, Tensor]]
"""The windows (b, n) of a step, and their targets (b, n), as a function of the step alone."""


@dataclass(frozen=True)
class Step:
    """One step that has been taken: `index` from 0, mean loss of its targets before it in nats, the learning rate of
    the first group, the norm of the whole gradient before clipping, seconds, and tokens read by all processes."""

    index: int
    loss: float
    rate: float
    gradient: float
    seconds: float
    tokens: int


def steps(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    start: int,
    stop: int,
    *,
    scheduler: LRScheduler | None = None,
    accumulation: int = 1,
    clip: float = 0.0,
    precision: str = "float32",
) -> Iterator[Step]:
    """Take steps start ... stop − 1, and say after each what it was. Between two the model is the caller's.

    The loss is the mean over all targets of the batch but `IGNORED` ones, however the batch is split: of `accumulation`
    parts and of the processes of `torch.distributed`, which all read the same batch and take their own windows of it.
    With `fully_shard`, which averages gradients over processes, a step is that of one process, to rounding.

    Args:
        model: logits (b, n, V) of tokens (b, n).
        batches: see `Batches`.
        scheduler: steps after each step.
        clip: the largest norm of the whole gradient; 0: no limit.
        precision: "bfloat16" runs forward under autocast; losses are float32 (or float64 for a float64 model).

    Raises: TrainingError where a loss or the gradient is not finite, or there is no target, before that step is taken;
        its message counts steps from 1, as logs do.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = next(model.parameters()).device
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.train()
    for index in range(start, stop):
        began = time.perf_counter()
        tokens, targets = batches(index)
        parts = world * accumulation
        if len(tokens) % parts:
            raise TrainingError(f"{len(tokens)} windows do not split into {parts} parts: change run.batch")
        counted = int((targets != IGNORED).sum())
        if not counted:
            raise TrainingError(f"step {index + 1} has no target: look at the data")
        own = len(tokens) // parts
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device, dtype=torch.float64)
        for part in range(accumulation):
            rows = slice((part * world + rank) * own, (part * world + rank + 1) * own)
            loss = loss_sum(model, tokens[rows].to(device), targets[rows].to(device), precision) / counted
            (loss * world).backward()
            total += loss.detach().double()
        if world > 1:
            dist.all_reduce(total)
        if not math.isfinite(value := total.item()):
            raise TrainingError(f"the loss is {value} at step {index + 1}: lower optimizer.lr, or look at the data")
        size = float(whole(torch.nn.utils.clip_grad_norm_(parameters, clip or math.inf)))
        if not math.isfinite(size):
            raise TrainingError(f"the gradient is {size} at step {index + 1}: lower optimizer.lr, or look at the data")
        rate = float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        yield Step(index, value, rate, size, time.perf_counter() - began, tokens.numel())


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], precision: str = "float32") -> float:
    """Mean loss in nats over all targets of the batches but `IGNORED` ones. Every process computes all of it."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total, counted = 0.0, 0
    for tokens, targets in batches:
        total += float(loss_sum(model, tokens.to(device), targets.to(device), precision).double())
        counted += int((targets != IGNORED).sum())
    model.train(training)
    if isinstance(model, FSDPModule):
        model.reshard()  # without a backward pass it would keep whole parameters, which are others than the optimizer's
    if not counted:
        raise TrainingError("nothing to evaluate: there is no target")
    return total / counted


def loss_sum(model: nn.Module, tokens: Tensor, targets: Tensor, precision: str) -> Tensor:
    """The losses of all targets but `IGNORED` ones, added up, in nats; tokens and targets (b, n)."""
    half = precision == "bfloat16"
    context: Any = torch.autocast(tokens.device.type, torch.bfloat16) if half else nullcontext()
    with context:
        logits = model(tokens)
    logits = logits.float() if half else logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
