"""What passes through the norms of a decoder, at some points of its training.

Shapes: d width; the tokens of all windows are rows (n, d), float64 whatever the model runs in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gaugekit.studies.fitting import fit, language, made, sized
from gaugekit.studies.study import Arm, Budget, Measured
from gaugekit.training.config import OptimizerConfig
from gaugekit.training.decoder import Block, Decoder

__all__ = ["Passage", "Through", "passages", "place_names", "places", "points", "watched"]

WATCHED = 4  # held-out batches, at even distances


@dataclass(frozen=True)
class Passage:
    """Input and output (n, d) of one norm."""

    place: str
    norm: nn.Module
    before: Tensor
    after: Tensor


def place_names(layers: int) -> list[str]:
    """Of all norms of a pre-norm decoder in their order: "0 attention", "0 MLP", "1 attention", ..., "final"."""
    return [f"{i} {branch}" for i in range(layers) for branch in ("attention", "MLP")] + ["final"]


def places(model: Decoder) -> dict[str, nn.Module]:
    """Norms of a pre-norm decoder by the names of `place_names`; without a last norm there is no "final"."""
    norms: list[nn.Module] = []
    for block in model.blocks:
        assert isinstance(block, Block)
        norms += [block.norm_attention, block.norm_mlp]
    if model.norm is not None:
        norms.append(model.norm)
    return dict(zip(place_names(len(model.blocks)), norms, strict=False))


@torch.no_grad()
def passages(model: Decoder, windows: Sequence[Tensor]) -> list[Passage]:
    """What passes through each norm while the model reads token windows (b, n)."""
    found = places(model)
    seen: dict[str, tuple[list[Tensor], list[Tensor]]] = {place: ([], []) for place in found}

    def hook(place: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            for kept, states in zip(seen[place], (inputs[0], output), strict=True):
                kept.append(states.detach().double().flatten(0, -2))

        return keep

    handles = [norm.register_forward_hook(hook(place)) for place, norm in found.items()]
    try:
        for tokens in windows:
            model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return [Passage(place, norm, *(torch.cat(kept) for kept in seen[place])) for place, norm in found.items()]


def points(steps: int, count: int) -> tuple[int, ...]:
    """0 and `steps`, and numbers of steps between at even distances of their logarithms: at most `count` in all."""
    between = {round(steps ** (i / (count - 2))) for i in range(count - 1)}
    return (0, *sorted(between - {0}))


class Through:
    """A watch of `fit` that measures the model at some numbers of steps: `kept` has what `measure` found, by step."""

    def __init__(self, at: Sequence[int], measure: Callable[[Any], Any]) -> None:
        self.at, self.measure = frozenset(at), measure
        self.kept: dict[int, Any] = {}

    def __call__(self, step: int, model: nn.Module, _: Optimizer) -> None:
        if step in self.at:
            self.kept[step] = self.measure(model)


def watched(
    arm: Arm, rate: float, seed: int, budget: Budget, measure: Callable[[Decoder, Sequence[Tensor]], Any]
) -> Measured:
    """Train the budget's decoder, changed by the arm's settings, on language; "through" is a list of [steps taken, what
    `measure` found in the model and some windows that are not trained on], at `points` of the budget's option "points".
    """
    task = language(budget, seed)
    windows = [tokens for tokens, _ in task.held_out[:: max(1, len(task.held_out) // WATCHED)]]
    through = Through(points(budget.steps, budget.options["points"]), lambda model: measure(model, windows))
    model = made(sized(budget, task.vocab, **arm.settings), seed)
    measured = fit(model, OptimizerConfig(lr=rate), task, budget, seed, watch=through).measured()
    del measured["curve"]  # of the loss, which is not the question
    return {**measured, "through": [[step, each] for step, each in through.kept.items()]}
