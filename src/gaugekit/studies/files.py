"""Results on disk: NAME.json, one document, and NAME.svg, which is drawn from it."""

from __future__ import annotations

import json
import math
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaugekit.errors import ConfigError, DataError
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
    """NAME.json and NAME.svg in an existing folder (NAME.quick.* of a quick run), each put in place when whole."""
    name = f"{study.name}{'.quick' if result.quick else ''}"
    document, picture = folder / f"{name}.json", folder / f"{name}.svg"
    text = json.dumps(finite(result.to_dict()), indent=1, allow_nan=False) + "\n"
    part = document.with_suffix(".json.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, document)
    # Drawn from what was written, so that a figure can always be drawn again.
    save(study.draw(read(document)), picture)
    return document, picture


def read(path: Path) -> Result:
    """Raises `DataError` for a file that is no result."""
    try:
        return Result.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no result of a study ({error})") from error


def save(figure: Figure, path: Path) -> None:
    """As an SVG that says the same each time it is drawn."""
    import matplotlib
    from matplotlib.pyplot import close

    part = path.with_suffix(".svg.part")
    with matplotlib.rc_context({"svg.hashsalt": "gaugekit"}):
        figure.savefig(part, format="svg", metadata={"Date": None})
    close(figure)
    os.replace(part, path)


def finite(value: Any) -> Any:
    """JSON has no infinity: null stands for what is not finite."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
