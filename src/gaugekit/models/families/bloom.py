"""BLOOM: a LayerNorm on the token embedding, ALiBi distances, qkv fused head by head, a tied head."""

from __future__ import annotations

from gaugekit.models.parts import fused_by_head, language_head, norm, plain_mlp
from gaugekit.models.registry import Family, words
from gaugekit.models.source import Source
from gaugekit.models.spec import Block, Branch, Stream, Table


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    d, h = c.hidden_size, c.n_head
    if c.apply_residual_connection_post_layernorm:
        t.refuse("apply_residual_connection_post_layernorm", "a residual taken after the norm is not described")

    def layer_norm(name: str):
        return norm(t, name, "layer", d, c.layer_norm_epsilon, bias=True)

    tokens = t("transformer.word_embeddings.weight", c.vocab_size, d)
    embed_norm = layer_norm("transformer.word_embeddings_layernorm")
    blocks = []
    for layer in range(c.n_layer):
        at = f"transformer.h.{layer}"
        body = fused_by_head(
            t.linear(f"{at}.self_attention.query_key_value", 3 * d, d),
            t.writer(f"{at}.self_attention.dense", d, d),
            h,
            distances=True,
        )
        # BLOOM's own GELU (tanh form) is not named in its config.
        mlp = plain_mlp(t, f"{at}.mlp.dense_h_to_4h", f"{at}.mlp.dense_4h_to_h", d, 4 * d, "gelu_pytorch_tanh")
        blocks.append(
            Block(
                (
                    Branch(body, layer_norm(f"{at}.input_layernorm")),
                    Branch(mlp, layer_norm(f"{at}.post_attention_layernorm")),
                )
            )
        )
    final = layer_norm("transformer.ln_f")
    tables = (Table("tokens", tokens),)
    head = language_head(t, tokens)
    return (Stream("decoder", tables, tuple(blocks), final, embed_norm=embed_norm, head=head),)


FAMILY = Family(
    name="bloom",
    model_types=("bloom",),
    build=build,
    fields=words(
        "apply_residual_connection_post_layernorm hidden_size layer_norm_epsilon n_embed n_head n_layer"
        " num_attention_heads offset_alibi seq_length skip_bias_add skip_bias_add_qkv slow_but_exact"
        " tie_word_embeddings unk_token_id vocab_size"
    ),
    aliases=(("transformer.", ""),),
)
