"""LayerNorm in its two parts, each with and without, and the majority task for one layer of attention [B].

Shapes: b sequences of n tokens, c classes, d width. Source: [B] Brody, Alon and Yahav, arXiv 2305.02582.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugekit.studies.fitting import Task

__all__ = ["CLASSES", "LENGTH", "Majority", "PartNorm", "accuracy_and_loss", "evenness", "majority", "sequences"]

LENGTH, CLASSES, LEAD = 50, 20, 6
TRAINED, BATCH = 20_000, 128
HELD_OUT = 4  # batches

EPS = 1e-12
"""Of norms: the radius shall be √d whatever the length of a state."""


class PartNorm(nn.Module):
    """x or x − mean(x), on the sphere of radius √d or not: LayerNorm with both parts, RMSNorm without the first.

    (..., d) to (..., d), without weights, which the maps that read it make up for. Where it does not scale each token
    by its own length it divides all by one number, the root mean square of the first input it sees: all arms start
    with one radius in the mean.
    """

    size: Tensor

    def __init__(self, project: bool, scale: bool) -> None:
        super().__init__()
        self.project, self.scale = project, scale
        self.register_buffer("size", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.project:
            x = x - x.mean(-1, keepdim=True)
        if self.scale:
            return F.rms_norm(x, x.shape[-1:], eps=EPS)
        if not self.size:
            self.size.copy_(x.detach().square().mean().sqrt())
        return x / self.size


class Majority(nn.Module):
    """Logits (b, n, c) of tokens (b, n): one head of attention to all tokens after `norm`, then an MLP, read out by the
    embedding; no positions."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, False) for _ in range(4))
        self.norm_mlp = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = norm  # last: parameters are drawn alike whatever it is

    def weights(self, tokens: Tensor) -> Tensor:
        """Attention of each token to all, (b, n, n)."""
        y = self.norm(self.embedding(tokens))
        return torch.softmax(self.query(y) @ self.key(y).mT / y.shape[-1] ** 0.5, -1)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        h = h + self.out(self.weights(tokens) @ self.value(self.norm(h)))
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
def drawn(seed: int) -> Tensor:
    return sequences(TRAINED, seed)


def majority() -> Task:
    def batches(seed: int):
        def batch(step: int) -> tuple[Tensor, Tensor]:
            generator = torch.Generator().manual_seed(1_000_003 * seed + step)
            return labelled(drawn(seed)[torch.randint(TRAINED, (BATCH,), generator=generator)])

        return batch

    held_out = sequences(HELD_OUT * BATCH, 2**40)
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
    found = [torch.special.entr(model.weights(x).double()).sum(-1).exp().mean() / LENGTH for x, _ in task.held_out]
    return float(torch.stack(found).mean())
