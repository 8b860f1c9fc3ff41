"""`gaugekit merge`: one model out of several whose coordinates agree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gaugekit.cli.common import BadOption, emit_json, emit_rich, progress, reporting_errors, tell
from gaugekit.cli.options import Debug, Html, Json, MaxShardSize, Out, Overwrite, StoredDtype


def merge(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", show_default=False, help="A YAML file with the fields of mergekit.")
    ],
    out: Out,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Measure losses on a text, along the way between two models."),
    ] = None,
    points: Annotated[int, typer.Option("--points", min=3, metavar="N", help="Models on the way, ends included.")] = 11,
    export_mergekit: Annotated[
        bool,
        typer.Option(
            "--export-mergekit", help="Write aligned models and a recipe to OUT, so that mergekit does the merging."
        ),
    ] = False,
    max_shard_size: MaxShardSize = "5GB",
    dtype: StoredDtype = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe and the models, and write nothing.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Write to OUT the merge of the models of RECIPE, each first moved along its orbit to the base (or first) model.

    Methods: linear, slerp, task_arithmetic, ties, dare_linear, dare_ties. OUT is there complete, or not at all. Nothing
    is downloaded, and no code of a checkpoint is run.
    """
    with reporting_errors(debug):
        if html is not None:
            if dry_run:
                raise BadOption("--html shows what was merged, and --dry-run merges nothing: leave out one of them")
            from gaugekit.report.files import check_writable

            check_writable(html)

        from gaugekit.verbs.merge import merge as verb

        with progress() as track:
            report = verb(
                recipe,
                out,
                text=text,
                points=points,
                export_mergekit=export_mergekit,
                max_shard_size=max_shard_size,
                dtype=dtype,
                overwrite=overwrite,
                dry_run=dry_run,
                track=track,
            )
        if html is not None:
            from gaugekit.report.merge_page import write_html

            write_html(report, html)
            tell(f"wrote page {html}")
        if as_json:
            emit_json(report.to_dict())
        else:
            from gaugekit.report.merge import render

            emit_rich(render(report))
