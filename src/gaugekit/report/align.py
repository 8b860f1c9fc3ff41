"""What align reports, for the terminal: how near the two were brought, layer by layer, and what was left."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gaugekit.report.left import SHOWN, left_rows, left_section
from gaugekit.report.tables import add_row, header, heading, new_table
from gaugekit.report.text import OBSERVABLES, count, measure, path_name, plain, plural, size
from gaugekit.report.verify import lines

if TYPE_CHECKING:
    from gaugekit.verbs.align import AlignReport
    from gaugekit.verbs.verify import VerifyReport


def render(report: AlignReport, outcome: VerifyReport | None = None) -> RenderableType:
    """With `outcome`, what running B before and after showed."""
    return Group(*_parts(report, outcome))


def facts(report: AlignReport) -> Iterator[tuple[str, str]]:
    """The alignment in a few lines of (what, value)."""
    yield "reference", plain(report.reference)
    yield "moved", plain(report.source)
    yield "written to" if report.written else "not written", plain(report.out)
    yield "brought together", report.cost if report.allowed == "all" else f"{report.cost}, by permutations alone"
    yield "observable", f"{report.observable} ({OBSERVABLES[report.observable]})"


def summary(report: AlignReport) -> str:
    """How near in one line."""
    return f"distance {measure(report.before)} before, {measure(report.after)} after"


def _parts(report: AlignReport, outcome: VerifyReport | None) -> Iterator[RenderableType]:
    yield from header(path_name(report.out), list(facts(report)))
    yield heading("Distances", "of weights, relative to the reference")
    table = new_table("where", "as stored>", "aligned>")
    for row in islice(report.places, SHOWN):
        add_row(table, row.where, measure(row.before), measure(row.after))
    yield table
    if len(report.places) > SHOWN:
        yield Text(f"and {count(len(report.places) - SHOWN)} more: --json lists all", style="dim")
    sweeps = plural(len(report.sweeps) - 1, "sweep")
    yield Text(f"{summary(report)}; {sweeps}; {size(report.bytes)} on disk", style="bold")
    if report.refined is not None:
        before, after = report.refined
        yield Text(f"loss of the mean of both: {before:.4f} nats a token before refinement, {after:.4f} after")
    if not report.written:
        yield Text("dry run: nothing was written", style="bold")
    yield from left_section(left_rows(report.left))
    if outcome is not None:
        yield heading("Verified", "the moved model was run before and after")
        yield from lines(outcome)
