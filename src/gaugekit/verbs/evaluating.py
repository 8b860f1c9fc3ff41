"""How well and how fast two language models read a text, side by side in one run."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gaugekit.checkpoint import Checkpoint
from gaugekit.models import Spec
from gaugekit.verbs.inspect import Track
from gaugekit.verbs.running import forward, load_model

__all__ = ["Reading", "read_both"]

STEPS, TRIES = 16, 3  # tokens of a continuation, and how often it is timed


@dataclass(frozen=True)
class Reading:
    """Of one model: mean cross-entropy in nats a token, its exponential, and tokens a second: of whole rows without a
    cache (`reading`), and of one row continued token by token with it (`writing`)."""

    nats: float
    perplexity: float
    reading: float
    writing: float


def read_both(
    before: Checkpoint,
    after: Checkpoint,
    spec: Spec,
    rows: Sequence[Tensor],
    *,
    dtype: torch.dtype,
    device: str,
    track: Track[Any],
) -> tuple[Reading, Reading]:
    """Both models on the same rows (b, n), in turn, so that what else the machine does slows down both. Both are in
    memory."""
    models = [load_model(checkpoint, spec, dtype).to(device) for checkpoint in (before, after)]
    for model in models:
        # Under softcaps there is none: then attention stays written out.
        if model._supports_sdpa:
            model.set_attn_implementation("sdpa")
    losses, seconds = [0.0, 0.0], [0.0, 0.0]
    for model in models:
        forward(model, input_ids=rows[0][:1].to(device))  # what is slow once
    for number, ids in enumerate(track(rows, len(rows), "held-out text")):
        ids = ids.to(device)
        for i in (0, 1) if number % 2 else (1, 0):
            start = _now(device)
            logits = forward(models[i], input_ids=ids).logits
            seconds[i] += _now(device) - start
            each = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            losses[i] += float(each.double().sum())
    tokens, predicted = sum(ids.numel() for ids in rows), sum(ids[:, 1:].numel() for ids in rows)
    times = [[_continued(model, rows[0][:1].to(device), device) for model in models] for _ in range(TRIES)]
    first, second = (
        Reading(loss / predicted, math.exp(min(loss / predicted, 700.0)), tokens / spent, STEPS / median(written))
        for loss, spent, written in zip(losses, seconds, zip(*times, strict=True), strict=True)
    )
    return first, second


def _continued(model: Any, ids: Tensor, device: str) -> float:
    """Seconds for `STEPS` more tokens behind a row (1, n) that has been read."""
    from transformers import DynamicCache

    steps = min(STEPS, ids.shape[1] - 1)
    # The name differs between releases of transformers.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    with_cache: dict[str, Any] = {"use_cache": True, name: DynamicCache(config=model.config)}
    forward(model, input_ids=ids[:, :-steps], **with_cache)
    start = _now(device)
    for step in range(steps, 0, -1):
        forward(model, input_ids=ids[:, -step:][:, :1], **with_cache)
    return (_now(device) - start) * STEPS / steps


def _now(device: str) -> float:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
