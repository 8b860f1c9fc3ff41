"""An align report as one HTML file, like that of inspect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gaugekit.report import files
from gaugekit.report.align import facts
from gaugekit.report.html import page
from gaugekit.report.left import left_rows
from gaugekit.report.plots.nearer import nearer
from gaugekit.report.text import path_name

if TYPE_CHECKING:
    from gaugekit.verbs.align import AlignReport
    from gaugekit.verbs.verify import VerifyReport


def write_html(report: AlignReport, outcome: VerifyReport | None, path: Path) -> None:
    """Write the page, whole or not at all. Raises `OutputError`."""
    files.write(path, render_html(report, outcome))


def render_html(report: AlignReport, outcome: VerifyReport | None = None) -> str:
    """The page, some 5 MB of it plotly.js."""
    figure = nearer(report)
    return page(
        "align",
        [figure],
        report=report,
        name=f"{path_name(report.source)}, in the coordinates of {path_name(report.reference)}",
        facts=list(facts(report)),
        figure=figure,
        left=left_rows(report.left),
        outcome=outcome,
    )
