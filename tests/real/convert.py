"""Checkpoints for measurements, made from those inside packages: a GGUF Llama as a Hugging Face directory, and copies of
a directory with noise, after an int8 round trip, after training, or of its config with random weights.

    python tests/real/convert.py gguf FILE OUT
    python tests/real/convert.py noise DIRECTORY OUT SIZE
    python tests/real/convert.py int8 DIRECTORY OUT
    python tests/real/convert.py bfloat16 DIRECTORY OUT
    python tests/real/convert.py train DIRECTORY OUT STEPS FILE   the GGUF has the tokenizer
    python tests/real/convert.py random DIRECTORY OUT
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc import resolve

import gguf
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from gaugekit.checkpoint import open_checkpoint


def gguf_to_directory(source: str | Path, out: Path) -> None:
    """A GGUF Llama in float32. GGUF interleaves the two halves of every rotary pair; here they stand apart again."""
    checkpoint = open_checkpoint(source)
    meta = checkpoint.metadata
    heads, groups = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    layers = meta["llama.block_count"]
    LlamaConfig(
        vocab_size=checkpoint.headers["token_embd.weight"].shape[0],
        hidden_size=meta["llama.embedding_length"],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=meta["llama.feed_forward_length"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(out)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    parts = {"self_attn.q_proj": heads, "self_attn.k_proj": groups}
    parts |= dict.fromkeys(("self_attn.v_proj", "self_attn.o_proj"))
    parts |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
    parts |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"))
    rotary = {f"model.layers.{layer}.{part}.weight": count for layer in range(layers) for part, count in parts.items()}
    tensors = {}
    for name, count in {"model.embed_tokens.weight": None, "model.norm.weight": None, **rotary}.items():
        tensor = checkpoint.load(str(names.get_name(name, try_suffixes=(".weight",))))
        if count is not None:
            rows, width = tensor.shape
            tensor = tensor.reshape(count, rows // count // 2, 2, width).transpose(1, 2).reshape(rows, width)
        tensors[name] = tensor.contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def changed(source: Path, out: Path, change: Callable[[Tensor], Tensor]) -> None:
    """A copy of a directory with every tensor changed."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "config.json", out)
    tensors = {name: change(tensor).contiguous() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def noisy(size: float, seed: int = 0) -> Callable[[Tensor], Tensor]:
    """Every weight times 1 + size · a normal number."""
    generator = torch.Generator().manual_seed(seed)
    return lambda x: x * (1 + size * torch.randn(x.shape, generator=generator))


def int8(x: Tensor) -> Tensor:
    """Every row of a matrix rounded to 255 steps between plus and minus its largest entry; vectors stay."""
    if x.dim() < 2:
        return x
    step = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (x / step).round() * step


def tokens(source: str | Path) -> Tensor:
    """The topics of Python's own help, as tokens of the tokenizer in a GGUF."""
    fields = gguf.GGUFReader(source).fields
    vocabulary = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"].contents())}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    topics = resolve("pydoc_data.topics.topics")[0]  # type: ignore[index]
    return torch.tensor(tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))).ids)


def train(source: Path, out: Path, steps: int, text: Tensor, length: int = 64, rate: float = 1e-4) -> None:
    """AdamW on one piece of text a step, all weights."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        start = int(torch.randint(len(text) - length, (), generator=generator))
        piece = text[start : start + length].unsqueeze(0)
        loss = model(input_ids=piece, labels=piece).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, f"{loss.item():.3f}", flush=True)
    model.save_pretrained(out)


def random(source: Path, out: Path) -> None:
    """The same config with the weights of its initialisation."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32).save_pretrained(out)


def main(what: str, source: str, out: str, *rest: str) -> None:
    match what:
        case "gguf":
            gguf_to_directory(source, Path(out))
        case "noise":
            changed(Path(source), Path(out), noisy(float(rest[0])))
        case "int8":
            changed(Path(source), Path(out), int8)
        case "bfloat16":
            changed(Path(source), Path(out), lambda x: x.bfloat16())
        case "train":
            train(Path(source), Path(out), int(rest[0]), tokens(rest[1]))
        case "random":
            random(Path(source), Path(out))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
