"""`inspect`: what acts on a checkpoint without changing what it computes, and what no such action can change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from gaugekit.checkpoint import Checkpoint, open_checkpoint
from gaugekit.errors import CheckpointError
from gaugekit.linalg import (
    balance_defect,
    degenerate_blocks,
    effective_rank,
    numerical_rank,
    product_spectrum,
    stable_rank,
)
from gaugekit.models import Spec, read_spec
from gaugekit.symmetry import Blocked, Circuits, Observable, Symmetries, Symmetry, circuits, derive, power
from gaugekit.verbs.loading import load_finite, require_finite

T = TypeVar("T")
Track = Callable[[Iterable[T], int | None, str], Iterable[T]]
Precision = Literal["stored", "float64", "float32", "bfloat16", "float16"]
TIE = 1e-4


@dataclass(frozen=True)
class SymmetryRow:
    """One kind of symmetry over the whole model."""

    name: str
    group: str
    dimension: int
    exactness: str
    where: tuple[str, ...]


@dataclass(frozen=True)
class LayerRow:
    """Redundant dimensions of one layer, by kind of symmetry; layer "" is what stands outside the layers."""

    layer: str
    dimension: int
    by_symmetry: dict[str, int]


@dataclass(frozen=True)
class DeadRow:
    """Parameters of one tensor that the observable does not depend on."""

    tensor: str
    reason: str
    parameters: int


@dataclass(frozen=True)
class HeadRow:
    """One circuit of one key/value head, with the query heads that share it side by side.

    `rank` counts singular values above rounding; `effective_rank` is the exponential of the entropy of the
    normalized spectrum, `stable_rank` ‖G‖_F²/‖G‖₂². `balance` is ‖AAᵀ − BBᵀ‖_F of the factors as stored (norm
    weights folded in), `balance_relative` the same over ‖AAᵀ + BBᵀ‖_F. `degenerate_blocks` are (first, size) of
    singular values closer than 1e-4 of themselves: a canonical form is free to turn inside each.
    """

    stream: str
    layer: int
    attention: str
    kv_head: int
    circuit: Literal["qk", "vo"]
    rank: int
    effective_rank: float
    stable_rank: float
    spectrum: tuple[float, ...]
    balance: float
    balance_relative: float
    degenerate_blocks: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class NormRow:
    """Spread of one norm's weight γ (as used: 1 + w where the file stores w)."""

    where: str
    kind: str
    mean: float
    std: float
    smallest: float
    largest: float
    zeros: int


@dataclass(frozen=True)
class InspectReport:
    """Everything `inspect` has to say. `heads` and `norms` are empty when only headers were read. `at_zero_eps` would
    be symmetries if the norms' eps were zero; they are not counted in the redundancy."""

    model: dict[str, Any]
    observable: Observable
    parameters: int
    by_symmetry: tuple[SymmetryRow, ...]
    by_layer: tuple[LayerRow, ...]
    dead: tuple[DeadRow, ...]
    discrete: tuple[SymmetryRow, ...]
    at_zero_eps: tuple[SymmetryRow, ...]
    blocked: tuple[Blocked, ...]
    heads: tuple[HeadRow, ...] = ()
    norms: tuple[NormRow, ...] = ()

    @property
    def redundancy(self) -> int:
        """Redundant dimensions."""
        return sum(row.dimension for row in self.by_symmetry)

    @property
    def fraction(self) -> float:
        """Redundant dimensions as a share of all parameters."""
        return self.redundancy / self.parameters if self.parameters else 0.0

    @property
    def dead_parameters(self) -> int:
        return sum(row.parameters for row in self.dead)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `gaugekit inspect --json`."""
        return {
            "model": self.model,
            "observable": self.observable,
            "parameters": self.parameters,
            "redundancy": {
                "total": self.redundancy,
                "fraction": self.fraction,
                "by_symmetry": [asdict(row) for row in self.by_symmetry],
                "by_layer": [asdict(row) for row in self.by_layer],
            },
            "dead": {"total": self.dead_parameters, "items": [asdict(row) for row in self.dead]},
            "discrete": [{"name": row.name, "group": row.group, "where": row.where} for row in self.discrete],
            "at_zero_eps": [asdict(row) for row in self.at_zero_eps],
            "blocked": [asdict(row) for row in self.blocked],
            "heads": [asdict(row) for row in self.heads],
            "norms": [asdict(row) for row in self.norms],
        }


def untracked(items: Iterable[T], total: int | None, what: str) -> Iterable[T]:  # noqa: ARG001
    """No progress is shown."""
    return items


def inspect(
    reference: str | PathLike[str],
    *,
    observable: Observable | None = None,
    spectra: bool = True,
    device: str = "cpu",
    dtype: Precision = "stored",
    revision: str | None = None,
    track: Track[Any] = untracked,
) -> InspectReport:
    """Census of the symmetries of a checkpoint, and the invariants of its heads.

    `reference` is a directory, a GGUF file, a config.json, or a hub id in the local cache. The census needs headers
    only; with `spectra` every tensor is read once more, one attention at a time, and checked for NaN. `dtype` rounds
    weights to that precision first, to see what a cast would do; the algebra is float64 (or the most precise float
    that `device` has). `track(items, total, what)` wraps long loops to show progress.

    Raises `CheckpointError`, `UnsupportedArchitecture` or `UnsupportedObservable`.
    """
    checkpoint = open_checkpoint(reference, revision)
    spec = read_spec(checkpoint)
    symmetries = derive(spec, observable)
    heads: list[HeadRow] = []
    norms: list[NormRow] = []
    if spectra and checkpoint.format != "config":
        reader = _Reader(checkpoint, device, dtype)
        every = list(circuits(spec, symmetries.observable))
        for each in track(every, len(every), "spectra"):
            heads += _head_rows(each, reader)
        norms = list(_norm_rows(spec, reader))
        _check_rest(spec, reader, track)
    return InspectReport(
        model=_facts(checkpoint, spec),
        observable=symmetries.observable,
        parameters=spec.parameters,
        by_symmetry=_by_name(symmetries.continuous),
        by_layer=_by_layer(symmetries.continuous),
        dead=_dead(symmetries),
        discrete=_by_name(symmetries.discrete),
        at_zero_eps=_by_name(symmetries.at_zero_eps),
        blocked=symmetries.blocked,
        heads=tuple(heads),
        norms=tuple(norms),
    )


class _Reader:
    """Loads tensors, rounds them as asked, and refuses what is not finite."""

    def __init__(self, checkpoint: Checkpoint, device: str, dtype: Precision) -> None:
        self.checkpoint = checkpoint
        self.checked: set[str] = set()
        self._device = device
        self._dtype = None if dtype == "stored" else getattr(torch, dtype)

    def __call__(self, name: str) -> Tensor:
        tensor = load_finite(self.checkpoint, name)
        self.checked.add(name)
        return tensor.to(device=self._device, dtype=self._dtype or tensor.dtype)

    def check(self, name: str) -> None:
        """Look a tensor through without holding all of it."""
        if name not in self.checked:
            for part in self.checkpoint.parts(name):
                require_finite(name, part)
            self.checked.add(name)

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors are equal, without holding all of either."""
        parts = zip(self.checkpoint.parts(first), self.checkpoint.parts(second), strict=True)
        return all(torch.equal(a, b) for a, b in parts)


def _head_rows(each: Circuits, reader: _Reader) -> Iterator[HeadRow]:
    tensors: Mapping[str, Tensor] = {name: reader(name) for name in each.names}
    factors: dict[Literal["qk", "vo"], tuple[Tensor, Tensor]] = {
        "qk": each.query_key(tensors),
        "vo": each.value_output(tensors),
    }
    for circuit, (a, b) in factors.items():
        spectrum = product_spectrum(a, b)
        ranks = numerical_rank(spectrum, max(a.shape[-1], b.shape[-1]))
        absolute, relative = balance_defect(a, b)
        for head in range(spectrum.shape[0]):
            yield HeadRow(
                stream=each.stream,
                layer=each.layer,
                attention="cross" if each.attention.memory else "self",
                kv_head=head,
                circuit=circuit,
                rank=int(ranks[head]),
                effective_rank=float(effective_rank(spectrum[head])),
                stable_rank=float(stable_rank(spectrum[head])),
                spectrum=tuple(spectrum[head].tolist()),
                balance=float(absolute[head]),
                balance_relative=float(relative[head]),
                degenerate_blocks=tuple(degenerate_blocks(spectrum[head], TIE)),
            )


def _norm_rows(spec: Spec, reader: _Reader) -> Iterator[NormRow]:
    for norm in spec.norms():
        weight = norm.weight.read(reader(norm.weight.name)).double()
        yield NormRow(
            where=norm.where,
            kind=norm.kind,
            mean=float(weight.mean()),
            std=float(weight.std(unbiased=False)),
            smallest=float(weight.min()),
            largest=float(weight.max()),
            zeros=int((weight == 0).sum()),
        )


def _check_rest(spec: Spec, reader: _Reader, track: Track[Any]) -> None:
    """Every tensor is finite, and tied tensors that are stored twice are equal."""
    rest = [name for name in spec.tensors if name not in reader.checked]
    for name in track(rest, len(rest), "other tensors"):
        reader.check(name)
    for copy, original in spec.copies:
        if not reader.same(copy, original):
            raise CheckpointError(
                f"{copy} differs from {original}, but the config ties them: "
                "set tie_word_embeddings to false, or drop the copy"
            )


def _facts(checkpoint: Checkpoint, spec: Spec) -> dict[str, Any]:
    main = spec.main
    attention = next(attention for stream, _, attention, _ in spec.attentions() if stream == main.name)
    return {
        "family": spec.family,
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "layers": len(main.blocks),
        "d_model": main.width,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "vocabulary": main.head.linear.weight.shape[0] if main.head is not None else None,
        "tied": main.head is not None and main.head.tied,
        "streams": [{"name": s.name, "layers": len(s.blocks), "d_model": s.width} for s in spec.streams],
    }


def _by_name(symmetries: Iterable[Symmetry]) -> tuple[SymmetryRow, ...]:
    kinds: dict[tuple[str, str], list[Symmetry]] = {}
    for symmetry in symmetries:
        kinds.setdefault((symmetry.name, symmetry.exactness), []).append(symmetry)
    rows = [
        SymmetryRow(name, _product(each), sum(s.dimension for s in each), exactness, tuple(s.where for s in each))
        for (name, exactness), each in kinds.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.dimension))


def _product(symmetries: list[Symmetry]) -> str:
    """The groups of all places, as a product."""
    counts: dict[str, int] = {}
    for symmetry in symmetries:
        counts[symmetry.group] = counts.get(symmetry.group, 0) + 1
    return " x ".join(power(group, count) for group, count in counts.items())


def _by_layer(symmetries: Iterable[Symmetry]) -> tuple[LayerRow, ...]:
    layers: dict[str, dict[str, int]] = {}
    for symmetry in symmetries:
        kinds = layers.setdefault(symmetry.layer, {})
        kinds[symmetry.name] = kinds.get(symmetry.name, 0) + symmetry.dimension
    outside = layers.pop("", None)
    rows = [LayerRow(layer, sum(kinds.values()), kinds) for layer, kinds in layers.items()]
    if outside is not None:
        rows.append(LayerRow("", sum(outside.values()), outside))
    return tuple(rows)


def _dead(symmetries: Symmetries) -> tuple[DeadRow, ...]:
    totals: dict[tuple[str, str], int] = {}
    for dead in symmetries.dead:
        key = (dead.view.name, dead.reason)
        totals[key] = totals.get(key, 0) + dead.view.numel
    return tuple(DeadRow(tensor, reason, count) for (tensor, reason), count in totals.items())
