"""Parameters whose slices are of length 1: which they are, how they are kept so, and the layers that have them.

Matrices stay on their spheres in one of two ways: `normalize_(spheres(model))` after each step of an optimizer (as
`optim.hyperball` does), or `parametrize(model)`, with which weights are N(V) of free V in every forward pass, N(x)
= x / |x|.

At unit V, the gradient for V is the tangential part of the gradient g for the weight w, so that a gradient step of V
followed by `normalize_` retracts the tangent step of w. Without `normalize_`, |V| grows, and steps have lr/|V|² for lr.
Plain gradient steps of w that are normalized afterwards have lr/(1 − lr w·g), off by a relative O(lr).

Source: [nGPT] Loshchilov, Hsieh, Sun and Ginsburg, arXiv 2410.01131, section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized, register_parametrization

from gaugekit.geometry.rows import wide
from gaugekit.geometry.sphere import project

__all__ = ["Reader", "Rows", "Sphere", "Unit", "UnitNorm", "Writer", "normalize_", "parametrize", "spheres"]

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class Sphere:
    """All slices of `parameter` along `dim` are of length 1. `name` is its name in the module that was asked."""

    parameter: nn.Parameter
    dim: int
    name: str


def spheres(module: nn.Module) -> list[Sphere]:
    """The parameters of a module and of its parts that are on spheres, each once.

    A class of modules declares its own as `sphere_dims`, names to axes, as `Reader` does. For a parametrized weight it
    is the free parameter behind it. `fully_shard` makes new parameters: ask after it.

    Raises: ValueError if a parameter is declared along two axes, or one that it does not have, or has a parametrization
        other than `UnitNorm`.
    """
    found: dict[int, Sphere] = {}
    for prefix, part in module.named_modules():
        for name, dim in _declared(part).items():
            chain = _unit_norm(part, name)
            parameter = getattr(part, name) if chain is None else getattr(chain, "original")  # noqa: B009, not typed
            local = name if chain is None else f"parametrizations.{name}.original"
            full = f"{prefix}.{local}" if prefix else local
            if not -parameter.ndim <= dim < parameter.ndim:
                raise ValueError(f"{full} is declared along axis {dim}, which {tuple(parameter.shape)} does not have")
            sphere = Sphere(parameter, dim % parameter.ndim, full)
            first = found.setdefault(id(parameter), sphere)
            if first.dim != sphere.dim:
                raise ValueError(f"{first.name} is also {sphere.name}, with axis {sphere.dim} in place of {first.dim}")
    return list(found.values())


@torch.no_grad()
def normalize_(declared: Iterable[Sphere]) -> None:
    """Project all slices onto the unit sphere, in place; zero slices stay zero. Half precisions in float32."""
    for sphere in declared:
        x = wide(sphere.parameter)
        largest = torch.maximum(x.amax(sphere.dim, keepdim=True), -x.amin(sphere.dim, keepdim=True))
        x.div_(torch.where(largest == 0, 1.0, largest))  # lest squares overflow or vanish
        length = torch.linalg.vector_norm(x, 2, sphere.dim, keepdim=True)
        x.div_(torch.where(length == 0, 1.0, length))
        if x is not sphere.parameter:
            sphere.parameter.copy_(x)


class UnitNorm(nn.Module):
    """N along an axis, as a parametrization of `torch.nn.utils.parametrize`. What is assigned is kept as it is."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, weight: Tensor) -> Tensor:
        return project(weight.movedim(self.dim, -1)).movedim(-1, self.dim)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


def parametrize(module: M) -> M:
    """Make all weights on spheres N(V) of free parameters V, in place; the module is given back.

    V is the parameter that was the weight, so that optimizers made before hold it. Undone, with N(V) for weights, by
    `torch.nn.utils.parametrize.remove_parametrizations`. ValueError where a weight has another parametrization.
    """
    for part in list(module.modules()):
        for name, dim in _declared(part).items():
            if _unit_norm(part, name) is None:
                register_parametrization(part, name, UnitNorm(dim))
    return module


def _declared(part: nn.Module) -> Mapping[str, int]:
    # Of the class: wrappers such as torch.compile's pass on the attributes of the instance that they hold.
    return getattr(type(part), "sphere_dims", {})


def _unit_norm(part: nn.Module, name: str) -> ParametrizationList | None:
    if not is_parametrized(part, name):
        return None
    chain = part.get_submodule(f"parametrizations.{name}")
    assert isinstance(chain, ParametrizationList)
    if len(chain) != 1 or not isinstance(chain[0], UnitNorm):
        raise ValueError(f"{name} of a {type(part).__name__} has a parametrization that is not UnitNorm: remove it")
    return chain


class Unit:
    """Mixed into a module whose class declares `sphere_dims`, its parameters on spheres and their axes."""

    sphere_dims: ClassVar[Mapping[str, int]]

    def reset_parameters(self) -> None:
        """Uniformly distributed on the spheres."""
        assert isinstance(self, nn.Module)
        own = spheres(self)
        with torch.no_grad():
            for sphere in own:
                sphere.parameter.normal_()
        normalize_(own)


class _UnitLinear(Unit, nn.Linear):
    def __init__(self, in_features: int, out_features: int, device=None, dtype=None) -> None:
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)


class Reader(_UnitLinear):
    """A linear map from the stream, without bias: weight (out, d) with unit rows."""

    sphere_dims = {"weight": 1}  # noqa: RUF012


class Writer(_UnitLinear):
    """A linear map to the stream, without bias: weight (d, in) with unit columns."""

    sphere_dims = {"weight": 0}  # noqa: RUF012


class Rows(Unit, nn.Embedding):
    """An embedding: weight (vocab, d) with unit rows."""

    sphere_dims = {"weight": 1}  # noqa: RUF012
