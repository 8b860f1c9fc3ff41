"""Attention by any f(G_ij, G_ii, G_jj) through FlexAttention, which compiles f into a fused kernel on CUDA.

Shapes and meaning as in `blockwise.py`. FlexAttention has no backward pass on the CPU, and none has a second one.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from gaugekit.nn.scores import Score

__all__ = ["flexible_attention"]


def flexible_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score,
    inverse: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    compiled: bool = True,
) -> Tensor:
    """softmax(f / temperature + mask) v; see `blockwise_attention`.

    query, key and value may be half precision: products, squared lengths, f and the softmax are float32 all the same.
    `score` is given 0-d tensors. Not compiled, it is the slow n × m formula, for tests.
    """
    g_ii, g_jj = (x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(-1) for x in (query, key))
    whole = (False,) * 4 if mask is None else tuple(size > 1 for size in mask.shape)

    def modified(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = score(s, g_ii[b, h, i], g_jj[b, h, j], h) * inverse[h]
        if mask is None:
            return s
        b, h, i, j = (axis if wide else axis * 0 for axis, wide in zip((b, h, i, j), whole, strict=True))
        part = mask[b, h, i, j]
        return torch.where(part, s, -math.inf) if mask.dtype == torch.bool else s + part

    blocks = _causal_blocks(query.shape[-2], key.shape[-2], str(query.device), compiled) if causal else None
    attend = _compiled() if compiled else flex_attention
    out = attend(query, key, value, score_mod=modified, block_mask=blocks, scale=1.0)
    assert isinstance(out, Tensor)
    return out


@functools.cache
def _compiled():
    return torch.compile(flex_attention)


@functools.lru_cache(maxsize=16)
def _causal_blocks(n: int, m: int, device: str, compiled: bool) -> BlockMask:
    make = torch.compile(create_block_mask) if compiled else create_block_mask
    return make(lambda _b, _h, i, j: i + (m - n) >= j, None, None, n, m, device=device)
