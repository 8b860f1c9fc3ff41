"""`gaugekit study`: claims of papers, put to the test."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gaugekit.cli.common import EXIT_CODES, BadOption, emit_json, emit_rich, progress, reporting_errors, tell
from gaugekit.cli.options import Debug, Json

if TYPE_CHECKING:
    from gaugekit.studies.study import Study

app = typer.Typer(
    help="Test claims of papers: each study is a question, arms on equal terms, and a verdict.",
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("list", epilog=EXIT_CODES)
def list_(as_json: Json = False, debug: Debug = False) -> None:
    """The studies there are: the claim, the arms, and how many runs it takes."""
    with reporting_errors(debug):
        found = chosen(["all"])
        if as_json:
            emit_json({"studies": [described(study) for study in found]})
        else:
            from gaugekit.report.study import render_list

            emit_rich(render_list(found))


@app.command(epilog=EXIT_CODES)
def run(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", show_default=False, help="Names of studies, or all.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="A run of seconds that shows that it works, and says nothing.")
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where results go; runs that are there are not made again.")
    ] = Path("out/studies"),
    jobs: Annotated[int, typer.Option("--jobs", min=1, metavar="N", help="Runs at a time, of one thread each.")] = 1,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run studies: NAME.json and NAME.svg go to DIR, tables and the verdict to stdout.

    Every arm tries every learning rate of the grid, and then runs at its best one for every seed. A study that was
    stopped goes on where it was, with those runs in NAME.runs.jsonl that the same code has made.
    """
    with reporting_errors(debug):
        found = chosen(names)

        from gaugekit.studies.files import check_drawing, read, write
        from gaugekit.studies.running import run as runs

        check_drawing()
        prepared(out)
        documents: list[dict[str, Any]] = []
        for study in found:
            with progress() as track:
                result = runs(study, quick=quick, out=out, jobs=jobs, track=track)
            paths = write(study, result, out)
            result = read(paths[0])
            conclusion = study.conclude(result)
            for path in paths:
                tell(f"wrote {path}")
            if as_json:
                documents.append({**result.to_dict(), "conclusion": asdict(conclusion)})
            else:
                from gaugekit.report.study import render

                emit_rich(render(study, result, conclusion))
        if as_json:
            emit_json({"studies": documents})


def chosen(names: list[str]) -> list[Study]:
    """Raises `ConfigError` for a name that is none."""
    from gaugekit.studies.catalog import NAMES, study

    wanted = [each for name in names for each in (NAMES if name == "all" else [name])]
    return [study(name) for name in dict.fromkeys(wanted)]


def prepared(out: Path) -> None:
    """The folder is there, and takes files. Raises `BadOption`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadOption(f"--out {out}: cannot be made ({error.strerror}); choose another folder") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise BadOption(f"--out {out}: cannot be written to; choose another folder")


def described(study: Study) -> dict[str, Any]:
    full = study.full
    return {
        "name": study.name,
        "title": study.title,
        "question": study.question,
        "source": study.source,
        "arms": [arm.key for arm in study.arms],
        "rates": list(full.rates),
        "tuning": list(full.tuning) if full.rates else [],
        "seeds": list(full.seeds),
        "runs": full.runs * len(study.arms),
    }
