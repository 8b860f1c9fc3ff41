"""The normalized transformer: every state and every matrix on unit spheres in the stream's d dimensions [nGPT].

A residual update is h ← N(h + |α| ⊙ (N(f(h)) − h)), N(x) = x / |x|, f attention or MLP. There are no other norms, no
biases, no weight decay and no warm-up; embedding and head are not tied. How matrices stay on their spheres:
`gaugekit.nn.spheres`.

Shapes: x (..., n, d), tokens are rows; h heads of dimension k, query head i uses key/value head i // (h/g)
------
query (hk, d), key, value (gk, d)     unit rows          out (d, hk)     unit columns
up, gate (f, d)                       unit rows          down (d, f)     unit columns
embedding, head (vocab, d)            unit rows

Scales act as weight · init / scale and start with weight = scale:
α of attention and of MLP     (d,)       init 0.05   scale 1/√d   one each a block
s_qk, shared by q and k       (h, k)     init 1      scale 1/√d   after rotary and N; scores times √k
s_u; s_v of the gate          (f,)       init 1      scale 1      the gate has √d besides
s_z of the logits             (vocab,)   init 1      scale 1/√d

Half precisions: states are normalized in float32 and rounded, so that norms are 1 to rounding of the dtype. Scales may
stay in float32 beside matrices in half precision.

Source: [nGPT] Loshchilov, Hsieh, Sun and Ginsburg, arXiv 2410.01131, section 2.
"""

from __future__ import annotations

import math
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugekit.geometry.rows import wide
from gaugekit.geometry.sphere import lerp, project
from gaugekit.nn.decoding import Activation, attended
from gaugekit.nn.rotary import rotary
from gaugekit.nn.spheres import Reader, Rows, Unit, Writer

__all__ = [
    "HypersphereAttention",
    "HypersphereBlock",
    "HypersphereMLP",
    "HypersphereTransformer",
    "Scale",
]


class Scale(nn.Module):
    """A learned scale: the call gives weight · (init / scale), `shape`, which starts as `init`; weight as `scale`.

    Adam moves the weight by its learning rate, and so what acts by init / scale times that. ValueError unless `init` is
    finite and `scale` positive and finite.
    """

    def __init__(self, shape: int | tuple[int, ...], init: float, scale: float, device=None, dtype=None) -> None:
        super().__init__()
        if not (math.isfinite(init) and math.isfinite(scale) and scale > 0):
            raise ValueError(f"init must be finite and scale positive and finite, got init {init}, scale {scale}")
        self.init, self.scale = init, scale
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.scale)

    def forward(self) -> Tensor:
        return self.weight * (self.init / self.scale)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, init={self.init}, scale={self.scale:.4g}"


class _Composed(nn.Module):
    def reset_parameters(self) -> None:
        """All parts anew: after `to_empty`, when made on the meta device."""
        for part in self.modules():
            if isinstance(part, Unit | Scale):
                part.reset_parameters()


class HypersphereAttention(_Composed):
    """softmax(√k q kᵀ) v with q ← s_qk ⊙ N(rotary(q)) and k likewise, then `out`; (..., n, d) to (..., n, d).

    s_qk (h, k) on both gives the scores of s_qk² on queries alone, which is what is computed. So where g < h there is
    one vector a query head still, as if each had its own copy of the key.

    Args:
        width: d.
        heads: h.
        kv_heads: g, a divisor of h. Default h.
        head_dim: k, even. Default d // h.
        causal: whether tokens see the tokens before them and themselves only.
        rotary_base: see `rotary`; None: nothing is turned, which [nGPT] does not have.

    Raises: ValueError for sizes that do not fit, or an input of another width.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        rotary_base: float | None = 10000.0,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        _check_sizes(width=width, heads=heads)
        if head_dim is None and width % heads:
            raise ValueError(f"{heads} heads do not divide width {width}: give head_dim")
        self.width, self.heads = width, heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = width // heads if head_dim is None else head_dim
        _check_sizes(kv_heads=self.kv_heads, head_dim=self.head_dim)
        if heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {self.kv_heads} and {heads}")
        if rotary_base is not None and self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if rotary_base is not None and not (math.isfinite(rotary_base) and rotary_base > 0):
            raise ValueError(f"rotary_base must be positive and finite, got {rotary_base}")
        self.causal, self.rotary_base = causal, rotary_base
        inner, shared = heads * self.head_dim, self.kv_heads * self.head_dim
        self.query = Reader(width, inner, device, dtype)
        self.key = Reader(width, shared, device, dtype)
        self.value = Reader(width, shared, device, dtype)
        self.out = Writer(inner, width, device, dtype)
        self.s_qk = Scale((heads, self.head_dim), 1.0, width**-0.5, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        def scaled(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            base = self.rotary_base
            q, k = (project(wide(z if base is None else rotary(z, base))) for z in (q, k))
            return q * self.s_qk().square().unsqueeze(1), k

        maps = (self.query, self.key, self.value)
        return self.out(attended(x, maps, self.head_dim, scaled, causal=self.causal, scale=math.sqrt(self.head_dim)))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}, rotary_base={self.rotary_base}"


class HypersphereMLP(_Composed):
    """down(s_u ⊙ up(x) ⊙ silu(√d s_v ⊙ gate(x))), (..., d) to (..., d), of `hidden` = f units.

    √d as entries of up(x) and gate(x) are cosines in d dimensions, of size 1/√d, where silu is next to linear.

    With activation "gelu" or "relu", of which [nGPT] does not speak, down(act(√d s_u ⊙ up(x))): no gate and no s_v.
    """

    def __init__(self, width: int, hidden: int, activation: Activation = "swiglu", device=None, dtype=None) -> None:
        super().__init__()
        _check_sizes(width=width, hidden=hidden)
        if activation not in get_args(Activation):
            raise ValueError(f"activation must be one of {', '.join(get_args(Activation))}, got {activation!r}")
        self.width, self.activation = width, activation
        self.up = Reader(width, hidden, device, dtype)
        self.s_u = Scale(hidden, 1.0, 1.0, device, dtype)
        gated = activation == "swiglu"
        self.gate = Reader(width, hidden, device, dtype) if gated else None
        self.s_v = Scale(hidden, 1.0, 1.0, device, dtype) if gated else None
        self.down = Writer(hidden, width, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        u, stretch = self.up(x), math.sqrt(self.width)
        if self.gate is None or self.s_v is None:
            units = u * (stretch * self.s_u())
            units = F.gelu(units) if self.activation == "gelu" else F.relu(units)
        else:
            units = u * self.s_u() * F.silu(self.gate(x) * (stretch * self.s_v()))
        return self.down(units.to(u.dtype))


class HypersphereBlock(_Composed):
    """h ← N(h + |α| ⊙ (N(f(h)) − h)) for f attention, then for f MLP; (..., n, d), and |h| = 1 to rounding after it.

    Attention and MLP may be any modules from (..., n, d) to (..., n, d). They get h as it is; the sum takes N(h), which
    differs for an h from elsewhere only.
    """

    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module, device=None, dtype=None) -> None:
        super().__init__()
        _check_sizes(width=width)
        self.attention, self.mlp = attention, mlp
        self.alpha_attention = Scale(width, 0.05, width**-0.5, device, dtype)
        self.alpha_mlp = Scale(width, 0.05, width**-0.5, device, dtype)

    def forward(self, h: Tensor) -> Tensor:
        h = lerp(h, self.attention(h), self.alpha_attention().abs())
        return lerp(h, self.mlp(h), self.alpha_mlp().abs())


class HypersphereTransformer(_Composed):
    """Logits (..., n, vocab) of tokens (..., n): embedding, blocks, head, times s_z. Arguments as of the parts.

    Parameters: 2 vocab d + vocab in embedding, head and s_z; (2hk + 2gk + 3f + 2) d + hk + 2f a block.
    """

    def __init__(
        self,
        vocab: int,
        width: int,
        layers: int,
        heads: int,
        hidden: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        rotary_base: float = 10000.0,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        _check_sizes(vocab=vocab, width=width, layers=layers)
        self.embedding = Rows(vocab, width, device=device, dtype=dtype)
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            attention = HypersphereAttention(width, heads, kv_heads, head_dim, causal, rotary_base, device, dtype)
            mlp = HypersphereMLP(width, hidden, device=device, dtype=dtype)
            self.blocks.append(HypersphereBlock(width, attention, mlp, device, dtype))
        self.head = Reader(width, vocab, device, dtype)
        self.s_z = Scale(vocab, 1.0, width**-0.5, device, dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        return (logits * self.s_z()).to(logits.dtype)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
