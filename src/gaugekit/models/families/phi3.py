"""Phi-3: Llama with fused qkv and fused gate and up, and rotary positions that may be partial or rescaled."""

from __future__ import annotations

from gaugekit.models.families.llama import FIELDS, decoder
from gaugekit.models.parts import activation, attention, rows
from gaugekit.models.registry import Family, words
from gaugekit.models.rotary import rotary
from gaugekit.models.source import Source
from gaugekit.models.spec import MLP, Attention, Stream


def layer_parts(t: Source, layer: int, act: str) -> tuple[Attention, MLP]:
    c = t.config
    at = f"model.layers.{layer}"
    d, f, h, g = c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads
    k = getattr(c, "head_dim", None) or d // h
    qkv = t.linear(f"{at}.self_attn.qkv_proj", (h + 2 * g) * k, d, bias=False)
    body = attention(
        rows(qkv, 0, h * k),
        rows(qkv, h * k, g * k),
        rows(qkv, (h + g) * k, g * k),
        t.writer(f"{at}.self_attn.o_proj", d, h * k, bias=False),
        h,
        g,
        rotary=rotary(c, k),
    )
    gate_up = t.linear(f"{at}.mlp.gate_up_proj", 2 * f, d, bias=False)
    down = t.writer(f"{at}.mlp.down_proj", d, f, bias=False)
    return body, MLP(up=rows(gate_up, f, f), gate=rows(gate_up, 0, f), down=down, activation=act)


def build(t: Source) -> tuple[Stream, ...]:
    act = activation(t)
    return decoder(t, [layer_parts(t, layer, act) for layer in range(t.config.num_hidden_layers)])


FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    build=build,
    fields=words(f"{FIELDS} original_max_position_embeddings partial_rotary_factor"),
    aliases=(("model.", ""),),
)
