"""Norm modules against torch's fused kernels and the plain formulas: eager and compiled, forward and with backward.

    python benchmarks/bench_norms.py [--shapes 2048x768 512x4096] [--only rms layer] [--json OUT] [--plot OUT.svg]

Everything runs in this process on the same random input, with weight and bias where the norm has them. In each round
all contestants are timed once, in random order, so that a busy machine slows them alike; a time is the median over
rounds, a ratio the median over rounds of the quotient by `F.layer_norm` in the same round and mode (eager to eager,
compiled to compiled). Backward is by the input and by all parameters.

RMSNorm is not the cheaper norm everywhere: on the CPU torch's LayerNorm is one hand-written kernel forward and one
backward, its RMSNorm several, so that in eager mode `F.layer_norm` is often the faster although it computes more.
Nor is compiled always faster than eager: the compiler writes the backward of LayerNorm anew.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugekit.nn import norms

BASE = "F.layer_norm"
MODES = [(compiled, backward) for compiled in ("eager", "compiled") for backward in ("forward", "forward+backward")]


@dataclass(frozen=True)
class Row:
    norm: str
    shape: str
    mode: str
    what: str
    milliseconds: float
    ratio: float  # to F.layer_norm


class Function(nn.Module):
    """A function of (x, weight, bias) with the parameters of a norm."""

    def __init__(self, function: Callable[..., Tensor], d: int, bias: bool) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


def plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * weight + bias


def plain_rms_norm(x: Tensor, weight: Tensor, _: None) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def contestants(d: int) -> dict[str, nn.Module]:
    return {
        BASE: Function(lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5), d, bias=True),
        "layer": norms.LayerNorm(d),
        "layer, robust": norms.LayerNorm(d, robust=True),
        "layer, plain formula": Function(plain_layer_norm, d, bias=True),
        "F.rms_norm": Function(lambda x, w, _: F.rms_norm(x, w.shape, w, 1e-6), d, bias=False),
        "rms": norms.RMSNorm(d),
        "rms, robust": norms.RMSNorm(d, robust=True),
        "rms, plain formula": Function(plain_rms_norm, d, bias=False),
    } | {name: norms.norm(name, d) for name in norms.NORMS if name not in ("layer", "rms", "none")}


def call(module: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor, leaves: list[Tensor]) -> None:
    if not leaves:
        with torch.no_grad():
            module(x)
    else:
        torch.autograd.grad(module(x), leaves, cotangent)


def seconds(runs: dict[str, Callable[[], None]], rounds: int, calls: int) -> dict[str, list[float]]:
    """For each, the time of a call in every round, after a warm-up, which compiles."""
    for run in runs.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                runs[name]()
            synchronize()
            times[name].append((time.perf_counter() - start) / calls)
    return times


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    for shape in options.shapes:
        n, d = map(int, shape.split("x"))
        dtype = getattr(torch, options.dtype)
        x, cotangent = (torch.randn(n, d).to(options.device, dtype) for _ in range(2))
        modules = {
            name: module.to(options.device, dtype)
            for name, module in contestants(d).items()
            if name == BASE or not options.only or any(name.startswith((kind, f"F.{kind}")) for kind in options.only)
        }
        for compiled, what in MODES:
            torch._dynamo.reset()
            runs = {}
            for name, module in modules.items():
                function = torch.compile(module, dynamic=False) if compiled == "compiled" else module
                given = x.clone().requires_grad_(what != "forward")
                leaves = [given, *module.parameters()] if what != "forward" else []
                runs[name] = partial(call, function, given, cotangent, leaves)
            times = seconds(runs, options.rounds, options.calls)
            for name, of in times.items():
                ratio = statistics.median(a / b for a, b in zip(of, times[BASE], strict=True))
                rows.append(Row(name, shape, compiled, what, 1e3 * statistics.median(of), ratio))
    return rows


def table(rows: list[Row], shape: str) -> str:
    columns = [f"{compiled} {what}" for compiled, what in MODES]
    lines = [f"{shape:<22}" + "".join(f"{column:>28}" for column in columns)]
    lines.append(" " * 22 + f"{'ms':>18}{'ratio':>10}" * len(columns))
    cells = {(row.norm, f"{row.mode} {row.what}"): row for row in rows if row.shape == shape}
    for name in dict.fromkeys(norm for norm, _ in cells):
        found = [cells[name, column] for column in columns]
        lines.append(f"{name:<22}" + "".join(f"{row.milliseconds:>18.3f}{row.ratio:>9.2f}x" for row in found))
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """A bar for every norm: its ratio to F.layer_norm, one panel a shape and mode."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    shapes = list(dict.fromkeys(row.shape for row in rows))
    size = (4 * len(MODES), 0.35 * len(rows) / len(MODES) + 1.2 * len(shapes))
    figure, axes = plt.subplots(len(shapes), len(MODES), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for i, shape in enumerate(shapes):
        for j, (compiled, what) in enumerate(MODES):
            own = [row for row in rows if (row.shape, row.mode, row.what) == (shape, compiled, what)][::-1]
            axis = axes[i][j]
            colours = ["#888888" if "F." in row.norm or "plain" in row.norm else "#2a6fbb" for row in own]
            axis.barh([row.norm for row in own], [row.ratio for row in own], color=colours)
            axis.axvline(1, color="black", linewidth=0.8)
            axis.set_title(f"{shape}, {compiled}, {what}", fontsize=9)
            axis.set_xlabel("time / F.layer_norm", fontsize=8)
            axis.tick_params(labelsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["2048x768", "512x4096"], help="rows x features")
    parser.add_argument("--only", nargs="+", default=[], help="names of norms; all if left out")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=5, help="calls a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--plot", type=Path, metavar="OUT.svg", help="needs matplotlib")
    options = parser.parse_args()
    torch.manual_seed(options.seed)

    rows = measure(options)
    where = f"torch {torch.__version__}, {options.device}, {options.dtype}, {torch.get_num_threads()} threads"
    print(f"{where}; ratio: to {BASE} in the same mode")
    for shape in options.shapes:
        print("\n" + table(rows, shape))
    if options.json:
        document = {"where": where, "base": BASE, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
