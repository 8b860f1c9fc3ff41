"""Phi: attention and MLP in parallel behind one LayerNorm, partial rotary positions, biases everywhere."""

from __future__ import annotations

from gaugekit.models.families.llama import FIELDS
from gaugekit.models.parts import activation, attention, language_head, norm, plain_mlp
from gaugekit.models.registry import Family, words
from gaugekit.models.rotary import rotary
from gaugekit.models.source import Source
from gaugekit.models.spec import Block, Branch, Stream, Table


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    d, h, g = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
    k = getattr(c, "head_dim", None) or d // h
    if c.qk_layernorm:
        t.refuse("qk_layernorm", "LayerNorm on queries and keys is not described")
    act = activation(t)
    tokens = t("model.embed_tokens.weight", c.vocab_size, d)
    blocks = []
    for layer in range(c.num_hidden_layers):
        at = f"model.layers.{layer}"
        body = attention(
            t.linear(f"{at}.self_attn.q_proj", h * k, d),
            t.linear(f"{at}.self_attn.k_proj", g * k, d),
            t.linear(f"{at}.self_attn.v_proj", g * k, d),
            t.writer(f"{at}.self_attn.dense", d, h * k),
            h,
            g,
            rotary=rotary(c, k),
        )
        mlp = plain_mlp(t, f"{at}.mlp.fc1", f"{at}.mlp.fc2", d, c.intermediate_size, act)
        shared = norm(t, f"{at}.input_layernorm", "layer", d, c.layer_norm_eps, bias=True)
        blocks.append(Block((Branch(body, shared), Branch(mlp, shared)), parallel=True))
    final = norm(t, "model.final_layernorm", "layer", d, c.layer_norm_eps, bias=True)
    head = language_head(t, tokens, bias=t.has("lm_head.bias"))
    return (Stream("decoder", (Table("tokens", tokens),), tuple(blocks), final, head=head),)


FAMILY = Family(
    name="phi",
    model_types=("phi",),
    build=build,
    fields=words(f"{FIELDS} layer_norm_eps partial_rotary_factor qk_layernorm"),
    aliases=(("model.", ""),),
)
