"""What merge reports, for the terminal: the models, what could not be aligned, and losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gaugekit.report.left import left_rows, left_section
from gaugekit.report.tables import add_row, header, heading, new_table
from gaugekit.report.text import path_name, plain, plural, size

if TYPE_CHECKING:
    from gaugekit.verbs.barriers import Ends, Ways
    from gaugekit.verbs.merge import MergeReport, Source

MEASURES = {
    "loss": ("loss", "nats a token"),
    "departure": ("departure", "of last states from those of the two models, relative"),
}


def render(report: MergeReport) -> RenderableType:
    """The whole report. Print it on any rich console."""
    return Group(*_parts(report))


def facts(report: MergeReport) -> Iterator[tuple[str, str]]:
    """The merge in a few lines of (what, value)."""
    yield "recipe", plain(report.recipe)
    yield "written to" if report.written else "not written", plain(report.out)
    yield "method", report.method
    yield "aligned", "no" if report.align == "none" else f"to the first model, by {report.align}"
    if report.mergekit is not None:
        yield "for mergekit", plain(report.mergekit)


def name(source: Source) -> str:
    return path_name(source.path)


def left(report: MergeReport) -> list[tuple[str, ...]]:
    """What could not be aligned: (symmetry, model, where, reason)."""
    return [row for source in report.sources for row in left_rows(source.left, name(source))]


def barrier_lines(ways: Ways) -> Iterator[str]:
    """One line for each way."""
    unit = MEASURES[ways.measure][1]
    yield f"barrier as they are: {ways.barrier_naive:.4f} {unit}"
    if ways.barrier_aligned is not None:
        yield f"barrier aligned: {ways.barrier_aligned:.4f} {unit}"


def end_rows(report: MergeReport, ends: Ends) -> Iterator[tuple[str, float]]:
    """Losses by what has them."""
    yield from zip(map(name, report.sources), ends.models, strict=True)
    yield "merge of them as they are", ends.naive
    if ends.aligned is not None:
        yield "merge of them aligned", ends.aligned


def _parts(report: MergeReport) -> Iterator[RenderableType]:
    yield from header(path_name(report.out), facts(report))
    yield heading("Models", "the first is the reference: the base model, if the recipe has one")
    table = new_table("model", "weight>", "density>")
    for source in report.sources:
        add_row(table, name(source), *("" if x is None else f"{x:g}" for x in (source.weight, source.density)))
    yield table
    tensors = f"{plural(report.tensors, 'tensor')} {'changed' if report.written else 'would change'}"
    yield Text(f"{tensors}; {size(report.bytes)} on disk", style="bold")
    if not report.written:
        yield Text("dry run: nothing was written", style="bold")
    yield from left_section(left(report), "model")
    if report.ways is not None:
        yield from _ways(report.ways)
    if report.ends is not None:
        yield heading("Losses", f"nats a token, on {plural(report.ends.tokens, 'token')} of {plain(report.ends.text)}")
        table = new_table("model", "loss>")
        for what, loss in end_rows(report, report.ends):
            add_row(table, what, f"{loss:.4f}")
        yield table


def _ways(ways: Ways) -> Iterator[RenderableType]:
    what, unit = MEASURES[ways.measure]
    yield heading(f"The way ({what})", f"{unit}, on {plural(ways.tokens, 'token')} of {plain(ways.text)}")
    columns = ("as they are>",) if ways.aligned is None else ("as they are>", "aligned>")
    table = new_table("t>", *columns)
    for t, *values in zip(ways.t, ways.naive, *([] if ways.aligned is None else [ways.aligned]), strict=True):
        add_row(table, f"{t:.3g}", *(f"{value:.4f}" for value in values))
    yield table
    for line in barrier_lines(ways):
        yield Text(line, style="bold")
