"""Peak memory of a script in a process of its own."""

from __future__ import annotations

import subprocess
import sys

# Not `ru_maxrss`: a process that was started by a larger one begins with that one's peak.
PEAK = """
import sys
def peak():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
"""


def run(script: str, *arguments: str) -> list[int]:
    """Numbers that a script prints, which may call `peak()` for the largest resident size so far, in bytes."""
    command = [sys.executable, "-c", PEAK + script, *arguments]
    return [int(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]
