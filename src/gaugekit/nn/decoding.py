"""The two branches of an ordinary decoder block: causal attention of standard heads, and an MLP.

Shapes
------
x (..., n, d)                   tokens are rows
query (hk, d), key, value (gk, d), out (d, hk)      h heads of dimension k; query head i uses key/value head i // (h/g)
up, gate (f, d), down (d, f)    f units
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from gaugekit.nn.fused import fused_attention
from gaugekit.nn.rotary import rotary

__all__ = ["MLP", "CausalAttention", "attended"]

Activation = Literal["gelu", "relu", "swiglu"]


class CausalAttention(nn.Module):
    """out(softmax(q kᵀ / √k, on the tokens up to each) v), (..., n, d) to (..., n, d).

    Redundant as all standard heads are: GL(k) on values and outputs of a key/value head, GL(k) on queries and keys, or
    with rotary positions what commutes with their turns. `gaugekit.pairs` finds both.

    Args:
        width: d.
        heads: h, a divisor of d; k = d/h.
        kv_heads: g, a divisor of h. Default h.
        bias: whether the four maps have biases.
        rotary_base: see `rotary`, k even; None: nothing is turned.

    Raises: ValueError for sizes that do not fit, or an input of another width.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        bias: bool = False,
        rotary_base: float | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if min(width, heads, kv_heads) < 1 or width % heads or heads % kv_heads:
            raise ValueError(f"heads must divide width and kv_heads heads, got {width}, {heads}, {kv_heads}")
        self.width, self.heads, self.kv_heads, self.head_dim = width, heads, kv_heads, width // heads
        if rotary_base is not None and (self.head_dim % 2 or not (math.isfinite(rotary_base) and rotary_base > 0)):
            raise ValueError(
                f"rotary positions need an even head dimension and a positive base, got {self.head_dim}, {rotary_base}"
            )
        self.rotary_base = rotary_base
        shared = kv_heads * self.head_dim
        self.query = nn.Linear(width, width, bias, device, dtype)
        self.key = nn.Linear(width, shared, bias, device, dtype)
        self.value = nn.Linear(width, shared, bias, device, dtype)
        self.out = nn.Linear(width, width, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        def turned(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            base = self.rotary_base
            return (q, k) if base is None else (rotary(q, base), rotary(k, base))

        maps = (self.query, self.key, self.value)
        return self.out(attended(x, maps, self.head_dim, turned, causal=True, scale=self.head_dim**-0.5))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, rotary_base={self.rotary_base}"


def attended(
    x: Tensor,
    maps: tuple[nn.Linear, nn.Linear, nn.Linear],
    head_dim: int,
    prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """What heads give to the output map, (..., n, hk) side by side, for states x (..., n, d).

    Args:
        maps: of queries, keys and values.
        prepare: what is done to queries (b, h, n, k) and keys (b, g, n, k) before they are compared, in any dtype.
        causal, scale: as in `fused_attention`.

    Raises: ValueError for an input of another width.
    """
    if x.ndim < 2 or x.shape[-1] != maps[0].in_features:
        raise ValueError(f"input must be (..., tokens, {maps[0].in_features}), got {tuple(x.shape)}")
    rows = x.unsqueeze(0).flatten(0, -3)
    q, k, v = (read(rows).unflatten(-1, (-1, head_dim)).transpose(1, 2) for read in maps)
    # Rounded once, to the dtype of v, which under autocast is not that of x.
    q, k = (z.to(v.dtype) for z in prepare(q, k))
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = (z.unsqueeze(2).expand(-1, -1, share, -1, -1).flatten(1, 2) for z in (k, v))
    heads = fused_attention(q, k, v, None, causal=causal, scale=scale).transpose(1, 2).flatten(2)
    return heads.reshape(*x.shape[:-1], heads.shape[-1])


class MLP(nn.Module):
    """down(gelu(up(x))), down(relu(up(x))), or down(up(x) ⊙ silu(gate(x))), of `hidden` = f units.

    (..., d) to (..., d). GELU is that of erf. Source of swiglu: Shazeer, arXiv 2002.05202.
    """

    def __init__(
        self, width: int, hidden: int, activation: Activation = "gelu", bias: bool = False, device=None, dtype=None
    ) -> None:
        super().__init__()
        if activation not in get_args(Activation):
            raise ValueError(f"activation must be one of {', '.join(get_args(Activation))}, got {activation!r}")
        if min(width, hidden) < 1:
            raise ValueError(f"sizes must be at least 1, got width {width}, hidden {hidden}")
        self.activation = activation
        self.up = nn.Linear(width, hidden, bias, device, dtype)
        self.gate = nn.Linear(width, hidden, bias, device, dtype) if activation == "swiglu" else None
        self.down = nn.Linear(hidden, width, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        u = self.up(x)
        if self.gate is not None:
            return self.down(u * F.silu(self.gate(x)))
        return self.down(F.gelu(u) if self.activation == "gelu" else F.relu(u))

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
