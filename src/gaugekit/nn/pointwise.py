"""Functions of each feature by itself that stand in for norms. Arguments and errors as in `gaugekit.nn.norms`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gaugekit.geometry import normalization
from gaugekit.nn.affine import Affine, Dtype, Shape, check_input


class DyT(Affine):
    """Dynamic tanh, γ tanh(αx) + β, α starting at `alpha`: bounded as a norm is, but each feature by itself.

    Source: [DyT] arXiv 2503.10622; parameters are named and shaped as in its authors' code.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Dtype = None,
        *,
        alpha: float = 0.5,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine, bias, device, dtype)
        self.alpha_init = float(alpha)
        self.alpha = Parameter(torch.full((1,), self.alpha_init, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.alpha, self.alpha_init)

    def forward(self, x: Tensor) -> Tensor:
        check_input(x, self.normalized_shape)
        return normalization.dyt(x, self.alpha, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha_init}"


class Derf(Affine):
    """Dynamic erf, γ erf(αx + s) + β, α and s starting at `alpha` and `shift`.

    Source: [Derf] arXiv 2512.10938; parameters are named and shaped as in its authors' code.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Dtype = None,
        *,
        alpha: float = 0.5,
        shift: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, elementwise_affine, bias, device, dtype)
        self.alpha_init, self.shift_init = float(alpha), float(shift)
        self.alpha = Parameter(torch.full((1,), self.alpha_init, device=device, dtype=dtype))
        self.shift = Parameter(torch.full((1,), self.shift_init, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.alpha, self.alpha_init)
        nn.init.constant_(self.shift, self.shift_init)

    def forward(self, x: Tensor) -> Tensor:
        check_input(x, self.normalized_shape)
        return normalization.derf(x, self.alpha, self.shift, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha_init}, shift={self.shift_init}"
