"""Attention whose parameters are the invariants of its heads, G_QK = W_QᵀW_K and G_VO = W_O W_V.

A head is seen only through these two products [FR Table 1]: score_ij = x_iᵀ G_QK x_j / √k, out_i = Σ_j a_ij G_VO x_j,
summed over heads. What GL(k) does to W_Q, W_K, W_V, W_O leaves both alone, so a module that stores them, rather than
factors, has no such redundancy.

Shapes
------
x              (..., n, d)   tokens are rows
w_q, w_o       (h, k, d)     h query heads of dimension k; w_o is the writer, out = Σ A_h X W_Vᵀ w_o[h]
w_k, w_v       (g, k, d)     g key/value heads; query head i uses i // (h/g)
G = BᵀA        (h, d, d)     A (g, r, d) reads keys or values, B (h, r, d) answers; r is the rank
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugekit.linalg import apart, beside, product_svd
from gaugekit.nn.fused import flat_mask, fused_attention
from gaugekit.nn.pivoted import PivotedProduct

__all__ = ["Heads", "InvariantAttention"]


@dataclass(frozen=True, eq=False)
class Heads:
    """Standard attention heads: w_q, w_o (h, k, d) and w_k, w_v (g, k, d), with biases b_q (h, k), b_k, b_v (g, k),
    b_o (d), each of which may be None. Scores are divided by √k; multiply w_q and b_q by what is missing if not.

    Raises:
        TypeError: a tensor is not real floating point, or not of the dtype of w_q.
        ValueError: shapes that do not fit, or a number of heads that key/value heads do not divide.
    """

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    b_o: Tensor | None = None

    def __post_init__(self) -> None:
        if self.w_q.ndim != 3 or self.w_k.ndim != 3:
            raise ValueError(f"w_q and w_k are (heads, k, d), got {tuple(self.w_q.shape)} and {tuple(self.w_k.shape)}")
        (h, k, d), g = self.w_q.shape, self.w_k.shape[0]
        if g == 0 or h % g or 0 in (h, k, d):
            raise ValueError(f"{g} key/value heads do not divide {h} query heads of shape ({k}, {d})")
        shapes = {"w_q": (h, k, d), "w_k": (g, k, d), "w_v": (g, k, d), "w_o": (h, k, d)}
        shapes |= {"b_q": (h, k), "b_k": (g, k), "b_v": (g, k), "b_o": (d,)}
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if not tensor.is_floating_point() or tensor.dtype != self.w_q.dtype:
                raise TypeError(f"{name} must have the real floating dtype of w_q, got {tensor.dtype}")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must have shape {shape} beside w_q, got {tuple(tensor.shape)}")


class InvariantAttention(nn.Module):
    """Multi-head self-attention whose parameters are G_QK and G_VO: the functions of standard heads, each written once.

    Biases: b_Q acts through one vector a head, c = W_Kᵀb_Q, of which c[pivots] (h, r) is stored; b_K, and b_Q·b_K, add
    the same to all scores of a query, to which softmax is blind, and are dropped; softmax rows sum to one, so b_V and
    b_O are one vector Σ W_O b_V + b_O (d).

    Nothing may stand between W_Q and W_K: a rotary turn or a QK-norm makes scores depend on more than G_QK, and such
    heads cannot be written so. Positions that are added to x, or to scores by `attn_mask`, are fine.

    A forward pass is one call of `scaled_dot_product_attention` (`fused_attention`), so memory is linear in n wherever
    that has a fused kernel; second derivatives are quadratic in n. With r = k it costs what standard heads cost; with
    r = d each head attends in d dimensions, d/k times as much.

    Args:
        width: d.
        heads: h.
        head_dim: k of the standard heads that this stands for: scores are divided by √k, and initialisation draws
            heads of this size. Default d // h.
        rank: r of both products. Default min(k, d), the standard heads' own, 2dk − k² numbers a matrix; d is the full
            form, d² numbers, whose training leaves the heads' rank.
        kv_heads: g. Default h. Fewer share their readers, as long as r < d.
        bias: whether there are biases.
        std: see `reset_parameters`.

    Raises:
        ValueError: sizes that do not fit.

    Source: [FR Table 1]; `PivotedProduct` for the coordinates.
    """

    query_bias: nn.Parameter | None
    output_bias: nn.Parameter | None

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int | None = None,
        rank: int | None = None,
        kv_heads: int | None = None,
        bias: bool = True,
        std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        if head_dim is None and heads > 0 and width % heads:
            raise ValueError(f"{heads} heads do not divide width {width}: give head_dim")
        self.head_dim = width // max(heads, 1) if head_dim is None else head_dim
        if min(width, heads, self.head_dim, self.kv_heads) < 1 or heads % self.kv_heads:
            raise ValueError(
                "all sizes must be at least 1 and kv_heads divide heads, got "
                f"width {width}, heads {heads}, head_dim {self.head_dim}, kv_heads {self.kv_heads}"
            )
        least = min(self.head_dim, width)
        self.rank = least if rank is None else rank
        if not least <= self.rank <= width:
            raise ValueError(f"rank must be from {least}, that of the heads, to width {width}, got {rank}")
        self.qk = PivotedProduct(width, heads, self.kv_heads, self.rank, device, dtype)
        self.vo = PivotedProduct(width, heads, self.kv_heads, self.rank, device, dtype)
        for name, shape in (("query_bias", (heads, self.rank)), ("output_bias", (width,))):
            made = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if bias else None
            self.register_parameter(name, made)
        self.reset_parameters(std)

    @torch.no_grad()
    def reset_parameters(self, std: float | None = None) -> None:
        """The invariants of newly drawn standard heads, pivots included: not iid numbers, whose products with x have
        another spectrum and, in the full form, another rank.

        Args:
            std: None draws as nn.MultiheadAttention does: readers Xavier-uniform as one fused (hk + 2gk, d) matrix,
                the writer as nn.Linear(hk, d), uniform to 1/√(hk). A number draws all four normal(0, std), as GPT-2
                does with 0.02. Biases are zero in both.
        """
        d, k, h, g = self.width, self.head_dim, self.heads, self.kv_heads

        def draw(n: int, bound: float) -> Tensor:
            weight = torch.empty(n, k, d, dtype=torch.float64, device=self.vo.columns.device)
            return weight.uniform_(-bound, bound) if std is None else weight.normal_(0.0, std)

        fused = (6 / (d + (h + 2 * g) * k)) ** 0.5
        self._set(Heads(draw(h, fused), draw(g, fused), draw(g, fused), draw(h, (h * k) ** -0.5)))

    @torch.no_grad()
    def _set(self, heads: Heads) -> None:
        h, k, d = heads.w_q.shape
        w_q, w_k, w_v, w_o = (w.double() for w in (heads.w_q, heads.w_k, heads.w_v, heads.w_o))

        def wide(bias: Tensor | None, *shape: int) -> Tensor:
            return w_q.new_zeros(shape) if bias is None else bias.double()

        # c = W_Kᵀb_Q is one more answer of the reader W_K, beside those to the d entries of x_i.
        constant = self.qk.set_(w_k, torch.cat([w_q, wide(heads.b_q, h, k).unsqueeze(-1)], -1))
        self.vo.set_(w_v, w_o)
        if self.query_bias is not None and self.output_bias is not None:
            self.query_bias.copy_(constant.squeeze(-1))
            b_v = wide(heads.b_v, self.kv_heads, k).repeat_interleave(h // self.kv_heads, 0)
            self.output_bias.copy_(torch.einsum("hkd,hk->d", w_o, b_v) + wide(heads.b_o, d))

    @classmethod
    def from_heads(cls, heads: Heads, rank: int | None = None) -> Self:
        """The same function as standard heads, to rounding in their dtype; the algebra is float64.

        The parameters depend on the heads' products only. With rank d they are these products. With less, the pivots
        are found by QR with column pivoting of the row space of each group's G_QK (with its c) and G_VO, and are the
        same for all bases of the heads unless two choices differ by rounding only. Where a product has less than full
        rank, the lowest other columns fill up the pivots.

        Args:
            heads: see `Heads`. Biases are made if it has b_q, b_v or b_o.
            rank: as in the constructor.
        """
        h, k, d = heads.w_q.shape
        bias = not (heads.b_q is None and heads.b_v is None and heads.b_o is None)
        device, dtype = heads.w_q.device, heads.w_q.dtype
        module = cls(d, h, k, rank, len(heads.w_k), bias, device="meta", dtype=dtype).to_empty(device=device)
        module._set(heads)
        return module

    @torch.no_grad()
    def to_heads(
        self, head_dim: int | None = None, kv_heads: int | None = None, tolerance: float | None = None
    ) -> Heads:
        """Standard heads of the same function, balanced: W_K W_Kᵀ = [W_Q b_Q][W_Q b_Q]ᵀ and W_V W_Vᵀ = w_o w_oᵀ, with
        the query heads of a group side by side. b_K and b_V are zero. Rows beyond a product's rank are zero.

        Args:
            head_dim: k' of the result, default k. Scores of the result are to be divided by √k', as its own are.
            kv_heads: g' of the result, a multiple of g, default g. The full form does not keep what heads share.
            tolerance: the share of a product's Frobenius norm that may be dropped as rounding, in spectral norm.
                Default 1e-10 or the eps of the parameters' dtype, whichever is larger.

        Raises:
            ValueError: a product (for G_QK, with its c) has more than rank k', as the full form has after training.
        """
        k = self.head_dim if head_dim is None else head_dim
        g = self.kv_heads if kv_heads is None else kv_heads
        if k < 1:
            raise ValueError(f"head_dim must be at least 1, got {k}")
        if g < 1 or self.heads % g or g % self.kv_heads:
            raise ValueError(f"kv_heads must be a multiple of {self.kv_heads} that divides {self.heads}, got {g}")
        dtype = self.vo.columns.dtype
        allowed = max(torch.finfo(dtype).eps, 1e-10) if tolerance is None else tolerance

        def factors(product: PivotedProduct, b: Tensor, name: str) -> tuple[Tensor, Tensor]:
            a = product.reader().double().repeat_interleave(g // self.kv_heads, 0)
            s, left, right = product_svd(a, beside(b.double(), g))
            lost = s[:, k : k + 1].sum(-1) / s.norm(dim=-1).clamp_min(torch.finfo(s.dtype).tiny)
            worst = int(lost.argmax())
            if lost[worst] > allowed:
                raise ValueError(
                    f"{name} of key/value head {worst} has rank above {k}, a share of {float(lost[worst]):.1e} is "
                    f"beyond it: ask for a larger head_dim{'' if g == self.heads else ' or more kv_heads'}"
                )
            root = s[:, :k].sqrt().unsqueeze(-1)
            a, b = (F.pad(root * x[:, :k], (0, 0, 0, max(0, k - s.shape[-1]))) for x in (right, left))
            return a.to(dtype), apart(b, self.heads).to(dtype)

        queries = self.qk.columns
        if self.query_bias is not None:
            queries = torch.cat([queries, self.query_bias.unsqueeze(-1)], -1)
        w_k, queries = factors(self.qk, queries.double() * (k / self.head_dim) ** 0.5, "G_QK")
        w_v, w_o = factors(self.vo, self.vo.columns, "G_VO")
        if self.output_bias is None:
            return Heads(queries, w_k, w_v, w_o)
        zero = w_k.new_zeros(g, k)
        return Heads(queries[..., :-1], w_k, w_v, w_o, queries[..., -1], zero, zero.clone(), self.output_bias.clone())

    @classmethod
    def from_multihead(cls, module: nn.MultiheadAttention, rank: int | None = None) -> Self:
        """The self-attention of an nn.MultiheadAttention. Its batch_first is not taken over: tokens are always the last
        axis but one here. ValueError for what has no place here: kdim, vdim, add_bias_kv, add_zero_attn, dropout."""
        m = module
        unfit = {
            "kdim or vdim": m.in_proj_weight is None,
            "add_bias_kv": m.bias_k is not None,
            "add_zero_attn": m.add_zero_attn,
            "dropout": m.dropout > 0,
        }
        for name, there in unfit.items():
            if there:
                raise ValueError(f"nn.MultiheadAttention with {name} cannot be written in invariants")
        split = (m.num_heads, m.head_dim)
        weights = [w.unflatten(0, split) for w in (*m.in_proj_weight.chunk(3), m.out_proj.weight.mT)]
        biases = []
        if m.in_proj_bias is not None:
            biases = [b.unflatten(0, split) for b in m.in_proj_bias.chunk(3)] + [m.out_proj.bias]
        return cls.from_heads(Heads(*weights, *biases), rank).train(m.training)

    def to_multihead(self) -> nn.MultiheadAttention:
        """An nn.MultiheadAttention, batch_first, of the same function, from `to_heads(kv_heads=h)`. ValueError as
        there, and where h·k is not d."""
        if self.heads * self.head_dim != self.width:
            raise ValueError(f"nn.MultiheadAttention needs heads of {self.width} / {self.heads}, not {self.head_dim}")
        s = self.to_heads(kv_heads=self.heads)
        module = nn.MultiheadAttention(
            self.width, self.heads, bias=s.b_o is not None, batch_first=True, device="meta", dtype=s.w_q.dtype
        ).to_empty(device=s.w_q.device)
        state = {"in_proj_weight": torch.cat([w.flatten(0, 1) for w in (s.w_q, s.w_k, s.w_v)])}
        state["out_proj.weight"] = s.w_o.flatten(0, 1).mT
        if s.b_q is not None and s.b_k is not None and s.b_v is not None and s.b_o is not None:
            state["in_proj_bias"] = torch.cat([b.flatten() for b in (s.b_q, s.b_k, s.b_v)])
            state["out_proj.bias"] = s.b_o
        module.load_state_dict(state)
        return module.train(self.training)

    @property
    def parameter_counts(self) -> dict[str, int]:
        """Numbers stored, by part; "indices" are the pivots, which the others do not include."""
        parts = {name: sum(p.numel() for p in part.parameters()) for name, part in (("qk", self.qk), ("vo", self.vo))}
        parts["biases"] = sum(p.numel() for p in self.parameters(recurse=False))
        return parts | {"indices": sum(b.numel() for b in self.buffers())}

    def extra_repr(self) -> str:
        bias = self.output_bias is not None
        return (
            f"{self.width}, heads={self.heads}, head_dim={self.head_dim}, rank={self.rank}, "
            f"kv_heads={self.kv_heads}, bias={bias}"
        )

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Self-attention of x (..., n, d), (..., n, d).

        Args:
            attn_mask: as in `scaled_dot_product_attention`: bool, True where a query may look, or numbers that are
                added to the scores; at least 2-dimensional, broadcast to (..., h, n, n). A query without any key gets
                the output bias, in which b_V is, where standard heads give b_O alone.
            is_causal: query i looks at keys 1 ... i only. Combines with a mask.

        Raises:
            ValueError: another width, or a mask that does not fit.
        """
        if x.ndim < 2 or x.shape[-1] != self.width:
            raise ValueError(f"x must be (..., n, {self.width}), got {tuple(x.shape)}")
        if attn_mask is not None:
            check_mask(attn_mask, (*x.shape[:-2], self.heads, x.shape[-2], x.shape[-2]))
            attn_mask = flat_mask(attn_mask, x.shape[:-2])
        flat = x.flatten(0, -3) if x.ndim > 2 else x.unsqueeze(0)
        bias = None if self.query_bias is None else self.query_bias.flatten()
        q = F.linear(flat, self.qk.columns.flatten(0, 1), bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        flat = flat.to(q.dtype)  # under autocast q has been cast, and so must x where it is read as it is
        k, v = self.qk.read(flat), self.vo.read(flat)
        o = fused_attention(q, k, v, attn_mask, causal=is_causal, scale=self.head_dim**-0.5)
        y = F.linear(o.transpose(1, 2).flatten(2), self.vo.columns.flatten(0, 1).mT, self.output_bias)
        return y.reshape(x.shape)


def check_mask(mask: Tensor, shape: tuple[int, ...]) -> None:
    """ValueError unless the mask broadcasts to `shape` (..., h, n, n)."""
    try:
        fits = mask.ndim >= 2 and torch.broadcast_shapes(mask.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"attn_mask of shape {tuple(mask.shape)} does not broadcast to (..., heads, n, n) = {shape}")
