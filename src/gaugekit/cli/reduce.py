"""`gaugekit reduce`: heads of lower rank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gaugekit.cli.common import check_device, emit_json, emit_rich, progress, reporting_errors
from gaugekit.cli.options import Debug, Json, MaxShardSize, Model, Out, Overwrite, Revision, StoredDtype, Tokenizer

# As in the verb, see `gaugekit.cli.options`.
Form = Literal["same", "smaller"]
Precision = Literal["float32", "bfloat16", "float16", "float64"]


def reduce(
    model: Model,
    out: Out,
    vo: Annotated[
        float | None, typer.Option("--vo", metavar="SHARE", help="Share of the values' dimensions to keep, like 0.75.")
    ] = None,
    qk: Annotated[
        float | None, typer.Option("--qk", metavar="SHARE", help="Share of the queries' and keys' dimensions to keep.")
    ] = None,
    lossless: Annotated[
        bool, typer.Option("--lossless", help="Leave out what is zero, and columns of values that can be the identity.")
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Count errors as they show on this text, not over all inputs."),
    ] = None,
    form: Annotated[
        Form | None,
        typer.Option(
            "--form",
            show_default="same, or smaller with --lossless",
            help="Zeros in the same shapes, which load anywhere; or narrower values and a smaller cache, which load by "
            "gaugekit.models.reduced.",
        ),
    ] = None,
    eval_text: Annotated[
        Path | None,
        typer.Option("--eval-text", metavar="FILE", help="Then read a held-out text with MODEL and OUT, side by side."),
    ] = None,
    tokenizer: Tokenizer = None,
    length: Annotated[int, typer.Option("--length", min=2, metavar="N", help="Tokens in a window of text.")] = 512,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=0, metavar="N", help="Where to stop reading; 0: at the end of a text.")
    ] = 32_768,
    run_dtype: Annotated[Precision, typer.Option("--run-dtype", help="Precision in which texts are run.")] = "float32",
    device: Annotated[str, typer.Option("--device", help="Where torch runs the models.")] = "cpu",
    max_shard_size: MaxShardSize = "5GB",
    dtype: StoredDtype = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be kept and lost, and write nothing.")
    ] = False,
    overwrite: Overwrite = False,
    revision: Revision = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write MODEL to OUT with heads of lower rank, cut in the frame in which least is lost.

    Shares are spent over the whole model, on the dimensions that lose most. OUT is there complete, or not at all.
    Nothing is downloaded, and no code of a checkpoint is run.
    """
    with reporting_errors(debug):
        check_device(device)

        from gaugekit.verbs.reduce import reduce as verb

        with progress() as track:
            report = verb(
                model,
                out,
                vo=vo,
                qk=qk,
                lossless=lossless,
                text=text,
                form=form,
                eval_text=eval_text,
                tokenizer=tokenizer,
                length=length,
                tokens=max_tokens or None,
                run_dtype=run_dtype,
                device=device,
                max_shard_size=max_shard_size,
                dtype=dtype,
                overwrite=overwrite,
                dry_run=dry_run,
                revision=revision,
                track=track,
            )
        if as_json:
            emit_json(report.to_dict())
        else:
            from gaugekit.report.reduce import render

            emit_rich(render(report))
