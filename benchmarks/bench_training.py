"""Tokens per second of the decoder and its training steps, beside a plain loop, and what each variant costs.

    python benchmarks/bench_training.py [--quick] [--only norm mlp] [--json OUT]

First the baseline (LayerNorm before each branch, learned positions, standard heads, GELU, no biases of linear maps,
AdamW) in `training.steps` against a loop written here as nanoGPT's is: one map for queries, keys and values,
`F.scaled_dot_product_attention`, `nn.LayerNorm`, torch's AdamW, the gradient clipped. Both have the same shapes and
read the same batches. Then every variant against the baseline: another norm, placement, attention, residual, positions,
MLP or optimizer, and nothing else.

Everything runs in this process. In each round both contestants take --steps steps, in random order, so that a busy
machine slows them alike; tokens per second are of the median round, a ratio is the median of the rounds' own ratios.
Memory: bytes that forward saves for backward, each storage counted once, parameters left out, a token; and bytes of
parameters, gradients and optimizer state, a parameter.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from gaugekit.training.config import ModelConfig, OptimizerConfig
from gaugekit.training.decoder import Decoder
from gaugekit.training.optimizers import make
from gaugekit.training.steps import Batches, steps

BASE, PLAIN = "baseline", "plain loop"
TARGET = 0.95

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "norm": {name: {"norm": name} for name in ("rms", "prms", "crms", "l2", "scale", "dyt", "derf", "none")},
    "placement": {name: {"placement": name} for name in ("post", "sandwich", "peri")},
    "attention": {
        **{f"relational, {s}": {"attention": "relational", "score": s} for s in ("dot", "cosine", "rbf")},
        **{f"relational, {s}": {"attention": "relational", "score": s} for s in ("bilinear", "learned")},
        "relational, whole frame": {"attention": "relational", "frame": "full", "values": "plain"},
        "invariant": {"attention": "invariant"},
        "one key/value head": {"kv_heads": 1},
    },
    "residual": {"sphere, no norm": {"residual": "sphere", "norm": "none"}},
    "positions": {name: {"positions": name} for name in ("rotary", "none")},
    "mlp": {name: {"mlp": name} for name in ("relu", "swiglu")},
    "optimizer": {
        name: {"name": name}
        for name in (
            "sgd",
            "muon",
            "quotient_adam",
            "quotient_sgd",
            "horizontal_adamw",
            "horizontal_muon",
            "gated_adamw",
        )
    },
}


@dataclass(frozen=True)
class Row:
    kind: str
    name: str
    tokens_per_second: float
    time_ratio: float  # to the baseline
    saved_bytes: float  # a token
    memory_ratio: float
    held_bytes: float  # a parameter


# --- the plain loop, as nanoGPT has it ----------------------------------------------------------------------------


class PlainAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (z.view(b, n, self.heads, d // self.heads).transpose(1, 2) for z in self.c_attn(x).split(d, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, n, d))


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = PlainAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class PlainGPT(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(config.vocab, config.width), nn.Embedding(config.context, config.width)
        self.h = nn.ModuleList(PlainBlock(config.width, config.heads) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def plain_steps(model: PlainGPT, optimizer: Optimizer, batches: Batches, stop: int, device: str) -> None:
    for index in range(stop):
        tokens, targets = (x.to(device) for x in batches(index))
        logits = model(tokens)
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# --- measuring ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contestant:
    model: nn.Module
    optimizer: Optimizer
    take: Callable[[int], None]  # so many steps


def decoder(config: ModelConfig, optimizer: OptimizerConfig, batches: Batches, device: str) -> Contestant:
    model = Decoder(config).to(device)
    stepper = make(model, optimizer)

    def take(count: int) -> None:
        for _ in steps(model, stepper, batches, 0, count, clip=1.0):
            pass

    return Contestant(model, stepper, take)


def plain(config: ModelConfig, batches: Batches, device: str) -> Contestant:
    model = PlainGPT(config).to(device)
    # Fused on CUDA alone, as there.
    stepper = torch.optim.AdamW(
        model.parameters(),
        lr=1e-3,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        **({"fused": True} if "cuda" in device else {}),
    )
    return Contestant(model, stepper, lambda count: plain_steps(model, stepper, batches, count, device))


def timed(pair: dict[str, Contestant], rounds: int, count: int, device: str) -> dict[str, list[float]]:
    """Seconds a step of each in every round, after a warm-up."""
    for each in pair.values():
        each.take(2)
    found: dict[str, list[float]] = {name: [] for name in pair}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(pair), len(pair)):
            synchronize(device)
            start = time.perf_counter()
            pair[name].take(count)
            synchronize(device)
            found[name].append((time.perf_counter() - start) / count)
    return found


def synchronize(device: str) -> None:
    if "cuda" in device:
        torch.cuda.synchronize()


def saved(model: nn.Module, batch: tuple[Tensor, Tensor], device: str) -> float:
    """Bytes a token."""
    tokens, targets = (x.to(device) for x in batch)
    known = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor  # kept, so that its memory is not given to another one while forward runs

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    model.zero_grad(set_to_none=True)
    return sum(found.values()) / tokens.numel()


def held(each: Contestant) -> float:
    """Bytes a parameter: itself, its gradient, and what the optimizer keeps of it."""
    state = [x for s in each.optimizer.state.values() for x in flat(s)]
    parameters = list(each.model.parameters())
    return (2 * sum(p.nbytes for p in parameters) + sum(x.nbytes for x in state)) / sum(p.numel() for p in parameters)


def flat(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    return [x for each in state.values() for x in flat(each)] if isinstance(state, dict) else []


def compared(options: argparse.Namespace, config: ModelConfig, batches: Batches) -> list[Row]:
    """The plain loop and every variant, each beside the baseline."""
    device, adamw = options.device, OptimizerConfig(lr=1e-3)
    base = decoder(config, adamw, batches, device)
    base_saved = saved(base.model, batches(0), device)

    def row(kind: str, name: str, other: Contestant, rounds: int) -> Row:
        seconds = timed({BASE: base, name: other}, rounds, options.steps, device)
        time_ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds[BASE], strict=True))
        speed = options.batch * options.context / statistics.median(seconds[name])
        bytes_saved = saved(other.model, batches(0), device)
        return Row(kind, name, speed, time_ratio, bytes_saved, bytes_saved / base_saved, held(other))

    rows = [row("", PLAIN, plain(config, batches, device), 2 * options.rounds)]
    rows.insert(0, row("", BASE, decoder(config, adamw, batches, device), options.rounds))
    for kind, variants in VARIANTS.items():
        for name, changes in variants.items():
            if not options.only or kind in options.only:
                optimizer = kind == "optimizer"
                changed = config if optimizer else replace(config, **changes)
                stepper = replace(adamw, **changes) if optimizer else adamw
                rows.append(row(kind, name, decoder(changed, stepper, batches, device), options.rounds))
    return rows


def table(rows: list[Row]) -> str:
    lines = [f"{'':<36}{'tokens/s':>10}{'time':>8}{'saved B/token':>16}{'ratio':>8}{'held B/parameter':>18}"]
    kind = ""
    for row in rows:
        if row.kind != kind:
            kind = row.kind
            lines.append(kind)
        lines.append(
            f"{'  ' * bool(kind) + row.name:<36}{row.tokens_per_second:>10.0f}{row.time_ratio:>7.2f}x"
            f"{row.saved_bytes:>16.0f}{row.memory_ratio:>7.2f}x{row.held_bytes:>18.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("width", 256), ("layers", 4), ("heads", 4), ("context", 128), ("batch", 8), ("vocab", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs="+", default=[], choices=list(VARIANTS), help="kinds of variants; default all")
    parser.add_argument("--rounds", type=int, default=5, help="of each variant; twice as many of the plain loop")
    parser.add_argument("--steps", type=int, default=2, help="a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs: the figures say nothing")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    if options.quick:
        options.width, options.layers, options.context, options.batch = 32, 2, 32, 2
        options.rounds, options.steps = 2, 1
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    sizes = {name: getattr(options, name) for name in ("vocab", "context", "width", "layers", "heads")}
    config = ModelConfig(**sizes)
    tokens = torch.randint(options.vocab, (16, options.batch, options.context + 1))
    pairs = [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in tokens]
    rows = compared(options, config, lambda step: pairs[step % len(pairs)])

    parameters = sum(p.numel() for p in Decoder(config).parameters())
    where = f"torch {torch.__version__}, {options.device}, {options.threads} threads"
    shape = ", ".join(f"{name} {value}" for name, value in {**sizes, "batch": options.batch}.items())
    print(f"{where}; {shape}; {parameters} parameters; time and ratio: to the baseline in the same rounds\n")
    print(table(rows))
    # The plain loop's time over the baseline's is the baseline's speed over the plain loop's.
    speed = next(row.time_ratio for row in rows if row.name == PLAIN)
    print(f"\n{BASE} against {PLAIN}: {speed:.3f}x of its tokens per second (target: at least {TARGET}x)")
    if options.json:
        document = {"where": where, "sizes": {**sizes, "batch": options.batch}, "speed": speed, "target": TARGET}
        document |= {"rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
