"""Whisper tiny.en as CTranslate2 stores it, written as the Hugging Face directory it was converted from."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

FLOAT16 = 4


def read_ctranslate2(path: Path) -> dict[str, Tensor]:
    """The float16 variables of a CTranslate2 model (format 6), in float32."""
    data, at = path.read_bytes(), 0

    def take(code: str) -> tuple:
        nonlocal at
        size = struct.calcsize("<" + code)
        at += size
        return struct.unpack("<" + code, data[at - size : at])

    def text() -> str:
        (length,) = take("H")
        return take(f"{length}s")[0][:-1].decode()

    take("I")
    text()
    _, count = take("II")
    found = {}
    for _ in range(count):
        name = text()
        shape = take(f"{take('B')[0]}I")
        kind, size = take("BI")
        (raw,) = take(f"{size}s")
        if kind == FLOAT16:
            found[name] = torch.from_numpy(np.frombuffer(raw, np.float16).astype(np.float32)).reshape(shape)
    return found


def convert(path: Path, out: Path) -> None:
    """Write the model at `path` (model.bin) as a directory that transformers loads."""
    source = read_ctranslate2(path)
    layers = sum(name.startswith("decoder/layer_") and name.endswith("ffn/linear_0/weight") for name in source)
    vocabulary, width = source["decoder/embeddings/weight"].shape
    tensors = {
        "model.decoder.embed_tokens.weight": source["decoder/embeddings/weight"],
        "model.decoder.embed_positions.weight": source["decoder/position_encodings/encodings"],
        "model.encoder.embed_positions.weight": source["encoder/position_encodings/encodings"],
    }

    def put(name: str, old: str, kinds: tuple[str, str] = ("weight", "bias")) -> None:
        for new, kind in zip(("weight", "bias"), kinds, strict=True):
            tensors[f"{name}.{new}"] = source[f"{old}/{kind}"]

    def attention(name: str, old: str, norm: str, fused: bool) -> None:
        weights = source[f"{old}/linear_0/weight"].split(width)
        biases = source[f"{old}/linear_0/bias"].split(width)
        if not fused:
            weights += source[f"{old}/linear_1/weight"].split(width)
            biases += source[f"{old}/linear_1/bias"].split(width)
        for part, weight, bias in zip("qkv", weights, biases, strict=True):
            tensors[f"{name}.{part}_proj.weight"] = weight
            if part != "k":
                tensors[f"{name}.{part}_proj.bias"] = bias
        assert not biases[1].any(), "Whisper's keys have no bias"
        put(f"{name}.out_proj", f"{old}/linear_{1 if fused else 2}")
        put(norm, f"{old}/layer_norm", ("gamma", "beta"))

    for conv in ("conv1", "conv2"):
        put(f"model.encoder.{conv}", f"encoder/{conv}")
    for side in ("encoder", "decoder"):
        for layer in range(layers):
            at, old = f"model.{side}.layers.{layer}", f"{side}/layer_{layer}"
            attention(f"{at}.self_attn", f"{old}/self_attention", f"{at}.self_attn_layer_norm", fused=True)
            if side == "decoder":
                attention(f"{at}.encoder_attn", f"{old}/attention", f"{at}.encoder_attn_layer_norm", fused=False)
            put(f"{at}.fc1", f"{old}/ffn/linear_0")
            put(f"{at}.fc2", f"{old}/ffn/linear_1")
            put(f"{at}.final_layer_norm", f"{old}/ffn/layer_norm", ("gamma", "beta"))
        put(f"model.{side}.layer_norm", f"{side}/layer_norm", ("gamma", "beta"))
    out.mkdir(parents=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"})
    transformers.WhisperConfig(
        architectures=["WhisperForConditionalGeneration"],
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=width // 64,
        decoder_attention_heads=width // 64,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        num_mel_bins=source["encoder/conv1/weight"].shape[1],
    ).save_pretrained(out)
