"""The folder of a run: what lies in it, whether a config goes on with it, and its log.

config.json           the config, all of it
data/                 token files, unless they are elsewhere
log.jsonl             a record a line: {"step": ..., "loss": ...} or {"step": ..., "held_out": ...}
checkpoints/          see `gaugekit.training.checkpoints`
model/                the trained model, for `from_pretrained`
report.json           what came out: written last
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from gaugekit.checkpoint.staging import reported
from gaugekit.errors import ConfigError, TrainingError
from gaugekit.training import checkpoints
from gaugekit.training.config import Config
from gaugekit.training.reading import from_dict

__all__ = ["Log", "Run"]

FREE = {
    *("run.log_every", "run.evaluate_every", "run.evaluation_batches", "run.save_every", "run.keep"),
    *("run.tracker", "run.project", "data.cache"),
    "data.source",  # what it holds must be the same, which checkpoints know
    *("run.accumulation", "run.compile", "run.device"),  # these change results by rounding only
}
"""Keys that may differ from one part of a run to the next."""


@dataclass(frozen=True)
class Run:
    """The paths of a run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    def agreed(self, config: Config) -> Config:
        """The config, its vocabulary set where the run has one. Once there is a checkpoint it may differ from the run's
        own only in keys that do not change what is computed but by rounding, or ask for more steps where the learning
        rate is constant.

        Raises:
            ConfigError: another config, by the keys that differ.
            TrainingError: a folder that holds other things than a run.
        """
        document = _read(self.config)
        if document is None:
            if self.path.exists() and not self.path.is_dir():
                raise TrainingError(f"{self.path}: is no directory; choose another one")
            with reported(self.path, "read"):
                other = sorted(p.name for p in self.path.iterdir() if not self._begun(p)) if self.path.exists() else []
            if other:
                raise TrainingError(f"{self.path}: holds {other[0]} and is no run; choose an empty or a new folder")
            return config
        before = from_dict(Config, document, str(self.config))
        if checkpoints.newest(self.checkpoints) is None:
            return config  # there is nothing to go on from
        if not config.model.vocab:
            config = replace(config, model=replace(config.model, vocab=before.model.vocab))
        differ = []
        old, new = _flat(before.to_dict()), _flat(config.to_dict())
        for key in sorted(new.keys() | old.keys()):
            if key in FREE or old.get(key) == new.get(key):
                continue
            more = key == "run.steps" and config.run.steps > before.run.steps
            if not (more and config.schedule.name == "constant"):
                differ.append(f"{key}={new.get(key)} (was {old.get(key)})")
        if differ:
            raise ConfigError(
                f"{self.path}: is a run of another config: {', '.join(differ)}; take the old values, or another folder"
            )
        return config

    def _begun(self, path: Path) -> bool:
        """Whether a run that was ended before it had a config may have left this. What is being made is hidden."""
        return path == self.data or path.name.startswith(".") or (path == self.log and not path.stat().st_size)

    def write_config(self, config: Config) -> None:
        write(self.config, config.to_dict())

    def finished(self, config: Config) -> dict[str, Any] | None:
        """The report of a run that has taken all its steps; None while it has not."""
        report = _read(self.report)
        whole = self.model.is_dir() and checkpoints.newest(self.checkpoints) is not None
        return report if whole and report and report.get("steps") == config.run.steps else None

    def records(self) -> Iterator[dict[str, Any]]:
        """The log."""
        with self.log.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


class Log:
    """The log of a run, to which records are added. It is held by one process at a time.

    Args:
        path: of the file, which is made if it is not there.
        step: records of later steps are taken away: they are of a part of the run that is run again.

    Raises: TrainingError if another process holds it; CheckpointError, from the methods, if it cannot be written.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.file: IO[bytes] = path.open("a+b")
        try:
            _lock(self.file, path)
            # Records are in the order of steps, so what stays is what the file begins with.
            self.file.seek(0)
            self.file.truncate(sum(map(len, _until(self.file.readlines(), step))))
        except BaseException:
            self.file.close()
            raise

    def write(self, record: dict[str, Any]) -> None:
        with reported(self.path):
            self.file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
            self.file.flush()

    def sync(self) -> None:
        """What was written survives a power cut."""
        with reported(self.path):
            os.fsync(self.file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.file.close()


def write(path: Path, document: dict[str, Any]) -> None:
    """JSON, whole or not at all. Raises `CheckpointError` if it cannot be written."""
    beside = path.with_name(f".{path.name}")
    with reported(path):
        with beside.open("w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path}: cannot be read ({error}); delete the folder, or choose another one") from error
    if not isinstance(document, dict):
        raise TrainingError(f"{path}: is no JSON object; delete the folder, or choose another one")
    return document


def _until(lines: list[bytes], step: int) -> Iterator[bytes]:
    for line in lines:
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                return
        except (ValueError, KeyError, TypeError):
            return
        yield line


def _lock(file: IO[bytes], path: Path) -> None:
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TrainingError(f"{path.parent}: another process is training here; wait for it, or end it") from error


def _flat(document: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in document.items() for key, value in keys.items()}
