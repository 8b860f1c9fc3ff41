"""What commands share: where output goes, how progress and errors are shown, and exit codes.

stdout carries the result and nothing else; everything a person is told meanwhile goes to stderr.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

import typer

from gaugekit.errors import GaugekitError
from gaugekit.report.text import plain
from gaugekit.strict import strict_json

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")

NOT_EQUIVALENT = 1
BAD_INPUT = 2
INTERNAL = 3
INTERRUPTED = 130
BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended
EXIT_CODES = (
    "Exit codes: 0 done, 2 bad input or usage, 3 an error inside gaugekit, 130 interrupted, "
    "141 the reader of the output went away; verify, canonicalize --verify and align: 1 not equivalent."
)


class BadOption(GaugekitError):
    """An option whose value cannot be used on this machine."""


class OutputGone(GaugekitError):
    """stdout takes no more, though it was not closed by its reader."""


def tell(message: str) -> None:
    """One line on stderr, whatever the message holds. Who has closed stderr does not want to be told."""
    with suppress(OSError):
        _write(sys.stderr, plain(message) + "\n")


def emit(text: str) -> None:
    """The result, on stdout. Raises `BrokenPipeError` if its reader went away, `OutputGone` if the disk is full."""
    try:
        _write(sys.stdout, text)
    except OSError as error:
        # Python writes what is left at exit, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputGone(f"standard output cannot be written ({error.strerror})") from error


def emit_rich(renderable: RenderableType) -> None:
    """The result as rich draws it: in colours on a terminal, plain in a pipe."""
    from rich.console import Console

    if sys.stdout is None:  # closed before Python started
        return
    # Not printed by rich, which would exit with 1 when the reader of a pipe goes away.
    drawn = _Drawn(io.BytesIO(), encoding=sys.stdout.encoding or "utf-8", errors="backslashreplace")
    Console(file=drawn, highlight=False).print(renderable)
    drawn.seek(0)
    emit("".join(line.rstrip() + "\n" for line in drawn.read().splitlines()))


def emit_json(document: dict[str, Any]) -> None:
    """The result as one strict JSON document on a line of its own."""
    emit(strict_json(document) + "\n")


class _Drawn(io.TextIOWrapper):
    """Keeps what rich draws, and answers as stdout would when it asks what it draws on."""

    def isatty(self) -> bool:
        return sys.stdout.isatty()


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


@contextmanager
def reporting_errors(debug: bool) -> Iterator[None]:
    """Turn every way to fail into one line on stderr and a documented exit code; with `debug`, a traceback first."""
    with _ctrl_c() as heard:
        try:
            yield
        except KeyboardInterrupt:
            _fail("interrupted", INTERRUPTED, debug)
        except BrokenPipeError:
            raise typer.Exit(BROKEN_PIPE) from None
        except typer.Exit:
            raise
        except Exception as error:
            if heard():
                _fail("interrupted", INTERRUPTED, debug)
            if isinstance(error, GaugekitError):
                _fail(str(error), BAD_INPUT, debug)
            hint = "" if debug else "; run again with --debug to see where"
            _fail(f"internal error: {_name(error)}{hint}", INTERNAL, debug)


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was heard meanwhile: libraries that load files in threads make other errors of it."""
    before = signal.getsignal(signal.SIGINT)
    times: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        times.append(number)
        signal.default_int_handler(number, frame)

    # Only what raises `KeyboardInterrupt` is replaced, and only the main thread may.
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: bool(times)
    finally:
        signal.signal(signal.SIGINT, before)


def _name(error: Exception) -> str:
    """What an exception says of itself in a line; torch's messages go on with a stack of C++ frames."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _fail(message: str, code: int, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    tell(f"gaugekit: {message}")
    raise typer.Exit(code)


@contextmanager
def progress() -> Iterator[Callable[[Iterable[T], int | None, str], Iterable[T]]]:
    """A verb's `track`: bars on stderr if that is a terminal, else nothing. They are gone when the block is left."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda items, total, what: items  # noqa: ARG005
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns: list[Any] = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        yield lambda items, total, what: bars.track(items, total=total, description=what)


def check_device(device: str) -> None:
    """Whether torch can compute on `device`. Raises `BadOption`."""
    if device == "cpu":
        return
    import torch

    try:
        # To read a number back is more than to name a device: "meta" has no numbers.
        torch.zeros(1, device=device).tolist()
    except Exception as error:
        raise BadOption(f"--device {device}: not usable here ({_name(error)}); use --device cpu") from error
