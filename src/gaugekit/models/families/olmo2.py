"""OLMo 2: no norm before a branch, an RMSNorm after it, and RMSNorms over the whole query and key projections."""

from __future__ import annotations

from gaugekit.models.families.llama import FIELDS
from gaugekit.models.parts import activation, attention, gated_mlp, language_head, norm
from gaugekit.models.registry import Family, words
from gaugekit.models.rotary import rotary
from gaugekit.models.source import Source
from gaugekit.models.spec import Attention, Block, Branch, QKNorm, Stream, Table


def self_attention(t: Source, at: str) -> Attention:
    c = t.config
    d, h, g, bias = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.attention_bias
    k = getattr(c, "head_dim", None) or d // h
    q_norm, k_norm = t(f"{at}.q_norm.weight", h * k), t(f"{at}.k_norm.weight", g * k)
    return attention(
        t.linear(f"{at}.q_proj", h * k, d, bias),
        t.linear(f"{at}.k_proj", g * k, d, bias),
        t.linear(f"{at}.v_proj", g * k, d, bias),
        t.writer(f"{at}.o_proj", d, h * k, bias),
        h,
        g,
        rotary=rotary(c, k),
        qk_norm=QKNorm(q_norm.unflatten(0, (h, k)), k_norm.unflatten(0, (g, k)), c.rms_norm_eps, "projection"),
    )


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    d, act = c.hidden_size, activation(t)
    tokens = t("model.embed_tokens.weight", c.vocab_size, d)

    def rms(name: str):
        return norm(t, name, "rms", d, c.rms_norm_eps, bias=False)

    blocks = []
    for layer in range(c.num_hidden_layers):
        at = f"model.layers.{layer}"
        body = self_attention(t, f"{at}.self_attn")
        mlp = gated_mlp(t, f"{at}.mlp", d, c.intermediate_size, act)
        blocks.append(
            Block(
                (
                    Branch(body, norm_out=rms(f"{at}.post_attention_layernorm")),
                    Branch(mlp, norm_out=rms(f"{at}.post_feedforward_layernorm")),
                )
            )
        )
    head = language_head(t, tokens)
    return (Stream("decoder", (Table("tokens", tokens),), tuple(blocks), rms("model.norm"), head=head),)


FAMILY = Family("olmo2", ("olmo2",), build, words(FIELDS), aliases=(("model.", ""),))
