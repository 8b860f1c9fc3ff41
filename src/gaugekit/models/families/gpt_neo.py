"""GPT-Neo: GPT-2 with plain Linears, unbiased queries, keys and values, and local attention in some layers."""

from __future__ import annotations

from gaugekit.models.parts import activation, attention, language_head, norm, plain_mlp
from gaugekit.models.registry import Family, words
from gaugekit.models.source import Source
from gaugekit.models.spec import Block, Branch, Stream, Table


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    d, h, f = c.hidden_size, c.num_heads, c.intermediate_size or 4 * c.hidden_size
    act = activation(t, "activation_function")
    tokens = t("transformer.wte.weight", c.vocab_size, d)
    positions = t("transformer.wpe.weight", c.max_position_embeddings, d)

    def layer_norm(name: str):
        return norm(t, name, "layer", d, c.layer_norm_epsilon, bias=True)

    blocks = []
    for layer in range(c.num_layers):
        at = f"transformer.h.{layer}"
        body = attention(
            t.linear(f"{at}.attn.attention.q_proj", d, d, bias=False),
            t.linear(f"{at}.attn.attention.k_proj", d, d, bias=False),
            t.linear(f"{at}.attn.attention.v_proj", d, d, bias=False),
            t.writer(f"{at}.attn.attention.out_proj", d, d),
            h,
            h,
        )
        mlp = plain_mlp(t, f"{at}.mlp.c_fc", f"{at}.mlp.c_proj", d, f, act)
        blocks.append(Block((Branch(body, layer_norm(f"{at}.ln_1")), Branch(mlp, layer_norm(f"{at}.ln_2")))))
    return (
        Stream(
            "decoder",
            (Table("tokens", tokens), Table("positions", positions)),
            tuple(blocks),
            layer_norm("transformer.ln_f"),
            sums=(("tokens", "positions"),),
            head=language_head(t, tokens),
        ),
    )


FAMILY = Family(
    name="gpt_neo",
    model_types=("gpt_neo",),
    build=build,
    fields=words(
        "activation_function attention_layers attention_types hidden_size intermediate_size layer_norm_epsilon"
        " max_position_embeddings num_heads num_layers summary_activation summary_proj_to_labels summary_type"
        " summary_use_proj tie_word_embeddings tokenizer_class vocab_size window_size"
    ),
    aliases=(("transformer.", ""),),
)
