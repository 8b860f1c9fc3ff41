"""Whisper: an audio encoder behind two convolutions and a text decoder that attends to it; keys have no bias."""

from __future__ import annotations

from gaugekit.models.parts import activation, attention, language_head, norm, plain_mlp
from gaugekit.models.registry import Family, words
from gaugekit.models.source import Source
from gaugekit.models.spec import Attention, Block, Branch, Stream, Table


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    d, act = c.d_model, activation(t, "activation_function")

    def layer_norm(name: str):
        # transformers gives every Whisper LayerNorm torch's default eps.
        return norm(t, name, "layer", d, 1e-5, bias=True)

    def attend(at: str, heads: int, memory: str | None = None) -> Attention:
        return attention(
            t.linear(f"{at}.q_proj", d, d),
            t.linear(f"{at}.k_proj", d, d, bias=False),
            t.linear(f"{at}.v_proj", d, d),
            t.writer(f"{at}.out_proj", d, d),
            heads,
            heads,
            memory=memory,
        )

    def encoder_block(at: str) -> Block:
        return Block(
            (
                Branch(attend(f"{at}.self_attn", c.encoder_attention_heads), layer_norm(f"{at}.self_attn_layer_norm")),
                Branch(
                    plain_mlp(t, f"{at}.fc1", f"{at}.fc2", d, c.encoder_ffn_dim, act),
                    layer_norm(f"{at}.final_layer_norm"),
                ),
            )
        )

    def decoder_block(at: str) -> Block:
        heads = c.decoder_attention_heads
        return Block(
            (
                Branch(attend(f"{at}.self_attn", heads), layer_norm(f"{at}.self_attn_layer_norm")),
                Branch(
                    attend(f"{at}.encoder_attn", heads, memory="encoder"),
                    layer_norm(f"{at}.encoder_attn_layer_norm"),
                ),
                Branch(
                    plain_mlp(t, f"{at}.fc1", f"{at}.fc2", d, c.decoder_ffn_dim, act),
                    layer_norm(f"{at}.final_layer_norm"),
                ),
            )
        )

    t("model.encoder.conv1.weight", d, c.num_mel_bins, 3)
    t("model.encoder.conv1.bias", d)
    kernel = t("model.encoder.conv2.weight", d, d, 3).permute(1, 2, 0)
    bias = t("model.encoder.conv2.bias", d).unsqueeze(0)
    encoder = Stream(
        "encoder",
        (
            Table("positions", t("model.encoder.embed_positions.weight", c.max_source_positions, d)),
            Table("convolution", kernel, linear=False),
            Table("convolution bias", bias, linear=False),
        ),
        tuple(encoder_block(f"model.encoder.layers.{layer}") for layer in range(c.encoder_layers)),
        layer_norm("model.encoder.layer_norm"),
    )
    tokens = t("model.decoder.embed_tokens.weight", c.vocab_size, d)
    positions = t("model.decoder.embed_positions.weight", c.max_target_positions, d)
    decoder = Stream(
        "decoder",
        (Table("tokens", tokens), Table("positions", positions)),
        tuple(decoder_block(f"model.decoder.layers.{layer}") for layer in range(c.decoder_layers)),
        layer_norm("model.decoder.layer_norm"),
        sums=(("tokens", "positions"),),
        head=language_head(t, tokens, "proj_out"),
    )
    return encoder, decoder


FAMILY = Family(
    name="whisper",
    model_types=("whisper",),
    build=build,
    fields=words(
        "activation_function apply_spec_augment d_model decoder_attention_heads decoder_ffn_dim decoder_layers"
        " encoder_attention_heads encoder_ffn_dim encoder_layers mask_feature_length mask_feature_min_masks"
        " mask_feature_prob mask_time_length mask_time_min_masks mask_time_prob max_source_positions"
        " max_target_positions median_filter_width num_hidden_layers num_mel_bins scale_embedding"
        " tie_word_embeddings use_weighted_layer_sum vocab_size"
    ),
    aliases=(("model.", ""),),
)
