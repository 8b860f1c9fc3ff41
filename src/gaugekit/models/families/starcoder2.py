"""StarCoder 2: LayerNorms with biases, biased projections, rotary positions, grouped queries, a plain MLP."""

from __future__ import annotations

from gaugekit.models.families.llama import FIELDS
from gaugekit.models.parts import activation, attention, language_head, norm, plain_mlp
from gaugekit.models.registry import Family, words
from gaugekit.models.rotary import rotary
from gaugekit.models.source import Source
from gaugekit.models.spec import Block, Branch, Stream, Table


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    d, h, g, bias = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.use_bias
    k = getattr(c, "head_dim", None) or d // h
    act = activation(t)
    tokens = t("model.embed_tokens.weight", c.vocab_size, d)

    def layer_norm(name: str):
        return norm(t, name, "layer", d, c.norm_epsilon, bias=True)

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
            rotary=rotary(c, k),
        )
        mlp = plain_mlp(t, f"{at}.mlp.c_fc", f"{at}.mlp.c_proj", d, c.intermediate_size, act, bias)
        blocks.append(
            Block(
                (
                    Branch(body, layer_norm(f"{at}.input_layernorm")),
                    Branch(mlp, layer_norm(f"{at}.post_attention_layernorm")),
                )
            )
        )
    head = language_head(t, tokens)
    return (Stream("decoder", (Table("tokens", tokens),), tuple(blocks), layer_norm("model.norm"), head=head),)


FAMILY = Family(
    name="starcoder2",
    model_types=("starcoder2",),
    build=build,
    fields=words(f"{FIELDS} mlp_type norm_epsilon norm_type use_bias"),
    aliases=(("model.", ""),),
)
