"""`gaugekit compare`: the distance of two checkpoints modulo symmetry."""

from __future__ import annotations

from typing import Annotated

import typer

from gaugekit.cli.common import emit_json, emit_rich, progress, reporting_errors, tell
from gaugekit.cli.options import Debug, First, Html, Json, Observable, Second
from gaugekit.errors import GaugekitError


class Incomparable(GaugekitError):
    """Two checkpoints between which there is no distance."""


def compare(
    first: First,
    second: Second,
    fast: Annotated[bool, typer.Option("--fast", help="Compare the spectra of heads only.")] = False,
    observable: Observable = None,
    as_json: Json = False,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Compare A and B modulo every symmetry of their architecture: same, related, or unrelated.

    Either may be a fingerprint (a .json file), which stands for its model as far as spectra go.
    Exit code 0 whatever the verdict, and 2 if the two cannot be compared. Nothing is downloaded, and no code of a
    checkpoint is run.
    """
    with reporting_errors(debug):
        if html is not None:
            from gaugekit.report.files import check_writable

            check_writable(html)

        from gaugekit.verbs.compare import compare as verb

        with progress() as track:
            report = verb(first, second, observable=observable, fast=fast, track=track)
        comparable = report.verdict != "incomparable"
        if html is not None and comparable:
            from gaugekit.report.compare_page import write_html

            write_html(report, html)
            tell(f"wrote page {html}")
        if as_json:
            emit_json(report.to_dict())
        elif comparable:
            from gaugekit.report.compare import render

            emit_rich(render(report))
        if not comparable:
            raise Incomparable(f"{first} and {second} cannot be compared: {report.reason}")
