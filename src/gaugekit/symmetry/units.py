"""Symmetries of hidden units and experts.

Shapes: up and gate (f, d) with bias (f,), down (f, d); router (E, d).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from gaugekit.models.parts import ACTIVATIONS
from gaugekit.models.spec import MLP, Linear, MoE
from gaugekit.models.view import Edit, View
from gaugekit.symmetry.base import Discrete, Part, Scaling, Translation, present, probe


def scale_rows(edit: Edit, linear: Linear, scales: Tensor) -> None:
    edit.update(linear.weight, lambda weight: weight * scales.unsqueeze(-1))
    edit.update(linear.bias, lambda bias: bias * scales)


def balancing(grow: Tensor, shrink: Tensor, degree: int) -> Tensor:
    """Scales a (f,) with a‖grow‖ = ‖shrink‖ / a^(degree − 1), row by row; 1 where a row is zero."""
    first, second = grow.norm(dim=-1), shrink.norm(dim=-1)
    sound = (first > 0) & (second > 0)
    ratio = torch.where(sound, second, 1.0) / torch.where(sound, first, 1.0)
    return ratio ** (1.0 / degree)


@dataclass(frozen=True)
class GatedUnitScale(Scaling):
    """up → a up, down → down / a, unit by unit, for any a ≠ 0."""

    mlp: MLP

    part: ClassVar[Part] = "units"
    name: ClassVar[str] = "gated unit scale"

    @property
    def dimension(self) -> int:
        return self.mlp.up.weight.shape[0]

    @property
    def views(self) -> tuple[View, ...]:
        return present(self.mlp.up.weight, self.mlp.up.bias, self.mlp.down.weight)

    def fix(self, edit: Edit) -> Tensor:
        """Rows of up and down are equally long, and the product of each row of up with a fixed vector is positive."""
        up, down = edit[self.mlp.up.weight], edit[self.mlp.down.weight]
        scales = balancing(up, down, 2)
        return torch.where(up @ probe(up.shape[-1]) < 0, -scales, scales)

    def move(self, edit: Edit, element: Tensor) -> None:
        scale_rows(edit, self.mlp.up, element)
        edit.update(self.mlp.down.weight, lambda weight: weight / element.unsqueeze(-1))


@dataclass(frozen=True)
class ActivationScale(Scaling):
    """What the activation reads → a times it, down → down / a^degree, for a > 0 and a homogeneous activation."""

    mlp: MLP

    part: ClassVar[Part] = "units"
    name: ClassVar[str] = "activation scale"
    signed: ClassVar[bool] = False

    @property
    def active(self) -> Linear:
        return self.mlp.up if self.mlp.gate is None else self.mlp.gate

    @property
    def dimension(self) -> int:
        return self.active.weight.shape[0]

    @property
    def views(self) -> tuple[View, ...]:
        return present(self.active.weight, self.active.bias, self.mlp.down.weight)

    def fix(self, edit: Edit) -> Tensor:
        """Rows of what the activation reads and of down are equally long; behind a gate they have length one, since
        up and down share the rest."""
        active, down = edit[self.active.weight], edit[self.mlp.down.weight]
        if self.mlp.gate is not None:
            size = active.norm(dim=-1)
            return torch.where(size > 0, 1.0 / torch.where(size > 0, size, 1.0), 1.0)
        degree = ACTIVATIONS[self.mlp.activation]
        assert degree is not None
        return balancing(active, down, 1 + degree)

    def move(self, edit: Edit, element: Tensor) -> None:
        degree = ACTIVATIONS[self.mlp.activation]
        assert degree is not None
        scale_rows(edit, self.active, element)
        edit.update(self.mlp.down.weight, lambda weight: weight / (element**degree).unsqueeze(-1))


@dataclass(frozen=True)
class RouterConstant(Translation):
    """Router rows + 1cᵀ: every expert's logit shifts alike, which the router's softmax does not see."""

    moe: MoE

    name: ClassVar[str] = "router constant"

    @property
    def dimension(self) -> int:
        return self.moe.router.weight.shape[-1]

    @property
    def views(self) -> tuple[View, ...]:
        return (self.moe.router.weight,)

    def fix(self, edit: Edit) -> Tensor:
        """The rows sum to zero."""
        return -edit[self.moe.router.weight].mean(0)

    def move(self, edit: Edit, element: Tensor) -> None:
        edit.update(self.moe.router.weight, lambda weight: weight + element)


@dataclass(frozen=True)
class UnitOrder(Discrete):
    """Hidden units in another order."""

    mlp: MLP

    name: ClassVar[str] = "unit order"

    @property
    def group(self) -> str:
        return f"S_{self.mlp.up.weight.shape[0]}"

    @property
    def views(self) -> tuple[View, ...]:
        gate = self.mlp.gate or Linear(self.mlp.up.weight)
        return present(self.mlp.up.weight, self.mlp.up.bias, gate.weight, gate.bias, self.mlp.down.weight)

    def sample(self, generator: Generator, condition: float = 10.0) -> Tensor:
        return torch.randperm(self.mlp.up.weight.shape[0], generator=generator)

    def fix(self, edit: Edit) -> Tensor:
        """Units by the sum of squares of their weights, falling."""
        return self.keys(edit).argsort(descending=True)

    def keys(self, edit: Edit) -> Tensor:
        size = (edit[self.mlp.up.weight] ** 2).sum(-1) + (edit[self.mlp.down.weight] ** 2).sum(-1)
        if self.mlp.gate is not None:
            size = size + (edit[self.mlp.gate.weight] ** 2).sum(-1)
        return size

    def move(self, edit: Edit, element: Tensor) -> None:
        for view in dict.fromkeys(self.views):
            edit.update(view, lambda units: units[element])


@dataclass(frozen=True)
class ExpertOrder(Discrete):
    """Experts in another order, router rows with them."""

    moe: MoE

    name: ClassVar[str] = "expert order"

    @property
    def group(self) -> str:
        return f"S_{len(self.moe.experts)}"

    @property
    def views(self) -> tuple[View, ...]:
        parts = tuple(view for expert in self.moe.experts for view in expert_views(expert))
        return (*present(self.moe.router.weight, self.moe.router.bias), *parts)

    def sample(self, generator: Generator, condition: float = 10.0) -> Tensor:
        return torch.randperm(len(self.moe.experts), generator=generator)

    def fix(self, edit: Edit) -> Tensor:
        """Experts by the product of their router rows with a fixed vector, falling: lengths tie where there are two."""
        return self.keys(edit).argsort(descending=True)

    def keys(self, edit: Edit) -> Tensor:
        rows = edit[self.moe.router.weight]
        return rows @ probe(rows.shape[-1])

    def move(self, edit: Edit, element: Tensor) -> None:
        for view in present(self.moe.router.weight, self.moe.router.bias):
            edit.update(view, lambda units: units[element])
        old = [[edit[view].clone() for view in expert_views(expert)] for expert in self.moe.experts]
        for expert, source in zip(self.moe.experts, element.tolist(), strict=True):
            for view, value in zip(expert_views(expert), old[source], strict=True):
                edit[view] = value


def expert_views(mlp: MLP) -> tuple[View, ...]:
    gate = mlp.gate
    return present(
        mlp.up.weight,
        mlp.up.bias,
        None if gate is None else gate.weight,
        None if gate is None else gate.bias,
        mlp.down.weight,
        mlp.down.bias,
    )
