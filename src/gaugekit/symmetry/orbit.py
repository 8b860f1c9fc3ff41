"""Moving a model along its orbit, piece by piece: no more than a layer is in memory, and every tensor is rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugekit.models.spec import MLP, Attention, Branch, Norm, Spec
from gaugekit.models.view import View
from gaugekit.symmetry.base import Symmetry, present
from gaugekit.symmetry.wiring import inputs, output

Load = Callable[[str], Tensor]


@dataclass(frozen=True)
class Step:
    """One symmetry with the element by which it acts."""

    symmetry: Symmetry
    element: Tensor


def pieces(spec: Spec) -> Iterator[tuple[str, ...]]:
    """Names of the parameter tensors, layer by layer, then one by one those that stand in no layer; a bias always
    comes with its weight."""
    taken: set[str] = set()
    groups = [
        [view for branch in block.branches for view in branch_views(branch)]
        for stream in spec.streams
        for block in stream.blocks
    ]
    heads = [stream.head.linear for stream in spec.streams if stream.head is not None]
    groups += [list(present(linear.weight, linear.bias)) for linear in heads]
    for views in groups:
        names = tuple(dict.fromkeys(view.name for view in views if view.name not in taken))
        taken.update(names)
        yield names
    yield from ((name,) for name in spec.tensors if name not in taken)


def branch_views(branch: Branch) -> Iterator[View]:
    """Every weight of a branch."""
    body = branch.body
    linears = [*inputs(body), *output(body)]
    if isinstance(body, Attention):
        linears += [body.k, body.v]
        if body.qk_norm is not None:
            yield from (body.qk_norm.q, body.qk_norm.k)
    elif not isinstance(body, MLP):
        linears += [body.router]
    for linear in linears:
        yield from present(linear.weight, linear.bias)
    norms: list[Norm | None] = [branch.norm_in, branch.norm_out, branch.norm_sum]
    for norm in norms:
        if norm is not None:
            yield from present(norm.weight, norm.bias)
    yield from present(branch.scale)


class Path:
    """Steps to be taken one after the other, ready to be applied to any part of the model."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        self._touching: dict[str, list[int]] = {}
        for number, step in enumerate(self.steps):
            for name in step.symmetry.touches:
                self._touching.setdefault(name, []).append(number)

    @property
    def touches(self) -> frozenset[str]:
        """Names of all tensors that the path changes."""
        return frozenset(self._touching)

    def needs(self, names: Sequence[str]) -> dict[str, None]:
        """`names` and what else must be at hand to move them, in order."""
        needed = dict.fromkeys(names)
        waiting = list(names)
        while waiting:
            for number in self._touching.get(waiting.pop(), ()):
                for view in self.steps[number].symmetry.context:
                    if view.name not in needed:
                        needed[view.name] = None
                        waiting.append(view.name)
        return needed

    def move(self, names: Sequence[str], load: Load) -> dict[str, Tensor]:
        """The new values of those of `names` that the path changes, in float64."""
        if not any(name in self._touching for name in names):
            return {}
        tensors = {name: load(name).to(torch.float64) for name in self.needs(names)}
        numbers = sorted({number for name in tensors for number in self._touching.get(name, ())})
        for number in numbers:
            tensors.update(self.steps[number].symmetry.act(tensors, self.steps[number].element))
        return {name: tensors[name] for name in names if name in self._touching}
