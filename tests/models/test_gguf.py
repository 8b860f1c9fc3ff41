"""GGUF stores other names, interleaved rotary rows, and Gemma's norms with the one added: the spec knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from cases import llama_like
from torch import Tensor

from gaugekit.checkpoint import open_checkpoint
from gaugekit.errors import UnsupportedArchitecture
from gaugekit.models import read_spec
from gaugekit.symmetry import derive
from gaugekit.verbs.inspect import inspect

Store = Callable[[str, Tensor], Tensor]


def write(path: Path, arch: str, tensors: dict[str, Tensor], store: Store, **extra: float) -> None:
    """A GGUF of two heads on one, two layers, d = 8, head dimension 4."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2)
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(9)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(4)
    writer.add_value_length(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    for key, value in extra.items():
        writer.add_float32(f"{arch}.{key}", value)
    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, 2)
    for name, tensor in tensors.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, store(name, tensor).float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(name: str, tensor: Tensor) -> Tensor:
    """(heads, 2, pairs) → (heads, pairs, 2) for rows of queries and keys."""
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    return tensor.reshape(-1, 2, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def half_split(name: str, tensor: Tensor) -> Tensor:
    return interleaved(name, tensor)  # with two pairs the turn is its own inverse


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    return tensor


def complete_norms(name: str, tensor: Tensor) -> Tensor:
    return tensor + 1 if "norm" in name else tensor


CASES: list[tuple[str, str, dict[str, Any], Store]] = [
    ("llama", "llama", {}, interleaved),
    ("qwen2", "qwen2", {}, as_it_is),
    ("qwen3", "qwen3", {"head_dim": 4}, as_it_is),
    ("gemma3", "gemma3_text", {"head_dim": 4, "rope_theta": 10000.0}, complete_norms),
]


def build(model_type: str, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    parsed = transformers.AutoConfig.for_model(model_type, **llama_like(tie_word_embeddings=True, **config))
    model = transformers.AutoModelForCausalLM.from_config(parsed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize(("arch", "model_type", "config", "store"), CASES, ids=lambda value: str(value)[:12])
def test_gguf_says_what_safetensors_say(
    tmp_path: Path, arch: str, model_type: str, config: dict[str, Any], store: Store
) -> None:
    model = build(model_type, config)
    model.save_pretrained(tmp_path / "hf")
    path = tmp_path / "tiny.gguf"
    write(path, arch, dict(model.named_parameters()) | {}, lambda n, t: store(n, t.detach()))
    ours, theirs = inspect(path), inspect(tmp_path / "hf")
    assert ours.redundancy == theirs.redundancy > 0
    assert ours.parameters == theirs.parameters
    for a, b in zip(ours.heads, theirs.heads, strict=True):
        assert a.spectrum == pytest.approx(b.spectrum, rel=1e-5)


def test_rotary_rows_of_llama_are_interleaved(tmp_path: Path) -> None:
    """transformers#25199, nanotron#241: an element that fits one layout is silent corruption in the other."""
    model = build("llama", {}).eval()
    model.config._attn_implementation = "eager"
    path = tmp_path / "tiny.gguf"
    write(path, "llama", dict(model.named_parameters()), lambda n, t: interleaved(n, t.detach()))
    checkpoint = open_checkpoint(path)
    spec = read_spec(checkpoint)
    symmetry = next(s for s in derive(spec).continuous if s.name == "query-key basis")
    tensors = {name: checkpoint.load(name).double() for name in symmetry.touches}
    changed = symmetry.act(tensors, symmetry.sample(torch.Generator().manual_seed(1)))
    hf = {"blk.0.attn_q.weight": "q_proj", "blk.0.attn_k.weight": "k_proj"}
    ids = torch.arange(13).unsqueeze(0)
    before = model(ids).logits
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for name, part in hf.items():
            getattr(attention, part).weight.copy_(half_split(part, changed[name]))
    assert torch.allclose(model(ids).logits, before, atol=1e-3)
    with torch.no_grad():
        for name, part in hf.items():
            getattr(attention, part).weight.copy_(changed[name])
    assert not torch.allclose(model(ids).logits, before, atol=1e-1)


def test_an_unknown_field_or_architecture_is_refused(tmp_path: Path) -> None:
    model = build("llama", {})
    tensors = dict(model.named_parameters())
    path = tmp_path / "tiny.gguf"
    write(path, "llama", tensors, lambda n, t: t.detach(), **{"attention.sink_scale": 2.0})
    with pytest.raises(UnsupportedArchitecture, match=r"llama\.attention\.sink_scale=2\.0 is not known"):
        read_spec(open_checkpoint(path))
    write(path, "phi3", {}, lambda n, t: t.detach())
    with pytest.raises(UnsupportedArchitecture, match="GGUF architecture 'phi3' is not supported"):
        read_spec(open_checkpoint(path))
