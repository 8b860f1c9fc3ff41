"""Checkpoints of a run, by `torch.distributed.checkpoint`: whole or not there, from and to any number of processes.

checkpoints/step-00000100/    what a run is after 100 steps
    *.distcp, .metadata       weights, optimizer, schedule, torch's random numbers
    manifest.json             steps, the fingerprint of the data, and a SHA-256 of each other file
checkpoints/.step-...         one that is being written, or was when its process was killed: nothing reads it
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gaugekit.checkpoint.staging import fsync_directory, to_disk
from gaugekit.errors import TrainingError
from gaugekit.training import distributed

__all__ = ["State", "clean", "load", "newest", "save", "steps_of"]

MANIFEST = "manifest.json"
PREFIX = "step-"
CUDA = "random numbers of cuda"


@dataclass(frozen=True, eq=False)
class State:
    """What a checkpoint holds, besides torch's random numbers: model and optimizer may be sharded."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    fingerprint: str  # of the data


def save(folder: Path, steps: int, state: State, keep: int) -> Path:
    """Write what a run is after `steps` steps, and then remove all but the `keep` newest. Called by all processes.

    It is written under another name, brought to the disk, and renamed.

    Raises: TrainingError if it cannot be written; the older ones are as they were.
    """
    out = folder / f"{PREFIX}{steps:08d}"
    partial = folder / f".{out.name}"

    def begin() -> None:
        with _reported(out, "written"):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def finish() -> None:
        with _reported(out, "written"):
            digests = {each.name: _digest(each) for each in sorted(partial.iterdir())}
            manifest = {"steps": steps, "fingerprint": state.fingerprint, "files": digests}
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            to_disk(partial)
            shutil.rmtree(out, ignore_errors=True)
            partial.rename(out)
            fsync_directory(folder)
        for old in _all(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    distributed.first(begin)
    with _reported(out, "written"):
        save_parts(_parts(state), checkpoint_id=partial, no_dist=not dist.is_initialized())
    distributed.first(finish)
    return out


def newest(folder: Path) -> Path | None:
    """The whole checkpoint of most steps."""
    found = _all(folder)
    return found[-1] if found else None


def steps_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def clean(folder: Path) -> None:
    """Remove what killed processes have left half-written."""
    for partial in folder.glob(f".{PREFIX}*"):
        shutil.rmtree(partial, ignore_errors=True)


def load(checkpoint: Path, state: State) -> int:
    """Put a checkpoint into a run as it is before its first step, sharded or not. Called by all processes.

    Returns: how many steps had been taken.

    Raises: TrainingError for a checkpoint that is damaged, or of a run on other data or of another shape.
    """
    distributed.first(lambda: _verify(checkpoint, state.fingerprint))
    parts = _parts(state)
    with _reported(checkpoint, "read"):
        if CUDA not in FileSystemReader(checkpoint).read_metadata().state_dict_metadata:
            parts.pop(CUDA, None)  # of a run that was elsewhere
        load_parts(parts, checkpoint_id=checkpoint, no_dist=not dist.is_initialized())
        set_state_dict(
            state.model, state.optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
        )
        state.scheduler.load_state_dict(parts["scheduler"])
    torch.set_rng_state(parts["random"])
    if CUDA in parts:
        torch.cuda.set_rng_state(parts[CUDA])
    return steps_of(checkpoint)


def _parts(state: State) -> dict[str, Any]:
    model, optimizer = get_state_dict(state.model, state.optimizer)
    parts = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": state.scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }
    if next(state.model.parameters()).is_cuda:
        parts[CUDA] = torch.cuda.get_rng_state()
    return parts


def _all(folder: Path) -> list[Path]:
    """Whole checkpoints, by steps."""
    found = [p for p in folder.glob(f"{PREFIX}*") if p.name.removeprefix(PREFIX).isdecimal() and p.is_dir()]
    return sorted(found, key=steps_of)


def _verify(checkpoint: Path, fingerprint: str) -> None:
    advice = "delete it to go on from the one before, if there is one"
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        damaged = [name for name, digest in manifest["files"].items() if _digest(checkpoint / name) != digest]
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(f"{checkpoint}: is damaged ({type(error).__name__}: {error}); {advice}") from error
    if damaged or manifest["steps"] != steps_of(checkpoint):
        raise TrainingError(f"{checkpoint}: is damaged ({(damaged or [MANIFEST])[0]} has changed); {advice}")
    if manifest["fingerprint"] != fingerprint:
        raise TrainingError(f"{checkpoint}: is of a run on another text; choose another folder for this one")


@contextmanager
def _reported(checkpoint: Path, what: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # torch says that it works in a single process, which was asked for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        each = next(iter(error.failures.values()))[0]
        if not isinstance(each, Exception):
            raise each from None  # Ctrl-C, which torch takes for a part that has failed
        raise TrainingError(f"{checkpoint}: cannot be {what} ({_line(each)})") from error
    except (OSError, pickle.UnpicklingError, RuntimeError, ValueError, KeyError) as error:
        raise TrainingError(f"{checkpoint}: cannot be {what} ({_line(error)})") from error


def _line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
