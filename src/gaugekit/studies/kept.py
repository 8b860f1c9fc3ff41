"""Runs as they are kept, in NAME.runs.jsonl: one line each, known by all that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

import gaugekit
from gaugekit.errors import DataError
from gaugekit.studies.study import Arm, Budget, Measured

__all__ = ["Done", "Job", "append", "maker", "read"]

ASIDE = {"cli", "report"}
"""Folders of the package that no run rests on."""


@dataclass(frozen=True)
class Job:
    """One run. Its `budget` has no grid and no seeds: it does not depend on them. `maker`: of the function of that
    name."""

    study: str
    arm: Arm
    rate: float
    seed: int
    budget: Budget
    maker: Mapping[str, str]

    @property
    def key(self) -> str:
        told = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Done:
    """What one run measured; its seconds on the clock, all that it does to get there included; and how many ran at a
    time."""

    measured: Measured
    seconds: float
    jobs: int


def maker() -> dict[str, str]:
    """What makes a run: versions, and the first 12 digits of the SHA-256 of the sources of this package."""
    root, digest = Path(gaugekit.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[0] not in ASIDE:
            source = path.read_bytes()
            digest.update(f"{inside.as_posix()}\0{len(source)}\0".encode() + source)
    return {
        "gaugekit": version("gaugekit"),
        "code": digest.hexdigest()[:12],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def read(path: Path) -> dict[str, Done]:
    """The runs of a file, which may be missing, by key. A last line without its end was being written when the study
    was stopped: it is taken off.

    Raises: DataError for a file that cannot be read, or a line that is no run.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            os.truncate(path, sum(map(len, lines[:-1])))
            lines.pop()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}): move it away") from error
    done = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            done[record["key"]] = Done(dict(record["measured"]), float(record["seconds"]), int(record["jobs"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: line {number} is no run: delete it, or the file") from error
    return done


def append(path: Path, job: Job, done: Done) -> None:
    """Raises: DataError where the file cannot be written."""
    told = {"key": job.key, "arm": job.arm.key, "rate": job.rate, "seed": job.seed, "code": job.maker["code"]}
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(told | asdict(done)) + "\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}): make room, or take another folder") from error
