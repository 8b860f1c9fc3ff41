"""What scramble and canonicalize report, for the terminal: what was moved, what was not, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from gaugekit.report.tables import add_row, header, heading, new_table
from gaugekit.report.text import OBSERVABLES, count, path_name, plain, plural, size
from gaugekit.report.verify import lines

if TYPE_CHECKING:
    from gaugekit.verbs.canonicalize import CanonicalizeReport
    from gaugekit.verbs.rewriting import Skipped
    from gaugekit.verbs.scramble import ScrambleReport
    from gaugekit.verbs.verify import VerifyReport

T = TypeVar("T")

SHOWN = 12  # rows of a table that may be as long as the model is deep; the JSON has them all


def render_scramble(report: ScrambleReport) -> RenderableType:
    return Group(*_scramble(report))


def render_canonicalize(report: CanonicalizeReport, outcome: VerifyReport | None = None) -> RenderableType:
    """With `outcome`, what running both models showed."""
    return Group(*_canonicalize(report, outcome))


def _scramble(report: ScrambleReport) -> Iterator[RenderableType]:
    facts = [
        ("source", report.source),
        ("written to", report.out),
        ("seed", f"{report.seed}, condition number {report.condition:g}"),
        ("observable", f"{report.observable} ({OBSERVABLES[report.observable]})"),
    ]
    yield from header(path_name(report.out), facts)
    yield from _kinds(report.moved, "Moved", "by random elements")
    yield Text(f"moved {_places(report.moved)}; {plural(report.tensors, 'tensor')} changed", style="bold")
    yield from _skipped(report.skipped)


def _canonicalize(report: CanonicalizeReport, outcome: VerifyReport | None) -> Iterator[RenderableType]:
    facts = [
        ("source", report.source),
        ("written to" if report.written else "not written", report.out),
        ("level", report.level),
        ("gauge", report.gauge),
        ("observable", f"{report.observable} ({OBSERVABLES[report.observable]})"),
    ]
    yield from header(path_name(report.out), facts)
    yield from _kinds(report.fixed, "Settled", "at their representative")
    done, change = ("settled", "changed") if report.written else ("would settle", "would change")
    tensors = f"{plural(report.tensors, 'tensor')} {change}"
    yield Text(f"{done} {_places(report.fixed)}; {tensors}; {size(report.bytes)} on disk", style="bold")
    if report.gauge == "pivoted":
        yield Text(f"{plural(report.need_not_be_stored, 'number')} need not be stored: they are zero or one")
    if not report.written:
        yield Text("dry run: nothing was written", style="bold")
    yield from _skipped(report.skipped)
    # At other levels the frame is nobody's to settle.
    if report.blocked and report.level == "full" and report.gauge != "folded":
        yield heading("The frame stays as it is", "the stream cannot be turned freely")
        for reason in report.blocked:
            yield Text(plain(reason))
    if report.ambiguous:
        yield from _ambiguous(report)
    if report.layer_norms and report.rms:
        yield Text("LayerNorms are RMSNorms now: put RMSNorms with the same weights, biases and eps in their place")
    elif report.layer_norms and report.gauge == "folded":
        yield heading("LayerNorms stay LayerNorms", "the mean they remove is not zero everywhere")
        for reason in report.not_rms:
            yield Text(plain(reason))
    if report.ties:
        pairs = plural(sum(tie.pairs for tie in report.ties), "pair")
        places = plural(len(report.ties), "place")
        yield Text(f"{pairs} of neighbours in sorted orders ({places}) are so near that rounding may exchange them")
    if outcome is not None:
        yield heading("Verified", "both models were run")
        yield from lines(outcome)


def _kinds(places: Mapping[str, int], title: str, what: str) -> Iterator[RenderableType]:
    if not places:
        return
    yield heading(title, what)
    table = new_table("symmetry", "places>")
    for name, number in places.items():
        add_row(table, name, count(number))
    yield table


def _places(places: Mapping[str, int]) -> str:
    if not places:
        return "nothing: no symmetry that was asked for acts on these weights"
    kinds = plural(len(places), "kind")
    return f"{kinds} of symmetry at {plural(sum(places.values()), 'place')}"


def _skipped(skipped: Sequence[Skipped]) -> Iterator[RenderableType]:
    if not skipped:
        return
    yield heading("Skipped", "symmetries of the architecture that these weights do not have")
    table = new_table("symmetry", "where", "reason")
    for row in islice(skipped, SHOWN):
        add_row(table, row.symmetry, row.where, row.reason)
    yield table
    yield from _more(skipped)


def _ambiguous(report: CanonicalizeReport) -> Iterator[RenderableType]:
    yield heading("Ambiguous", "heads with equal singular values: there the form is defined up to O(size)")
    table = new_table("stream", "layer>", "head>", "circuit", "singular values", "up to")
    for row in islice(report.ambiguous, SHOWN):
        values = f"{row.first + 1}..{row.first + row.size}"
        add_row(table, row.stream, str(row.layer), str(row.kv_head), row.circuit.upper(), values, f"O({row.size})")
    yield table
    yield from _more(report.ambiguous)


def _more(rows: Sequence[object]) -> Iterator[RenderableType]:
    if len(rows) > SHOWN:
        yield Text(f"and {count(len(rows) - SHOWN)} more: --json lists all", style="dim")
