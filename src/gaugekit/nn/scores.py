"""Scores of relational attention: s_ij = f(G_ij, G_ii, G_jj) for states that are known through G = X Xᵀ only.

Two kinds. An `InnerScore` is an inner product of features up to a constant per query, which the softmax does not
see; attention by it is plain scaled dot-product attention on those features. Any other callable
f(g_ij, g_ii, g_jj, head), such as `LearnedScore`, is applied entry by entry.

Shapes
------
query      (..., h, n, k)   h heads; (n, k) alone is one head
key        (..., h, m, k)
g_ij       (b, q, r)        a tile of x_i · k_j for one head; g_ii (b, q, 1) and g_jj (b, 1, r) broadcast against it
per head   () or (h,)       temperatures and widths; a float is one number for all heads
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["RBF", "Bilinear", "Cosine", "Dot", "InnerScore", "LearnedScore", "Score", "resolved", "unit"]

Score = Callable[[Tensor, Tensor, Tensor, "int | Tensor"], Tensor]
"""f(g_ij, g_ii, g_jj, head) -> scores that broadcast to g_ij; `LearnedScore` says what is asked of it."""

HALF_STEPS = {torch.float16: (2.0**12, 2.0**2, 2.0**-8), torch.bfloat16: (1.0, 1.0, 1.0)}
"""What each of three half-precision columns counts in, so that together they hold a float32 number of float16's range
squared: float16 has 11 bits and ends at 65504, bfloat16 has 8 bits and float32's range."""


class InnerScore(nn.Module, ABC):
    """A score with s_ij / τ = scale · q_i·k_j + c_i: features q, k and one number, c_i left to the softmax."""

    @abstractmethod
    def factors(self, query: Tensor, key: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor, float]:
        """q (..., h, n, w), k (..., h, m, w) and the scale, for one width w of the score's own.

        A float temperature goes into the scale, which costs and rounds nothing; a tensor, which may want a gradient,
        goes into q.
        """

    def start(self, k: int) -> float:
        """The temperature at which `RelationalAttention` starts, for states of about unit variance in k channels."""
        return math.sqrt(k)


class Dot(InnerScore):
    """s_ij = x_i · k_j. Unchanged by X → X Uᵀ, U in O(k)."""

    def factors(self, query: Tensor, key: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor, float]:
        query, scale = _weighed(query, 1 / temperature)
        return query, key, scale


class Cosine(InnerScore):
    """s_ij = x_i · k_j / (‖x_i‖ ‖k_j‖), between −1 and 1. Unchanged by O(k) and by the lengths of the states.

    A zero vector scores 0 against everything and gets a zero gradient. Lengths are found without overflow or underflow.
    Where the input is half precision, unit vectors are rounded to it: scores are off by 2⁻⁸ (bfloat16) or 2⁻¹¹.
    """

    def factors(self, query: Tensor, key: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor, float]:
        direction = unit(query)
        keys = direction if key is query else unit(key)
        weighed, scale = _weighed(direction, 1 / temperature)
        return weighed.to(query.dtype), keys.to(key.dtype), scale

    def start(self, k: int) -> float:
        """1/√k, the temperature of unit vectors in nGPT [nGPT 2.3.2]: logits between −√k and √k."""
        return 1 / math.sqrt(k)


class RBF(InnerScore):
    """s_ij = −‖x_i − k_j‖² / 2σ². Unchanged by O(k), and by a common translation of queries and keys.

    −‖x_i − k_j‖²/2 = x_i·k_j − ‖k_j‖²/2 − ‖x_i‖²/2, whose last term drops out of the softmax: q = [x, 1] and
    k = [k, −‖k‖²/2]. The expansion costs digits: scores are off by about eps · ‖x‖‖k‖ / σ²τ with the eps of float32
    (float64 for float64 input), so centre states whose mean is far from zero. Half-precision inputs keep that float32
    accuracy, because −‖k‖²/2 is carried by three half-precision columns that sum to it; a σ or τ that is a tensor is
    folded into q, which is rounded to half precision again (2⁻⁹ or 2⁻¹² of ‖x‖‖k‖ / σ²τ). ‖k‖² must be below 3e38.

    Args:
        sigma: σ > 0, a float or a () or (h,) tensor; an `nn.Parameter` is learned. σ² and the temperature enter as
            their product, so learn one of them.
    """

    sigma: float | Tensor

    def __init__(self, sigma: float | Tensor = 1.0) -> None:
        super().__init__()
        if isinstance(sigma, float | int) and not sigma > 0:
            raise ValueError(f"sigma must be positive, got {sigma}")
        _hold(self, "sigma", sigma)

    def factors(self, query: Tensor, key: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor, float]:
        weight = 1 / (self.sigma * self.sigma * temperature)
        wide = key.to(_statistic_dtype(key))
        bias = wide.square().sum(-1, keepdim=True) * -0.5
        if isinstance(weight, Tensor):  # in the statistics' precision here, so that it is not rounded twice
            bias = bias * _per_head(weight, key)
        weighed, scale = _weighed(query, weight)
        steps, columns = _spread(bias, key.dtype)
        ones = torch.tensor(steps, dtype=query.dtype, device=query.device).expand(*query.shape[:-1], len(steps))
        return torch.cat([weighed, ones], -1), torch.cat([key, *columns], -1), scale


class Bilinear(InnerScore):
    """s_ij = x_i A k_jᵀ. Unchanged by X → X Uᵀ only if A turns along, A → U A Uᵀ: A carries a frame of its own.

    Args:
        left: A (k, k) or one per head (h, k, k); with `right`, the L of A = L Rᵀ, (k, r) or (h, k, r).
        right: R, of the shape of L.
        symmetric: use (A + Aᵀ)/2 in place of A (of rank up to 2r where A = L Rᵀ), so that s_ij = s_ji.

    An `nn.Parameter` is learned; any other tensor is a buffer, through which gradients still flow. Cost O((n + m) k²)
    beside the attention itself, O((n + m) k r) with `right`.

    Raises:
        ValueError: shapes that do not make a square A.
    """

    left: Tensor
    right: Tensor | None

    def __init__(self, left: Tensor, right: Tensor | None = None, *, symmetric: bool = False) -> None:
        super().__init__()
        if right is None and (left.ndim not in (2, 3) or left.shape[-1] != left.shape[-2]):
            raise ValueError(f"A must be (k, k) or (h, k, k), got {tuple(left.shape)}; pass L and R for A = L Rᵀ")
        if right is not None and (left.ndim not in (2, 3) or left.shape != right.shape):
            raise ValueError(
                f"L and R must both be (k, r) or (h, k, r), got {tuple(left.shape)} and {tuple(right.shape)}"
            )
        _hold(self, "left", left)
        _hold(self, "right", right)
        self.symmetric = symmetric

    def factors(self, query: Tensor, key: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor, float]:
        left = self.left.to(query.dtype)
        _fits_heads(left.shape[:-2], query)
        if left.shape[-2] != query.shape[-1]:
            raise ValueError(f"A acts on {left.shape[-2]} channels, the states have {query.shape[-1]}")
        if self.right is None:
            turned = query @ ((left + left.mT) / 2 if self.symmetric else left)
        else:
            right = self.right.to(query.dtype)
            turned = (query @ left) @ right.mT
            if self.symmetric:
                turned = (turned + (query @ right) @ left.mT) / 2
        turned, scale = _weighed(turned, 1 / temperature)
        return turned, key, scale


class LearnedScore(nn.Module):
    """f = g_ij + Σ_m ±relu(a_m g_ij + b_m g_ii + c_m g_jj + e_m), its own 4 × units numbers for each head.

    A piecewise linear function of the three invariants, unchanged by O(k). At the start it is g_ij, the dot product
    (√k as the temperature makes it the scaled one): units come in pairs that differ in sign only and cancel exactly,
    while their gradients do not. Signs + and − alternate and are fixed, and g_ij counts once: a weight on a unit could
    be absorbed by the numbers inside it, and a weight on g_ij by the temperature.

    What any f is asked to be, this class or your own `nn.Module`: a function of its arguments entry by entry,
    deterministic, with tensor operations that broadcast (b, q, 1) and (b, 1, r) against (b, q, r). `head` is an int. On
    CUDA, FlexAttention gives it 0-d tensors instead, the head among them, and wants every parameter to be read by an
    index down to a number: `self.gain[head]`, `self.bend[0]`.

    Args:
        heads: h.
        units: even, at least 2.
        generator: for the starting numbers, ½ <= |a| <= 1 and |e| <= 1, uniformly; b = c = 0.
    """

    def __init__(self, heads: int, units: int = 8, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if heads < 1 or units < 2 or units % 2:
            raise ValueError(f"at least one head and an even number of units, got {heads} and {units}")
        start = torch.zeros(heads, units // 2, 4)
        start[..., 0] = 0.5 + 0.5 * torch.rand(heads, units // 2, generator=generator)
        start[:, 1::2, 0] *= -1  # rising and falling
        start[..., 3] = 2 * torch.rand(heads, units // 2, generator=generator) - 1
        self.units = nn.Parameter(start.repeat_interleave(2, 1))  # (heads, units, 4)

    def forward(self, g_ij: Tensor, g_ii: Tensor, g_jj: Tensor, head: int | Tensor) -> Tensor:
        if isinstance(head, Tensor):  # FlexAttention: scalars, one by one
            numbers = [[self.units[head, m, i] for m in range(self.units.shape[1])] for i in range(4)]
            a, rows, columns = numbers[0], [g_ii * b + e for b, e in zip(*numbers[1::2], strict=True)], numbers[2]
            return g_ij + _units(g_ij, a, rows, [g_jj * c for c in columns])
        a, b, c, e = self.units[head].mT[..., None, None, None].unbind()  # (units, 1, 1, 1)
        return _Units.apply(g_ij, a.flatten(), g_ii * b + e, g_jj * c).add_(g_ij)  # type: ignore[union-attr]


def _units(g: Tensor, slopes: Sequence[Tensor], rows: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
    """Σ_m ±relu(slope_m g + row_m + column_m), the signs alternating."""
    terms = [torch.relu(g * a + row + column) for a, row, column in zip(slopes, rows, columns, strict=True)]
    pairs = [up - down for up, down in zip(terms[::2], terms[1::2], strict=True)]
    return functools.reduce(torch.add, pairs)


class _Units(torch.autograd.Function):
    """`_units` of a tile in few passes over it and with little memory: its arguments are all it keeps.

    g (b, q, r), slopes (units,), rows (units, b, q, 1), columns (units, b, 1, r).
    """

    @staticmethod
    def forward(ctx, g: Tensor, slopes: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(g, slopes, rows, columns)
        total, term = torch.zeros_like(g), torch.empty_like(g)
        for m, a in enumerate(slopes.tolist()):
            torch.add(rows[m], columns[m], out=term).add_(g, alpha=a).relu_()
            total.add_(term, alpha=-1 if m % 2 else 1)
        return total

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        g, slopes, rows, columns = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = [x.view_as(x) for x in ctx.saved_tensors]
            wanted = [x for x in inputs if x.requires_grad]
            found = iter(torch.autograd.grad(_units(*inputs), wanted, grad_outputs, create_graph=True))
            return tuple(next(found) if x.requires_grad else None for x in inputs)
        up = grad_outputs[0]
        down, term, part = -up, torch.empty_like(g), torch.empty_like(g)
        d_g, d_slopes, d_rows, d_columns = (torch.zeros_like(x) for x in (g, slopes, rows, columns))
        for m, a in enumerate(slopes.tolist()):
            torch.add(rows[m], columns[m], out=term).add_(g, alpha=a)
            torch.ops.aten.threshold_backward.grad_input(down if m % 2 else up, term, 0.0, grad_input=part)
            d_g.add_(part, alpha=a)
            d_slopes[m] = torch.dot(part.view(-1), g.reshape(-1))
            torch.sum(part, -1, keepdim=True, out=d_rows[m])
            torch.sum(part, -2, keepdim=True, out=d_columns[m])
        return d_g, d_slopes, d_rows, d_columns


NAMED: dict[str, type[InnerScore]] = {"dot": Dot, "cosine": Cosine, "rbf": RBF}


def resolved(score: str | InnerScore | Score) -> InnerScore | Score:
    """The score of a name, or the score itself.

    Raises:
        ValueError: no such name, or one whose score has numbers of its own to be given.
    """
    if not isinstance(score, str):
        return score
    if score not in NAMED:
        needs = {"bilinear": "Bilinear(A)", "learned": "LearnedScore(heads)"}
        hint = f"pass {needs[score]}" if score in needs else f"use one of {', '.join(NAMED)} or a score object"
        raise ValueError(f"unknown score {score!r}: {hint}")
    return NAMED[score]()


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖ along the last axis, in float32 or better; 0 with a zero gradient at the zero vector.

    Divided by the largest entry first, which changes neither the direction nor its derivatives: entries of 1e30 or
    1e-30 are as good as any.
    """
    x = x.to(_statistic_dtype(x))
    if x.shape[-1] == 0:
        return x
    tiny = torch.finfo(x.dtype).tiny
    x = x / x.detach().abs().amax(-1, keepdim=True).clamp_min_(tiny)
    square = x.square().sum(-1, keepdim=True)  # at least 1, but for a zero vector or a subnormal one
    return x * (square.clamp_min(tiny).rsqrt() * (square > 0))


def _statistic_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in HALF_STEPS else x.dtype


def _hold(module: nn.Module, name: str, value: float | Tensor | None) -> None:
    """A parameter as a parameter, another tensor as a buffer, a number as it is."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        module.register_buffer(name, value)
    else:
        setattr(module, name, value)


def _per_head(weight: Tensor, x: Tensor) -> Tensor:
    """() or (h,) as a factor of x (..., h, n, k)."""
    _fits_heads(weight.shape, x)
    return weight[..., None, None]


def _fits_heads(lead: Sequence[int], x: Tensor) -> None:
    if len(lead) > 1 or (len(lead) and lead[0] != (x.shape[-3] if x.ndim > 2 else None)):
        raise ValueError(f"the score's numbers per head, {tuple(lead)}, do not fit x of shape {tuple(x.shape)}")


def _weighed(q: Tensor, weight: float | Tensor) -> tuple[Tensor, float]:
    """q and the scale that together are q · weight."""
    if isinstance(weight, Tensor):
        return (q * _per_head(weight, q)).to(q.dtype), 1.0
    return q, weight


def _spread(number: Tensor, dtype: torch.dtype) -> tuple[tuple[float, ...], list[Tensor]]:
    """Columns of `dtype` and their steps with Σ step · column = number, (..., 1), to float32 accuracy.

    The gradient is that of the middle column: in float16 a step of 2¹² would bring it near the end of the range, one of
    2⁻⁸ near its beginning.
    """
    if dtype not in HALF_STEPS:
        return (1.0,), [number.to(dtype)]
    coarse, middle, fine = HALF_STEPS[dtype]
    high = (number.detach() / coarse).to(dtype)
    rest = number - high.float() * coarse
    low = (rest / middle).to(dtype)
    lowest = ((rest.detach() - low.detach().float() * middle) / fine).to(dtype)
    return (coarse, middle, fine), [high, low, lowest]
