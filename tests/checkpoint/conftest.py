"""Small checkpoints on disk, and the one shape that every refusal has."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
