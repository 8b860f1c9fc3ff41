"""By how much attention changes where the states that it reads are turned.

Shapes: tokens (b, n); states x (b, n, d); weights of h heads (b, h, n, n).
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gaugekit.linalg import random_orthogonal
from gaugekit.nn.decoding import CausalAttention
from gaugekit.nn.relational import RelationalAttention, relational_attention
from gaugekit.training.decoder import Causal, Decoder

__all__ = ["turned", "weights"]


@torch.no_grad()
def turned(model: Decoder, tokens: Tensor, blocks: int, generator: Generator) -> float:
    """‖a(X Uᵀ) − a(X)‖ / ‖a(X)‖, Frobenius, of the attention weights a; the largest over layers.

    X is what a layer's attention reads of the tokens, and U a random element of O(d / blocks), another one for each
    block of channels. The computation is in float64, so that weights that U does not change agree to about 1e-15. All
    parameters stand still: A of a bilinear score, as do W_Q and W_K.
    """
    exact = deepcopy(model).double().eval()
    states: list[Tensor] = []
    layers: list[Any] = list(exact.blocks)
    for block in layers:
        block.attention.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    exact(tokens)
    changes = []
    for block, x in zip(layers, states, strict=True):
        turn = torch.block_diag(*random_orthogonal(x.shape[-1] // blocks, generator, batch=(blocks,)))
        before, after = (weights(block.attention, each) for each in (x, x @ turn.mT))
        changes.append(float((after - before).norm() / before.norm()))
    return max(changes)


def weights(attention: nn.Module, x: Tensor) -> Tensor:
    """Of a `Decoder`'s standard or relational attention, (b, h, n, n): its means of values that are the identity."""

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (inner.heads, -1)).transpose(-2, -3)

    inner: Any = attention.attention if isinstance(attention, Causal) else attention
    identity = torch.eye(x.shape[-2], dtype=x.dtype).expand(len(x), inner.heads, -1, -1)
    if isinstance(inner, CausalAttention):
        return F.scaled_dot_product_attention(split(inner.query(x)), split(inner.key(x)), identity, is_causal=True)
    assert isinstance(inner, RelationalAttention)
    seen = split(x) if inner.frame == "split" else x.unsqueeze(-3).expand(-1, inner.heads, -1, -1)
    temperature = inner.log_temperature.exp()
    return relational_attention(seen, value=identity, score=inner.score, temperature=temperature, is_causal=True)
