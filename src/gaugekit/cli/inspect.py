"""`gaugekit inspect`: the census of a checkpoint's symmetries, and the invariants of its heads."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from gaugekit.cli.common import check_device, emit_json, emit_rich, progress, reporting_errors, tell
from gaugekit.cli.options import Debug, Html, Json, Observable, Revision

Precision = Literal["stored", "float64", "float32", "bfloat16", "float16"]  # as in the verb, see `gaugekit.cli.options`


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            # The backslash keeps rich from taking the brackets for its markup.
            help=r"A directory, a .gguf file, a config.json, or a hub id (org/name\[@revision]) in the local cache.",
        ),
    ],
    as_json: Json = False,
    html: Html = None,
    no_spectra: Annotated[
        bool, typer.Option("--no-spectra", help="Read headers only: the census, without spectra and norms.")
    ] = False,
    observable: Observable = None,
    device: Annotated[str, typer.Option("--device", help="Where torch computes the spectra.")] = "cpu",
    dtype: Annotated[Precision, typer.Option("--dtype", help="Round the weights to this precision first.")] = "stored",
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """What can be done to the weights of MODEL without changing what it computes, and what no such change can alter.

    The tables go to stdout; progress and messages to stderr. Nothing is downloaded, and no code of a checkpoint is run.
    """
    with reporting_errors(debug):
        if html is not None:
            from gaugekit.report.files import check_writable

            check_writable(html)
        check_device(device)

        from gaugekit.verbs.inspect import inspect as verb

        with progress() as track:
            report = verb(
                model,
                observable=observable,
                spectra=not no_spectra,
                device=device,
                dtype=dtype,
                revision=revision,
                track=track,
            )
        if html is not None:
            from gaugekit.report.html import write_html

            write_html(report, html)
            tell(f"wrote page {html}")
        if as_json:
            emit_json(report.to_dict())
        else:
            from gaugekit.report.terminal import render

            emit_rich(render(report))
