"""An inspect report as tables for the terminal: readable at 80 columns, and when piped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gaugekit.report.heads import CIRCUITS, HeadSet, head_sets
from gaugekit.report.text import count, facts, model_name, percent, plain, shorten, total

if TYPE_CHECKING:
    from gaugekit.verbs.inspect import HeadRow, InspectReport

GROUP = 44  # characters of a group that are shown: two lines of its column at 80 columns
HEADS = (
    "rank: mean effective rank. stable: smallest to largest stable rank. defect: mean relative balance defect, "
    "0 to 1. ties: blocks of equal singular values, in which a canonical form is free to turn."
)


def render(report: InspectReport) -> RenderableType:
    """The whole report. Print it on any rich console."""
    return Group(*(part for section in _sections(report) for part in section))


def _sections(report: InspectReport) -> Iterator[Iterable[RenderableType]]:
    yield _header(report)
    yield _census(report)
    if report.at_zero_eps:
        yield _at_zero_eps(report)
    if report.dead:
        yield _dead(report)
    if report.discrete:
        yield _discrete(report)
    if report.blocked:
        yield _blocked(report)
    sets = head_sets(report)
    for heads in sets:
        yield _heads(heads, alone=len(sets) == 1)
    yield (Text(HEADS if sets else "\nSpectra were not computed: only headers were read.", style="dim"),)


def _header(report: InspectReport) -> Iterator[RenderableType]:
    yield Text(plain(model_name(report)), style="bold")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for what, value in facts(report):
        grid.add_row(Text(what), Text(plain(value)))
    yield grid


def _census(report: InspectReport) -> Iterator[RenderableType]:
    yield _title("Symmetries")
    if report.by_symmetry:
        table = _table("symmetry", "group", "dimension>", "share>", "exactness", "places>")
        for row in report.by_symmetry:
            part = row.dimension / report.parameters if report.parameters else 0.0
            places = count(len(row.where))
            group = shorten(row.group, GROUP)
            _row(table, row.name, group, count(row.dimension), percent(part), row.exactness, places)
        yield table
    yield Text(total(report), style="bold")


def _at_zero_eps(report: InspectReport) -> Iterator[RenderableType]:
    yield _title("Exact at eps = 0", "broken by the eps of the norms only; not counted")
    table = _table("symmetry", "group", "dimension>", "places>")
    for row in report.at_zero_eps:
        _row(table, row.name, shorten(row.group, GROUP), count(row.dimension), count(len(row.where)))
    yield table


def _dead(report: InspectReport) -> Iterator[RenderableType]:
    yield _title("Dead parameters", "the observable does not depend on them")
    table = _table("tensor", "reason", "parameters>")
    for row in report.dead:
        _row(table, row.tensor, row.reason, count(row.parameters))
    yield table
    yield Text(f"dead parameters {count(report.dead_parameters)} of {count(report.parameters)}", style="bold")


def _discrete(report: InspectReport) -> Iterator[RenderableType]:
    yield _title("Discrete symmetries", "orders and signs: no dimension")
    table = _table("symmetry", "group", "places>")
    for row in report.discrete:
        _row(table, row.name, shorten(row.group, GROUP), count(len(row.where)))
    yield table


def _blocked(report: InspectReport) -> Iterator[RenderableType]:
    yield _title("Blocked", "symmetries this model would have, and what stands in their way")
    table = _table("symmetry", "reason", "places>")
    for row in report.blocked:
        _row(table, row.symmetry, row.reason, count(len(row.where)))
    yield table


def _heads(heads: HeadSet, alone: bool) -> Iterator[RenderableType]:
    yield _title("Heads" if alone else f"Heads: {heads.title}", "means over the key/value heads of a layer")
    table = _table("layer>", "QK rank>", "stable>", "defect>", "VO rank>", "stable>", "defect>", "ties>")
    circuits = [_by_layer(heads.circuit(circuit)) for circuit in CIRCUITS]
    for layer in heads.layers:
        cells: list[str] = []
        for rows in (layers.get(layer, []) for layers in circuits):
            cells += _summary(rows)
        ties = sum(len(row.degenerate_blocks) for layers in circuits for row in layers.get(layer, []))
        _row(table, str(layer), *cells, count(ties))
    yield table


def _summary(rows: list[HeadRow]) -> list[str]:
    """Mean effective rank, range of stable rank, mean relative balance defect."""
    if not rows:
        return ["", "", ""]
    smallest, largest = (f"{pick(row.stable_rank for row in rows):.1f}" for pick in (min, max))
    return [
        f"{fmean(row.effective_rank for row in rows):.1f}",
        smallest if smallest == largest else f"{smallest}..{largest}",
        f"{fmean(row.balance_relative for row in rows):.3f}",
    ]


def _by_layer(rows: list[HeadRow]) -> dict[int, list[HeadRow]]:
    key: Callable[[HeadRow], int] = lambda row: row.layer  # noqa: E731
    return {layer: list(each) for layer, each in groupby(rows, key)}


def _title(title: str, what: str = "") -> Text:
    return Text.assemble("\n", (title, "bold"), (f"  {what}" if what else "", "dim"))


def _table(*headers: str) -> Table:
    """A table with these columns; those that end in ">" hold numbers."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for header in headers:
        if header.endswith(">"):
            table.add_column(Text(header[:-1]), justify="right", no_wrap=True)
        else:
            table.add_column(Text(header), overflow="fold", no_wrap=header == "symmetry")
    return table


def _row(table: Table, *cells: str) -> None:
    # As Text, not as strings: rich reads brackets in strings as markup.
    table.add_row(*(Text(plain(cell)) for cell in cells))
