"""A merge report as one HTML file, like that of inspect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gaugekit.report import files
from gaugekit.report.html import page
from gaugekit.report.merge import MEASURES, end_rows, facts, left, name
from gaugekit.report.plots.ways import way
from gaugekit.report.text import path_name

if TYPE_CHECKING:
    from gaugekit.verbs.merge import MergeReport


def write_html(report: MergeReport, path: Path) -> None:
    """Write the page, whole or not at all. Raises `OutputError`."""
    files.write(path, render_html(report))


def render_html(report: MergeReport) -> str:
    """The page, some 5 MB of it plotly.js."""
    figure = None if report.ways is None else way(report.ways)
    return page(
        "merge",
        [] if figure is None else [figure],
        report=report,
        name=path_name(report.out),
        facts=list(facts(report)),
        figure=figure,
        unit=None if report.ways is None else MEASURES[report.ways.measure][1],
        ends=[] if report.ends is None else list(end_rows(report, report.ends)),
        left=left(report),
        title=name,
    )
