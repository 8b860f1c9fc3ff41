"""GGUF files. The header is parsed here; block layouts and dequantisation come from the `gguf` package.

The package's own reader decodes every token of the vocabulary into objects before it hands over a shape,
and runs off the end of a damaged file; this one skips the former and reports the latter.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gaugekit.checkpoint.reader import PART, Checkpoint, TensorHeader
from gaugekit.errors import CheckpointError

# GGUF value types by number: struct codes of the scalars, and the two that have a length.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_MAX_DIMS = 8  # ggml has 4; anything above this is damage, not a tensor.

# Elements dequantised at a time: the intermediates are several times the size of the result.
_CHUNK = PART >> 2


@dataclass(frozen=True)
class _Entry:
    header: TensorHeader
    type: int
    offset: int  # From the start of the file.


def read_gguf(path: Path) -> Checkpoint:
    """Open one GGUF file (little-endian, version 2 or 3). Reads the header only.

    Raises `CheckpointError` if the `gguf` package is not installed, if the file is not GGUF, is truncated,
    is one part of a split model, or uses a tensor type that the installed `gguf` does not know.
    """
    _package()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24 or file.read(4) != b"GGUF":
                raise CheckpointError(f"{path}: not a GGUF file; check the path, or download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                metadata, entries = _parse(path, _Cursor(path, data, at=4))
    except OSError as error:
        raise _unreadable(path, error) from error
    end = max((entry.offset + entry.header.nbytes for entry in entries.values()), default=0)
    if end > size:
        raise CheckpointError(f"{path}: truncated, expected {end} bytes but it has {size}; download it again")
    headers = {name: entry.header for name, entry in entries.items()}
    return Checkpoint(
        path,
        "gguf",
        {},
        metadata,
        headers,
        lambda name: _load(path, name, entries[name]),
        lambda name: _parts(path, name, entries[name]),
    )


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError("GGUF files need the gguf package: pip install 'gaugekit[gguf]'") from error
    return gguf


class _Cursor:
    """Reads values one after the other; every step is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, at: int) -> None:
        self.path, self.data, self.at = path, data, at

    def skip(self, count: int) -> int:
        """Where the next `count` bytes begin; moves past them."""
        start = self.at
        self.at += count
        if self.at > len(self.data):
            raise CheckpointError(
                f"{self.path}: truncated or damaged, expected at least {self.at} bytes but it has "
                f"{len(self.data)}; download it again"
            )
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.skip(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.skip(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int, keep: bool) -> Any:
        """The next value, of type number `kind`; an array that is not to be kept is passed over."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.damaged(f"unknown value type {kind}")
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            code = f"<{_SCALARS[inner]}"
            start = self.skip(count * struct.calcsize(code))
            if not keep:
                return None
            return [value for (value,) in struct.iter_unpack(code, self.data[start : self.at])]
        if inner == _STRING and not keep:
            for _ in range(count):
                self.skip(self.scalar("Q"))
            return None
        if inner == _ARRAY:
            raise self.damaged("an array of arrays in the metadata")
        return [self.value(inner, keep) for _ in range(count)]

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged, or a newer kind of GGUF ({what}); download it again")


def _parse(path: Path, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, _Entry]]:
    version = cursor.scalar("I")
    if version not in (2, 3):
        # A big-endian file shows as a version whose lower half is zero.
        what = "big-endian data" if version & 0xFFFF == 0 else f"version {version}"
        raise CheckpointError(f"{path}: GGUF with {what} is not supported; convert it to version 3")
    tensor_count, value_count = cursor.scalar("Q"), cursor.scalar("Q")

    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key, kind = cursor.string(), cursor.scalar("I")
        # Vocabularies and merges: hundreds of thousands of strings that nobody here reads.
        keep = not (kind == _ARRAY and key.startswith("tokenizer."))
        value = cursor.value(kind, keep)
        if keep:
            metadata[key] = value
    if metadata.get("split.count", 1) != 1:
        raise CheckpointError(
            f"{path}: is one of {metadata['split.count']} parts of a split GGUF; "
            "merge them first: llama-gguf-split --merge FIRST_PART OUTPUT"
        )

    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensor_count):
        name, dims = cursor.string(), cursor.scalar("I")
        if dims > _MAX_DIMS or name in infos:
            raise cursor.damaged(f"tensor {name!r} is listed twice or has {dims} dimensions")
        # GGUF lists the fastest-varying dimension first, torch last.
        shape = tuple(reversed([cursor.scalar("Q") for _ in range(dims)]))
        infos[name] = (shape, cursor.scalar("I"), cursor.scalar("Q"))

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise cursor.damaged(f"alignment {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    return metadata, {
        name: _Entry(_header(path, name, shape, kind), kind, start + offset)
        for name, (shape, kind, offset) in infos.items()
    }


def _header(path: Path, name: str, shape: tuple[int, ...], kind: int) -> TensorHeader:
    gguf = _package()
    try:
        dtype = gguf.GGMLQuantizationType(kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[dtype]
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: tensor {name!r} has type {kind}, unknown to the installed gguf package; upgrade it"
        ) from error
    if (shape[-1] if shape else 1) % block:
        raise CheckpointError(
            f"{path}: the rows of tensor {name!r} (shape {shape}) are not whole blocks of {dtype.name}; "
            "download it again"
        )
    return TensorHeader(shape, dtype.name, math.prod(shape) // block * block_bytes)


def _load(path: Path, name: str, entry: _Entry) -> torch.Tensor:
    """One tensor in float32, dequantised some rows at a time straight into the result."""
    result = torch.empty(entry.header.shape, dtype=torch.float32)
    flat, at = result.view(-1), 0
    for part in _parts(path, name, entry):
        flat[at : at + part.numel()] = part
        at += part.numel()
    return result


def _parts(path: Path, name: str, entry: _Entry) -> Iterator[torch.Tensor]:
    """The tensor in float32, flat, some rows at a time."""
    import numpy as np

    gguf = _package()
    plain = {"F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
    shape, dtype = entry.header.shape, entry.header.dtype
    size = math.prod(shape)
    if size == 0:
        return
    columns = shape[-1] if shape else 1
    rows = size // columns
    row_bytes = entry.header.nbytes // rows
    step = max(1, _CHUNK // columns)
    try:
        with path.open("rb") as file:
            file.seek(entry.offset)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                raw = np.fromfile(file, dtype=np.uint8, count=count * row_bytes)
                if raw.size != count * row_bytes:
                    raise CheckpointError(f"{path}: ends inside tensor {name!r}; download it again")
                raw = raw.reshape(count, row_bytes)
                if dtype in plain:
                    values = raw.view(plain[dtype]).astype(np.float32)
                else:
                    values = gguf.dequantize(raw, gguf.GGMLQuantizationType(entry.type))
                yield torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(-1)
    except OSError as error:
        raise _unreadable(path, error) from error
    except NotImplementedError as error:
        raise CheckpointError(
            f"{path}: tensor {name!r} is {dtype}, which the gguf package cannot dequantise; "
            "use a file in another quantisation"
        ) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({error.strerror or error}); check the file")
