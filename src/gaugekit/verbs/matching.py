"""Two models of one architecture side by side, modulo symmetry: streams turned together, heads and units paired.

Head circuits are compared by their products G, which no basis of a head changes, and inner products of two products
need only (k, k) matrices: ⟨BᵀA, B'ᵀA'⟩ = Σ (B B'ᵀ) ⊙ (A A'ᵀ) entry by entry.

Shapes: d stream width, h query heads, g key/value heads, k head dimension, f hidden units. Distances are relative to
the first model: ‖x − y‖ / ‖x‖.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gaugekit.models.parts import ACTIVATIONS
from gaugekit.models.spec import MLP, Norm, Spec, Stream
from gaugekit.models.view import View
from gaugekit.symmetry import Circuits, Observable, Symmetries
from gaugekit.symmetry.circuits import folded
from gaugekit.symmetry.stream import Frame, StreamOrder
from gaugekit.symmetry.wiring import wire

Tensors = Mapping[str, Tensor]
UNIT_LIMIT = 6000  # hidden units up to which leftover units are paired optimally, not one after the other


@dataclass(frozen=True)
class Pairing:
    """Distance of one circuit or MLP, the distance that rounding of the stored weights explains, and how alike the two
    are (the cosine of the two products)."""

    distance: float
    rounding: float
    cosine: float


def stream_turn(stream: Stream, symmetries: Symmetries, place: str, ours: Tensors, theirs: Tensors) -> Tensor:
    """U (d, d) such that states of their stream, as rows, times Uᵀ lie in our frame: found from the first table.

    Orthogonal Procrustes where the frame is free, an assignment of coordinates with signs where only their order is,
    and the identity where the stream's coordinates are observed.
    """
    where = f"{place}stream"
    kinds = {type(s): s for s in (*symmetries.continuous, *symmetries.discrete) if s.where == where}
    view = stream.tables[0].rows
    width = stream.width
    if Frame not in kinds and StreamOrder not in kinds:
        return torch.eye(width, dtype=torch.float64)
    first, second = (view.read(t[view.name]).double().reshape(-1, width) for t in (ours, theirs))
    # What tables may trade among themselves, and what LayerNorms do not see, says nothing about the frame.
    first, second = (x - x.mean(0) for x in (first, second))
    if Frame in kinds:
        frame = kinds[Frame]
        assert isinstance(frame, Frame)
        if frame.fix_ones:
            first, second = (x - x.mean(-1, keepdim=True) for x in (first, second))
        return unitary(first.mT @ second)
    order = kinds[StreamOrder]
    assert isinstance(order, StreamOrder)
    cosine = unit_rows(first.mT) @ unit_rows(second.mT).mT
    columns, signs = assigned_with_signs(cosine, torch.zeros_like(cosine), order.signs)
    turn = torch.zeros(width, width, dtype=torch.float64)
    turn[torch.arange(width), columns] = signs
    return turn


def unitary(cross: Tensor) -> Tensor:
    """S unitary (..., n, n) with Re tr(Sᴴ C) largest, C = X X'ᴴ: then ‖X − SX'‖ is least [orthogonal Procrustes]."""
    u, _, vh = torch.linalg.svd(cross)
    return u @ vh


def assigned(score: Tensor) -> Tensor:
    """The column of each row, the sum of scores largest."""
    return torch.from_numpy(linear_sum_assignment(score.numpy(), maximize=True)[1])


def assigned_with_signs(odd: Tensor, even: Tensor, signs: str) -> tuple[Tensor, Tensor]:
    """As `assigned`, and the sign of each row: the score is odd · sign + even, (n, n). `signs` as `StreamOrder` has
    them: "each" is free, "one" is a common one, "none" are 1."""
    rows = torch.arange(len(odd))
    if signs == "each":
        columns = assigned(odd.abs() + even)
        return columns, torch.where(odd[rows, columns] < 0, -1.0, 1.0).double()
    trials = []
    for sign in (1.0, -1.0) if signs == "one" else (1.0,):
        score = sign * odd + even
        columns = assigned(score)
        trials.append((float(score[rows, columns].sum()), sign, columns))
    _, sign, columns = max(trials, key=lambda trial: trial[0])
    return columns, torch.full((len(odd),), sign, dtype=torch.float64)


def unit_rows(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-300)


def match_heads(
    each: Circuits, ours: Tensors, theirs: Tensors, turns: Mapping[str, Tensor], eps: tuple[float, float]
) -> dict[str, list[Pairing]]:
    """Pair the heads of one attention; returns {"qk": [...], "vo": [...]} with one `Pairing` a query head."""
    a = each.attention
    own, other = turns[each.stream], turns[a.memory or each.stream]
    factors = []
    for tensors, turned in ((ours, False), (theirs, True)):
        queries, keys = each.queries_keys(tensors)
        values, outputs = each.values_outputs(tensors)
        if turned:
            queries, outputs = queries @ own.mT, outputs @ own.mT
            keys, values = keys @ other.mT, values @ other.mT
        factors.append((queries, keys, values, outputs))
    (q, k, v, o), (q2, k2, v2, o2) = factors
    per_group = a.heads // a.kv_heads
    products = {"qk": (q, k, q2, k2), "vo": (o, v, o2, v2)}
    alike = {name: likeness(*parts, per_group) for name, parts in products.items()}
    cosine = {name: each[2] for name, each in alike.items()}
    order = torch.arange(a.heads) if a.distances else pair_groups(cosine["qk"] + cosine["vo"], a.kv_heads)
    found: dict[str, list[Pairing]] = {}
    for name, (w, z, w2, z2) in products.items():
        rounding = [rounding_error(x, y, per_group, e) for x, y, e in ((w, z, eps[0]), (w2, z2, eps[1]))]
        inner, (size, size2), _ = alike[name]
        rows = []
        for head in range(a.heads):
            mate = int(order[head])
            first, second = float(size[head]), float(size2[mate])
            dot = float(inner[head, mate])
            squared = max(first**2 + second**2 - 2 * dot, 0.0)
            scale = max(first, 1e-300)
            noise = (float(rounding[0][head]) ** 2 + float(rounding[1][mate]) ** 2) ** 0.5
            rows.append(Pairing(squared**0.5 / scale, noise / scale, float(cosine[name][head, mate])))
        found[name] = rows
    return found


def likeness(
    w: Tensor, z: Tensor, w2: Tensor, z2: Tensor, per_group: int
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Of products of factors (h, k, d) and (g, k, d): ⟨G_i, G'_j⟩ (h, h), ‖G_i‖ and ‖G'_j‖ (h,), and cosines (h, h)."""
    inner = inner_products(w, z, w2, z2, per_group)
    size, size2 = (
        inner_products(x, y, x, y, per_group, diagonal=True).clamp_min(0).sqrt() for x, y in ((w, z), (w2, z2))
    )
    return inner, (size, size2), inner / (size.unsqueeze(1) * size2).clamp_min(1e-300)


def inner_products(w: Tensor, z: Tensor, w2: Tensor, z2: Tensor, per_group: int, diagonal: bool = False) -> Tensor:
    """⟨G_i, G'_j⟩ (h, h) of products of factors (h, k, d) and (g, k, d); or (h,) for i = j."""
    z, z2 = z.repeat_interleave(per_group, 0), z2.repeat_interleave(per_group, 0)
    if diagonal:
        return ((w @ w2.mT) * (z @ z2.mT)).sum((-1, -2))
    rows = []
    for head in range(w.shape[0]):
        rows.append(((w[head] @ w2.mT) * (z[head] @ z2.mT)).sum((-1, -2)))
    return torch.stack(rows)


def rounding_error(w: Tensor, z: Tensor, per_group: int, eps: float) -> Tensor:
    """Root mean square of ‖δG‖ when every stored weight is rounded by up to eps of itself, half a unit in the last
    place: ‖δG‖² ≈ (eps²/3) · 2 Σ_r ‖w_r‖² ‖z_r‖²."""
    z = z.repeat_interleave(per_group, 0)
    rows = (w**2).sum(-1) * (z**2).sum(-1)
    return (2 * rows.sum(-1) / 3).sqrt() * eps


def spectral_rounding(each: Circuits, tensors: Tensors, eps: float) -> float:
    """By how much rounding of the stored weights moves a spectrum, ‖δs‖/‖s‖, the larger of the two circuits' medians.

    A singular value moves by uᵀ δG v. Rounding errors lie in no direction in particular, so of ‖δG‖² each of the k
    values takes a share of 1/(k d), and all of them together 1/d.
    """
    queries, keys = each.queries_keys(tensors)
    values, outputs = each.values_outputs(tensors)
    per_group = each.attention.heads // each.attention.kv_heads
    largest = 0.0
    for w, z in ((queries, keys), (outputs, values)):
        size = inner_products(w, z, w, z, per_group, diagonal=True).clamp_min(1e-300).sqrt()
        relative = rounding_error(w, z, per_group, eps) / size
        largest = max(largest, float(relative.median()) / w.shape[-1] ** 0.5)
    return largest


def pair_groups(score: Tensor, kv_heads: int) -> Tensor:
    """The query head of theirs for each of ours: groups paired as wholes, and heads within a pair of groups."""
    h = score.shape[0]
    size = h // kv_heads
    blocks = score.reshape(kv_heads, size, kv_heads, size).transpose(1, 2)
    totals = torch.zeros(kv_heads, kv_heads, dtype=torch.float64)
    within: dict[tuple[int, int], Tensor] = {}
    for i in range(kv_heads):
        for j in range(kv_heads):
            within[i, j] = assigned(blocks[i, j])
            totals[i, j] = blocks[i, j][torch.arange(size), within[i, j]].sum()
    return torch.cat([j * size + within[i, j] for i, j in enumerate(assigned(totals).tolist())])


@dataclass(frozen=True)
class Units:
    """The MLP of one layer with the norm it reads, the LayerScale behind it, and whether its output's mean is lost."""

    stream: str
    layer: int
    mlp: MLP
    norm: Norm | None
    scale: View | None
    mean_unseen: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the disk tensors that the comparison needs."""
        views = [self.mlp.up.weight, self.mlp.down.weight]
        views += [] if self.mlp.gate is None else [self.mlp.gate.weight]
        views += [] if self.norm is None else [self.norm.weight]
        views += [] if self.scale is None else [self.scale]
        return tuple(dict.fromkeys(view.name for view in views))


def match_units(units: Units, ours: Tensors, theirs: Tensors, turn: Tensor, eps: tuple[float, float]) -> Pairing:
    """Pair the hidden units of one MLP. What scales trade against each other is compared as a product: up's row with
    down's behind a gate or a homogeneous activation; the rest (a gate, both rows of a plain unit) as it is."""
    mlp = units.mlp
    parts = []
    for tensors, turned in ((ours, False), (theirs, True)):
        up, gate = (None if x is None else folded(tensors, x, units.norm) for x in (mlp.up, mlp.gate))
        down = mlp.down.weight.read(tensors[mlp.down.weight.name]).double()
        assert up is not None
        if units.scale is not None:
            down = down * units.scale.read(tensors[units.scale.name]).double()
        if units.mean_unseen:
            down = down - down.mean(-1, keepdim=True)
        if turned:
            up, down = up @ turn.mT, down @ turn.mT
            gate = None if gate is None else gate @ turn.mT
        parts.append((up, gate, down))
    (up, gate, down), (up2, gate2, down2) = parts
    cosine = (unit_rows(up) @ unit_rows(up2).mT) * (unit_rows(down) @ unit_rows(down2).mT)
    score = cosine if gate is None or gate2 is None else cosine + unit_rows(gate) @ unit_rows(gate2).mT
    order = pair_units(score)
    up2, down2, gate2 = up2[order], down2[order], None if gate2 is None else gate2[order]
    degree = ACTIVATIONS[mlp.activation]
    terms: list[tuple[Tensor, Tensor, Tensor]] = []  # per unit: ⟨x, y⟩, ‖x‖², ‖y‖²
    if gate is None and degree is None:
        terms += [dots(up, up2), dots(down, down2)]
    else:
        weight, weight2 = torch.ones(len(up)).double(), torch.ones(len(up)).double()
        if gate is not None and gate2 is not None:
            if degree is not None:
                weight, weight2 = gate.norm(dim=-1) ** degree, gate2.norm(dim=-1) ** degree
                gate, gate2 = unit_rows(gate), unit_rows(gate2)
            terms.append(dots(gate, gate2))
        elif degree is not None and degree != 1:
            weight, weight2 = up.norm(dim=-1) ** (degree - 1), up2.norm(dim=-1) ** (degree - 1)
        first, second = dots(up, up2), dots(down, down2)
        terms.append(
            (
                first[0] * second[0] * weight * weight2,
                first[1] * second[1] * weight**2,
                first[2] * second[2] * weight2**2,
            )
        )
    distances, cosines = [], []
    for dot, size, size2 in terms:
        total, total2, both = float(size.sum()), float(size2.sum()), float(dot.sum())
        distances.append(max(total + total2 - 2 * both, 0.0) / max(total, 1e-300))
        cosines.append(both / max(total * total2, 1e-300) ** 0.5)
    return Pairing(
        (sum(distances) / len(distances)) ** 0.5,
        (2 / 3 * (eps[0] ** 2 + eps[1] ** 2)) ** 0.5,
        sum(cosines) / len(cosines),
    )


def dots(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row by row ⟨x, y⟩, ‖x‖², ‖y‖²."""
    return (x * y).sum(-1), (x * x).sum(-1), (y * y).sum(-1)


def pair_units(score: Tensor) -> Tensor:
    """The unit of theirs for each of ours. Where best mates are mutual they are taken; the rest is assigned."""
    best, back = score.argmax(1), score.argmax(0)
    mutual = back[best] == torch.arange(len(best))
    order = best.clone()
    left = (~mutual).nonzero().squeeze(1)
    if len(left):
        free = torch.ones(score.shape[1], dtype=torch.bool)
        free[best[mutual]] = False
        free_index = free.nonzero().squeeze(1)
        rest = score[left][:, free_index]
        if len(left) <= UNIT_LIMIT:
            order[left] = free_index[assigned(rest)]
        else:
            order[left] = free_index  # too many to tell apart: these layers are not related, and will say so
    return order


def mlps(spec: Spec, observable: Observable) -> Iterator[Units]:
    """Every MLP in the order of the model; experts are left out, since their order would have to be found first."""
    for name, wiring in wire(spec, observable).items():
        for layer, block in enumerate(wiring.stream.blocks):
            for number, branch in enumerate(block.branches):
                if isinstance(branch.body, MLP):
                    scale = branch.scale if branch.norm_out is None else None
                    yield Units(
                        name, layer, branch.body, wiring.sources[layer, number], scale, wiring.loses_mean(branch)
                    )
