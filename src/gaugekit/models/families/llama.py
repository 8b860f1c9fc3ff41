"""Llama and its lineage: RMSNorm before each branch, rotary positions, grouped queries, a gated MLP."""

from __future__ import annotations

from gaugekit.models.parts import activation, attention, gated_mlp, language_head, norm
from gaugekit.models.registry import Family, words
from gaugekit.models.rotary import rotary
from gaugekit.models.source import Source
from gaugekit.models.spec import MLP, Attention, Block, Branch, MoE, QKNorm, Stream, Table

FIELDS = (
    "attention_bias head_dim hidden_act hidden_size intermediate_size max_position_embeddings mlp_bias"
    " num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters rope_scaling rope_theta"
    " sliding_window tie_word_embeddings vocab_size"
)


def self_attention(t: Source, at: str, qkv_bias: bool, o_bias: bool, qk_norm: bool = False) -> Attention:
    """Separate q, k, v and o projections with rotary positions; `qk_norm`: one RMSNorm weight for all heads."""
    c = t.config
    d, h, g = c.hidden_size, c.num_attention_heads, c.num_key_value_heads or c.num_attention_heads
    k = getattr(c, "head_dim", None) or d // h
    norms = None
    if qk_norm:
        q_weight, k_weight = t(f"{at}.q_norm.weight", k), t(f"{at}.k_norm.weight", k)
        norms = QKNorm(q_weight.unsqueeze(0), k_weight.unsqueeze(0), c.rms_norm_eps, "head")
    return attention(
        t.linear(f"{at}.q_proj", h * k, d, qkv_bias),
        t.linear(f"{at}.k_proj", g * k, d, qkv_bias),
        t.linear(f"{at}.v_proj", g * k, d, qkv_bias),
        t.writer(f"{at}.o_proj", d, h * k, o_bias),
        h,
        g,
        rotary=rotary(c, k, interleaved=t.layout is not None and t.layout.interleaved),
        qk_norm=norms,
    )


def decoder(t: Source, layer_parts: list[tuple[Attention, MLP | MoE]]) -> tuple[Stream, ...]:
    """The whole decoder from its layers' attention and MLP: tokens, two RMSNorms a layer, final norm, head."""
    c = t.config
    tokens = t("model.embed_tokens.weight", c.vocab_size, c.hidden_size)

    def rms(name: str):
        return norm(t, name, "rms", c.hidden_size, c.rms_norm_eps, bias=False)

    blocks = tuple(
        Block(
            (
                Branch(body, rms(f"model.layers.{layer}.input_layernorm")),
                Branch(mlp, rms(f"model.layers.{layer}.post_attention_layernorm")),
            )
        )
        for layer, (body, mlp) in enumerate(layer_parts)
    )
    tables = (Table("tokens", tokens),)
    return (Stream("decoder", tables, blocks, rms("model.norm"), head=language_head(t, tokens)),)


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    act = activation(t)
    bias, mlp_bias = getattr(c, "attention_bias", False), getattr(c, "mlp_bias", False)
    return decoder(
        t,
        [
            (
                self_attention(t, f"model.layers.{layer}.self_attn", bias, bias),
                gated_mlp(t, f"model.layers.{layer}.mlp", c.hidden_size, c.intermediate_size, act, mlp_bias),
            )
            for layer in range(c.num_hidden_layers)
        ],
    )


FAMILY = Family(
    name="llama",
    model_types=("llama", "mistral"),
    build=build,
    fields=words(FIELDS),
    aliases=(("model.", ""),),
)
