"""Turns of the plane."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["turning"]


def turning(degrees: float) -> Tensor:
    """R (2, 2), anticlockwise, float64."""
    theta = math.radians(degrees)
    rows = [[math.cos(theta), -math.sin(theta)], [math.sin(theta), math.cos(theta)]]
    return torch.tensor(rows, dtype=torch.float64)
