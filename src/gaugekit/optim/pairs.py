"""Pairs of factors: where in a model's parameters the A and B of a product G = BᴴA lie, and what acts on them.

Legend
------
N            heads (key/value heads where query heads share them), adapters, hidden units: one product each
r            rank of the product: head dimension, LoRA rank
m, n         columns of A and of B: what the factor reads or writes, biases included
A (N, r, m), B (N, r, n);  A → S A, B → S⁻ᴴ B leaves G (N, n, m) alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Generator, Tensor

from gaugekit.geometry.rows import wide
from gaugekit.linalg import balance, double, random_invertible
from gaugekit.optim.sharding import layout_of, local, rows_like, whole

__all__ = ["Block", "Factor", "Pair", "Window", "balance_", "check_cover", "check_held", "scramble_"]

TensorOf = Callable[[Tensor], Tensor | None]
"""From a parameter to a tensor of its shape."""


@dataclass(frozen=True, eq=False)
class Window:
    """A part of a factor: `view` maps a tensor of the parameter's shape to the part, (N, r, ...), sharing its memory.

    What follows the first two axes are columns, in any number of axes.
    """

    parameter: Tensor
    view: Callable[[Tensor], Tensor]

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """(N, r, columns)."""
        seen = self.view(torch.empty(self.parameter.shape, device="meta"))
        return seen.shape[0], seen.shape[1], prod(seen.shape[2:])

    @cached_property
    def _strided(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        """Where the view leads in a contiguous tensor: (strides there, sizes, strides, offset)."""
        base = torch.empty(self.parameter.shape, device="meta")
        seen = self.view(base)
        if seen.untyped_storage()._cdata != base.untyped_storage()._cdata:
            raise ValueError(f"a window's view of a parameter {tuple(base.shape)} copies: it must share memory")
        return base.stride(), tuple(seen.shape), seen.stride(), int(seen.storage_offset())

    def of(self, tensor: Tensor) -> Tensor:
        """The view of a tensor of the parameter's shape; in one operation where that is contiguous."""
        base, size, stride, offset = self._strided
        if tensor.stride() == base:
            return tensor.as_strided(size, stride, tensor.storage_offset() + offset)
        return self.view(tensor)


@dataclass(frozen=True, eq=False)
class Factor:
    """One factor of a product, (N, r, m): its windows side by side, a weight and its bias for instance."""

    windows: tuple[Window, ...]

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        heads, rank, _ = self.windows[0].shape
        return heads, rank, sum(window.shape[2] for window in self.windows)

    def read(self, tensor_of: TensorOf, copy: bool = True) -> Tensor:
        """The factor (N, r, m), from `tensor_of(parameter)`: tensors of the parameters' shapes, be it their values or
        gradients. Where that is None, zero. Without `copy` it may lie in their memory, in any order."""
        parts = []
        for window in self.windows:
            tensor = tensor_of(window.parameter)
            parts.append(None if tensor is None else window.of(tensor).reshape(window.shape))
        if len(parts) == 1 and parts[0] is not None:
            return parts[0].clone(memory_format=torch.contiguous_format) if copy else parts[0]
        some = next(part for part in parts if part is not None)
        return torch.cat(
            [some.new_zeros(w.shape) if x is None else x for w, x in zip(self.windows, parts, strict=True)], -1
        )

    def write(self, value: Tensor, tensor_of: TensorOf) -> None:
        """Put (N, r, m) back into `tensor_of(parameter)`, in place; where that is None, nowhere."""
        sizes = [window.shape[2] for window in self.windows]
        parts = value.split(sizes, -1) if len(sizes) > 1 else (value,)
        for window, part in zip(self.windows, parts, strict=True):
            into = tensor_of(window.parameter)
            if into is not None:
                seen = window.of(into)
                seen.copy_(part if part.shape == seen.shape else part.reshape(seen.shape))


@dataclass(frozen=True)
class Block:
    """Rows of a factor that one matrix group mixes: `rows` as they are, or `pairs` (blocks, n, 2) of rows, each pair
    one complex row. Without either, all rows."""

    rows: tuple[int, ...] | None = None
    pairs: tuple[tuple[tuple[int, int], ...], ...] | None = None

    def take(self, factor: Tensor) -> Tensor:
        """(N, k, m) → (N', r, m), a batch of factors on which GL(r), real or complex, acts."""
        if self.pairs is not None:
            index = torch.tensor(self.pairs, device=factor.device)
            factor = wide(factor)  # complex halves are not computed with
            real, imaginary = factor[:, index[..., 0]], factor[:, index[..., 1]]
            return torch.complex(real, imaginary).flatten(0, 1)
        return factor if self.rows is None else factor[:, torch.tensor(self.rows, device=factor.device)]

    def put(self, factor: Tensor, value: Tensor) -> None:
        """Write what `take` took back into (N, k, m), in place."""
        if self.pairs is not None:
            index = torch.tensor(self.pairs, device=factor.device)
            value = value.unflatten(0, (-1, len(self.pairs)))
            factor[:, index[..., 0]], factor[:, index[..., 1]] = value.real, value.imag
        elif self.rows is None:
            factor.copy_(value)
        else:
            factor[:, torch.tensor(self.rows, device=factor.device)] = value


@dataclass(frozen=True, eq=False)
class Pair:
    """Two factors of which a model sees the product only, G = BᵀA for every one of N heads.

    Args:
        name: how the pair is called in messages and in an optimizer's state: unique in a model.
        a, b: the factors, (N, r, m) and (N, r, n).
        turning: pairs of rows that a rotary turn mixes, grouped by frequency: there S commutes with the turns, a
            complex GL(1), or GL(n) where n pairs turn alike. The other rows stand still; on them GL acts.
        positive: only positive scales act: units behind a homogeneous activation, of rank 1.

    Raises:
        ValueError: factors whose heads or ranks differ, rows that are named twice or not at all, or `positive` at
            another rank than 1.
    """

    name: str
    a: Factor
    b: Factor
    turning: tuple[tuple[tuple[int, int], ...], ...] = ()
    positive: bool = False

    def __post_init__(self) -> None:
        shapes = {window.shape[:2] for factor in (self.a, self.b) for window in factor.windows}
        if len(shapes) != 1:
            raise ValueError(f"factors of {self.name} differ in (heads, rank): {sorted(shapes)}")
        if self.a.shape[1] == 0:
            raise ValueError(f"factors of {self.name} have rank 0: there is nothing to train")
        rows = [row for group in self.turning for pair in group for row in pair]
        if len(set(rows)) != len(rows) or not set(rows) <= set(range(self.a.shape[1])):
            raise ValueError(f"turning of {self.name} must name rows of {self.a.shape[1]}, each once")
        if self.positive and self.a.shape[1] != 1:
            raise ValueError(f"positive scales act on units of rank 1, those of {self.name} have {self.a.shape[1]}")

    @classmethod
    def of(cls, a: Tensor, b: Tensor, name: str = "pair") -> Pair:
        """The pair of two parameters A (r, m) and B (r, n), or (N, r, m) and (N, r, n)."""
        for tensor in (a, b):
            if tensor.ndim not in (2, 3):
                raise ValueError(f"factors of {name} must be (r, m) or (N, r, m), got {tuple(tensor.shape)}")
        factors = [Factor((Window(x, batched if x.ndim == 2 else as_it_is),)) for x in (a, b)]
        return cls(name, factors[0], factors[1])

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The rows by the group that mixes them: turning ones of each multiplicity, then still ones."""
        if not self.turning:
            return (Block(),)
        sizes = sorted({len(group) for group in self.turning})
        found = [Block(pairs=tuple(g for g in self.turning if len(g) == size)) for size in sizes]
        taken = {row for group in self.turning for pair in group for row in pair}
        still = tuple(row for row in range(self.a.shape[1]) if row not in taken)
        return (*found, Block(rows=still)) if still else tuple(found)

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        """Every parameter that holds a part of the pair, once."""
        windows = (*self.a.windows, *self.b.windows)
        return tuple({id(w.parameter): w.parameter for w in windows}.values())

    def read(self, tensor_of: Callable[[Tensor], Tensor] = torch.Tensor.detach) -> tuple[Tensor, Tensor]:
        """A (N, r, m) and B (N, r, n), copies, of the parameters or of tensors of their shapes; whole, if sharded."""
        wholes = {id(p): whole(tensor_of(p)) for p in self.parameters}
        return self.a.read(lambda p: wholes[id(p)]), self.b.read(lambda p: wholes[id(p)])

    def write(self, a: Tensor, b: Tensor, tensor_of: Callable[[Tensor], Tensor] = torch.Tensor.detach) -> None:
        """Put A and B, which every process has, back where `read` found them, rounded to the dtype there."""
        wholes = {id(p): whole(tensor_of(p)) for p in self.parameters}
        for factor, value in ((self.a, a), (self.b, b)):
            factor.write(value, lambda p: wholes[id(p)])
        for parameter in self.parameters if layout_of(self.parameters) is not None else ():
            into = tensor_of(parameter)
            local(into).copy_(rows_like(wholes[id(parameter)], into))

    def factors(self, tensor_of: Callable[[Tensor], Tensor] = torch.Tensor.detach) -> list[tuple[Tensor, Tensor]]:
        """What `read` gives, block by block: (N', r, m) and (N', r, n), complex for turning rows."""
        a, b = self.read(tensor_of)
        return [(block.take(a), block.take(b)) for block in self.blocks]

    @torch.no_grad()
    def sample(self, generator: Generator, condition: float = 10.0) -> list[Tensor]:
        """A random element of the group, one (N', r, r) for every block, in float64 or complex128, with the given
        condition number where r > 1. A single row is scaled by a factor from 1/√condition to √condition and turned."""
        elements = []
        for a, _ in self.factors():
            element = random_invertible(a.shape[1], generator, condition, a.shape[:1], double(a[:0]).dtype)
            if a.shape[1] == 1:
                shape, device = (a.shape[0], 1, 1), generator.device
                spread = torch.rand(shape, generator=generator, dtype=torch.float64, device=device) - 0.5
                element = element * condition**spread
            elements.append(element.abs() if self.positive else element)
        return elements

    @torch.no_grad()
    def move_(self, elements: Sequence[Tensor]) -> None:
        """Act on the parameters, in place: A → S A, B → S⁻ᴴ B, with one S (N', r, r) for every block. The product is
        kept to rounding in the parameters' dtype, amplified by the condition of S; the algebra is float64."""
        self.move_by_([(s, torch.linalg.inv(s).mH) for s in elements])

    @torch.no_grad()
    def move_by_(
        self,
        elements: Sequence[tuple[Tensor, Tensor]],
        tensor_of: Callable[[Tensor], Tensor] = torch.Tensor.detach,
    ) -> None:
        """A → S A, B → T B, in place, with (S, T) for every block, of the parameters or of tensors of their shapes."""
        a, b = (x.double() for x in self.read(tensor_of))
        for block, (s, t) in zip(self.blocks, elements, strict=True):
            block.put(a, s.to(a.device) @ block.take(a))
            block.put(b, t.to(b.device) @ block.take(b))
        self.write(a, b, tensor_of)

    @torch.no_grad()
    def balancing(self) -> list[tuple[Tensor, Tensor]]:
        """(S, T) of every block, float64, that `move_by_` takes to where A Aᴴ = B Bᴴ: the shortest factors of the same
        product. T = S⁻ᴴ, but for directions that the product does not show, which become zero in both."""
        a, b = (x.double() for x in self.read())
        moves = [balance(block.take(a), block.take(b)) for block in self.blocks]
        return [(s.abs(), t.abs()) for s, t in moves] if self.positive else moves


def scramble_(pairs: Iterable[Pair], generator: Generator, condition: float = 10.0) -> None:
    """Move every pair to a random place of its orbit, in place: the same function in other coordinates."""
    for pair in pairs:
        pair.move_(pair.sample(generator, condition))


def balance_(pairs: Iterable[Pair]) -> None:
    """Move every pair to where A Aᴴ = B Bᴴ, in place; see `Pair.balancing`."""
    for pair in pairs:
        pair.move_by_(pair.balancing())


def check_cover(pairs: Iterable[Pair], whole_parameters: bool = True) -> None:
    """ValueError unless names differ and every entry of every parameter in the pairs belongs to one window, or, without
    `whole_parameters`, to one at most."""
    names: set[str] = set()
    covered: dict[int, tuple[str, Tensor]] = {}
    for pair in pairs:
        if pair.name in names:
            raise ValueError(f"two pairs are called {pair.name}: give every pair its own name")
        names.add(pair.name)
        for window in (*pair.a.windows, *pair.b.windows):
            parameter = window.parameter
            _, count = covered.setdefault(id(parameter), (pair.name, torch.zeros(parameter.shape, dtype=torch.uint8)))
            window.view(count).add_(1)
            if bool((count > 1).any()):
                raise ValueError(
                    f"pair {pair.name} overlaps with another: an entry of a parameter has one pair at most"
                )
    for name, count in covered.values():
        if whole_parameters and bool((count == 0).any()):
            raise ValueError(
                f"a parameter of shape {tuple(count.shape)} belongs to pair {name} in part only, and optimizers move "
                "parameters as a whole: leave that kind of pair out"
            )


def check_held(pairs: Iterable[Pair], held: set[int]) -> None:
    """TypeError for what is no pair, ValueError for a pair that has no parameter among those held, by id, unless all of
    it is frozen."""
    for pair in pairs:
        if not isinstance(pair, Pair):
            raise TypeError(f"pairs are objects of class Pair, got {type(pair).__name__}: Pair.of(a, b) makes one")
        frozen = all(isinstance(p, torch.nn.Parameter) and not p.requires_grad for p in pair.parameters)
        if not frozen and held.isdisjoint(map(id, pair.parameters)):
            raise ValueError(
                f"the optimizer holds no parameter of pair {pair.name}: leave it out, or, if parameters of the model "
                "were replaced since (fully_shard does so), find its pairs anew"
            )


def batched(x: Tensor) -> Tensor:
    return x.unsqueeze(0)


def as_it_is(x: Tensor) -> Tensor:
    return x
