"""Models of `transformers` whose values are narrower than their keys, layer by layer: fewer weights, a smaller cache.

Importing this file registers the classes, so that `AutoModelForCausalLM.from_pretrained` knows their model types. A
saved model also brings a small file that imports this one, which `trust_remote_code=True` runs: with gaugekit
installed, nothing else needs to be imported. Everything but the attention is the class's own, and so are queries, keys,
positions, masks, caches and generation.

Shapes: b rows of n tokens that see m, h query heads, g key/value heads, k head dimension, r value dimension of the
layer, d stream width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.pytorch_utils import Conv1D

from gaugekit.errors import ConfigError
from gaugekit.models.remote import Imported, NotCopied
from gaugekit.nn.pivoted import pivoted_rows

__all__ = ["REDUCED", "PivotedValues", "Reduced"]


class PivotedValues(nn.Module):
    """v = W x + b for W (g r, d) with an identity among its columns, head by head, which is not stored.

    coefficients  (g, r, d − r)  parameter: the other columns, in their order
    pivots        (g, r) int64   buffer: where the identity stands, ascending
    bias          (g r,)         parameter, or None
    """

    def __init__(self, width: int, kv_heads: int, rank: int, bias: bool) -> None:
        super().__init__()
        self.coefficients = nn.Parameter(torch.zeros(kv_heads, rank, width - rank))
        self.register_buffer("pivots", torch.arange(rank).repeat(kv_heads, 1))
        self.bias = nn.Parameter(torch.zeros(kv_heads * rank)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) → (..., g r)."""
        pivots: Any = self.pivots
        return F.linear(x, pivoted_rows(self.coefficients, pivots).flatten(0, 1), self.bias)


def cached(cache: Any, key: Tensor, value: Tensor, layer: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """All keys and values so far. The first releases of transformers 5 say where in the cache the new ones belong."""
    places = given.get("cache_position")
    return cache.update(key, value, layer, *(() if places is None else ({"cache_position": places},)))


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention (b, n, h r) of query (b, h, n, k) on key (b, g, m, k) and value (b, g, m, r), by the implementation
    that the model was loaded with, and the attention weights if it gives them.

    Kernels want values as wide as keys: they are padded for the call, but not in the cache. One query alone needs no
    kernel, and to pad all that is in the cache for it would cost more than the attention does.
    """
    name = module.config._attn_implementation
    implementation = written_out if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    width, rank = key.shape[-1], value.shape[-1]
    if name != "eager" and not (name == "sdpa" and query.shape[2] == 1):
        value = F.pad(value, (0, width - rank))
    out, weights = implementation(module, query, key, value, mask, dropout=dropout, scaling=module.scaling, **options)
    return out[..., :rank].flatten(-2), weights


def written_out(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """ "eager": softmax in float32 or better; output (b, n, h, r) and weights (b, h, n, m)."""
    share = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(share, 1) for x in (key, value))
    scores = query @ key.mT * scaling
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1, torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    weights = F.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class RotaryValues:
    """Mixin of a Llama-like attention: separate projections, rotary positions, norms of queries and keys if the class
    has them."""

    config: Any
    layer_idx: int

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # pyright: ignore[reportCallIssue]
        own: Any = self
        width, g, rank = config.hidden_size, config.num_key_value_heads, config.value_dims[layer_idx]
        bias = own.v_proj.bias is not None
        if config.pivoted_values[layer_idx]:
            own.v_proj = PivotedValues(width, g, rank, bias)
        else:
            own.v_proj = nn.Linear(width, g * rank, bias)
        own.o_proj = nn.Linear(config.num_attention_heads * rank, width, own.o_proj.bias is not None)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        own: Any = self
        cache = past_key_values if cache is None else cache  # the name differs between releases of transformers
        shape = hidden_states.shape[:-1]
        query, key = (part(hidden_states).unflatten(-1, (-1, own.head_dim)) for part in (own.q_proj, own.k_proj))
        if hasattr(self, "q_norm"):
            query, key = own.q_norm(query), own.k_norm(key)
        value = own.v_proj(hidden_states).view(*shape, key.shape[2], -1).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        if cache is not None:
            key, value = cached(cache, key, value, self.layer_idx, kwargs)
        dropout = own.attention_dropout if own.training else 0.0
        # Qwen windows some layers, Mistral all of them.
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        out, weights = attend(self, query, key, value, attention_mask, dropout, sliding_window=window, **kwargs)
        return own.o_proj(out), weights


class ReducedLlamaAttention(RotaryValues, LlamaAttention): ...


class ReducedMistralAttention(RotaryValues, MistralAttention): ...


class ReducedQwen2Attention(RotaryValues, Qwen2Attention): ...


class ReducedQwen3Attention(RotaryValues, Qwen3Attention): ...


class ReducedGPT2Attention(GPT2Attention):
    """One fused projection of queries, keys and values; pivoted values have one of their own."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx=layer_idx)
        d, h, rank = self.embed_dim, self.num_heads, config.value_dims[layer_idx]
        self.pivoted = config.pivoted_values[layer_idx]
        if self.pivoted:
            self.values = PivotedValues(d, h, rank, bias=True)
        self.c_attn = Conv1D(2 * d + (0 if self.pivoted else h * rank), d)
        self.c_proj = Conv1D(d, h * rank)
        self.scaling = self.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scaling /= layer_idx + 1

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]: called by keyword
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache = past_key_values if cache is None else cache  # the name differs between releases of transformers
        cache = getattr(cache, "self_attention_cache", cache)
        d, fused = self.embed_dim, self.c_attn(hidden_states)
        value = self.values(hidden_states) if self.pivoted else fused[..., 2 * d :]
        parts = (fused[..., :d], fused[..., d : 2 * d], value)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        if cache is not None:
            key, value = cached(cache, key, value, self.layer_idx, kwargs)
        dropout = self.attn_dropout.p if self.training else 0.0
        out, weights = attend(self, query, key, value, attention_mask, dropout, **kwargs)
        return self.resid_dropout(self.c_proj(out)), weights


class Narrower(Imported):
    """Mixin of a language model: puts the attention of this file in the place of its own."""

    attention: Any
    place: tuple[str, str]  # the list of layers, and the attention in each
    _supports_flash_attn = False  # which would have to be tried on the hardware that has it

    def __init__(self, config: Any) -> None:
        check(config)
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        own: Any = self
        layers, name = self.place
        for number, layer in enumerate(own.get_submodule(layers)):
            setattr(layer, name, self.attention(config, number))
        own.post_init()


def check(config: Any) -> None:
    """Raises `ConfigError` for value dimensions that the model cannot have."""
    layers, kind = config.num_hidden_layers, config.model_type
    largest = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dims, pivoted = config.value_dims, config.pivoted_values
    if not (isinstance(dims, list) and len(dims) == layers and all(type(r) is int for r in dims)):
        raise ConfigError(f"value_dims of {kind} must be a whole number for each of the {layers} layers, not {dims!r}")
    if not all(1 <= r <= largest for r in dims):
        raise ConfigError(f"value_dims of {kind} must be from 1 to the head dimension {largest}, not {dims!r}")
    if not (isinstance(pivoted, list) and len(pivoted) == layers and all(isinstance(p, bool) for p in pivoted)):
        raise ConfigError(f"pivoted_values of {kind} must be true or false for each of the {layers} layers")
    if getattr(config, "add_cross_attention", False):
        raise ConfigError(f"{kind} has no cross-attention: leave add_cross_attention out")


class ReducedLlamaConfig(NotCopied, transformers.LlamaConfig):
    model_type = "gaugekit_llama"
    value_dims: Any = None
    pivoted_values: Any = None


class ReducedMistralConfig(NotCopied, transformers.MistralConfig):
    model_type = "gaugekit_mistral"
    value_dims: Any = None
    pivoted_values: Any = None


class ReducedQwen2Config(NotCopied, transformers.Qwen2Config):
    model_type = "gaugekit_qwen2"
    value_dims: Any = None
    pivoted_values: Any = None


class ReducedQwen3Config(NotCopied, transformers.Qwen3Config):
    model_type = "gaugekit_qwen3"
    value_dims: Any = None
    pivoted_values: Any = None


class ReducedGPT2Config(NotCopied, transformers.GPT2Config):
    model_type = "gaugekit_gpt2"
    value_dims: Any = None
    pivoted_values: Any = None


class ReducedLlamaForCausalLM(Narrower, transformers.LlamaForCausalLM):
    config_class = ReducedLlamaConfig
    attention, place = ReducedLlamaAttention, ("model.layers", "self_attn")


class ReducedMistralForCausalLM(Narrower, transformers.MistralForCausalLM):
    config_class = ReducedMistralConfig
    attention, place = ReducedMistralAttention, ("model.layers", "self_attn")


class ReducedQwen2ForCausalLM(Narrower, transformers.Qwen2ForCausalLM):
    config_class = ReducedQwen2Config
    attention, place = ReducedQwen2Attention, ("model.layers", "self_attn")


class ReducedQwen3ForCausalLM(Narrower, transformers.Qwen3ForCausalLM):
    config_class = ReducedQwen3Config
    attention, place = ReducedQwen3Attention, ("model.layers", "self_attn")


class ReducedGPT2LMHeadModel(Narrower, transformers.GPT2LMHeadModel):
    config_class = ReducedGPT2Config
    attention, place = ReducedGPT2Attention, ("transformer.h", "attn")


@dataclass(frozen=True)
class Reduced:
    """The classes for one model type. `values`: the module beside the fused projection that holds pivoted values, or
    None where values have a projection of their own, whose place they take."""

    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    values: str | None = None


REDUCED = {
    "llama": Reduced(ReducedLlamaConfig, ReducedLlamaForCausalLM),
    "mistral": Reduced(ReducedMistralConfig, ReducedMistralForCausalLM),
    "qwen2": Reduced(ReducedQwen2Config, ReducedQwen2ForCausalLM),
    "qwen3": Reduced(ReducedQwen3Config, ReducedQwen3ForCausalLM),
    "gpt2": Reduced(ReducedGPT2Config, ReducedGPT2LMHeadModel, "values"),
}
"""By the model type that is reduced."""

for each in REDUCED.values():
    AutoConfig.register(each.config.model_type, each.config, exist_ok=True)
    AutoModelForCausalLM.register(each.config, each.model, exist_ok=True)
