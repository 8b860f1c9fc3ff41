"""Thirty public architectures at their real sizes: their configs, as far as they matter, and how many parameters the
class of `transformers` has that their config names, the task's head and the pooler included where it has one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ARCHITECTURES", "Architecture"]


@dataclass(frozen=True)
class Architecture:
    """`parameters` is the number that is published; `config` what differs from the defaults of its model type."""

    name: str
    parameters: int
    config: Mapping[str, Any]


def gpt2(name: str, parameters: int, d: int, layers: int, heads: int) -> Architecture:
    sizes = {"n_embd": d, "n_layer": layers, "n_head": heads}
    return of(name, parameters, "gpt2", "GPT2LMHeadModel", vocab_size=50257, n_positions=1024, **sizes)


def pythia(name: str, parameters: int, vocab: int, d: int, layers: int, heads: int) -> Architecture:
    return of(
        name,
        parameters,
        "gpt_neox",
        "GPTNeoXForCausalLM",
        vocab_size=vocab,
        **encoder(d, layers, heads),
        rotary_pct=0.25,
        use_parallel_residual=True,
        tie_word_embeddings=False,
    )


def bert(name: str, parameters: int, d: int, layers: int, heads: int) -> Architecture:
    return of(name, parameters, "bert", "BertModel", vocab_size=30522, pad_token_id=0, **encoder(d, layers, heads))


def encoder(d: int, layers: int, heads: int) -> dict[str, int]:
    """Sizes with an MLP of 4 d units."""
    return {"hidden_size": d, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * d}


def grouped(d: int, units: int, layers: int, heads: int, kv_heads: int, head_dim: int = 0) -> dict[str, int]:
    """Sizes with key/value heads, and an MLP of any width."""
    return {
        "hidden_size": d,
        "intermediate_size": units,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    } | ({"head_dim": head_dim} if head_dim else {})


def llama(name: str, parameters: int, vocab: int, tied: bool, base: float, sizes: dict[str, int]) -> Architecture:
    rest = {"vocab_size": vocab, "tie_word_embeddings": tied, "rope_theta": base}
    return of(name, parameters, "llama", "LlamaForCausalLM", **sizes, **rest)


def qwen2(name: str, parameters: int, vocab: int, tied: bool, sizes: dict[str, int]) -> Architecture:
    rest = {"vocab_size": vocab, "tie_word_embeddings": tied, "rope_theta": 1e6}
    return of(name, parameters, "qwen2", "Qwen2ForCausalLM", **sizes, **rest)


def of(name: str, parameters: int, model_type: str, model: str, **config: Any) -> Architecture:
    return Architecture(name, parameters, {"model_type": model_type, "architectures": [model], **config})


ARCHITECTURES = (
    gpt2("GPT-2 124M", 124_439_808, 768, 12, 12),
    gpt2("GPT-2 355M", 354_823_168, 1024, 24, 16),
    gpt2("GPT-2 774M", 774_030_080, 1280, 36, 20),
    gpt2("GPT-2 1.5B", 1_557_611_200, 1600, 48, 25),
    of(
        "OPT 6.7B",
        6_658_473_984,
        "opt",
        "OPTForCausalLM",
        vocab_size=50272,
        max_position_embeddings=2048,
        hidden_size=4096,
        word_embed_proj_dim=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        ffn_dim=16384,
    ),
    of(
        "GPT-Neo 2.7B",
        2_651_307_520,
        "gpt_neo",
        "GPTNeoForCausalLM",
        vocab_size=50257,
        max_position_embeddings=2048,
        hidden_size=2560,
        num_layers=32,
        num_heads=20,
        attention_types=[[["global", "local"], 16]],
    ),
    pythia("Pythia 160M", 162_322_944, 50304, 768, 12, 12),
    pythia("Pythia 6.9B", 6_857_302_016, 50432, 4096, 32, 32),
    of(
        "BLOOM 7.1B",
        7_069_016_064,
        "bloom",
        "BloomForCausalLM",
        vocab_size=250880,
        hidden_size=4096,
        n_layer=30,
        n_head=32,
    ),
    llama("Llama 2 7B", 6_738_415_616, 32000, False, 1e4, grouped(4096, 11008, 32, 32, 32)),
    llama("Llama 3 8B", 8_030_261_248, 128256, False, 5e5, grouped(4096, 14336, 32, 32, 8)),
    llama("Llama 3 70B", 70_553_706_496, 128256, False, 5e5, grouped(8192, 28672, 80, 64, 8)),
    llama("Llama 3.2 1B", 1_235_814_400, 128256, True, 5e5, grouped(2048, 8192, 16, 32, 8, 64)),
    llama("TinyLlama 1.1B", 1_100_048_384, 32000, False, 1e4, grouped(2048, 5632, 22, 32, 4)),
    llama("SmolLM2 135M", 134_515_008, 49152, True, 1e5, grouped(576, 1536, 30, 9, 3)),
    of(
        "Mistral 7B",
        7_241_732_096,
        "mistral",
        "MistralForCausalLM",
        vocab_size=32000,
        tie_word_embeddings=False,
        **grouped(4096, 14336, 32, 32, 8),
    ),
    of(
        "Mixtral 8x7B",
        46_702_792_704,
        "mixtral",
        "MixtralForCausalLM",
        vocab_size=32000,
        tie_word_embeddings=False,
        rope_theta=1e6,
        num_local_experts=8,
        num_experts_per_tok=2,
        **grouped(4096, 14336, 32, 32, 8),
    ),
    qwen2("Qwen2.5 0.5B", 494_032_768, 151936, True, grouped(896, 4864, 24, 14, 2)),
    qwen2("Qwen2.5 7B", 7_615_616_512, 152064, False, grouped(3584, 18944, 28, 28, 4)),
    of(
        "Qwen3 8B",
        8_190_735_360,
        "qwen3",
        "Qwen3ForCausalLM",
        vocab_size=151936,
        tie_word_embeddings=False,
        rope_theta=1e6,
        **grouped(4096, 12288, 36, 32, 8, 128),
    ),
    of(
        "Gemma 2 2B",
        2_614_341_888,
        "gemma2",
        "Gemma2ForCausalLM",
        vocab_size=256000,
        **grouped(2304, 9216, 26, 8, 4, 256),
    ),
    of(
        "Gemma 3 1B",
        999_885_952,
        "gemma3_text",
        "Gemma3ForCausalLM",
        vocab_size=262144,
        sliding_window=512,
        **grouped(1152, 6912, 26, 4, 1, 256),
    ),
    of(
        "Phi-2",
        2_779_683_840,
        "phi",
        "PhiForCausalLM",
        vocab_size=51200,
        partial_rotary_factor=0.4,
        tie_word_embeddings=False,
        **encoder(2560, 32, 32),
    ),
    of(
        "Phi-3 mini",
        3_821_079_552,
        "phi3",
        "Phi3ForCausalLM",
        vocab_size=32064,
        tie_word_embeddings=False,
        **grouped(3072, 8192, 32, 32, 32),
    ),
    of(
        "OLMo 2 7B",
        7_298_617_344,
        "olmo2",
        "Olmo2ForCausalLM",
        vocab_size=100352,
        tie_word_embeddings=False,
        rope_theta=5e5,
        **grouped(4096, 11008, 32, 32, 32),
    ),
    bert("BERT base", 109_482_240, 768, 12, 12),
    bert("BERT large", 335_141_888, 1024, 24, 16),
    bert("MiniLM-L6", 22_713_216, 384, 6, 12),
    of(
        "ViT-B/16",
        86_567_656,
        "vit",
        "ViTForImageClassification",
        image_size=224,
        patch_size=16,
        num_labels=1000,
        **encoder(768, 12, 12),
    ),
    of(
        "Whisper tiny",
        37_760_640,
        "whisper",
        "WhisperForConditionalGeneration",
        vocab_size=51865,
        num_mel_bins=80,
        max_source_positions=1500,
        max_target_positions=448,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
    ),
)
