"""Arithmetic of merging: one tensor out of those that stand in the same place of several models.

Methods, names and defaults are those of mergekit 0.1.5, so that one recipe means the same in both; all arithmetic is
float64 here. A tensor is merged on its own, as it lies on disk: angles, ranks and sums are taken over its entries.

    linear            Σ w x / Σ w, or Σ w x                                        Wortsman et al., arXiv 2203.05482
    slerp             along the great circle from the base to the other model      Shoemake 1985
    task arithmetic   base + λ Σ w δ, δ = x − base                                 Ilharco et al., arXiv 2212.04089
    TIES              the same of trimmed δ, entry by entry of one sign            Yadav et al., arXiv 2306.01708
    DARE              the same of randomly thinned δ, with or without signs        Yu et al., arXiv 2311.03099

Shapes: all tensors of a place have one shape, whatever it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["TASKS", "Method", "Settings", "Task", "linear", "merged", "slerp", "task_arithmetic"]

Method = Literal["linear", "slerp", "task_arithmetic", "ties", "dare_linear", "dare_ties"]

COLLINEAR = 0.9995  # cosine from which a great circle is as good as straight, and its formula loses digits
NO_DIRECTION = 1e-8  # a tensor shorter than this is taken as it is
CANCELLED = 1e-8  # of the sizes of weights: a sum of some of them below that is zero


@dataclass(frozen=True)
class Task:
    """How a method treats task vectors: which entries are dropped, whether signs are elected, and its defaults."""

    drops: Literal["none", "smallest", "random"]
    elects: bool
    normalize: bool
    rescale: bool


TASKS: dict[Method, Task] = {
    "task_arithmetic": Task("none", elects=False, normalize=False, rescale=False),
    "ties": Task("smallest", elects=True, normalize=True, rescale=False),
    "dare_linear": Task("random", elects=False, normalize=False, rescale=True),
    "dare_ties": Task("random", elects=True, normalize=False, rescale=True),
}


@dataclass(frozen=True)
class Settings:
    """A method with its numbers; it reads those that it has.

    `weights`: of the reference and the others where the method is linear, of the others alone where it takes task
    vectors, whose `densities` are the shares of entries that are kept. `scale` is the λ of task arithmetic.
    """

    method: Method
    weights: tuple[float, ...] = ()
    densities: tuple[float, ...] = ()
    normalize: bool = True
    rescale: bool = False
    scale: float = 1.0
    t: float = 0.5
    seed: int = 0


def merged(settings: Settings, name: str, ours: Tensor, theirs: Sequence[Tensor]) -> Tensor:
    """The tensor `name` of the merge, in float64.

    Args:
        ours: of the reference: the base model where there is one.
        theirs: of the other models, of the same shape.
    """
    if settings.method == "linear":
        return linear([ours, *theirs], settings.weights, settings.normalize)
    if settings.method == "slerp":
        return slerp(ours, theirs[0], settings.t)
    return task_arithmetic(settings, name, ours, theirs)


def linear(tensors: Sequence[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    """Σ w x, over Σ w where `normalize` is asked for, [Wortsman et al.]."""
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, weight in zip(tensors, weights, strict=True):
        total.add_(tensor.double(), alpha=weight)
    return total / sum(weights) if normalize else total


def slerp(first: Tensor, second: Tensor, t: float) -> Tensor:
    """sin((1−t)φ)/sin φ x + sin(tφ)/sin φ y with φ the angle between x and y as flat vectors [Shoemake]; (1−t) x + t y
    where they are collinear or opposite, so that no great circle leads from one to the other. As in mergekit, one that
    is zero stands at a right angle to the other.
    """
    x, y = first.double(), second.double()
    directions = [v / norm if (norm := float(v.norm())) > NO_DIRECTION else v for v in (x, y)]
    cosine = (directions[0] * directions[1]).sum().clamp(-1, 1)
    if abs(float(cosine)) > COLLINEAR:
        return (1 - t) * x + t * y
    angle = torch.acos(cosine)
    return (torch.sin((1 - t) * angle) * x + torch.sin(t * angle) * y) / torch.sin(angle)


def task_arithmetic(settings: Settings, name: str, base: Tensor, others: Sequence[Tensor]) -> Tensor:
    """base + λ Σ w δ over the task vectors δ = x − base, thinned as the method has it.

    With signs elected [TIES] an entry takes part where its sign is that of Σ w δ there (plus, where the sum is zero).
    `normalize` divides by the sum of the weights, there by the sum of those that take part: the disjoint mean.
    """
    task = TASKS[settings.method]
    base = base.double()
    deltas = []
    for index, (other, weight) in enumerate(zip(others, settings.weights, strict=True)):
        delta = other.double() - base
        if task.drops != "none":
            generator = drawing(settings.seed, index, name) if task.drops == "random" else None
            delta = thinned(delta, settings.densities[index], settings.rescale, generator)
        deltas.append(weight * delta)
    if not task.elects:
        mixed = torch.stack(deltas).sum(0)
        return base + settings.scale * (mixed / sum(settings.weights) if settings.normalize else mixed)
    elected = torch.where(torch.stack(deltas).sum(0) >= 0, 1.0, -1.0).double()
    mixed, divisor = torch.zeros_like(base), torch.zeros_like(base)
    for delta, weight in zip(deltas, settings.weights, strict=True):
        agrees = (delta.sign() == elected).double()
        mixed += delta * agrees
        divisor += weight * agrees
    if settings.normalize:
        # 0.1 + 0.2 - 0.3 is zero but for rounding.
        nothing = CANCELLED * sum(map(abs, settings.weights))
        mixed /= torch.where(divisor.abs() <= nothing, 1.0, divisor)
    return base + settings.scale * mixed


def thinned(delta: Tensor, density: float, rescale: bool, generator: torch.Generator | None) -> Tensor:
    """δ with the share `density` of its entries left: those largest in size [TIES], or each with that probability if
    there is a generator [DARE].

    `rescale`: by Σ|δ| before over Σ|δ| after, as mergekit does, which keeps the mean size exactly. DARE's own factor,
    1 / density, is what it comes to on average.
    """
    if density >= 1:
        return delta
    if generator is None:
        left = max(1, int(density * delta.numel()))
        kept = torch.zeros(delta.numel(), dtype=torch.bool)
        kept[delta.abs().reshape(-1).topk(left).indices] = True
        kept = kept.reshape(delta.shape)
    else:
        kept = torch.rand(delta.shape, generator=generator, dtype=torch.float64) < density
    result = delta * kept
    after = float(result.abs().sum())
    return result * (float(delta.abs().sum()) / after) if rescale and after > 0 else result


def drawing(seed: int, index: int, name: str) -> torch.Generator:
    """The random numbers of one tensor of one model: the same in whatever order and in whatever files tensors come."""
    digest = hashlib.sha256(f"{seed} {index} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
