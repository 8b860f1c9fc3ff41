"""A checkpoint whose values are narrower: which rows and columns of which tensors stay, and what stands in their place.

Shapes: d stream width, g key/value heads, k head dimension, r ≤ k value dimension of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gaugekit.errors import UnsupportedArchitecture
from gaugekit.linalg import column_pivots
from gaugekit.models.reduced import REDUCED, Reduced
from gaugekit.models.remote import CODE, auto_map, code
from gaugekit.models.spec import Attention
from gaugekit.models.view import Edit, View
from gaugekit.nn.pivoted import pivots_first
from gaugekit.symmetry.heads import ValueOutput
from gaugekit.symmetry.orbit import Step
from gaugekit.verbs.rewriting import Opened

__all__ = ["Narrow", "Narrowing", "pivot", "reduced_class"]


@dataclass(frozen=True)
class Narrow:
    """One layer keeps the first `rank` dimensions of every value head. `pivots` (g, r): columns of W_V that are the
    identity and are not stored, or None."""

    attention: Attention
    rank: int
    pivots: Tensor | None = None


def reduced_class(model: Opened) -> Reduced:
    """The class that loads narrower values. Raises `UnsupportedArchitecture` for a family without one, and for a model
    without a head, which that class would draw at random."""
    model_type = model.checkpoint.config.get("model_type")
    if model_type not in REDUCED:
        raise UnsupportedArchitecture(
            f"{model_type} has no class with narrower values ({', '.join(REDUCED)} have): use --form same"
        )
    if model.spec.main.head is None:
        raise UnsupportedArchitecture(
            f"{model.checkpoint.path}: has no language-model head, and the class with narrower values has one: "
            "use --form same"
        )
    return REDUCED[model_type]


def pivot(attention: Attention, rank: int, tensors: Mapping[str, Tensor]) -> tuple[Step, Tensor] | None:
    """The step that makes `rank` columns of every value head's first rows the identity, and these columns (g, r),
    ascending. None where the values of a head have not that rank, so that none will do."""
    a = attention
    rows = Edit(tensors)[a.v.weight][:, :rank]
    if rank > rows.shape[-1]:
        return None
    pivots = column_pivots(torch.linalg.qr(rows.mH).Q.mH).sort(-1).values
    square = rows.gather(-1, pivots.unsqueeze(-2).expand(*rows.shape[:-1], rank))
    if not bool((torch.linalg.matrix_rank(square) == rank).all()):
        return None
    element = torch.eye(a.head_dim, dtype=rows.dtype).repeat(2, a.kv_heads, 1, 1)
    element[0, :, :rank, :rank], element[1, :, :rank, :rank] = torch.linalg.inv(square), square.mT
    return Step(ValueOutput("", a), element), pivots


class Narrowing:
    """All layers of a model, in order, for its class with narrower values.

    shapes  of tensors that are cut
    drop    tensors that go
    added   shapes and dtypes of those that come
    """

    def __init__(self, model: Opened, layers: Sequence[Narrow]) -> None:
        self._layers = {layer.attention.v.weight.name: layer for layer in layers}
        self._kind = reduced_class(model)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.drop: set[str] = set()
        self.added: dict[str, tuple[tuple[int, ...], str]] = {}
        self._kept: dict[str, list[Tensor]] = {}
        self._biases: dict[str, Narrow] = {}
        for layer in layers:
            a = layer.attention
            fused = self._kind.values is not None
            of_values = layer.rank if layer.pivots is None else 0
            of_bias = 0 if layer.pivots is not None and fused else layer.rank
            for view, rank in ((a.v.weight, of_values), (a.v.bias, of_bias), (a.o.weight, layer.rank)):
                if view is not None:
                    self._cut(view, rank)
            if layer.pivots is None:
                continue
            d, g, at = a.v.weight.shape[-1], a.kv_heads, self._place(a)
            dtype = model.checkpoint.headers[a.v.weight.name].dtype
            self.added[f"{at}.coefficients"] = (g, layer.rank, d - layer.rank), dtype
            self.added[f"{at}.pivots"] = (g, layer.rank), "I64"
            if fused and a.v.bias is not None:
                self.added[f"{at}.bias"] = (g * layer.rank,), dtype
                self._biases[a.v.bias.name] = layer

    @property
    def config(self) -> dict[str, Any]:
        """Changes of config.json."""
        kind, layers = self._kind, self._layers.values()
        return {
            "model_type": kind.config.model_type,
            "architectures": [kind.model.__name__],
            "auto_map": auto_map(kind.config, kind.model),
            "value_dims": [layer.rank for layer in layers],
            "pivoted_values": [layer.pivots is not None for layer in layers],
        }

    @property
    def texts(self) -> dict[str, str]:
        """The file by which `trust_remote_code` finds the class."""
        return {f"{CODE}.py": code(self._kind.config, self._kind.model)}

    def narrowed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What becomes of tensors that have been moved so that all that is cut is zero."""
        for name, tensor in tensors:
            layer = self._layers.get(name)
            if layer is not None and layer.pivots is not None:
                rows, pivots = layer.attention.v.weight.read(tensor)[:, : layer.rank], layer.pivots
                others = pivots_first(pivots, rows.shape[-1])[:, layer.rank :]
                at = self._place(layer.attention)
                yield f"{at}.coefficients", rows.gather(-1, others.unsqueeze(1).expand(-1, layer.rank, -1))
                yield f"{at}.pivots", pivots
            if name in self._biases:
                a, rank = self._biases[name].attention, self._biases[name].rank
                assert a.v.bias is not None
                yield f"{self._place(a)}.bias", a.v.bias.read(tensor)[:, :rank].flatten()
            if name in self.drop:
                continue
            for axis, index in enumerate(self._kept.get(name, [])):
                tensor = tensor.index_select(axis, index)
            yield name, tensor

    def _cut(self, view: View, rank: int) -> None:
        """Only the first `rank` rows of every head stay of what is seen (heads, k, ...)."""
        stays = torch.ones(view.disk_shape, dtype=torch.bool)
        view.window(stays)[:, rank:] = False
        if not stays.any():
            self.drop.add(view.name)
            return
        axes = [stays.flatten(1).any(1), stays.flatten(1).any(0)] if stays.ndim > 1 else [stays]
        self._kept[view.name] = [axis.nonzero().flatten() for axis in axes]
        self.shapes[view.name] = tuple(map(len, self._kept[view.name]))

    def _place(self, a: Attention) -> str:
        """The module that holds pivoted values."""
        module = a.v.weight.name.removesuffix(".weight")
        return module if self._kind.values is None else f"{module.rpartition('.')[0]}.{self._kind.values}"
