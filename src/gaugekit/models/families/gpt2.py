"""GPT-2: LayerNorm before each branch, learned positions, Conv1D (transposed) and fused qkv, tied head."""

from __future__ import annotations

from gaugekit.models.parts import activation, attention, language_head, norm, rows
from gaugekit.models.registry import Family, words
from gaugekit.models.source import Source
from gaugekit.models.spec import MLP, Block, Branch, Linear, Stream, Table


def conv1d(t: Source, name: str, inputs: int, outputs: int) -> Linear:
    """GPT-2's Conv1D stores (inputs, outputs): seen as a reader (outputs, inputs)."""
    return Linear(t(f"{name}.weight", inputs, outputs).transpose(0, 1), t(f"{name}.bias", outputs))


def conv1d_writer(t: Source, name: str, columns: int, width: int) -> Linear:
    """The same tensor as a writer (columns, width), which is how it lies on disk."""
    return Linear(t(f"{name}.weight", columns, width), t(f"{name}.bias", width))


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    d, h, f = c.hidden_size, c.num_attention_heads, c.n_inner or 4 * c.hidden_size
    if c.add_cross_attention:
        t.refuse("add_cross_attention", "the cross-attention's source is not part of this model")
    act = activation(t, "activation_function")
    tokens = t("transformer.wte.weight", c.vocab_size, d)
    positions = t("transformer.wpe.weight", c.n_positions, d)
    blocks = []
    for layer in range(c.num_hidden_layers):
        at = f"transformer.h.{layer}"
        qkv = conv1d(t, f"{at}.attn.c_attn", d, 3 * d)
        body = attention(
            rows(qkv, 0, d), rows(qkv, d, d), rows(qkv, 2 * d, d), conv1d_writer(t, f"{at}.attn.c_proj", d, d), h, h
        )
        mlp = MLP(conv1d(t, f"{at}.mlp.c_fc", d, f), conv1d_writer(t, f"{at}.mlp.c_proj", f, d), act)
        ln_1 = norm(t, f"{at}.ln_1", "layer", d, c.layer_norm_epsilon, bias=True)
        ln_2 = norm(t, f"{at}.ln_2", "layer", d, c.layer_norm_epsilon, bias=True)
        blocks.append(Block((Branch(body, ln_1), Branch(mlp, ln_2))))
    return (
        Stream(
            "decoder",
            (Table("tokens", tokens), Table("positions", positions)),
            tuple(blocks),
            norm(t, "transformer.ln_f", "layer", d, c.layer_norm_epsilon, bias=True),
            sums=(("tokens", "positions"),),
            head=language_head(t, tokens),
        ),
    )


FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    build=build,
    fields=words(
        "activation_function add_cross_attention layer_norm_epsilon n_ctx n_embd n_head n_inner n_layer n_positions"
        " reorder_and_upcast_attn scale_attn_by_inverse_layer_idx scale_attn_weights summary_activation"
        " summary_proj_to_labels summary_type summary_use_proj tie_word_embeddings vocab_size"
    ),
    aliases=(("transformer.", ""),),
)
