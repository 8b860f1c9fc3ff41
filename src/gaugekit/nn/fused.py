"""Attention by inner products, as calls of `scaled_dot_product_attention` that stay on its fused kernels.

Shapes: q (b, h, n, w), k (b, h, m, w), v (b, h, m, u), mask broadcastable to (b, h, n, m); the output is (b, h, n, u).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["flat_mask", "fused_attention", "sliced"]

ROWS = 512
"""Queries per call where a mask must be combined with causality: at no time is there more than (..., ROWS, m) of it."""


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    """softmax(scale · q kᵀ + mask) v; causal: the last query sees the last key. Rows that see nothing are zero.

    One call, unless causality meets a mask or more keys than queries: then one per `ROWS` queries, each on the keys
    that they may see. q, k and v of different widths are padded with zeros to one multiple of 8: the fused kernels want
    one width.
    """
    width, out_width = q.shape[-1], v.shape[-1]
    if width != out_width:
        wide = -(-max(width, out_width) // 8) * 8
        q, k, v = (F.pad(x, (0, wide - x.shape[-1])) for x in (q, k, v))
    n, m = q.shape[-2], k.shape[-2]
    if not causal or n == 1 or (mask is None and n == m):
        out = _sdpa(q, k, v, mask, causal and n > 1, scale)
    else:
        out = torch.cat([_rows(q, k, v, mask, i, min(i + ROWS, n), scale) for i in range(0, n, ROWS)], -2)
    return out[..., :out_width]


def flat_mask(mask: Tensor, batch: Sequence[int]) -> Tensor:
    """A mask that broadcasts to (*batch, h, n, m) over (b, h, n, m), each axis whole or one. Copied only if it varies
    along axes that merge into b."""
    mask = mask[(None,) * (4 - mask.ndim)]
    if len(batch) > 1 and any(size != 1 for size in mask.shape[:-3]):
        mask = mask.expand(*batch, *mask.shape[-3:])
    return mask.flatten(0, -4)


def sliced(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    """The part of a mask for these queries and keys; axes of one are left to broadcast."""
    if mask.ndim > 1 and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return mask[..., keys] if mask.shape[-1] > 1 else mask


def _rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, start: int, stop: int, scale: float) -> Tensor:
    """Queries start to stop of a causal attention, which see the first m − n + i + 1 keys each."""
    before = k.shape[-2] - q.shape[-2]
    seen = slice(0, before + stop)
    allowed = torch.ones(stop - start, before + stop, dtype=torch.bool, device=q.device).tril_(before + start)
    if mask is not None:
        part = sliced(mask, slice(start, stop), seen)
        allowed = part & allowed if part.dtype == torch.bool else part.masked_fill(~allowed, float("-inf"))
    return _sdpa(q[..., start:stop, :], k[..., seen, :], v[..., seen, :], allowed, False, scale)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, mask))
    if wanted and not torch.compiler.is_compiling():  # compiled graphs have no second derivative to offer anyway
        return _TwiceDifferentiable.apply(q, k, v, mask, causal, scale)  # type: ignore[return-value]
    return _plain((q, k, v, mask), causal, scale)


class _TwiceDifferentiable(torch.autograd.Function):
    """`scaled_dot_product_attention` whose backward pass can be differentiated, which that of the fused kernels cannot.

    The first derivative is the fused kernel's own, at no extra cost. A backward pass under `create_graph=True` computes
    it by the unfused path instead, which holds an n × m matrix.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.causal, ctx.scale = causal, scale
        out, ctx.inner = _differentiable((q, k, v, mask), ctx.needs_input_grad[:4], causal, scale)
        return out.detach()

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        tensors, needs, again = ctx.saved_tensors, ctx.needs_input_grad[:4], torch.is_grad_enabled()
        if again:
            # Aliases, for q, k and v may be one tensor, of which each must get its own share.
            inputs = [None if x is None else x.view_as(x) for x in tensors]
            with sdpa_kernel(SDPBackend.MATH):
                out = _plain(inputs, ctx.causal, ctx.scale)
        else:
            inputs, out = ctx.inner or _differentiable(tensors, needs, ctx.causal, ctx.scale)[1]
            ctx.inner = None  # as autograd frees what it saved; a second pass over a retained graph recomputes it
        wanted = [x for x, need in zip(inputs, needs, strict=True) if x is not None and need]
        grads = iter(torch.autograd.grad(out, wanted, grad_outputs, create_graph=again))
        return (*(next(grads) if need else None for need in needs), None, None)


def _differentiable(tensors: Sequence[Tensor | None], needs: Sequence[bool], causal: bool, scale: float):
    """The output, and its graph from edges in place of the tensors to an edge in place of the output.

    Edges, because they hold no tensors: what the graph itself has saved, activation checkpointing can drop.
    """
    with torch.enable_grad():
        roots = [_root(x) if x is not None and need else x for x, need in zip(tensors, needs, strict=True)]
        out = _plain(roots, causal, scale)
    edges = [get_gradient_edge(x) if x is not None and need else None for x, need in zip(roots, needs, strict=True)]
    return out, (edges, get_gradient_edge(out))


def _root(x: Tensor) -> Tensor:
    return _Root.apply(x.detach(), x.new_empty(0).requires_grad_())  # type: ignore[return-value]


class _Root(torch.autograd.Function):
    """x as the beginning of a graph that does not hold it, as a leaf would. Gradients are taken at it, not through."""

    @staticmethod
    def forward(_ctx, x: Tensor, _anchor: Tensor) -> Tensor:
        return x.detach()


def _plain(tensors: Sequence[Tensor | None], causal: bool, scale: float) -> Tensor:
    q, k, v, mask = tensors
    assert q is not None and k is not None and v is not None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
