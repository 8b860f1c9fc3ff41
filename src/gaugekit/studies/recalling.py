"""Two tasks whose answers stand in what was read before: recall of what belongs to a key, and copying.

Only answers are targets; everything else is `IGNORED`. A run whose seed is one of the budget's for tuning is evaluated
on other draws than the rest. Shapes: tokens and targets (b, n).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from gaugekit.studies.fitting import HELD_OUT, Task
from gaugekit.studies.study import Budget
from gaugekit.training.steps import IGNORED

__all__ = ["copying", "recall", "wrong"]

Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
"""Tokens (b, n + 1) of a batch of b, and which of the n + 1 places are answers."""


def recall(budget: Budget, seed: int) -> Task:
    """Pairs k₁ v₁ k₂ v₂ ... of different keys, then every key `queries` times, each with its value after it: the values
    after the first stretch are the answers (multi-query associative recall; Arora et al., arXiv 2312.04927).

    Options: `pairs` of `keys` keys and `values` values, other symbols than the keys; `queries`; `batch`; `context`,
    which must be what that makes, 2 pairs (1 + queries) − 1.
    """
    o = budget.options
    pairs, keys, values = o["pairs"], o["keys"], o["values"]

    def draw(random: np.random.Generator, batch: int) -> tuple[np.ndarray, np.ndarray]:
        key = random.permuted(np.tile(np.arange(keys), (batch, 1)), axis=1)[:, :pairs]
        value = keys + random.integers(0, values, (batch, pairs))
        own = np.tile(np.arange(pairs), (batch, 1))
        order = np.concatenate([own, *(random.permuted(own, axis=1) for _ in range(o["queries"]))], 1)
        tokens = np.stack([np.take_along_axis(x, order, 1) for x in (key, value)], 2).reshape(batch, -1)
        places = np.arange(tokens.shape[1])
        return tokens, (places >= 2 * pairs) & (places % 2 == 1)

    return made_up(budget, seed, keys + values, draw)


def copying(budget: Budget, seed: int) -> Task:
    """A string, a separator, and the string again, which are the answers.

    Options: `length` and `symbols` of the string; `batch`; `context`, which must be 2 length.
    """
    length, symbols = budget.options["length"], budget.options["symbols"]

    def draw(random: np.random.Generator, batch: int) -> tuple[np.ndarray, np.ndarray]:
        string = random.integers(0, symbols, (batch, length))
        tokens = np.concatenate([string, np.full((batch, 1), symbols), string], 1)
        return tokens, np.arange(2 * length + 1) > length

    return made_up(budget, seed, symbols + 1, draw)


def made_up(budget: Budget, seed: int, vocab: int, draw: Draw) -> Task:
    batch, context = budget.options["batch"], budget.options["context"]

    def batches(*numbers: int) -> tuple[Tensor, Tensor]:
        tokens, answers = (torch.from_numpy(x) for x in draw(np.random.default_rng(numbers), batch))
        if tokens.shape[1] != context + 1:
            raise ValueError(f"context must be {tokens.shape[1] - 1} for this task, got {context}")
        return tokens[:, :-1].contiguous(), torch.where(answers, tokens, IGNORED)[:, 1:].contiguous()

    # Three numbers here and two there: never the same draw.
    kind = 2 if seed in budget.tuning else 1
    held_out = tuple(batches(0, step, kind) for step in range(budget.options.get("held_out", HELD_OUT)))
    return Task(vocab, lambda seed: lambda step: batches(seed, step), held_out)


@torch.no_grad()
def wrong(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The share of targets that are not what the model finds most likely."""
    missed = counted = 0
    for tokens, targets in batches:
        asked = targets != IGNORED
        missed += int((model(tokens).argmax(-1) != targets)[asked].sum())
        counted += int(asked.sum())
    return missed / counted
