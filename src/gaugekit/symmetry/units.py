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
from gaugekit.symmetry.base import Discrete, Scaling, Translation, present


def scale_rows(edit: Edit, linear: Linear, scales: Tensor) -> None:
    edit.update(linear.weight, lambda weight: weight * scales.unsqueeze(-1))
    edit.update(linear.bias, lambda bias: bias * scales)


@dataclass(frozen=True)
class GatedUnitScale(Scaling):
    """up → a up, down → down / a, unit by unit, for any a ≠ 0."""

    mlp: MLP

    name: ClassVar[str] = "gated unit scale"

    @property
    def dimension(self) -> int:
        return self.mlp.up.weight.shape[0]

    @property
    def views(self) -> tuple[View, ...]:
        return present(self.mlp.up.weight, self.mlp.up.bias, self.mlp.down.weight)

    def move(self, edit: Edit, element: Tensor) -> None:
        scale_rows(edit, self.mlp.up, element)
        edit.update(self.mlp.down.weight, lambda weight: weight / element.unsqueeze(-1))


@dataclass(frozen=True)
class ActivationScale(Scaling):
    """What the activation reads → a times it, down → down / a^degree, for a > 0 and a homogeneous activation."""

    mlp: MLP

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
