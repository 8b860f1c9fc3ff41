"""config.json: alone it is a checkpoint without tensors; missing or wrong it is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gaugekit.checkpoint import open_checkpoint


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_config_alone(directory: Path, name: str, refused: Callable[..., str]) -> None:
    (directory / "tokenizer.json").write_text("{}")
    checkpoint = open_checkpoint(directory / name)
    assert (checkpoint.path, checkpoint.format, checkpoint.config) == (directory, "config", {"hidden_size": 8})
    assert not checkpoint.headers
    refused(lambda: checkpoint.load("w"), str(directory), "config only")


def test_weights_without_a_config(tmp_path: Path, refused: Callable[..., str]) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    refused(tmp_path, str(tmp_path), "no config.json")


@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b"null", b"\xff\xfe\x00", b"[" * 100_000])
@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_config_that_is_not_an_object(
    directory: Path, name: str, content: bytes, refused: Callable[..., str]
) -> None:
    (directory / "config.json").write_bytes(content)
    refused(directory / name, str(directory / "config.json"), "JSON")


def test_a_config_that_cannot_be_read(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "gone")
    refused(tmp_path, str(tmp_path / "config.json"), "cannot be read")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "x.gguf", "tf_model.h5", "model.pt"])
def test_weights_under_another_name_are_not_overlooked(directory: Path, name: str, refused: Callable[..., str]) -> None:
    (directory / name).touch()
    refused(directory, str(directory), name)
    assert open_checkpoint(directory / "config.json").format == "config"


def test_a_link_to_a_blob_that_is_gone(directory: Path, refused: Callable[..., str]) -> None:
    (directory / "model.safetensors").symlink_to(directory / "gone")
    refused(directory, str(directory / "model.safetensors"), "cannot be read")
