"""What tests of several commands do: read a document, see what `--help` takes along, and stop a command on its way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def strict(text: str) -> dict[str, Any]:
    """One JSON document and a newline, without NaN."""
    assert text.endswith("}\n") and text.count("\n") == 1
    return json.loads(text, parse_constant=pytest.fail)


def heavy_for_help(command: str) -> str:
    """Packages, if any, that `gaugekit COMMAND --help` has imported and should not wait for."""
    code = (
        f"import sys; from gaugekit.cli.main import main; main([{command!r}, '--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'plotly', 'jinja2', 'yaml', 'starlette'} & set(sys.modules)\n"
        "print(*heavy, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.endswith("\n")
    return ran.stderr.removesuffix("\n")


SLOW = """
import sys, time
import {module} as place
from gaugekit.cli.main import main

before = place.{name}

def slow(*arguments, **options):
    before(*arguments, **options)
    print("under way", flush=True)
    time.sleep(60)

place.{name} = slow
sys.exit(main(sys.argv[1:]))
"""


class Stopped:
    """A command that rests once a function of a module is done, which this waits for; then it can be sent a signal."""

    def __init__(self, module: str, name: str, *arguments: str | Path) -> None:
        command = [sys.executable, "-c", SLOW.format(module=module, name=name), *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "under way\n"

    def by(self, number: signal.Signals) -> tuple[int, str]:
        """Exit code, and what stands on stderr."""
        self._process.send_signal(number)
        _, err = self._process.communicate(timeout=60)
        return self._process.returncode, err
