"""Checkpoints on disk of the tiny models, as `transformers` writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle import Case, Tiny
from torch import Tensor

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write a tiny model with given parameters (its own by default) and its class's own eps; returns the directory."""

    def write(tiny: Tiny, name: str, theta: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Path:
        tiny._load(tiny.theta if theta is None else theta)
        tiny.model.to(dtype).save_pretrained(tmp_path / name)
        tiny.model.double()
        return tmp_path / name

    return write


def first_of_each(cases: list[Case]) -> list[Case]:
    """One case a model type."""
    return list({case.model_type: case for case in reversed(cases)}.values())
