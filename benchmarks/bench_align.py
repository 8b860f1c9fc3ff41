"""Time and peak memory of `gaugekit align` for two models of 135 million parameters (those of SmolLM2's shape).

    python benchmarks/bench_align.py [--quick] [--layers N] [--give-back]

Three pairs: a model and a disguise of itself with a hundredth of noise (a relative), a model and another with weights
of its own (a stranger), each with a tied table of tokens, where a stream's coordinates can only change order; and a
stranger with a head of its own, where its frame turns. Every side runs in a process of its own, on top of the same
imports: layers read one by one, as the command does it, and both models held in memory. Peak memory is given in layers
in float64 (the algebra's) too, and in tables of tokens, which are larger. glibc keeps freed memory for later, here up
to half of the peak: with `--give-back` it does not, and the peak is what was in use, at twice the time and more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).parent

CHILD = """
import json, sys, time
from resident import resident
import torch, transformers, scipy.optimize
from gaugekit.verbs import aligning, nearing
from gaugekit.verbs.align import align
torch.set_num_threads({threads})
transformers.AutoConfig.from_pretrained(sys.argv[1])
if {keep}:
    bring = nearing.bring
    aligning.bring = lambda *given, **named: bring(*given, **named, keep=True)
base = resident("VmHWM")
start = time.perf_counter()
report = align(*sys.argv[1:4])
seconds = time.perf_counter() - start
peak = resident("VmHWM")
found = {{"seconds": seconds, "extra": peak - base, "before": report.before, "after": report.after}}
print(json.dumps(found | {{"sweeps": len(report.sweeps) - 1}}))
"""


def model(folder: Path, seed: int, size: dict[str, Any], tied: bool) -> Path:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**size, tie_word_embeddings=tied)
    built = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
    built.save_pretrained(folder)
    return folder


def relative(source: Path, folder: Path) -> Path:
    """A disguise of the model with noise."""
    from gaugekit.verbs.scramble import scramble

    built = transformers.LlamaForCausalLM.from_pretrained(source)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
    noisy = folder.with_name(folder.name + "-noisy")
    built.save_pretrained(noisy)
    scramble(noisy, folder, seed=2)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs: the figures say nothing")
    parser.add_argument("--give-back", action="store_true", help="have glibc keep no freed memory")
    options = parser.parse_args()
    setting = {"MALLOC_MMAP_THRESHOLD_": "1000000"} if options.give_back else {}
    width, units, vocabulary = (64, 96, 500) if options.quick else (576, 1536, 49152)
    size = {
        "hidden_size": width,
        "intermediate_size": units,
        "vocab_size": vocabulary,
        "num_hidden_layers": 2 if options.quick else options.layers,
        "num_attention_heads": 9 if width == 576 else 4,
        "num_key_value_heads": 3 if width == 576 else 2,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tied = [model(folder / f"tied-{seed}", seed, size, True) for seed in (0, 1)]
        free = [model(folder / f"free-{seed}", seed, size, False) for seed in (0, 1)]
        pairs = {
            "relative, tied": (tied[0], relative(tied[0], folder / "relative")),
            "stranger, tied": (tied[0], tied[1]),
            "stranger, untied": (free[0], free[1]),
        }
        one = transformers.LlamaForCausalLM.from_pretrained(tied[0])
        layer = 8 * sum(p.numel() for p in one.model.layers[0].parameters())
        count = sum(p.numel() for p in one.parameters())
        print(f"torch {torch.__version__}, {options.threads} threads; {count} parameters")
        for what, (first, second) in pairs.items():
            reference = None
            for keep in (False, True):
                code = CHILD.format(threads=options.threads, keep=keep)
                out = folder / f"out {what} {keep}"
                command = [sys.executable, "-c", code, str(first), str(second), str(out)]
                done = subprocess.run(
                    command, capture_output=True, text=True, check=True, cwd=HERE, env=os.environ | setting
                )
                found = json.loads(done.stdout.strip().splitlines()[-1])
                reference = reference or found
                print(
                    f"{what:18} {'in memory' if keep else 'streamed':10} {found['seconds']:7.1f} s"
                    f"  {found['extra'] / 1e6:7.0f} MB = {found['extra'] / layer:5.1f} layers"
                    f" = {found['extra'] / (8 * vocabulary * width):5.1f} tables"
                    f"  time x{found['seconds'] / reference['seconds']:.2f}"
                    f"  memory x{found['extra'] / max(reference['extra'], 1):.2f}"
                    f"  {found['sweeps']} sweeps, distance {found['before']:.3f} to {found['after']:.3f}"
                )


if __name__ == "__main__":
    main()
