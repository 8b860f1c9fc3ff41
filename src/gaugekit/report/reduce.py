"""What reduce reports, for the terminal: what heads keep, what is lost by it, and what it saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gaugekit.report.moves import SHOWN
from gaugekit.report.tables import add_row, header, heading, new_table
from gaugekit.report.text import count, measure, path_name, plain, plural, share, size

if TYPE_CHECKING:
    from gaugekit.verbs.evaluating import Reading
    from gaugekit.verbs.reduce import ReduceReport
    from gaugekit.verbs.savings import LayerReduction


def render(report: ReduceReport) -> RenderableType:
    return Group(*_sections(report))


def _sections(report: ReduceReport) -> Iterator[RenderableType]:
    yield from header(path_name(report.out), _facts(report))
    yield from _layers(report.layers)
    if report.vo_lost is not None and report.vo_lost_by_head is not None and not report.lossless:
        line = f"values and outputs lose {share(report.vo_lost)} of what they write, mean over layers"
        if report.vo_lost > report.vo_lost_by_head:
            line += f"; {share(report.vo_lost_by_head)} if heads of a layer need not keep equally many"
        yield Text(line)
    yield Text(_saved("parameters", report.parameters, count), style="bold")
    if report.kv_bytes is not None:
        yield Text(_saved("cache of a token", report.kv_bytes, size), style="bold")
    done = "changed" if report.written else "would change"
    yield Text(f"{plural(report.tensors, 'tensor')} {done}; {size(report.bytes)} on disk", style="bold")
    if not report.written:
        yield Text("dry run: nothing was written", style="bold")
    if report.skipped:
        yield heading("Constants that are cut with the values", "the output's bias cannot hold them")
        for row in islice(report.skipped, SHOWN):
            yield Text(plain(f"{row.where}: {row.reason}"))
    if report.before is not None and report.after is not None:
        yield from _readings(report, report.before, report.after)


def _facts(report: ReduceReport) -> Iterator[tuple[str, str]]:
    yield "source", report.source
    yield "written to" if report.written else "not written", report.out
    asked = (("values and outputs", report.vo), ("queries and keys", report.qk))
    kept = [f"{share(part)} of {what}" for what, part in asked if part is not None]
    yield "kept", " and ".join(kept) or "all that is above rounding"
    yield "form", report.form
    if report.text is None:
        yield "weighting", "plain: all inputs count alike"
    else:
        yield "weighting", f"activations: {plural(report.text_tokens, 'token')} of {report.text}"


def _layers(layers: Sequence[LayerReduction]) -> Iterator[RenderableType]:
    """One row for each attention: what of a head's dimensions stays, and the relative error of each circuit."""
    cut = [name for name in ("vo", "qk") if any(getattr(layer, name) is not None for layer in layers)]
    weighted = any(layer.vo_weighted is not None or layer.qk_weighted is not None for layer in layers)
    columns = ["where"]
    for name in cut:
        columns += [f"{name.upper()} kept>", "plain>", *(["on the text>"] if weighted else [])]
    yield heading("Heads", "dimensions kept by each, and the part of a circuit that is lost")
    table = new_table(*columns)
    for layer in layers:
        cells = [layer.where]
        for name in cut:
            cells += [_kept(getattr(layer, name), layer.head_dim), measure(getattr(layer, f"{name}_plain"))]
            cells += [measure(getattr(layer, f"{name}_weighted"))] if weighted else []
        add_row(table, *cells)
    yield table


def _kept(dimensions: Sequence[int], head_dim: int) -> str:
    least, most = min(dimensions), max(dimensions)
    return f"{least}/{head_dim}" if least == most else f"{least}..{most}/{head_dim}"


def _saved(what: str, numbers: tuple[int, int], words: object) -> str:
    before, after = numbers
    assert callable(words)
    if before == after:
        return f"{what}: {words(before)}, as before"
    return f"{what}: {words(after)} of {words(before)} ({share(1 - after / before)} less)"


def _readings(report: ReduceReport, before: Reading, after: Reading) -> Iterator[RenderableType]:
    of = f"{plural(report.eval_tokens, 'token')} of {plain(report.eval_text or '')}"
    yield heading("Held-out text", f"{of}, both models in turn")
    table = new_table("", "nats a token>", "perplexity>", "tokens/s, reading>", "writing>")
    for what, reading in (("before", before), ("after", after)):
        speeds = (f"{reading.reading:,.0f}", f"{reading.writing:,.1f}")
        add_row(table, what, f"{reading.nats:.4f}", f"{reading.perplexity:.4g}", *speeds)
    yield table
