"""One model moved along its orbit to where its weights lie nearest to another's, of one architecture.

Both are first brought to where everything that scales or shifts is settled: norm weights 1, constants gathered, heads
and units balanced. What is left is compact, and is found by turns, each the best choice while the others stand:

    frame        U with Σ ‖X − X' Uᵀ‖² least over all that is written to or read from the stream      Procrustes
    head order   by ⟨G, G'⟩ of both circuits, which no basis of a head changes                        assignment
    head bases   S with ‖V − SV'‖² + ‖O − SO'‖² least, and for queries and keys what commutes with    Procrustes
                 rotary turns: unitary over the complex numbers for pairs that turn alike
    unit order   by inner products of all that belongs to a unit, with the sign of a gated one        assignment

The sum of squared distances of all weights falls from sweep to sweep, and the fixed point may be a local one. After
Ainsworth, Hayase and Srinivasa, arXiv 2209.04836, who have permutations only.

Shapes: d stream width, h query heads, g key/value heads, k head dimension, f hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gaugekit.models.spec import Spec, Stream
from gaugekit.models.view import Edit, View
from gaugekit.symmetry import Circuits, Symmetries, Symmetry, circuits
from gaugekit.symmetry.base import Translation, present
from gaugekit.symmetry.heads import HeadOrder, QueryKey, ValueOutput, beside, place_complex, with_bias
from gaugekit.symmetry.orbit import Homeward
from gaugekit.symmetry.stream import Frame, StreamOrder
from gaugekit.symmetry.units import GatedUnitScale, UnitOrder
from gaugekit.verbs.matching import assigned, assigned_with_signs, likeness, pair_groups, pair_units, unitary

__all__ = ["Aligned", "Allowed", "align_weights"]

Tensors = dict[str, Tensor]
Allowed = Literal["permutations", "all"]

ORDER = (Frame, StreamOrder, HeadOrder, ValueOutput, QueryKey, UnitOrder, GatedUnitScale)
"""What is found by turns; heads and units get their mates before their bases and signs."""

SWEEPS = 50
SETTLED = 1e-9  # relative fall of the squared distance that ends the search


@dataclass(frozen=True)
class Aligned:
    """Both models, each on its own orbit still, and ‖θ − θ'‖ / ‖θ‖ when both were settled and after each sweep."""

    ours: Tensors
    theirs: Tensors
    distances: tuple[float, ...]


def align_weights(
    spec: Spec,
    symmetries: Symmetries,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    allowed: Allowed = "all",
) -> Aligned:
    """Move `theirs` along its orbit to `ours`, which is settled on its own; all tensors of both in memory, in float64.

    Args:
        spec, symmetries: of both.
        ours, theirs: every tensor of the spec by name. Neither is changed.
        allowed: "permutations": of heads, units, dimensions of a head and coordinates of the stream, no other bases.

    What is preserved: what each of the two computes, to rounding. Experts keep their order.
    """
    acting = [s for s in (*symmetries.continuous, *symmetries.discrete) if isinstance(s, ORDER)]
    acting.sort(key=lambda symmetry: ORDER.index(type(symmetry)))
    attention = {id(each.attention): each for each in circuits(spec, symmetries.observable)}
    movable = tuple(s for s in symmetries.continuous if not isinstance(s, Frame))
    constants = tuple(s for s in movable if isinstance(s, Translation))
    mine, other = (settled(tensors, movable) for tensors in (ours, theirs))
    unseen = [dead.view for dead in spec.dead]
    distances, nearest = [distance(mine, other, unseen)], other
    # Rows of tables and heads are labelled by tokens and positions: they lead the way to where mates can be known.
    labelled = frozenset(view.name for stream in spec.streams for view in labelled_views(stream))
    for sweep in range(SWEEPS):
        for symmetry in acting:
            if isinstance(symmetry, HeadOrder):
                element = head_order(attention[id(symmetry.attention)], mine, other)
            else:
                names = labelled if sweep == 0 else None
                element = best(symmetry, Edit(mine), Edit(other), allowed, names)
            other = other | symmetry.act(other, element)
            if isinstance(symmetry, Frame | StreamOrder):
                other = settled(other, constants)  # a sign of the stream may have become one of norm biases
        distances.append(distance(mine, other, unseen))
        if distances[-1] ** 2 > (1 - SETTLED) * distances[-2] ** 2:
            break
        nearest = other
    return Aligned(mine, nearest, tuple(distances))


def settled(tensors: Mapping[str, Tensor], symmetries: Iterable[Symmetry]) -> Tensors:
    """These at their representatives. What divides by a zero weight is left as it is."""
    edit = Edit(tensors)
    possible = [s for s in symmetries if all(bool((edit[view] != 0).all()) for view in Homeward.divisors(s))]
    moved = {name: value.double() for name, value in tensors.items()}
    return moved | Homeward(possible, moved.__getitem__).move(tuple(moved), moved.__getitem__)


def distance(ours: Tensors, theirs: Tensors, unseen: Iterable[View]) -> float:
    """‖θ − θ'‖ / ‖θ‖ over all tensors but what no observable depends on."""
    total = []
    for tensors in ({name: x - theirs[name] for name, x in ours.items()}, ours):
        edit = Edit(tensors)
        for view in unseen:
            edit[view] = torch.zeros_like(edit[view])
        total.append(sum(float(x.square().sum()) for x in (tensors | edit.changed).values()))
    return (total[0] / total[1]) ** 0.5


def labelled_views(stream: Stream) -> Iterator[View]:
    yield from (table.rows for table in stream.tables)
    if stream.head is not None:
        yield stream.head.linear.weight


def best(symmetry: Symmetry, mine: Edit, other: Edit, allowed: Allowed, names: Collection[str] | None) -> Tensor:
    """The element that moves theirs nearest to ours; of the stream, judged by the tensors of these names if given."""
    if isinstance(symmetry, Frame):
        return frame(symmetry, mine, other, allowed, names)
    if isinstance(symmetry, StreamOrder):
        return stream_order(symmetry, mine, other, allowed, names)
    if isinstance(symmetry, ValueOutput):
        a = symmetry.attention
        cross = crossed(mine, other, lambda edit: (with_bias(edit, a.v), beside(edit[a.o.weight], a.kv_heads)))
        return permutation(cross) if allowed == "permutations" else unitary(cross)
    if isinstance(symmetry, QueryKey):
        return query_key(symmetry, mine, other, allowed)
    assert isinstance(symmetry, UnitOrder | GatedUnitScale)
    plain, signed = unit_products(symmetry, mine, other)
    if isinstance(symmetry, GatedUnitScale):
        flips = torch.where(signed.diagonal() < 0, -1.0, 1.0).double()
        return flips if allowed == "all" else torch.ones_like(flips)
    return pair_units(plain + (signed.abs() if allowed == "all" else signed))


def frame(symmetry: Frame, mine: Edit, other: Edit, allowed: Allowed, names: Collection[str] | None) -> Tensor:
    views = (*(view for view, _ in symmetry.writers), *(reader.linear.weight for reader in symmetry.readers))
    cross = gathered(views, mine, other, names)
    if allowed == "permutations":
        return permutation(cross)
    if not symmetry.fix_ones:
        return unitary(cross)
    basis, ones = symmetry.basis, torch.ones(symmetry.width, dtype=cross.dtype)
    sign = -1.0 if float(ones @ cross @ ones) < 0 else 1.0
    return basis @ unitary(basis.mT @ cross @ basis) @ basis.mT + sign / symmetry.width


def stream_order(
    symmetry: StreamOrder, mine: Edit, other: Edit, allowed: Allowed, names: Collection[str] | None
) -> Tensor:
    """(2, d): the order of coordinates, and signs as far as there are any."""
    odd, even = (gathered(views, mine, other, names) for views in (symmetry.odd, symmetry.even))
    signs = "none" if allowed == "permutations" else symmetry.signs
    order, flips = assigned_with_signs(odd, even, signs)
    return torch.stack([order.double(), flips])


def head_order(each: Circuits, ours: Tensors, theirs: Tensors) -> Tensor:
    """The query head of theirs for each of ours (h,), by how alike their products are."""
    a = each.attention
    if a.distances:  # heads that differ by how far they look cannot be exchanged
        return torch.arange(a.heads)
    share, score = a.heads // a.kv_heads, torch.zeros(a.heads, a.heads, dtype=torch.float64)
    (q, k), (q2, k2) = each.queries_keys(ours), each.queries_keys(theirs)
    (v, o), (v2, o2) = each.values_outputs(ours), each.values_outputs(theirs)
    for w, z, w2, z2 in ((q, k, q2, k2), (o, v, o2, v2)):
        score += likeness(w, z, w2, z2, share)[2]
    return pair_groups(score, a.kv_heads)


def query_key(symmetry: QueryKey, mine: Edit, other: Edit, allowed: Allowed) -> Tensor:
    """(g, k, k)"""
    a = symmetry.attention
    turning, still = symmetry.blocks

    def factors(edit: Edit) -> tuple[Tensor, Tensor]:
        return beside(with_bias(edit, a.q), a.kv_heads), with_bias(edit, a.k)

    element = torch.eye(a.head_dim, dtype=torch.float64).repeat(a.kv_heads, 1, 1)
    if still:
        index = torch.tensor(still)
        cross = crossed(mine, other, lambda edit: tuple(x[:, index] for x in factors(edit)))
        moved = permutation(cross) if allowed == "permutations" else unitary(cross)
        element[:, index.unsqueeze(-1), index] = moved
    if allowed == "all":
        for pairs in turning:
            first, second = (list(side) for side in zip(*pairs, strict=True))
            cross = crossed(
                mine,
                other,
                lambda edit, i=first, j=second: tuple(torch.complex(x[:, i], x[:, j]) for x in factors(edit)),
            )
            place_complex(element, first, second, unitary(cross))
    return element


def unit_products(symmetry: UnitOrder | GatedUnitScale, mine: Edit, other: Edit) -> tuple[Tensor, Tensor]:
    """Inner products (f, f) of ours and theirs over all weights of a unit that keep their sign, and that need not."""
    mlp = symmetry.mlp

    def dots(*views: View | None) -> Tensor:
        total = torch.zeros(size, size, dtype=torch.float64)
        for view in present(*views):
            total += mine[view].reshape(size, -1) @ other[view].reshape(size, -1).mT
        return total

    size = mlp.up.weight.shape[0]
    signed = dots(mlp.up.weight, mlp.up.bias, mlp.down.weight)
    if mlp.gate is None:
        return signed, torch.zeros_like(signed)
    return dots(mlp.gate.weight, mlp.gate.bias), signed


def gathered(views: Iterable[View], mine: Edit, other: Edit, names: Collection[str] | None) -> Tensor:
    """Σ XᵀX' (d, d) over what is seen, its last axis the stream's; of tensors of these names, if there are any."""
    every = tuple(dict.fromkeys(views))
    chosen = [view for view in every if names is None or view.name in names] or every
    width = every[0].shape[-1] if every else 0
    cross = torch.zeros(width, width, dtype=torch.float64)
    for view in chosen:
        x, y = (edit[view].reshape(-1, width) for edit in (mine, other))
        cross += x.mT @ y
    return cross


def crossed(mine: Edit, other: Edit, factors: Callable[[Edit], tuple[Tensor, ...]]) -> Tensor:
    """Σ X X'ᴴ (g, k, k) over the factors (g, k, ...) of a head."""
    return torch.stack([x @ y.mH for x, y in zip(factors(mine), factors(other), strict=True)]).sum(0)


def permutation(cross: Tensor) -> Tensor:
    """As `unitary`, among permutation matrices."""
    flat = cross.reshape(-1, *cross.shape[-2:])
    moved = torch.zeros_like(flat)
    for one, of in zip(moved, flat, strict=True):
        one[torch.arange(len(one)), assigned(of)] = 1.0
    return moved.reshape(cross.shape)
