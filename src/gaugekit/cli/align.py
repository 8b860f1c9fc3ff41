"""`gaugekit align`: one checkpoint moved along its orbit to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gaugekit.cli.common import NOT_EQUIVALENT, BadOption, emit_json, emit_rich, progress, reporting_errors, tell
from gaugekit.cli.options import Debug, First, Html, Json, MaxShardSize, Observable, Out, Overwrite, Second, StoredDtype

# As in the verb, see `gaugekit.cli.options`.
Cost = Literal["weights", "activations"]
Allowed = Literal["permutations", "all"]


def align(
    reference: First,
    source: Second,
    out: Out,
    cost: Annotated[
        Cost, typer.Option("--cost", help="Bring weights together, or what both compute on --text.")
    ] = "weights",
    allowed: Annotated[
        Allowed, typer.Option("--allow", help="All symmetries, or permutations of heads, units and coordinates alone.")
    ] = "all",
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="A text that both read, for --cost activations and --refine."),
    ] = None,
    refine: Annotated[
        int,
        typer.Option(
            "--refine", metavar="STEPS", min=0, help="Then turn B by gradient until the mean of both is good at --text."
        ),
    ] = 0,
    observable: Observable = None,
    max_shard_size: MaxShardSize = "5GB",
    dtype: StoredDtype = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how near B would come to A, and write nothing.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Then run B and OUT, and compare what they give.")
    ] = True,
    overwrite: Overwrite = False,
    as_json: Json = False,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Write to OUT what B computes, in the coordinates of A: B moved along its symmetry orbit to where A lies.

    Frame, heads, hidden units, norms and constants are brought together, so that the two can be compared or averaged
    weight by weight. OUT is there complete, or not at all. Nothing is downloaded, and no code of a checkpoint is run.
    """
    with reporting_errors(debug):
        if cost == "activations" and text is None:
            raise BadOption("--cost activations compares what both compute on a text: name one by --text")
        if refine and text is None:
            raise BadOption("--refine learns from a text: name one by --text")
        if cost == "weights" and not refine and text is not None:
            raise BadOption("--text is read for --cost activations and --refine only: leave it out, or ask for these")
        if html is not None:
            from gaugekit.report.files import check_writable

            check_writable(html)

        from gaugekit.verbs.align import align as verb

        with progress() as track:
            report = verb(
                reference,
                source,
                out,
                cost=cost,
                allowed=allowed,
                text=text,
                refine=refine,
                observable=observable,
                max_shard_size=max_shard_size,
                dtype=dtype,
                overwrite=overwrite,
                dry_run=dry_run,
                track=track,
            )
        outcome = None
        if check and report.written:
            from gaugekit.verbs.verify import record_drift, verify

            outcome = verify(report.source, report.out, observable=observable)
            record_drift(report.out, outcome)
        if html is not None:
            from gaugekit.report.align_page import write_html

            write_html(report, outcome, html)
            tell(f"wrote page {html}")
        if as_json:
            emit_json({**report.to_dict(), "verify": None if outcome is None else outcome.to_dict()})
        else:
            from gaugekit.report.align import render

            emit_rich(render(report, outcome))
        if outcome is not None and not outcome.equivalent:
            raise typer.Exit(NOT_EQUIVALENT)
