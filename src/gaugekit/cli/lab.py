"""`gaugekit lab`: the geometry and the symmetries, to be dragged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gaugekit.cli.common import BadOption, emit, progress, reporting_errors, tell
from gaugekit.cli.options import Debug, Tokenizer


def lab(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            show_default=False,
            help=r"A directory, a .gguf file, or a hub id (org/name\[@revision]) in the local cache, to be shown too.",
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="Also probe MODEL on this text.")] = None,
    tokenizer: Tokenizer = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            min=0,
            metavar="N",
            help="Where to stop reading FILE: 4096 take a small model about a minute; 0: at its end.",
        ),
    ] = 4096,
    compare: Annotated[
        str | None, typer.Option("--compare", metavar="OTHER", help="Also compare MODEL with this one.")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, metavar="N", help="0: any that is free.")] = 8417,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="DIR", help="Write the page as files that any web server can host, and end."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DIR if it is an earlier export.")] = False,
    debug: Debug = False,
) -> None:
    """Open a local page on which norms, frames and heads can be dragged, with the reports of MODEL if one is given.

    It is served on this machine alone, and asks for nothing from elsewhere. Ctrl-C ends it.
    """
    with reporting_errors(debug):
        if model is None and not (text is compare is None):
            raise BadOption("--text and --compare are about a model: name one")
        if tokenizer is not None and text is None:
            raise BadOption("--tokenizer is for a text: name one by --text")

        from gaugekit.lab.reports import Reports

        if export is not None:
            from gaugekit.lab.export import require_place

            require_place(export, overwrite)

        with progress() as track:
            reports = Reports()
            if model is not None:
                from gaugekit.lab.model import Reading, reports_of

                reading = None if text is None else Reading(text, max_tokens or None, tokenizer)
                reports = reports_of(model, reading=reading, other=compare, track=track)
            if export is not None:
                from gaugekit.lab.export import export as write

                reports.make_all()
                write(reports, export, overwrite=overwrite)
                emit(f"{export}\n")
                return

            from gaugekit.lab.server import listen, serve

            def started(address: str) -> None:
                tell(f"the lab is at {address} (Ctrl-C ends it)")
                if open_page:
                    import webbrowser

                    webbrowser.open(address)

            serve(reports, listen(port), started, lambda name, why: tell(f"{name} failed: {why}"))
