"""A probe report as one HTML file, like that of inspect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaugekit.report import files
from gaugekit.report.findings import (
    any_unselectable,
    cosine,
    either_side,
    facts,
    findings,
    kernel_words,
    multiple,
    null_band,
    rounded,
)
from gaugekit.report.html import page
from gaugekit.report.plots import attending, curves, grams, kernels, sphere
from gaugekit.report.plots.base import Figure
from gaugekit.report.text import path_name

if TYPE_CHECKING:
    from gaugekit.verbs.probe import ProbeReport


def write_html(report: ProbeReport, path: Path) -> None:
    """Write the page, whole or not at all. Raises `OutputError`."""
    files.write(path, render_html(report))


def render_html(report: ProbeReport) -> str:
    """The page, some 5 MB of it plotly.js."""
    figures = _figures(report)
    words: dict[str, Any] = {
        "cosine": cosine,
        "either_side": either_side,
        "kernel_words": kernel_words,
        "multiple": multiple,
        "null_band": null_band,
    }
    return page(
        "probe",
        [figure for pairs in figures.values() for pair in pairs for figure in pair],
        report=report,
        name=path_name(report.model),
        facts=list(facts(report)),
        findings=list(findings(report)),
        sections=figures,
        rounded=rounded(report),
        any_stuck=any_unselectable(report.heads),
        **words,
    )


def _figures(report: ProbeReport) -> dict[str, list[list[Figure]]]:
    """The figures of each section, in rows of one or two."""
    norms, heads = report.norms, report.heads
    sections: dict[str, list[list[Figure]]] = {"sphere": [], "kernel": [], "curve": [], "rank": [], "heads": []}
    if norms:
        sections["sphere"] = [[sphere.angles(norms)], [sphere.variance(norms), sphere.radius(norms)]]
        if any(norm.kernel is not None for norm in norms):
            sections["kernel"] = [[kernels.eigenvalues(norms), *kernels.cosines(norms)]]
        if any(norm.curve is not None for norm in norms):
            sections["curve"] = [[curves.curves(norms), curves.fits(norms)]]
        sections["rank"] = [[grams.ranks(norms)], list(grams.spectra(norms))]
    if heads:
        sections["heads"] = [[attending.entropy(heads)]]
        if any_unselectable(heads):
            sections["heads"][0].append(attending.unselectable(heads))
    return sections
