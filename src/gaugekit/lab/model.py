"""The reports of one model, as the verbs make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaugekit.checkpoint import open_checkpoint
from gaugekit.lab.reports import Made, Report, Reports
from gaugekit.models import read_spec
from gaugekit.report import compare_page, html, probe_page
from gaugekit.strict import strict_json
from gaugekit.verbs.compare import compare
from gaugekit.verbs.fingerprint import read_fingerprint
from gaugekit.verbs.inspect import Track, inspect, untracked
from gaugekit.verbs.probe import probe
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
    a model that is not there or of an unknown family, a text that cannot be read.
    """
    checkpoint = open_checkpoint(model)
    spec = read_spec(checkpoint)
    every = [Report("inspect", lambda: _made(inspect(model, track=track), html.render_html))]
    if reading is not None:
        next(windows(checkpoint, spec, reading.text, LENGTH, ROWS, reading.tokenizer))
        every.append(Report("probe", lambda: _made(_probed(model, reading, track), probe_page.render_html)))
    if other is not None:
        if read_fingerprint(other) is None:
            read_spec(open_checkpoint(other))
        every.append(Report("compare", lambda: _made(compare(model, other, track=track), compare_page.render_html)))
    return Reports(checkpoint.path.name, every)


def _probed(model: str, reading: Reading, track: Track[Any]) -> Any:
    return probe(
        model,
        reading.text,
        tokenizer=reading.tokenizer,
        length=LENGTH,
        rows=ROWS,
        tokens=reading.tokens,
        track=track,
    )


def _made(report: Any, render: Callable[[Any], str]) -> Made:
    return Made(render(report), strict_json(report.to_dict()))
