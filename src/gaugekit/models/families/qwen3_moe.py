"""Qwen3-MoE: Qwen3 whose MLP is, in chosen layers, a mixture of gated experts stored one by one."""

from __future__ import annotations

from gaugekit.models.families.llama import decoder, self_attention
from gaugekit.models.families.qwen2 import QWEN_FIELDS
from gaugekit.models.parts import activation, gated_mlp
from gaugekit.models.registry import Family, words
from gaugekit.models.source import Source
from gaugekit.models.spec import MLP, MoE, Stream


def feed_forward(t: Source, layer: int, act: str) -> MLP | MoE:
    c = t.config
    at = f"model.layers.{layer}.mlp"
    sparse = layer not in c.mlp_only_layers and (layer + 1) % c.decoder_sparse_step == 0
    if not sparse or c.num_experts == 0:
        return gated_mlp(t, at, c.hidden_size, c.intermediate_size, act)
    if c.num_experts_per_tok == 1 and c.norm_topk_prob:
        t.refuse("num_experts_per_tok", "with one renormalised expert the router only selects")
    experts = tuple(
        gated_mlp(t, f"{at}.experts.{e}", c.hidden_size, c.moe_intermediate_size, act) for e in range(c.num_experts)
    )
    return MoE(t.linear(f"{at}.gate", c.num_experts, c.hidden_size, bias=False), experts)


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    act, bias = activation(t), c.attention_bias
    return decoder(
        t,
        [
            (
                self_attention(t, f"model.layers.{layer}.self_attn", bias, bias, qk_norm=True),
                feed_forward(t, layer, act),
            )
            for layer in range(c.num_hidden_layers)
        ],
    )


FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    build=build,
    fields=words(
        f"{QWEN_FIELDS} decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts"
        " num_experts_per_tok num_local_experts"
    ),
    aliases=(("model.", ""),),
)
