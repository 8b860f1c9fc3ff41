"""Gemma 2 and Gemma 3 (text): RMSNorms of the 1 + w kind before and after each branch, a tied head.

Gemma 2 caps scores and logits by a tanh; Gemma 3 norms queries and keys and turns local and global layers at
different rotary bases. Of Gemma 3 with images only the text model is described: images are no part of the observable.
"""

from __future__ import annotations

from gaugekit.models.parts import activation, attention, gated_mlp, language_head, norm
from gaugekit.models.registry import Family, words
from gaugekit.models.rotary import rotary
from gaugekit.models.source import Source
from gaugekit.models.spec import Attention, Block, Branch, QKNorm, Stream, Table


def self_attention(t: Source, layer: int) -> Attention:
    c = t.config
    at = f"model.layers.{layer}.self_attn"
    d, h, g, k, bias = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.attention_bias
    norms = None
    if c.model_type == "gemma3_text":
        q_norm = norm(t, f"{at}.q_norm", "rms", k, c.rms_norm_eps, bias=False, plus_one=True)
        k_norm = norm(t, f"{at}.k_norm", "rms", k, c.rms_norm_eps, bias=False, plus_one=True)
        norms = QKNorm(q_norm.weight.unsqueeze(0), k_norm.weight.unsqueeze(0), c.rms_norm_eps, "head")
    return attention(
        t.linear(f"{at}.q_proj", h * k, d, bias),
        t.linear(f"{at}.k_proj", g * k, d, bias),
        t.linear(f"{at}.v_proj", g * k, d, bias),
        t.writer(f"{at}.o_proj", d, h * k, bias),
        h,
        g,
        rotary=rotary(c, k, layer_type=c.layer_types[layer]),
        qk_norm=norms,
        softcap=c.attn_logit_softcapping is not None,
    )


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    d, act = c.hidden_size, activation(t, "hidden_activation")
    tokens = t("model.embed_tokens.weight", c.vocab_size, d)

    def rms(name: str):
        return norm(t, name, "rms", d, c.rms_norm_eps, bias=False, plus_one=True)

    blocks = []
    for layer in range(c.num_hidden_layers):
        at = f"model.layers.{layer}"
        mlp = gated_mlp(t, f"{at}.mlp", d, c.intermediate_size, act)
        blocks.append(
            Block(
                (
                    Branch(
                        self_attention(t, layer),
                        rms(f"{at}.input_layernorm"),
                        rms(f"{at}.post_attention_layernorm"),
                    ),
                    Branch(mlp, rms(f"{at}.pre_feedforward_layernorm"), rms(f"{at}.post_feedforward_layernorm")),
                )
            )
        )
    head = language_head(t, tokens, softcap=c.final_logit_softcapping is not None)
    return (Stream("decoder", (Table("tokens", tokens),), tuple(blocks), rms("model.norm"), head=head),)


FAMILY = Family(
    name="gemma",
    model_types=("gemma2", "gemma3_text"),
    build=build,
    fields=words(
        "attention_bias attn_logit_softcapping cache_implementation final_logit_softcapping head_dim hidden_act"
        " hidden_activation hidden_size intermediate_size layer_types max_position_embeddings num_attention_heads"
        " num_hidden_layers num_key_value_heads query_pre_attn_scalar rms_norm_eps rope_local_base_freq"
        " rope_parameters rope_scaling rope_theta sliding_window sliding_window_pattern tie_word_embeddings"
        " use_bidirectional_attention vocab_size"
    ),
    aliases=tuple(
        ("model.", other) for other in ("", "language_model.model.", "model.language_model.", "language_model.")
    ),
    outside=((r"(^|\.)(vision_tower|multi_modal_projector)\.", "image part, outside a text observable"),),
    wrappers=("gemma3",),
)
