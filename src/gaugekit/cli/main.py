"""`gaugekit`: the entry point."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from gaugekit.cli.align import align
from gaugekit.cli.canonicalize import canonicalize
from gaugekit.cli.common import BAD_INPUT, EXIT_CODES, emit, tell
from gaugekit.cli.compare import compare
from gaugekit.cli.fingerprint import fingerprint
from gaugekit.cli.inspect import inspect
from gaugekit.cli.lab import lab
from gaugekit.cli.merge import merge
from gaugekit.cli.probe import probe
from gaugekit.cli.reduce import reduce
from gaugekit.cli.scramble import scramble
from gaugekit.cli.study import app as study
from gaugekit.cli.train import train
from gaugekit.cli.verify import verify

app = typer.Typer(
    name="gaugekit",
    help="Find, measure and remove the redundancy of transformers.",
    epilog=EXIT_CODES,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (inspect, scramble, verify, canonicalize, compare, fingerprint, align, merge, reduce, probe, train, lab):
    app.command(epilog=EXIT_CODES)(command)
app.add_typer(study, name="study")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        emit(f"gaugekit {version('gaugekit')}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. `arguments` are those after the program's name."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        # Standalone, typer would frame its messages and choose exit codes of its own.
        code = get_command(app).main(given, prog_name="gaugekit", standalone_mode=False)
    except typer.TyperException as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        tell(f"gaugekit: {message} (see gaugekit --help)")
        return BAD_INPUT
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
