"""ViT and DINOv2: image patches, a class token, LayerNorms before each branch. Observed at the last hidden state.

DINOv2 adds a LayerScale on each branch and, in its largest model, a gated MLP.
"""

from __future__ import annotations

from gaugekit.models.parts import activation, attention, gated_mlp, norm, plain_mlp, rows
from gaugekit.models.registry import Family, words
from gaugekit.models.source import Source
from gaugekit.models.spec import MLP, Block, Branch, Linear, Stream, Table


def square(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def tables(t: Source, base: str) -> tuple[Table, ...]:
    """Patch convolution, its bias, the class token and the positions, the class token's position apart."""
    c = t.config
    d = c.hidden_size
    (height, width), (ph, pw) = square(c.image_size), square(c.patch_size)
    patches = (height // ph) * (width // pw)
    at = f"{base}.embeddings"
    kernel = t(f"{at}.patch_embeddings.projection.weight", d, c.num_channels, ph, pw).permute(1, 2, 3, 0)
    bias = t(f"{at}.patch_embeddings.projection.bias", d).unsqueeze(0)
    positions = t(f"{at}.position_embeddings", 1, patches + 1, d).select(0, 0)
    return (
        Table("class token", t(f"{at}.cls_token", 1, 1, d).select(0, 0)),
        Table("class position", positions.narrow(0, 0, 1)),
        Table("patches", kernel),
        Table("patch bias", bias),
        Table("positions", positions.narrow(0, 1, patches)),
    )


SUMS = (("class token", "class position"), ("patch bias", "positions"))


def dinov2_mlp(t: Source, at: str, act: str) -> MLP:
    c = t.config
    d, f = c.hidden_size, int(c.hidden_size * c.mlp_ratio)
    if not c.use_swiglu_ffn:
        return plain_mlp(t, f"{at}.fc1", f"{at}.fc2", d, f, act)
    f = (int(f * 2 / 3) + 7) // 8 * 8
    if t.has(f"{at}.gate_proj.weight", otherwise=False):  # a living module holds apart what files hold fused
        return gated_mlp(t, at, d, f, "silu", bias=True)
    both: Linear = t.linear(f"{at}.weights_in", 2 * f, d)
    return MLP(up=rows(both, f, f), gate=rows(both, 0, f), down=t.writer(f"{at}.weights_out", d, f), activation="silu")


def build(t: Source) -> tuple[Stream, ...]:
    c = t.config
    dino = c.model_type == "dinov2"
    base = "dinov2" if dino else "vit"
    d, h = c.hidden_size, c.num_attention_heads
    act = activation(t)

    def layer_norm(name: str):
        return norm(t, name, "layer", d, c.layer_norm_eps, bias=True)

    sources = tables(t, base)
    if t.has(f"{base}.embeddings.mask_token", otherwise=dino and c.use_mask_token):
        shape = (1, d) if dino else (1, 1, d)
        t.unused(t(f"{base}.embeddings.mask_token", *shape), "mask token, used in pre-training only")
    blocks = []
    for layer in range(c.num_hidden_layers):
        at = f"{base}.encoder.layer.{layer}"
        body = attention(
            t.linear(f"{at}.attention.attention.query", d, d, c.qkv_bias),
            t.linear(f"{at}.attention.attention.key", d, d, c.qkv_bias),
            t.linear(f"{at}.attention.attention.value", d, d, c.qkv_bias),
            t.writer(f"{at}.attention.output.dense", d, d),
            h,
            h,
        )
        if dino:
            branches = (
                Branch(body, layer_norm(f"{at}.norm1"), scale=t(f"{at}.layer_scale1.lambda1", d)),
                Branch(
                    dinov2_mlp(t, f"{at}.mlp", act),
                    layer_norm(f"{at}.norm2"),
                    scale=t(f"{at}.layer_scale2.lambda1", d),
                ),
            )
        else:
            mlp = plain_mlp(t, f"{at}.intermediate.dense", f"{at}.output.dense", d, c.intermediate_size, act)
            branches = (
                Branch(body, layer_norm(f"{at}.layernorm_before")),
                Branch(mlp, layer_norm(f"{at}.layernorm_after")),
            )
        blocks.append(Block(branches))
    return (Stream("encoder", sources, tuple(blocks), layer_norm(f"{base}.layernorm"), sums=SUMS),)


FAMILY = Family(
    name="vit",
    model_types=("vit", "dinov2"),
    build=build,
    fields=words(
        "apply_layernorm hidden_act hidden_size image_size intermediate_size layer_norm_eps layerscale_value mlp_ratio"
        " num_attention_heads num_channels num_hidden_layers out_features out_indices patch_size pooler_act"
        " pooler_output_size qkv_bias reshape_hidden_states stage_names use_mask_token use_swiglu_ffn"
    ),
    aliases=(("vit.", ""), ("dinov2.", "")),
    living=(
        (r"(^|\.)layers\.(\d+)\.mlp\.fc1\.", r"\1layers.\2.intermediate.dense."),
        (r"(^|\.)layers\.(\d+)\.mlp\.fc2\.", r"\1layers.\2.output.dense."),
        (r"(^|\.)layers\.(\d+)\.", r"\1encoder.layer.\2."),
        (r"\.attention\.q_proj\.", ".attention.attention.query."),
        (r"\.attention\.k_proj\.", ".attention.attention.key."),
        (r"\.attention\.v_proj\.", ".attention.attention.value."),
        (r"\.attention\.o_proj\.", ".attention.output.dense."),
    ),
    outside=(
        (r"^(vit\.)?pooler\.", "pooler, outside the hidden states"),
        (r"^(classifier|decoder)\.", "task head, outside the hidden states"),
    ),
)
