"""Time of one step of the optimizers that know pairs, beside torch's and those made for LoRA.

    python benchmarks/bench_quotient.py [--threads 2 --repeats 5 --rank 16]

First the whole of GPT-2 small (12 layers, 12 heads of 64, d 768; random weights and gradients), whose attention is 24
batches of pairs, against torch.optim.AdamW(foreach=True) and (fused=True), and SGD against SGD; a forward and backward
pass of 512 tokens says what a step is a part of. Then LoRA of the given rank on the query, key, value and output
projections of 12 layers of width 768, against PEFT's Riemannian preconditioning and LoRARite of pytorch_optimizer (on
the same adapters), as far as these are installed. All optimizers step in turn in this process; figures are medians.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import gaugekit
from gaugekit.optim.projected import Horizontal
from gaugekit.optim.quotient import QuotientAdam, QuotientSGD

Makers = dict[str, Callable[[Any], Optimizer]]


def with_gradients(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-2
    return model


def times(model: Any, makers: Makers, repeats: int) -> dict[str, float]:
    """Median seconds of a step of each, on copies of the model."""
    optimizers = {name: make(with_gradients(copy.deepcopy(model))) for name, make in makers.items()}
    found: dict[str, list[float]] = {name: [] for name in optimizers}
    for repeat in range(repeats + 2):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            if repeat > 1:  # the first two make the state, and warm up
                found[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in found.items()}


def show(title: str, seconds: dict[str, float], references: list[str]) -> None:
    print(f"\n{title}\n{'':<34}{'ms':>10}" + "".join(f"{'/ ' + name:>26}" for name in references))
    for name, value in seconds.items():
        ratios = "".join(f"{value / seconds[reference]:>26.2f}" for reference in references)
        print(f"{name:<34}{value * 1e3:>10.1f}{ratios}")


def gpt2(repeats: int) -> None:
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    makers: Makers = {
        "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
        "QuotientAdam foreach": lambda m: QuotientAdam(m.parameters(), foreach=True, pairs=gaugekit.pairs(m)),
        "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
        "QuotientAdam fused": lambda m: QuotientAdam(m.parameters(), fused=True, pairs=gaugekit.pairs(m)),
        "Horizontal(AdamW fused)": lambda m: Horizontal(
            torch.optim.AdamW(m.parameters(), fused=True), gaugekit.pairs(m)
        ),
        "SGD fused": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9, fused=True),
        "QuotientSGD fused": lambda m: QuotientSGD(
            m.parameters(), lr=1e-3, momentum=0.9, fused=True, pairs=gaugekit.pairs(m)
        ),
    }
    seconds: dict[str, float] = {}
    # Two at a time, as each holds a model, its gradients and its state.
    for names in (("AdamW foreach", "QuotientAdam foreach"), ("AdamW fused", "QuotientAdam fused")):
        seconds |= times(model, {name: makers[name] for name in names}, repeats)
    seconds |= times(model, {"Horizontal(AdamW fused)": makers["Horizontal(AdamW fused)"]}, repeats)
    seconds |= times(model, {name: makers[name] for name in ("SGD fused", "QuotientSGD fused")}, repeats)
    tokens = torch.randint(0, 50257, (1, 512))
    passes = []
    for _ in range(3):
        start = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        passes.append(time.perf_counter() - start)
    seconds["forward and backward, 512 tokens"] = statistics.median(passes)
    show("GPT-2 small, all parameters", seconds, ["AdamW foreach", "AdamW fused"])


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))


def lora(rank: int, repeats: int) -> None:
    try:
        import peft
        from peft.optimizers import create_riemannian_optimizer
    except ImportError:
        print("\nLoRA: peft is not installed, nothing to compare with")
        return
    torch.manual_seed(0)
    base = nn.Sequential(*(Layer(768) for _ in range(12)))
    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)

    def trained(m: Any) -> list[nn.Parameter]:
        return [p for p in m.parameters() if p.requires_grad]

    makers: Makers = {
        "AdamW foreach": lambda m: torch.optim.AdamW(trained(m), foreach=True),
        "AdamW fused": lambda m: torch.optim.AdamW(trained(m), fused=True),
        "QuotientAdam": lambda m: QuotientAdam(trained(m), pairs=gaugekit.pairs(m)),
        "QuotientSGD": lambda m: QuotientSGD(trained(m), pairs=gaugekit.pairs(m)),
        "PEFT Riemannian AdamW": lambda m: create_riemannian_optimizer(m, torch.optim.AdamW, lr=1e-3),
    }
    try:
        lora_rite = import_module("pytorch_optimizer").LoRARite
        # Its factors alternate A, B, and so do PEFT's, (r, in) and (out, r).
        makers["LoRARite"] = lambda m: lora_rite(trained(m), lr=1e-3)
    except ImportError:
        print("\npytorch_optimizer is not installed: no figures for LoRARite")
    names = ["AdamW foreach", "PEFT Riemannian AdamW", *(["LoRARite"] if "LoRARite" in makers else [])]
    show(f"LoRA of rank {rank}: 48 adapters of 768 x 768", times(model, makers, repeats), names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads, torch {torch.__version__}, medians of {options.repeats} steps")
    gpt2(options.repeats)
    lora(options.rank, options.repeats)


if __name__ == "__main__":
    main()
