"""Rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor

from gaugekit.geometry.rows import wide

__all__ = ["planes", "rotary"]


def rotary(x: Tensor, base: float) -> Tensor:
    """x (..., n, k) turned at position p = 0 ... n − 1 by p base^(−2i/k) in the plane of (i, i + k/2), i < k/2; k even.

    In float32, or float64 for that, which the result has.

    Source: Su et al., arXiv 2104.09864; the halves of k side by side, as checkpoints of `transformers` have them.
    """
    x = wide(x)
    n, k = x.shape[-2:]
    frequency = base ** (-torch.arange(0, k, 2, device=x.device, dtype=x.dtype) / k)
    angle = torch.arange(n, device=x.device, dtype=x.dtype).unsqueeze(-1) * frequency
    cosine, sine = angle.cos(), angle.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


def planes(k: int, base: float) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The planes (i, i + k/2) of `rotary`, grouped by those that turn alike: each by itself, all together at base 1."""
    found = tuple((i, i + k // 2) for i in range(k // 2))
    return (found,) if base == 1 else tuple((plane,) for plane in found)
