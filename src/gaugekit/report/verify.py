"""What verify reports, for the terminal: the verdict, and how far apart the outputs are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gaugekit.report.tables import fact_lines
from gaugekit.report.text import OBSERVABLES, count, measure, share

if TYPE_CHECKING:
    from gaugekit.verbs.verify import VerifyReport


def render(report: VerifyReport) -> RenderableType:
    return Group(*lines(report))


def lines(report: VerifyReport) -> Iterator[RenderableType]:
    """The verdict, then the numbers."""
    verdict = "equivalent" if report.equivalent else "not equivalent"
    yield Text.assemble((verdict, "bold"), ("  " + _why(report), "dim"))
    yield fact_lines(_facts(report))


def _why(report: VerifyReport) -> str:
    within = "at most {}, within" if report.equivalent else "up to {}, beyond"
    size = within.format(measure(report.largest))
    return f"{OBSERVABLES[report.observable]} differ by {size} the tolerance of {report.tolerance:.2g}"


def _facts(report: VerifyReport) -> Iterator[tuple[str, str]]:
    yield "first", report.first
    yield "second", report.second
    yield "observable", f"{report.observable} ({OBSERVABLES[report.observable]})"
    yield "run in", f"{report.computed_in}, {count(report.tokens)} positions"
    # Hidden states and logits have a unit of their own; log-probabilities do not.
    unit = "" if report.observable == "logprobs" else f" of their standard deviation {measure(report.scale)}"
    yield "largest difference", measure(report.largest) + unit
    yield "rounding", f"{measure(report.rounding)}, as weights stored in {report.stored_in} are rounded"
    yield "tolerance", f"{report.tolerance:.2g}, {_origin(report)}"
    if report.mean_kl is not None:
        yield "mean KL", f"{measure(report.mean_kl)} nats"
    if report.top1 is not None:
        agreeing = round(report.top1 * report.tokens)
        yield "top-1 agreement", f"{count(agreeing)} of {count(report.tokens)} ({share(report.top1)})"
    if not report.equivalent:
        yield "first difference", _first(report)


def _origin(report: VerifyReport) -> str:
    from gaugekit.verbs.verify import FLOOR, ROUNDING_ROOM

    if report.tolerance == max(FLOOR, ROUNDING_ROOM * report.rounding):
        return f"{ROUNDING_ROOM:g} times the effect of rounding, and at least {FLOOR:g}"
    return "as given"


def _first(report: VerifyReport) -> str:
    if report.layer is None:
        return "in no layer: all states agree up to a turn of the stream"
    place = "in the embedding" if report.layer == 0 else f"in layer {report.layer - 1}"
    return f"{place}, whose states are {measure(report.layers[report.layer])} apart"
