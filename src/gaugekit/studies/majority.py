"""The majority task of one layer of attention [B]: every token must name the most frequent class of its sequence.

Shapes: b sequences of n tokens, c classes, d width. Source: [B] Brody, Alon and Yahav, arXiv 2305.02582.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugekit.studies.fitting import POINTS, Task, fit
from gaugekit.studies.study import Budget, Measured
from gaugekit.studies.watching import Through
from gaugekit.training.config import OptimizerConfig

__all__ = ["CLASSES", "LEAD", "LENGTH", "Majority", "learning", "sequences"]

LENGTH, CLASSES, LEAD = 50, 20, 6
TRAINED, BATCH = 10_000, 128
HELD_OUT = 4  # batches
EVERY = 2  # steps between looks at the held-out sequences


class Majority(nn.Module):
    """Logits (b, n, c) of tokens (b, n): one head of attention to all tokens after `norm`, then an MLP, read out by the
    embedding; no positions."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm = norm
        self.embedding = nn.Embedding(CLASSES, width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, False) for _ in range(4))
        self.norm_mlp = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def weights(self, y: Tensor) -> Tensor:
        """Attention of each normalized state (b, n, d) to all, (b, n, n)."""
        return torch.softmax(self.query(y) @ self.key(y).mT / y.shape[-1] ** 0.5, -1)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        y = self.norm(h)
        h = h + self.out(self.weights(y) @ self.value(y))
        h = h + self.down(F.relu(self.up(self.norm_mlp(h))))
        return h @ self.embedding.weight.mT


def sequences(number: int, seed: int) -> Tensor:
    """Tokens (number, n), each class once and the others at random, where one class leads by at least `LEAD`."""
    generator = torch.Generator().manual_seed(seed)
    kept, total = [], 0
    while total < number:
        shares = torch.softmax(torch.randn(number, CLASSES, generator=generator), -1)
        drawn = torch.multinomial(shares, LENGTH - CLASSES, replacement=True, generator=generator)
        tokens = torch.cat([drawn, torch.arange(CLASSES).expand(number, -1)], -1)
        best = F.one_hot(tokens, CLASSES).sum(1).topk(2, -1).values
        kept.append(tokens[best[:, 0] - best[:, 1] >= LEAD])
        total += len(kept[-1])
    return torch.cat(kept)[:number]


def labelled(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """With the most frequent class as the target of every token."""
    return tokens, F.one_hot(tokens, CLASSES).sum(1).argmax(-1, keepdim=True).expand_as(tokens)


@cache
def majority(validation: bool) -> Task:
    """Batches are of the same sequences for all seeds, in another order. Held-out ones are others for `validation`."""
    trained, held_out = sequences(TRAINED, 1), sequences(HELD_OUT * BATCH, 3 if validation else 2)

    def batches(seed: int) -> Callable[[int], tuple[Tensor, Tensor]]:
        def batch(step: int) -> tuple[Tensor, Tensor]:
            generator = torch.Generator().manual_seed(1_000_003 * seed + step)
            return labelled(trained[torch.randint(TRAINED, (BATCH,), generator=generator)])

        return batch

    return Task(CLASSES, batches, tuple(labelled(part) for part in held_out.split(BATCH)))


@torch.no_grad()
def accuracy_and_loss(model: nn.Module, task: Task) -> tuple[float, float]:
    """Share of right answers and mean loss (nats) over the held-out tokens."""
    right, loss = 0.0, 0.0
    for tokens, targets in task.held_out:
        logits = model(tokens)
        right += float((logits.argmax(-1) == targets).double().mean())
        loss += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    return right / len(task.held_out), loss / len(task.held_out)


@torch.no_grad()
def evenness(model: Majority, task: Task) -> float:
    """exp(entropy) / n of attention over the held-out tokens, in the mean: 1 where it is uniform, 1/n on one token."""
    weights = (model.weights(model.norm(model.embedding(tokens))) for tokens, _ in task.held_out)
    found = [torch.special.entr(each.double()).sum(-1).exp().mean() / LENGTH for each in weights]
    return float(torch.stack(found).mean())


def learning(
    norm: Callable[[], nn.Module],
    width: int,
    rate: float,
    seeds: Sequence[int],
    steps: int,
    goal: float,
    *,
    validation: bool,
) -> Measured:
    """How models of these seeds, all else alike, learn the task with AdamW at a constant rate; means over the models.
    Held-out sequences are those for `validation`, or the others.

    loss        held-out (nats), the mean over training
    accuracy    held-out, at the end
    to_goal     geometric mean of the steps to an accuracy of `goal`, None where a model did not reach it
    evenness    of attention at the end, see `evenness`
    parameters  of one
    curve       [steps, accuracy]

    Raises: TrainingError where a loss or a weight is not finite.
    """
    task, curves, even, parameters = majority(validation), [], [], 0
    for seed in seeds:
        torch.manual_seed(seed)
        model = Majority(norm(), width)
        through = Through(range(0, steps + 1, EVERY), lambda model: accuracy_and_loss(model, task))
        fit(model, OptimizerConfig(lr=rate), task, Budget(steps=steps), seed, watch=through, cosine=False)
        curves.append(list(through.kept.items()))
        even.append(evenness(model, task))
        parameters = sum(p.numel() for p in model.parameters())
    first = [next((step for step, (right, _) in each[1:] if right >= goal), None) for each in curves]
    reached = [step for step in first if step is not None]
    means = [
        (points[0][0], *(math.fsum(found[k] for _, found in points) / len(curves) for k in (0, 1)))
        for points in zip(*curves, strict=True)
    ]
    return {
        "loss": math.fsum(loss for *_, loss in means) / len(means),
        "accuracy": means[-1][1],
        "to_goal": math.exp(math.fsum(map(math.log, reached)) / len(first)) if len(reached) == len(first) else None,
        "evenness": math.fsum(even) / len(even),
        "parameters": parameters,
        "curve": [[step, round(right, 4)] for step, right, _ in means[:: max(1, len(means) // POINTS)]],
    }
