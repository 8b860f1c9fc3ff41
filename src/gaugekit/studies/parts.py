"""LayerNorm in its two parts, each with and without, before attention; and which keys can be selected behind it [B].

Shapes: b windows of n tokens, d width, k head dimension. Source: [B] Brody, Alon and Yahav, arXiv 2305.02582.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugekit.geometry.keys import unselectable
from gaugekit.nn.decoding import CausalAttention
from gaugekit.studies.fitting import made, sized
from gaugekit.studies.study import Budget, Measured
from gaugekit.studies.watching import passages
from gaugekit.training.decoder import Block, Decoder

__all__ = ["PartNorm", "by_chance", "decoder", "unselectable_shares"]

EPS = 1e-12
"""Of norms: the radius shall be √d whatever the length of a state."""


class PartNorm(nn.Module):
    """x or x − mean(x), on the sphere of radius √d or not: LayerNorm with both parts, RMSNorm without the first.

    (..., d) to (..., d), without weights, which the maps that read it make up for. Where it does not scale each token
    by its own length it divides all by one number, the root mean square of the first input it sees, so that the mean
    radius is the same at the start.
    """

    size: Tensor

    def __init__(self, project: bool, scale: bool) -> None:
        super().__init__()
        self.project, self.scale = project, scale
        self.register_buffer("size", torch.zeros(()))

    def projected(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.project else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.projected(x)
        if self.scale:
            return F.rms_norm(x, x.shape[-1:], eps=EPS)
        if not self.size:
            self.size.copy_(x.detach().square().mean().sqrt())
        return x / self.size


def decoder(vocab: int, seed: int, budget: Budget, project: bool, scale: bool) -> Decoder:
    """A `PartNorm` before each attention; all other norms are LayerNorm, as in the paper's models."""
    model = made(sized(budget, vocab, init_std=budget.options["width"] ** -0.5), seed)
    for block in blocks(model):
        block.norm_attention = PartNorm(project, scale)
    return model


def blocks(model: Decoder) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]


def unselectable_shares(model: Decoder, windows: Sequence[Tensor]) -> Measured:
    """Shares of unselectable keys by layer, over windows (b, n), in float64.

    inputs      of the key map, in d dimensions
    unscaled    the same states, projected alike, but not scaled
    heads       what the key map makes of the inputs, in the k dimensions of each head
    """
    wide, tokens = deepcopy(model).double(), windows[0].shape[-1]
    seen = {passage.norm: passage for passage in passages(wide, windows)}
    found: Measured = {"inputs": [], "unscaled": [], "heads": []}
    for block in blocks(wide):
        norm, attention = block.norm_attention, block.attention
        assert isinstance(norm, PartNorm) and isinstance(attention, CausalAttention)
        states, inputs = (each.unflatten(0, (-1, tokens)) for each in (seen[norm].before, seen[norm].after))
        heads = attention.key(inputs).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for what, keys in (("inputs", inputs), ("unscaled", norm.projected(states)), ("heads", heads.detach())):
            found[what].append(round(unselectable(keys).share, 4))
    return found


def by_chance(keys: int, dimensions: int) -> float:
    """Share of unselectable ones among normal random keys, in the mean over four draws."""
    generator = torch.Generator().manual_seed(0)
    return unselectable(torch.randn(4, keys, dimensions, generator=generator, dtype=torch.float64)).share
