"""Attention by any f(G_ij, G_ii, G_jj), in tiles: memory linear in the number of tokens, forwards and backwards.

The tiles are FlashAttention's (Dao et al., 2205.14135): a running maximum and sum forwards, of which the logarithm of
the sum is kept; backwards each tile's scores are computed anew, ds = p ∘ (dp − D) is formed, and f's own derivative of
the tile comes from autograd.

Legend
------
b batch, h heads, n queries, m keys, k and u channels; a tile is (b', i, j) for one head
query (b, h, n, k)   key (b, h, m, k)   value (b, h, m, u)   out (b, h, n, u)
g_ij = query_i · key_j   g_ii (b, h, n)   g_jj (b, h, m)   inverse (h,) = 1 / temperature
s = f · inverse, masked   p = exp(s − lse) the weights   lse (b, h, n) = log Σ_j exp s_ij   D (b, h, n) = Σ out ∘ dout
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gaugekit.nn.fused import sliced
from gaugekit.nn.scores import Score

__all__ = ["TILE", "blockwise_attention"]

TILE = (512, 512)
"""Queries and keys of a tile, whose few copies should fit the cache. Short sequences share a tile over the batch."""

FLOOR = {torch.float32: -87.0, torch.float64: -708.0}
"""Where exp falls below the normal numbers, whose arithmetic is slow: weights smaller than that are 0."""


Function = TypeVar("Function", bound=Callable[..., Any])


def _uncompiled(function: Function) -> Function:
    """Left out of compiled graphs, where its loops would be unrolled, tile by tile."""
    return torch.compiler.disable(function)  # type: ignore[return-value]


@_uncompiled
def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score,
    inverse: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
) -> Tensor:
    """softmax(f / temperature + mask) v, (b, h, n, u). Rows that see nothing are zero.

    Args:
        query, key, value, inverse: as above, all float32 or all float64. Gradients reach them, and the parameters of
            `score` if it is a module.
        score: f(g_ij, g_ii, g_jj, head), see `LearnedScore`.
        mask: over (b, h, n, m), each axis whole or one; bool (True may be seen) or added to the scores.
        causal: the last query sees the last key.

    A backward pass under `create_graph=True` holds n × m matrices; any other O(n + m).

    Raises:
        ValueError: a gradient is wanted that would not come: of the mask, or of a tensor that f holds otherwise than as
            a module's parameter.
    """
    module = score if isinstance(score, nn.Module) else None
    parameters = dict(module.named_parameters()) if module is not None else {}
    _refuse_hidden_gradients(score, parameters, query)
    if mask is not None and mask.requires_grad:
        raise ValueError("attn_mask cannot get a gradient beside a score f: make it part of f, or detach it")
    offset = key.shape[-2] - query.shape[-2] if causal else None
    plan = _Plan(score, tuple(parameters), offset, TILE)
    g_ii, g_jj = query.square().sum(-1), key.square().sum(-1)
    return _Blockwise.apply(plan, mask, query, key, value, g_ii, g_jj, inverse, *parameters.values())  # type: ignore[return-value]


def _refuse_hidden_gradients(score: Score, parameters: dict[str, nn.Parameter], like: Tensor) -> None:
    """A tensor that f closes over, or a module holds beside its parameters, would silently go without its gradient."""
    plan = _Plan(score, tuple(parameters), None, TILE)
    one = like.new_ones(1, 1, 1)
    with torch.enable_grad():
        if plan.scores(tuple(p.detach() for p in parameters.values()), one, one, one, 0).requires_grad:
            raise ValueError(
                "the score depends on a tensor that wants a gradient: make it an nn.Module with parameters"
            )


@dataclass(frozen=True)
class _Plan:
    score: Score
    names: tuple[str, ...]  # of its parameters
    offset: int | None  # keys before the first query's own, if causal
    tile: tuple[int, int]

    def scores(self, weights: tuple[Tensor, ...], g: Tensor, g_ii: Tensor, g_jj: Tensor, head: int) -> Tensor:
        """f, with these for its parameters: those of the forward pass, whatever the module holds by now."""
        if isinstance(self.score, nn.Module):
            s = functional_call(self.score, dict(zip(self.names, weights, strict=True)), (g, g_ii, g_jj, head))
        else:
            s = self.score(g, g_ii, g_jj, head)
        return s.expand_as(g)

    def groups(self, batch: int, heads: int, n: int, m: int) -> Iterator[tuple[int, slice]]:
        """Head by head, as many items of the batch at once as fit a tile."""
        per_tile = max(1, self.tile[0] * self.tile[1] // max(1, min(n, self.tile[0]) * min(m, self.tile[1])))
        for head in range(heads):
            yield from ((head, items) for items in _spans(batch, per_tile))

    def seen(self, rows: slice, keys: slice) -> bool:
        return self.offset is None or keys.start < self.offset + rows.stop

    def hide(self, s: Tensor, mask: Tensor | None, items: slice, head: int, rows: slice, keys: slice) -> None:
        """-inf, in place, where these queries may not see these keys."""
        if mask is not None:
            part = sliced(mask[items] if mask.shape[0] > 1 else mask, rows, keys)
            part = part[:, head if mask.shape[1] > 1 else 0]
            _ = s.masked_fill_(~part, -math.inf) if part.dtype == torch.bool else s.add_(part)
        if self.offset is not None and keys.stop - 1 > self.offset + rows.start:
            later = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
            s.masked_fill_(later.triu_(self.offset + rows.start - keys.start + 1), -math.inf)


def _spans(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _exp_(s: Tensor) -> Tensor:
    """exp in place, 0 below `FLOOR`. Numbers under the normal range would take many times as long."""
    floor = FLOOR[s.dtype]
    return torch.threshold_(s.clamp_min_(floor).exp_(), math.exp(floor) * (1 + 1e-3), 0.0)


class _Scratch:
    """Room for one tile, used again for each."""

    def __init__(self, plan: _Plan, like: Tensor, entries: int) -> None:
        self.room = like.new_empty(min(math.prod(plan.tile), entries))

    def __call__(self, *shape: int) -> Tensor:
        return self.room[: math.prod(shape)].view(shape)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, mask: Tensor | None, query, key, value, g_ii, g_jj, inverse, *weights) -> Tensor:
        (batch, heads, n, _), m = query.shape, key.shape[-2]
        out = query.new_zeros(batch, heads, n, value.shape[-1])
        lse = query.new_full((batch, heads, n), math.inf)  # of rows that see nothing: every exp(s − lse) is 0
        first, second = (_Scratch(plan, query, batch * n * m) for _ in range(2))
        scale = inverse.tolist()
        for head, items in plan.groups(batch, heads, n, m):
            for rows in _spans(n, plan.tile[0]):
                q = query[items, head, rows]
                top = q.new_full((*q.shape[:2], 1), -math.inf)
                total, mean = torch.zeros_like(top), q.new_zeros(*q.shape[:2], value.shape[-1])
                for keys in _spans(m, plan.tile[1]):
                    if not plan.seen(rows, keys):
                        break
                    k = key[items, head, keys]
                    shape = (*q.shape[:2], k.shape[1])
                    g = torch.bmm(q, k.mT, out=first(*shape))
                    s = plan.scores(weights, g, g_ii[items, head, rows, None], g_jj[items, head, None, keys], head)
                    s = torch.mul(s, scale[head], out=second(*shape))
                    plan.hide(s, mask, items, head, rows, keys)
                    higher = torch.maximum(top, s.amax(-1, keepdim=True))
                    base = higher.masked_fill(higher == -math.inf, 0.0)
                    p = _exp_(s.sub_(base))
                    shrink = top.sub_(base).exp_()
                    total.mul_(shrink).add_(p.sum(-1, keepdim=True))
                    mean.mul_(shrink).baddbmm_(p, value[items, head, keys])
                    top = higher
                empty = total == 0
                out[items, head, rows] = mean.div_(total.masked_fill(empty, 1.0))
                lse[items, head, rows] = top.add_(total.log_()).masked_fill_(empty, math.inf).squeeze(-1)
        ctx.plan = plan
        ctx.save_for_backward(mask, query, key, value, g_ii, g_jj, inverse, out, lse, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        plan, (grad,) = ctx.plan, grad_outputs
        mask, query, key, value, g_ii, g_jj, inverse, out, lse, *weights = ctx.saved_tensors
        inputs, needs = (query, key, value, g_ii, g_jj, inverse, *weights), ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            # Aliases, for query, key and value may be one tensor, of which each must get its own share.
            inputs = [x.view_as(x) for x in inputs]
            wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
            found = torch.autograd.grad(
                _whole(plan, mask, *inputs), wanted, grad, create_graph=True, materialize_grads=True
            )
            grads = iter(found)
            return (None, None, *(next(grads) if need else None for need in needs))
        return (None, None, *_backward(plan, mask, inputs, needs, out, lse, grad))


def _backward(plan: _Plan, mask: Tensor | None, inputs, needs, out: Tensor, lse: Tensor, grad: Tensor) -> list[Tensor]:
    """Gradients of the inputs (query, key, value, g_ii, g_jj, inverse, weights), tile by tile."""
    query, key, value, g_ii, g_jj, inverse, *weights = inputs
    (batch, heads, n, _), m = query.shape, key.shape[-2]
    delta = (grad * out).sum(-1)
    leaves = tuple(w.detach().requires_grad_(need) for w, need in zip(weights, needs[6:], strict=True))
    learned = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    results = [torch.zeros_like(x) for x in inputs]
    d_query, d_key, d_value, d_ii, d_jj, d_inverse, *d_weights = results
    room = [_Scratch(plan, query, batch * n * m) for _ in range(3)]
    scale = inverse.tolist()
    for head, items in plan.groups(batch, heads, n, m):
        for keys in _spans(m, plan.tile[1]):
            k, v = key[items, head, keys], value[items, head, keys]
            for rows in _spans(n, plan.tile[0]):
                if not plan.seen(rows, keys):
                    continue
                q, do = query[items, head, rows], grad[items, head, rows]
                shape = (*q.shape[:2], k.shape[1])
                g = torch.bmm(q, k.mT, out=room[0](*shape)).detach().requires_grad_()
                ii = g_ii[items, head, rows, None].detach().requires_grad_()
                jj = g_jj[items, head, None, keys].detach().requires_grad_()
                with torch.enable_grad():
                    f = plan.scores(leaves, g, ii, jj, head)
                s = torch.mul(f.detach(), scale[head], out=room[1](*shape))
                plan.hide(s, mask, items, head, rows, keys)
                p = _exp_(s.sub_(lse[items, head, rows, None]))
                d_value[items, head, keys].baddbmm_(p.mT, do)
                ds = torch.bmm(do, v.mT, out=room[2](*shape)).sub_(delta[items, head, rows, None]).mul_(p)
                if needs[5]:
                    d_inverse[head] += torch.dot(ds.view(-1), f.detach().reshape(-1))
                if not f.requires_grad:
                    continue
                wanted = (g, ii, jj, *(leaves[i] for i in learned))
                dg, dii, djj, *dw = torch.autograd.grad(f, wanted, ds.mul_(scale[head]), materialize_grads=True)
                d_query[items, head, rows].baddbmm_(dg, k)
                d_key[items, head, keys].baddbmm_(dg.mT, q)
                d_ii[items, head, rows].add_(dii.squeeze(-1))
                d_jj[items, head, keys].add_(djj.squeeze(-2))
                for i, part in zip(learned, dw, strict=True):
                    d_weights[i].add_(part)
    return results


def _whole(plan: _Plan, mask, query, key, value, g_ii, g_jj, inverse, *weights) -> Tensor:
    """The written-out formula on n × m matrices, differentiable as often as f is."""
    everything = slice(0, query.shape[0]), slice(0, query.shape[2]), slice(0, key.shape[2])
    outs = []
    for head in range(query.shape[1]):
        g = query[:, head] @ key[:, head].mT
        f = plan.scores(weights, g, g_ii[:, head, :, None], g_jj[:, head, None], head) * inverse[head]
        hidden = torch.zeros_like(f)
        plan.hide(hidden, mask, everything[0], head, *everything[1:])
        s = f + hidden
        dead = (s == -math.inf).all(-1, keepdim=True)
        p = s.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
        outs.append(p @ value[:, head])
    return torch.stack(outs, 1)
