"""Fine-tune a model with LoRA, under AdamW and under QuotientAdam, from several equivalent starts.

    pip install '.[gguf,peft]'
    python examples/lora_quotient.py MODEL [--text FILE --steps 40 --rank 8 --lr 1e-3 --conditions 10 100]

MODEL is what `from_pretrained` takes, or a GGUF file. An adapter W + BA may start from any SA in place of A, as B is
zero: the model is the same. Its training should be, too. The first start is PEFT's own, the others are moved by random
S of the given condition numbers; data and rates are the same for all.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import gaugekit
from gaugekit.optim.pairs import scramble_
from gaugekit.optim.quotient import QuotientAdam


def source(model: str) -> dict[str, str]:
    """The arguments of `from_pretrained`."""
    path = Path(model)
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": model}


def windows(tokens: Tensor, length: int, batch: int, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(tokens) - length - 1, (count, batch), generator=generator)
    return [torch.stack([tokens[i : i + length + 1] for i in row]) for row in starts.tolist()]


def loss_of(model: Any, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def run(
    base: Any,
    name: str,
    condition: float,
    options: argparse.Namespace,
    train: list[Tensor],
    held_out: list[Tensor],
    tick: Callable[[], None],
) -> tuple[Tensor, float]:
    """(losses (steps,), loss on held-out text) of one optimizer from one start. The base model is left as it was."""
    torch.manual_seed(0)
    config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=options.targets)
    model = get_peft_model(base, config)
    pairs = gaugekit.pairs(model)
    if condition > 1:
        scramble_(pairs, torch.Generator().manual_seed(int(condition)), condition)
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "AdamW":
        optimizer: Any = torch.optim.AdamW(trained, lr=options.lr)
    else:
        optimizer = QuotientAdam(trained, lr=options.lr, pairs=pairs)
    losses = []
    for batch in train:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tick()
    with torch.no_grad():
        after = sum(loss_of(model, batch).item() for batch in held_out) / len(held_out)
    model.unload()
    return torch.tensor(losses, dtype=torch.float64), after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, help="default: the documentation topics of this Python")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--conditions", type=float, nargs="+", default=[10.0, 100.0])
    options = parser.parse_args()
    where = source(options.model)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    base = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    text = options.text.read_text() if options.text else "\n\n".join(pydoc_data.topics.topics.values())
    tokens = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    split = len(tokens) * 9 // 10
    train = windows(tokens[:split], options.length, options.batch, options.steps, seed=1)
    held_out = windows(tokens[split:], options.length, options.batch, 8, seed=2)
    with torch.no_grad():
        before = sum(loss_of(base, batch).item() for batch in held_out) / len(held_out)
    conditions = (1.0, *options.conditions)
    table = Table(title=f"LoRA of rank {options.rank}, lr {options.lr:g}; held-out loss before: {before:.4f}")
    for column in ("optimizer", "condition of S", "last losses", "held-out loss", "largest difference to the first"):
        table.add_column(column, justify="left" if column == "optimizer" else "right")
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("fine-tuning", total=2 * len(conditions) * options.steps)
        for name in ("AdamW", "QuotientAdam"):
            first = None
            for condition in conditions:
                losses, after = run(base, name, condition, options, train, held_out, lambda: progress.advance(task))
                first = losses if first is None else first
                apart = float((losses - first).abs().max())
                tail = float(losses[-max(1, options.steps // 10) :].mean())
                table.add_row(
                    name, f"{condition:g}", f"{tail:.4f}", f"{after:.4f}", "" if first is losses else f"{apart:.1e}"
                )
                rows.append({"optimizer": name, "condition": condition, "held_out": after, "difference": apart})
    Console(width=110).print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
