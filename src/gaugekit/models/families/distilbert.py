"""DistilBERT: BERT under other names, without token types and pooler. Observed at the last hidden state."""

from __future__ import annotations

from gaugekit.models.parts import activation, attention, norm, plain_mlp, table
from gaugekit.models.registry import Family, words
from gaugekit.models.source import Source
from gaugekit.models.spec import Block, Branch, Stream, Table


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    d, h, f = c.dim, c.n_heads, c.hidden_dim
    act = activation(t, "activation")

    def layer_norm(name: str):
        # transformers writes this eps into the class, not into the config.
        return norm(t, name, "layer", d, 1e-12, bias=True)

    base = "distilbert"
    tokens = t(f"{base}.embeddings.word_embeddings.weight", c.vocab_size, d)
    positions = t(f"{base}.embeddings.position_embeddings.weight", c.max_position_embeddings, d)
    padding = () if c.pad_token_id is None else (c.pad_token_id,)
    embed_norm = layer_norm(f"{base}.embeddings.LayerNorm")
    blocks = []
    for layer in range(c.n_layers):
        at = f"{base}.transformer.layer.{layer}"
        body = attention(
            t.linear(f"{at}.attention.q_lin", d, d),
            t.linear(f"{at}.attention.k_lin", d, d),
            t.linear(f"{at}.attention.v_lin", d, d),
            t.writer(f"{at}.attention.out_lin", d, d),
            h,
            h,
        )
        mlp = plain_mlp(t, f"{at}.ffn.lin1", f"{at}.ffn.lin2", d, f, act)
        blocks.append(
            Block(
                (
                    Branch(body, norm_sum=layer_norm(f"{at}.sa_layer_norm")),
                    Branch(mlp, norm_sum=layer_norm(f"{at}.output_layer_norm")),
                )
            )
        )
    return (
        Stream(
            "encoder",
            (
                table(t, "tokens", tokens, padding, "padding row, masked wherever it occurs"),
                Table("positions", positions),
            ),
            tuple(blocks),
            None,
            sums=(("tokens", "positions"),),
            embed_norm=embed_norm,
        ),
    )


FAMILY = Family(
    name="distilbert",
    model_types=("distilbert",),
    build=build,
    fields=words(
        "activation dim hidden_dim max_position_embeddings n_heads n_layers sinusoidal_pos_embds tie_weights_"
        " tie_word_embeddings vocab_size"
    ),
    aliases=(("distilbert.", ""),),
    outside=(
        (
            r"^(vocab_transform|vocab_layer_norm|vocab_projector|pre_classifier|classifier|qa_outputs)\.",
            "task head, outside the hidden states",
        ),
    ),
)
