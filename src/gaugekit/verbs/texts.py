"""Text of any length, as batches of tokens that fit a model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugekit.checkpoint import Checkpoint
from gaugekit.checkpoint.staging import reported
from gaugekit.errors import CheckpointError, UnsupportedArchitecture
from gaugekit.models import Spec, quiet
from gaugekit.models.spec import Table

PIECE = 1 << 16  # characters read at a time


def open_tokenizer(checkpoint: Checkpoint, path: Path | None = None) -> Any:
    """The checkpoint's own tokenizer, or that of another directory, a tokenizer.json or a GGUF file."""
    import transformers

    at = checkpoint.path if path is None else path
    with reported(at, "opened"):
        if not at.exists():
            raise CheckpointError(f"{at} does not exist: a tokenizer is a directory, a tokenizer.json or a .gguf file")
    with quiet():
        try:
            if at.suffix == ".json":
                return transformers.PreTrainedTokenizerFast(tokenizer_file=str(at))
            if at.suffix == ".gguf":
                return transformers.AutoTokenizer.from_pretrained(at.parent, gguf_file=at.name)
            return transformers.AutoTokenizer.from_pretrained(at, local_files_only=True)
        # A tokenizer.json that is none raises a bare Exception.
        except Exception as error:
            line = " ".join(str(error).split())
            raise CheckpointError(f"{at} has no tokenizer that transformers can load: {line}") from error


def batches(tokenizer: Any, text: Path, length: int, rows: int) -> Iterator[Tensor]:
    """Token ids (≤ rows, length) of a text from its start, with what the tokenizer puts around a text in every row.

    The file is read piece by piece. A rest shorter than a row is left out, but where it is all there is.
    """
    before, after = _around(tokenizer, text)
    room = length - len(before) - len(after)
    if room < 1:
        raise CheckpointError(f"rows of {length} tokens have no room for text: ask for longer ones")
    pending: list[int] = []
    whole: list[list[int]] = []
    shorter = True
    for piece in _pieces(text):
        pending += _tokens(tokenizer, piece, text, around=False)
        while len(pending) >= room:
            whole.append(before + pending[:room] + after)
            del pending[:room]
            shorter = False
            if len(whole) == rows:
                yield torch.tensor(whole)
                whole = []
    if whole:
        yield torch.tensor(whole)
    if shorter:
        if len(pending) < 2:
            found = "1 token" if pending else "no tokens"
            raise CheckpointError(f"{text} is too short: it has {found}")
        yield torch.tensor([before + pending + after])


def windows(
    checkpoint: Checkpoint, spec: Spec, text: Path, length: int, rows: int, tokenizer: Path | None = None
) -> Iterator[Tensor]:
    """Token ids (≤ rows, ≤ length) of a text from its start, by the checkpoint's own tokenizer or another, no longer
    than the positions of the model's main stream go. No weights are read.

    Raises:
        UnsupportedArchitecture: a model that reads no text.
        CheckpointError: a text that cannot be read or is too short, a tokenizer that is missing or another model's.
    """
    known = next((table.rows.shape[0] for table in spec.main.tables if table.name == "tokens"), None)
    if known is None:
        raise UnsupportedArchitecture(f"{spec.family} reads no text: give a model of text")
    length = min([length, *(table.rows.shape[0] - len(table.dead_rows) for table in position_tables(spec))])
    for ids in batches(open_tokenizer(checkpoint, tokenizer), text, length, rows):
        if (largest := int(ids.max())) >= known:
            raise CheckpointError(
                f"{tokenizer or checkpoint.path}: its tokenizer gives token {largest}, and the model has {known} of "
                "them: it belongs to another model; give the model its own"
            )
        yield ids


def text_batches(
    checkpoint: Checkpoint,
    spec: Spec,
    text: Path,
    length: int,
    rows: int,
    tokens: int | None,
    tokenizer: Path | None = None,
) -> tuple[Tensor, ...]:
    """The first `tokens` or so of a text (None: all of it) in `windows`, for a model of nothing but text."""
    if len(spec.streams) > 1:
        raise UnsupportedArchitecture(f"{spec.family} reads more than text, and cannot be run on text alone")
    found = windows(checkpoint, spec, text, length, rows, tokenizer)
    first = next(found)
    most = None if tokens is None else max(1, tokens // first.numel()) - 1
    return (first, *islice(found, most))


def position_tables(spec: Spec) -> list[Table]:
    """The tables of the main stream that limit the length of a text."""
    return [table for table in spec.main.tables if table.name == "positions"]


def _around(tokenizer: Any, text: Path) -> tuple[list[int], list[int]]:
    """The special tokens before and behind a text."""
    word, whole = (_tokens(tokenizer, "a", text, around) for around in (False, True))
    starts = (i for i in range(len(whole) - len(word) + 1) if whole[i : i + len(word)] == word)
    start = next(starts, None)
    if start is None:
        raise CheckpointError("the tokenizer changes a text when it puts special tokens around it: name another one")
    return whole[:start], whole[start + len(word) :]


def _tokens(tokenizer: Any, piece: str, text: Path, around: bool) -> list[int]:
    """Token ids of a piece of a text, with special tokens `around` it or without."""
    with quiet():  # it would warn of texts longer than the model's longest
        try:
            return tokenizer(piece, add_special_tokens=around)["input_ids"]
        # One that knows no token for unknown words raises a bare Exception.
        except Exception as error:
            line = " ".join(str(error).split())
            raise CheckpointError(f"{text}: the tokenizer cannot read it ({line}); name another one") from error


def _pieces(text: Path) -> Iterator[str]:
    """The text without its byte order mark, cut between lines, or before a space where a line is longer than that."""
    kept = ""
    try:
        with text.open(encoding="utf-8-sig") as file:
            while piece := file.read(PIECE):
                end = piece.rfind("\n") + 1 or max(piece.rfind(" "), 0) or len(piece)
                yield kept + piece[:end]
                kept = piece[end:]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{text}: cannot be read as text ({error})") from error
    if kept:
        yield kept
