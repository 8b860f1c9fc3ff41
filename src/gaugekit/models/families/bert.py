"""BERT and its kin: LayerNorm after each sum, learned positions, biases everywhere. Observed at the last hidden state.

RoBERTa shares the layout; its positions start behind the padding row.
"""

from __future__ import annotations

from gaugekit.models.parts import activation, attention, norm, plain_mlp, table
from gaugekit.models.registry import Family, words
from gaugekit.models.source import Source
from gaugekit.models.spec import Block, Branch, Stream, Table

OUTSIDE = (
    (r"^(cls|lm_head|qa_outputs|classifier|dropout)\.", "task head, outside the hidden states"),
    (r"^(bert|roberta)\.pooler\.", "pooler, outside the hidden states"),
    (r"^pooler\.", "pooler, outside the hidden states"),
)


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    base = "roberta" if c.model_type == "roberta" else "bert"
    d, h, f = c.hidden_size, c.num_attention_heads, c.intermediate_size
    if c.is_decoder or c.add_cross_attention:
        t.refuse("is_decoder", "only the encoder is described")
    if getattr(c, "position_embedding_type", "absolute") != "absolute":
        t.refuse("position_embedding_type", "relative positions inside attention are not described")
    act = activation(t)

    def layer_norm(name: str):
        return norm(t, name, "layer", d, c.layer_norm_eps, bias=True)

    tokens = t(f"{base}.embeddings.word_embeddings.weight", c.vocab_size, d)
    positions = t(f"{base}.embeddings.position_embeddings.weight", c.max_position_embeddings, d)
    types = t(f"{base}.embeddings.token_type_embeddings.weight", c.type_vocab_size, d)
    pad = c.pad_token_id
    padding = () if pad is None else (pad,)
    before: tuple[int, ...] = ()
    if base == "roberta":
        if pad is None:
            t.refuse("pad_token_id", "positions are counted from it")
        before = tuple(range(pad + 1))
    embed_norm = layer_norm(f"{base}.embeddings.LayerNorm")
    blocks = []
    for layer in range(c.num_hidden_layers):
        at = f"{base}.encoder.layer.{layer}"
        body = attention(
            t.linear(f"{at}.attention.self.query", d, d),
            t.linear(f"{at}.attention.self.key", d, d),
            t.linear(f"{at}.attention.self.value", d, d),
            t.writer(f"{at}.attention.output.dense", d, d),
            h,
            h,
        )
        mlp = plain_mlp(t, f"{at}.intermediate.dense", f"{at}.output.dense", d, f, act)
        blocks.append(
            Block(
                (
                    Branch(body, norm_sum=layer_norm(f"{at}.attention.output.LayerNorm")),
                    Branch(mlp, norm_sum=layer_norm(f"{at}.output.LayerNorm")),
                )
            )
        )
    return (
        Stream(
            "encoder",
            (
                table(t, "tokens", tokens, padding, "padding row, masked wherever it occurs"),
                table(t, "positions", positions, before, "position row before the first position"),
                Table("types", types),
            ),
            tuple(blocks),
            None,
            sums=(("tokens", "positions"), ("tokens", "types")),
            embed_norm=embed_norm,
        ),
    )


FAMILY = Family(
    name="bert",
    model_types=("bert", "roberta"),
    build=build,
    fields=words(
        "add_cross_attention hidden_act hidden_size intermediate_size is_decoder layer_norm_eps"
        " max_position_embeddings num_attention_heads num_hidden_layers position_embedding_type tie_word_embeddings"
        " type_vocab_size vocab_size"
    ),
    aliases=(("bert.", ""), ("roberta.", "")),
    outside=OUTSIDE,
)
