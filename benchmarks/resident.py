"""Resident memory of this process.

Not `ru_maxrss`: a process that was started by a larger one begins with that one's peak.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def resident(field: Literal["VmRSS", "VmHWM"]) -> int:
    """VmRSS, the resident size, or VmHWM, its peak, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SystemExit(f"memory is measured by /proc/self/status, on Linux only ({error})") from error
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
