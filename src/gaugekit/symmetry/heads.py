"""Symmetries of attention heads: bases of the value–output and query–key circuits, and the order of heads.

Shapes: q (h, k, d), k and v (g, k, d), o (h, k, d); a group of h/g query heads shares one key/value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Generator, Tensor

from gaugekit.linalg import balance, beside, random_invertible
from gaugekit.models.spec import Attention, Linear, Rotary
from gaugekit.models.view import Edit, View
from gaugekit.symmetry.base import Discrete, Part, Scaling, Symmetry, power, present, probe
from gaugekit.symmetry.readers import Reader


def per_query_head(matrices: Tensor, heads: int) -> Tensor:
    """(g, ...) → (h, ...): query head i belongs to key/value head i // (h/g)."""
    return matrices.repeat_interleave(heads // matrices.shape[0], dim=0)


def still_dimensions(rotary: Rotary | None, head_dim: int) -> tuple[int, ...]:
    """Dimensions of a head that no rotation turns."""
    return tuple(range(head_dim)) if rotary is None else rotary.blocks(head_dim)[1]


def transform(edit: Edit, linear: Linear, matrices: Tensor) -> None:
    """W → S W, b → S b for weights (n, k, d) and matrices (n, k, k)."""
    edit.update(linear.weight, lambda weight: matrices @ weight)
    edit.update(linear.bias, lambda bias: (matrices @ bias.unsqueeze(-1)).squeeze(-1))


def unspared(coordinates: Tensor, size: int, spare: tuple[int, int]) -> Tensor:
    """Coordinates (n,) as matrices (heads, size, size) whose leading block of the shape `spare` is zero.

    A head wider than what its factors can show has elements of GL that change nothing another symmetry does not
    change too: X with X A = 0 and B X = 0. Generically they are complementary to these matrices.
    """
    kept = torch.ones(size, size, dtype=torch.bool)
    kept[: spare[0], : spare[1]] = False
    index = kept.reshape(-1).nonzero().squeeze(-1)
    flat = coordinates.reshape(-1, len(index))
    full = torch.zeros(flat.shape[0], size * size, dtype=coordinates.dtype).index_copy(1, index, flat)
    return full.reshape(-1, size, size)


def phased(s: Tensor, t: Tensor, rows: Tensor) -> Tensor:
    """(S, T) stacked, each row turned by the phase (or sign) that makes `rows` (..., k) real and positive."""
    size = rows.abs().unsqueeze(-1)
    turn = torch.where(size > 0, rows.unsqueeze(-1).conj() / torch.where(size > 0, size, 1.0), 1.0)
    return torch.stack([turn * s, turn * t])


def with_bias(edit: Edit, linear: Linear) -> Tensor:
    """[W b], (n, k, d + 1), or W where there is no bias."""
    weight = edit[linear.weight]
    return weight if linear.bias is None else torch.cat([weight, edit[linear.bias].unsqueeze(-1)], dim=-1)


def partner(element: Tensor) -> tuple[Tensor, Tensor]:
    """S for one factor and S⁻ᵀ for the other; an element may bring both along, stacked."""
    return (element[0], element[1]) if element.dim() == 4 else (element, torch.linalg.inv(element).mT)


def undone(element: Tensor) -> Tensor:
    """The inverse of S, or of (S, T) with T = S⁻ᵀ: then (Tᵀ, Sᵀ). A pair that is not `invertible` has none."""
    return torch.stack([element[1].mT, element[0].mT]) if element.dim() == 4 else torch.linalg.inv(element)


def invertible(element: Tensor) -> bool:
    """Whether a pair (S, T) has T = S⁻ᵀ; it has not where a head's product shows less than its k dimensions."""
    one = torch.eye(element.shape[-1], dtype=element.dtype)
    return bool(((element[0] @ element[1].mT - one).abs() < 1e-6).all())


@dataclass(frozen=True)
class ValueOutput(Symmetry):
    """W_V → S W_V, b_V → S b_V and W_O → W_O S⁻¹ for every query head of the group; G_VO = W_O W_V is unchanged.

    `spare`: by how much the head is wider than its outputs and its values can show; see `unspared`. `loose`: the
    values' reader, where a part of their constant is free but not all of it.
    """

    attention: Attention
    spare: tuple[int, int] = (0, 0)
    loose: Reader | None = None

    part: ClassVar[Part] = "vo"
    name: ClassVar[str] = "value-output basis"

    @property
    def group(self) -> str:
        return power(f"GL({self.attention.head_dim})", self.attention.kv_heads)

    @property
    def dimension(self) -> int:
        return self.attention.kv_heads * (self.attention.head_dim**2 - self.spare[0] * self.spare[1])

    @property
    def sources(self) -> tuple[View, ...]:
        return self.views + (() if self.loose is None else self.loose.context)

    @property
    def views(self) -> tuple[View, ...]:
        return present(self.attention.v.weight, self.attention.v.bias, self.attention.o.weight)

    def element(self, coordinates: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(unspared(coordinates, self.attention.head_dim, self.spare))

    def sample(self, generator: Generator, condition: float = 10.0) -> Tensor:
        g, k = self.attention.kv_heads, self.attention.head_dim
        return random_invertible(k, generator, condition, (g,))

    def inverse(self, element: Tensor) -> Tensor:
        return undone(element)

    def fix(self, edit: Edit) -> Tensor:
        """Balanced: values and outputs are Σ^½Vᵀ and Σ^½Uᵀ of their product; the product of each row of W_V with a
        fixed vector is positive. Directions that the product does not show become zero."""
        a = self.attention
        seen = with_bias(edit, a.v)
        if self.loose is not None:
            # What part of the constant is free is known only in the basis that is looked for: decide without it, as
            # long as every direction of the head carries more than that constant.
            linear = self.loose.linear_part(edit).reshape(a.kv_heads, a.head_dim, -1)
            seen = linear if (torch.linalg.matrix_rank(linear) == a.head_dim).all() else seen
        s, t = balance(seen, beside(edit[a.o.weight], a.kv_heads))
        values = s @ edit[a.v.weight] if self.loose is None else s @ seen
        return phased(s, t, values @ probe(values.shape[-1]))

    def move(self, edit: Edit, element: Tensor) -> None:
        a = self.attention
        own, dual = partner(element)
        transform(edit, a.v, own)
        dual = per_query_head(dual, a.heads)
        edit.update(a.o.weight, lambda weight: dual @ weight)


def place_complex(matrices: Tensor, first: list[int] | Tensor, second: list[int] | Tensor, block: Tensor) -> None:
    """Write complex (..., n, n) blocks into real (..., k, k) matrices that act on pairs (x_first, x_second). The pairs
    of one block are (n,), those of several (blocks, n), with blocks (..., blocks, n, n)."""
    one, other = torch.as_tensor(first), torch.as_tensor(second)
    for rows, columns, value in (
        (one, one, block.real),
        (other, other, block.real),
        (one, other, -block.imag),
        (other, one, block.imag),
    ):
        matrices[..., rows.unsqueeze(-1), columns.unsqueeze(-2)] = value


@dataclass(frozen=True)
class QueryKey(Symmetry):
    """W_Q → S W_Q for every query head of the group, W_K → S⁻ᵀ W_K, biases too; scores are unchanged.

    S commutes with the rotary turns: GL(k) without them; otherwise a complex GL(n) on the n pairs that share a
    frequency (a scale and a phase where n = 1) and GL(m) on the m dimensions that never turn. `spare`: by how much
    the part that never turns is wider than its keys and its queries can show; see `unspared`.
    """

    attention: Attention
    spare: tuple[int, int] = (0, 0)

    part: ClassVar[Part] = "qk"
    name: ClassVar[str] = "query-key basis"

    @cached_property
    def blocks(self) -> tuple[tuple[tuple[tuple[int, int], ...], ...], tuple[int, ...]]:
        a = self.attention
        return a.rotary.blocks(a.head_dim) if a.rotary is not None else ((), tuple(range(a.head_dim)))

    @property
    def group(self) -> str:
        turning, still = self.blocks
        parts: dict[str, int] = {}
        for pairs in turning:
            part = "C*" if len(pairs) == 1 else f"GL({len(pairs)},C)"
            parts[part] = parts.get(part, 0) + 1
        factors = [power(part, count) for part, count in parts.items()]
        if still:
            factors.append(f"GL({len(still)})")
        return power(" x ".join(factors), self.attention.kv_heads)

    @property
    def dimension(self) -> int:
        turning, still = self.blocks
        fixed = len(still) ** 2 - self.spare[0] * self.spare[1]
        return self.attention.kv_heads * (sum(2 * len(pairs) ** 2 for pairs in turning) + fixed)

    @property
    def views(self) -> tuple[View, ...]:
        a = self.attention
        return present(a.q.weight, a.q.bias, a.k.weight, a.k.bias)

    @cached_property
    def generators(self) -> Tensor:
        """A basis of the commutant of the rotations in gl(k), without what is spare: (dimension per head, k, k)."""
        k = self.attention.head_dim
        turning, still = self.blocks
        basis = []
        for pairs in turning:
            for a, b in pairs:
                for c, e in pairs:
                    real, imaginary = torch.zeros(2, k, k, dtype=torch.float64)
                    real[a, c] = real[b, e] = 1.0
                    imaginary[a, e], imaginary[b, c] = -1.0, 1.0
                    basis += [real, imaginary]
        for row, i in enumerate(still):
            for column, j in enumerate(still):
                if row < self.spare[0] and column < self.spare[1]:
                    continue
                unit = torch.zeros(k, k, dtype=torch.float64)
                unit[i, j] = 1.0
                basis.append(unit)
        return torch.stack(basis)

    def element(self, coordinates: Tensor) -> Tensor:
        g = self.attention.kv_heads
        return torch.linalg.matrix_exp(torch.tensordot(coordinates.reshape(g, -1), self.generators, dims=1))

    def sample(self, generator: Generator, condition: float = 10.0) -> Tensor:
        g, k = self.attention.kv_heads, self.attention.head_dim
        turning, still = self.blocks
        matrices = torch.zeros(g, k, k, dtype=torch.float64)
        for pairs in turning:
            n = len(pairs)
            block = random_invertible(n, generator, condition, (g,), torch.complex128)
            if n == 1:
                block = block * condition ** (torch.rand(g, 1, 1, generator=generator, dtype=torch.float64) - 0.5)
            first, second = (list(side) for side in zip(*pairs, strict=True))
            place_complex(matrices, first, second, block)
        if still:
            index = torch.tensor(still)
            matrices[:, index.unsqueeze(-1), index] = random_invertible(len(still), generator, condition, (g,))
        return matrices

    def inverse(self, element: Tensor) -> Tensor:
        return undone(element)

    def fix(self, edit: Edit) -> Tensor:
        """Balanced, as values and outputs are: over the reals where nothing turns, over the complex numbers for pairs
        that turn alike. The product of each (complex) row of W_K with a fixed vector is real and positive."""
        a = self.attention
        queries, keys = beside(with_bias(edit, a.q), a.kv_heads), with_bias(edit, a.k)
        weights = edit[a.k.weight]
        functional = probe(weights.shape[-1])
        element = torch.zeros(2, a.kv_heads, a.head_dim, a.head_dim, dtype=queries.dtype)
        turning, still = self.blocks
        for size in {len(pairs) for pairs in turning}:  # all blocks of one size at once
            alike = torch.tensor([pairs for pairs in turning if len(pairs) == size])
            first, second = alike.unbind(-1)
            q, k, w = (torch.complex(x[:, first], x[:, second]) for x in (queries, keys, weights))
            s, t = balance(q, k)
            place_complex(element, first, second, phased(s, t, (t @ w) @ functional.to(w.dtype)))
        if still:
            index = torch.tensor(still)
            s, t = balance(queries[:, index], keys[:, index])
            element[:, :, index.unsqueeze(-1), index] = phased(s, t, (t @ weights[:, index]) @ functional)
        return element

    def move(self, edit: Edit, element: Tensor) -> None:
        a = self.attention
        own, dual = partner(element)
        transform(edit, a.q, per_query_head(own, a.heads))
        transform(edit, a.k, dual)


@dataclass(frozen=True)
class QKNormScale(Scaling):
    """γ_q → t γ_q, γ_k → γ_k / t behind a norm of queries and keys: one scale per rotary pair, or per dimension that
    never turns, and per key/value head where heads do not share the weights."""

    attention: Attention

    part: ClassVar[Part] = "qk"
    name: ClassVar[str] = "QK-norm scale"

    @cached_property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Dimensions of a head that must scale alike."""
        a = self.attention
        turning, still = a.rotary.blocks(a.head_dim) if a.rotary is not None else ((), tuple(range(a.head_dim)))
        return tuple(pair for pairs in turning for pair in pairs) + tuple((i,) for i in still)

    @property
    def dimension(self) -> int:
        assert self.attention.qk_norm is not None
        return self.attention.qk_norm.k.shape[0] * len(self.blocks)

    @property
    def views(self) -> tuple[View, ...]:
        assert self.attention.qk_norm is not None
        return (self.attention.qk_norm.q, self.attention.qk_norm.k)

    def fix(self, edit: Edit) -> Tensor:
        """γ_q and γ_k are equally long on each block, and γ_k has a positive product with a fixed vector."""
        norm = self.attention.qk_norm
        assert norm is not None
        n = norm.k.shape[0]
        queries, keys = edit[norm.q].reshape(n, -1, norm.q.shape[-1]), edit[norm.k]
        scales = []
        for block in self.blocks:
            index = list(block)
            long_q, long_k = queries[:, :, index].flatten(1).norm(dim=-1), keys[:, index].norm(dim=-1)
            sound = (long_q > 0) & (long_k > 0)
            size = (torch.where(sound, long_k, 1.0) / torch.where(sound, long_q, 1.0)).sqrt()
            scales.append(torch.where(keys[:, index] @ probe(len(index)) < 0, -size, size))
        return torch.stack(scales, dim=1).reshape(-1)

    def move(self, edit: Edit, element: Tensor) -> None:
        norm = self.attention.qk_norm
        assert norm is not None
        block_of = torch.zeros(self.attention.head_dim, dtype=torch.long)
        for number, block in enumerate(self.blocks):
            block_of[list(block)] = number
        scales = element.reshape(norm.k.shape[0], -1)[:, block_of]
        edit.update(norm.q, lambda weight: weight * per_query_head(scales, norm.q.shape[0]))
        edit.update(norm.k, lambda weight: weight / scales)


@dataclass(frozen=True)
class HeadOrder(Discrete):
    """Key/value heads in another order with their query heads, and query heads in another order within a group."""

    attention: Attention

    name: ClassVar[str] = "head order"

    @property
    def group(self) -> str:
        g, per_group = self.attention.kv_heads, self.attention.heads // self.attention.kv_heads
        return f"S_{g}" if per_group == 1 else f"S_{per_group}" if g == 1 else f"S_{per_group} wr S_{g}"

    @property
    def views(self) -> tuple[View, ...]:
        a = self.attention
        norms = () if a.qk_norm is None else tuple(v for v in (a.qk_norm.q, a.qk_norm.k) if v.shape[0] > 1)
        return present(a.q.weight, a.q.bias, a.k.weight, a.k.bias, a.v.weight, a.v.bias, a.o.weight) + norms

    def sample(self, generator: Generator, condition: float = 10.0) -> Tensor:
        """The new order of the query heads (h,), group by group."""
        a = self.attention
        per_group = a.heads // a.kv_heads
        groups = torch.randperm(a.kv_heads, generator=generator)
        within = [torch.randperm(per_group, generator=generator) for _ in groups]
        return torch.cat([group * per_group + order for group, order in zip(groups, within, strict=True)])

    def fix(self, edit: Edit) -> Tensor:
        """Groups by the sum of squares of their values, which is the nuclear norm of G_VO where that is balanced, and
        query heads within a group by that of their outputs, falling."""
        a = self.attention
        per_group = a.heads // a.kv_heads
        groups = self.keys(edit).argsort(descending=True)
        sizes = (edit[a.o.weight] ** 2).sum((1, 2)).reshape(a.kv_heads, per_group)
        within = sizes.argsort(dim=1, descending=True)
        return (groups.unsqueeze(-1) * per_group + within[groups]).reshape(-1)

    def keys(self, edit: Edit) -> Tensor:
        return (edit[self.attention.v.weight] ** 2).sum((1, 2))

    def move(self, edit: Edit, element: Tensor) -> None:
        a = self.attention
        groups = element[:: a.heads // a.kv_heads] // (a.heads // a.kv_heads)
        for view in self.views:
            of_queries = view.shape[0] == a.heads and view not in (a.k.weight, a.k.bias, a.v.weight, a.v.bias)
            if a.qk_norm is not None and view == a.qk_norm.k:
                of_queries = False
            order = element if of_queries else groups
            edit.update(view, lambda heads, order=order: heads[order])
