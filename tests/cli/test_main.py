"""The program itself: help, version, start-up, pipes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from commands import heavy_for_help

from gaugekit.cli.common import BROKEN_PIPE, emit, progress

PROGRAM = [sys.executable, "-m", "gaugekit.cli.main"]
# As most people run it: with output that Python keeps until it is flushed, at exit at the latest.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def test_version(run: Callable[..., Any]) -> None:
    assert run("--version") == (0, f"gaugekit {version('gaugekit')}\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["inspect", "--help"]])
def test_help_tells_the_exit_codes(run: Callable[..., Any], arguments: list[str]) -> None:
    result = run(*arguments)
    assert (result.code, result.err) == (0, "")
    assert "Exit codes: 0 done, 2 bad input or usage, 3 an error inside gaugekit, 130" in result.out


def test_help_names_every_option(run: Callable[..., Any]) -> None:
    text = run("inspect", "--help").out
    for option in ("--json", "--html", "--no-spectra", "--observable", "--device", "--dtype", "--revision", "--debug"):
        assert option in text
    assert "[@revision]" in text


def test_help_does_not_wait_for_torch() -> None:
    assert heavy_for_help("inspect") == ""


def test_stdout_and_stderr_are_apart(checkpoint: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ran = subprocess.run(
        [*PROGRAM, "inspect", checkpoint, "--json", "--html", page], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, f"wrote page {page}\n")
    assert json.loads(ran.stdout, parse_constant=pytest.fail)["model"]["family"] == "llama"


def test_a_reader_that_goes_away(checkpoint: Path) -> None:
    program = subprocess.Popen(
        [*PROGRAM, "inspect", checkpoint, "--no-spectra"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=BUFFERED,
    )
    assert program.stdout is not None
    program.stdout.close()
    _, err = program.communicate()
    assert (program.returncode, err) == (BROKEN_PIPE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full to stand for a full disk")
def test_a_full_disk(checkpoint: Path) -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [*PROGRAM, "inspect", checkpoint, "--no-spectra"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=BUFFERED,
            check=False,
        )
    assert ran.returncode == 2
    assert ran.stderr == b"gaugekit: standard output cannot be written (No space left on device)\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stderr, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress() as track:
            assert list(track(range(3), 3, "[red]spectra")) == [0, 1, 2]
        assert ("[red]spectra" in stderr.getvalue()) == shown


def test_what_the_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    emit("… ü\n")
    assert raw.getvalue() == b"\\u2026 \\xfc\n"
