"""An inspect report as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from gaugekit.report import files
from gaugekit.report.heads import HeadSet, degenerate, head_sets
from gaugekit.report.plots import census, heads, norms
from gaugekit.report.plots.base import Figure
from gaugekit.report.text import count, facts, measure, model_name, percent, plural, share

if TYPE_CHECKING:
    from gaugekit.verbs.inspect import InspectReport


@dataclass(frozen=True)
class Section:
    """The plots of one kind of attention, which go under one heading."""

    title: str
    pairs: tuple[tuple[Figure, ...], ...]

    @property
    def figures(self) -> Iterator[Figure]:
        return (figure for pair in self.pairs for figure in pair)


def write_html(report: InspectReport, path: Path) -> None:
    """Write the page, whole or not at all. Raises `OutputError`."""
    files.write(path, render_html(report))


def render_html(report: InspectReport) -> str:
    """The page, some 5 MB of it plotly.js."""
    symmetries = [census.census(report), census.layers(report)] if report.by_symmetry else []
    sections = [_section(each, number) for number, each in enumerate(head_sets(report))]
    spread = [norms.norms(report)] if report.norms else []
    figures = [*symmetries, *(figure for section in sections for figure in section.figures), *spread]
    return page(
        "inspect",
        figures,
        report=report,
        name=model_name(report),
        facts=facts(report),
        symmetries=symmetries,
        sections=sections,
        norms=spread,
        degenerate=list(degenerate(report)),
    )


def page(command: str, figures: Iterable[Figure], **values: Any) -> str:
    """The page of a command by its template, which extends `base.html`: that wants `name` and `facts`. `figures` are
    all that the template has places for."""
    return (
        _environment()
        .get_template(f"{command}.html")
        .render(
            command=command,
            figures=[figure.to_plotly() for figure in figures],
            plotly=get_plotlyjs(),
            version=version("gaugekit"),
            **values,
        )
    )


def _section(each: HeadSet, number: int) -> Section:
    pairs = (heads.ranks(each, number), heads.spectra(each, number), [heads.balance(each, number)])
    return Section(each.title, tuple(tuple(pair) for pair in pairs))


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("gaugekit.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {"count": count, "share": share, "percent": percent, "plural": plural, "measure": measure}
    environment.filters.update(filters)
    # What JSON cannot say must stop the page from being written, not from being shown.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment
