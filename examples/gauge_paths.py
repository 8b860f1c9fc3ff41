"""Does the path of training depend on the coordinates? Every optimizer from several equivalent starts.

    python examples/gauge_paths.py [--model llama|gpt2 --steps 200 --conditions 10 100 --dtype float64 --json FILE]

A small language model of `transformers` (an embedding and two layers, characters of Python's own documentation) is
started as it is drawn, and again after its heads have been re-based by random matrices of the given condition numbers
(rotary queries and keys by what commutes with their turns). All starts compute the same function and see the same
batches. Printed are the final losses (mean of the last tenth) and how far apart the losses of a path are, at most, from
those of the unmoved start. Learning rates are the best of a grid at the unmoved start, so that none is a handicap.

"balanced first" moves the model to where A Aᵀ = B Bᵀ before AdamW starts, the obvious way to be free of the gauge
without a new optimizer. There factors are Σ^½ times singular vectors of the product: unique up to their signs, to which
Adam is blind, and, for rotary pairs of rows, up to phases, to which it is not.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer

import gaugekit
from gaugekit.optim.pairs import Pair, balance_, scramble_
from gaugekit.optim.projected import Horizontal
from gaugekit.optim.quotient import QuotientAdam, QuotientSGD
from gaugekit.verbs.running import Float64

LENGTH, BATCH = 48, 12
Make = Callable[[Any, list[Pair], float], Optimizer]


def characters() -> tuple[Tensor, int]:
    """Every documentation topic of this Python, as one tensor of characters, rare ones as one."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    known = {c: i for i, c in enumerate(sorted(set(text[:200_000])))}
    return torch.tensor([known.get(c, 0) for c in text]), len(known)


def model_of(name: str, vocabulary: int, dtype: torch.dtype) -> Any:
    import transformers

    torch.manual_seed(0)
    common = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if name == "llama":
        config = transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            **common,
        )
    else:
        config = transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=4, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **common
        )
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def optimizers() -> dict[str, tuple[Make, tuple[float, ...]]]:
    def sgd(momentum: float) -> Make:
        return lambda model, _, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)

    def adam(model: Any, _: list[Pair], lr: float) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=lr)

    def balanced(model: Any, pairs: list[Pair], lr: float) -> Optimizer:
        balance_(pairs)
        return adam(model, pairs, lr)

    coarse, fine = (0.03, 0.1, 0.3, 1.0), (1e-3, 2e-3, 5e-3, 1e-2)
    return {
        "SGD": (sgd(0.0), coarse),
        "SGD, momentum": (sgd(0.9), tuple(lr / 10 for lr in coarse)),
        "QuotientSGD, momentum": (
            lambda m, pairs, lr: QuotientSGD(m.parameters(), lr=lr, momentum=0.9, pairs=pairs),
            tuple(lr / 10 for lr in coarse),
        ),
        "AdamW": (adam, fine),
        "AdamW, balanced first": (balanced, fine),
        "Horizontal(AdamW)": (lambda m, pairs, lr: Horizontal(adam(m, pairs, lr), pairs), fine),
        "QuotientAdam": (lambda m, pairs, lr: QuotientAdam(m.parameters(), lr=lr, pairs=pairs), fine),
    }


def batches(data: Tensor, steps: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - LENGTH - 1, (BATCH,), generator=generator)
        yield torch.stack([data[i : i + LENGTH + 1] for i in starts.tolist()])


def train(start: Any, make: Make, lr: float, condition: float, data: Tensor, steps: int) -> Tensor:
    """Losses (steps,) from a copy of the model, moved along its orbit by matrices of this condition number."""
    model = copy.deepcopy(start).double()
    pairs = gaugekit.pairs(model)
    if condition > 1:
        scramble_(pairs, torch.Generator().manual_seed(int(condition)), condition)
    model.to(start.dtype)
    optimizer = make(model, pairs, lr)
    losses = []
    for batch in batches(data, steps):
        # Llama's norms and positions are float32 otherwise, and rounding is all that is to be seen.
        with Float64() if start.dtype == torch.float64 else nullcontext():
            logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def draw(paths: dict[str, list[Tensor]], conditions: list[float], file: Path) -> None:
    """Losses along the path, one panel an optimizer, one line a start."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = (len(paths) + 1) // 2
    figure, axes = plt.subplots(2, columns, figsize=(3 * columns, 5), sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat[len(paths) :]:
        axis.set_visible(False)
    for axis, (name, lines) in zip(axes.flat, paths.items(), strict=False):
        for condition, losses, style in zip([1.0, *conditions], lines, cycle(("-", "--", ":", "-."))):
            axis.plot(losses, style, linewidth=1.5, label=f"condition {condition:g}")
        axis.set_title(name, fontsize=9)
    low = min(float(losses.nan_to_num(math.inf).min()) for lines in paths.values() for losses in lines)
    high = max(float(lines[0][0]) for lines in paths.values())
    axes[0, 0].set_ylim(low - 0.1, high + 0.3)  # a path that leaves the picture upwards has failed
    axes[0, 0].legend(fontsize=7)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("loss", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def final(losses: Tensor) -> float:
    value = float(losses[-max(1, len(losses) // 10) :].mean())
    return value if value == value else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--conditions", type=float, nargs="+", default=[10.0, 100.0])
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--rates", type=int, default=4, help="how many learning rates of each grid to try")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--figure", type=Path, help="draw the losses of all starts (needs matplotlib)")
    options = parser.parse_args()
    data, vocabulary = characters()
    start = model_of(options.model, vocabulary, getattr(torch, options.dtype))
    table = Table("optimizer", "lr", title=f"{options.model}, {options.steps} steps, {options.dtype}, by condition")
    for condition in (1.0, *options.conditions):
        table.add_column(f"final loss, {condition:g}", justify="right")
    for condition in options.conditions:
        table.add_column(f"apart, {condition:g}", justify="right")
    results, drawn = [], {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        chosen = optimizers()
        task = progress.add_task(
            "training", total=sum(len(rates) + len(options.conditions) for _, rates in chosen.values())
        )
        for name, (make, grid) in chosen.items():
            rates, tried = grid[: options.rates], {}
            for lr in rates:
                tried[lr] = train(start, make, lr, 1.0, data, options.steps)
                progress.advance(task)
            lr = min(rates, key=lambda rate: final(tried[rate]))
            paths = [tried[lr]]
            for condition in options.conditions:
                paths.append(train(start, make, lr, condition, data, options.steps))
                progress.advance(task)
            drawn[name] = paths
            apart = [float((path - paths[0]).abs().max()) for path in paths[1:]]
            table.add_row(name, f"{lr:g}", *(f"{final(p):.4f}" for p in paths), *(f"{x:.1e}" for x in apart))
            results.append(
                {"optimizer": name, "lr": lr, "final": [final(p) for p in paths], "largest_difference": apart}
            )
    Console(width=130).print(table)
    if options.json:
        options.json.write_text(
            json.dumps({"conditions": [1.0, *options.conditions], "rows": results}, indent=1) + "\n"
        )
    if options.figure:
        draw(drawn, options.conditions, options.figure)


if __name__ == "__main__":
    sys.exit(main())
