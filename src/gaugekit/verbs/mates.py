"""Which element of a symmetry brings one model's weights nearest to another's, scales and shifts of both settled.

    frame        U with Σ ‖X − X' Uᵀ‖² least over all that is written to or read from the stream      Procrustes
    head order   by ⟨G, G'⟩ of both circuits, which no basis of a head changes                        assignment
    head bases   S with ‖V − SV'‖² + ‖O − SO'‖² least, and for queries and keys what commutes with    Procrustes
                 rotary turns: unitary over the complex numbers for pairs that turn alike
    experts      by inner products of the router's rows                                               assignment
    unit order   by inner products of all that belongs to a unit, with the sign of a gated one        assignment

Shapes: d stream width, h query heads, g key/value heads, k head dimension, f hidden units, E experts. X is ours, X'
theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from gaugekit.models.view import Edit, View
from gaugekit.symmetry import Circuits, Symmetry
from gaugekit.symmetry.base import present
from gaugekit.symmetry.heads import HeadOrder, QueryKey, ValueOutput, beside, place_complex, with_bias
from gaugekit.symmetry.stream import Frame, StreamOrder
from gaugekit.symmetry.units import ExpertOrder, GatedUnitScale, UnitOrder
from gaugekit.verbs.matching import Tensors, assigned, assigned_with_signs, likeness, pair_groups, pair_units, unitary

__all__ = ["INNER", "Allowed", "Turn", "Weights", "commuting", "products", "turn"]

Allowed = Literal["permutations", "all"]
Turn = Frame | StreamOrder

INNER = (HeadOrder, ExpertOrder, ValueOutput, QueryKey, UnitOrder, GatedUnitScale)
"""What is found layer by layer, in this order: heads, experts and units get mates before bases and signs."""


class Weights:
    """Judges by weights.

    sweeps   whether what is found depends on where weights were brought to, so that it is looked for again
    """

    sweeps = True

    def __init__(self, circuits: Iterable[Circuits], allowed: Allowed) -> None:
        self.allowed: Allowed = allowed
        self._circuits = {id(each.attention): each for each in circuits}

    def needs(self, symmetry: Symmetry) -> tuple[str, ...]:
        """Tensors beyond those that an element moves."""
        return self._circuits[id(symmetry.attention)].names if isinstance(symmetry, HeadOrder) else ()

    def first(self, symmetry: Turn, cross: Tensor) -> Tensor:
        """The first turn, by `products` of rows of tables and heads, which are labelled by tokens and positions: they
        lead the way to where mates of heads and units can be known."""
        return turn(symmetry, cross, self.allowed)

    def element(self, symmetry: Symmetry, ours: Tensors, theirs: Tensors) -> Tensor:
        """The element of one of the kinds in INNER that moves theirs nearest to ours."""
        mine, other = Edit(ours), Edit(theirs)
        if isinstance(symmetry, HeadOrder):
            return head_order(self._circuits[id(symmetry.attention)], ours, theirs)
        if isinstance(symmetry, ValueOutput):
            a = symmetry.attention
            cross = crossed(mine, other, lambda edit: (with_bias(edit, a.v), beside(edit[a.o.weight], a.kv_heads)))
            return permutation(cross) if self.allowed == "permutations" else unitary(cross)
        if isinstance(symmetry, QueryKey):
            a = symmetry.attention
            cross = crossed(mine, other, lambda edit: (beside(with_bias(edit, a.q), a.kv_heads), with_bias(edit, a.k)))
            return commuting(symmetry, cross, self.allowed)
        if isinstance(symmetry, ExpertOrder):
            router = symmetry.moe.router.weight
            return assigned(mine[router] @ other[router].mT)
        if isinstance(symmetry, GatedUnitScale):
            views = present(symmetry.mlp.up.weight, symmetry.mlp.up.bias, symmetry.mlp.down.weight)
            alike = torch.stack([(mine[view] * other[view]).reshape(symmetry.dimension, -1).sum(-1) for view in views])
            return torch.where((alike.sum(0) < 0) & (self.allowed == "all"), -1.0, 1.0).double()
        assert isinstance(symmetry, UnitOrder)
        plain, signed = unit_products(symmetry, mine, other)
        return pair_units(plain + (signed.abs() if self.allowed == "all" else signed))


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


def products(symmetry: Turn, mine: Edit, other: Edit, names: Iterable[str]) -> Tensor:
    """Σ XᵀX' over what is written to the stream and read from it, in tensors of these names: (2, d, d), first what
    changes sign with a coordinate, then (of an order) norm weights, which do not."""
    if isinstance(symmetry, Frame):
        sides = ((*(view for view, _ in symmetry.writers), *(reader.linear.weight for reader in symmetry.readers)), ())
    else:
        sides = (symmetry.odd, symmetry.even)
    held = frozenset(names)
    return torch.stack(
        [gathered((view for view in side if view.name in held), symmetry, mine, other) for side in sides]
    )


def turn(symmetry: Turn, cross: Tensor, allowed: Allowed) -> Tensor:
    """The element with the largest inner product with `products`."""
    odd, even = cross
    if isinstance(symmetry, StreamOrder):
        order, flips = assigned_with_signs(odd, even, "none" if allowed == "permutations" else symmetry.signs)
        return torch.stack([order.double(), flips])
    if allowed == "permutations":
        return permutation(odd)
    if not symmetry.fix_ones:
        return unitary(odd)
    basis, ones = symmetry.basis, torch.ones(symmetry.width, dtype=odd.dtype)
    sign = -1.0 if float(ones @ odd @ ones) < 0 else 1.0
    return basis @ unitary(basis.mT @ odd @ basis) @ basis.mT + sign / symmetry.width


def commuting(symmetry: QueryKey, cross: Tensor, allowed: Allowed = "all") -> Tensor:
    """S (..., k, k) that commutes with the rotary turns and has tr(Sᵀ C) largest, for C = Σ x x'ᵀ (..., k, k): where
    nothing turns orthogonal, and unitary over the complex numbers x_i + i x_j for the pairs (i, j) that turn alike."""
    turning, still = symmetry.blocks
    element = torch.zeros_like(cross)
    element.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    if still:
        index = torch.tensor(still)
        part = cross[..., index.unsqueeze(-1), index]
        moved = permutation(part) if allowed == "permutations" else unitary(part)
        element[..., index.unsqueeze(-1), index] = moved
    if allowed == "all":
        for pairs in turning:
            first, second = (torch.tensor(side) for side in zip(*pairs, strict=True))
            one, other = first.unsqueeze(-1), second.unsqueeze(-1)
            real = cross[..., one, first] + cross[..., other, second]
            imaginary = cross[..., other, first] - cross[..., one, second]
            place_complex(element, first, second, unitary(torch.complex(real, imaginary)))
    return element


def unit_products(symmetry: UnitOrder, mine: Edit, other: Edit) -> tuple[Tensor, Tensor]:
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


def gathered(views: Iterable[View], symmetry: Turn, mine: Edit, other: Edit) -> Tensor:
    """Σ XᵀX' (d, d) over what is seen, its last axis the stream's."""
    width = symmetry.views[0].shape[-1]
    cross = torch.zeros(width, width, dtype=torch.float64)
    for view in dict.fromkeys(views):
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
