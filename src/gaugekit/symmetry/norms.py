"""Symmetries between a norm and what reads it, between a norm's bias and its neighbours, and of LayerScale.

Shapes: γ, β (d,); readers' weights (rows..., d), seen flat as (rows, d).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gaugekit.models.spec import Linear, Norm
from gaugekit.models.view import Edit, View
from gaugekit.symmetry.base import Exactness, Part, Scaling, Translation, present
from gaugekit.symmetry.readers import Reader


@dataclass(frozen=True)
class NormScale(Scaling):
    """γ → D γ, β → D β, every reader W → W D⁻¹, for diagonal invertible D."""

    norm: Norm
    readers: tuple[Reader, ...]

    part: ClassVar[Part] = "norms"
    name: ClassVar[str] = "norm weight"

    @property
    def dimension(self) -> int:
        return self.norm.weight.shape[0]

    @property
    def views(self) -> tuple[View, ...]:
        return present(self.norm.weight, self.norm.bias) + tuple(r.linear.weight for r in self.readers)

    @property
    def sources(self) -> tuple[View, ...]:
        return (self.norm.weight,)

    def fix(self, edit: Edit) -> Tensor:
        """γ becomes 1."""
        return 1.0 / edit[self.norm.weight]

    def move(self, edit: Edit, element: Tensor) -> None:
        for view in present(self.norm.weight, self.norm.bias):
            edit.update(view, lambda values: values * element)
        for reader in self.readers:
            edit.update_rows(reader.linear.weight, lambda weight: weight / element)


@dataclass(frozen=True)
class NormConstant(Translation):
    """β → β + δ: every reader's bias takes −W δ, or, where a reader has none, its free direction −(Wδ/(w·β)) wᵀ.

    `sink`: where the norm's output also runs on along the residual (post-norm), the bias (d,) of the branch that is
    added to it takes −δ.
    """

    norm: Norm
    readers: tuple[Reader, ...]
    sink: View | None = None

    name: ClassVar[str] = "norm bias"

    @property
    def dimension(self) -> int:
        return self.norm.weight.shape[0]

    @property
    def views(self) -> tuple[View, ...]:
        shifted = tuple(view for reader in self.readers for view in reader.shift_views)
        return present(self.norm.bias) + shifted + present(self.sink)

    @property
    def context(self) -> tuple[View, ...]:
        # A reader's bias moves by what its weight says: the two lie in the same layer.
        return tuple(view for reader in self.readers if reader.linear.bias is None for view in reader.context)

    @property
    def sources(self) -> tuple[View, ...]:
        return present(self.norm.weight, self.norm.bias)

    @property
    def divisors(self) -> tuple[View, ...]:
        return tuple(dict.fromkeys(view for reader in self.readers for view in reader.divisors))

    def fix(self, edit: Edit) -> Tensor:
        """β becomes 0. Readers without a bias need w·β ≠ 0 to keep their constant: then β becomes γ."""
        assert self.norm.bias is not None
        beta = edit[self.norm.bias]
        unbiased = any(reader.linear.bias is None for reader in self.readers)
        return edit[self.norm.weight] - beta if unbiased else -beta

    def move(self, edit: Edit, element: Tensor) -> None:
        assert self.norm.bias is not None
        # Each reader is shifted against the change of its own input, so β moves first: w·β is then the new one.
        edit.update(self.norm.bias, lambda bias: bias + element)
        for reader in self.readers:
            if reader.linear.weight in edit:
                reader.shift(edit, -(reader.flat(edit) @ element))
        edit.update(self.sink, lambda bias: bias - element)


@dataclass(frozen=True)
class ReaderKernel(Translation):
    """W → W + a wᵀ with w = γ⁻¹ behind a LayerNorm, and b → b − a (w·β): one direction per row.

    Rows without a bias take part only where the norm has none either. With `sum_free` the rows of the reader take
    only a with Σ a = 0, since another symmetry already has the direction 1 wᵀ.
    """

    norm: Norm
    reader: Reader
    sum_free: bool

    name: ClassVar[str] = "reader kernel"

    @property
    def dimension(self) -> int:
        return self.reader.rows - self.sum_free

    @property
    def views(self) -> tuple[View, ...]:
        bias = self.reader.linear.bias if self.norm.bias is not None else None
        return present(self.reader.linear.weight, bias)

    @property
    def context(self) -> tuple[View, ...]:
        return self.reader.context

    @property
    def divisors(self) -> tuple[View, ...]:
        return (self.norm.weight,)

    def fix(self, edit: Edit) -> Tensor:
        """W Γ 1 becomes 0."""
        rows = (self.reader.flat(edit) @ edit[self.norm.weight]) / -self.norm.weight.numel
        return rows[:-1] if self.sum_free else rows

    def move(self, edit: Edit, element: Tensor) -> None:
        if self.sum_free:
            element = torch.cat([element, -element.sum().unsqueeze(0)])
        self.reader.add_kernel(edit, element)
        if self.norm.bias is not None:
            w_beta = (1.0 / edit[self.norm.weight]) @ edit[self.norm.bias]
            self.reader.shift(edit, -element * w_beta)


@dataclass(frozen=True)
class LayerScale(Scaling):
    """λ → D λ, the branch's output W → D⁻¹ W and b → D⁻¹ b."""

    scale: View
    output: Linear

    part: ClassVar[Part] = "norms"
    name: ClassVar[str] = "layer scale"

    @property
    def dimension(self) -> int:
        return self.scale.shape[0]

    @property
    def views(self) -> tuple[View, ...]:
        return present(self.scale, self.output.weight, self.output.bias)

    def fix(self, edit: Edit) -> Tensor:
        """λ becomes 1."""
        return 1.0 / edit[self.scale]

    def move(self, edit: Edit, element: Tensor) -> None:
        edit.update(self.scale, lambda scale: scale * element)
        for view in present(self.output.weight, self.output.bias):
            edit.update(view, lambda values: values / element)


@dataclass(frozen=True)
class NormInputScale(Scaling):
    """Everything that a norm reads is multiplied by a > 0, which the norm undoes but for its eps.

    `grow` holds what is multiplied, `shrink` what is divided to make up for it elsewhere. With `count` above one each
    entry along the first axis (each head, where every head has a norm of its own) has its scale.
    """

    grow: tuple[View, ...]
    shrink: tuple[View, ...] = ()
    count: int = 1

    part: ClassVar[Part] = "norms"
    name: ClassVar[str] = "norm input scale"
    signed: ClassVar[bool] = False

    @property
    def exactness(self) -> Exactness:
        return "exact at eps=0"

    @property
    def dimension(self) -> int:
        return self.count

    @property
    def views(self) -> tuple[View, ...]:
        return self.grow + self.shrink

    def fix(self, edit: Edit) -> Tensor:
        raise NotImplementedError(
            "a scale that eps breaks has no representative: to take one would move the observable"
        )

    def move(self, edit: Edit, element: Tensor) -> None:
        for view in self.grow:
            edit.update(view, lambda values, view=view: values * self._beside(view, element))
        for view in self.shrink:
            edit.update(view, lambda values, view=view: values / self._beside(view, element))

    def _beside(self, view: View, element: Tensor) -> Tensor:
        return element if self.count == 1 else element.reshape(-1, *[1] * (len(view.shape) - 1))
