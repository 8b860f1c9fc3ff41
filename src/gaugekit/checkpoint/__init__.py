"""Checkpoints on disk, opened lazily and written in a stream: names and shapes first, one tensor at a time after that.

Nothing here knows any model. Nothing here reaches the network, and nothing executes pickled code.
"""

from __future__ import annotations

import os

from gaugekit.checkpoint import gguf, reader
from gaugekit.checkpoint.reader import PART, Checkpoint, TensorHeader
from gaugekit.checkpoint.reference import resolve
from gaugekit.checkpoint.writer import Plan, WeightFile, plan, write

__all__ = ["PART", "Checkpoint", "Plan", "TensorHeader", "WeightFile", "open_checkpoint", "plan", "write"]


def open_checkpoint(reference: str | os.PathLike[str], revision: str | None = None) -> Checkpoint:
    """Open a checkpoint for reading. Reads headers and config only, never tensor data.

    `reference` is a directory, a `.gguf` file, a `config.json`, a weight file beside its `config.json`,
    or a hub id (`org/name`, optionally `org/name@revision`) that is already in the local Hugging Face
    cache. `revision` applies to hub ids only.

    Raises `CheckpointError` when there is nothing there, or when what is there is damaged, inconsistent,
    or would need pickled code to be executed.
    """
    path = resolve(reference, revision)
    if path.suffix == ".gguf" and not path.is_dir():
        return gguf.read_gguf(path)
    if path.name == "config.json" and not path.is_dir():
        return reader.read_config_file(path)
    return reader.read_directory(path)
