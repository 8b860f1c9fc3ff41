"""Speed, cache and error of `gaugekit reduce`, against the original and against decompositions of single matrices.

    python benchmarks/bench_reduce.py MODEL [--text FILE --eval-text FILE] [--shares 0.75 0.5] [--tokens 4096]
                                            [--context 1024] [--threads 2]

MODEL is a directory in the Hugging Face layout, of a family that has a class with narrower values. Without texts both
are halves of Python's own help.

First errors, all at one count of numbers in W_V and W_O and read in turn with the original: values and outputs of each
head cut together (`reduce`, plain and by the text), the values of each head alone (SVD of W_V, its rank per head), and
both matrices whole and apart (SVD of W_V and of W_O, ranks by which each keeps its share of the numbers). Then tokens a
second and bytes in the cache of what `reduce --form smaller` wrote, in turn with the original in one process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from pydoc import resolve
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from gaugekit.checkpoint import open_checkpoint
from gaugekit.checkpoint.writer import write
from gaugekit.models.quiet import quiet
from gaugekit.models.view import Edit
from gaugekit.symmetry import circuits
from gaugekit.verbs.evaluating import read_both
from gaugekit.verbs.inspect import untracked
from gaugekit.verbs.reduce import reduce
from gaugekit.verbs.rewriting import Opened, opened, prepare
from gaugekit.verbs.texts import text_batches

TRIES, STEPS = 5, 32

Approximate = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def nearest(matrix: Tensor, rank: int) -> Tensor:
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return (u[..., :rank] * s[..., None, :rank]) @ vh[..., :rank, :]


def values_alone(v: Tensor, o: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Each head's W_V (g, k, d) to rank r; what is left of W_O has r columns a head."""
    return nearest(v, max(1, int(share * v.shape[1]))), o


def matrices_apart(v: Tensor, o: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """W_V (g k, d) and W_O (h k, d) whole; rank ρ of (m, d) takes ρ (m + d) numbers."""
    parts = []
    for heads in (v, o):
        matrix = heads.flatten(0, 1)
        rank = max(1, int(share * matrix.numel() / sum(matrix.shape)))
        parts.append(nearest(matrix, rank).reshape(heads.shape))
    return parts[0], parts[1]


def rewritten(model: Opened, out: Path, approximate: Approximate, share: float) -> None:
    """The model with other values and outputs."""
    every = [each.attention for each in circuits(model.spec, model.symmetries.observable)]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for a in every:
            edit = Edit({name: model.load(name).double() for name in (a.v.weight.name, a.o.weight.name)})
            edit[a.v.weight], edit[a.o.weight] = approximate(edit[a.v.weight], edit[a.o.weight], share)
            yield from edit.changed.items()

    names = {view.name for a in every for view in (a.v.weight, a.o.weight)}
    write(prepare(model, names, out), tensors())


def errors(source: str, folder: Path, shares: list[float], text: Path, held_out: Path, tokens: int) -> None:
    model = opened(source, None)
    rows = text_batches(model.checkpoint, model.spec, held_out, 512, 4, tokens)
    for share in shares:
        sides: dict[str, Callable[[Path], Any]] = {
            "heads together, by the text": lambda out, f=share: reduce(source, out, vo=f, text=text, tokens=tokens),
            "  with one rank a layer": lambda out, f=share: reduce(
                source, out, vo=f, text=text, tokens=tokens, form="smaller"
            ),
            "heads together, plain": lambda out, f=share: reduce(source, out, vo=f),
            "SVD of each head's W_V": lambda out, f=share: rewritten(model, out, values_alone, f),
            "SVD of W_V and of W_O": lambda out, f=share: rewritten(model, out, matrices_apart, f),
        }
        print(f"\n{share:.0%} of the numbers in W_V and W_O kept, {sum(x.numel() for x in rows)} held-out tokens")
        best = None
        for number, (what, make) in enumerate(sides.items()):
            out = folder / f"{share}-{number}"
            make(out)
            before, after = read_both(
                model.checkpoint,
                open_checkpoint(out),
                model.spec,
                rows,
                dtype=torch.float32,
                device="cpu",
                track=untracked,
            )
            lost = after.nats - before.nats
            best = best or lost
            print(
                f"{what:30} {after.nats:7.4f} nats a token, {before.nats:.4f} before; perplexity "
                f"{after.perplexity:10.2f}, {before.perplexity:.2f} before; loss x{lost / best:.1f}",
                flush=True,
            )


def speed(source: str, folder: Path, shares: list[float], context: int) -> None:
    original = loaded(source)
    print(f"\ncontext of {context} tokens, {STEPS} more with the cache; median of {TRIES}, in turn with the original")
    for share in shares:
        reduce(source, folder / f"small-{share}", vo=share, form="smaller")
        model = loaded(folder / f"small-{share}")
        ids = torch.randint(original.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
        found: list[list[tuple[float, float, int]]] = [[], []]
        for number in range(TRIES + 1):
            pair = list(enumerate((original, model)))
            for i, each in pair if number % 2 else pair[::-1]:
                found[i].append(timed(each, ids))
        (read, write, cache), (read_now, write_now, cache_now) = (
            [median(column) for column in zip(*each[1:], strict=True)] for each in found
        )
        print(
            f"{share:.0%} of the values: reading {context / read_now:7.0f} tokens/s, x{read / read_now:.2f} of "
            f"{context / read:.0f}; writing {STEPS / write_now:6.1f} tokens/s, x{write / write_now:.2f} of "
            f"{STEPS / write:.1f}; cache {cache_now / 1e6:.2f} MB, x{cache_now / cache:.3f} of {cache / 1e6:.2f}",
            flush=True,
        )


def loaded(where: str | Path) -> Any:
    with quiet():
        return AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.no_grad()
def timed(model: Any, ids: Tensor) -> tuple[float, float, int]:
    """Seconds for the context and for more tokens behind it, and bytes in the cache."""
    cache: Any = DynamicCache(config=model.config)
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    start = time.perf_counter()
    model(input_ids=ids, logits_to_keep=1, use_cache=True, **{name: cache})
    middle = time.perf_counter()
    nbytes = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    for _ in range(STEPS):
        model(input_ids=ids[:, :1], use_cache=True, **{name: cache})
    return middle - start, time.perf_counter() - middle, nbytes


def halves_of_help(folder: Path) -> tuple[Path, Path]:
    topics: Any = resolve("pydoc_data.topics.topics")[0]  # pyright: ignore[reportOptionalSubscript]
    names = sorted(topics)
    for name, part in (("text", names[::2]), ("held-out", names[1::2])):
        (folder / name).write_text("\n\n".join(topics[each] for each in part), encoding="utf-8")
    return folder / "text", folder / "held-out"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--eval-text", type=Path)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.75, 0.5])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(json.dumps({"model": given.model, "threads": given.threads, "torch": torch.__version__}))
    with tempfile.TemporaryDirectory(dir=Path(given.model).resolve().parent) as folder:
        text, held_out = halves_of_help(Path(folder))
        errors(given.model, Path(folder), given.shares, given.text or text, given.eval_text or held_out, given.tokens)
        speed(given.model, Path(folder), given.shares, given.context)


if __name__ == "__main__":
    main()
