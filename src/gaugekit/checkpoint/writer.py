"""Writing a checkpoint: a Hugging Face directory like the source, in which some tensors are new.

First a plan, from headers alone; then the files, laid out at their full size, into which tensors are written one
by one in whatever order they come. What does not change is copied as bytes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from gaugekit.checkpoint.companions import changed_config, companions, with_card
from gaugekit.checkpoint.reader import DTYPES, PART, Checkpoint, TensorHeader
from gaugekit.checkpoint.staging import reported, staged
from gaugekit.errors import CheckpointError

# `track(items, total, what)` gives the items back one by one, and may show how far they are.
Track = Callable[[Iterable[Any], int, str], Iterable[Any]]

# The dtypes that values are rounded to. Narrower floats stand for nothing without their scales.
_FLOATS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file to be: its size, and its tensors in the order of their data."""

    name: str
    nbytes: int
    tensors: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """What `write` will do. `out` is absolute, without links.

    `total_bytes` are those of all files together (before a card, config changes or files of text), `total_size` those
    of the tensors.
    `changed` are the tensors that must be given to `write`. `copied_files` and `left_out` are relative to the source's
    directory. `headers` are those of the result.
    """

    source: Checkpoint = field(repr=False)
    out: Path
    files: tuple[WeightFile, ...] = field(repr=False)
    total_bytes: int
    total_size: int
    changed: frozenset[str] = field(repr=False)
    copied_files: tuple[str, ...] = field(repr=False)
    left_out: tuple[str, ...] = field(repr=False)
    headers: Mapping[str, TensorHeader] = field(repr=False)
    dtype: str | None
    overwrite: bool


class _Place(NamedTuple):
    file: str
    offset: int


def _untracked(items: Iterable[Any], total: int, what: str) -> Iterable[Any]:  # noqa: ARG001
    return items


def plan(
    source: Checkpoint,
    out: str | os.PathLike[str],
    changed: Collection[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: str | None = None,
    drop: Collection[str] = (),
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    added: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
    overwrite: bool = False,
) -> Plan:
    """Lay out the directory `out`: `source` with new values for the tensors `changed` and without those of `drop`.

    Every tensor keeps its name, shape and dtype, but for changed ones that have another shape in `shapes`; with `dtype`
    (float16, bfloat16, float32, float64) all tensors of floats get that one. `added` are tensors that the source does
    not have, with shape and dtype as safetensors names it (F32, I64); they count as changed. Files and their names are
    as `save_pretrained` of transformers would have them. Reads headers and lists the directory, and writes nothing.

    Raises `CheckpointError` for a source that has no tensors or is GGUF, for an `out` that exists (with `overwrite`:
    that is not a checkpoint), has no parent, or overlaps the source, for a size or dtype that does not exist, for
    tensors that cannot be written, and when the disk is too small; `ValueError` for names the source does not have.
    """
    shapes, added = shapes or {}, added or {}
    _require_writable(source, changed, drop)
    if extra := shapes.keys() - set(changed) or added.keys() & source.headers.keys():
        raise ValueError(f"tensors {_some(extra)} are not changed, and cannot be reshaped or added")
    place = _destination(source.path, Path(out), overwrite)
    kept = {name: header for name, header in source.headers.items() if name not in frozenset(drop)}
    kept |= {name: _sized(shape, kept[name].dtype) for name, shape in shapes.items()}
    kept |= {name: _sized(shape, stored) for name, (shape, stored) in added.items()}
    headers = {name: _rounded(source, name, header, dtype) for name, header in kept.items()}
    files = tuple(_files(headers, max_shard_size))
    total_size = sum(header.nbytes for header in headers.values())
    others = companions(source.path)
    total = sum(file.nbytes for file in files) + len(_index(files, total_size)) + others.nbytes
    result = Plan(
        source=source,
        out=place,
        files=files,
        total_bytes=total,
        total_size=total_size,
        changed=frozenset(changed) | added.keys(),
        copied_files=others.copied,
        left_out=others.left_out,
        headers=MappingProxyType(headers),
        dtype=dtype,
        overwrite=overwrite,
    )
    _require_space(result)
    return result


def write(
    plan: Plan,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    card: str | None = None,
    config_changes: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
    track: Track = _untracked,
) -> None:
    """Write what `plan` says. `tensors` gives each changed tensor once, in any order.

    They are taken one by one and let go before the next, and rounded to the dtype on disk by torch. `card` goes to
    the top of README.md (below its front matter), `config_changes` into config.json; `texts` are further files by name.

    `plan.out` is there complete, or not at all (or as it was): on any error, Ctrl-C or SIGTERM what has been written
    is removed. SIGTERM then ends the process with status 143.

    Raises `CheckpointError` when the source cannot be read, the result not written, or a value is too large for its
    dtype; `ValueError` when a tensor is missing, unknown, given twice, or has the wrong shape or kind.
    """
    # Again, for a plan may be old.
    _destination(plan.source.path, plan.out, plan.overwrite)
    _require_space(plan)
    with staged(plan.out, replace=plan.overwrite) as partial:
        places = _lay_out(plan, partial)
        # New values first: they are what may go wrong.
        _write_changed(plan, partial, places, tensors, track)
        _write_unchanged(plan, partial, places, track)
        _write_companions(plan, partial, card, config_changes or {}, texts or {})


def _require_writable(source: Checkpoint, changed: Collection[str], drop: Collection[str]) -> None:
    if source.format == "gguf":
        raise CheckpointError(f"{source.path}: GGUF files are read only; convert with transformers first")
    if not source.headers:
        raise CheckpointError(f"{source.path}: has no tensors; give a checkpoint with weights")
    if unknown := (set(changed) | set(drop)) - source.headers.keys():
        raise ValueError(f"{source.path} has no tensors {_some(unknown)}")
    if both := set(changed) & set(drop):
        raise ValueError(f"tensors {_some(both)} are to be changed and dropped")
    if not source.headers.keys() - set(drop):
        raise ValueError("all tensors are to be dropped")


def _destination(source: Path, out: Path, overwrite: bool) -> Path:
    """Where the result goes, links resolved: what a link points to is replaced, not the link."""
    try:
        out = out.expanduser().resolve()
        source = source.resolve()
        # Compared as files, since one directory may have names that differ (in case, or by a mount).
        if _one_of(out, (source,)):
            raise CheckpointError(f"{out}: is the source itself, which is not written to; choose another directory")
        if _one_of(out, source.parents):
            raise CheckpointError(f"{out}: holds the source, which is not written to; choose another directory")
        if _one_of(source, out.parents):
            raise CheckpointError(f"{out}: lies inside the source, which is not written to; choose another directory")
        if not out.parent.is_dir():
            raise CheckpointError(f"{out}: there is no directory {out.parent}; create it")
        if not out.exists():
            return out
        if not out.is_dir():
            raise CheckpointError(f"{out}: is a file; choose another name")
        if not overwrite:
            raise CheckpointError(f"{out}: exists already; choose another name, or ask for it to be overwritten")
        if any(out.iterdir()) and not (out / "config.json").exists():
            raise CheckpointError(
                f"{out}: is not overwritten, because it is no checkpoint (it has no config.json); remove it first"
            )
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, or no home directory.
        raise CheckpointError(f"{out}: cannot be used ({error}); choose another directory") from error
    return out


def _one_of(path: Path, others: Iterable[Path]) -> bool:
    return path.exists() and any(other.exists() and path.samefile(other) for other in others)


def _sized(shape: tuple[int, ...], dtype: str) -> TensorHeader:
    return TensorHeader(shape, dtype, prod(shape) * DTYPES[dtype].itemsize)


def _rounded(source: Checkpoint, name: str, header: TensorHeader, dtype: str | None) -> TensorHeader:
    """Of the tensor as it will be on disk, in the dtype that was asked for."""
    if source.format == "bin" and header.dtype not in DTYPES:
        raise CheckpointError(
            f"{source.path}: tensor {name!r} has dtype {header.dtype}, which safetensors lacks; convert the checkpoint"
        )
    if dtype is None:
        return header
    if dtype not in _FLOATS:
        raise CheckpointError(f"{dtype!r} is no dtype to write; choose one of {', '.join(_FLOATS)}")
    if header.dtype.startswith("F") and header.dtype not in _FLOATS.values():
        raise CheckpointError(
            f"{source.path}: tensor {name!r} is quantised ({header.dtype}), so dtype cannot be changed; leave it out"
        )
    if header.dtype not in _FLOATS.values():
        return header
    return _sized(header.shape, _FLOATS[dtype])


def _files(headers: Mapping[str, TensorHeader], max_shard_size: int | str) -> Iterator[WeightFile]:
    """Names and splits as transformers has them, because the code that makes them is the same."""
    if isinstance(max_shard_size, int) and max_shard_size <= 0:
        raise CheckpointError(f"{max_shard_size} is no size of a file; write it like 5GB or 200MB")
    try:
        split = split_state_dict_into_shards_factory(
            dict(headers),
            get_storage_size=lambda header: header.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{max_shard_size!r} is no size of a file; write it like 5GB or 200MB") from error
    for file, held in split.filename_to_tensors.items():
        names = tuple(sorted(held, key=lambda name: (-_alignment(headers[name]), name)))
        nbytes = len(_file_header(headers, names)) + sum(headers[name].nbytes for name in names)
        yield WeightFile(file, nbytes, names)


def _alignment(header: TensorHeader) -> int:
    """Wider dtypes come first, as in the safetensors library: so all data can be mapped as what it is."""
    return DTYPES[header.dtype].itemsize if header.dtype in DTYPES else 1


def _file_header(headers: Mapping[str, TensorHeader], names: Iterable[str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + headers[name].nbytes
        entries[name] = {
            "dtype": headers[name].dtype,
            "shape": list(headers[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # The data begins at a multiple of 8.
    return struct.pack("<Q", len(text)) + text


def _index(files: tuple[WeightFile, ...], total_size: int) -> bytes:
    """Of several files; of one there is none."""
    if len(files) == 1:
        return b""
    weight_map = {name: file.name for file in files for name in file.tensors}
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _require_space(plan: Plan) -> None:
    with reported(plan.out.parent, "used"):
        free = shutil.disk_usage(plan.out.parent).free
    if free < plan.total_bytes:
        raise CheckpointError(
            f"{plan.out}: needs {plan.total_bytes} bytes, but the disk has {free} bytes free; "
            "free some space, or choose another disk"
        )


def _lay_out(plan: Plan, partial: Path) -> dict[str, _Place]:
    """Make all weight files, headers written and the rest taken up, so that a full disk shows now and not in hours."""
    places: dict[str, _Place] = {}
    for file in plan.files:
        header = _file_header(plan.headers, file.tensors)
        with reported(plan.out), (partial / file.name).open("wb") as stream:
            stream.write(header)
            stream.flush()
            _take_up(stream.fileno(), file.nbytes)
        offset = len(header)
        for name in file.tensors:
            places[name] = _Place(file.name, offset)
            offset += plan.headers[name].nbytes
    if index := _index(plan.files, plan.total_size):
        with reported(plan.out):
            (partial / _INDEX).write_bytes(index)
    return places


def _take_up(descriptor: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except AttributeError:  # Not every system has it,
        os.truncate(descriptor, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.truncate(descriptor, nbytes)  # nor every file system.


def _write_changed(
    plan: Plan,
    partial: Path,
    places: Mapping[str, _Place],
    tensors: Iterable[tuple[str, torch.Tensor]],
    track: Track,
) -> None:
    missing = set(plan.changed)
    stream = iter(tensors)
    # Taken by hand, so that nothing here, nor what tracks, holds on to a tensor while the next is being made.
    for _ in track(range(len(missing)), len(missing), "changed tensors"):
        try:
            name, tensor = next(stream)
        except StopIteration:
            raise ValueError(f"tensors {_some(missing)} were to be changed, but have not been given") from None
        _require_expected(plan, name, tensor, missing)
        missing.remove(name)
        _store(plan, partial, places[name], _cast(plan, name, tensor.detach().reshape(-1).split(PART)))
        del tensor
    for name, tensor in stream:
        _require_expected(plan, name, tensor, missing)


def _require_expected(plan: Plan, name: str, tensor: torch.Tensor, missing: Collection[str]) -> None:
    if name not in missing:
        raise ValueError(f"tensor {name!r} {'is given twice' if name in plan.changed else 'was not to be changed'}")
    header = plan.headers[name]
    if tuple(tensor.shape) != header.shape:
        raise ValueError(f"tensor {name!r} must have shape {header.shape}, not {tuple(tensor.shape)}")
    if header.dtype in _FLOATS.values():
        if not tensor.is_floating_point():
            raise ValueError(f"tensor {name!r} is {header.dtype} on disk, but {tensor.dtype} was given")
    elif tensor.dtype != DTYPES.get(header.dtype):
        raise ValueError(f"tensor {name!r} is {header.dtype} on disk, which {tensor.dtype} is not rounded to")


def _write_unchanged(plan: Plan, partial: Path, places: Mapping[str, _Place], track: Track) -> None:
    names = [name for name in places if name not in plan.changed]
    for name in track(names, len(names), "unchanged tensors"):
        if plan.headers[name].dtype == plan.source.headers[name].dtype:
            parts = plan.source.raw(name)
        else:
            parts = _cast(plan, name, plan.source.parts(name))
        _store(plan, partial, places[name], parts)


def _cast(plan: Plan, name: str, parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The parts in their dtype on disk. Infinities and NaN pass, but none may be new."""
    dtype = DTYPES[plan.headers[name].dtype]
    for part in parts:
        if part.dtype == dtype:
            yield part
            continue
        cast = part.to(dtype)
        if not cast.isfinite().all() and (lost := part.isfinite() & ~cast.isfinite()).any():
            raise CheckpointError(
                f"{plan.out}: tensor {name!r} has the value {part[lost][0].item():g}, too large for "
                f"{plan.headers[name].dtype}; choose a wider dtype"
            )
        yield cast


def _store(plan: Plan, partial: Path, place: _Place, parts: Iterable[torch.Tensor]) -> None:
    with reported(plan.out), (partial / place.file).open("r+b") as stream:
        stream.seek(place.offset)
        for part in parts:
            stream.write(part.cpu().contiguous().view(torch.uint8).numpy().data)


def _write_companions(
    plan: Plan, partial: Path, card: str | None, config_changes: Mapping[str, Any], texts: Mapping[str, str]
) -> None:
    source = plan.source.path
    for name in plan.copied_files:
        with reported(source / name, "copied"):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, partial / name)
    with reported(plan.out):
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        if config_changes or plan.dtype is not None:
            config = partial / "config.json"
            config.write_bytes(changed_config(config.read_bytes(), config_changes, plan.dtype))
        if card is not None:
            readme = partial / "README.md"
            readme.write_bytes(with_card(card, readme.read_bytes() if readme.exists() else b""))


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(map(repr, shown[:3])) + (", ..." if len(shown) > 3 else "")
