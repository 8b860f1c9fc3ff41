"""The tokenizers of training: bytes, and byte-level BPE trained on the text. Both give back any text exactly.

Neither has special tokens: no beginning, no end, none for unknown words, of which bytes have none. The bytes are those
of UTF-8. BPE: Sennrich, Haddow and Birch, arXiv 1508.07909, on bytes and within words as GPT-2 does it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

__all__ = ["Tokenizer", "byte_tokenizer", "open_tokenizer", "train_bpe"]

GROUP = 16  # pieces that the library may encode side by side

# What `transformers.AutoTokenizer` has to know besides tokenizer.json, in releases 4 and 5. The older one would
# otherwise take away spaces before punctuation.
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back: `decode(encode(text)) == text` for every text that UTF-8 can write."""

    model: tokenizers.Tokenizer
    bytewise: bool = False  # ids are byte values

    @property
    def vocab(self) -> int:
        return self.model.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return list(text.encode()) if self.bytewise else self.model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are no UTF-8, such as the half of a letter, become �."""
        return self.model.decode(list(ids))

    def arrays(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids (tokens,) of each piece of a long text, a few pieces at a time."""
        if self.bytewise:
            yield from (np.frombuffer(piece.encode(), dtype=np.uint8) for piece in pieces)
            return
        each = iter(pieces)
        while group := list(islice(each, GROUP)):
            for found in self.model.encode_batch_fast(group, add_special_tokens=False):
                yield np.array(found.ids, dtype=np.uint32)

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, for `transformers.AutoTokenizer.from_pretrained`."""
        self.model.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")


def byte_tokenizer() -> Tokenizer:
    """256 tokens, whose ids are byte values: BPE without a merge."""
    vocab = {symbol: value for value, symbol in enumerate(_symbols())}
    return Tokenizer(_on_bytes(tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))), bytewise=True)


def train_bpe(pieces: Iterable[str], vocab: int) -> Tokenizer:
    """A tokenizer of `vocab` tokens (257 or more), the same for the same pieces.

    It has fewer where pairs run out: one that is seen only once is not worth a token.
    """
    model = _on_bytes(tokenizers.Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(vocab_size=vocab, min_frequency=2, initial_alphabet=_symbols(), show_progress=False)
    model.train_from_iterator(pieces, trainer)
    return Tokenizer(model)


def open_tokenizer(folder: Path, bytewise: bool) -> Tokenizer:
    """One that `save` has written. Raises whatever a damaged file makes the library raise."""
    return Tokenizer(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), bytewise)


def _on_bytes(model: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    model.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return model


def _symbols() -> list[str]:
    """The printable letters that stand for the bytes 0 to 255 in a vocabulary, as in GPT-2.

    Bytes that Latin-1 can show stand for themselves; the others take the letters from U+0100 on, in order.
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(value if value in shown else next(others)) for value in range(256)]
