"""The two circuits of every attention head, G_QK = W_Qᵀ W_K and G_VO = W_O W_V, as factors only.

Norm weights are folded in and what LayerNorms do not see is projected out, so that the spectra do not change under
any symmetry, the residual frame included [François & Ravera, arXiv 2602.18948, Table 1].

Shapes: d stream width, h query heads, g key/value heads, k head dimension. A factor is (g, k, m); G = Bᵀ A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from gaugekit.models.spec import Attention, Linear, Norm, Spec
from gaugekit.models.view import View
from gaugekit.symmetry.base import Observable
from gaugekit.symmetry.wiring import wire


@dataclass(frozen=True)
class Circuits:
    """The attention of one layer with the norms around it. `mean_unseen`: the stream's readers lose its mean."""

    stream: str
    layer: int
    attention: Attention
    query_norm: Norm | None
    key_norm: Norm | None
    output_scale: View | None
    mean_unseen: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the disk tensors that the factors need."""
        a = self.attention
        views = [a.q.weight, a.k.weight, a.v.weight, a.o.weight, *self.small]
        return tuple(dict.fromkeys(view.name for view in views))

    @property
    def small(self) -> tuple[View, ...]:
        """The weights of norms and LayerScale among them."""
        a = self.attention
        views = [norm.weight for norm in (self.query_norm, self.key_norm) if norm is not None]
        views += [] if a.qk_norm is None else [a.qk_norm.q, a.qk_norm.k]
        views += [] if self.output_scale is None else [self.output_scale]
        return tuple(views)

    def query_key(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A (g, k, h/g · d): the queries of a group side by side; B (g, k, d_source): its keys."""
        queries, keys = self.queries_keys(tensors)
        return self._side_by_side(queries), keys

    def value_output(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A (g, k, d_source): the values; B (g, k, h/g · d): the outputs of a group side by side."""
        values, outputs = self.values_outputs(tensors)
        return values, self._side_by_side(outputs)

    def queries_keys(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(h, k, d) and (g, k, d_source). At distance zero where positions are rotary, and before the norm where
        queries and keys are normed (its weights folded in)."""
        a = self.attention
        queries = folded(tensors, a.q, self.query_norm)
        keys = folded(tensors, a.k, self.key_norm)
        if a.qk_norm is not None:
            queries = queries * a.qk_norm.q.read(tensors[a.qk_norm.q.name]).double().unsqueeze(-1)
            keys = keys * a.qk_norm.k.read(tensors[a.qk_norm.k.name]).double().unsqueeze(-1)
        return queries, keys

    def values_outputs(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(g, k, d_source) and (h, k, d)."""
        a = self.attention
        out = a.o.weight.read(tensors[a.o.weight.name]).double()
        if self.output_scale is not None:
            out = out * self.output_scale.read(tensors[self.output_scale.name]).double()
        if self.mean_unseen:
            out = out - out.mean(-1, keepdim=True)
        return folded(tensors, a.v, self.key_norm), out

    def _side_by_side(self, heads: Tensor) -> Tensor:
        """(h, k, d) → (g, k, h/g · d)."""
        h, k, d = heads.shape
        g = self.attention.kv_heads
        return heads.reshape(g, h // g, k, d).transpose(1, 2).reshape(g, k, h // g * d)


def circuits(spec: Spec, observable: Observable) -> Iterator[Circuits]:
    """The circuits of every attention, in the order of the model."""
    wirings = wire(spec, observable)
    for wiring in wirings.values():
        for layer, block in enumerate(wiring.stream.blocks):
            for number, branch in enumerate(block.branches):
                body = branch.body
                if not isinstance(body, Attention):
                    continue
                own = wiring.sources[layer, number]
                other = own if body.memory is None else wirings[body.memory].stream.final_norm
                unseen = wiring.loses_mean(branch)
                scale = branch.scale if branch.norm_out is None else None
                yield Circuits(wiring.stream.name, layer, body, own, other, scale, unseen)


def folded(tensors: Mapping[str, Tensor], linear: Linear, norm: Norm | None) -> Tensor:
    """W Γ, and W Γ P behind a LayerNorm, in float64: what a reader does with the normalized state, whatever the norm's
    weight and bias are."""
    weight = linear.weight.read(tensors[linear.weight.name]).double()
    if norm is not None:
        weight = weight * norm.weight.read(tensors[norm.weight.name]).double()
        if norm.kind == "layer":
            weight = weight - weight.mean(-1, keepdim=True)
    return weight
