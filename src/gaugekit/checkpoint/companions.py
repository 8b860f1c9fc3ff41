"""The files of a checkpoint that are not its weights: which ones follow it elsewhere, and what changes in them.

Weights in any other form (for another framework, exported, beside the ones that were opened) are left behind:
they hold the old values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaugekit.checkpoint.staging import reported
from gaugekit.errors import CheckpointError

# The two forms in which a further part of a sentence-transformers pipeline may keep weights of its own.
_OWN_WEIGHTS = (".safetensors", ".bin")
_WEIGHTS = (
    *_OWN_WEIGHTS,
    *(".h5", ".msgpack", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".onnx_data", ".onnx.data", ".ot", ".npz"),
    *(".tflite", ".mlmodel", ".pdparams"),
)
_INDEX = ".index.json"

# A version history, and the hub's notes on where each file was downloaded from, are about the directory they are in.
_BOOKKEEPING = (".git", ".cache")

_FRONT_MATTER = re.compile(rb"---[ \t]*\r?\n(?:.*?\n)??---[ \t]*(?:\r?\n|\Z)", re.DOTALL)

_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class Companions:
    """Paths relative to the directory, `/` between folders, sorted; `nbytes` is the size of those that are copied."""

    copied: tuple[str, ...]
    left_out: tuple[str, ...]
    nbytes: int


def companions(directory: Path) -> Companions:
    """List the files beside the weights, those in folders included. Links count as what they point to.

    Raises `CheckpointError` for what cannot be read, and for a link that leads back to a folder it lies in.
    """
    copied: dict[str, int] = {}
    left_out: list[str] = []
    modules = _modules(directory)

    def visit(folder: Path, prefix: str, above: frozenset[Path]) -> None:
        here = folder.resolve()
        if here in above:
            raise CheckpointError(f"{folder}: is a link to a folder it lies in; remove it")
        for path in folder.iterdir():
            name = prefix + path.name
            if path.is_dir():
                if path.name in _BOOKKEEPING:
                    left_out.append(f"{name}/")
                else:
                    visit(path, f"{name}/", above | {here})
                continue
            with reported(path, "read"):
                size = path.stat().st_size
            if path.is_file() and not _holds_weights(name, modules):
                copied[name] = size
            else:
                left_out.append(name)

    with reported(directory, "read"):
        visit(directory, "", frozenset())
    return Companions(tuple(sorted(copied)), tuple(sorted(left_out)), sum(copied.values()))


def _holds_weights(name: str, modules: frozenset[str]) -> bool:
    base = name.lower().removesuffix(_INDEX)
    if any(name.startswith(f"{module}/") for module in modules) and base.endswith(_OWN_WEIGHTS):
        return False
    return base.endswith(_WEIGHTS)


def _modules(directory: Path) -> frozenset[str]:
    """Folders of the further parts of a sentence-transformers pipeline: a dense layer there is no copy of the model."""
    try:
        listed = json.loads((directory / "modules.json").read_bytes())
    except (OSError, ValueError):
        return frozenset()
    paths = [item.get("path") for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    return frozenset(path for path in paths if isinstance(path, str) and path)


def changed_config(text: bytes, changes: Mapping[str, Any], dtype: str | None) -> bytes:
    """The config.json `text` with some keys changed or added; the order of all others stays.

    `dtype` is put wherever a dtype is given, in nested configs too, and nowhere else.
    """
    config = json.loads(text)
    if dtype is not None:
        _set_dtype(config, dtype)
    config.update(changes)
    result = json.dumps(config, indent=2, ensure_ascii=text.isascii())
    return result.encode() + (b"\n" if text.endswith(b"\n") else b"")


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    for key, value in config.items():
        if key in _DTYPE_KEYS and isinstance(value, str) and value != "auto":
            config[key] = dtype
        # Elsewhere (quantization_config) a dtype is not that of the tensors on disk.
        elif isinstance(value, dict) and key.endswith("_config") and key != "quantization_config":
            _set_dtype(value, dtype)


def with_card(card: str, original: bytes) -> bytes:
    """`card`, then the original README. Front matter counts only at the very top, so the original's stays there."""
    front = _FRONT_MATTER.match(original)
    top = front[0] if front else b""
    below = original[len(top) :].lstrip(b"\r\n")
    parts = [top.strip(), card.strip().encode(), below]
    text = b"\n\n".join(part for part in parts if part)
    return text if text.endswith(b"\n") else text + b"\n"
