"""What tests of tensors draw, always the same for a seed, and how far two results are apart."""

from __future__ import annotations

import torch
from torch import Tensor

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def points(*shape: int, seed: int = 0, radius: float = 1.0) -> Tensor:
    x = normal(*shape, seed=seed)
    return radius * x / x.norm(dim=-1, keepdim=True)


def tangents(h: Tensor, length: float | Tensor, seed: int = 5) -> Tensor:
    v = normal(*h.shape, seed=seed)
    for _ in range(2):  # once is not enough where v is nearly along h
        v = v / v.norm(dim=-1, keepdim=True)
        v = v - h * (h * v).sum(-1, keepdim=True) / h.square().sum(-1, keepdim=True)
    return length * v / v.norm(dim=-1, keepdim=True)


def gap(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def weight_of(d: int, seed: int = 1) -> Tensor:
    """Random, of both signs, away from 0."""
    raw = normal(d, seed=seed)
    return raw + raw.sign() * 0.3


def off(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest entry of b."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())
