"""Checkpoints for measurements, made from those inside packages: a GGUF Llama, an old BERT or a SCEPTR encoder as a
Hugging Face directory, and copies of a directory with noise, rounded, trained, or with random weights.

    python tests/real/convert.py gguf FILE OUT
    python tests/real/convert.py noise DIRECTORY OUT SIZE
    python tests/real/convert.py int8 DIRECTORY OUT
    python tests/real/convert.py bfloat16 DIRECTORY OUT
    python tests/real/convert.py train DIRECTORY OUT STEPS FILE   the GGUF has the tokenizer
    python tests/real/convert.py random DIRECTORY OUT
    python tests/real/convert.py bert DIRECTORY OUT               a bare pickle of BERT weights
    python tests/real/convert.py sceptr DIRECTORY OUT             a SCEPTR encoder in the layout of BERT
"""

from __future__ import annotations

import json
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
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, LlamaConfig

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


def bert(source: Path, out: Path) -> None:
    """A BERT as `transformers` 2 wrote it: weights as a bare pickle, no model type in the config."""
    out.mkdir(parents=True, exist_ok=True)
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    raw.pop("num_labels", None)  # of the task head
    (out / "config.json").write_text(json.dumps(raw | {"model_type": "bert"}), encoding="utf-8")
    weights = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
    tensors = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def sceptr(source: Path, out: Path) -> None:
    """The encoder of a SCEPTR model in the layout of BERT. Its layers are torch's post-norm encoder layers with ReLU:
    those of BERT, tensor by tensor. Its embedding is linear in one-hot tokens, relative position and compartment, so
    the tables are exact, but for the position, which BERT counts otherwise; its embedding has no LayerNorm, so that of
    the copy is a placeholder. Task heads are left out.
    """
    weights = torch.load(source / "state_dict.pt", map_location="cpu", weights_only=True)
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))["model"]["self_attention_stack"]["initargs"]
    width, positions = raw["d_model"], 101
    projector = weights["_self_attention_stack._initial_projector.weight"]
    one_hot = weights["_token_embedder._token_embedding._token_embeddings"]
    compartments = weights["_token_embedder._compartment_embedding._token_embeddings"]
    kinds = one_hot.shape[1]
    stem = "_self_attention_stack._standard_stack._self_attention_stack.layers"
    tensors = {
        "embeddings.word_embeddings.weight": one_hot @ projector[:, :kinds].mT,
        "embeddings.position_embeddings.weight": torch.linspace(0, 1, positions).outer(projector[:, kinds]),
        "embeddings.token_type_embeddings.weight": compartments @ projector[:, kinds + 1 :].mT,
        "embeddings.LayerNorm.weight": torch.ones(width),
        "embeddings.LayerNorm.bias": torch.zeros(width),
    }
    names = {
        "self_attn.out_proj": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "linear1": "intermediate.dense",
        "linear2": "output.dense",
        "norm2": "output.LayerNorm",
    }
    for layer in range(raw["num_layers"]):
        for end in ("weight", "bias"):
            fused = weights[f"{stem}.{layer}.self_attn.in_proj_{end}"].chunk(3)
            for name, part in zip(("query", "key", "value"), fused, strict=True):
                tensors[f"encoder.layer.{layer}.attention.self.{name}.{end}"] = part
            for theirs, name in names.items():
                tensors[f"encoder.layer.{layer}.{name}.{end}"] = weights[f"{stem}.{layer}.{theirs}.{end}"]
    BertConfig(
        vocab_size=one_hot.shape[0],
        hidden_size=width,
        num_hidden_layers=raw["num_layers"],
        num_attention_heads=raw["nhead"],
        intermediate_size=weights[f"{stem}.0.linear1.bias"].shape[0],
        hidden_act="relu",
        max_position_embeddings=positions,
        type_vocab_size=compartments.shape[0],
        layer_norm_eps=1e-5,
        pad_token_id=0,
        architectures=["BertModel"],
    ).save_pretrained(out)
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


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
        case "bert":
            bert(Path(source), Path(out))
        case "sceptr":
            sceptr(Path(source), Path(out))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
