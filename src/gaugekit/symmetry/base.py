"""A symmetry is an object: it knows its group, its dimension, what it touches, and how it acts.

Shapes: d stream width, h query heads, g key/value heads, k head dimension, f hidden units, V vocabulary.
Actions are exact identities of the observable; the algebra is done in the dtype of the tensors given, and float64
is meant.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor
from torch.autograd import forward_ad

from gaugekit.models.view import Edit, View

Exactness = Literal["exact", "exact in logprobs", "exact at eps=0"]
Part = Literal["vo", "qk", "units", "norms", "shifts", "frame", "order"]
Observable = Literal["logprobs", "logits", "hidden", "similarities"]
STATES: tuple[Observable, ...] = ("hidden", "similarities")
"""Observables of the last hidden states: these themselves, or their inner products."""


@dataclass(frozen=True)
class Symmetry(ABC):
    """One symmetry at one place of one model.

    `where` names the place, `layer` the layer it belongs to ("" for none). `dimension` counts the directions that no
    other symmetry of the same model covers, and `element` maps that many coordinates to a group element. Discrete
    symmetries have dimension 0.
    """

    where: str
    layer: str = field(default="", kw_only=True)

    part: ClassVar[Part]  # the part of the whole group, by which users choose
    name: ClassVar[str]  # the kind, as reported: the same for every place

    @property
    @abstractmethod
    def group(self) -> str:
        """The group, in the usual notation."""

    @property
    @abstractmethod
    def dimension(self) -> int: ...

    @property
    @abstractmethod
    def views(self) -> tuple[View, ...]:
        """Every weight that an element moves."""

    @property
    def context(self) -> tuple[View, ...]:
        """Weights that are read to move others: a part of a model can be moved if it holds these."""
        return ()

    @property
    def divisors(self) -> tuple[View, ...]:
        """Weights by which an element divides: where one of them is zero, this symmetry does not exist."""
        return ()

    @property
    def exactness(self) -> Exactness:
        return "exact"

    @property
    def touches(self) -> tuple[str, ...]:
        """Names of the disk tensors that an element changes."""
        return tuple(dict.fromkeys(view.name for view in self.views))

    @abstractmethod
    def element(self, coordinates: Tensor) -> Tensor:
        """The group element with these coordinates (dimension,): the identity at zero, with independent derivatives."""

    @abstractmethod
    def sample(self, generator: Generator, condition: float = 10.0) -> Tensor:
        """A random element far from the identity, components not connected to it included. Scales and matrices
        have about the given condition number."""

    @abstractmethod
    def inverse(self, element: Tensor) -> Tensor:
        """The element that undoes `element`: moved by one and then by the other, tensors are what they were."""

    @abstractmethod
    def move(self, edit: Edit, element: Tensor) -> None:
        """Act on the tensors behind `edit`; of a part of a model, on what it holds."""

    @abstractmethod
    def fix(self, edit: Edit) -> Tensor:
        """The element that carries the weights behind `edit` to their representative: after it has moved them, the
        result is the same for every model of the orbit, and `fix` gives the identity."""

    @property
    def sources(self) -> tuple[View, ...]:
        """Weights by which `fix` decides."""
        return self.views + self.context

    def act(self, tensors: Mapping[str, Tensor], element: Tensor, own: Collection[str] = ()) -> dict[str, Tensor]:
        """The tensors that change, with their new values; the given ones are not modified, but for `own`, which nobody
        else holds."""
        edit = Edit(tensors, own)
        self.move(edit, element)
        return edit.changed

    def tangent(self, tensors: Mapping[str, Tensor], coordinates: Tensor) -> dict[str, Tensor]:
        """Derivative of the action along a direction (dimension,) at the identity, by forward-mode differentiation:
        the velocity of the touched tensors along the orbit."""
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.zeros_like(coordinates), coordinates)
            changed = self.act(tensors, self.element(dual))
            velocities = {name: forward_ad.unpack_dual(value).tangent for name, value in changed.items()}
            return {name: value.clone() for name, value in velocities.items() if value is not None}


class Translation(Symmetry):
    """A symmetry whose group is a vector space: an element is its own coordinates."""

    part: ClassVar[Part] = "shifts"

    @property
    def group(self) -> str:
        return power("R", self.dimension)

    def element(self, coordinates: Tensor) -> Tensor:
        return coordinates

    def inverse(self, element: Tensor) -> Tensor:
        return -element

    def sample(self, generator: Generator, condition: float = 10.0) -> Tensor:
        return torch.randn(self.dimension, generator=generator, dtype=torch.float64)


class Scaling(Symmetry):
    """A symmetry whose group is a product of multiplicative groups of the reals."""

    signed: ClassVar[bool] = True

    @property
    def group(self) -> str:
        return power("R*" if self.signed else "R+", self.dimension)

    def element(self, coordinates: Tensor) -> Tensor:
        return coordinates.exp()

    def inverse(self, element: Tensor) -> Tensor:
        return 1.0 / element

    def sample(self, generator: Generator, condition: float = 10.0) -> Tensor:
        shape = (self.dimension,)
        spread = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
        scales = condition**spread
        if self.signed:
            scales = scales * random_signs(shape, generator)
        return scales


class Discrete(Symmetry):
    """A finite symmetry: dimension 0, elements are permutations or signs."""

    part: ClassVar[Part] = "order"

    @property
    def dimension(self) -> int:
        return 0

    @abstractmethod
    def keys(self, edit: Edit) -> Tensor:
        """What the representative is sorted by: where two keys agree to rounding, so do the two orders."""

    def element(self, coordinates: Tensor) -> Tensor:
        raise TypeError(f"{self.name} is discrete: it has random elements, but no coordinates")

    def inverse(self, element: Tensor) -> Tensor:
        return element.argsort()


def power(group: str, count: int) -> str:
    """A product of equal groups, as it is written."""
    if count == 1:
        return group
    return f"{group}^{count}" if re.fullmatch(r"\w+(\([^()]*\))?", group) else f"({group})^{count}"


def random_signs(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).double() * 2 - 1


def probe(length: int) -> Tensor:
    """A fixed vector (length,) in general position. Signs, phases and orders that have no other rule are decided by
    the product with it, which is large for nearly every vector; a largest entry may change by rounding."""
    return torch.randn(length, generator=Generator().manual_seed(length), dtype=torch.float64)


def scatter(values: Tensor, index: Tensor, length: int) -> Tensor:
    """A vector (length,) that is zero but for `values` at `index`."""
    return torch.zeros(length, dtype=values.dtype).index_copy(0, index, values)


def present(*views: View | None) -> tuple[View, ...]:
    return tuple(view for view in views if view is not None)
