"""A compare report as one HTML file, like that of inspect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gaugekit.report import files
from gaugekit.report.distances import facts, layer_sets
from gaugekit.report.html import Section, page
from gaugekit.report.plots import distances
from gaugekit.report.text import path_name

if TYPE_CHECKING:
    from gaugekit.verbs.compare import CompareReport


def write_html(report: CompareReport, path: Path) -> None:
    """Write the page, whole or not at all. Raises `OutputError`."""
    files.write(path, render_html(report))


def render_html(report: CompareReport) -> str:
    """The page, some 5 MB of it plotly.js."""
    sets = layer_sets(report)
    sections = []
    for number, each in enumerate(sets):
        spectra = distances.spectra(each, number)
        figures = (spectra,) if each.fast else (distances.aligned(each, number), spectra)
        sections.append(Section(each.title, (figures,)))
    return page(
        "compare",
        [figure for section in sections for figure in section.figures],
        report=report,
        name=f"{path_name(report.first)} and {path_name(report.second)}",
        facts=list(facts(report)),
        sections=list(zip(sections, sets, strict=True)),
    )
