"""A directory that is complete or not there: filled under a hidden name beside its place, then renamed into it."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from gaugekit.errors import CheckpointError


@contextmanager
def staged(out: Path, *, replace: bool) -> Iterator[Path]:
    """Gives a new hidden directory beside `out`; when the block ends, it is on the disk and becomes `out`.

    When the block fails, or is ended by Ctrl-C or SIGTERM, the hidden directory is removed and `out` is as it was.
    With `replace` an `out` that exists is moved aside only once the new one is complete, and then deleted. SIGTERM
    becomes `SystemExit(143)`, in the main thread, and unless the process ignores it.

    Raises `CheckpointError` if the directory cannot be made, brought to the disk or renamed.
    """
    token = secrets.token_hex(4)
    partial = out.with_name(f".{out.name}.partial-{token}")
    old = out.with_name(f".{out.name}.old-{token}")
    with terminable():
        try:
            with reported(out):
                # Not by tempfile, whose directories are closed to everybody else, and would stay so.
                partial.mkdir()
            yield partial
            with reported(out):
                to_disk(partial)
                _move_into_place(partial, out, old, replace)
                fsync_directory(out.parent)
        finally:
            try:
                _clean_up(partial, out, old)
            except BaseException:
                _clean_up(partial, out, old)  # A second Ctrl-C shall not leave a half-deleted directory behind.
                raise


@contextmanager
def reported(path: Path, what: str = "written") -> Iterator[None]:
    """What the system refuses in this block becomes a `CheckpointError` about `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(f"{path}: the disk is full; free some space, or choose another disk") from error
        raise CheckpointError(
            f"{path}: cannot be {what} ({error.strerror or error}); check the path and its permissions"
        ) from error


@contextmanager
def terminable() -> Iterator[None]:
    """Within, SIGTERM raises, so that what has to be cleaned up is; it then ends the process with status 143."""
    previous = signal.getsignal(signal.SIGTERM)
    # Only the main thread may set handlers; None is a handler of another language, which could not be put back.
    if threading.current_thread() is not threading.main_thread() or previous in (None, signal.SIG_IGN):
        yield
        return

    def terminate(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # A second one shall not cut the cleaning up short.
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _move_into_place(partial: Path, out: Path, old: Path, replace: bool) -> None:
    if not out.exists():
        partial.rename(out)
        return
    if not replace:
        raise CheckpointError(f"{out}: has come into being meanwhile; choose another name")
    try:
        out.rename(old)
        partial.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise


def _clean_up(partial: Path, out: Path, old: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    if out.exists():  # Otherwise `old` is all there is: better a strange name than nothing.
        shutil.rmtree(old, ignore_errors=True)


def to_disk(directory: Path) -> None:
    """What a rename makes visible must survive a power cut, so data comes first, then names, from the leaves up."""
    flags = os.O_RDONLY if os.name == "posix" else os.O_RDWR
    for folder, _, names in os.walk(directory, topdown=False, onerror=_raise):
        for name in names:
            _fsync(Path(folder, name), flags)
        fsync_directory(Path(folder))


def _raise(error: OSError) -> Any:
    raise error


def fsync_directory(path: Path) -> None:
    if os.name != "posix":
        return
    try:
        _fsync(path, os.O_RDONLY)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Some network file systems have no fsync of directories.
            raise


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
