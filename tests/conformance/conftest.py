"""Checkpoints on disk of the tiny models, as `transformers` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from on_disk import Save, saved
from oracle import Tiny
from torch import Tensor


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write a tiny model with given parameters (its own by default) and its class's own eps; returns the directory."""

    def write(tiny: Tiny, name: str, theta: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Path:
        return saved(tiny, tmp_path / name, theta, dtype)

    return write
