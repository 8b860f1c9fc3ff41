"""What norm modules share: γ and β, one axis to act on, and refusals of other input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

Shape = int | Sequence[int]
Dtype = torch.dtype | None


class Affine(nn.Module):
    """γ and β with one entry a feature, either of them optional."""

    weight: Parameter | None
    bias: Parameter | None

    def __init__(self, shape: Shape, affine: bool, bias: bool, device: Any, dtype: Dtype) -> None:
        super().__init__()
        width = one_axis(shape)
        self.normalized_shape = (width,)
        self.elementwise_affine = affine
        weight = Parameter(torch.ones(width, device=device, dtype=dtype)) if affine else None
        zeros = Parameter(torch.zeros(width, device=device, dtype=dtype)) if affine and bias else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", zeros)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def affine(self, y: Tensor) -> Tensor:
        """γ y + β in the dtype of y."""
        if self.weight is not None:
            y = y * self.weight.to(y.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, elementwise_affine={self.elementwise_affine}, bias={self.bias is not None}"


def check_input(x: Tensor, normalized_shape: Sequence[int]) -> None:
    """Without it a last axis of 1 would broadcast."""
    if not x.is_floating_point():
        raise TypeError(f"a norm's input must be floating point, got {x.dtype}")
    if x.shape[-1:] != tuple(normalized_shape):
        raise ValueError(f"this norm is over a last axis of {normalized_shape[0]}, got an input {tuple(x.shape)}")


def one_axis(shape: Shape) -> int:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if len(sizes) != 1 or sizes[0] < 1:
        raise ValueError(f"norms are over the last axis alone, of 1 or more features, got {shape}")
    return int(sizes[0])
