"""What is written is loaded by `from_pretrained` of transformers, and computes what it should."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gaugekit.checkpoint import Checkpoint, open_checkpoint, plan, write

TOKENS = torch.arange(12).reshape(2, 6)


def llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            initializer_range=0.5,
        )
    ).eval()


def logits(directory: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def shuffled(source: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The hidden units of every MLP in another order, which changes tensors but no logits."""
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    for name in source.headers:
        if ".mlp." in name:
            value = source.load(name).double()
            yield name, value[:, order] if "down_proj" in name else value[order]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", ["5GB", "4KB"])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_from_pretrained(tmp_path: Path, tied: bool, size: str, kind: str) -> None:
    model, directory, out = llama(tied), tmp_path / "model", tmp_path / "out"
    model.save_pretrained(directory)
    if kind == "bin":
        (directory / "model.safetensors").unlink()
        torch.save(model.state_dict(), directory / "pytorch_model.bin")
    source = open_checkpoint(directory)
    assert source.format == kind
    names = [name for name in source.headers if ".mlp." in name]
    write(plan(source, out, names, max_shard_size=size), shuffled(source))
    assert (out / "model.safetensors.index.json").exists() == (size == "4KB")
    assert (out / "generation_config.json").exists()
    written = open_checkpoint(out)
    assert not any(torch.equal(written.load(name), source.load(name)) for name in names)
    assert torch.allclose(logits(out), logits(directory), atol=1e-5)


def test_a_changed_head_changes_the_logits(tmp_path: Path) -> None:
    llama(tied=False).save_pretrained(tmp_path / "model")
    source = open_checkpoint(tmp_path / "model")
    head = source.load("lm_head.weight").double()
    write(plan(source, tmp_path / "out", ["lm_head.weight"]), [("lm_head.weight", 2 * head)])
    assert torch.allclose(logits(tmp_path / "out"), 2 * logits(tmp_path / "model"), atol=1e-5)


def test_a_head_that_becomes_tied(tmp_path: Path) -> None:
    """The embedding once more: it is dropped, and the config says so."""
    model = llama(tied=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path / "model")
    made = plan(open_checkpoint(tmp_path / "model"), tmp_path / "out", [], drop=["lm_head.weight"])
    write(made, [], config_changes={"tie_word_embeddings": True})
    assert "lm_head.weight" not in made.headers
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "model"))


def test_another_dtype_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    llama(tied=True).save_pretrained(tmp_path / "model")
    write(plan(open_checkpoint(tmp_path / "model"), tmp_path / "out", [], dtype="bfloat16"), [])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
