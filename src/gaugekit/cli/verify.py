"""`gaugekit verify`: whether two checkpoints compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gaugekit.cli.common import NOT_EQUIVALENT, BadOption, emit_json, emit_rich, reporting_errors
from gaugekit.cli.options import Debug, First, Json, Observable, Second

Precision = Literal["auto", "float64", "float32"]  # as in the verb, see `gaugekit.cli.options`


def verify(
    first: First,
    second: Second,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="Run both on the start of this text, too.")
    ] = None,
    observable: Observable = None,
    dtype: Annotated[
        Precision, typer.Option("--dtype", help="Precision of the runs; auto: float64 up to two billion parameters.")
    ] = "auto",
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="X",
            show_default="4 times the effect of rounding",
            help="Largest difference of the observable at which two models are equivalent.",
        ),
    ] = None,
    length: Annotated[int, typer.Option("--length", min=2, metavar="N", help="Tokens in a row.")] = 64,
    rows: Annotated[int, typer.Option("--rows", min=1, metavar="N", help="Rows of tokens, or images.")] = 4,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Of the random inputs.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run A and B on the same inputs and tell how far apart their outputs are: exit code 0 if equivalent, 1 if not.

    One model is in memory at a time. Nothing is downloaded, and no code of a checkpoint is run.
    """
    with reporting_errors(debug):
        if tolerance is not None and not tolerance >= 0:
            raise BadOption(f"--tolerance {tolerance}: is no size of a difference; give a number from 0")

        from gaugekit.verbs.verify import verify as verb

        report = verb(
            first,
            second,
            text=text,
            observable=observable,
            dtype=dtype,
            tolerance=tolerance,
            length=length,
            rows=rows,
            seed=seed,
        )
        if as_json:
            emit_json(report.to_dict())
        else:
            from gaugekit.report.verify import render

            emit_rich(render(report))
        if not report.equivalent:
            raise typer.Exit(NOT_EQUIVALENT)
