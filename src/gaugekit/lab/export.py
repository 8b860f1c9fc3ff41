"""The lab as files that any web server can host: the page, and the reports of a model if there is one."""

from __future__ import annotations

import shutil
from pathlib import Path

from gaugekit.checkpoint.staging import staged
from gaugekit.errors import CheckpointError, GaugekitError
from gaugekit.lab.app import STATIC
from gaugekit.lab.reports import Reports
from gaugekit.strict import strict_json

__all__ = ["export"]

SESSION = "session.json"


def export(reports: Reports, place: Path, *, overwrite: bool = False) -> None:
    """Write the folder: complete, or not at all.

    Raises `GaugekitError` for a report that could not be made, and a place that is taken by something else.
    """
    for name, why in reports.failed.items():
        raise GaugekitError(f"{name}: {why}")
    if place.exists() and not (overwrite and (place / SESSION).is_file()):
        hint = "is no earlier export" if overwrite else "exists already"
        raise CheckpointError(f"{place}: {hint}; choose another name, or remove it")
    with staged(place, replace=overwrite) as partial:
        shutil.copytree(STATIC, partial, dirs_exist_ok=True)
        session = reports.session(live=False)
        (partial / SESSION).write_text(strict_json(session), encoding="utf-8")
        for report in session["reports"]:
            made = reports.ready(report["name"])
            assert made is not None
            for address, content in ((report["page"], made.html), (report["json"], made.json)):
                file = partial / address
                file.parent.mkdir(exist_ok=True)
                file.write_text(content, encoding="utf-8")
