"""A trained decoder as a Hugging Face directory: under a class of `transformers` where one holds it, or under our own.

    LayerNorm  learned  gelu              pre        GPT2LMHeadModel; relu too where eps is not OPT's
    LayerNorm  learned  relu              pre        OPTForCausalLM, whose eps is 1e-5; relu or gelu with post
    LayerNorm  rotary   gelu, relu        pre        GPTNeoXForCausalLM; Starcoder2ForCausalLM with shared key/values
    LayerNorm  rotary   swiglu, no bias   pre        StableLmForCausalLM
    RMSNorm    rotary   swiglu            pre        LlamaForCausalLM, norms without bias
    anything else                                    `gaugekit.training.hf.GaugekitForCausalLM`

all with standard attention and plain residuals. The function is the decoder's own, to rounding. What a class insists on
and the decoder does not have is added: biases of zeros, norm weights of ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
import yaml
from torch import Tensor, nn

from gaugekit.checkpoint.staging import reported, staged
from gaugekit.errors import CheckpointError
from gaugekit.models.quiet import quiet
from gaugekit.nn.decoding import MLP, CausalAttention
from gaugekit.nn.norms import LayerNorm, RMSNorm
from gaugekit.training.config import ModelConfig
from gaugekit.training.decoder import Block, Decoder
from gaugekit.training.hf import GaugekitConfig, GaugekitForCausalLM

__all__ = ["Saves", "as_transformers", "export"]

State = dict[str, Tensor]
Made = tuple[type[transformers.PreTrainedModel], transformers.PreTrainedConfig, State]

OPT_EPS = 1e-5  # of OPT's norms, whatever its config says
OPT_OFFSET = 2  # rows of OPT's table before the first position
GATED = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
SHARD = "5GB"


class Saves(Protocol):
    """A tokenizer that writes its files into a folder."""

    def save(self, folder: Path) -> None: ...


def export(model: Decoder, folder: Path, tokenizer: Saves | None = None) -> str:
    """Write the decoder for `from_pretrained`, with a model card and the tokenizer's files. Gives the class's name.

    Every parameter keeps its dtype on disk. `folder` is there complete, or not at all; it may be an empty directory.
    The parameters must be whole: of a sharded model, load its full state into another decoder.

    Raises:
        CheckpointError: a folder that exists and is not empty, or cannot be written.
        ConfigError: norm options that a config.json cannot hold.
    """
    folder = folder.expanduser().resolve()
    with reported(folder, "used"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(f"{folder}: exists and is not empty; remove it, or choose another name")
    kind, config, state = as_transformers(model)
    with quiet(), torch.device("meta"):
        built = kind(config)
    built.load_state_dict({name: value.detach() for name, value in state.items()}, assign=True)
    built.tie_weights()
    added = built.num_parameters() - sum(part.numel() for part in model.parameters())
    with staged(folder, replace=True) as partial, quiet(), reported(folder):
        built.save_pretrained(partial, max_shard_size=SHARD)
        if tokenizer is not None:
            tokenizer.save(partial)
        (partial / "README.md").write_text(_card(model, kind, added), encoding="utf-8")
    return kind.__name__


def as_transformers(model: Decoder) -> Made:
    """The class that computes the same as the decoder, its config, and its tensors by their names there. Tensors share
    memory with the decoder's parameters where they have one layout. Raises ConfigError as `export` does."""
    return _layout(model)(model)


def _card(model: Decoder, kind: type[transformers.PreTrainedModel], added: int) -> str:
    first = "import gaugekit.training.hf  # or trust_remote_code=True below\n" if kind is GaugekitForCausalLM else ""
    more = f" {added} more are of the class alone, and change nothing." if added > 0 else ""
    return f"""\
---
library_name: transformers
tags:
- gaugekit
---

A small decoder trained with gaugekit, as `{kind.__name__}`.
It has {sum(part.numel() for part in model.parameters())} parameters.{more}

```python
{first}from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("this folder")
```

Its composition (`gaugekit.training.config.ModelConfig`):

```yaml
{yaml.safe_dump(asdict(model.config), sort_keys=False)}```
"""


def _layout(model: Decoder) -> Callable[[Decoder], Made]:
    """The class of transformers that computes the same, or our own."""
    c, block = model.config, model.blocks[0]
    norm = getattr(block, "norm_attention", None)
    if (
        not isinstance(block, Block)
        or not isinstance(block.attention, CausalAttention)
        or not isinstance(norm, LayerNorm | RMSNorm)
        or norm.robust  # which differs where the classes' norms overflow
    ):
        return _own
    pre, rotary, gated, shared = c.placement == "pre", c.positions == "rotary", c.mlp == "swiglu", c.kv_heads
    if isinstance(norm, RMSNorm):
        return _llama if pre and rotary and gated and norm.bias is None else _own
    if pre and rotary and gated:
        return _own if c.bias else _stablelm
    if pre and rotary:
        return _starcoder2 if shared not in (0, c.heads) else _gpt_neox
    if c.positions != "learned" or gated or shared not in (0, c.heads):
        return _own
    if pre and (c.mlp == "gelu" or norm.eps != OPT_EPS):
        return _gpt2
    return _opt if c.placement in ("pre", "post") and norm.eps == OPT_EPS else _own


class _Tensors(dict[str, Tensor]):
    """Tensors by name, of parts of a decoder."""

    def linear(self, name: str, part: nn.Linear, biased: bool) -> None:
        self[f"{name}.weight"] = part.weight
        if biased:
            self[f"{name}.bias"] = _bias(part)

    def norm(self, name: str, part: nn.Module | None, like: Tensor, biased: bool = True) -> None:
        """With ones and zeros, as `like`, for what it does not have."""
        weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
        self[f"{name}.weight"] = like.new_ones(like.shape[-1]) if weight is None else weight
        if biased:
            self[f"{name}.bias"] = like.new_zeros(like.shape[-1]) if bias is None else bias


def _bias(part: nn.Linear) -> Tensor:
    return part.weight.new_zeros(part.out_features) if part.bias is None else part.bias


def _parts(model: Decoder) -> Iterator[tuple[int, Block, CausalAttention, MLP]]:
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block) and isinstance(block.attention, CausalAttention) and isinstance(block.mlp, MLP)
        yield layer, block, block.attention, block.mlp


def _gpt2(model: Decoder) -> Made:
    c, table = model.config, model.embedding.weight
    t = _Tensors({"transformer.wte.weight": table, "lm_head.weight": model.head.weight})
    t["transformer.wpe.weight"] = _positions(model)

    def conv1d(name: str, *maps: nn.Linear) -> None:
        t[f"{name}.weight"] = torch.cat([part.weight for part in maps]).mT
        t[f"{name}.bias"] = torch.cat([_bias(part) for part in maps])

    for layer, block, attention, mlp in _parts(model):
        at = f"transformer.h.{layer}"
        t.norm(f"{at}.ln_1", block.norm_attention, table)
        conv1d(f"{at}.attn.c_attn", attention.query, attention.key, attention.value)
        conv1d(f"{at}.attn.c_proj", attention.out)
        t.norm(f"{at}.ln_2", block.norm_mlp, table)
        conv1d(f"{at}.mlp.c_fc", mlp.up)
        conv1d(f"{at}.mlp.c_proj", mlp.down)
    t.norm("transformer.ln_f", model.norm, table)
    config = transformers.GPT2Config(
        **_common(c),
        n_positions=c.context,
        n_embd=c.width,
        n_layer=c.layers,
        n_head=c.heads,
        n_inner=c.units,
        activation_function=c.mlp,
        layer_norm_epsilon=_eps(model),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel, config, t


def _opt(model: Decoder) -> Made:
    c, table = model.config, model.embedding.weight
    t = _Tensors({"model.decoder.embed_tokens.weight": table, "lm_head.weight": model.head.weight})
    rows = _positions(model)
    t["model.decoder.embed_positions.weight"] = torch.cat([rows.new_zeros(OPT_OFFSET, c.width), rows])
    for layer, block, attention, mlp in _parts(model):
        at = f"model.decoder.layers.{layer}"
        t.norm(f"{at}.self_attn_layer_norm", block.norm_attention, table)
        for name, part in _four(attention):
            t.linear(f"{at}.self_attn.{'out' if name == 'o' else name}_proj", part, c.bias)
        t.norm(f"{at}.final_layer_norm", block.norm_mlp, table)
        t.linear(f"{at}.fc1", mlp.up, c.bias)
        t.linear(f"{at}.fc2", mlp.down, c.bias)
    if model.norm is not None:
        t.norm("model.decoder.final_layer_norm", model.norm, table)
    config = transformers.OPTConfig(
        **_common(c),
        hidden_size=c.width,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        ffn_dim=c.units,
        max_position_embeddings=c.context,
        activation_function=c.mlp,
        enable_bias=c.bias,
        do_layer_norm_before=c.placement == "pre",
        dropout=0.0,
    )
    return transformers.OPTForCausalLM, config, t


def _gpt_neox(model: Decoder) -> Made:
    c, table = model.config, model.embedding.weight
    kind = transformers.GPTNeoXForCausalLM
    [head] = kind._tied_weights_keys or ("lm_head.weight",)  # or embed_out, by the release of transformers
    t = _Tensors({"gpt_neox.embed_in.weight": table, head: model.head.weight})
    for layer, block, attention, mlp in _parts(model):
        at = f"gpt_neox.layers.{layer}"
        t.norm(f"{at}.input_layernorm", block.norm_attention, table)
        # Query, key and value of one head, then those of the next.
        maps = (attention.query, attention.key, attention.value)
        heads = [part.weight.unflatten(0, (c.heads, -1)) for part in maps]
        t[f"{at}.attention.query_key_value.weight"] = torch.cat(heads, 1).flatten(0, 1)
        if c.bias:
            biases = [part.bias.unflatten(0, (c.heads, -1)) for part in maps]
            t[f"{at}.attention.query_key_value.bias"] = torch.cat(biases, 1).flatten()
        t.linear(f"{at}.attention.dense", attention.out, c.bias)
        t.norm(f"{at}.post_attention_layernorm", block.norm_mlp, table)
        t.linear(f"{at}.mlp.dense_h_to_4h", mlp.up, True)
        t.linear(f"{at}.mlp.dense_4h_to_h", mlp.down, True)
    t.norm("gpt_neox.final_layer_norm", model.norm, table)
    config = transformers.GPTNeoXConfig(
        **_rotary(c),
        hidden_act=c.mlp,
        attention_bias=c.bias,
        layer_norm_eps=_eps(model),
        use_parallel_residual=False,
        rotary_pct=1.0,  # pyright: ignore[reportCallIssue]: known, but not declared
    )
    config.rotary_pct = 1.0  # in config.json too: transformers 5.0 looks nowhere else
    return kind, config, t


def _starcoder2(model: Decoder) -> Made:
    c = model.config
    maps = {"c_fc": "up", "c_proj": "down"}
    config = transformers.Starcoder2Config(
        **_rotary(c), num_key_value_heads=c.kv_heads, hidden_act=c.mlp, use_bias=c.bias, norm_epsilon=_eps(model)
    )
    return transformers.Starcoder2ForCausalLM, config, _like_llama(model, maps, True)


def _stablelm(model: Decoder) -> Made:
    c = model.config
    config = transformers.StableLmConfig(
        **_rotary(c), num_key_value_heads=c.kv_heads or c.heads, layer_norm_eps=_eps(model), use_qkv_bias=False
    )
    return transformers.StableLmForCausalLM, config, _like_llama(model, GATED, True)


def _llama(model: Decoder) -> Made:
    c = model.config
    config = transformers.LlamaConfig(
        **_rotary(c),
        num_key_value_heads=c.kv_heads or c.heads,
        rms_norm_eps=_eps(model),
        attention_bias=c.bias,
        mlp_bias=c.bias,
    )
    return transformers.LlamaForCausalLM, config, _like_llama(model, GATED, False)


def _own(model: Decoder) -> Made:
    state = {f"decoder.{name}": value for name, value in model.state_dict().items()}
    return GaugekitForCausalLM, GaugekitConfig(**asdict(model.config)), state


def _like_llama(model: Decoder, maps: dict[str, str], norm_bias: bool) -> State:
    """Names as in Llama; `maps` are those of the MLP, theirs to ours."""
    biased, table = model.config.bias, model.embedding.weight
    t = _Tensors({"model.embed_tokens.weight": table, "lm_head.weight": model.head.weight})
    for layer, block, attention, mlp in _parts(model):
        at = f"model.layers.{layer}"
        t.norm(f"{at}.input_layernorm", block.norm_attention, table, norm_bias)
        for name, part in _four(attention):
            t.linear(f"{at}.self_attn.{name}_proj", part, biased)
        t.norm(f"{at}.post_attention_layernorm", block.norm_mlp, table, norm_bias)
        for theirs, ours in maps.items():
            t.linear(f"{at}.mlp.{theirs}", getattr(mlp, ours), biased)
    t.norm("model.norm", model.norm, table, norm_bias)
    return t


def _four(attention: CausalAttention) -> Iterator[tuple[str, nn.Linear]]:
    yield from zip("qkvo", (attention.query, attention.key, attention.value, attention.out), strict=True)


def _positions(model: Decoder) -> Tensor:
    assert model.positions is not None
    return model.positions.weight


def _eps(model: Decoder) -> Any:
    return model.blocks[0].get_submodule("norm_attention").eps


def _common(c: ModelConfig) -> dict[str, Any]:
    """No tokens are special: those that the classes have by default may not even exist here."""
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {"vocab_size": c.vocab, "tie_word_embeddings": c.tied, **none}


def _rotary(c: ModelConfig) -> dict[str, Any]:
    turns = {"rope_type": "default", "rope_theta": c.rotary_base, "partial_rotary_factor": 1.0}
    return {
        **_common(c),
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "intermediate_size": c.units,
        "max_position_embeddings": c.context,
        "rope_parameters": turns,
    }
