"""Cohere (Command R): one LayerNorm without bias for attention and MLP in parallel, interleaved rotary rows."""

from __future__ import annotations

from gaugekit.models.families.llama import FIELDS
from gaugekit.models.parts import activation, attention, gated_mlp, language_head, norm
from gaugekit.models.registry import Family, words
from gaugekit.models.rotary import rotary
from gaugekit.models.source import Source
from gaugekit.models.spec import Block, Branch, Stream, Table


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    d, h, g, bias = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.attention_bias
    k = getattr(c, "head_dim", None) or d // h
    if c.use_qk_norm:
        t.refuse("use_qk_norm", "LayerNorm on queries and keys is not described")
    act = activation(t)
    tokens = t("model.embed_tokens.weight", c.vocab_size, d)
    blocks = []
    for layer in range(c.num_hidden_layers):
        at = f"model.layers.{layer}"
        body = attention(
            t.linear(f"{at}.self_attn.q_proj", h * k, d, bias),
            t.linear(f"{at}.self_attn.k_proj", g * k, d, bias),
            t.linear(f"{at}.self_attn.v_proj", g * k, d, bias),
            t.writer(f"{at}.self_attn.o_proj", d, h * k, bias),
            h,
            g,
            rotary=rotary(c, k, interleaved=True),
        )
        mlp = gated_mlp(t, f"{at}.mlp", d, c.intermediate_size, act)
        shared = norm(t, f"{at}.input_layernorm", "layer", d, c.layer_norm_eps, bias=False)
        blocks.append(Block((Branch(body, shared), Branch(mlp, shared)), parallel=True))
    final = norm(t, "model.norm", "layer", d, c.layer_norm_eps, bias=False)
    head = language_head(t, tokens)
    return (Stream("decoder", (Table("tokens", tokens),), tuple(blocks), final, head=head),)


FAMILY = Family(
    name="cohere",
    model_types=("cohere",),
    build=build,
    fields=words(f"{FIELDS} layer_norm_eps logit_scale use_qk_norm"),
    aliases=(("model.", ""),),
)
