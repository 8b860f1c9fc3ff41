"""The reports of one model, as the verbs make them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gaugekit.documents import strict_json
from gaugekit.lab.reports import Made, Report, Reports
from gaugekit.verbs.inspect import Track, untracked

__all__ = ["reports_of"]


def reports_of(
    model: str,
    *,
    text: Path | None = None,
    other: str | None = None,
    track: Track[Any] = untracked,
) -> Reports:
    """`inspect` of a model; `probe` on a text if there is one; `compare` with another model if there is one.

    Nothing is read yet but whether there is such a model, in which `GaugekitError` is raised at once.
    """
    from gaugekit.checkpoint import open_checkpoint

    every = [Report("inspect", lambda: _inspected(model, track))]
    checkpoint = open_checkpoint(model)
    if text is not None:
        every.append(Report("probe", lambda: _probed(model, text, track)))
    if other is not None:
        open_checkpoint(other)
        every.append(Report("compare", lambda: _compared(model, other, track)))
    return Reports(checkpoint.path.name, every)


def _inspected(model: str, track: Track[Any]) -> Made:
    from gaugekit.report.html import render_html
    from gaugekit.verbs.inspect import inspect

    return _made(inspect(model, track=track), render_html)


def _probed(model: str, text: Path, track: Track[Any]) -> Made:
    from gaugekit.report.probe_page import render_html
    from gaugekit.verbs.probe import probe

    return _made(probe(model, text, track=track), render_html)


def _compared(model: str, other: str, track: Track[Any]) -> Made:
    from gaugekit.report.compare_page import render_html
    from gaugekit.verbs.compare import compare

    return _made(compare(model, other, track=track), render_html)


def _made(report: Any, render: Callable[[Any], str]) -> Made:
    return Made(render(report), strict_json(report.to_dict()))
