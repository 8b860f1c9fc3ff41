"""Tiny models with a tokenizer of the words w0, w1, ..., and texts of such words."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from oracle import Case, Tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor


def written(tiny: Tiny, where: Path, theta: Tensor | None = None) -> Path:
    """A tiny model and its tokenizer.json."""
    tiny._load(tiny.theta if theta is None else theta)
    tiny.model.save_pretrained(where)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.case.config.get("vocab_size", 1))}, "w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(where)
    return where


def prose(where: Path, vocabulary: int, length: int, seed: int = 0) -> Path:
    """Random words, the first ones oftener, so that states have a mean and are not round."""
    chances = torch.arange(1, vocabulary + 1, dtype=torch.float64).pow(-1.5)
    drawn = torch.multinomial(chances, length, replacement=True, generator=torch.Generator().manual_seed(seed))
    where.write_text(" ".join(f"w{i}" for i in drawn.tolist()))
    return where


def made(case: Case, tmp_path: Path, name: str = "a", eps: float = 1e-5) -> tuple[Tiny, Path]:
    tiny = Tiny(case, eps=eps)
    return tiny, written(tiny, tmp_path / name)


def logits(where: Path, ids: Tensor) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float64)
    with torch.no_grad():
        return model(ids).logits


def tokens(vocabulary: int, *shape: int, seed: int = 3) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))
