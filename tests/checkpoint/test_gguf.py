"""GGUF: headers, metadata and dequantised tensors against the `gguf` package's own reader and writer."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from gaugekit.checkpoint import TensorHeader, open_checkpoint
from gaugekit.checkpoint import gguf as ours

Quant = gguf.GGMLQuantizationType


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with quantised and plain tensors and every kind of metadata."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("some.flag", True)
    writer.add_int8("some.negative", -3)
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_array("some.words", ["one", "zwei", "trois é"])
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_bos_token_id(1)
    writer.add_token_list(["<s>", "a", "b"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    writer.add_tensor("plain", values(3, 5))
    writer.add_tensor("half", values(7).astype(np.float16))
    writer.add_tensor("ids", np.arange(6, dtype=np.int32).reshape(2, 3))
    writer.add_tensor("double", values(4).astype(np.float64))
    for name, kind in (("q8", Quant.Q8_0), ("q4", Quant.Q4_1), ("bf16", Quant.BF16)):
        writer.add_tensor(name, gguf.quantize(values(2, 6, 64), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def raw(
    path: Path, infos: bytes = b"", metadata: bytes = b"", counts: tuple[int, int] = (0, 0), version: int = 3
) -> Path:
    """A GGUF file by hand: counts are (tensors, values)."""
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, *counts) + metadata + infos + bytes(64))
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def info(name: str, dims: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def test_headers_are_in_the_order_of_torch(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    assert (checkpoint.path, checkpoint.format, checkpoint.config) == (path, "gguf", {})
    assert checkpoint.headers["plain"] == TensorHeader((3, 5), "F32", 60)
    assert checkpoint.headers["q8"] == TensorHeader((2, 6, 64), "Q8_0", 12 * 2 * 34)
    assert checkpoint.headers["q4"] == TensorHeader((2, 6, 64), "Q4_1", 12 * 2 * 20)
    for tensor in gguf.GGUFReader(path).tensors:
        header = checkpoint.headers[tensor.name]
        assert header.shape == tuple(reversed([int(n) for n in tensor.shape]))
        assert (header.dtype, header.nbytes) == (tensor.tensor_type.name, tensor.n_bytes)


def test_tensors_are_dequantised_to_float32(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_CHUNK", 200)  # Several chunks, the last one shorter.
    checkpoint = open_checkpoint(path)
    for tensor in gguf.GGUFReader(path).tensors:
        loaded = checkpoint.load(tensor.name)
        assert loaded.dtype == torch.float32
        assert loaded.shape == checkpoint.headers[tensor.name].shape
        if tensor.name in ("ids", "double"):
            expected = tensor.data.astype(np.float32)
        else:
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(loaded.numpy(), expected)
    assert torch.equal(checkpoint.load("plain"), torch.from_numpy(values(3, 5)))
    assert (checkpoint.load("q8") - torch.from_numpy(values(2, 6, 64))).abs().max() < 0.02
    checkpoint.load("plain").zero_()
    assert checkpoint.load("plain").abs().max() > 0


def test_metadata_is_plain_and_leaves_the_vocabulary_out(path: Path) -> None:
    metadata = open_checkpoint(path).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.context_length"] == 128
    assert metadata["llama.rope.freq_base"] == 10000.0
    assert metadata["some.flag"] is True
    assert metadata["some.negative"] == -3
    assert metadata["some.numbers"] == [1, 2, 3]
    assert metadata["some.words"] == ["one", "zwei", "trois é"]
    assert metadata["tokenizer.ggml.model"] == "gpt2"
    assert metadata["tokenizer.ggml.bos_token_id"] == 1
    assert not {"tokenizer.ggml.tokens", "tokenizer.ggml.scores"} & metadata.keys()


def test_a_directory_with_one_gguf(path: Path, refused: Callable[..., str]) -> None:
    assert open_checkpoint(path.parent).path == path
    (path.parent / "other.gguf").touch()
    refused(path.parent, str(path.parent), "model.gguf, other.gguf")


def test_opening_reads_no_tensor(tmp_path: Path) -> None:
    """64 GiB, all of it a hole: dimension 2^17 by 2^17 in F32, then a small one."""
    size = 1 << 36
    infos = info("big", (1 << 17, 1 << 17), 0) + info("small", (2,), 0, size)
    path = raw(tmp_path / "x.gguf", infos, counts=(2, 0))
    with path.open("r+b") as file:
        file.truncate(24 + len(infos) + 64 + size)
    checkpoint = open_checkpoint(path)
    assert checkpoint.headers["big"].nbytes == size
    assert torch.equal(checkpoint.load("small"), torch.zeros(2))


def test_without_the_gguf_package(path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(path, "pip install 'gaugekit[gguf]'")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGML" + bytes(100), b"version https://git-lfs.github.com/"])
def test_what_is_not_gguf(tmp_path: Path, content: bytes, refused: Callable[..., str]) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    refused(path, str(path), "not a GGUF file")


def test_a_truncated_file(path: Path, refused: Callable[..., str]) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: -gguf.GGUF_DEFAULT_ALIGNMENT - 1])
    refused(path, str(path), "truncated", "expected", str(path.stat().st_size))
    # Wherever the cut is, it is reported, never an IndexError or a read past the end.
    for length in range(24, 900, 7):
        path.write_bytes(whole[:length])
        refused(path, str(path), "truncated")


def test_a_file_cut_after_it_was_opened(path: Path, refused: Callable[..., str]) -> None:
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:1200])
    refused(lambda: checkpoint.load("bf16"), str(path), "'bf16'")
    path.unlink()
    refused(lambda: checkpoint.load("bf16"), str(path), "cannot be read")


def test_absurd_counts_end_at_the_end_of_the_file(tmp_path: Path, refused: Callable[..., str]) -> None:
    path = tmp_path / "x.gguf"
    huge = (1 << 64) - 1
    refused(raw(path, counts=(huge, 0)), str(path))
    refused(raw(path, counts=(0, huge)), str(path))
    for inner in (4, 8):
        array = text("some.array") + struct.pack("<IIQ", 9, inner, huge)
        refused(raw(path, metadata=array, counts=(0, 1)), str(path), "truncated")


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_versions_that_are_not_read(tmp_path: Path, version: int, refused: Callable[..., str]) -> None:
    path = raw(tmp_path / "x.gguf", version=version)
    refused(path, str(path), "big-endian" if version > 4 else f"version {version}", "convert")


def test_one_part_of_a_split_model(tmp_path: Path, refused: Callable[..., str]) -> None:
    split = text("split.count") + struct.pack("<IH", 2, 3)
    path = raw(tmp_path / "x-00001-of-00003.gguf", metadata=split, counts=(0, 1))
    refused(path, str(path), "3 parts", "merge")


@pytest.mark.parametrize(
    ("infos", "mention"),
    [
        (info("w", (4,), 9999), "upgrade"),
        (info("w", (33, 2), int(Quant.Q8_0)), "whole blocks"),
        (info("w", (1,) * 9, 0), "9 dimensions"),
        (info("w", (1,), 0) + info("w", (1,), 0), "twice"),
    ],
)
def test_tensors_that_cannot_be(tmp_path: Path, infos: bytes, mention: str, refused: Callable[..., str]) -> None:
    path = raw(tmp_path / "x.gguf", infos, counts=(infos.count(text("w")), 0))
    refused(path, str(path), "'w'", mention)


@pytest.mark.parametrize(
    ("value", "mention"),
    [
        (struct.pack("<I", 99), "value type 99"),
        (struct.pack("<IIQ", 9, 9, 1), "array of arrays"),
        (struct.pack("<II", 4, 0), "alignment 0"),
    ],
)
def test_metadata_that_cannot_be(tmp_path: Path, value: bytes, mention: str, refused: Callable[..., str]) -> None:
    path = raw(tmp_path / "x.gguf", metadata=text("general.alignment") + value, counts=(0, 1))
    refused(path, str(path), mention)


def test_a_type_that_cannot_be_dequantised(tmp_path: Path, refused: Callable[..., str]) -> None:
    path = raw(tmp_path / "x.gguf", info("w", (32,), int(Quant.Q8_1)), counts=(1, 0))
    checkpoint = open_checkpoint(path)
    refused(lambda: checkpoint.load("w"), str(path), "Q8_1", "quantisation")
