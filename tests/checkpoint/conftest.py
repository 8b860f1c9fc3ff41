"""Small checkpoints on disk, and the one shape that every refusal has."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gaugekit.checkpoint import open_checkpoint
from gaugekit.errors import CheckpointError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An otherwise empty checkpoint directory with a config.json."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "config.json").write_text('{"hidden_size": 8}')
    return path


@pytest.fixture
def refused() -> Callable[..., str]:
    """Opens (or calls) what must be refused: one line, which mentions each of `mentions`."""

    def check(what: str | os.PathLike[str] | Callable[[], Any], *mentions: str, **options: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            what() if callable(what) else open_checkpoint(what, **options)
        message = str(caught.value)
        assert "\n" not in message
        for mention in mentions:
            assert mention in message
        return message

    return check


@pytest.fixture
def raw_safetensors() -> Callable[..., Path]:
    """Writes a safetensors file from a header as given, right or wrong, and `size` bytes of data unwritten."""

    def write(path: Path, header: Any, size: int) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + size)
        return path

    return write


@pytest.fixture
def mixed(directory: Path) -> Path:
    """A checkpoint with tensors of every kind, `a` and `b` in bfloat16 and float32."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    tensors = {
        "a": values.bfloat16(),
        "b": values.float(),
        "half": values[0].half(),
        "double": values[1].clone(),
        "ids": torch.arange(5),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "mask": torch.tensor([True, False, True]),
        "f8": values.to(torch.float8_e4m3fn),
        "wave": torch.complex(values, -values).to(torch.complex64),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "extremes": torch.tensor([float("inf"), -0.0, float("nan"), 1e-45]),
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt", "note": "old"})
    return directory


@pytest.fixture
def hidden() -> Callable[[Path], list[str]]:
    """What writing left in a directory under hidden names."""
    return lambda directory: sorted(path.name for path in directory.iterdir() if path.name.startswith("."))
