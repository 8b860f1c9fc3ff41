"""Qwen3: Llama with an RMSNorm on every query and key, its weight shared by a layer's heads."""

from __future__ import annotations

from gaugekit.models.families.llama import decoder, self_attention
from gaugekit.models.families.qwen2 import QWEN_FIELDS
from gaugekit.models.parts import activation, gated_mlp
from gaugekit.models.registry import Family, words
from gaugekit.models.source import Source
from gaugekit.models.spec import Stream


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    act, bias = activation(t), c.attention_bias
    return decoder(
        t,
        [
            (
                self_attention(t, f"model.layers.{layer}.self_attn", bias, bias, qk_norm=True),
                gated_mlp(t, f"model.layers.{layer}.mlp", c.hidden_size, c.intermediate_size, act),
            )
            for layer in range(c.num_hidden_layers)
        ],
    )


FAMILY = Family("qwen3", ("qwen3",), build, words(QWEN_FIELDS), aliases=(("model.", ""),))
