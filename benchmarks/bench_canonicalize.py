"""Time and peak memory of `gaugekit canonicalize` against a plain copy, and against TransformerLens for folding.

    python benchmarks/bench_canonicalize.py MODEL

MODEL is a directory in the Hugging Face layout. Every side runs in a process of its own, on top of the same imports.
The plain copy reads each tensor and writes it again with safetensors, which is the least that any rewriting tool does.
TransformerLens (if installed) loads the model and folds norms and centres weights in memory; it writes nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent

CHILD = """
import json, sys, time
from resident import resident
import torch, transformers
from transformers import AutoConfig
from safetensors.torch import load_file, save_file
from gaugekit.verbs.canonicalize import canonicalize
source, out = sys.argv[1:3]
AutoConfig.from_pretrained(source)
base = resident("VmHWM")
start = time.perf_counter()
{body}
seconds = time.perf_counter() - start
peak = resident("VmHWM")
print(json.dumps({{"seconds": seconds, "extra": peak - base}}))
"""
COPY = (
    "import pathlib; pathlib.Path(out).mkdir()\n"
    "for f in pathlib.Path(source).glob('*.safetensors'):\n"
    "    save_file(load_file(f), pathlib.Path(out) / f.name, metadata={'format': 'pt'})"
)
LENS = (
    "from transformer_lens.model_bridge import TransformerBridge\n"
    "model = TransformerBridge.boot_transformers(source, dtype=torch.float32)\n"
    "model.process_weights(fold_ln=True, center_writing_weights=True)"
)
SIDES = {
    "plain copy with safetensors": COPY,
    "canonicalize --level heads": "canonicalize(source, out, level='heads')",
    "canonicalize --gauge folded": "canonicalize(source, out, gauge='folded')",
    "canonicalize (full)": "canonicalize(source, out)",
    "TransformerLens process_weights": LENS,
}


def main() -> None:
    source = str(Path(sys.argv[1]).resolve())
    reference: dict[str, float] = {}
    for what, body in SIDES.items():
        with tempfile.TemporaryDirectory(dir=Path(source).parent) as folder:
            command = [sys.executable, "-c", CHILD.format(body=body), source, f"{folder}/out"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE)
        if done.returncode:
            print(f"{what:34} not measured: {done.stderr.strip().splitlines()[-1][:90]}")
            continue
        result = json.loads(done.stdout.strip().splitlines()[-1])
        reference = reference or result
        print(
            f"{what:34} {result['seconds']:7.2f} s  {result['extra'] / 1e6:8.1f} MB"
            f"   time x{result['seconds'] / reference['seconds']:.2f}"
            f"   memory x{result['extra'] / reference['extra']:.2f}"
        )


if __name__ == "__main__":
    main()
