"""The reports of one model, as the verbs make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaugekit.checkpoint import Checkpoint, open_checkpoint
from gaugekit.errors import GaugekitError
from gaugekit.lab.reports import Made, Report, Reports
from gaugekit.models import Spec, read_spec
from gaugekit.report import compare_page, html, probe_page
from gaugekit.report.text import path_name
from gaugekit.strict import strict_json
from gaugekit.symmetry import derive
from gaugekit.verbs.compare import CompareReport, compare
from gaugekit.verbs.fingerprint import read_fingerprint
from gaugekit.verbs.inspect import Track, inspect, untracked
from gaugekit.verbs.kinds import difference, kind
from gaugekit.verbs.probe import ProbeReport, probe
from gaugekit.verbs.texts import windows

__all__ = ["Reading", "reports_of"]

LENGTH, ROWS = 256, 4  # windows in which `probe` reads


@dataclass(frozen=True)
class Reading:
    """A text for `probe`. `tokens`: where to stop; None at its end. `tokenizer`: another one than the model's own."""

    text: Path
    tokens: int | None = 4096
    tokenizer: Path | None = None


def reports_of(
    model: str, *, reading: Reading | None = None, other: str | None = None, track: Track[Any] = untracked
) -> Reports:
    """`inspect` of a model; `probe` on a text and `compare` with another model or a fingerprint, if there is one.

    Nothing is computed yet, but what can be seen from headers and the start of the text raises `GaugekitError` at once:
    a model that is not there or of an unknown family, a text or tokenizer that cannot be read, another model that
    cannot be compared with this one.
    """
    checkpoint = open_checkpoint(model)
    spec = read_spec(checkpoint)
    every = [Report("inspect", lambda track: _made(inspect(model, track=track), html.render_html))]
    if reading is not None:
        _require_weights(checkpoint, "probed")
        next(windows(checkpoint, spec, reading.text, LENGTH, ROWS, reading.tokenizer))
        every.append(Report("probe", lambda track: _made(_probed(model, reading, track), probe_page.render_html)))
    if other is not None:
        _require_weights(checkpoint, "compared")
        _require_comparable(model, spec, other)
        every.append(Report("compare", lambda track: _made(_compared(model, other, track), compare_page.render_html)))
    return Reports(path_name(str(checkpoint.path)), every, track)


def _require_weights(checkpoint: Checkpoint, what: str) -> None:
    if checkpoint.format == "config":
        raise GaugekitError(f"{checkpoint.path} has a config but no weights: it can be inspected, but not {what}")


def _require_comparable(model: str, spec: Spec, other: str) -> None:
    observable = derive(spec).observable
    printed = read_fingerprint(other)
    if printed is not None:
        theirs = printed.kind
    else:
        checkpoint = open_checkpoint(other)
        _require_weights(checkpoint, "compared")
        theirs = kind(read_spec(checkpoint), observable)
    _require_no(difference(kind(spec, observable), theirs), model, other)


def _require_no(reason: str | None, model: str, other: str) -> None:
    if reason is not None:
        raise GaugekitError(f"{model} and {other} cannot be compared: {reason}")


def _probed(model: str, reading: Reading, track: Track[Any]) -> ProbeReport:
    return probe(
        model,
        reading.text,
        tokenizer=reading.tokenizer,
        length=LENGTH,
        rows=ROWS,
        tokens=reading.tokens,
        track=track,
    )


def _compared(model: str, other: str, track: Track[Any]) -> CompareReport:
    report = compare(model, other, track=track)
    # Fingerprints may be of another observable, which is seen only now.
    _require_no(report.reason if report.verdict == "incomparable" else None, model, other)
    return report


def _made(report: Any, render: Callable[[Any], str]) -> Made:
    # Names need not be text, those of files least of all.
    page = render(report).encode("utf-8", "xmlcharrefreplace").decode("utf-8")
    return Made(page, strict_json(report.to_dict()))
