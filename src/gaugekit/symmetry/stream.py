"""Symmetries of a whole residual stream: its frame, and the mean that LayerNorms do not see.

Every weight that touches the stream has its axis last: writers X → X Uᵀ, readers W → W Uᵀ behind an identity norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Generator, Tensor

from gaugekit.linalg import orthonormal_complement_of_ones, random_orthogonal
from gaugekit.models.spec import Norm
from gaugekit.models.view import Edit, View
from gaugekit.symmetry.base import Discrete, Part, Symmetry, Translation, present, probe, random_signs, scatter
from gaugekit.symmetry.readers import Reader


@dataclass(frozen=True)
class WriterMean(Translation):
    """Adds a multiple of 1 to rows that are written to a stream which only LayerNorms read: X → X + a 1ᵀ.

    `scale`: a LayerScale λ between the rows and the stream, so that a λ⁻¹ᵀ is added instead. Dead rows stay.
    """

    rows: View
    dead_rows: tuple[int, ...] = ()
    scale: View | None = None

    name: ClassVar[str] = "writer mean"

    @property
    def count(self) -> int:
        return self.rows.numel // self.rows.shape[-1]

    @property
    def dimension(self) -> int:
        return self.count - len(self.dead_rows)

    @property
    def views(self) -> tuple[View, ...]:
        return (self.rows,)

    @property
    def context(self) -> tuple[View, ...]:
        return present(self.scale)

    @property
    def divisors(self) -> tuple[View, ...]:
        return present(self.scale)

    def fix(self, edit: Edit) -> Tensor:
        """What is written has mean zero, row by row."""
        rows = edit[self.rows] if self.scale is None else edit[self.rows] * edit[self.scale]
        means = -rows.mean(-1).reshape(-1)
        live = [row for row in range(self.count) if row not in self.dead_rows]
        return means[live] if self.dead_rows else means

    def move(self, edit: Edit, element: Tensor) -> None:
        if self.dead_rows:
            live = torch.tensor([row for row in range(self.count) if row not in self.dead_rows])
            element = scatter(element, live, self.count)
        width = self.rows.shape[-1]
        direction = torch.ones(width, dtype=element.dtype) if self.scale is None else 1.0 / edit[self.scale]
        edit.update_rows(self.rows, lambda rows, a: rows + a * direction, element.reshape(*self.rows.shape[:-1], 1))


@dataclass(frozen=True)
class Frame(Symmetry):
    """Turns the stream: writers X → X Uᵀ, readers behind γ: W → W Γ Uᵀ Γ⁻¹, β → Γ U Γ⁻¹ β.

    U is orthogonal; with `fix_ones` (LayerNorms) it also has U 1 = ±1. Each writer comes with the LayerScale between
    it and the stream, or None.
    """

    writers: tuple[tuple[View, View | None], ...]
    readers: tuple[Reader, ...]
    norms: tuple[Norm, ...]
    fix_ones: bool

    part: ClassVar[Part] = "frame"
    name: ClassVar[str] = "residual frame"

    @property
    def width(self) -> int:
        return self.writers[0][0].shape[-1]

    @property
    def turning(self) -> int:
        """Dimension of the space that turns freely."""
        return self.width - self.fix_ones

    @property
    def group(self) -> str:
        return f"O({self.turning}) x Z_2" if self.fix_ones else f"O({self.turning})"

    @property
    def dimension(self) -> int:
        return self.turning * (self.turning - 1) // 2

    @property
    def views(self) -> tuple[View, ...]:
        biases = tuple(norm.bias for norm in self.norms if norm.bias is not None)
        return tuple(view for view, _ in self.writers) + tuple(reader.linear.weight for reader in self.readers) + biases

    @property
    def context(self) -> tuple[View, ...]:
        scales = tuple(scale for _, scale in self.writers if scale is not None)
        return scales + tuple(reader.norm.weight for reader in self.readers if reader.norm is not None)

    @cached_property
    def basis(self) -> Tensor:
        return orthonormal_complement_of_ones(self.width)

    def _embed(self, turn: Tensor, sign: float) -> Tensor:
        if not self.fix_ones:
            return turn
        return self.basis @ turn @ self.basis.mT + sign / self.width

    def element(self, coordinates: Tensor) -> Tensor:
        n = self.turning
        upper = torch.triu_indices(n, n, offset=1)
        generator = scatter(coordinates, upper[0] * n + upper[1], n * n).reshape(n, n)
        return self._embed(torch.linalg.matrix_exp(generator - generator.mT), 1.0)

    def sample(self, generator: Generator, condition: float = 10.0) -> Tensor:
        sign = float(random_signs((), generator))
        return self._embed(random_orthogonal(self.turning, generator), sign)

    def inverse(self, element: Tensor) -> Tensor:
        return element.mT

    @property
    def sources(self) -> tuple[View, ...]:
        return (self.writers[0][0],)

    @property
    def divisors(self) -> tuple[View, ...]:
        return self.context

    def fix(self, edit: Edit) -> Tensor:
        """The frame in which the first table E has EᵀE diagonal and falling: with E = U Σ Vᵀ it becomes U Σ, each
        column with a positive product with a fixed vector over the tokens [FR, dressing]."""
        rows = edit[self.writers[0][0]]
        triangle = torch.linalg.qr(rows, mode="r").R
        axes = torch.linalg.svd(triangle).Vh[: self.turning]
        signs = torch.where((probe(len(rows)) @ rows) @ axes.mT < 0, -1.0, 1.0).to(rows.dtype)
        axes = axes * signs.unsqueeze(-1)
        return self.basis @ axes + 1.0 / self.width if self.fix_ones else axes

    def move(self, edit: Edit, element: Tensor) -> None:
        for view, scale in self.writers:
            if scale is None:
                edit.update_rows(view, lambda rows: rows @ element.mT)
            else:
                edit.update_rows(view, lambda rows, scale=scale: (rows * edit[scale]) @ element.mT / edit[scale])
        for reader in self.readers:
            norm = reader.norm
            if norm is None:
                edit.update_rows(reader.linear.weight, lambda weight: weight @ element.mT)
            else:
                edit.update_rows(
                    reader.linear.weight,
                    lambda weight, norm=norm: (weight * edit[norm.weight]) @ element.mT / edit[norm.weight],
                )
        for norm in self.norms:
            edit.update(
                norm.bias,
                lambda bias, norm=norm: edit[norm.weight] * (element @ (bias / edit[norm.weight])),
            )


@dataclass(frozen=True)
class StreamOrder(Discrete):
    """Coordinates of the stream in another order, and where `signs` is "each" with signs; "one" is a common sign.

    Norm weights move with the coordinates, so this holds where a larger frame does not (a tied head, norms on the
    branches' outputs). `odd`: vectors (…, d) that change sign with their coordinate; `even`: norm weights that do not.
    """

    odd: tuple[View, ...]
    even: tuple[View, ...]
    signs: str

    name: ClassVar[str] = "stream order"

    @property
    def group(self) -> str:
        width = self.odd[0].shape[-1]
        return {"each": f"Z_2 wr S_{width}", "one": f"Z_2 x S_{width}", "none": f"S_{width}"}[self.signs]

    @property
    def views(self) -> tuple[View, ...]:
        return self.odd + self.even

    def sample(self, generator: Generator, condition: float = 10.0) -> Tensor:
        """(2, d): the new order and the signs."""
        width = self.odd[0].shape[-1]
        order = torch.randperm(width, generator=generator).double()
        signs = {
            "each": random_signs((width,), generator),
            "one": -torch.ones(width).double(),
            "none": torch.ones(width).double(),
        }[self.signs]
        return torch.stack([order, signs])

    def inverse(self, element: Tensor) -> Tensor:
        back = element[0].argsort()
        return torch.stack([back.to(element.dtype), element[1][back]])

    @property
    def sources(self) -> tuple[View, ...]:
        return (self.odd[0],)

    def fix(self, edit: Edit) -> Tensor:
        """Coordinates in the order of their products with a fixed vector over the first table's rows, which signs make
        positive as far as there are any."""
        keys = self.keys(edit)
        if self.signs == "each":
            order = keys.abs().argsort(descending=True)
            signs = torch.where(keys[order] < 0, -1.0, 1.0)
        else:
            common = -1.0 if self.signs == "one" and keys[keys.abs().argmax()] < 0 else 1.0
            order = (common * keys).argsort(descending=True)
            signs = torch.full_like(keys, common)
        return torch.stack([order.to(keys.dtype), signs.to(keys.dtype)])

    def keys(self, edit: Edit) -> Tensor:
        rows = edit[self.odd[0]].reshape(-1, self.odd[0].shape[-1])
        return probe(len(rows)) @ rows

    def move(self, edit: Edit, element: Tensor) -> None:
        order, signs = element[0].long(), element[1]
        for view in self.odd:
            edit.update_rows(view, lambda values: values[..., order] * signs)
        for view in self.even:
            edit.update(view, lambda values: values[..., order])
