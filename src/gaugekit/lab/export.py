"""The lab as files that any web server can host: the page, and the reports of a model if there is one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from gaugekit.checkpoint.staging import reported, staged
from gaugekit.errors import CheckpointError, GaugekitError
from gaugekit.lab.app import STATIC
from gaugekit.lab.reports import Reports
from gaugekit.strict import strict_json

__all__ = ["export", "require_place"]

INDEX, SESSION = "index.html", "session.json"


def require_place(place: Path, overwrite: bool) -> Path:
    """The folder that `export` would write; called before long work. Raises `GaugekitError`."""
    try:
        found = place.expanduser().resolve()  # what a link points to is replaced, and the link stays
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user's home, or links in a circle
        raise CheckpointError(f"{place}: cannot be written ({error}); choose another place") from error
    with reported(place):
        if not found.parent.is_dir():
            raise CheckpointError(f"{place}: there is no directory {found.parent}; create it")
        if found.exists() and not (overwrite and _is_export(found)):
            hint = "is no earlier export" if overwrite else "exists already"
            raise CheckpointError(f"{place}: {hint}; choose another name, or remove it")
    return found


def export(reports: Reports, place: Path, *, overwrite: bool = False) -> None:
    """Write the folder: complete, or not at all.

    Raises `GaugekitError` for a report that could not be made, and a place that is taken by something else.
    """
    found = require_place(place, overwrite)
    for name, why in reports.failed.items():
        raise GaugekitError(f"{name}: {why}")
    with staged(found, replace=overwrite) as partial:
        shutil.copytree(STATIC, partial, dirs_exist_ok=True)
        session = reports.session(live=False)
        (partial / SESSION).write_text(strict_json(session), encoding="utf-8")
        for report in session["reports"]:
            made = reports.ready(report["name"])
            assert made is not None, "export comes after make_all"
            for address, content in ((report["page"], made.html), (report["json"], made.json)):
                file = partial / address
                file.parent.mkdir(exist_ok=True)
                file.write_text(content, encoding="utf-8")


def _is_export(place: Path) -> bool:
    """Whether `export` wrote this folder: more than a file of a common name must speak for deleting it."""
    try:
        session = json.loads((place / SESSION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    known = isinstance(session, dict) and session.keys() == Reports().session(live=False).keys()
    return known and session["live"] is False and (place / INDEX).is_file()
