"""GGUF metadata as a config, GGUF tensor names, and what GGUF stores otherwise than the families' own files."""

from __future__ import annotations

from typing import Any

from gaugekit.checkpoint import Checkpoint
from gaugekit.errors import CheckpointError, UnsupportedArchitecture
from gaugekit.models.source import Layout

# Architecture → (model type, rotary rows interleaved, norms stored with the one of 1 + w added).
ARCHITECTURES = {
    "llama": ("llama", True, False),
    "qwen2": ("qwen2", False, False),
    "qwen3": ("qwen3", False, False),
    "gemma3": ("gemma3_text", False, True),
}
FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
# Metadata that says the same again, or nothing about the function.
SETTLED = {"attention.value_length", "rope.dimension_count", "rope.scaling.type"}


def from_gguf(checkpoint: Checkpoint) -> tuple[dict[str, Any], Layout]:
    """The config (in the fields of the `transformers` class) and the layout of a GGUF file."""
    architecture = checkpoint.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedArchitecture(f"GGUF architecture {architecture!r} is not supported; supported are {known}")
    model_type, interleaved, norms_complete = ARCHITECTURES[architecture]
    raw: dict[str, Any] = {"model_type": model_type}
    for key, value in checkpoint.metadata.items():
        field = key.removeprefix(f"{architecture}.")
        if field == key or field in SETTLED:
            continue
        if field not in FIELDS:
            raise UnsupportedArchitecture(f"GGUF field {key}={value!r} is not known: it may change the function")
        raw[FIELDS[field]] = value
    if checkpoint.metadata.get(f"{architecture}.rope.scaling.type", "none") != "none":
        raise UnsupportedArchitecture(f"GGUF field {architecture}.rope.scaling.type is not supported: use safetensors")
    if "token_embd.weight" not in checkpoint.headers:
        raise CheckpointError(f"{checkpoint.path} holds no token_embd.weight: it is not a language model")
    # The field is optional in the format, and the table always has one row a token.
    raw["vocab_size"] = checkpoint.headers["token_embd.weight"].shape[0]
    raw["tie_word_embeddings"] = "output.weight" not in checkpoint.headers
    if model_type == "gemma3_text":
        raw["rope_parameters"] = {
            "full_attention": {"rope_type": "default", "rope_theta": raw.pop("rope_theta")},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    else:
        raw["rope_parameters"] = {"rope_type": "default", "rope_theta": raw.pop("rope_theta", 10000.0)}
    return raw, Layout(_names(architecture, raw["num_hidden_layers"]), interleaved, norms_complete)


def _names(architecture: str, layers: int) -> Any:
    import gguf

    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    table = gguf.get_tensor_name_map(number, layers)

    def rename(name: str) -> str:
        return table.get_name(name, try_suffixes=(".weight", ".bias")) or name

    return rename
