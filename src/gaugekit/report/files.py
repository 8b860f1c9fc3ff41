"""Writing a report to disk: whole, or not at all."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from gaugekit.errors import GaugekitError


class OutputError(GaugekitError):
    """A report cannot be written where it was asked for."""


def check_writable(path: Path) -> Path:
    """The file that `write` would make of `path`; called before long work. Raises `OutputError`."""
    try:
        target = path.expanduser().resolve()  # what a link points to is replaced, and the link stays
        if target.is_dir():
            raise OutputError(f"{path}: is a directory; give the name of a file in it")
        if target.exists() and not target.is_file():
            raise OutputError(f"{path}: exists and is not a regular file; give another name")
        if target.exists() and target.suffix.lower() not in (".html", ".htm"):
            # A slip such as `--html model.safetensors` must not cost anyone their weights.
            raise OutputError(f"{path}: exists and is no .html file; it will not be replaced, give another name")
        if not target.parent.is_dir():
            raise OutputError(f"{path}: there is no directory {target.parent}; make it first")
        # Permissions alone do not tell: the file system may be read-only, or full.
        with tempfile.TemporaryFile(dir=target.parent):
            return target
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user's home, or links in a circle
        why = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{path}: cannot be written ({why}); choose another place") from error


def write(path: Path, text: str) -> None:
    """Write beside, then rename: a reader finds the old file or the new one. Raises `OutputError`."""
    target = check_writable(path)
    beside = target.with_name(f".gaugekit-{secrets.token_hex(8)}.part")
    try:
        # Not every path is text: a name that is not UTF-8 on disk must not spoil the page that tells of it.
        with beside.open("x", encoding="utf-8", errors="xmlcharrefreplace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        beside.unlink(missing_ok=True)
