"""`gaugekit probe`: what the norms and heads of a model do to the states of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gaugekit.cli.common import check_device, emit_json, emit_rich, progress, reporting_errors, tell
from gaugekit.cli.options import Debug, Html, Json, Revision, Tokenizer

Precision = Literal["float32", "bfloat16", "float16", "float64"]  # as in the verb, see `gaugekit.cli.options`


def probe(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            # The backslash keeps rich from taking the brackets for its markup.
            help=r"A directory, a .gguf file, or a hub id (org/name\[@revision]) in the local cache.",
        ),
    ],
    text: Annotated[
        Path, typer.Option("--text", metavar="FILE", show_default=False, help="The text that the model reads.")
    ],
    tokenizer: Tokenizer = None,
    length: Annotated[int, typer.Option("--length", min=2, metavar="N", help="Tokens in a window.")] = 256,
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="Windows that run at a time.")] = 4,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=0, metavar="N", help="Where to stop reading; 0: at the end of the text.")
    ] = 32_768,
    samples: Annotated[
        int,
        typer.Option("--samples", min=1, metavar="N", help="Windows for Gram matrices and unselectable keys: slow."),
    ] = 4,
    dtype: Annotated[Precision, typer.Option("--dtype", help="Precision of the run; statistics are float64.")] = (
        "float32"
    ),
    device: Annotated[str, typer.Option("--device", help="Where torch runs the model.")] = "cpu",
    revision: Revision = None,
    as_json: Json = False,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Run a text through MODEL and measure its states at every norm and head.

    Radius and angle to the uniform direction, the direction that a norm forgets, how tanh-like it is, the rank of the
    tokens, entropy of attention, and keys that no query can select. Memory does not grow with the text. Nothing is
    downloaded, and no code of a checkpoint is run.
    """
    with reporting_errors(debug):
        if html is not None:
            from gaugekit.report.files import check_writable

            check_writable(html)
        check_device(device)

        from gaugekit.verbs.probe import probe as verb

        with progress() as track:
            report = verb(
                model,
                text,
                tokenizer=tokenizer,
                length=length,
                rows=rows,
                tokens=max_tokens or None,
                samples=samples,
                dtype=dtype,
                device=device,
                revision=revision,
                track=track,
            )
        if html is not None:
            from gaugekit.report.probe_page import write_html

            write_html(report, html)
            tell(f"wrote page {html}")
        if as_json:
            emit_json(report.to_dict())
        else:
            from gaugekit.report.probe import render

            emit_rich(render(report))
