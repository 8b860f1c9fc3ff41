"""Memory and time of `gaugekit inspect`, each against the plain way, every side in a process of its own.

    python benchmarks/bench_inspect.py [MODEL]

1. Peak memory of `inspect` on MODEL (a checkpoint directory or GGUF) against reading all of its tensors into memory,
   which is what tools that work on a state dict begin with. Both are measured on top of the same imports.
2. The census of a Llama of 70 billion parameters from safetensors headers (sparse files of 141 GB that take no disk)
   against building the same model on torch's meta device and counting its parameters.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent

CHILD = """
import json, sys, time
from resident import resident
import torch, gguf, transformers
from transformers import AutoConfig
AutoConfig.for_model("llama")
from gaugekit.checkpoint import open_checkpoint
from gaugekit.verbs.inspect import inspect
target = sys.argv[1]
base = resident("VmHWM")
start = time.perf_counter()
{body}
seconds = time.perf_counter() - start
peak = resident("VmHWM")
print(json.dumps({{"seconds": seconds, "base": base, "extra": peak - base, "answer": answer}}))
"""
INSPECT = "answer = inspect(target).redundancy"
READ_ALL = (
    "c = open_checkpoint(target); state = {name: c.load(name) for name in c.headers}\n"
    "answer = sum(t.numel() for t in state.values())"
)
HEADERS = "answer = inspect(target, spectra=False).redundancy"
META = (
    "config = AutoConfig.from_pretrained(target)\n"
    "with torch.device('meta'): model = transformers.AutoModelForCausalLM.from_config(config)\n"
    "answer = sum(p.numel() for p in model.parameters())"
)
LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def run(body: str, target: Path) -> dict[str, float]:
    script = CHILD.format(body=body)
    done = subprocess.run(
        [sys.executable, "-c", script, str(target)], capture_output=True, text=True, check=False, cwd=HERE
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def row(what: str, result: dict[str, float], reference: dict[str, float]) -> None:
    print(
        f"{what:42} {result['extra'] / 1e6:9.1f} MB  {result['seconds']:7.2f} s"
        f"   memory x{result['extra'] / max(reference['extra'], 1):.2f}"
        f"   time x{result['seconds'] / reference['seconds']:.2f}   answer {result['answer']:,}"
    )


def sparse_llama(folder: Path) -> None:
    """A 70B checkpoint in thirty shards that hold headers and nothing behind them."""
    c = LLAMA_70B
    d, f = c["hidden_size"], c["intermediate_size"]
    kv = d // c["num_attention_heads"] * c["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": [c["vocab_size"], d], "model.norm.weight": [d]}
    shapes["lm_head.weight"] = [c["vocab_size"], d]
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for part, shape in {
            "self_attn.q_proj": [d, d],
            "self_attn.k_proj": [kv, d],
            "self_attn.v_proj": [kv, d],
            "self_attn.o_proj": [d, d],
            "mlp.gate_proj": [f, d],
            "mlp.up_proj": [f, d],
            "mlp.down_proj": [d, f],
            "input_layernorm": [d],
            "post_attention_layernorm": [d],
        }.items():
            shapes[f"{at}.{part}.weight"] = shape
    (folder / "config.json").write_text(json.dumps(c))
    names, weight_map = list(shapes), {}
    for shard in range(30):
        file, header, end = f"model-{shard + 1:05}-of-00030.safetensors", {}, 0
        for name in names[shard::30]:
            size = 2
            for n in shapes[name]:
                size *= n
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [end, end + size]}
            end += size
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def main() -> None:
    if len(sys.argv) > 1:
        target = Path(sys.argv[1])
        print(f"1. {target.name}")
        read_all = run(READ_ALL, target)
        row("gaugekit inspect, spectra of every head", run(INSPECT, target), read_all)
        row("all tensors in memory, nothing computed", read_all, read_all)
        print(f"   (on top of {read_all['base'] / 1e6:.0f} MB of interpreter, torch and transformers)")
    with tempfile.TemporaryDirectory() as folder:
        sparse_llama(Path(folder))
        print("2. Llama, 70 billion parameters, headers only")
        meta = run(META, Path(folder))
        row("gaugekit inspect --no-spectra", run(HEADERS, Path(folder)), meta)
        row("the model on torch's meta device", meta, meta)


if __name__ == "__main__":
    main()
