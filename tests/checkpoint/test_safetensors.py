"""Directories of safetensors: what is read, that nothing more is, and every way in which one is refused."""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gaugekit.checkpoint import TensorHeader, open_checkpoint

GIB = 1 << 30


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 6, generator=generator)
    return {
        "a.weight": values.to(torch.bfloat16),
        "a.bias": values[0].to(torch.float16),
        "b.weight": values.clone(),
        "b.scale": values[:, 0].double(),
        "ids": torch.arange(5),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "mask": torch.tensor([True, False, True]),
        "f8": values.to(torch.float8_e4m3fn),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
    }


def shard(directory: Path, parts: dict[str, dict[str, torch.Tensor]]) -> None:
    for name, part in parts.items():
        save_file(part, directory / name, metadata={"format": "pt"})
    index(directory, {tensor: name for name, part in parts.items() for tensor in part})


def index(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Bit for bit: not every dtype has an equality."""
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(*bits)


def test_one_file(directory: Path) -> None:
    expected = tensors()
    save_file(expected, directory / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(directory)
    assert (checkpoint.format, checkpoint.config, checkpoint.metadata) == ("safetensors", {"hidden_size": 8}, {})
    assert checkpoint.headers.keys() == expected.keys()
    assert checkpoint.headers["a.weight"] == TensorHeader((4, 6), "BF16", 48)
    assert checkpoint.headers["a.bias"] == TensorHeader((6,), "F16", 12)
    assert checkpoint.headers["scalar"] == TensorHeader((), "F32", 4)
    assert all(same(checkpoint.load(name), value) for name, value in expected.items())


def test_shards(directory: Path) -> None:
    expected = tensors()
    names = list(expected)
    parts = {f"model-0000{i + 1}-of-00003.safetensors": {n: expected[n] for n in names[i::3]} for i in range(3)}
    shard(directory, parts)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.headers.keys() == expected.keys()
    assert all(same(checkpoint.load(name), value) for name, value in expected.items())
    through_a_shard = open_checkpoint(directory / "model-00002-of-00003.safetensors")
    assert through_a_shard.headers == checkpoint.headers


def test_safetensors_are_preferred_to_bin(directory: Path) -> None:
    torch.save({"old": torch.ones(1)}, directory / "pytorch_model.bin")
    save_file({"new": torch.ones(1)}, directory / "model.safetensors")
    assert set(open_checkpoint(directory).headers) == {"new"}


def test_a_checkpoint_does_not_change_and_keeps_no_tensor(directory: Path) -> None:
    save_file({"w": torch.zeros(3)}, directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    checkpoint.load("w").add_(1)
    assert torch.equal(checkpoint.load("w"), torch.zeros(3))
    with pytest.raises(TypeError):
        checkpoint.headers["w"] = TensorHeader((), "F32", 4)  # type: ignore[index]
    with pytest.raises(AttributeError):
        checkpoint.format = "bin"  # type: ignore[misc]
    assert len(repr(checkpoint)) < len(str(directory)) + 100


def test_an_unknown_tensor(directory: Path, refused: Callable[..., str]) -> None:
    save_file({"layer.weight": torch.zeros(3)}, directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    refused(lambda: checkpoint.load("layer.weigth"), str(directory), "did you mean 'layer.weight'")
    refused(lambda: checkpoint.load("zzz"), "'zzz'", "headers")


def test_opening_reads_no_tensor(directory: Path, raw_safetensors: Callable[..., Path]) -> None:
    """A model of 300 GiB, mostly holes, in 30 shards: more than the memory of the machines tests run on."""
    resource = pytest.importorskip("resource")
    weight_map = {}
    for i in range(30):
        name = f"model-{i:05d}-of-00030.safetensors"
        header: dict[str, Any] = {
            f"layers.{i}.{j}": {"dtype": "BF16", "shape": [GIB // 2], "data_offsets": [j * GIB, (j + 1) * GIB]}
            for j in range(10)
        }
        header[f"layers.{i}.small"] = {"dtype": "F32", "shape": [3], "data_offsets": [10 * GIB, 10 * GIB + 12]}
        raw_safetensors(directory / name, header, 10 * GIB + 12)
        weight_map |= dict.fromkeys(header, name)
    index(directory, weight_map)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    tracemalloc.start()
    checkpoint = open_checkpoint(directory)
    small = checkpoint.load("layers.29.small")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.perf_counter() - started < 10
    assert len(checkpoint.headers) == 330
    assert checkpoint.headers["layers.3.4"].nbytes == GIB
    assert torch.equal(small, torch.zeros(3))
    assert peak < 4 << 20
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 64 << 20


def test_a_file_larger_than_memory(directory: Path, raw_safetensors: Callable[..., Path]) -> None:
    """A private map of such a file is refused by the system; reading one tensor of it must work."""
    size = 4096 * GIB
    header = {
        "big": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        "small": {"dtype": "F32", "shape": [2], "data_offsets": [size, size + 8]},
    }
    try:
        raw_safetensors(directory / "model.safetensors", header, size + 8)
    except OSError:
        pytest.skip("this file system has no files of that size")
    assert torch.equal(open_checkpoint(directory).load("small"), torch.zeros(2))


def test_a_truncated_file(directory: Path, refused: Callable[..., str]) -> None:
    path = directory / "model.safetensors"
    save_file({"w": torch.zeros(100)}, path)
    whole = path.read_bytes()
    for kept, expected in ((whole[:-1], f"{len(whole)}"), (whole + b"more", f"{len(whole)}"), (whole[:40], "at least")):
        path.write_bytes(kept)
        refused(directory, str(path), f"expected {expected}", f"has {len(kept)};", "download it again")


def test_a_file_cut_after_it_was_opened(directory: Path, refused: Callable[..., str]) -> None:
    path = directory / "model.safetensors"
    save_file({"w": torch.zeros(100)}, path)
    checkpoint = open_checkpoint(directory)
    path.write_bytes(path.read_bytes()[:-8])
    refused(lambda: checkpoint.load("w"), str(path), "'w'")
    path.unlink()
    refused(lambda: checkpoint.load("w"), str(path), "cannot be read")


def test_what_is_not_safetensors(
    directory: Path, refused: Callable[..., str], raw_safetensors: Callable[..., Path]
) -> None:
    path = directory / "model.safetensors"
    for content in (b"", b"1234567", b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 64):
        path.write_bytes(content)
        refused(directory, str(path), "not a safetensors file", "git lfs pull")
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for header in (
        b"{not json",
        b"\xff\xfe",
        [1, 2],
        {"w": 3},
        {"w": {"dtype": "F32"}},
        {"w": entry | {"dtype": 1}},
        {"w": entry | {"shape": [-2]}},
        {"w": entry | {"shape": ["2"]}},
        {"w": entry | {"shape": [3]}},
        {"w": entry | {"data_offsets": [8, 0]}},
        {"w": entry | {"data_offsets": [0, 8, 16]}},
    ):
        raw_safetensors(path, header, 8)
        refused(directory, str(path), "not a safetensors file")


def test_a_dtype_torch_lacks_is_refused_when_loaded(
    directory: Path, refused: Callable[..., str], raw_safetensors: Callable[..., Path]
) -> None:
    header = {"w": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]}}
    path = raw_safetensors(directory / "model.safetensors", header, 6)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.headers["w"] == TensorHeader((8,), "F6_E2M3", 6)
    refused(lambda: checkpoint.load("w"), str(path), "F6_E2M3")


def test_a_missing_shard(directory: Path, refused: Callable[..., str]) -> None:
    shard(directory, {"one.safetensors": {"a": torch.ones(1)}, "two.safetensors": {"b": torch.ones(1)}})
    (directory / "two.safetensors").unlink()
    refused(directory, str(directory / "two.safetensors"), "missing")


def test_a_truncated_shard(directory: Path, refused: Callable[..., str]) -> None:
    shard(directory, {"one.safetensors": {"a": torch.ones(1)}, "two.safetensors": {"b": torch.ones(1)}})
    path = directory / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(directory, str(path), "truncated")


def test_an_index_that_promises_too_much(directory: Path, refused: Callable[..., str]) -> None:
    save_file({"a": torch.ones(1)}, directory / "one.safetensors")
    index(directory, {"a": "one.safetensors", "b": "one.safetensors"})
    refused(directory, str(directory / "one.safetensors"), "'b'", "index.json")


def test_a_tensor_the_index_forgets(directory: Path, refused: Callable[..., str]) -> None:
    save_file({"a": torch.ones(1), "x": torch.ones(2)}, directory / "one.safetensors")
    save_file({"b": torch.ones(1)}, directory / "two.safetensors")
    index(directory, {"a": "one.safetensors", "b": "two.safetensors"})
    assert torch.equal(open_checkpoint(directory).load("x"), torch.ones(2))
    save_file({"b": torch.ones(1), "x": torch.zeros(2)}, directory / "two.safetensors")
    refused(directory, "'x'", "one.safetensors", "two.safetensors")


def test_the_index_decides_between_two_shards(directory: Path) -> None:
    save_file({"a": torch.ones(1), "x": torch.ones(2)}, directory / "one.safetensors")
    save_file({"x": torch.zeros(2)}, directory / "two.safetensors")
    index(directory, {"a": "one.safetensors", "x": "two.safetensors"})
    assert torch.equal(open_checkpoint(directory).load("x"), torch.zeros(2))


@pytest.mark.parametrize("name", ["../model.safetensors", "/elsewhere/model.safetensors"])
def test_an_index_does_not_point_outside(directory: Path, name: str, refused: Callable[..., str]) -> None:
    save_file({"a": torch.ones(1)}, directory.parent / "model.safetensors")
    index(directory, {"a": name})
    refused(directory, "index.json", name, "outside")


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": None}])
def test_an_index_without_a_map(directory: Path, weight_map: Any, refused: Callable[..., str]) -> None:
    index(directory, weight_map)
    refused(directory, "index.json", "weight_map")


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000])
def test_an_index_that_is_not_json(directory: Path, text: str, refused: Callable[..., str]) -> None:
    (directory / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    refused(directory, "index.json", "JSON")
