"""`gaugekit train`: a small decoder, from a config to a model that `from_pretrained` loads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gaugekit.cli.common import (
    BAD_INPUT,
    INTERNAL,
    INTERRUPTED,
    BadOption,
    emit_json,
    emit_rich,
    reporting_errors,
    tell,
)
from gaugekit.cli.options import Debug, Json
from gaugekit.errors import GaugekitError

if TYPE_CHECKING:
    from gaugekit.training.config import Config
    from gaugekit.training.distributed import Member
    from gaugekit.training.steps import Step


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG.yaml SECTION.KEY=VALUE",
            show_default=False,
            help="A file, all defaults without it, and values that go over it: model.width=256 optimizer.name=muon",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", show_default=False, help="The folder of the run, new or one to go on with."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would take: parameters, tokens, memory.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a small decoder: any norm, attention, residual and optimizer that gaugekit has, on any text.

    DIR gets config.json, log.jsonl, checkpoints/, and in the end model/, for transformers' from_pretrained. The same
    command again goes on from the newest checkpoint, with the losses that it would have had. Several processes:
    torchrun --nproc-per-node N -m gaugekit.cli.main train ...
    """
    with _ended_by_torchrun(), reporting_errors(debug):
        from gaugekit.training import distributed, reading

        member = distributed.join()
        quiet = member is not None and member.rank > 0
        with _one_voice(member):
            words = list(arguments or [])
            path = Path(words.pop(0)) if words and "=" not in words[0] else None
            asked = reading.read(path, words)
            if dry_run:
                _estimate(asked, out, as_json, quiet)
            elif out is None:
                raise BadOption("--out DIR is needed: the folder of the run, new or one to go on with")
            else:
                _train(asked, out, as_json, quiet)
            if member is not None:
                member.leave()


def _estimate(config: Config, out: Path | None, as_json: bool, quiet: bool) -> None:
    from gaugekit.training.estimate import estimate

    report = estimate(config, out)
    if quiet:
        return
    if as_json:
        emit_json(report.to_dict())
    else:
        from gaugekit.report.train import render_estimate

        emit_rich(render_estimate(report))


def _train(config: Config, out: Path, as_json: bool, quiet: bool) -> None:
    from gaugekit.training.checkpoints import newest
    from gaugekit.training.runs import Run
    from gaugekit.training.train import train as run

    if quiet:
        run(config, out)
        return
    try:
        with _shown(config) as (track, watch):
            report = run(config, out, track=track, watch=watch)
    except KeyboardInterrupt:
        last = newest(Run(out).checkpoints)
        kept = f"the same command goes on from {last}" if last else "there is no checkpoint yet"
        tell(f"gaugekit: interrupted; {kept}")
        raise typer.Exit(INTERRUPTED) from None
    if report.already_finished:
        tell(f"{out}: is finished, all {report.steps} steps have been taken; nothing was done")
    if as_json:
        emit_json(report.to_dict())
    else:
        from gaugekit.report.train import render

        emit_rich(render(report))


@contextmanager
def _shown(config: Config) -> Iterator[tuple[Callable[..., Any], Callable[[Step], None]]]:
    """`track` and `watch` of a run: bars on a terminal, else a line now and then."""
    pace = _Pace(config.run.steps)
    if sys.stderr is None or not sys.stderr.isatty():
        every = 10 * config.run.log_every

        def line(step: Step) -> None:
            pace.add(step)
            if (step.index + 1) % every == 0:
                tell(f"step {step.index + 1} of {config.run.steps}: {pace}, {pace.left} left")

        yield (lambda items, total, what: items), line  # noqa: ARG005
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns: list[Any] = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        tasks: list[TaskID] = []

        def bar(step: Step) -> None:
            pace.add(step)
            if not tasks:
                tasks.append(bars.add_task("", total=config.run.steps, completed=step.index))
            bars.update(tasks[0], completed=step.index + 1, description=str(pace))

        yield (lambda items, total, what: bars.track(items, total=total, description=what)), bar


class _Pace:
    """Loss, tokens a second and time left, as they have been lately."""

    def __init__(self, total: int) -> None:
        self.total, self.loss, self.index = total, 0.0, 0
        self.seconds = self.tokens = 0.0  # of a step

    def add(self, step: Step) -> None:
        known = self.seconds > 0
        self.loss, self.index = step.loss, step.index
        self.seconds += (step.seconds - self.seconds) * (0.05 if known else 1.0)
        self.tokens = step.tokens

    @property
    def left(self) -> str:
        minutes, seconds = divmod(round(self.seconds * (self.total - self.index - 1)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}"

    def __str__(self) -> str:
        return f"loss {self.loss:.3f}, {self.tokens / self.seconds:,.0f} tokens/s"


@contextmanager
def _one_voice(member: Member | None) -> Iterator[None]:
    """Of the processes of a run that fail together one says why."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if member is None or member.speaks():
            raise
        code = BAD_INPUT if isinstance(error, GaugekitError) else INTERNAL
        raise typer.Exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else code) from error


@contextmanager
def _ended_by_torchrun() -> Iterator[None]:
    """Under torchrun, end this process here, with its exit code.

    Python's own way out stops threads of gloo where they ask for the interpreter once more, and C++ answers that with
    an abort, now and then: torchrun would take a run that has ended well for one that has failed.
    """
    code = 0
    try:
        yield
    except typer.Exit as error:
        code = error.exit_code
        if "RANK" not in os.environ:
            raise
    if "RANK" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, AttributeError):
                stream.flush()
        os._exit(code)
