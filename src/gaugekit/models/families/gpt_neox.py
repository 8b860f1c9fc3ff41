"""GPT-NeoX (Pythia): LayerNorms, branches in parallel or in sequence, qkv fused head by head, partial rotary."""

from __future__ import annotations

from gaugekit.models.parts import activation, fused_by_head, language_head, norm, plain_mlp
from gaugekit.models.registry import BUFFERS, Family, words
from gaugekit.models.rotary import rotary
from gaugekit.models.source import Source
from gaugekit.models.spec import Block, Branch, Stream, Table


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    d, h = c.hidden_size, c.num_attention_heads
    act = activation(t)
    tokens = t("gpt_neox.embed_in.weight", c.vocab_size, d)

    def layer_norm(name: str):
        return norm(t, name, "layer", d, c.layer_norm_eps, bias=True)

    blocks = []
    for layer in range(c.num_hidden_layers):
        at = f"gpt_neox.layers.{layer}"
        body = fused_by_head(
            t.linear(f"{at}.attention.query_key_value", 3 * d, d, c.attention_bias),
            t.writer(f"{at}.attention.dense", d, d, c.attention_bias),
            h,
            rotary=rotary(c, d // h),
        )
        mlp = plain_mlp(t, f"{at}.mlp.dense_h_to_4h", f"{at}.mlp.dense_4h_to_h", d, c.intermediate_size, act)
        branches = (
            Branch(body, layer_norm(f"{at}.input_layernorm")),
            Branch(mlp, layer_norm(f"{at}.post_attention_layernorm")),
        )
        blocks.append(Block(branches, parallel=c.use_parallel_residual))
    final = layer_norm("gpt_neox.final_layer_norm")
    head = language_head(t, tokens, "embed_out")
    return (Stream("decoder", (Table("tokens", tokens),), tuple(blocks), final, head=head),)


FAMILY = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    build=build,
    fields=words(
        "attention_bias hidden_act hidden_size intermediate_size is_decoder layer_norm_eps max_position_embeddings"
        " num_attention_heads num_hidden_layers partial_rotary_factor rope_parameters rope_scaling rope_theta"
        " rotary_emb_base rotary_pct tie_word_embeddings use_parallel_residual vocab_size"
    ),
    aliases=(("gpt_neox.", ""), ("embed_out.", "lm_head.")),
    buffers=(*BUFFERS, r"attention\.(masked_)?bias$"),
)
