"""Every family and the shapes at which it is proved. A new family adds its rows here."""

from __future__ import annotations

from typing import Any

from oracle import Case


def llama_like(**extra: Any) -> dict[str, Any]:
    """d = 8, two heads of 4, f = 9, two layers, V = 13."""
    base = {
        "vocab_size": 13,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 9,
        "max_position_embeddings": 16,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    return base | extra


def rope(factor: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": factor}}


def neox_like(**extra: Any) -> dict[str, Any]:
    base = llama_like(**extra)
    del base["num_key_value_heads"]
    return base


def gpt_like(**extra: Any) -> dict[str, Any]:
    base = {
        "vocab_size": 13,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 6,
        "n_inner": 9,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return base | extra


def bert_like(**extra: Any) -> dict[str, Any]:
    base = {
        "vocab_size": 11,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 5,
        "max_position_embeddings": 6,
        "type_vocab_size": 2,
        "pad_token_id": None,
    }
    return base | extra


def opt_like(**extra: Any) -> dict[str, Any]:
    base = {
        "vocab_size": 13,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 9,
        "max_position_embeddings": 6,
        "word_embed_proj_dim": 8,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return base | extra


def bloom_like(**extra: Any) -> dict[str, Any]:
    # Its MLP always has 4 d hidden units.
    return {"vocab_size": 20, "hidden_size": 6, "n_layer": 2, "n_head": 2, "pad_token_id": None} | extra


def neo_like(layers: int, **extra: Any) -> dict[str, Any]:
    base = {
        "vocab_size": 13,
        "hidden_size": 8,
        "num_layers": layers,
        "num_heads": 2,
        "attention_types": [[["global", "local"][:layers], 1]],
        "max_position_embeddings": 6,
        "intermediate_size": 9,
        "window_size": 3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return base | extra


def distil_like(**extra: Any) -> dict[str, Any]:
    base = {
        "vocab_size": 11,
        "dim": 8,
        "n_layers": 1,
        "n_heads": 2,
        "hidden_dim": 5,
        "max_position_embeddings": 6,
        "pad_token_id": None,
    }
    return base | extra


def vit_like(**extra: Any) -> dict[str, Any]:
    base = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 9,
        "image_size": 4,
        "patch_size": 2,
        "num_channels": 2,
    }
    return base | extra


def whisper_like(**extra: Any) -> dict[str, Any]:
    base = {
        "vocab_size": 9,
        "d_model": 6,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 5,
        "decoder_ffn_dim": 5,
        "num_mel_bins": 2,
        "max_source_positions": 4,
        "max_target_positions": 5,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "decoder_start_token_id": 1,
    }
    return base | extra


MQA = {"num_key_value_heads": 1}
MHA = {"num_key_value_heads": 2}
TIED = {"tie_word_embeddings": True}
ONE = {"num_hidden_layers": 1}
# All pairs turn alike, so a complex GL(2) commutes with them: 8 dimensions where two pairs of their own have 4.
EQUAL = {"rope_type": "default", "rope_theta": 1.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
# Head dimension apart from d / h, and three query heads on one key/value head or four on two.
ODD = {"num_attention_heads": 3, "head_dim": 4}
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_hidden_layers": 1}

CASES = [
    Case("gpt2", gpt_like(), total=342, note="two layers"),
    Case("gpt2", gpt_like(n_layer=1), note="one layer"),
    Case("gpt2", gpt_like(tie_word_embeddings=False, activation_function="relu"), note="untied, ReLU"),
    Case("gpt2", gpt_like(n_layer=1, n_head=4), "logits", note="logits"),
    Case("gpt2", gpt_like(n_layer=1), "hidden", note="hidden"),
    Case("llama", llama_like(), total=134, note="untied, one kv head"),
    Case("llama", llama_like(**TIED), total=90, note="tied"),
    Case("llama", llama_like(**ONE, **MHA, attention_bias=True, mlp_bias=True), note="biases"),
    Case("llama", llama_like(**WIDE, hidden_act="relu"), note="wide heads, ReLU gate"),
    Case("llama", llama_like(**ONE), "logits", note="logits"),
    Case("llama", llama_like(**ONE, rope_parameters=EQUAL), total=16 + 8 + 9 + 24 + 8 + 28, note="equal turns"),
    Case("llama", llama_like(**ONE, rope_parameters=LINEAR), note="rescaled turns"),
    Case("llama", llama_like(**ONE), "hidden", note="hidden"),
    Case("llama", llama_like(**ONE), "similarities", note="similarities"),
    Case("mistral", llama_like(), total=134, note="untied, one kv head"),
    Case(
        "mistral",
        llama_like(num_attention_heads=14, num_key_value_heads=2, head_dim=2, **ONE),
        note="fourteen heads on two",
    ),
    Case("mistral", llama_like(**ODD, **ONE), note="three heads on one"),
    Case("mistral", llama_like(**TIED, **MHA, sliding_window=3), note="tied, window"),
    Case("qwen2", llama_like(), total=134, note="untied, one kv head"),
    Case("qwen2", llama_like(**MHA, **TIED), note="tied"),
    Case("qwen2", llama_like(**MHA, **ONE), note="two kv heads"),
    Case("qwen3", llama_like(head_dim=4), total=130, note="untied, one kv head"),
    Case("qwen3", llama_like(**WIDE), note="wide heads"),
    Case("qwen3", llama_like(**TIED, **MHA, head_dim=4), note="tied"),
    Case("qwen3", llama_like(**ONE, head_dim=4, attention_bias=True), note="biases"),
    Case("gemma2", llama_like(head_dim=4, **TIED), total=90, note="tied"),
    Case("gemma2", llama_like(**WIDE), note="untied, wide heads"),
    Case("gemma2", llama_like(head_dim=4, **ONE, **MHA, attn_logit_softcapping=None), note="untied, no score cap"),
    Case("gemma2", llama_like(head_dim=4, **ONE, final_logit_softcapping=None, attention_bias=True), note="biases"),
    Case("gemma3_text", llama_like(head_dim=4, **TIED), total=86, note="tied"),
    Case("gemma3_text", llama_like(**WIDE), note="untied, wide heads"),
    Case("gemma3_text", llama_like(**MHA, **TIED, **ONE, head_dim=4), note="two kv heads"),
    Case("olmo2", llama_like(**MHA), total=106, note="untied, two kv heads"),
    Case("olmo2", llama_like(**ONE), note="one kv head"),
    Case("olmo2", llama_like(**TIED, **ONE, num_attention_heads=4, num_key_value_heads=2), note="tied, four on two"),
    Case("phi", llama_like(vocab_size=30, **MHA, **rope(0.5)), total=367, note="rotary half"),
    Case("phi", llama_like(vocab_size=30, **MHA, **ONE, **TIED, **rope(0.5)), note="tied with a bias"),
    Case("phi", llama_like(vocab_size=30, **MQA, **ONE, **rope(1.0)), note="rotary whole, one kv head"),
    Case("phi3", llama_like(), total=134, note="untied, one kv head"),
    Case("phi3", llama_like(**MHA, **ONE, **TIED), note="tied"),
    Case("phi3", llama_like(**MHA, **ONE, **rope(0.5)), note="rotary half"),
    Case("gpt_neox", neox_like(vocab_size=30, **rope(0.5)), total=369, note="parallel"),
    Case("gpt_neox", neox_like(vocab_size=30, **ONE, **rope(0.25)), note="an odd number of rotary dimensions"),
    Case("gpt_neox", neox_like(use_parallel_residual=False, **rope(0.5)), total=338, note="sequential"),
    Case("gpt_neox", neox_like(**ONE, **TIED, vocab_size=30, **rope(1.0)), note="tied, rotary whole"),
    Case("gpt_neox", neox_like(**ONE, vocab_size=30, attention_bias=False, **rope(0.5)), note="no attention bias"),
    Case("opt", opt_like(), total=376, note="two layers"),
    Case("opt", opt_like(num_hidden_layers=1, num_attention_heads=4), note="one layer"),
    Case("opt", opt_like(num_hidden_layers=1, tie_word_embeddings=False), note="untied"),
    Case("opt", opt_like(num_hidden_layers=1, enable_bias=False), note="no biases"),
    Case("bloom", bloom_like(), note="two layers"),
    Case("bloom", bloom_like(hidden_size=4, n_layer=1, n_head=1), note="one head as wide as the stream"),
    Case("bloom", bloom_like(n_head=3, n_layer=1), note="three heads"),
    Case("bloom", bloom_like(n_layer=1), "logits", note="logits"),
    Case("stablelm", llama_like(**MHA, **rope(0.5)), note="untied"),
    Case("stablelm", llama_like(**ONE, **rope(0.5), use_qkv_bias=True), note="qkv bias, one kv head"),
    Case("stablelm", llama_like(**ONE, **MHA, **rope(0.5), use_qkv_bias=True), note="qkv bias, two kv heads"),
    Case("stablelm", llama_like(**TIED, **ONE, **rope(0.5)), note="tied"),
    Case(
        "stablelm",
        llama_like(vocab_size=40, intermediate_size=4, **ONE, **rope(0.5), use_parallel_residual=True),
        note="parallel",
    ),
    Case("starcoder2", llama_like(**TIED), note="tied"),
    Case("starcoder2", llama_like(**MHA, **ONE), note="untied"),
    Case("starcoder2", llama_like(**ONE, use_bias=False), note="no biases"),
    Case("cohere", llama_like(vocab_size=40, intermediate_size=4, **TIED), note="tied"),
    Case("cohere", llama_like(vocab_size=40, intermediate_size=4, **MHA, **ONE), note="untied"),
    Case("cohere", llama_like(vocab_size=40, intermediate_size=4, **ONE, attention_bias=True), note="attention bias"),
    Case("gpt_neo", neo_like(2), note="two layers"),
    Case("gpt_neo", neo_like(1), note="one layer"),
    Case("gpt_neo", neo_like(1, tie_word_embeddings=False), note="untied"),
    Case("mixtral", llama_like(num_local_experts=3, num_experts_per_tok=2, **ONE), note="three experts"),
    Case("mixtral", llama_like(num_local_experts=2, num_experts_per_tok=2), note="all experts"),
    Case("mixtral", llama_like(num_local_experts=3, num_experts_per_tok=2, **ONE, **TIED, **MHA), note="tied"),
    Case(
        "qwen3_moe",
        llama_like(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=5, head_dim=4, **ONE),
        note="three experts",
    ),
    Case(
        "qwen3_moe",
        llama_like(
            num_experts=2, num_experts_per_tok=1, moe_intermediate_size=5, head_dim=4, **MHA, decoder_sparse_step=2
        ),
        note="one dense layer",
    ),
    Case(
        "qwen3_moe",
        llama_like(
            num_experts=3,
            num_experts_per_tok=2,
            moe_intermediate_size=5,
            head_dim=4,
            norm_topk_prob=True,
            **ONE,
            **TIED,
        ),
        note="tied, renormalised",
    ),
    Case("bert", bert_like(), "hidden", total=245, note="one layer", inputs="typed text"),
    Case("bert", bert_like(), "similarities", total=245, note="similarities", inputs="typed text"),
    Case("bert", bert_like(num_hidden_layers=2, num_attention_heads=4), "hidden", note="two", inputs="typed text"),
    Case("bert", bert_like(pad_token_id=0, type_vocab_size=3), "hidden", note="padding row", inputs="typed text"),
    Case(
        "roberta",
        bert_like(pad_token_id=1, type_vocab_size=1, max_position_embeddings=8),
        "hidden",
        note="one type",
        inputs="typed text",
    ),
    Case(
        "roberta",
        bert_like(pad_token_id=1, max_position_embeddings=8, num_hidden_layers=2),
        "hidden",
        note="two layers",
        inputs="typed text",
    ),
    Case(
        "roberta",
        bert_like(pad_token_id=0, max_position_embeddings=7, num_attention_heads=1),
        "hidden",
        note="one head",
        inputs="typed text",
    ),
    Case("distilbert", distil_like(), "hidden", note="one layer"),
    Case("distilbert", distil_like(n_layers=2, n_heads=4), "hidden", note="two layers"),
    Case("distilbert", distil_like(pad_token_id=0, activation="relu"), "hidden", note="padding row, ReLU"),
    Case("vit", vit_like(), "hidden", note="one layer", inputs="images"),
    Case("vit", vit_like(num_hidden_layers=2, num_attention_heads=4), "hidden", note="two layers", inputs="images"),
    Case("vit", vit_like(qkv_bias=False, num_attention_heads=1), "hidden", note="no qkv bias", inputs="images"),
    Case("dinov2", vit_like(mlp_ratio=1), "hidden", note="one layer", inputs="images"),
    Case("dinov2", vit_like(mlp_ratio=1, num_hidden_layers=2), "hidden", note="two layers", inputs="images"),
    Case("dinov2", vit_like(mlp_ratio=1, use_swiglu_ffn=True), "hidden", note="gated", inputs="images"),
    Case("whisper", whisper_like(), note="one and one", inputs="audio"),
    Case("whisper", whisper_like(decoder_layers=2, decoder_attention_heads=3), note="one and two", inputs="audio"),
    Case("whisper", whisper_like(encoder_layers=2, encoder_attention_heads=1), note="two and one", inputs="audio"),
]


def first_of_each(cases: list[Case]) -> list[Case]:
    """One case a model type."""
    return list({case.model_type: case for case in reversed(cases)}.values())
