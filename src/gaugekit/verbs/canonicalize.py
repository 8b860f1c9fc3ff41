"""`canonicalize`: the representative of a model's orbit, the same for every disguise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Literal

from gaugekit.linalg import degenerate_blocks, product_spectrum
from gaugekit.symmetry import Observable, Symmetry, circuits
from gaugekit.symmetry.constants import KeyConstant, ValueConstant
from gaugekit.symmetry.heads import QKNormScale, QueryKey, ValueOutput
from gaugekit.symmetry.norms import LayerScale, NormConstant, NormScale, ReaderKernel
from gaugekit.symmetry.orbit import Homeward
from gaugekit.symmetry.pivoted import PivotedQueryKey, PivotedValueOutput
from gaugekit.symmetry.shifts import HeadConstant, ParallelBias, TableConstant
from gaugekit.symmetry.stream import Frame, WriterMean
from gaugekit.symmetry.units import RouterConstant
from gaugekit.symmetry.wiring import output
from gaugekit.verbs.inspect import TIE, Track, untracked
from gaugekit.verbs.rewriting import (
    Opened,
    Skipped,
    carry_out,
    digest,
    opened,
    prepare,
    require_fitting_heads,
    without_zeros,
)
from gaugekit.verbs.verify import HALF_ULP, coarsest

Level = Literal["heads", "full"]
Gauge = Literal["balanced", "pivoted", "folded"]

# Keys are sums over a row or a head: rounding of its entries moves them by about this many half units.
TIE_ROOM = 4.0

HEADS = (ValueOutput, QueryKey, QKNormScale)
FOLDED = (
    LayerScale,
    NormScale,
    NormConstant,
    TableConstant,
    HeadConstant,
    RouterConstant,
    ReaderKernel,
    KeyConstant,
    ValueConstant,
    ParallelBias,
    WriterMean,
)


@dataclass(frozen=True)
class Ambiguity:
    """A run of (nearly) equal singular values of one head: inside it the representative may turn by O(size)."""

    stream: str
    layer: int
    kv_head: int
    circuit: str
    first: int
    size: int


@dataclass(frozen=True)
class Tie:
    """Neighbours in a sorted order that rounding of the stored weights may exchange."""

    symmetry: str
    where: str
    pairs: int


@dataclass(frozen=True)
class CanonicalizeReport:
    """What was brought to its representative, what could not be, and how large the plan is.

    `written` is false after a dry run. `ties` are known once the model has been moved. `need_not_be_stored`: numbers
    that the pivoted gauge makes zero or one. `layer_norms`: how many the model has; `not_rms`: why they are not
    RMSNorms on the result, empty where they are (the mean that a LayerNorm removes is then zero, eps included).
    """

    source: str
    out: str
    level: Level
    gauge: Gauge
    observable: Observable
    fixed: dict[str, int]
    skipped: tuple[Skipped, ...]
    blocked: tuple[str, ...]
    ambiguous: tuple[Ambiguity, ...]
    tensors: int
    bytes: int
    written: bool
    need_not_be_stored: int = 0
    ties: tuple[Tie, ...] = ()
    layer_norms: int = 0
    not_rms: tuple[str, ...] = ()

    @property
    def rms(self) -> bool:
        """Whether every LayerNorm of the result computes what an RMSNorm with its weight, bias and eps does."""
        return self.layer_norms > 0 and not self.not_rms

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def canonicalize(
    reference: str | PathLike[str],
    out: str | PathLike[str],
    *,
    level: Level = "full",
    gauge: Gauge = "balanced",
    observable: Observable | None = None,
    max_shard_size: int | str = "5GB",
    dtype: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    track: Track[Any] = untracked,
) -> CanonicalizeReport:
    """Write the representative of `reference`'s orbit to `out`; what it computes does not change.

    `level` "heads" settles the bases of heads only, "full" everything that acts: norm weights become 1 and norm biases
    0, constants are gathered, frames and orders follow the token table, units and heads are balanced and sorted.
    `gauge` "balanced" makes the factors of each head as short as they can be; "pivoted" goes on from there and makes k
    columns of the values and keys the identity; "folded" settles norms and constants only: where every stream is read
    by LayerNorms whose weights could be folded, the result computes the same with RMSNorms.

    c(g·θ) = c(θ) and c(c(θ)) = c(θ) to rounding, except inside the blocks of `ambiguous`. Raises `GaugekitError`;
    nothing is left half-written.
    """
    model = opened(reference, observable, revision)
    acting, skipped = without_zeros(model, _chosen(model, level, gauge), Homeward.divisors)
    pivots = _pivots(acting) if gauge == "pivoted" else []
    path = Homeward([*acting, *pivots], model.load, TIE_ROOM * HALF_ULP[coarsest(model.checkpoint)])
    require_fitting_heads(model)
    layout = prepare(model, path.touches, out, max_shard_size=max_shard_size, dtype=dtype, overwrite=overwrite)
    ambiguous = () if gauge == "folded" else tuple(_ambiguities(model))
    if not dry_run:
        card = (
            f"# {layout.out.name}\n\nThe same function as `{model.checkpoint.path.name}` (SHA-256 of its tensors "
            f"{digest(model.checkpoint)}), at the representative of its symmetry orbit: "
            f"`gaugekit canonicalize --level {level} --gauge {gauge}`, observable {model.symmetries.observable}.\n"
        )
        carry_out(model, path, layout, card, track)
    return CanonicalizeReport(
        source=str(model.checkpoint.path),
        out=str(layout.out),
        level=level,
        gauge=gauge,
        observable=model.symmetries.observable,
        fixed=dict(Counter(symmetry.name for symmetry in acting)),
        skipped=skipped,
        blocked=tuple(b.reason for b in model.symmetries.blocked if b.symmetry == Frame.name),
        ambiguous=ambiguous,
        tensors=len(layout.changed),
        bytes=layout.total_bytes,
        written=not dry_run,
        need_not_be_stored=sum(pivot.saved for pivot in pivots),
        layer_norms=sum(norm.kind == "layer" for norm in model.spec.norms()),
        not_rms=tuple(dict.fromkeys(_means_left(model, acting))),
        ties=tuple(Tie(name, where, pairs) for (name, where), pairs in path.ties.items()),
    )


def _means_left(model: Opened, acting: tuple[Symmetry, ...]) -> Iterator[str]:
    """Why the mean that LayerNorms remove is not zero on the result."""
    settled = {symmetry.rows.name for symmetry in acting if isinstance(symmetry, WriterMean)}
    if not settled:
        yield "what is written to the streams was not centred: that is part of --level full and of --gauge folded"
        return
    for stream in model.spec.streams:
        if stream.embed_norm is not None:
            yield "the norm on the embedding writes a mean that cannot be removed"
        for table in stream.tables:
            if table.rows.name not in settled:
                tied = stream.head is not None and stream.head.tied and table.rows == stream.head.linear.weight
                why = "is also the unembedding" if tied else "reaches the stream through a nonlinearity"
                yield f"the table {table.rows.name} {why} and cannot be centred"
        for block in stream.blocks:
            for branch in block.branches:
                if branch.norm_sum is not None:
                    yield "norms after the sums read outputs of other norms, whose mean cannot be removed"
                for linear in output(branch.body):
                    if branch.norm_sum is None and branch.norm_out is None and linear.weight.name not in settled:
                        yield f"{linear.weight.name} could not be centred"


def _chosen(model: Opened, level: Level, gauge: Gauge) -> list[Symmetry]:
    kinds: tuple[type[Symmetry], ...] = FOLDED if gauge == "folded" else HEADS
    if gauge != "folded" and level == "full":
        return list(model.every)
    return [symmetry for symmetry in model.every if isinstance(symmetry, kinds)]


def _pivots(acting: tuple[Symmetry, ...]) -> list[PivotedValueOutput | PivotedQueryKey]:
    found: list[PivotedValueOutput | PivotedQueryKey] = []
    for symmetry in acting:
        if isinstance(symmetry, ValueOutput):
            found.append(PivotedValueOutput(symmetry.where, symmetry.attention))
        elif isinstance(symmetry, QueryKey):
            found.append(PivotedQueryKey(symmetry.where, symmetry.attention))
    return found


def _ambiguities(model: Opened) -> list[Ambiguity]:
    found = []
    for each in circuits(model.spec, model.symmetries.observable):
        a = each.attention
        parts = {"vo": (each.value_output, (a.v, a.o))}
        if a.qk_norm is None and a.rotary is None:
            # Elsewhere settled pair by pair, where one complex row has nothing to be confused with.
            parts["qk"] = (each.query_key, (a.q, a.k))
        norms = [view.name for view in each.small]
        for circuit, (factors, linears) in parts.items():
            tensors = {name: model.load(name) for name in {*norms, *(linear.weight.name for linear in linears)}}
            for head, spectrum in enumerate(product_spectrum(*factors(tensors))):
                for first, size in degenerate_blocks(spectrum, TIE):
                    found.append(Ambiguity(each.stream, each.layer, head, circuit, first, size))
    return found
