"""OPT: LayerNorms before each branch, learned positions that start at row 2, ReLU, a tied head."""

from __future__ import annotations

from gaugekit.models.parts import activation, attention, language_head, norm, plain_mlp, table
from gaugekit.models.registry import Family, words
from gaugekit.models.source import Source
from gaugekit.models.spec import Block, Branch, Stream

OFFSET = 2


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    d, h, bias = c.hidden_size, c.num_attention_heads, c.enable_bias
    if not c.do_layer_norm_before:
        t.refuse("do_layer_norm_before", "only the pre-norm variant is described")
    if c.word_embed_proj_dim != d:
        t.refuse("word_embed_proj_dim", f"a projection from it to hidden_size={d} is not described")
    if not c.layer_norm_elementwise_affine:
        t.refuse("layer_norm_elementwise_affine", "norms without weights are not described")
    if c._remove_final_layer_norm:
        t.refuse("_remove_final_layer_norm", "a stream without a last norm is not described")
    act = activation(t, "activation_function")

    def layer_norm(name: str):
        # transformers gives every OPT LayerNorm torch's default eps and a bias.
        return norm(t, name, "layer", d, 1e-5, bias=True)

    tokens = t("model.decoder.embed_tokens.weight", c.vocab_size, d)
    positions = t("model.decoder.embed_positions.weight", c.max_position_embeddings + OFFSET, d)
    blocks = []
    for layer in range(c.num_hidden_layers):
        at = f"model.decoder.layers.{layer}"
        body = attention(
            t.linear(f"{at}.self_attn.q_proj", d, d, bias),
            t.linear(f"{at}.self_attn.k_proj", d, d, bias),
            t.linear(f"{at}.self_attn.v_proj", d, d, bias),
            t.writer(f"{at}.self_attn.out_proj", d, d, bias),
            h,
            h,
        )
        mlp = plain_mlp(t, f"{at}.fc1", f"{at}.fc2", d, c.ffn_dim, act, bias)
        blocks.append(
            Block(
                (
                    Branch(body, layer_norm(f"{at}.self_attn_layer_norm")),
                    Branch(mlp, layer_norm(f"{at}.final_layer_norm")),
                )
            )
        )
    return (
        Stream(
            "decoder",
            (
                table(t, "tokens", tokens, (), ""),
                table(t, "positions", positions, tuple(range(OFFSET)), "position row before the first position"),
            ),
            tuple(blocks),
            layer_norm("model.decoder.final_layer_norm"),
            sums=(("tokens", "positions"),),
            head=language_head(t, tokens),
        ),
    )


FAMILY = Family(
    name="opt",
    model_types=("opt",),
    build=build,
    fields=words(
        "activation_function do_layer_norm_before enable_bias ffn_dim hidden_size layer_norm_elementwise_affine"
        " max_position_embeddings num_attention_heads num_hidden_layers tie_word_embeddings vocab_size"
        " word_embed_proj_dim"
    ),
    aliases=(("model.decoder.", "decoder."), ("model.decoder.", "")),
)
