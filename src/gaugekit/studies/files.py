"""Results on disk: NAME.json, one document, and NAME.svg, which is drawn from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from gaugekit.errors import ConfigError, DataError
from gaugekit.strict import finite
from gaugekit.studies.study import Result, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_drawing", "read", "write"]


def check_drawing() -> None:
    """Raises `ConfigError` where figures cannot be drawn: better before the runs than after."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise ConfigError("figures need matplotlib: pip install 'gaugekit[figures]'") from error


def write(study: Study, result: Result, folder: Path) -> tuple[Path, Path]:
    """NAME.json and NAME.svg in an existing folder (NAME.quick.* of a quick run), each put in place when whole.

    Raises: DataError where they cannot be written.
    """
    name = f"{study.name}{'.quick' if result.quick else ''}"
    document, picture = folder / f"{name}.json", folder / f"{name}.svg"
    text = json.dumps(finite(result.to_dict()), indent=1, allow_nan=False) + "\n"
    with placed(document) as part:
        part.write_text(text, encoding="utf-8")
    # Drawn from what was written, so that a figure can always be drawn again.
    save(study.draw(read(document)), picture)
    return document, picture


def read(path: Path) -> Result:
    """Raises `DataError` for a file that is no result."""
    try:
        return Result.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: no result of a study ({error})") from error


def save(figure: Figure, path: Path) -> None:
    """As an SVG that says the same each time it is drawn."""
    import matplotlib
    from matplotlib.pyplot import close

    try:
        with placed(path) as part, matplotlib.rc_context({"svg.hashsalt": "gaugekit"}):
            figure.savefig(part, format="svg", metadata={"Date": None})
    finally:
        close(figure)


@contextmanager
def placed(path: Path) -> Iterator[Path]:
    """Another file beside it, which takes its place when it is whole, and goes when it is not."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}): make room, or take another folder") from error
    finally:
        with suppress(OSError):
            part.unlink()
