"""Relational attention: who attends to whom is decided by lengths and angles of the states alone [FR IV].

s_ij = f(G_ij, G_ii, G_jj), a_ij = softmax over j of s_ij / τ, y_i = Σ_j a_ij x_j, with G = X Xᵀ. Turning all states,
X → X Uᵀ with U in O(k), leaves the weights a as they are and turns y along.

Shapes
------
x          (..., h, n, k)   states, n tokens as h heads see them; (n, k) alone is one head
key        (..., h, m, k)   states attended to
value      (..., h, m, u)
b, n, d    batch, tokens, width of `RelationalAttention`; k = d for frame="full", d / h for frame="split"
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from gaugekit.nn.blockwise import blockwise_attention
from gaugekit.nn.flexible import flexible_attention
from gaugekit.nn.fused import flat_mask, fused_attention
from gaugekit.nn.scores import Bilinear, InnerScore, LearnedScore, Score, resolved

__all__ = ["RelationalAttention", "RelationalCache", "relational_attention"]


def relational_attention(
    x: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    score: str | InnerScore | Score = "dot",
    temperature: float | Tensor = 1.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Attention whose weights depend on G_ij = x_i·k_j, G_ii = ‖x_i‖² and G_jj = ‖k_j‖² only.

    Args:
        x: queries (..., h, n, k), any floating dtype.
        key: (..., h, m, k), by default x.
        value: (..., h, m, u), by default the keys.
        score: "dot", "cosine", "rbf" (σ = 1), an `InnerScore`, or any f(g_ij, g_ii, g_jj, head) such as `LearnedScore`.
            f is told the head as the index on axis −3.
        temperature: τ > 0, a float or a () or (h,) tensor, which may want a gradient. τ = 1 is no scaling: ordinary
            attention is "dot" at √k.
        is_causal: query i sees the keys up to m − n + i, that is, the last query sees the last key.
        attn_mask: broadcastable to (..., h, n, m); bool, True where a key may be seen, or added to s/τ. With an f, it
            gets no gradient. Combines with `is_causal`.

    Returns:
        y (..., h, n, u) in the dtype of x. A query that may see no key gets zeros, and gives zero gradients.

    What is preserved: for U in O(k) the weights are unchanged by (x, key) → (x Uᵀ, key Uᵀ), to rounding; without
    `value` the output turns along. `Bilinear` needs its A turned as well.

    Memory is O(n + m), in the forward pass and the backward pass. An `InnerScore` is one call of PyTorch's
    `scaled_dot_product_attention` (one per 512 queries where causality meets a mask or other keys than queries); an f
    goes through FlexAttention on CUDA and in tiles elsewhere. Second derivatives (`create_graph=True`) hold n × m
    matrices, and are not to be had from FlexAttention; those of `torch.func` are not supported. Under autocast all
    of x, key and value are cast; squared lengths, norms and the arithmetic of an f stay in float32 or better.

    Raises:
        TypeError: not floating point, or not all of one dtype.
        ValueError: shapes that do not fit, a temperature that is not positive (a tensor is not looked into), an unknown
            score, causality with fewer keys than queries, or what an f is refused for (`blockwise_attention`).
    """
    key = x if key is None else key
    value = key if value is None else value
    score = resolved(score)
    temperature = _checked(x, key, value, temperature, attn_mask, is_causal)
    if torch.is_autocast_enabled(x.device.type):
        x, key, value = _cast((x, key, value), torch.get_autocast_dtype(x.device.type))
    if isinstance(score, InnerScore):
        q, k, scale = score.factors(x, key, temperature)
        mask = _mask(attn_mask, x, x.dtype)
        out = fused_attention(_flat(q), _flat(k), _flat(value), mask, causal=is_causal, scale=scale)
    else:
        out = _by_function(x, key, value, score, temperature, is_causal, attn_mask)
    return out.reshape(*x.shape[:-1], value.shape[-1])


def _by_function(x, key, value, score: Score, temperature, is_causal: bool, attn_mask) -> Tensor:
    heads = x.shape[-3] if x.ndim > 2 else 1
    wide = torch.promote_types(x.dtype, torch.float32)
    inverse = (1 / torch.as_tensor(temperature, dtype=wide, device=x.device)).expand(heads)
    mask = _mask(attn_mask, x, wide)
    if x.is_cuda and x.dtype != torch.float64:
        return flexible_attention(_flat(x), _flat(key), _flat(value), score, inverse, mask, causal=is_causal)
    q, k, v = (_flat(t) for t in _cast((x, key, value), wide))
    return blockwise_attention(q, k, v, score, inverse, mask, causal=is_causal).to(x.dtype)


def _checked(x: Tensor, key: Tensor, value: Tensor, temperature, mask: Tensor | None, causal: bool) -> float | Tensor:
    """The temperature, once everything fits together."""
    for name, t in (("x", x), ("key", key), ("value", value)):
        if not t.is_floating_point():
            raise TypeError(f"{name} must be real floating point, got {t.dtype}")
        if t.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"x, key and value must share one dtype, got {x.dtype} and {t.dtype} for {name}")
        if t.ndim < 2 or t.shape[:-2] != x.shape[:-2]:
            lead = ", ".join(map(str, (*x.shape[:-2], "tokens", "channels")))
            raise ValueError(f"{name} must be ({lead}), the leading axes being those of x, got {tuple(t.shape)}")
    n, m = x.shape[-2], key.shape[-2]
    if key.shape[-1] != x.shape[-1]:
        raise ValueError(f"keys have {key.shape[-1]} channels, queries {x.shape[-1]}")
    if value.shape[-2] != m:
        raise ValueError(f"{m} keys but {value.shape[-2]} values")
    if causal and n > m:
        raise ValueError(f"is_causal needs at least as many keys as queries, got {m} keys for {n} queries")
    if mask is not None:
        whole = (*x.shape[:-2], n, m)
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(f"attn_mask must be bool or floating point, got {mask.dtype}")
        if mask.ndim > len(whole) or any(a not in (1, b) for a, b in zip(mask.shape[::-1], whole[::-1], strict=False)):
            raise ValueError(f"attn_mask {tuple(mask.shape)} does not broadcast to (..., queries, keys) = {whole}")
    if isinstance(temperature, Tensor):
        heads = x.shape[-3] if x.ndim > 2 else None
        if temperature.shape not in ((), (heads,)):
            raise ValueError(f"temperature must be a number or one per head, got {tuple(temperature.shape)}")
        return temperature
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return float(temperature)


def _cast(tensors: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """All in one dtype, and what is one tensor stays one. float64 is left alone, as autocast does."""
    x, key, value = tensors
    if x.dtype == torch.float64:
        return tensors
    cast_x = x.to(dtype)
    cast_key = cast_x if key is x else key.to(dtype)
    return cast_x, cast_key, cast_key if value is key else value.to(dtype)


def _flat(t: Tensor) -> Tensor:
    """(b, h, n, k) of any (..., n, k)."""
    return t[(None,) * (4 - t.ndim)] if t.ndim < 4 else t.flatten(0, -4)


def _mask(mask: Tensor | None, x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`flat_mask`, what is added to scores in their dtype."""
    if mask is None:
        return None
    return flat_mask(mask if mask.dtype == torch.bool else mask.to(dtype), x.shape[:-3])


class RelationalCache:
    """The states a `RelationalAttention` has seen, for generation: one object a layer, empty at first.

    Keys are the states themselves, and so are the values if these are plain: one tensor (b, n, d), half of what a
    standard cache of keys and values holds. values="linear" keeps its projected values beside them: the standard size.
    """

    def __init__(self) -> None:
        self.states: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens seen."""
        return 0 if self.states is None else self.states.shape[-2]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.states, self.values) if t is not None)

    def append(self, states: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """All states and values, these new ones last."""
        self.states = states if self.states is None else torch.cat([self.states, states], -2)
        if values is not None:
            self.values = values if self.values is None else torch.cat([self.values, values], -2)
        return self.states, self.values


class RelationalAttention(nn.Module):
    """Multi-head attention with relational weights: no W_Q and no W_K.

    What is preserved under X → X Uᵀ (to rounding; a `Bilinear` score also needs its A turned):

    - values="plain": the weights, and the output turns along. y_i = Σ_heads w_h Σ_j a_ij x_j, one number w per head, if
      frame="full"; the heads' means of their own channels, side by side, if frame="split".
    - values="linear": the weights only. The values are x W_V and the heads are mixed by W_O, which know a frame.

    The group is O(d) for frame="full", where every head sees all of x, and O(d/h)ʰ, block by block, for frame="split",
    where head i sees channels i·k to (i+1)·k. In the full frame every head costs what d channels cost.

    Args:
        width: d.
        heads: h. With frame="split" or values="linear" it divides d.
        score: a name ("dot", "cosine", "rbf"; "bilinear": A per head, from the identity; "learned": `LearnedScore`) or
            an object as for `relational_attention`. A score that is a module is trained along.
        frame: "full" or "split".
        values: "plain" or "linear".
        temperature: where the temperatures start, a float or (h,); by default √k, or 1/√k for the cosine, and in the
            full frame spread evenly (in the logarithm) from half to twice that, since heads that see the same scores
            would otherwise stay equal. Learned per head, through the logarithm.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        score: str | InnerScore | Score = "dot",
        frame: Literal["full", "split"] = "full",
        values: Literal["plain", "linear"] = "plain",
        temperature: float | Tensor | None = None,
    ) -> None:
        super().__init__()
        if frame not in ("full", "split") or values not in ("plain", "linear"):
            raise ValueError(f"frame is 'full' or 'split' and values 'plain' or 'linear', got {frame!r} and {values!r}")
        if heads < 1 or width < 1 or (width % heads and (frame, values) != ("full", "plain")):
            raise ValueError(f"{heads} heads do not divide a width of {width}")
        self.width, self.heads, self.frame, self.values = width, heads, frame, values
        k = width if frame == "full" else width // heads
        if score == "bilinear":
            score = Bilinear(nn.Parameter(torch.eye(k).repeat(heads, 1, 1)))
        self.score = LearnedScore(heads) if score == "learned" else resolved(score)
        if temperature is None:
            temperature = self.score.start(k) if isinstance(self.score, InnerScore) else math.sqrt(k)
            if frame == "full" and heads > 1:
                temperature = temperature * torch.logspace(-1, 1, heads, base=2.0)
        start = torch.as_tensor(temperature, dtype=torch.get_default_dtype()).detach()
        sound = start.is_meta or bool((start > 0).all())
        if start.shape not in ((), (heads,)) or not sound:
            raise ValueError(f"temperature must be positive, a number or one for each of {heads} heads")
        self.log_temperature = nn.Parameter(start.log().expand(heads).clone())
        if values == "linear":
            self.value = nn.Linear(width, width, bias=False)
            self.out = nn.Linear(width, width, bias=False)
        elif frame == "full":
            self.mix = nn.Parameter(torch.full((heads,), 1 / heads))

    def forward(
        self,
        x: Tensor,
        *,
        is_causal: bool = False,
        attn_mask: Tensor | None = None,
        cache: RelationalCache | None = None,
    ) -> Tensor:
        """y (..., n, d) for x (..., n, d).

        attn_mask broadcasts to (..., h, n, m). With a cache the keys are all m states seen so far, x the last of them,
        and under is_causal the outputs are those of one pass over all.
        """
        if x.ndim < 2 or x.shape[-1] != self.width:
            raise ValueError(f"x must be (..., tokens, {self.width}), got {tuple(x.shape)}")
        states, values = x, self.value(x) if self.values == "linear" else None
        if cache is not None:
            states, values = cache.append(x, values)
        query = self._seen(x)
        key = query if states is x else self._seen(states)
        y = relational_attention(
            query,
            key,
            None if values is None else self._split(values),
            score=self.score,
            temperature=self.log_temperature.exp(),
            is_causal=is_causal,
            attn_mask=attn_mask,
        )
        if self.values == "plain" and self.frame == "full":
            return torch.einsum("...hnd,h->...nd", y, self.mix.to(y.dtype))
        y = y.transpose(-2, -3).flatten(-2)
        return self.out(y) if self.values == "linear" else y

    def _seen(self, x: Tensor) -> Tensor:
        """(..., h, n, k)"""
        if self.frame == "split":
            return self._split(x)
        return x.unsqueeze(-3).expand(*x.shape[:-2], self.heads, *x.shape[-2:])

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
