"""What a text shows of a model's heads: second moments of mixed values, of queries and of keys.

Shapes: n tokens, h query heads, g key/value heads, k head dimension, d stream width. A moment (g, k + 1, k + 1) is the
mean of [x 1][x 1]ᵀ, which holds the mean of x too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from gaugekit.errors import CheckpointError
from gaugekit.models.spec import Attention
from gaugekit.models.view import View
from gaugekit.symmetry import Circuits
from gaugekit.verbs.inspect import Track
from gaugekit.verbs.rewriting import Opened
from gaugekit.verbs.running import forward, load_model, module_of

__all__ = ["Moments", "measure"]


@dataclass(frozen=True)
class Moments:
    """Of one attention, means over tokens and over the query heads of a group.

    mixed     (g, k + 1, k + 1)  of z = Σ_t a_t v_t, what a query head hands to its output projection
    queries   (g, k + 1, k + 1)  of queries, or None where they were not asked for
    keys      (g, k + 1, k + 1)  of keys, both before they are turned by their positions
    """

    tokens: int
    mixed: Tensor
    queries: Tensor | None
    keys: Tensor | None


def measure(
    model: Opened,
    circuits: Sequence[Circuits],
    rows: Sequence[Tensor],
    *,
    queries_keys: bool,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    track: Track[Any],
) -> tuple[Moments, ...]:
    """Run the rows through the model once, in `dtype`; what is kept, in float64, does not grow with the text.

    Raises `CheckpointError` for a text with fewer tokens than a head has dimensions, or states that are not finite.
    """
    tokens, widest = sum(ids.numel() for ids in rows), max(each.attention.head_dim for each in circuits)
    if tokens < widest:
        raise CheckpointError(f"the text has {tokens} tokens, and heads have {widest} dimensions: give a longer one")
    running = load_model(model.checkpoint, model.spec, dtype).to(device)
    modules, prefix = dict(running.named_modules()), getattr(running, "base_model_prefix", "")

    def module(view: View) -> nn.Module:
        return module_of(modules, view.name.removesuffix(".weight"), prefix)

    sums: list[dict[str, Tensor]] = [{} for _ in circuits]

    def adding(found: dict[str, Tensor], what: str, view: View, a: Attention) -> Callable[..., None]:
        index = features(view).to(device)

        def add(_: nn.Module, given: tuple[Tensor, ...], output: Tensor | None = None) -> None:
            # What the module is given or, behind it, gives: (g, n · heads of a group, k + 1).
            states = given[0] if output is None else output
            x = states.detach().flatten(0, -2)[:, index].double()
            x = pad(x.unflatten(1, (a.kv_heads, -1)).transpose(0, 1).flatten(1, 2), (0, 1), value=1.0)
            found[what] = found.get(what, 0.0) + (x.mT @ x).cpu()

        return add

    for each, found in zip(circuits, sums, strict=True):
        a = each.attention
        module(a.o.weight).register_forward_pre_hook(adding(found, "mixed", a.o.weight, a))
        for what, linear in (("queries", a.q), ("keys", a.k)) if queries_keys else ():
            module(linear.weight).register_forward_hook(adding(found, what, linear.weight, a))
    for ids in track(rows, len(rows), "text"):
        forward(running, input_ids=ids.to(device))
    return tuple(_moments(found) for found in sums)


def features(view: View) -> Tensor:
    """(heads, k): which output of a linear map on disk, or which input of a writer, each row of (heads, k, d) is."""
    places = view.window(torch.arange(torch.Size(view.disk_shape).numel()).reshape(view.disk_shape))
    step = int(places[0, 0, 1] - places[0, 0, 0])
    return places[..., 0] // view.disk_shape[-1] if step == 1 else places[..., 0] % step


def _moments(found: dict[str, Tensor]) -> Moments:
    if not all(total.isfinite().all() for total in found.values()):
        raise CheckpointError("states are NaN or infinite: run the model in a wider precision")
    # The last entry counts what came.
    means = {what: total / total[..., -1:, -1:] for what, total in found.items()}
    tokens = int(found["mixed"][0, -1, -1])
    return Moments(tokens, means["mixed"], means.get("queries"), means.get("keys"))
