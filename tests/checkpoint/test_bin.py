"""`.bin` files: tensors and nothing else are ever unpickled."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gaugekit.checkpoint import TensorHeader, open_checkpoint


class Touch:
    """Creates a file when it is unpickled by a loader that executes what it finds."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_one_file(directory: Path) -> None:
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    expected = {"a": values.bfloat16(), "b": values.half(), "c": values, "d": values.T, "e": torch.arange(4)}
    expected["f8"] = values.to(torch.float8_e5m2)
    expected["part"] = values[1:3, 2:]
    torch.save(expected | {"p": torch.nn.Parameter(values)}, directory / "pytorch_model.bin")
    checkpoint = open_checkpoint(directory)
    assert checkpoint.format == "bin"
    assert checkpoint.headers["a"] == TensorHeader((4, 6), "BF16", 48)
    assert checkpoint.headers["d"] == TensorHeader((6, 4), "F32", 96)
    assert checkpoint.headers["f8"].dtype == "F8_E5M2"
    for name, value in expected.items():
        loaded = checkpoint.load(name)
        assert loaded.dtype == value.dtype
        assert torch.equal(loaded.double(), value.double())
    assert not checkpoint.load("p").requires_grad


def test_shared_tensors_and_no_write_back(directory: Path) -> None:
    shared = torch.zeros(3)
    torch.save({"embed": shared, "head": shared}, directory / "pytorch_model.bin")
    checkpoint = open_checkpoint(directory)
    assert set(checkpoint.headers) == {"embed", "head"}
    checkpoint.load("embed").add_(1)
    assert torch.equal(checkpoint.load("head"), torch.zeros(3))


def test_shards(directory: Path) -> None:
    parts = {f"pytorch_model-0000{i}-of-00002.bin": {f"w{i}": torch.full((2,), float(i))} for i in (1, 2)}
    for name, part in parts.items():
        torch.save(part, directory / name)
    weight_map = {tensor: name for name, part in parts.items() for tensor in part}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = open_checkpoint(directory)
    assert checkpoint.format == "bin"
    assert torch.equal(checkpoint.load("w2"), torch.full((2,), 2.0))


@pytest.mark.parametrize("bare", [False, True])
def test_pickled_code_is_not_executed(directory: Path, bare: bool, refused: Callable[..., str]) -> None:
    path, trace = directory / "pytorch_model.bin", directory / "executed"
    state = {"w": torch.ones(1), "x": Touch(trace)}
    if bare:
        path.write_bytes(pickle.dumps({"x": Touch(trace)}))
    else:
        torch.save(state, path)
    refused(directory, str(path), "pickled code", "not", "executed", "safetensors")
    assert not trace.exists()
    # The file would have done it:
    torch.load(path, weights_only=False) if not bare else pickle.loads(path.read_bytes())
    assert trace.exists()


def test_files_of_old_torch(directory: Path, refused: Callable[..., str]) -> None:
    path = directory / "pytorch_model.bin"
    torch.save({"w": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    refused(directory, str(path), "torch before 1.6", "convert")


def test_a_truncated_file(directory: Path, refused: Callable[..., str]) -> None:
    path = directory / "pytorch_model.bin"
    torch.save({"w": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:-500])
    refused(directory, str(path), "damaged", "download it again")


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_what_is_not_a_torch_file(directory: Path, content: bytes, refused: Callable[..., str]) -> None:
    path = directory / "pytorch_model.bin"
    path.write_bytes(content)
    refused(directory, str(path), "not a torch file")


@pytest.mark.parametrize(
    "state",
    [
        [torch.ones(1)],
        {"state_dict": {"w": torch.ones(1)}},
        {"w": torch.ones(1), "step": 3},
        {3: torch.ones(1)},
        {"w": torch.ones(2, 2).to_sparse()},
    ],
)
def test_anything_but_a_flat_dict_of_tensors(directory: Path, state: Any, refused: Callable[..., str]) -> None:
    path = directory / "pytorch_model.bin"
    torch.save(state, path)
    refused(directory, str(path), "state dict alone")


def test_opening_maps_or_reads_no_tensor(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(1 << 20)}, directory / "pytorch_model.bin")
    devices = []
    load = torch.load

    def watched(path: Path, **options: Any) -> Any:
        state = load(path, **options)
        devices.append({tensor.device.type for tensor in state.values()})
        return state

    monkeypatch.setattr(torch, "load", watched)
    open_checkpoint(directory)
    assert devices == [{"meta"}]


def test_a_file_the_system_will_not_map(
    directory: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    path = directory / "pytorch_model.bin"
    torch.save({"w": torch.ones(1)}, path)
    checkpoint = open_checkpoint(directory)

    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 99 bytes from file <x>: Cannot allocate memory (12)\nmore")

    monkeypatch.setattr(torch, "load", no_memory)
    refused(lambda: checkpoint.load("w"), str(path), "too large to map", "safetensors")
