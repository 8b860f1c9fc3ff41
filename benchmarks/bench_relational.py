"""Relational attention against plain SDPA and against the n × n formula: time, and peak memory.

    python benchmarks/bench_relational.py [--max-n 16384 --json OUT.json --plot PREFIX]

--heads heads of --head-dim channels, float32, batch 1, queries = keys = values = x for every method, forward alone and
forward with backward (the gradient of x, and of a score's parameters).

Time: all methods run in this process, one after another in every round, so that what disturbs the machine disturbs all.
Seconds are the median over the rounds; the ratio to SDPA is the median of the rounds' own ratios. Rounds fall with n,
from --rounds to 3.

Memory: one fresh process for each method, length and direction, which runs once at 64 tokens, to load the libraries,
and once at n. The figure is the peak resident size (VmHWM, reset before the run; Linux only) over what was resident
once the inputs were made. Growth is its exponent between the two largest lengths: 1 is linear, 2 quadratic.

The formula forms G = X Xᵀ, the scores and the weights as (heads, n, n) tensors. It is left out, and said to be, where
six of them exceed half of the memory that is free at the start.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugekit.nn.relational import relational_attention
from gaugekit.nn.scores import RBF, Bilinear, Cosine, Dot, LearnedScore
from resident import resident

TARGETS = {"dot": 1.15, "cosine": 1.15, "rbf": 1.5, "bilinear": 1.5, "learned": 4.0}
FORMULAS = ("dot, n × n", "rbf, n × n", "learned, n × n")
METHODS = ("sdpa", *TARGETS, *FORMULAS)
DIRECTIONS = ("forward", "forward + backward")


@dataclass(frozen=True)
class Row:
    method: str
    n: int
    direction: str
    seconds: float | None  # None where the method was left out
    ratio: float | None  # to SDPA
    peak_bytes: int | None  # over the inputs


def score_of(name: str, heads: int, k: int):
    """Scores whose parameters are trained along, off their starting point; the same ones at every call."""
    generator = torch.Generator().manual_seed(1)
    if name == "bilinear":
        return Bilinear(nn.Parameter(torch.eye(k) + 0.1 * torch.randn(heads, k, k, generator=generator) / k**0.5))
    if name == "learned":
        score = LearnedScore(heads)
        nn.init.normal_(score.units, std=0.1, generator=generator)
        return score
    return {"dot": Dot, "cosine": Cosine, "rbf": RBF}[name]()


def function(method: str, heads: int, k: int, causal: bool, dtype: torch.dtype = torch.float32):
    """The method on x (1, heads, n, k), and its parameters."""
    if method == "sdpa":
        return lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=causal), []
    name, _, written_out = method.partition(", ")
    score, temperature = score_of(name, heads, k).to(dtype), k ** (-0.5 if name == "cosine" else 0.5)

    def attend(x: Tensor) -> Tensor:
        return relational_attention(x, score=score, temperature=temperature, is_causal=causal)

    def formula(x: Tensor) -> Tensor:
        s = scores(score, x) / temperature
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        return s.softmax(-1) @ x

    return formula if written_out else attend, list(score.parameters())


def scores(score: nn.Module, x: Tensor) -> Tensor:
    """f(G_ij, G_ii, G_jj), (1, heads, n, n), as one would write it down."""
    if isinstance(score, Bilinear):
        return x @ score.left @ x.mT
    g, square = x @ x.mT, x.square().sum(-1)
    if isinstance(score, Cosine):
        return g / (square[..., :, None] * square[..., None, :]).sqrt()
    if isinstance(score, RBF):
        return g - square[..., :, None] / 2 - square[..., None, :] / 2
    if isinstance(score, LearnedScore):
        rows, columns = square[..., :, None], square[..., None, :]
        return torch.stack([score(g[:, h], rows[:, h], columns[:, h], h) for h in range(x.shape[1])], 1)
    return g


def runner(method: str, x: Tensor, gradient: Tensor, direction: str, causal: bool) -> Callable[[], object]:
    attend, parameters = function(method, x.shape[1], x.shape[3], causal)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(x)

    if direction == "forward":
        return forward
    return lambda: torch.autograd.grad(attend(x), (x, *parameters), gradient)


def inputs(heads: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, heads, n, k).requires_grad_(), torch.randn(1, heads, n, k)


def free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 8 * 2**30


def measure_peak(options: argparse.Namespace, method: str, n: int, direction: str) -> int:
    """In a process of its own."""
    command = [sys.executable, __file__, "--child", method, str(n), direction]
    command += ["--heads", str(options.heads), "--head-dim", str(options.head_dim), *["--causal"] * options.causal]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def child(options: argparse.Namespace) -> None:
    method, n, direction = options.child
    runner(method, *inputs(options.heads, 64, options.head_dim), direction, options.causal)()
    run = runner(method, *inputs(options.heads, int(n), options.head_dim), direction, options.causal)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = resident("VmRSS")
    run()
    print(resident("VmHWM") - before)


def timed(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds and ratio to SDPA of each, interleaved."""
    seconds: dict[str, list[float]] = {method: [] for method in runs}
    for turn in range(rounds + 1):
        for method, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:  # the first is a warm-up
                seconds[method].append(time.perf_counter() - start)
    plain = seconds["sdpa"]
    return {
        method: (statistics.median(mine), statistics.median(a / b for a, b in zip(mine, plain, strict=True)))
        for method, mine in seconds.items()
    }


def check(options: argparse.Namespace) -> dict[str, float]:
    """The largest difference to the formula in float64 at the smallest length, as a share of the largest entry."""
    x, _ = inputs(options.heads, options.min_n, options.head_dim)
    setting = options.heads, options.head_dim, options.causal
    errors = {}
    for method in TARGETS:
        attend, _ = function(method, *setting)
        formula, _ = function(f"{method}, n × n", *setting, torch.float64)
        with torch.no_grad():
            y, z = attend(x), formula(x.double())
        errors[method] = float((y - z).abs().max() / z.abs().max())
    return errors


def measure(options: argparse.Namespace) -> list[Row]:
    rows, n = [], options.min_n
    room = free_bytes() // 2
    while n <= options.max_n:
        fits = 6 * options.heads * n * n * 4 <= room
        if not fits:
            size = 6 * options.heads * n * n * 4 / 2**30
            print(f"n = {n}: the n × n formula is left out, six of its tensors are {size:.0f} GiB", file=sys.stderr)
        methods = [method for method in METHODS if fits or method not in FORMULAS]
        x, gradient = inputs(options.heads, n, options.head_dim)
        for direction in DIRECTIONS:
            runs = {method: runner(method, x, gradient, direction, options.causal) for method in methods}
            rounds = max(3, min(options.rounds, options.rounds * 2048 * 2048 // (n * n)))
            times = timed(runs, rounds)
            for method in METHODS:
                seconds, ratio = times.get(method, (None, None))
                bytes_ = (
                    measure_peak(options, method, n, direction) if method in times and not options.no_memory else None
                )
                rows.append(Row(method, n, direction, seconds, ratio, bytes_))
            print(f"n = {n}, {direction}: done", file=sys.stderr)
        n *= 2
    return rows


def table(rows: list[Row], direction: str, cell: Callable[[Row], str]) -> str:
    lengths = sorted({row.n for row in rows})
    lines = [f"{direction:<20}" + "".join(f"{n:>16}" for n in lengths)]
    for method in METHODS:
        cells = {row.n: cell(row) for row in rows if row.method == method and row.direction == direction}
        lines.append(f"{method:<20}" + "".join(f"{cells[n]:>16}" for n in lengths))
    return "\n".join(lines)


def time_cell(row: Row) -> str:
    return "-" if row.seconds is None else f"{row.seconds:.4f} {row.ratio:6.2f}x"


def memory_cell(row: Row) -> str:
    return "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f}"


def growth(rows: list[Row], method: str, direction: str) -> float | None:
    """The exponent of n in the peak memory, between the two largest lengths that were measured."""
    found = {
        row.n: row.peak_bytes for row in rows if (row.method, row.direction) == (method, direction) and row.peak_bytes
    }
    if len(found) < 2:
        return None
    small, large = sorted(found)[-2:]
    return math.log(found[large] / found[small]) / math.log(large / small)


def plot(rows: list[Row], prefix: str) -> None:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("matplotlib is not installed, left out the plots: pip install matplotlib") from None
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figures = {
        "time": ("time / SDPA", lambda row: row.ratio, "linear"),
        "memory": ("peak memory over the inputs, MiB", lambda row: row.peak_bytes and row.peak_bytes / 2**20, "log"),
    }
    for name, (label, value, scale) in figures.items():
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
        for ax, direction in zip(axes, DIRECTIONS, strict=True):
            for i, method in enumerate(METHODS):
                points = [
                    (row.n, value(row))
                    for row in rows
                    if (row.method, row.direction) == (method, direction) and value(row)
                ]
                if points:
                    style = {"linestyle": ":", "marker": "x"} if method in FORMULAS else {"marker": "o"}
                    ax.plot(*zip(*points, strict=True), label=method, color=f"C{i}", **style)
            ax.set(title=direction, xlabel="tokens", xscale="log", yscale=scale)
            lengths = sorted({row.n for row in rows})
            ax.set_xticks(lengths, [str(n) for n in lengths])
            ax.minorticks_off()
            ax.grid(alpha=0.3)
        axes[0].set_ylabel(label)
        if name == "time":
            axes[0].set_ylim(bottom=0)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize=9)
        figure.savefig(f"{prefix}-{name}.svg")
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--min-n", type=int, default=512, help="doubled up to --max-n")
    parser.add_argument("--max-n", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--no-memory", action="store_true", help="leave out the processes that measure peak memory")
    parser.add_argument("--json", metavar="OUT")
    parser.add_argument("--plot", metavar="PREFIX", help="writes PREFIX-time.svg and PREFIX-memory.svg")
    parser.add_argument("--child", nargs=3, metavar=("METHOD", "N", "DIRECTION"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return

    setting = f"{options.heads} heads of {options.head_dim}, float32{', causal' if options.causal else ''}"
    print(f"{setting}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    errors = check(options)
    print("largest error at the smallest length: " + ", ".join(f"{m} {e:.1e}" for m, e in errors.items()))
    rows = measure(options)
    print("\nseconds, and ratio to SDPA")
    for direction in DIRECTIONS:
        print(table(rows, direction, time_cell))
    worst = {m: max(row.ratio for row in rows if row.method == m and row.ratio is not None) for m in TARGETS}
    print("largest ratio: " + ", ".join(f"{m} {worst[m]:.2f} (target {TARGETS[m]})" for m in TARGETS))
    exponents = {d: {m: growth(rows, m, d) for m in METHODS} for d in DIRECTIONS}
    if not options.no_memory:
        print("\npeak memory over the inputs, MiB")
        for direction in DIRECTIONS:
            print(table(rows, direction, memory_cell))
            known = {m: e for m, e in exponents[direction].items() if e is not None}
            print("growth: " + ", ".join(f"{m} {e:.2f}" for m, e in known.items()))
    if options.json:
        document = {
            "setting": setting,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "errors": errors,
            "targets": TARGETS,
            "worst": worst,
            "growth": exponents,
            "rows": [asdict(row) for row in rows],
        }
        Path(options.json).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
