"""What two models compute on one text, side by side, and which symmetries bring the one to the other by that.

States, queries, keys, outputs of heads and hidden units are linear in what bases do to the weights, but for constants,
which are taken off with the means. Activations are measured in the models as they are stored and carried over to where
the bases of heads are settled (the steps of each model's way home).

Shapes: n tokens, d stream width, h query heads, g key/value heads, k head dimension, f hidden units. x is ours, x'
theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gaugekit.errors import GaugekitError
from gaugekit.models.spec import MLP, Attention, Linear, Spec
from gaugekit.models.view import View
from gaugekit.symmetry import Circuits, Symmetry
from gaugekit.symmetry.heads import HeadOrder, QueryKey, ValueOutput, partner, per_query_head
from gaugekit.symmetry.orbit import Step
from gaugekit.symmetry.units import GatedUnitScale, UnitOrder
from gaugekit.symmetry.wiring import wire
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.matching import Tensors, assigned, pair_groups, unitary
from gaugekit.verbs.mates import Turn, Weights, commuting, turn
from gaugekit.verbs.rewriting import Opened
from gaugekit.verbs.running import forward, load_model, module_of
from gaugekit.verbs.texts import text_batches

__all__ = ["Activations", "Crosses", "compared", "heard"]

LENGTH, ROWS, TOKENS = 128, 8, 8192  # of a row, rows at a time, of the text


class Cross:
    """Σ x x'ᵀ of x and x' (n, m), without their means if `centred`, and the sums of squares of both (m,)."""

    def __init__(self, centred: bool = True) -> None:
        self._centred = centred
        self._count = 0
        self._sums: list[Tensor] = []

    def add(self, x: Tensor, y: Tensor) -> None:
        x, y = x.double(), y.double()
        new = [x.mT @ y, x.sum(0), y.sum(0), x.square().sum(0), y.square().sum(0)]
        self._sums = [a + b for a, b in zip(self._sums, new, strict=True)] if self._sums else new
        self._count += len(x)

    @property
    def product(self) -> Tensor:
        xy, x, y, _, _ = self._sums
        return xy - x.unsqueeze(-1) * y / self._count if self._centred else xy

    @property
    def squares(self) -> tuple[Tensor, Tensor]:
        _, x, y, xx, yy = self._sums
        return (xx - x.square() / self._count, yy - y.square() / self._count) if self._centred else (xx, yy)


@dataclass(frozen=True)
class Crosses:
    """Of all states of the stream together, each of length one, without what LayerNorms do not see or constants may
    move; of every attention, by its id, the heads' outputs before W_O, queries and keys before positions; of every MLP.
    """

    states: Cross
    heads: Mapping[int, tuple[Cross, Cross, Cross]]
    units: Mapping[int, Cross]


def heard(reference: Opened, other: Opened, text: Path) -> tuple[Tensor, ...]:
    """What both models are to be run on: batches of tokens from the start of a text, by the reference's tokenizer. No
    weights are read.

    Raises `GaugekitError` for models that read anything but text, or whose modules are not called as their tensors are
    (GGUF), and for a text or a tokenizer that cannot be used.
    """
    for model in (reference, other):
        if model.checkpoint.format == "gguf":
            raise GaugekitError(f"{model.checkpoint.path}: what GGUF files compute is not compared; compare weights")
    return text_batches(reference.checkpoint, reference.spec, text, LENGTH, ROWS, TOKENS)


def compared(
    reference: Opened,
    other: Opened,
    names: Mapping[str, str],
    words: Sequence[Tensor],
    steps: tuple[Sequence[Step], Sequence[Step]],
    track: Track[Any] = untracked,
) -> Crosses:
    """Run both on batches of tokens (rows, length). Both are in memory, in float32, and a matrix (f, f) in float64 for
    every MLP.

    Args:
        names: of the other's tensors, by the reference's.
        steps: by which each of the two is settled.
    """
    spec = reference.spec
    first = Listener(reference, spec, {name: name for name in spec.tensors}, steps[0])
    second = Listener(other, spec, names, steps[1])
    crosses = Crosses(
        Cross(centred=False),
        {id(a): (Cross(), Cross(centred=False), Cross()) for a in attentions(spec)},
        {id(mlp): Cross() for mlp in mlps(spec)},
    )
    for ids in track(words, len(words), "text"):
        ours, theirs = first.hear(ids), second.hear(ids)
        for key, cross in crosses.units.items():
            cross.add(ours.units[key], theirs.units[key])
        for key, parts in crosses.heads.items():
            for cross, x, y in zip(parts, ours.heads[key], theirs.heads[key], strict=True):
                cross.add(x, y)
        for x, y in zip(ours.states, theirs.states, strict=True):
            crosses.states.add(x, y)
    return crosses


def attentions(spec: Spec) -> Iterator[Attention]:
    yield from (attention for _, _, attention, _ in spec.attentions())


def mlps(spec: Spec) -> Iterator[MLP]:
    """Experts are left out: `transformers` runs them in one piece."""
    bodies = (branch.body for block in spec.main.blocks for branch in block.branches)
    yield from (body for body in bodies if isinstance(body, MLP))


@dataclass(frozen=True)
class Heard:
    """What one batch gave, tokens as rows, as `Crosses` has it."""

    states: tuple[Tensor, ...]
    heads: Mapping[int, tuple[Tensor, Tensor, Tensor]]
    units: Mapping[int, Tensor]


class Listener:
    """Runs one model and keeps what goes into some of its modules. `spec` is the reference's, `names` of its tensors in
    this model."""

    def __init__(self, model: Opened, spec: Spec, names: Mapping[str, str], steps: Sequence[Step]) -> None:
        self._spec, self._load = spec, lambda name: model.load(names[name])
        self._model = load_model(model.checkpoint, model.spec, torch.float32)
        self._mean_unseen = wire(spec, "hidden")[spec.main.name].mean_unseen
        branches = (branch for block in spec.main.blocks for branch in block.branches)
        self._shifting = any(branch.norm_sum is not None for branch in branches)
        self._means: list[Tensor] = []  # of the states of the first batch
        self._given: dict[str, Tensor] = {}
        self._values = {id(s.symmetry.attention): s.element for s in steps if isinstance(s.symmetry, ValueOutput)}
        self._queries = {id(s.symmetry.attention): s.element for s in steps if isinstance(s.symmetry, QueryKey)}
        self._scales = {id(s.symmetry.mlp): s.element for s in steps if isinstance(s.symmetry, GatedUnitScale)}
        modules, prefix = dict(self._model.named_modules()), getattr(self._model, "base_model_prefix", "")
        views = [view for a in attentions(spec) for view in (a.q.weight, a.k.weight, a.o.weight)]
        views += [mlp.down.weight for mlp in mlps(spec)]
        for name in dict.fromkeys(view.name for view in views):
            module = module_of(modules, names[name].removesuffix(".weight"), prefix)
            module.register_forward_pre_hook(self._keeping(name))

    def _keeping(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: tuple[Any, ...]) -> None:
            self._given[name] = given[0].detach().flatten(0, -2)

        return hook

    def hear(self, ids: Tensor) -> Heard:
        """One batch of tokens (rows, length)."""
        out = forward(self._model, input_ids=ids, output_hidden_states=True)
        # Behind the last norm of a decoder the states carry its weight, which a symmetry moves.
        kept = out.hidden_states[: len(out.hidden_states) - (self._spec.main.final_norm is not None)]
        states = [state.flatten(0, -2).double() for state in kept]
        if self._shifting:
            # A norm of a sum may add a constant, which runs on along the stream until a bias takes it away.
            self._means = self._means or [state.mean(0) for state in states]
            states = [state - mean for state, mean in zip(states, self._means, strict=True)]
        return Heard(
            tuple(self._unit(state) for state in states),
            {id(a): self._heads(a) for a in attentions(self._spec)},
            {id(mlp): self._units(mlp) for mlp in mlps(self._spec)},
        )

    def _units(self, mlp: MLP) -> Tensor:
        """(n, f), with the sign that is settled. Their lengths say nothing here."""
        units = self._given[mlp.down.weight.name][:, columns(mlp.down.weight)]
        return units * self._scales[id(mlp)] if id(mlp) in self._scales else units

    def _heads(self, a: Attention) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs and queries (n, h k) and keys (n, g k), in the bases that are settled."""
        outputs = self._given[a.o.weight.name][:, columns(a.o.weight)]
        queries, keys = self._read(a.q), self._read(a.k)
        if id(a) in self._values:
            own, _ = partner(self._values[id(a)])
            outputs = turned(outputs, per_query_head(own, a.heads))
        if id(a) in self._queries:
            own, dual = partner(self._queries[id(a)])
            queries, keys = turned(queries, per_query_head(own, a.heads)), turned(keys, dual)
        return outputs.flatten(1), queries.flatten(1), keys.flatten(1)

    def _read(self, linear: Linear) -> Tensor:
        """What a map makes of its input, (n, heads, k)."""
        weight = linear.weight.read(self._load(linear.weight.name)).double()
        x = torch.einsum("nd,hkd->nhk", self._given[linear.weight.name].double(), weight)
        return x if linear.bias is None else x + linear.bias.read(self._load(linear.bias.name)).double()

    def _unit(self, states: Tensor) -> Tensor:
        """Norms forget lengths, and a few tokens have states a thousand times as long as others."""
        if self._mean_unseen:
            states = states - states.mean(-1, keepdim=True)
        return states / states.norm(dim=-1, keepdim=True).clamp_min(1e-300)


def turned(x: Tensor, element: Tensor) -> Tensor:
    """S x for x (n, heads, k) and S (heads, k, k)."""
    return torch.einsum("hij,nhj->nhi", element, x.double())


def columns(writer: View) -> Tensor:
    """Where in a module's input the columns of a writer (columns..., d) are, in the shape (columns...)."""
    places = torch.meshgrid(*(torch.arange(size) for size in writer.disk_shape), indexing="ij")
    seen = [writer.window(place)[..., 0] for place in places]
    # The other axis is the stream's, and the same for all columns.
    return max(seen, key=lambda place: int(place.max()) - int(place.min()))


class Activations(Weights):
    """Judges by activations; by weights where there are none (experts). Nothing depends on where weights were brought
    to, so one sweep finds all."""

    sweeps = False

    def __init__(self, circuits: Iterable[Circuits], crosses: Crosses) -> None:
        super().__init__(circuits, "all")
        self._crosses = crosses
        self._orders: dict[int, Tensor] = {}  # found so far, by the id of an attention or MLP

    def first(self, symmetry: Turn, cross: Tensor) -> Tensor:
        states = self._crosses.states.product
        return turn(symmetry, torch.stack([states, torch.zeros_like(states)]), "all")

    def element(self, symmetry: Symmetry, ours: Tensors, theirs: Tensors) -> Tensor:
        if isinstance(symmetry, HeadOrder):
            a = symmetry.attention
            self._orders[id(a)] = torch.arange(a.heads) if a.distances else self._head_order(a)
            return self._orders[id(a)]
        if isinstance(symmetry, ValueOutput | QueryKey):
            a = symmetry.attention
            order, share = self._orders.get(id(a), torch.arange(a.heads)), a.heads // a.kv_heads
            outputs, queries, keys = self._pairs(a)
            if isinstance(symmetry, ValueOutput):
                return unitary(outputs[torch.arange(a.heads), order].unflatten(0, (a.kv_heads, -1)).sum(1))
            matched = queries[torch.arange(a.heads), order].unflatten(0, (a.kv_heads, -1)).sum(1)
            return commuting(symmetry, matched + keys[torch.arange(a.kv_heads), order[::share] // share])
        if isinstance(symmetry, UnitOrder | GatedUnitScale) and id(symmetry.mlp) in self._crosses.units:
            cross = self._crosses.units[id(symmetry.mlp)]
            one, other = (square.clamp_min(1e-300).sqrt() for square in cross.squares)
            alike = cross.product / one.unsqueeze(-1) / other
            if isinstance(symmetry, UnitOrder):
                self._orders[id(symmetry.mlp)] = assigned(alike if symmetry.mlp.gate is None else alike.abs())
                return self._orders[id(symmetry.mlp)]
            matched = alike[torch.arange(len(alike)), self._orders[id(symmetry.mlp)]]
            return torch.where(matched < 0, -1.0, 1.0).double()
        return super().element(symmetry, ours, theirs)

    def _pairs(self, a: Attention) -> list[Tensor]:
        """Crosses of every pair of heads: outputs and queries (h, h, k, k), keys (g, g, k, k)."""
        k = a.head_dim
        return [
            cross.product.unflatten(0, (-1, k)).unflatten(2, (-1, k)).transpose(1, 2)
            for cross in self._crosses.heads[id(a)]
        ]

    def _head_order(self, a: Attention) -> Tensor:
        """By what the best basis makes of each pair, of outputs and of queries: tr(SᵀC), as cosines."""
        score = torch.zeros(a.heads, a.heads, dtype=torch.float64)
        best = (unitary, lambda cross: commuting(QueryKey("", a), cross))
        for find, pairs, cross in zip(best, self._pairs(a), self._crosses.heads[id(a)], strict=False):
            one, other = (square.unflatten(0, (-1, a.head_dim)).sum(-1).sqrt() for square in cross.squares)
            score += (find(pairs) * pairs).sum((-1, -2)) / (one.unsqueeze(-1) * other).clamp_min(1e-300)
        return pair_groups(score, a.kv_heads)
