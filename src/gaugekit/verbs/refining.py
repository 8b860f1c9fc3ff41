"""Turning one of two aligned models further, by gradient, until the model half way between them is good at a text.

Weights that lie nearest to each other do not make the best mean. What is compact in the symmetry (frames of streams,
bases of heads) is turned by orthogonal and unitary matrices, from the identity on; orders stay. The loss of the mean
falls, and what either model computes does not change. After "learned matching" of Generalized linear mode connectivity
for transformers, arXiv 2506.22712.

Shapes: d stream width, g key/value heads, k head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import orthogonal

from gaugekit.errors import GaugekitError
from gaugekit.models.spec import MoE, Spec
from gaugekit.symmetry import Symmetries, Symmetry
from gaugekit.symmetry.heads import QueryKey, ValueOutput, place_complex
from gaugekit.symmetry.orbit import Load, Step, pieces
from gaugekit.symmetry.orbit import Path as Chain
from gaugekit.symmetry.stream import Frame
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.matching import unitary
from gaugekit.verbs.mates import commuting, turn
from gaugekit.verbs.nearing import Way, moved
from gaugekit.verbs.rewriting import Opened
from gaugekit.verbs.running import load_model, parameters_of
from gaugekit.verbs.texts import text_batches

__all__ = ["Lessons", "Refined", "learn", "lessons", "refine"]

LENGTH, ROWS, TOKENS = 64, 8, 204_800  # of a row, rows at a time, of the text
TENTH = 10
RATE = 0.01  # of Adam, on the entries of generators


@dataclass(frozen=True, eq=False)
class Lessons:
    """Batches of tokens (rows, length) to learn from, and others to judge by."""

    learnt: tuple[Tensor, ...]
    judged: tuple[Tensor, ...]


@dataclass(frozen=True)
class Refined:
    """Further steps of a way, and the loss of the mean of the two models on text that was not learnt from, nats a
    token, before and after."""

    steps: tuple[Step, ...]
    before: float
    after: float


def lessons(reference: Opened, text: Path) -> Lessons:
    """The start of a text by the reference's tokenizer, every tenth batch to judge by. No weights are read.

    Raises `GaugekitError` for a model without a loss on a text, one that `transformers` holds in another form than the
    checkpoint (experts, GGUF), and a text or a tokenizer that cannot be used.
    """
    spec, path = reference.spec, reference.checkpoint.path
    if spec.main.head is None:
        raise GaugekitError(f"{path}: {spec.family} without a language-model head has no loss on a text to refine by")
    experts = any(isinstance(branch.body, MoE) for block in spec.main.blocks for branch in block.branches)
    if experts or reference.checkpoint.format == "gguf":
        what = "experts" if experts else "GGUF"
        raise GaugekitError(f"{path}: cannot be refined: transformers holds {what} in another form than the file")
    every = text_batches(reference.checkpoint, spec, text, LENGTH, ROWS, TOKENS)
    learnt = [ids for number, ids in enumerate(every) if number % TENTH]
    if not learnt:
        raise GaugekitError(f"{text} is too short to refine by: it has no more than {ROWS} rows of {LENGTH} tokens")
    return Lessons(tuple(learnt), tuple(every[::TENTH]))


def refine(
    reference: Opened,
    spec: Spec,
    way: Way,
    lessons: Lessons,
    count: int,
    *,
    seed: int = 0,
    track: Track[Any] = untracked,
) -> Refined:
    """Turn the model of `way` so that its mean with `reference` is better at a text.

    Args:
        spec: of the tensors that both have.
        count: steps of Adam. If the mean is no better at the end, nothing is turned.

    Both models are in memory several times over. What is preserved: what the moved model computes, to rounding of
    float64.
    """
    model = load_model(reference.checkpoint, spec, torch.float32)
    learnt, judged = lessons.learnt, lessons.judged
    return learn(spec, reference.symmetries, model, reference.load, way, learnt, judged, count, seed, track)


def learn(
    spec: Spec,
    symmetries: Symmetries,
    model: nn.Module,
    load: Load,
    way: Way,
    learnt: Sequence[Tensor],
    judged: Sequence[Tensor],
    count: int,
    seed: int = 0,
    track: Track[Any] = untracked,
) -> Refined:
    """As `refine`, with batches of tokens (rows, length).

    Args:
        model: of `transformers`, that the tensors belong in; its own weights are not used.
        load: ours, by names of the spec.
    """
    model = model.requires_grad_(False)
    places = parameters_of(model, spec.tensors)
    ours = {name: load(name).double() for name in spec.tensors}
    path, theirs = Chain(way.matched), {}
    for names in pieces(spec):
        theirs |= moved(path, names, way.load)
    turns = [Turns(s) for s in symmetries.continuous if isinstance(s, Frame | ValueOutput | QueryKey)]

    def loss(ids: Tensor, elements: list[Step]) -> Tensor:
        other = dict(theirs)
        for step in (*elements, *way.back):
            other |= step.symmetry.act(other, step.element)
        mean = {places[name]: ((x + other[name]) / 2).float() for name, x in ours.items()}
        logits = functional_call(model, mean, kwargs={"input_ids": ids}).logits
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def judge(elements: list[Step]) -> float:
        with torch.no_grad():
            return math.fsum(float(loss(ids, elements)) for ids in judged) / len(judged)

    before = judge([])
    optimizer = torch.optim.Adam([p for each in turns for p in each.parameters()], RATE)
    generator = torch.Generator().manual_seed(seed)
    for _ in track(range(count), count, "refining"):
        ids = learnt[int(torch.randint(len(learnt), (), generator=generator))]
        optimizer.zero_grad()
        loss(ids, [Step(each.symmetry, each().double()) for each in turns]).backward()
        optimizer.step()
    found = [exact(Step(each.symmetry, each().detach().double())) for each in turns]
    after = judge(found)
    return Refined(tuple(found), before, after) if after < before else Refined((), before, before)


def exact(step: Step) -> Step:
    """The orthogonal element next to one that is orthogonal in float32."""
    symmetry, element = step.symmetry, step.element
    if isinstance(symmetry, QueryKey):
        return Step(symmetry, commuting(symmetry, element))
    if isinstance(symmetry, Frame):
        return Step(symmetry, turn(symmetry, torch.stack([element, torch.zeros_like(element)]), "all"))
    return Step(symmetry, unitary(element))


class Part(nn.Module):
    """A matrix, or several of one size."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start)

    def forward(self) -> Tensor:
        return self.weight


class Turns(nn.Module):
    """One compact part of a symmetry: `forward` gives its element, at first the identity."""

    def __init__(self, symmetry: Symmetry) -> None:
        super().__init__()
        self.symmetry = symmetry
        self.parts = nn.ModuleDict()
        if isinstance(symmetry, Frame):
            self._part("all", torch.eye(symmetry.turning))
        elif isinstance(symmetry, ValueOutput):
            a = symmetry.attention
            self._part("all", torch.eye(a.head_dim).repeat(a.kv_heads, 1, 1))
        elif isinstance(symmetry, QueryKey):
            heads, (turning, still) = symmetry.attention.kv_heads, symmetry.blocks
            if still:
                self._part("still", torch.eye(len(still)).repeat(heads, 1, 1))
            for size, alike in by_size(turning).items():
                start = torch.eye(size, dtype=torch.complex64).repeat(heads, len(alike), 1, 1)
                self._part(str(size), start)

    def _part(self, name: str, start: Tensor) -> None:
        self.parts[name] = orthogonal(Part(start), "weight", orthogonal_map="matrix_exp")

    def forward(self) -> Tensor:
        found = {name: part() for name, part in self.parts.items()}
        symmetry = self.symmetry
        if isinstance(symmetry, Frame):
            basis = symmetry.basis.float()
            return basis @ found["all"] @ basis.mT + 1.0 / symmetry.width if symmetry.fix_ones else found["all"]
        if isinstance(symmetry, ValueOutput):
            return found["all"]
        assert isinstance(symmetry, QueryKey)
        a, (turning, still) = symmetry.attention, symmetry.blocks
        element = torch.eye(a.head_dim).repeat(a.kv_heads, 1, 1)
        if still:
            index = torch.tensor(still)
            element[:, index.unsqueeze(-1), index] = found["still"]
        for size, alike in by_size(turning).items():
            first, second = torch.tensor(alike).unbind(-1)
            place_complex(element, first, second, found[str(size)])
        return element


def by_size(turning: Sequence[tuple[tuple[int, int], ...]]) -> dict[int, list[tuple[tuple[int, int], ...]]]:
    """Blocks of pairs that turn alike, those of one size together."""
    found: dict[int, list[tuple[tuple[int, int], ...]]] = {}
    for pairs in turning:
        found.setdefault(len(pairs), []).append(pairs)
    return found
