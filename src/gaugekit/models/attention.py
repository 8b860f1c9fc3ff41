"""Relational scores as attention implementations of `transformers`, for models that dispatch their attention by name.

    names = register()                                   # gaugekit_dot, gaugekit_cosine, gaugekit_rbf
    model = AutoModel.from_pretrained(..., attn_implementation="gaugekit_rbf")
    model.set_attn_implementation("gaugekit_cosine")

Shapes: query (b, h, n, k), key (b, g, m, k) and value (b, g, m, u) with g key/value heads, h a multiple of g; the
output is (b, n, h, u), as `transformers` wants it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from gaugekit.nn.relational import relational_attention
from gaugekit.nn.scores import Cosine, InnerScore, Score, resolved

__all__ = ["register"]

PREFIX = "gaugekit_"

REFUSED = (
    "block_indices",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "cu_seqlens",
    "head_mask",
    "indices",
    "output_attentions",
    "position_bias",
    "s_aux",
    "sinks",
    "softcap",
)
"""What some models pass that would change the result and is not done here. Other keywords are for other kernels."""


def register(**scores: str | InnerScore | Score) -> tuple[str, ...]:
    """Make scores known to `transformers` as attention implementations, with the masks of "sdpa".

    Args:
        scores: name=score, as for `relational_attention`; without any, the named ones: dot, cosine, rbf. The
            implementation is "gaugekit_" + name. One score object serves all layers; it is no part of the model, so
            its parameters are yours to move and train.

    Returns:
        The names of the implementations.

    Queries and keys are those the model makes, and its scaling c sets the temperature: the dot product is what the
    model computes anyway; rbf is −c‖q − k‖²/2; cosine is c k times the cosine, which is the dot product for vectors of
    length √k; any other score is multiplied by c. Key/value heads are repeated for their queries.

    The functions raise ValueError for dropout (set the config's attention dropout to 0, or `model.eval()`) and for
    keywords they would have to ignore, such as softcap or attention sinks, by name.

    Raises:
        ValueError: an unknown score, or a name that has been registered with another one.
    """
    wanted = scores or {"dot": "dot", "cosine": "cosine", "rbf": "rbf"}
    for name, score in wanted.items():
        resolved(score)
        forward, known = _Forward(score), AttentionInterface().get(PREFIX + name)
        if known is not None and known != forward:
            raise ValueError(f"{PREFIX + name} is registered already, with another score: take another name")
        AttentionInterface.register(PREFIX + name, forward)
        AttentionMaskInterface.register(PREFIX + name, sdpa_mask)
    return tuple(PREFIX + name for name in wanted)


@dataclass(frozen=True)
class _Forward:
    score: str | InnerScore | Score

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        for name in REFUSED:
            if others.get(name) is not None and others[name] is not False:
                raise ValueError(f"attention by {self.score} has no {name}: run this model on another implementation")
        if dropout > 0:
            raise ValueError(
                f"attention by {self.score} has no dropout: set it to 0 in the config, or call model.eval()"
            )
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        n, k = query.shape[2], query.shape[3]
        causal = bool(causal) and attention_mask is None and n > 1
        if causal:  # without a mask, keys beyond the queries are the empty rest of a static cache
            key, value = key[:, :, :n], value[:, :, :n]
        temperature = 1 / (1 / math.sqrt(k) if scaling is None else scaling)
        if self.score == "cosine" or isinstance(self.score, Cosine):
            temperature /= k
        out = relational_attention(
            query,
            key,
            value,
            score=self.score,
            temperature=temperature,
            is_causal=causal,
            attn_mask=attention_mask,
        )
        return out.transpose(1, 2).contiguous(), None
