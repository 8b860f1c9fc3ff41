"""Tiny models on disk with a tokenizer of letters, and how far two of them are apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from oracle import Tiny
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

Save = Callable[..., Path]
WEIGHTS = "model.safetensors"
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def saved(tiny: Tiny, folder: Path, theta: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Path:
    """As `save_pretrained` writes it, its parameters `tiny`'s own if no others are given."""
    tiny._load(tiny.theta if theta is None else theta)
    tiny.model.to(dtype).save_pretrained(folder)
    tiny.model.double()
    return folder


def between(tiny: Tiny, share: float, seed: int = 7) -> Tensor:
    """Parameters so far on the way to a model with which `tiny` has nothing in common."""
    return tiny.theta + share * (Tiny(tiny.case, seed=seed).theta - tiny.theta)


def apart(a: Path, b: Path, tiny: Tiny) -> float:
    """Largest difference of any entry that the observable depends on."""
    first, second = load_file(a / WEIGHTS), load_file(b / WEIGHTS)
    assert first.keys() == second.keys()
    difference = {name: first[name].double() - second[name].double() for name in first}
    for dead in tiny.symmetries.dead:
        if dead.view.name in difference:
            dead.view.window(difference[dead.view.name]).zero_()
    return max(float(each.abs().max()) for each in difference.values())


def edited(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """With other weights."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def reconfigured(folder: Path, **changes: Any) -> Path:
    """With other entries in its config."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def tokenizer(size: int, around: bool = False) -> Any:
    """Every letter is a token, the first `size` of them; with `around` c and d stand around a text, as BERT has it."""
    bare = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS[:size])}, unk_token="a"))
    bare.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    if around:
        bare.post_processor = processors.TemplateProcessing(single="c $A d", special_tokens=[("c", 2), ("d", 3)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bare)


def letters(path: Path, size: int, count: int = 1500, seed: int = 0) -> Path:
    """A text of random letters, each of the first `size` in turn likely to be followed by the next one."""
    generator = torch.Generator().manual_seed(seed)
    jumps = torch.randint(0, size, (count,), generator=generator) * (torch.rand(count, generator=generator) < 0.5)
    path.write_text("".join(LETTERS[i] for i in ((jumps + 1).cumsum(0) % size).tolist()))
    return path
