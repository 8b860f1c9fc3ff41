"""Qwen2: Llama with biases on queries, keys and values only."""

from __future__ import annotations

from gaugekit.models.families.llama import FIELDS, decoder, self_attention
from gaugekit.models.parts import activation, gated_mlp
from gaugekit.models.registry import Family, words
from gaugekit.models.source import Source
from gaugekit.models.spec import Stream

QWEN_FIELDS = f"{FIELDS} layer_types max_window_layers use_sliding_window"


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    act = activation(t)
    return decoder(
        t,
        [
            (
                self_attention(t, f"model.layers.{layer}.self_attn", qkv_bias=True, o_bias=False),
                gated_mlp(t, f"model.layers.{layer}.mlp", c.hidden_size, c.intermediate_size, act),
            )
            for layer in range(c.num_hidden_layers)
        ],
    )


FAMILY = Family("qwen2", ("qwen2",), build, words(QWEN_FIELDS), aliases=(("model.", ""),))
