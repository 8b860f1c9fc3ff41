"""Mixtral: Llama whose MLP is a mixture of gated experts (w1 gate, w3 up, w2 down), stored one by one."""

from __future__ import annotations

from gaugekit.models.families.llama import FIELDS, decoder, self_attention
from gaugekit.models.parts import activation
from gaugekit.models.registry import Family, words
from gaugekit.models.source import Source
from gaugekit.models.spec import MLP, MoE, Stream


def mixture(t: Source, at: str, act: str) -> MoE:
    c = t.config
    d, f, experts = c.hidden_size, c.intermediate_size, c.num_local_experts
    if c.num_experts_per_tok == 1:
        t.refuse("num_experts_per_tok", "with one renormalised expert the router only selects")
    return MoE(
        t.linear(f"{at}.gate", experts, d, bias=False),
        tuple(
            MLP(
                up=t.linear(f"{at}.experts.{e}.w3", f, d, bias=False),
                gate=t.linear(f"{at}.experts.{e}.w1", f, d, bias=False),
                down=t.writer(f"{at}.experts.{e}.w2", d, f, bias=False),
                activation=act,
            )
            for e in range(experts)
        ),
    )


def build(t: Source) -> tuple[Stream, ...]:
    act = activation(t)
    return decoder(
        t,
        [
            (
                self_attention(t, f"model.layers.{layer}.self_attn", qkv_bias=False, o_bias=False),
                mixture(t, f"model.layers.{layer}.block_sparse_moe", act),
            )
            for layer in range(t.config.num_hidden_layers)
        ],
    )


FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    build=build,
    fields=words(f"{FIELDS} num_experts_per_tok num_local_experts router_jitter_noise"),
    aliases=(("model.", ""),),
    living=(
        (r"\.mlp\.gate\.", ".block_sparse_moe.gate."),
        (r"\.mlp\.experts\.(\d+)\.gate_proj\.", r".block_sparse_moe.experts.\1.w1."),
        (r"\.mlp\.experts\.(\d+)\.up_proj\.", r".block_sparse_moe.experts.\1.w3."),
        (r"\.mlp\.experts\.(\d+)\.down_proj\.", r".block_sparse_moe.experts.\1.w2."),
    ),
)
