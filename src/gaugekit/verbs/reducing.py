"""Where a head is cut: bases in which its circuits lose least, and how many dimensions each head keeps.

Values and outputs, G_VO = W_O W_V. Every query head i of a group hands z = Σ_t a_t v_t to its outputs W_O,i. To cut the
group's values to r dimensions is to put Π z for z, with one projector Π (k, k) of rank r for all, since they share one
cache. What is made least is Σ_i E‖W_O,i (1 − Π) z‖²: over normalized inputs n of variance one, where z = W_V n and this
is ‖G − G_r‖²_F ("plain"), or over the mixed values z of a text, pooled over the query heads of the group. The singular
value decomposition of W_O M^½, M = E z zᵀ, gives the minimum exactly. With one query head a group, it is the least
error of what the head writes on that text; with several, the least if each wrote what any of them hands on. Where the
output has a bias, the mean of z goes there first, which changes nothing, since rows of a softmax sum to one; M is a
covariance then. Elsewhere the constant of the values is one more input that is always one.

Queries and keys, G_QK = W_Qᵀ W_K. What is made least is Σ_i E(q_i·(1 − Π) k)², over inputs of variance one, or over
pairs of a query and a key of the text that are taken independently; the decomposition of M_q^½ M_k^½ gives it exactly.
A constant of the keys does not count, since a softmax does not see it. With rotary positions only whole pairs can go,
since each turns with a frequency of its own: as complex numbers they add Re(q̄ k e^{iθ}) to a score, and θ is taken as
uniform. Pairs that turn alike are cut as complex vectors, dimensions that never turn as real ones.

Shapes: d stream width, h query heads, g key/value heads, k head dimension; c spaces of n dimensions make up a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugekit.linalg import beside, moment_factor, product_truncation, square_factor
from gaugekit.models.view import Edit
from gaugekit.symmetry import Circuits, Symmetry
from gaugekit.symmetry.base import present
from gaugekit.symmetry.constants import ValueConstant
from gaugekit.symmetry.heads import QueryKey, ValueOutput, place_complex
from gaugekit.symmetry.orbit import Load, Path, Step
from gaugekit.symmetry.readers import Reader
from gaugekit.verbs.calibration import Moments

__all__ = ["Cut", "Kept", "above_rounding", "lost", "queries_keys", "spend", "values"]

Factors = tuple[Tensor, Tensor]
Kept = Sequence[Tensor]  # of every space, what is kept, (g, c, n) bool


@dataclass(frozen=True)
class Space:
    """c spaces of n dimensions of each of g heads; complex where a dimension is a pair that turns.

    rows            (c, n, w)     places in the head: w = 2 for a pair, 1 otherwise
    energies        (g, c, n)     what is lost when a dimension goes, falling
    own, dual       (g, c, n, n)  the new bases: of values and outputs, or of queries and keys
    plain, weighted               two factors (g, c, n, n) of which errors are told: over all inputs, over the text
    """

    rows: Tensor
    energies: Tensor
    own: Tensor
    dual: Tensor
    plain: Factors
    weighted: Factors | None

    @property
    def width(self) -> int:
        return self.rows.shape[-1]

    def bases(self, kept: Tensor) -> Tensor:
        """(2, g, c, n, n): what is kept, (g, c, n) bool, of the new bases; the old ones where a head keeps all."""
        one = torch.eye(kept.shape[-1], dtype=self.own.dtype)
        cut = torch.stack([self.own, self.dual]) * kept.unsqueeze(-1)
        return torch.where(kept.all(-1)[..., None, None], one, cut)


@dataclass(frozen=True)
class Cut:
    """One circuit of one attention, ready to be cut. `before`: steps that change no function and come first."""

    symmetry: ValueOutput | QueryKey
    spaces: tuple[Space, ...]
    before: tuple[Step, ...] = ()

    @property
    def total(self) -> float:
        """The energy of all heads together."""
        return sum(float(space.energies.sum()) for space in self.spaces)

    def steps(self, kept: Kept) -> tuple[Step, ...]:
        """The moves of the weights, behind which what is not kept is zero."""
        a = self.symmetry.attention
        element = torch.zeros(2, a.kv_heads, a.head_dim, a.head_dim, dtype=torch.float64)
        for space, mask in zip(self.spaces, kept, strict=True):
            if space.width == 2:
                place_complex(element, space.rows[..., 0], space.rows[..., 1], space.bases(mask))
            else:
                index = space.rows[..., 0]
                element[..., index.unsqueeze(-1), index.unsqueeze(-2)] = space.bases(mask)
        return (*self.before, Step(self.symmetry, element))

    def dimensions(self, kept: Kept) -> tuple[int, ...]:
        """How many dimensions each head keeps."""
        each = [mask.sum((1, 2)) * space.width for space, mask in zip(self.spaces, kept, strict=True)]
        return tuple(torch.stack(each).sum(0).tolist())

    def errors(self, kept: Kept) -> tuple[float, float | None]:
        """√(lost / all) of the layer's heads together: plain, and on the text."""
        plain = _error(self.spaces, kept, [space.plain for space in self.spaces])
        weighted = [space.weighted for space in self.spaces if space.weighted is not None]
        return plain, _error(self.spaces, kept, weighted) if weighted else None


def _error(spaces: Sequence[Space], kept: Kept, factors: Sequence[Factors]) -> float:
    lost = total = 0.0
    for space, mask, (a, b) in zip(spaces, kept, factors, strict=True):
        own, dual = space.bases(mask)
        product = b.mH @ a
        lost += float((product - (dual @ b).mH @ (own @ a)).abs().square().sum()) / space.width
        total += float(product.abs().square().sum()) / space.width
    return (lost / total) ** 0.5 if total > 0 else 0.0


def values(each: Circuits, acting: Sequence[Symmetry], load: Load, moments: Moments | None) -> Cut:
    """Values and outputs of one attention. `acting`: symmetries of the model, those of constants among them."""
    a = each.attention
    symmetry, reader = ValueOutput("", a), Reader(a.v, each.key_norm)
    free = next((s for s in acting if isinstance(s, ValueConstant) and s.attention == a), None)
    views = present(a.v.bias, *(() if each.key_norm is None else (each.key_norm.weight, each.key_norm.bias)))
    names = tuple(dict.fromkeys([*each.names, *(view.name for view in views)]))
    bases = torch.eye(a.head_dim, dtype=torch.float64).expand(a.kv_heads, -1, -1)
    first: list[Symmetry | Step] = [] if free is None else [free]
    if free is not None and free.sink is None:
        # What is free of the constant is known by an orthogonal projection, for which the best basis comes first, if
        # there is one of all dimensions.
        s, *best = product_truncation(*each.value_output({name: load(name) for name in names}))
        bases, first = (best[0], [Step(symmetry, torch.stack(best)), free]) if bool((s > 0).all()) else (bases, [])
    home = Path(first, keep=True)
    names = tuple(home.needs((*names, *home.touches)))
    given = {name: load(name).double() for name in names}
    settled = given | home.move(names, given.__getitem__)
    old, new = (reader.constant(Edit(tensors)).reshape(a.kv_heads, -1) for tensors in (given, settled))
    steps = home.steps
    seen, written = each.value_output(settled)
    plain = _with(seen, new), written
    weighted = None
    if moments is not None:
        # Where the values of the text have gone: v → S v + s.
        moment = _carried(moments.mixed, bases, new - (bases @ old.unsqueeze(-1)).squeeze(-1))
        if free is not None and free.sink is not None:
            steps = (*steps, Step(free, -moment[:, :-1, -1].reshape(-1)))
            moment = _centred(moment)
        weighted = moment_factor(moment[:, :-1, :-1]), written
    rows = torch.arange(a.head_dim).reshape(1, -1, 1)
    return Cut(symmetry, (_space(rows, plain, weighted),), steps)


def queries_keys(each: Circuits, load: Load, moments: Moments | None) -> Cut:
    """Queries and keys of one attention that has no norm on them."""
    a = each.attention
    norms = [norm for norm in (each.query_norm, each.key_norm) if norm is not None]
    views = present(a.q.bias, a.k.bias, *(view for norm in norms for view in (norm.weight, norm.bias)))
    tensors = {name: load(name).double() for name in dict.fromkeys([*each.names, *(view.name for view in views)])}
    edit = Edit(tensors)
    queries, keys = each.queries_keys(tensors)
    queries = beside(_with(queries, Reader(a.q, each.query_norm).constant(edit)), a.kv_heads)
    whole = _with(keys, Reader(a.k, each.key_norm).constant(edit))
    of_queries = of_keys = of_whole = None
    if moments is not None and moments.queries is not None and moments.keys is not None:
        of_queries = a.heads // a.kv_heads * moments.queries[:, :-1, :-1]
        of_keys, of_whole = _centred(moments.keys)[:, :-1, :-1], moments.keys[:, :-1, :-1]
    symmetry = QueryKey("", a)
    turning, still = symmetry.blocks
    # A constant of the keys shifts all scores of a query alike, but not where it turns, nor under a softcap.
    spots = [(torch.tensor([p for p in turning if len(p) == n]), True) for n in sorted({len(p) for p in turning})]
    spots += [(torch.tensor(still).reshape(1, -1, 1), a.softcap)] if still else []
    spaces = []
    for rows, constant in spots:
        plain = _factor(queries, rows), _factor(whole if constant else keys, rows)
        weighted = None
        if of_queries is not None and of_keys is not None and of_whole is not None:
            of_these = of_whole if constant else of_keys
            weighted = _moment_factor(of_queries, rows), _moment_factor(of_these, rows)
        spaces.append(_space(rows, plain, weighted))
    return Cut(symmetry, tuple(spaces))


def _with(heads: Tensor, constant: Tensor) -> Tensor:
    """(heads, k, d) with a constant (heads · k,) as one more column: an input that is always one."""
    return torch.cat([heads, constant.reshape(*heads.shape[:2], 1)], -1)


def _carried(moment: Tensor, bases: Tensor, shift: Tensor) -> Tensor:
    """The moment (g, k + 1, k + 1) of S x + s."""
    affine = torch.cat([bases, shift.unsqueeze(-1)], -1)
    last = torch.zeros_like(affine[:, :1])
    last[..., -1] = 1.0
    affine = torch.cat([affine, last], 1)
    return affine @ moment @ affine.mT


def _centred(moment: Tensor) -> Tensor:
    """The moment (g, k + 1, k + 1) of what is left of x without its mean."""
    one = torch.eye(moment.shape[-1] - 1, dtype=moment.dtype).expand(len(moment), -1, -1)
    return _carried(moment, one, -moment[:, :-1, -1])


def _factor(x: Tensor, rows: Tensor) -> Tensor:
    """The rows (g, c, n, m) of x (g, k, m) at these places; pairs as complex numbers."""
    parts = [x[:, index] for index in rows.unbind(-1)]
    return torch.complex(*parts) if len(parts) == 2 else parts[0]


def _moment_factor(moment: Tensor, rows: Tensor) -> Tensor:
    """A factor (g, c, n, n) of the moments of x at these places, from the moment (g, k, k) of x."""
    places = rows.unbind(-1)
    block = [[moment[:, i.unsqueeze(-1), j.unsqueeze(-2)] for j in places] for i in places]
    if len(places) == 1:
        return moment_factor(block[0][0])
    (xx, xy), (yx, yy) = block  # of (x + iy)(x + iy)ᴴ
    return moment_factor(torch.complex(xx + yy, yx - xy))


def _space(rows: Tensor, plain: Factors, weighted: Factors | None) -> Space:
    """The best bases: for the text where there is one."""

    def square(factors: Factors) -> Factors:
        first, second = (x if x.ndim == 4 else x.unsqueeze(1) for x in factors)
        return square_factor(first), square_factor(second)

    plain, weighted = square(plain), None if weighted is None else square(weighted)
    s, own, dual = product_truncation(*(weighted or plain))
    return Space(rows, s.square() / rows.shape[-1], own, dual, plain, weighted)


def spend(cuts: Sequence[Cut], share: float, *, relative: bool, together: bool) -> list[Kept]:
    """What is kept, (g, c, n) bool for every space of every cut, if `share` of all dimensions may stay.

    All dimensions of the model stand in one list, by what is lost when one goes; those that lose most are kept, and at
    least one a head. `relative`: energies are shares of the layer's own. `together`: all heads of a layer keep equally
    many; the first r of every head then go or stay as one.
    """
    worths, costs = [], []
    for cut in cuts:
        worth = torch.cat([(space.energies / space.width).flatten(1) for space in cut.spaces], -1)
        cost = torch.cat([torch.full(space.energies.shape[1:], space.width).flatten() for space in cut.spaces])
        worth = worth / (cut.total or 1.0) if relative else worth
        if together:
            cost, worth = cost * len(worth), worth.sum(0, keepdim=True)
        # Kept whatever it costs.
        worths.append(worth.scatter(-1, worth.argmax(-1, keepdim=True), torch.inf))
        costs.append(cost.expand(worth.shape))
    worth, cost = (torch.cat([x.flatten() for x in each]) for each in (worths, costs))
    order = worth.argsort(descending=True, stable=True)
    # A little more, for shares that are whole numbers but for rounding.
    stay = torch.zeros_like(worth, dtype=torch.bool)
    stay[order] = cost[order].cumsum(0) <= share * int(cost.sum()) + 1e-6
    stay |= worth.isinf()
    found = []
    for cut, mask in zip(cuts, stay.split([each.numel() for each in worths]), strict=True):
        sizes = [space.energies.shape for space in cut.spaces]
        mask = mask.reshape(-1, sum(c * n for _, c, n in sizes)).expand(sizes[0][0], -1)
        parts = mask.split([c * n for _, c, n in sizes], -1)
        found.append(tuple(part.reshape(size) for part, size in zip(parts, sizes, strict=True)))
    return found


def lost(cuts: Sequence[Cut], kept: Sequence[Kept]) -> float:
    """The share of its energy that a layer loses, mean over layers."""
    shares = [
        sum(float((space.energies * ~mask).sum()) for space, mask in zip(cut.spaces, masks, strict=True)) / cut.total
        for cut, masks in zip(cuts, kept, strict=True)
        if cut.total > 0
    ]
    return sum(shares) / max(len(shares), 1)


def above_rounding(cuts: Sequence[Cut]) -> list[Kept]:
    """Everything that is in the product at all."""
    return [tuple(space.energies > 0 for space in cut.spaces) for cut in cuts]
