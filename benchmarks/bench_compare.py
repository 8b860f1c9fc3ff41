"""Time and peak memory of `gaugekit compare --fast` on two random checkpoints in the shape of Llama-2-7B.

    python benchmarks/bench_compare.py [--layers 32] [--folder DIR]

Needs 9 GB of disk at 32 layers: attention weights are random bfloat16, the rest are holes in sparse files, since
spectra do not read them. The other side loads both state dicts into memory first, as tools without lazy reading do,
and then computes the same spectra; it is measured on fewer layers and its memory scaled, since two copies of 7B do not
fit everywhere.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

WIDTH, HEADS, HIDDEN, VOCABULARY = 4096, 32, 11008, 32000

HERE = Path(__file__).parent

CHILD = """
import json, sys, time
from resident import resident
import torch, transformers
from transformers import AutoConfig
from gaugekit.checkpoint import open_checkpoint
from gaugekit.verbs.compare import compare
a, b = sys.argv[1:3]
AutoConfig.from_pretrained(a)
base = resident("VmHWM")
start = time.perf_counter()
{body}
seconds = time.perf_counter() - start
extra = resident("VmHWM") - base
print(json.dumps({{"seconds": seconds, "extra": extra, "verdict": verdict}}))
"""
LAZY = "verdict = compare(a, b, fast=True).verdict"
EAGER = (
    "states = [{name: c.load(name) for name in c.headers} for c in map(open_checkpoint, (a, b))]\n"
    "verdict = compare(a, b, fast=True).verdict"
)


def write(folder: Path, layers: int, seed: int) -> None:
    """A checkpoint whose attention weights are random and whose other tensors are holes."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": VOCABULARY,
                "hidden_size": WIDTH,
                "num_hidden_layers": layers,
                "num_attention_heads": HEADS,
                "num_key_value_heads": HEADS,
                "intermediate_size": HIDDEN,
                "tie_word_embeddings": False,
            }
        )
    )
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{part}_proj.weight": (WIDTH, WIDTH) for part in "qkvo"}
        shapes |= {f"{at}.mlp.{part}_proj.weight": (HIDDEN, WIDTH) for part in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (WIDTH, HIDDEN)
        shapes |= {f"{at}.{norm}.weight": (WIDTH,) for norm in ("input_layernorm", "post_attention_layernorm")}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(seed)
    with (folder / "model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)
        for name, shape in shapes.items():
            if "self_attn" in name or "norm" in name:
                values = torch.randn(shape, generator=generator) * 0.02 if "self_attn" in name else torch.ones(shape)
                out.seek(8 + len(text) + header[name]["data_offsets"][0])
                out.write(values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes())


def run(body: str, a: Path, b: Path) -> dict[str, float]:
    command = [sys.executable, "-c", CHILD.format(body=body), str(a.resolve()), str(b.resolve())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for layers, body, what in (
            (options.layers, LAZY, "gaugekit compare --fast"),
            (min(2, options.layers), EAGER, "both state dicts in memory"),
        ):
            a, b = Path(folder) / f"a{layers}{len(what)}", Path(folder) / f"b{layers}{len(what)}"
            write(a, layers, 1)
            write(b, layers, 2)
            result = run(body, a, b)
            scale = options.layers / layers
            print(
                f"{what:28} {layers:3} layers {result['seconds']:8.1f} s {result['extra'] / 1e6:9.0f} MB"
                f"   at {options.layers} layers {result['extra'] * scale / 1e6:9.0f} MB   verdict {result['verdict']}"
            )


if __name__ == "__main__":
    main()
