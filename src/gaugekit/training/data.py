"""The data of a training run: a text as token files that are read where they lie, and the batches of a step.

A folder of token files holds

train.bin, held_out.bin                      token ids, uint16, or uint32 where the vocabulary wants it, little endian
tokenizer.json, tokenizer_config.json        for `transformers.AutoTokenizer`
meta.json                                    how many tokens, of what, and the fingerprint of text and config

Shapes: tokens (n,); inputs and targets (batch, context), targets are inputs one token later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaugekit.checkpoint.staging import reported, staged
from gaugekit.errors import DataError
from gaugekit.training.config import DataConfig
from gaugekit.training.sources import PIECE, content_hash, pieces, texts
from gaugekit.training.tokenizers import Tokenizer, byte_tokenizer, open_tokenizer, train_bpe
from gaugekit.verbs.inspect import Track, untracked

__all__ = ["TokenData", "Windows", "evaluation", "prepare"]

FORMAT = 1  # of the folder: another one is made again
META = "meta.json"
SHARES = {"train": "train.bin", "held_out": "held_out.bin"}
FILES = {*SHARES.values(), "tokenizer.json", "tokenizer_config.json", META}


@dataclass(frozen=True, eq=False)
class TokenData:
    """Tokens of a text, in its order; both arrays (n,) are memory-mapped and cannot be written."""

    source: str
    train: np.ndarray
    held_out: np.ndarray
    vocab: int  # of the tokenizer: ids are below it
    tokenizer: Tokenizer
    fingerprint: str  # hexadecimal; of the text and of what the config says of it

    def check(self, context: int) -> None:
        """Raises `DataError` unless both shares have a window of `context` tokens and its targets."""
        for name, tokens in (("training", self.train), ("held-out", self.held_out)):
            _check_length(tokens, context, f"{self.source}: the {name} share")


def prepare(config: DataConfig, folder: Path, track: Track[Any] = untracked) -> TokenData:
    """The token files in `folder`, made if they are not there.

    The last share `held_out` of the characters is for evaluation; a BPE tokenizer sees the rest only. Whether files fit
    is asked of a SHA-256 of the whole text, which takes 1 second for 1 or 2 GB. Those of another text or config are
    made again, and so are damaged ones (a size or JSON that is wrong; ids are not looked at): beside, then renamed, so
    that none is ever half-written. No more than a few pieces of the text are in memory. Of several processes that share
    a folder, one goes first.

    Raises:
        ConfigError: a share or a vocabulary out of range.
        DataError: as `gaugekit.training.sources.texts`; a text that is empty or too short to be divided, or a folder
            with other files in it.
        CheckpointError: the folder cannot be written.
    """
    config.check()
    folder = folder.expanduser().resolve()
    fingerprint = _fingerprint(config)
    found = _opened(config, folder, fingerprint)
    if found is not None:
        return found
    if folder.exists():
        _check_ours(folder)

    characters = sum(len(part) for part in track(texts(config), None, "reading"))
    if not characters:
        raise DataError(f"{config.source}: is empty")
    middle = characters - round(config.held_out * characters)
    ends = {"train": (0, middle), "held_out": (middle, characters)}
    tokenizer = byte_tokenizer()
    if config.tokenizer == "bpe":
        tokenizer = train_bpe(track(pieces(texts(config), 0, middle), middle // PIECE + 1, "learning"), config.vocab)
    dtype = np.dtype("<u2" if tokenizer.vocab <= 1 << 16 else "<u4")
    with reported(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with staged(folder, replace=True) as partial, reported(folder):
        counts = {}
        for share, name in SHARES.items():
            start, stop = ends[share]
            parts = track(pieces(texts(config), start, stop), (stop - start) // PIECE + 1, f"encoding {share}")
            counts[share] = _write(partial / name, tokenizer.arrays(parts), dtype)
            if counts[share] < 2:
                raise DataError(f"{config.source}: its {share} share has fewer than 2 tokens: take a longer text")
        tokenizer.save(partial)
        meta = {
            "format": FORMAT,
            "source": config.source,
            "tokenizer": config.tokenizer,
            "vocab": tokenizer.vocab,
            "dtype": dtype.name,
            "characters": characters,
            **counts,
            "fingerprint": fingerprint,
        }
        (partial / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    found = _opened(config, folder, fingerprint)
    assert found is not None
    return found


@dataclass(frozen=True, eq=False)
class Windows:
    """The batches of a run: windows that start anywhere in the tokens, drawn with repetition.

    Those of a step depend on seed and step alone, so a run that goes on at a step needs no other state. The draw is of
    numpy's Philox numbers, which are promised to stay the same in later releases.
    """

    tokens: np.ndarray
    context: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        _check_length(self.tokens, self.context, "the text")

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (batch, context), int64."""
        numbers = np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(step,))).random_raw(self.batch)
        starts = numbers % np.uint64(len(self.tokens) - self.context)  # even, to n / 2⁶⁴
        return _windows(self.tokens, starts.astype(np.int64), self.context)


def evaluation(tokens: np.ndarray, context: int, batch: int, batches: int) -> list[tuple[Tensor, Tensor]]:
    """`batches` pairs of inputs and targets (batch, context), int64: always the same windows, at even distances.

    The first window is at the start and the last at the end. They overlap only if the tokens are fewer than
    batches · batch · context + 1. DataError: fewer tokens than a window and its targets.
    """
    _check_length(tokens, context, "the text")
    count = batch * batches
    starts = np.arange(count) * (len(tokens) - 1 - context) // max(count - 1, 1)
    return [_windows(tokens, each, context) for each in starts.reshape(batches, batch)]


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    found = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def _check_length(tokens: np.ndarray, context: int, what: str) -> None:
    if len(tokens) < context + 1:
        raise DataError(
            f"{what} has {len(tokens)} tokens, and a window of {context} needs {context + 1}: take a longer text or a "
            "smaller model.context"
        )


def _fingerprint(config: DataConfig) -> str:
    said: dict[str, Any] = {"format": FORMAT, "tokenizer": config.tokenizer, "held_out": config.held_out}
    if config.tokenizer == "bpe":
        said["vocab"] = config.vocab
    if config.source != "pydoc" and Path(config.source).expanduser().is_dir():
        said["column"] = config.column
    return hashlib.sha256(content_hash(config) + json.dumps(said, sort_keys=True).encode()).hexdigest()


def _write(path: Path, arrays: Iterable[np.ndarray], dtype: np.dtype) -> int:
    count = 0
    with path.open("wb") as file:
        for ids in arrays:
            file.write(ids.astype(dtype).tobytes())
            count += len(ids)
    return count


def _opened(config: DataConfig, folder: Path, fingerprint: str) -> TokenData | None:
    """None if the folder has no whole token files of this fingerprint."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if meta["fingerprint"] != fingerprint:
            return None
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        shares = {}
        for share, name in SHARES.items():
            shares[share] = np.asarray(np.memmap(folder / name, dtype=dtype, mode="r"))
            if len(shares[share]) != meta[share]:
                return None
        tokenizer = open_tokenizer(folder, bytewise=meta["tokenizer"] == "byte")
        if tokenizer.vocab != meta["vocab"]:
            return None
    # A file that is missing, or holds what it should not; a damaged tokenizer.json raises a bare Exception.
    except Exception:
        return None
    return TokenData(config.source, vocab=tokenizer.vocab, tokenizer=tokenizer, fingerprint=fingerprint, **shares)


def _check_ours(folder: Path) -> None:
    """Only token files are replaced: the folder is moved away as a whole."""
    if not folder.is_dir():
        raise DataError(f"{folder}: is no directory; name another folder for token files")
    other = sorted(each.name for each in folder.iterdir() if each.name not in FILES)
    if other:
        raise DataError(f"{folder}: holds {other[0]}, which is no token file; name an empty or a new folder")
