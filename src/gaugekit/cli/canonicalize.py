"""`gaugekit canonicalize`: the representative of a model's orbit."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from gaugekit.cli.common import NOT_EQUIVALENT, BadOption, emit_json, emit_rich, progress, reporting_errors
from gaugekit.cli.options import Debug, Json, MaxShardSize, Model, Observable, Out, Overwrite, Revision, StoredDtype

# As in the verb, see `gaugekit.cli.options`.
Level = Literal["heads", "full"]
Gauge = Literal["balanced", "pivoted", "folded"]


def canonicalize(
    model: Model,
    out: Out,
    level: Annotated[
        Level, typer.Option("--level", help="Settle the bases of heads only, or everything that acts.")
    ] = "full",
    gauge: Annotated[
        Gauge,
        typer.Option(
            "--gauge",
            help="Balance and sort; then also make columns of values and keys the identity; or only fold norms and "
            "constants into what reads them.",
        ),
    ] = "balanced",
    observable: Observable = None,
    max_shard_size: MaxShardSize = "5GB",
    dtype: StoredDtype = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")] = False,
    check: Annotated[
        bool, typer.Option("--verify", help="Then run MODEL and OUT, and compare what they give.")
    ] = False,
    overwrite: Overwrite = False,
    revision: Revision = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write to OUT the representative of MODEL's orbit: it computes the same, and is the same for every disguise.

    OUT is there complete, or not at all. Nothing is downloaded, and no code of a checkpoint is run.
    """
    with reporting_errors(debug):
        if dry_run and check:
            raise BadOption("--verify runs what was written, and --dry-run writes nothing: leave out one of them")

        from gaugekit.verbs.canonicalize import canonicalize as verb

        with progress() as track:
            report = verb(
                model,
                out,
                level=level,
                gauge=gauge,
                observable=observable,
                max_shard_size=max_shard_size,
                dtype=dtype,
                overwrite=overwrite,
                dry_run=dry_run,
                revision=revision,
                track=track,
            )
        outcome = None
        if check:
            from gaugekit.verbs.verify import record_drift, verify

            outcome = verify(report.source, report.out, observable=observable)
            record_drift(report.out, outcome)
        if as_json:
            emit_json({**report.to_dict(), "verify": None if outcome is None else outcome.to_dict()})
        else:
            from gaugekit.report.moves import render_canonicalize

            emit_rich(render_canonicalize(report, outcome))
        if outcome is not None and not outcome.equivalent:
            raise typer.Exit(NOT_EQUIVALENT)
