"""Moving a model along its orbit, piece by piece: a layer is in memory at a time, and every tensor is rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugekit.models.spec import MLP, Attention, Branch, Norm, Spec
from gaugekit.models.view import Edit, View
from gaugekit.symmetry.base import Discrete, Symmetry, present
from gaugekit.symmetry.constants import KeyConstant, ValueConstant
from gaugekit.symmetry.heads import HeadOrder, QKNormScale, QueryKey, ValueOutput
from gaugekit.symmetry.norms import LayerScale, NormConstant, NormScale, ReaderKernel
from gaugekit.symmetry.pivoted import PivotedQueryKey, PivotedValueOutput
from gaugekit.symmetry.readers import Reader
from gaugekit.symmetry.shifts import HeadConstant, ParallelBias, TableConstant
from gaugekit.symmetry.stream import Frame, StreamOrder, WriterMean
from gaugekit.symmetry.units import ActivationScale, ExpertOrder, GatedUnitScale, RouterConstant, UnitOrder
from gaugekit.symmetry.whitened import WhitenedQueryKey, WhitenedValueOutput
from gaugekit.symmetry.wiring import inputs, output

Load = Callable[[str], Tensor]

NOTHING = 1e-9  # of the lengths of two vectors: a product below that is zero


@dataclass(frozen=True)
class Step:
    """One symmetry with the element by which it acts."""

    symmetry: Symmetry
    element: Tensor


def pieces(spec: Spec) -> Iterator[tuple[str, ...]]:
    """Names of the parameter tensors, layer by layer, then one by one those that stand in no layer; a bias always
    comes with its weight."""
    taken: set[str] = set()
    groups = [
        [view for branch in block.branches for view in branch_views(branch)]
        for stream in spec.streams
        for block in stream.blocks
    ]
    heads = [stream.head.linear for stream in spec.streams if stream.head is not None]
    groups += [list(present(linear.weight, linear.bias)) for linear in heads]
    for views in groups:
        names = tuple(dict.fromkeys(view.name for view in views if view.name not in taken))
        taken.update(names)
        yield names
    yield from ((name,) for name in spec.tensors if name not in taken)


def branch_views(branch: Branch) -> Iterator[View]:
    """Every weight of a branch."""
    body = branch.body
    linears = [*inputs(body), *output(body)]
    if isinstance(body, Attention):
        linears += [body.k, body.v]
        if body.qk_norm is not None:
            yield from (body.qk_norm.q, body.qk_norm.k)
    elif not isinstance(body, MLP):
        linears += [body.router]
    for linear in linears:
        yield from present(linear.weight, linear.bias)
    norms: list[Norm | None] = [branch.norm_in, branch.norm_out, branch.norm_sum]
    for norm in norms:
        if norm is not None:
            yield from present(norm.weight, norm.bias)
    yield from present(branch.scale)


class Path:
    """Steps to be taken one after the other, ready to be applied to any part of the model.

    A symmetry without its element goes to its representative: the element is found when its turn comes, from weights
    that all earlier steps have moved. One that acts on several pieces is found once and kept; `keep`: so are all.
    """

    def __init__(self, steps: Sequence[Symmetry | Step], keep: bool = False) -> None:
        self.symmetries = tuple(step.symmetry if isinstance(step, Step) else step for step in steps)
        self._kept = {number: step.element for number, step in enumerate(steps) if isinstance(step, Step)}
        self._keep = keep
        self._touching: dict[str, list[int]] = {}
        for number, symmetry in enumerate(self.symmetries):
            for name in symmetry.touches:
                self._touching.setdefault(name, []).append(number)

    @property
    def touches(self) -> frozenset[str]:
        """Names of all tensors that the path changes."""
        return frozenset(self._touching)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Those whose elements are given, or found and kept."""
        return tuple(step for step in self.sequence if isinstance(step, Step))

    @property
    def sequence(self) -> tuple[Symmetry | Step, ...]:
        """All, in order, with their elements where these are given, or found and kept."""
        kept = self._kept
        return tuple(Step(s, kept[number]) if number in kept else s for number, s in enumerate(self.symmetries))

    def needs(self, names: Sequence[str]) -> dict[str, None]:
        """`names` and what else must be at hand to move them, in order."""
        needed = dict.fromkeys(names)
        waiting = list(names)
        while waiting:
            for number in self._touching.get(waiting.pop(), ()):
                for view in self._wanted(number):
                    if view.name not in needed:
                        needed[view.name] = None
                        waiting.append(view.name)
        return needed

    def move(self, names: Sequence[str], load: Load) -> dict[str, Tensor]:
        """The new values of those of `names` that the path changes, in float64."""
        if not any(name in self._touching for name in names):
            return {}
        tensors: dict[str, Tensor] = {}
        own: set[str] = set()  # no one else's: made here
        for name in self.needs(names):
            loaded = load(name)
            tensors[name] = loaded.to(torch.float64)
            if tensors[name] is not loaded:
                own.add(name)
            del loaded
        numbers = sorted({number for name in tensors for number in self._touching.get(name, ())})
        for number in numbers:
            changed = self.symmetries[number].act(tensors, self._element(number, tensors), own)
            tensors.update(changed)
            own.update(changed)
        return {name: tensors[name] for name in names if name in self._touching}

    def _wanted(self, number: int) -> tuple[View, ...]:
        symmetry = self.symmetries[number]
        return symmetry.context if number in self._kept else symmetry.context + symmetry.sources

    def _element(self, number: int, tensors: Mapping[str, Tensor]) -> Tensor:
        if number in self._kept:
            return self._kept[number]
        symmetry = self.symmetries[number]
        element = self._find(symmetry, Edit(tensors))
        if self._keep or not all(name in tensors for name in symmetry.touches):
            self._kept[number] = element
        return element

    def _find(self, symmetry: Symmetry, edit: Edit) -> Tensor:
        return symmetry.fix(edit)


class Homeward(Path):
    """The path to the representative.

    `ties` are filled on the way: how many neighbours in a sorted order are nearer than `resolution` (relative), so that
    another model of the orbit may have them the other way round.
    """

    def __init__(self, symmetries: Sequence[Symmetry], load: Load, resolution: float = 0.0, keep: bool = False) -> None:
        super().__init__(sorted(symmetries, key=turn), keep)
        self.ties: dict[tuple[str, str], int] = {}
        self._resolution = resolution
        # What turns or orders the whole stream is decided by a table of tokens, which no other piece should wait for.
        for symmetry in self.symmetries:
            if isinstance(symmetry, Frame | StreamOrder):
                self.move([view.name for view in symmetry.sources], load)

    @staticmethod
    def divisors(symmetry: Symmetry) -> tuple[View, ...]:
        """Weights that must not be zero for the symmetry to be taken home."""
        if isinstance(symmetry, NormScale):
            return (symmetry.norm.weight,)
        if isinstance(symmetry, LayerScale):
            return (symmetry.scale,)
        return symmetry.divisors

    def _find(self, symmetry: Symmetry, edit: Edit) -> Tensor:
        if isinstance(symmetry, Discrete):
            keys = symmetry.keys(edit)
            signless = isinstance(symmetry, StreamOrder) and symmetry.signs == "each"
            keys = (keys.abs() if signless else keys).sort().values
            near = int((keys.diff() <= self._resolution * keys.abs().amax()).sum())
            if near:
                self.ties[symmetry.name, symmetry.where] = near
        return symmetry.fix(edit)


def shifted_by_kernel(symmetry: Symmetry) -> tuple[Norm, ...]:
    """LayerNorms by whose γ⁻¹·β an element divides, or its inverse does: what reads them has no bias of its own to take
    a constant, which then goes into the direction γ⁻¹ of its rows."""
    readers: tuple[Reader, ...] = ()
    if isinstance(symmetry, NormConstant):
        readers = symmetry.readers
    elif isinstance(symmetry, KeyConstant | ValueConstant):
        readers = (symmetry.reader,)
    norms = (reader.norm for reader in readers if reader.linear.bias is None)
    return tuple(dict.fromkeys(norm for norm in norms if norm is not None and norm.bias is not None))


def constantless(norm: Norm, load: Load) -> bool:
    """Whether γ⁻¹·β is zero to rounding, as in a model that was never trained: that direction takes no constant."""
    assert norm.bias is not None
    gamma, beta = (view.read(load(view.name).to(torch.float64)) for view in (norm.weight, norm.bias))
    return bool((beta / gamma).sum().abs() <= NOTHING * gamma.reciprocal().norm() * beta.norm())


# A step must not undo what an earlier one has settled, and is decided by weights on which earlier ones no longer act.
# First what settles the tables, by which the frame is found; a frame may change the sign of β, so constants come after.
TURNS: tuple[type[Symmetry], ...] = (
    LayerScale,
    NormScale,
    TableConstant,
    Frame,
    StreamOrder,
    NormConstant,
    HeadConstant,
    RouterConstant,
    ReaderKernel,
    KeyConstant,
    ValueConstant,
    ParallelBias,
    WriterMean,
    QKNormScale,
    ValueOutput,
    WhitenedValueOutput,
    QueryKey,
    WhitenedQueryKey,
    ActivationScale,
    GatedUnitScale,
    UnitOrder,
    ExpertOrder,
    HeadOrder,
    PivotedValueOutput,
    PivotedQueryKey,
)


def turn(symmetry: Symmetry) -> float:
    """The place of a symmetry in the way to the representative."""
    if isinstance(symmetry, ValueConstant) and symmetry.sink is None:
        # Decided by an orthogonal projection among the values, so their basis comes first.
        return TURNS.index(WhitenedValueOutput) + 0.5
    on_tables = isinstance(symmetry, WriterMean) and not symmetry.layer
    if on_tables or (isinstance(symmetry, HeadConstant) and symmetry.mean_only):
        return TURNS.index(Frame) - 0.5
    return TURNS.index(type(symmetry))
