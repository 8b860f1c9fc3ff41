"""A linear map that reads a normalized stream, and the two moves every one of them has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gaugekit.models.spec import Linear, Norm
from gaugekit.models.view import Edit, View
from gaugekit.symmetry.base import present


@dataclass(frozen=True)
class Reader:
    """z = W y + b for weights seen as (rows..., d), where y is the output of `norm` (None: the stream itself).

    Behind a LayerNorm y = γ ⊙ n + β with Σ n = 0: adding a wᵀ to W, w = γ⁻¹, adds only the constant a (w·β) to z.
    So a constant can be added to z through the bias, or, without one, through that direction if β exists.
    """

    linear: Linear
    norm: Norm | None

    @property
    def rows(self) -> int:
        return self.linear.weight.numel // self.linear.weight.shape[-1]

    @property
    def kernel(self) -> bool:
        """Whether W has the direction a wᵀ."""
        return self.norm is not None and self.norm.kind == "layer"

    @property
    def shiftable(self) -> bool:
        """Whether every constant can be added to z."""
        return self.linear.bias is not None or (self.kernel and self.norm is not None and self.norm.bias is not None)

    def show(self, constant_free: bool) -> int:
        """Rank that generic rows of W can show: the width of the stream, less the mean that a LayerNorm removes, and
        one more for a constant that matters."""
        has_constant = self.linear.bias is not None or (self.norm is not None and self.norm.bias is not None)
        return self.linear.weight.shape[-1] - self.kernel + (has_constant and not constant_free)

    @property
    def shift_views(self) -> tuple[View, ...]:
        return present(self.linear.bias) or present(self.linear.weight)

    @property
    def context(self) -> tuple[View, ...]:
        """What must be at hand to shift z without a bias, or to add to W's free direction."""
        return () if self.norm is None or not self.kernel else present(self.norm.weight, self.norm.bias)

    @property
    def divisors(self) -> tuple[View, ...]:
        """What must not be zero to shift z: with a bias, nothing."""
        return () if self.linear.bias is not None or self.norm is None else (self.norm.weight,)

    def constant(self, edit: Edit) -> Tensor:
        """W β + b, (rows,): what z is where the normalized state is zero."""
        bias = self.linear.bias
        total = torch.zeros(self.rows, dtype=torch.float64) if bias is None else edit[bias].reshape(-1)
        if self.norm is not None and self.norm.bias is not None:
            total = total + self.flat(edit) @ edit[self.norm.bias]
        return total

    def linear_part(self, edit: Edit) -> Tensor:
        """W Γ, (rows, d), without what a LayerNorm does not see."""
        weight = self.flat(edit)
        if self.norm is None:
            return weight
        weight = weight * edit[self.norm.weight]
        return weight - weight.mean(-1, keepdim=True) if self.kernel else weight

    def shift(self, edit: Edit, constant: Tensor) -> None:
        """Add a constant (rows,) to z."""
        bias = self.linear.bias
        if bias is not None:
            edit.update(bias, lambda old: old + constant.reshape(old.shape))
            return
        assert self.norm is not None and self.norm.bias is not None
        w = 1.0 / edit[self.norm.weight]
        self.add_kernel(edit, constant / (w @ edit[self.norm.bias]))

    def add_kernel(self, edit: Edit, rows: Tensor) -> None:
        """W → W + a wᵀ for a (rows,)."""
        assert self.norm is not None
        w, view = 1.0 / edit[self.norm.weight], self.linear.weight
        edit.update_rows(view, lambda weight, a: weight + a * w, rows.reshape(*view.shape[:-1], 1))

    def flat(self, edit: Edit) -> Tensor:
        """W as (rows, d)."""
        return edit[self.linear.weight].reshape(self.rows, -1)
