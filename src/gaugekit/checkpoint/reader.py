"""Directories in the Hugging Face layout: config.json beside safetensors or `.bin` weights."""

from __future__ import annotations

import difflib
import json
import math
import os
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from gaugekit.errors import CheckpointError

Format = Literal["safetensors", "bin", "gguf", "config"]

# In order of preference; each may be sharded, with an index under the same name plus ".index.json".
_WEIGHTS: tuple[tuple[str, Format], ...] = (
    ("model.safetensors", "safetensors"),
    ("pytorch_model.bin", "bin"),
)

# Names that show that a directory does hold weights, only not where or as this reader wants them.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")

PART = 1 << 22  # Elements that are read or changed at a time where a whole tensor is not needed.

_RAW_PART = 1 << 24  # Bytes that are read at a time where they are only passed on.

_HEADER_LIMIT = 100_000_000  # The limit of the safetensors format itself.

# What safetensors calls torch's dtypes. Headers of `.bin` files use these names too.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorHeader:
    """What a file says of one tensor: torch shape, dtype by the file's name for it, bytes on disk."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class _Entry(NamedTuple):
    path: Path
    header: TensorHeader
    load: Callable[[], torch.Tensor]
    parts: Callable[[], Iterator[torch.Tensor]]
    raw: Callable[[], Iterator[torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened checkpoint. Headers are in memory; tensors are read when asked for, and not kept.

    `path` is the directory, or the GGUF file. `config` is the parsed config.json ({} for GGUF), `metadata`
    the key/value pairs of a GGUF file ({} otherwise). `headers` has every tensor; it is empty for format
    "config".
    """

    path: Path
    format: Format
    config: dict[str, Any] = field(repr=False)
    metadata: dict[str, Any] = field(repr=False)
    headers: Mapping[str, TensorHeader] = field(repr=False)
    _load: Callable[[str], torch.Tensor] = field(repr=False)
    _parts: Callable[[str], Iterator[torch.Tensor]] = field(repr=False)
    _raw: Callable[[str], Iterator[torch.Tensor]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "headers", MappingProxyType(dict(self.headers)))

    def load(self, name: str) -> torch.Tensor:
        """The tensor `name`, of shape `headers[name].shape`, on the CPU.

        It has its dtype on disk, except that GGUF tensors are dequantised to float32. That of a `.bin` is a
        private map of the file, whose pages are read on first use and go when the tensor does. Raises
        `CheckpointError` when there is no such tensor or its data cannot be read.
        """
        self._require(name)
        return self._load(name)

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor `name` in flat stretches of at most `PART` elements or one row, in order; as `load` otherwise.

        Memory holds one stretch at a time, so the largest tensor can be looked through in little of it.
        """
        self._require(name)
        return self._parts(name)

    def raw(self, name: str) -> Iterator[torch.Tensor]:
        """The bytes of the tensor `name` in flat stretches of uint8: row-major, little-endian, as safetensors lays
        them out. A safetensors file is not decoded for it, so this works for dtypes that torch lacks.

        Raises `CheckpointError` as `load` does, and for GGUF, whose blocks have no such layout.
        """
        self._require(name)
        if self._raw is None:
            raise CheckpointError(f"{self.path}: GGUF files are read only; convert with transformers first")
        return self._raw(name)

    def _require(self, name: str) -> None:
        if name not in self.headers:
            if self.format == "config":
                hint = "it was opened as a config only; open a checkpoint that has weights"
            else:
                close = difflib.get_close_matches(name, self.headers, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "see `headers` for the names it has"
            raise CheckpointError(f"{self.path}: no tensor {name!r}; {hint}")


def read_config_file(path: Path) -> Checkpoint:
    """A checkpoint without tensors. Raises `CheckpointError` if the file is not a JSON object."""
    return _checkpoint(path.parent, "config", _json_object(path), {})


def read_directory(directory: Path) -> Checkpoint:
    """Open a directory: safetensors if there are any, else `.bin`, else the config alone.

    Raises `CheckpointError` for a missing or unreadable config.json, weights under names this reader does
    not know, a damaged or missing file, an index that disagrees with its shards, or pickled code.
    """
    names = {entry.name for entry in directory.iterdir()}
    if "config.json" not in names:
        raise CheckpointError(f"{directory}: there is no config.json; put the model's config.json there")
    config = _json_object(directory / "config.json")
    for single, format in _WEIGHTS:
        read = _safetensors_entries if format == "safetensors" else _bin_entries
        if single in names:
            entries = read(directory / single)
        elif f"{single}.index.json" in names:
            entries = _sharded(directory / f"{single}.index.json", read)
        else:
            continue
        return _checkpoint(directory, format, config, entries)

    others = sorted(name for name in names if name.endswith(_OTHER_WEIGHTS))
    if others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise CheckpointError(
            f"{directory}: holds weights ({shown}) but no model.safetensors, pytorch_model.bin or index of "
            "either; add it, give the path of a .gguf file, or give the config.json to read the config alone"
        )
    return _checkpoint(directory, "config", config, {})


def _checkpoint(path: Path, format: Format, config: dict[str, Any], entries: dict[str, _Entry]) -> Checkpoint:
    headers = {name: entry.header for name, entry in entries.items()}
    return Checkpoint(
        path,
        format,
        config,
        {},
        headers,
        lambda name: entries[name].load(),
        lambda name: entries[name].parts(),
        lambda name: entries[name].raw(),
    )


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({_first_line(error)}); download it again") from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise CheckpointError(f"{path}: must hold a JSON object, not {kind}; download it again")
    return value


def _sharded(index: Path, read: Callable[[Path], dict[str, _Entry]]) -> dict[str, _Entry]:
    """All tensors of all shards. What the index says of them must hold."""
    weight_map = _json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: has no weight_map from tensors to shard files; download it again")
    shards: dict[str, dict[str, _Entry]] = {}
    for shard in sorted(set(weight_map.values())):
        path = Path(shard)
        # An index comes from elsewhere; it does not get to point out of the checkpoint.
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{index}: names a shard outside its directory ({shard!r}); correct it")
        if not (index.parent / path).is_file():
            raise CheckpointError(
                f"{index.parent / path}: this shard is missing, but {index.name} names it; download it again"
            )
        shards[shard] = read(index.parent / path)

    entries: dict[str, _Entry] = {}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise CheckpointError(
                f"{index.parent / shard}: does not hold tensor {name!r}, but {index.name} says it does; "
                "download both again"
            )
        entries[name] = shards[shard][name]
    # What the index forgets is part of the checkpoint all the same, as it is for transformers.
    for held in shards.values():
        for name, entry in held.items():
            other = entries.setdefault(name, entry)
            if name not in weight_map and other is not entry:
                raise CheckpointError(
                    f"{entry.path}: holds tensor {name!r}, and so does {other.path.name}, but "
                    f"{index.name} does not say which counts; download all three again"
                )
    return entries


def _safetensors_entries(path: Path) -> dict[str, _Entry]:
    """Parse the header (8 bytes of length, then JSON) and compare the file's size with what it promises."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT + 1
            if length > _HEADER_LIMIT:
                raise _not_safetensors(path, "it has no header")
            if 8 + length > size:
                raise _wrong_size(path, f"at least {8 + length}", size)
            text = file.read(length)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_safetensors(path, "its header is not JSON") from error
    if not isinstance(listed, dict):
        raise _not_safetensors(path, "its header is not a JSON object")
    listed.pop("__metadata__", None)
    start = end = 8 + length
    entries: dict[str, _Entry] = {}
    for name, item in listed.items():
        match item:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(first), int(last)]} if (
                0 <= first <= last and all(isinstance(n, int) and n >= 0 for n in shape)
            ):
                header = TensorHeader(tuple(shape), dtype, last - first)
            case _:
                raise _not_safetensors(path, f"the header entry of tensor {name!r} is malformed")
        if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != header.nbytes:
            raise _not_safetensors(path, f"the size and shape of tensor {name!r} disagree")
        place = (path, name, header, start + first)
        entries[name] = _Entry(
            path,
            header,
            partial(_safetensors_load, *place),
            partial(_safetensors_parts, *place),
            partial(_safetensors_raw, *place),
        )
        end = max(end, start + last)
    if end != size:
        raise _wrong_size(path, str(end), size)
    return entries


def _safetensors_load(path: Path, name: str, header: TensorHeader, offset: int) -> torch.Tensor:
    return _safetensors_read(path, name, header, offset, header.nbytes).reshape(header.shape)


def _safetensors_parts(path: Path, name: str, header: TensorHeader, offset: int) -> Iterator[torch.Tensor]:
    step = PART * _torch_dtype(path, name, header).itemsize
    for start in range(0, header.nbytes, step):
        yield _safetensors_read(path, name, header, offset + start, min(step, header.nbytes - start))


def _safetensors_raw(path: Path, name: str, header: TensorHeader, offset: int) -> Iterator[torch.Tensor]:
    for start in range(0, header.nbytes, _RAW_PART):
        yield _read(path, name, offset + start, min(_RAW_PART, header.nbytes - start))


def _safetensors_read(path: Path, name: str, header: TensorHeader, offset: int, nbytes: int) -> torch.Tensor:
    """Read a stretch of a tensor, flat."""
    dtype = _torch_dtype(path, name, header)
    return _read(path, name, offset, nbytes).view(dtype)


def _read(path: Path, name: str, offset: int, nbytes: int) -> torch.Tensor:
    """Bytes of the file, in memory of their own.

    Not through `safetensors.safe_open`: that maps the whole file privately, which the system refuses for a
    file larger than its memory, and the point of reading tensor by tensor is to work there.
    """
    data = torch.empty(nbytes, dtype=torch.uint8)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            count = file.readinto(data.numpy().data)
    except OSError as error:
        raise _unreadable(path, error) from error
    if count != nbytes:
        raise CheckpointError(f"{path}: ends inside tensor {name!r}; download it again")
    return data


def _torch_dtype(path: Path, name: str, header: TensorHeader) -> torch.dtype:
    dtype = DTYPES.get(header.dtype)
    if dtype is None:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {header.dtype}, which torch lacks; convert the checkpoint"
        )
    return dtype


def _bin_entries(path: Path) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for name, tensor in _torch_load(path, "meta").items():
        dtype = _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        header = TensorHeader(tuple(tensor.shape), dtype, tensor.numel() * tensor.element_size())
        place = (path, name)
        entries[name] = _Entry(
            path, header, partial(_bin_load, *place), partial(_bin_parts, *place), partial(_bin_raw, *place)
        )
    return entries


def _bin_load(path: Path, name: str) -> torch.Tensor:
    return _torch_load(path, "cpu")[name].detach()


def _bin_parts(path: Path, name: str) -> Iterator[torch.Tensor]:
    yield from _bin_load(path, name).reshape(-1).split(PART)


def _bin_raw(path: Path, name: str) -> Iterator[torch.Tensor]:
    for part in _bin_parts(path, name):
        yield part.contiguous().view(torch.uint8)


def _torch_load(path: Path, device: str) -> dict[str, torch.Tensor]:
    """The state dict in `path`, its data mapped and unread; never more than tensors is unpickled."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise _unreadable(path, error) from error
    if magic[:1] == b"\x80":
        raise CheckpointError(
            f"{path}: is a bare pickle (pickled code, or torch before 1.6), which is not executed; "
            "convert it to safetensors"
        )
    if magic != b"PK\x03\x04":
        raise CheckpointError(f"{path}: not a torch file; download it again")
    try:
        # On "meta" torch reads no data anyway, and a map can be refused for want of memory.
        state = torch.load(path, map_location=device, weights_only=True, mmap=device != "meta")
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds pickled code, which will not be executed; convert it to safetensors"
        ) from error
    except (RuntimeError, ValueError, EOFError, KeyError, OSError) as error:
        if "unable to mmap" in str(error):
            raise CheckpointError(
                f"{path}: too large to map on this machine; convert it to safetensors, which is read in parts"
            ) from error
        raise CheckpointError(f"{path}: damaged ({_first_line(error)}); download it again") from error
    if not isinstance(state, dict):
        kind = type(state).__name__
        raise CheckpointError(f"{path}: holds a {kind}, not a dict of tensors; save the state dict alone")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise CheckpointError(
                f"{path}: must be a flat dict of dense tensors, but {name!r} is a {type(value).__name__}; "
                "save the state dict alone"
            )
    return state


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({error.strerror or _first_line(error)}); check the file")


def _not_safetensors(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: not a safetensors file ({why}); download it again (a Git LFS pointer needs `git lfs pull`)"
    )


def _wrong_size(path: Path, expected: str, actual: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: truncated or damaged, expected {expected} bytes but it has {actual}; download it again"
    )
