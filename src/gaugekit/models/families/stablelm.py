"""StableLM: LayerNorms with biases before unbiased projections, partial rotary positions, a gated MLP."""

from __future__ import annotations

from gaugekit.models.families.llama import FIELDS
from gaugekit.models.parts import activation, attention, gated_mlp, language_head, norm
from gaugekit.models.registry import Family, words
from gaugekit.models.rotary import rotary
from gaugekit.models.source import Source
from gaugekit.models.spec import Block, Branch, Stream, Table


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    d, h, g = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
    k = d // h
    if c.qk_layernorm:
        t.refuse("qk_layernorm", "LayerNorm on queries and keys is not described")
    act = activation(t)
    tokens = t("model.embed_tokens.weight", c.vocab_size, d)

    def layer_norm(name: str):
        return norm(t, name, "layer", d, c.layer_norm_eps, bias=True)

    blocks = []
    for layer in range(c.num_hidden_layers):
        at = f"model.layers.{layer}"
        body = attention(
            t.linear(f"{at}.self_attn.q_proj", h * k, d, c.use_qkv_bias),
            t.linear(f"{at}.self_attn.k_proj", g * k, d, c.use_qkv_bias),
            t.linear(f"{at}.self_attn.v_proj", g * k, d, c.use_qkv_bias),
            t.writer(f"{at}.self_attn.o_proj", d, h * k, bias=False),
            h,
            g,
            rotary=rotary(c, k),
        )
        mlp = gated_mlp(t, f"{at}.mlp", d, c.intermediate_size, act)
        first = layer_norm(f"{at}.input_layernorm")
        second = first if c.use_parallel_residual else layer_norm(f"{at}.post_attention_layernorm")
        blocks.append(Block((Branch(body, first), Branch(mlp, second)), parallel=c.use_parallel_residual))
    final = layer_norm("model.norm")
    head = language_head(t, tokens)
    return (Stream("decoder", (Table("tokens", tokens),), tuple(blocks), final, head=head),)


FAMILY = Family(
    name="stablelm",
    model_types=("stablelm",),
    build=build,
    fields=words(f"{FIELDS} layer_norm_eps partial_rotary_factor qk_layernorm use_parallel_residual use_qkv_bias"),
    aliases=(("model.", ""),),
)
