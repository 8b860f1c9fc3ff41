"""What the heads of a running model attend to, and which keys they could not pick.

Shapes: b windows of t tokens, h query heads, g key heads, k head dimension, d stream width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugekit.geometry.keys import unselectable
from gaugekit.geometry.normalization import centre, rms_norm
from gaugekit.models.spec import Attention, Norm, Rotary
from gaugekit.models.view import View


@dataclass(frozen=True)
class HeadStates:
    """The self-attention of one layer.

    `entropy`: of the attention weights, in nats, mean over queries, for each query head; `uniform`: the mean logarithm
    of how many tokens a query sees, which it would be if the head averaged. `unselectable`: for each key head the share
    of keys of a window that no query could give the highest score (they lie in the convex hull of the others) [Brody et
    al. 2305.02582]; `unselectable_unscaled`: the same if the norm (and that of the keys, if there is one) gave all
    tokens one common scale in place of each its own. None where no norm stands before the keys. Scores are products of
    query and key here: terms that depend on the distance (ALiBi) and what a mask hides are left out.
    """

    layer: int
    entropy: tuple[float, ...]
    uniform: float
    unselectable: tuple[float, ...]
    unselectable_unscaled: tuple[float, ...] | None


class HeadWatch:
    """Collects what the heads of one layer do. `load` gives the tensor a view shows, in float64."""

    def __init__(self, layer: int, attention: Attention, source: Norm | None, load: Callable[[View], Tensor]) -> None:
        self.layer, self.source = layer, source
        self._attention = attention
        self._weight = load(attention.k.weight)
        self._bias = None if attention.k.bias is None else load(attention.k.bias)
        self._key_norm = None if attention.qk_norm is None else load(attention.qk_norm.k)
        self._affine = None
        if source is not None:
            self._affine = load(source.weight), None if source.bias is None else load(source.bias)
        self._entropy = torch.zeros(attention.heads, dtype=torch.float64)
        self._length = self._behind = self._ahead = 0
        self._windows = 0
        self._stuck = torch.zeros(2, attention.kv_heads, dtype=torch.float64)
        self._searched = 0

    @property
    def normed(self) -> bool:
        """Whether a norm stands before the keys."""
        return self.source is not None or self._key_norm is not None

    def attend(self, weights: Tensor) -> None:
        """Attention weights (b, h, t, t)."""
        weights = weights.double()
        self._entropy += torch.special.entr(weights).sum(-1).mean(-1).sum(0)
        # A query sees all tokens up to a distance behind and ahead of it. Weights of some that it sees have become 0,
        # so that what counts is the largest distance that any query of any window and head attends to.
        query, key = (weights > 0).any(0).any(0).nonzero(as_tuple=True)
        self._behind = max(self._behind, int((query - key).max()))
        self._ahead = max(self._ahead, int((key - query).max()))
        self._length = weights.shape[-1]
        self._windows += len(weights)

    def search(self, states: Tensor) -> None:
        """What the source norm reads (or the stream, without one) in one window (t, d)."""
        for found, scaled in zip(self._stuck, (True, False) if self.normed else (True,), strict=False):
            found += unselectable(self.keys(states, scaled)).mask.double().mean(-1)
        self._searched += 1

    def keys(self, states: Tensor, scaled: bool = True) -> Tensor:
        """Keys (g, t, k) of a window (t, d), positions included; not `scaled`: the norms keep a common scale."""
        states = states.double()
        if self.source is not None and self._affine is not None:
            weight, bias = self._affine
            if self.source.kind == "layer":
                states = centre(states)
            states = _rms(states, self.source.eps, scaled) * weight
            states = states if bias is None else states + bias
        keys = torch.einsum("td,gkd->gtk", states, self._weight)
        if self._bias is not None:
            keys = keys + self._bias.unsqueeze(1)
        qk_norm = self._attention.qk_norm
        if qk_norm is not None and self._key_norm is not None:
            g, t, k = keys.shape
            if qk_norm.over == "projection":
                keys = _rms(keys.transpose(0, 1).reshape(t, g * k), qk_norm.eps, scaled).reshape(t, g, k)
            else:
                keys = _rms(keys, qk_norm.eps, scaled).transpose(0, 1)
            keys = (keys * self._key_norm).transpose(0, 1)
        return keys if self._attention.rotary is None else turned(keys, self._attention.rotary)

    def states(self) -> HeadStates:
        """What was measured, after at least one `attend` and one `search`."""
        stuck = (self._stuck / self._searched).tolist()
        place = torch.arange(self._length, dtype=torch.float64)
        seen = 1 + place.clamp_max(self._behind) + place.flip(0).clamp_max(self._ahead)
        return HeadStates(
            self.layer,
            tuple((self._entropy / self._windows).tolist()),
            float(seen.log().mean()),
            tuple(stuck[0]),
            tuple(stuck[1]) if self.normed else None,
        )


def _rms(states: Tensor, eps: float, scaled: bool) -> Tensor:
    """RMSNorm over the last axis; not `scaled`: all divided by one root mean square, so that only this differs."""
    if scaled:
        return rms_norm(states, eps=eps)
    return states / (states.square().mean() + eps).sqrt()


def turned(keys: Tensor, rotary: Rotary) -> Tensor:
    """Keys (..., t, k) turned by their positions 0 to t − 1 [Su et al. 2104.09864]."""
    first, second = (torch.tensor(side) for side in zip(*rotary.pairs, strict=True))
    frequencies = torch.tensor(rotary.frequencies, dtype=keys.dtype)
    angles = torch.arange(keys.shape[-2], dtype=keys.dtype).outer(frequencies)
    cos, sin = angles.cos(), angles.sin()
    a, b = keys[..., first], keys[..., second]
    out = keys.clone()
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out
