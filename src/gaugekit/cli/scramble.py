"""`gaugekit scramble`: the same model at a random place of its orbit."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gaugekit.cli.common import emit_json, emit_rich, progress, reporting_errors
from gaugekit.cli.options import Debug, Json, MaxShardSize, Model, Observable, Out, Overwrite, Revision, StoredDtype


def scramble(
    model: Model,
    out: Out,
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, max=2**63 - 1, show_default=False, help="The same seed gives the same files."),
    ],
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            metavar="PARTS",
            show_default="all",
            help="Some of vo, qk, units, norms, shifts, frame, order; with commas between.",
        ),
    ] = None,
    condition: Annotated[
        float, typer.Option("--condition", metavar="C", help="Condition number of random matrices and scales, from 1.")
    ] = 10.0,
    observable: Observable = None,
    max_shard_size: MaxShardSize = "5GB",
    dtype: StoredDtype = None,
    overwrite: Overwrite = False,
    revision: Revision = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write to OUT what computes the same as MODEL with other weights: moved by a random element of its symmetry group.

    OUT is there complete, or not at all. Nothing is downloaded, and no code of a checkpoint is run.
    """
    with reporting_errors(debug):
        from gaugekit.verbs.scramble import scramble as verb

        # The verb refuses parts that it does not know.
        parts: Any = None if only is None else list(dict.fromkeys(part.strip() for part in only.split(",")))
        with progress() as track:
            report = verb(
                model,
                out,
                seed=seed,
                only=parts,
                condition=condition,
                observable=observable,
                max_shard_size=max_shard_size,
                dtype=dtype,
                overwrite=overwrite,
                revision=revision,
                track=track,
            )
        if as_json:
            emit_json(report.to_dict())
        else:
            from gaugekit.report.moves import render_scramble

            emit_rich(render_scramble(report))
