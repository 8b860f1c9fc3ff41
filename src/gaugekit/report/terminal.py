"""An inspect report as tables for the terminal: readable at 80 columns, and when piped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gaugekit.report.heads import CIRCUITS, HeadSet, head_sets
from gaugekit.report.tables import add_row, header, heading, new_table
from gaugekit.report.text import count, facts, model_name, percent, shorten, total

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
    yield header(model_name(report), facts(report))
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


def _census(report: InspectReport) -> Iterator[RenderableType]:
    yield heading("Symmetries")
    if report.by_symmetry:
        table = new_table("symmetry", "group", "dimension>", "share>", "exactness", "places>")
        for row in report.by_symmetry:
            part = row.dimension / report.parameters if report.parameters else 0.0
            places = count(len(row.where))
            group = shorten(row.group, GROUP)
            add_row(table, row.name, group, count(row.dimension), percent(part), row.exactness, places)
        yield table
    yield Text(total(report), style="bold")


def _at_zero_eps(report: InspectReport) -> Iterator[RenderableType]:
    yield heading("Exact at eps = 0", "broken by the eps of the norms only; not counted")
    table = new_table("symmetry", "group", "dimension>", "places>")
    for row in report.at_zero_eps:
        add_row(table, row.name, shorten(row.group, GROUP), count(row.dimension), count(len(row.where)))
    yield table


def _dead(report: InspectReport) -> Iterator[RenderableType]:
    yield heading("Dead parameters", "the observable does not depend on them")
    table = new_table("tensor", "reason", "parameters>")
    for row in report.dead:
        add_row(table, row.tensor, row.reason, count(row.parameters))
    yield table
    yield Text(f"dead parameters {count(report.dead_parameters)} of {count(report.parameters)}", style="bold")


def _discrete(report: InspectReport) -> Iterator[RenderableType]:
    yield heading("Discrete symmetries", "orders and signs: no dimension")
    table = new_table("symmetry", "group", "places>")
    for row in report.discrete:
        add_row(table, row.name, shorten(row.group, GROUP), count(len(row.where)))
    yield table


def _blocked(report: InspectReport) -> Iterator[RenderableType]:
    yield heading("Blocked", "symmetries this model would have, and what stands in their way")
    table = new_table("symmetry", "reason", "places>")
    for row in report.blocked:
        add_row(table, row.symmetry, row.reason, count(len(row.where)))
    yield table


def _heads(heads: HeadSet, alone: bool) -> Iterator[RenderableType]:
    yield heading("Heads" if alone else f"Heads: {heads.title}", "means over the key/value heads of a layer")
    table = new_table("layer>", "QK rank>", "stable>", "defect>", "VO rank>", "stable>", "defect>", "ties>")
    circuits = [_by_layer(heads.circuit(circuit)) for circuit in CIRCUITS]
    for layer in heads.layers:
        cells: list[str] = []
        for rows in (layers.get(layer, []) for layers in circuits):
            cells += _summary(rows)
        ties = sum(len(row.degenerate_blocks) for layers in circuits for row in layers.get(layer, []))
        add_row(table, str(layer), *cells, count(ties))
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
