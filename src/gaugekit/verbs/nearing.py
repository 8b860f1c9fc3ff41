"""One model moved along its orbit to where another's lies, of one architecture; one layer of each in memory at a time.

Both are first taken home in everything that scales or shifts: norm weights 1, constants gathered, heads and units
balanced. What is left is compact, and is found by turns (`gaugekit.verbs.mates`), each the best choice while the others
stand: the frame of the stream from all layers together, then heads and units layer by layer. The sum of squared
distances falls from sweep to sweep, and the fixed point may be a local one. Last, theirs goes the way that ours came
home, backwards, and so ends in the coordinates in which ours is stored.

A straight line between the two is then what it is between the two at home, seen in other coordinates: scales, bases
and constants act linearly on the weights, and what one step does to one it does to the other.

After Ainsworth, Hayase and Srinivasa, arXiv 2209.04836, who have permutations only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor

from gaugekit.checkpoint import PART
from gaugekit.models.spec import Norm, Spec, Stream
from gaugekit.models.view import Edit, View
from gaugekit.symmetry import Symmetries, Symmetry, circuits
from gaugekit.symmetry.base import Translation
from gaugekit.symmetry.heads import QueryKey, ValueOutput, invertible
from gaugekit.symmetry.norms import LayerScale, NormScale
from gaugekit.symmetry.orbit import Homeward, Load, Path, Step, constantless, pieces, shifted_by_kernel
from gaugekit.symmetry.stream import Frame, StreamOrder
from gaugekit.symmetry.whitened import WhitenedQueryKey, WhitenedValueOutput
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.matching import Tensors
from gaugekit.verbs.mates import INNER, Allowed, Turn, Weights, products, turn

__all__ = ["Left", "Meter", "Way", "bring", "moved"]

SWEEPS = 50
SETTLED = 1e-4  # relative fall of the squared distance that ends the search
EXACT = 1e-12
STILL = 1e-7  # entries of a frame that moves no more: the distance falls by its square


@dataclass(frozen=True)
class Left:
    """What could not be aligned, and why."""

    symmetry: str
    where: str
    reason: str


@dataclass(frozen=True)
class Way:
    """The way of one model to where another's weights lie.

    matched     steps to where it lies nearest to the other, both at home
    back        the steps by which the other came home, undone
    distances   ‖θ − θ'‖ / ‖θ‖ of both at home, before the search and after each sweep
    """

    load: Load
    matched: tuple[Symmetry | Step, ...]
    back: tuple[Step, ...]
    distances: tuple[float, ...]
    left: tuple[Left, ...]

    @cached_property
    def path(self) -> Path:
        return Path([*self.matched, *self.back])

    def turned(self, steps: Sequence[Step]) -> Way:
        """The way with further steps, taken at home."""
        return replace(self, matched=(*self.matched, *steps))

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors in their new place, float64. Called with all names of a layer it reads each tensor once."""
        return moved(self.path, names, self.load)


def bring(
    spec: Spec,
    symmetries: Symmetries,
    ours: Load,
    theirs: Load,
    allowed: Allowed = "all",
    *,
    judge: Callable[[Sequence[Step], Sequence[Step]], Weights] | None = None,
    keep: bool = False,
    track: Track[Any] = untracked,
) -> Way:
    """The way of `theirs` along its orbit to `ours`.

    Args:
        spec, symmetries: of both.
        ours, theirs: a tensor of the spec by its name.
        allowed: "permutations": of heads, units, dimensions of a head and coordinates of the stream; nothing is
            balanced, norm weights are folded.
        judge: finds mates, made of the steps by which ours and theirs were settled; by default the nearest weights.
        keep: hold both models in memory, in float64, instead of reading them for every sweep.

    What is preserved: what `theirs` computes, to rounding. Where theirs is ours moved along its orbit, it comes to lie
    on ours to rounding, unless weights are zero or heads without full rank (see `Way.left`).
    """
    movable, turns, left = possible(symmetries, ours, theirs, allowed)
    while True:
        pair = Pair(spec, symmetries, ours, theirs, movable, turns, keep)
        apart = pair.settle(track)
        if not (lame := pair.lame()):
            break
        instead = {symmetry: whitened(symmetry) for symmetry in lame}
        left += tuple(
            Left(s.name, s.where, "the two models' factors lack dimensions: the head is only turned")
            for s, other in instead.items()
            if other is None
        )
        movable = [other for s in movable if (other := instead.get(s, s)) is not None]
    steps = (pair.mine.path.steps, pair.other.path.steps)
    chosen = Weights(circuits(spec, symmetries.observable), allowed) if judge is None else judge(*steps)
    frames, found, apart = search(pair, chosen, apart, track)
    back = [Step(step.symmetry, step.symmetry.inverse(step.element)) for step in reversed(pair.mine.path.steps)]
    matched = (*pair.other.path.steps, *frames, *pair.constants, *found)
    return Way(theirs, matched, tuple(back), apart, left)


def possible(
    symmetries: Symmetries, ours: Load, theirs: Load, allowed: Allowed
) -> tuple[list[Symmetry], list[Turn], tuple[Left, ...]]:
    """What both can be taken home in, what then turns or orders their streams, and what is left out."""
    left = [
        Left(b.symmetry, where, b.reason) for b in symmetries.blocked if b.symmetry == Frame.name for where in b.where
    ]
    zeros: dict[View, bool] = {}
    flat: dict[Norm, bool] = {}

    def sound(symmetry: Symmetry) -> bool:
        for view in Homeward.divisors(symmetry):
            if view not in zeros:
                zeros[view] = any(bool((view.read(load(view.name).double()) == 0).any()) for load in (ours, theirs))
            if zeros[view]:
                left.append(Left(symmetry.name, symmetry.where, f"{view.name} of one of the two has zero entries"))
                return False
        for norm in shifted_by_kernel(symmetry):
            if norm not in flat:
                flat[norm] = any(constantless(norm, load) for load in (ours, theirs))
            if flat[norm]:
                reason = f"the bias of {norm.where} of one of the two is zero, and what reads it has none of its own"
                left.append(Left(symmetry.name, symmetry.where, reason))
                return False
        return True

    kinds = Symmetry if allowed == "all" else NormScale | LayerScale
    movable = [s for s in symmetries.continuous if isinstance(s, kinds) and not isinstance(s, Frame) and sound(s)]
    every = (*symmetries.continuous, *symmetries.discrete)
    turns = [s for s in every if isinstance(s, Frame | StreamOrder) and sound(s)]
    return movable, turns, tuple(left)


def whitened(symmetry: Symmetry) -> Symmetry | None:
    """Of a head that cannot be taken home: the next best home."""
    if isinstance(symmetry, WhitenedValueOutput | WhitenedQueryKey):
        following = {"first": "second", "second": "both"}.get(symmetry.factor)
        return None if following is None else replace(symmetry, factor=following)
    kind = WhitenedValueOutput if isinstance(symmetry, ValueOutput) else WhitenedQueryKey
    assert isinstance(symmetry, ValueOutput | QueryKey)
    return kind(symmetry.where, symmetry.attention, layer=symmetry.layer)


class Home:
    """A model where all of `movable` are settled, read piece by piece; elements are kept, and with `keep` tensors.

    Without it the piece that was wanted last is, if it is a layer: tables of tokens are larger, and are made anew.
    """

    def __init__(self, spec: Spec, load: Load, movable: Sequence[Symmetry], keep: bool) -> None:
        self.path = Homeward(movable, load, keep=True)
        self._raw = load
        self._piece = {name: names for names in pieces(spec) for name in names}
        self._held: dict[tuple[str, ...], dict[str, Tensor]] = {}
        self._keep = keep

    def load(self, name: str) -> Tensor:
        """In float64."""
        names = self._piece[name]
        if names not in self._held:
            self._make_room()
            tensors = moved(self.path, names, self._raw)
            if self._is_table(names):
                return tensors[name]
            self._held[names] = tensors
        return self._held[names][name]

    def further(self, walk: Path, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors of one piece, and others that `walk` does not change, moved on from home by all steps of `walk`."""
        if not self._is_table(names):
            return moved(walk, names, self.load)
        self._make_room()
        whole = Path([*self.path.sequence, *walk.sequence])  # in one go, so that there is one copy
        return moved(whole, names, self._raw)

    def _make_room(self) -> None:
        if not self._keep:
            self._held.clear()

    def _is_table(self, names: Sequence[str]) -> bool:
        return len(names) == 1 and not self._keep


class Pair:
    """Two models at home, and what may move theirs from there.

    turns       of the streams' frames and orders
    constants   what a turn unsettles: where β can only become γ, a sign of the stream makes it −γ
    inner       what acts within a piece, in the order in which it is looked for
    """

    def __init__(
        self,
        spec: Spec,
        symmetries: Symmetries,
        ours: Load,
        theirs: Load,
        movable: Sequence[Symmetry],
        turns: Sequence[Turn],
        keep: bool,
    ) -> None:
        self.mine, self.other = (Home(spec, load, movable, keep) for load in (ours, theirs))
        self.pieces = tuple(pieces(spec))
        self.turns = tuple(turns)
        self.constants = tuple(s for s in self.other.path.symmetries if turns and isinstance(s, Translation))
        self.labelled = tuple(dict.fromkeys(view.name for stream in spec.streams for view in labelled_views(stream)))
        self._unseen = tuple(dead.view for dead in spec.dead)
        acting = [s for s in (*symmetries.continuous, *symmetries.discrete) if isinstance(s, INNER)]
        acting.sort(key=lambda symmetry: INNER.index(type(symmetry)))
        self.inner = {names: tuple(s for s in acting if set(s.touches) <= set(names)) for names in self.pieces}

    def settle(self, track: Track[Any]) -> tuple[float, ...]:
        """Go through both once, so that all elements are known; how far they are apart."""
        meter = Meter(self._unseen)
        for names in track(self.pieces, len(self.pieces), "settling"):
            meter.add({n: self.mine.load(n) for n in names}, {n: self.other.load(n) for n in names})
        return (meter.distance,)

    def lame(self) -> tuple[Symmetry, ...]:
        """Heads that were not moved by an element of GL, since they show less than their dimensions: their orbit is
        larger than that of others, and no way leads back."""
        steps = (*self.mine.path.steps, *self.other.path.steps)
        heads = (step for step in steps if isinstance(step.symmetry, ValueOutput | QueryKey))
        return tuple(dict.fromkeys(step.symmetry for step in heads if not invertible(step.element)))

    def sweep(
        self, frames: Mapping[Turn, Tensor], judge: Weights, track: Track[Any]
    ) -> tuple[float, list[Step], dict[Turn, Tensor]]:
        """With theirs turned by `frames`: the distance when all that is inner has been found, these steps, and
        `products` for the next turn."""
        walk = Path([*(Step(s, element) for s, element in frames.items()), *self.constants])
        meter, found = Meter(self._unseen), []
        crosses = self._no_products()

        def match(names: tuple[str, ...]) -> None:
            wanted = dict.fromkeys([*names, *(name for s in self.inner[names] for name in judge.needs(s))])
            theirs = self.other.further(walk, tuple(wanted))  # first, for moving needs room
            ours = {name: self.mine.load(name) for name in wanted}
            for symmetry in self.inner[names]:
                element = judge.element(symmetry, ours, theirs)
                theirs |= symmetry.act(theirs, element)
                found.append(Step(symmetry, element))
            meter.add({n: ours[n] for n in names}, {n: theirs[n] for n in names})
            self._add_products(crosses, ours, theirs, names)

        for names in track(self.pieces, len(self.pieces), "matching"):
            match(names)  # a function, so that no table is held while the next is made
        return meter.distance, found, crosses

    def first_turns(self, judge: Weights) -> dict[Turn, Tensor]:
        crosses = self._no_products()
        for name in self.labelled:
            self._add_products(crosses, {name: self.mine.load(name)}, {name: self.other.load(name)}, (name,))
        return {symmetry: judge.first(symmetry, cross) for symmetry, cross in crosses.items()}

    def _no_products(self) -> dict[Turn, Tensor]:
        return {s: torch.zeros(2, s.views[0].shape[-1], s.views[0].shape[-1]).double() for s in self.turns}

    @staticmethod
    def _add_products(crosses: dict[Turn, Tensor], ours: Tensors, theirs: Tensors, names: Sequence[str]) -> None:
        for symmetry, cross in crosses.items():
            cross += products(symmetry, Edit(ours), Edit(theirs), names)


def search(
    pair: Pair, judge: Weights, before: tuple[float, ...], track: Track[Any]
) -> tuple[list[Step], list[Step], tuple[float, ...]]:
    """The turns of the streams, and what is inner, at the least distance that is found; and all distances."""
    apart, frames = list(before), pair.first_turns(judge)
    best: tuple[dict[Turn, Tensor], list[Step]] = (frames, [])
    for _ in range(SWEEPS):
        distance, found, crosses = pair.sweep(frames, judge, track)
        if len(apart) == 1 or distance < apart[-1]:
            best = (frames, found)
        apart.append(distance)
        if not judge.sweeps or distance <= EXACT or (len(apart) > 2 and distance**2 > (1 - SETTLED) * apart[-2] ** 2):
            break
        following = {s: after(s, turn(s, crosses[s], judge.allowed), element) for s, element in frames.items()}
        if all((following[s] - element).abs().max() < STILL for s, element in frames.items()):
            break
        frames = following
    return [Step(s, element) for s, element in best[0].items()], best[1], tuple(apart)


def after(symmetry: Turn, second: Tensor, first: Tensor) -> Tensor:
    """The element that does what `first` and then `second` do."""
    if isinstance(symmetry, Frame):
        return second @ first
    order = second[0].long()
    return torch.stack([first[0][order], first[1][order] * second[1]])


class Meter:
    """‖θ − θ'‖ / ‖θ‖ over pieces, without what no observable depends on; inf where θ is zero and θ' is not."""

    def __init__(self, unseen: Iterable[View] = ()) -> None:
        self._unseen = tuple(unseen)
        self._apart = self._size = 0.0

    def add(self, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
        for name, x in ours.items():
            y = theirs[name]
            unseen = [view for view in self._unseen if view.name == name]
            if unseen:
                x, y = x.clone(), y.clone()
                for view in unseen:
                    view.window(x).zero_()
                    view.window(y).zero_()
            # A part at a time: tables of tokens are larger than layers.
            for one, other in zip(x.reshape(-1).split(PART), y.reshape(-1).split(PART), strict=True):
                self._apart += float((one.double() - other.double()).square().sum())
                self._size += float(one.double().square().sum())

    @property
    def distance(self) -> float:
        if self._size:
            return (self._apart / self._size) ** 0.5
        return inf if self._apart else 0.0


def moved(path: Path, names: Sequence[str], load: Load) -> dict[str, Tensor]:
    """These tensors where the path leads, in float64."""
    found = path.move(names, load)
    return {name: found[name] if name in found else load(name).double() for name in names}


def labelled_views(stream: Stream) -> Iterator[View]:
    yield from (table.rows for table in stream.tables)
    if stream.head is not None:
        yield stream.head.linear.weight
