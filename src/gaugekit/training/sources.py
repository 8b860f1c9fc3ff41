"""The text of a training run, piece by piece: Python's documentation, a file, or a data set on disk.

A text is what stands in the file, with its line ends, and without a byte order mark. Topics of the documentation and
documents of a data set are joined by a blank line; empty documents are left out.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from gaugekit.errors import DataError
from gaugekit.training.config import DataConfig

__all__ = ["PIECE", "content_hash", "pieces", "texts"]

PIECE = 1 << 14  # characters
READ = 1 << 16  # bytes
BLANK_LINE = "\n\n"

# Byte-level BPE always ends a word before a space or line end that follows something else.
_LAST_END_OF_WORD = re.compile(r".*\S(?=[ \n])", re.DOTALL)


def texts(config: DataConfig) -> Iterator[str]:
    """The text of `config.source`, in parts of any length that follow one another.

    Raises:
        DataError: a source that is missing, cannot be read, is no UTF-8 or no data set, or has no such column; or a
            package that is missing.
    """
    path = _path(config.source)
    if path is None:
        return _joined(_topics())
    return _joined(_documents(path, config.column)) if path.is_dir() else _read(path)


def pieces(parts: Iterable[str], start: int, stop: int) -> Iterator[str]:
    """Characters `start` to `stop` of a text as pieces of at most `PIECE`, cut where byte-level BPE ends a word.

    So the tokens of the pieces are those of the whole, but for words longer than a piece. Where the cuts are depends on
    the text alone.
    """
    kept = ""
    for part in _between(parts, start, stop):
        for at in range(0, len(part), PIECE):
            kept += part[at : at + PIECE]
            while len(kept) > PIECE:
                found = _LAST_END_OF_WORD.match(kept, 0, PIECE)
                end = found.end() if found else PIECE
                yield kept[:end]
                kept = kept[end:]
    if kept:
        yield kept


def content_hash(config: DataConfig) -> bytes:
    """SHA-256 of the bytes of the source, some seconds for a few GB; of a data set, of its Arrow files. `DataError`."""
    path = _path(config.source)
    digest = hashlib.sha256()
    if path is None:
        for text in texts(config):
            digest.update(text.encode())
        return digest.digest()
    try:
        if not path.is_dir():
            return _hash_of(path)
        for each in sorted(path.rglob("*.arrow")):
            digest.update(str(each.relative_to(path)).encode() + b"\0" + _hash_of(each))
    except OSError as error:
        raise _unreadable(path, error) from error
    return digest.digest()


def _path(source: str) -> Path | None:
    """None for "pydoc"."""
    if source == "pydoc":
        return None
    path = Path(source).expanduser()
    if path.is_dir():
        if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            raise DataError(
                f"{path}: is a directory, but no data set that `datasets` saved; name a text file, or one made with "
                "save_to_disk"
            )
    elif not path.is_file():  # a pipe could be read only once
        what = "is no regular file" if path.exists() else "does not exist"
        raise DataError(f"{path}: {what}; data.source is pydoc, a text file, or a data set that `datasets` saved")
    return path


def _topics() -> Iterator[str]:
    found = _imported("pydoc_data.topics", "pydoc", "this Python came without its documentation; name a text file")
    return (found.topics[name] for name in sorted(found.topics))


def _documents(path: Path, column: str) -> Iterator[str]:
    datasets = _imported("datasets", str(path), "it is a data set: pip install 'gaugekit[datasets]'")
    try:
        found: Any = datasets.load_from_disk(str(path))
    except Exception as error:  # what a damaged Arrow or JSON file raises is of many kinds
        raise DataError(f"{path}: cannot be loaded as a data set ({' '.join(str(error).split())})") from error
    if isinstance(found, datasets.DatasetDict):
        if "train" not in found and len(found) != 1:
            raise DataError(
                f"{path}: has no split train, but {', '.join(found) or 'none at all'}; save the one you mean"
            )
        found = found["train"] if "train" in found else next(iter(found.values()))
    if column not in found.column_names:
        raise DataError(f"{path}: has no column {column}; data.column may be {', '.join(found.column_names)}")
    kind = getattr(found.features[column], "dtype", None)
    if kind not in ("string", "large_string"):
        raise DataError(f"{path}: column {column} is no text, but {kind or 'nested'}; name another data.column")
    rows = found.select_columns([column]).with_format(None)
    return (text for batch in rows.iter(batch_size=100) for text in batch[column] if text)


def _read(path: Path) -> Iterator[str]:
    decoder, fed = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with path.open("rb") as file:
            for chunk in chain(iter(lambda: file.read(READ), b""), (b"",)):
                waiting = len(decoder.getstate()[0])  # bytes of a letter that the last chunk cut in two
                try:
                    text = decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    at = fed - waiting + error.start
                    raise DataError(f"{path}: is not UTF-8 at byte {at} ({error.reason}); convert it first") from error
                yield text if fed else text.removeprefix("\ufeff")
                fed += len(chunk)
    except OSError as error:
        raise _unreadable(path, error) from error


def _joined(documents: Iterator[str]) -> Iterator[str]:
    between = ""
    for text in documents:
        yield between
        yield text
        between = BLANK_LINE


def _between(parts: Iterable[str], start: int, stop: int) -> Iterator[str]:
    at = 0
    for part in parts:
        if at >= stop:
            return
        yield part[max(start - at, 0) : stop - at]
        at += len(part)


def _hash_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _imported(name: str, source: str, otherwise: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(f"{source}: needs the package {name}, which is not installed; {otherwise}") from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror or error})")
