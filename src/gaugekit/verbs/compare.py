"""`compare`: the distance of two checkpoints modulo symmetry, and what it says of their descent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from os import PathLike
from statistics import median
from typing import Any, Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gaugekit.checkpoint import Checkpoint, open_checkpoint
from gaugekit.linalg import product_spectrum
from gaugekit.models import Spec, read_spec
from gaugekit.models.spec import Norm
from gaugekit.symmetry import Circuits, Observable, Symmetries, circuits, derive
from gaugekit.symmetry.circuits import folded
from gaugekit.symmetry.wiring import wire
from gaugekit.verbs.fingerprint import Fingerprint, fingerprint, read_fingerprint
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.kinds import difference, kind
from gaugekit.verbs.loading import load_finite
from gaugekit.verbs.matching import (
    Pairing,
    Units,
    match_heads,
    match_units,
    mlps,
    spectral_rounding,
    stream_turn,
)
from gaugekit.verbs.verify import HALF_ULP, ROUNDING_ROOM, coarsest, verify

Verdict = Literal["same", "related", "unrelated", "incomparable"]

# Inner products cancel: distances below this are not resolved.
RESOLUTION = 1e-6
# Median cosine of matched head products from which two models are relatives. Of the pairs in docs/lineage.md relatives
# have 0.93 and more, models trained anew 0.014 and less; tiny random ones stay below 0.2.
KINSHIP = 0.5
# Median distance of spectra below which two models may be relatives. The farthest relatives measured, two fine-tunes of
# one model, are at 0.095, the nearest models trained anew at 0.113 (docs/lineage.md): a narrow gap.
NEAR = 0.1
# Fingerprints hold logarithms to four digits.
PRINTED = 1e-4


@dataclass(frozen=True)
class LayerDistance:
    """One layer after the symmetries are removed: medians over heads, and the MLP. None where there is none, or where
    only spectra were compared. `spectra_*` are distances of the heads' spectra."""

    stream: str
    layer: int
    attention: str
    spectra_qk: float
    spectra_vo: float
    qk: float | None = None
    vo: float | None = None
    mlp: float | None = None
    rounding: float | None = None
    cosine: float | None = None

    @property
    def spectra(self) -> float:
        """The larger of the two distances of spectra."""
        return max(self.spectra_qk, self.spectra_vo)


@dataclass(frozen=True)
class CompareReport:
    """`distance`: median over layers of the largest of a layer's distances, relative to the first; `rounding`: what
    the rounding of stored weights explains of it; `cosine`: median likeness of matched heads."""

    first: str
    second: str
    verdict: Verdict
    reason: str
    spectra: float | None = None
    distance: float | None = None
    rounding: float | None = None
    cosine: float | None = None
    largest_difference: float | None = None
    layers: tuple[LayerDistance, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    first: str | PathLike[str],
    second: str | PathLike[str],
    *,
    observable: Observable | None = None,
    fast: bool = False,
    track: Track[Any] = untracked,
) -> CompareReport:
    """Compare two checkpoints modulo every symmetry of their architecture, one layer of each in memory at a time.

    First the spectra of G_QK and G_VO, which no symmetry moves; `fast` stops there. Then frames are found from the
    token tables, heads and units are paired, and the products themselves are compared. `same` is said only if both
    models also compute the same (`verify`). Either may be a fingerprint (a .json file), which stands for its model as
    far as spectra go. Raises `GaugekitError` for a checkpoint that cannot be read.
    """
    prints = [read_fingerprint(each) for each in (first, second)]
    if any(prints):
        ours, theirs = (
            found or fingerprint(each, observable=observable, track=track)
            for found, each in zip(prints, (first, second), strict=True)
        )
        return compare_fingerprints(ours, theirs, str(first), str(second))
    a, b = open_checkpoint(first), open_checkpoint(second)
    spec, other = read_spec(a), read_spec(b)
    symmetries = derive(spec, observable)
    reason = difference(kind(spec, symmetries.observable), kind(other, symmetries.observable))
    if reason is not None:
        return CompareReport(str(a.path), str(b.path), "incomparable", reason)
    layers = _layers(a, b, spec, other, symmetries, fast, track)
    spectra = median(row.spectra for row in layers)
    if fast:
        verdict, reason = judge_spectra(layers)
        return CompareReport(str(a.path), str(b.path), verdict, reason, spectra, layers=layers)
    distances = [max(x for x in (row.qk, row.vo, row.mlp) if x is not None) for row in layers]
    roundings = [row.rounding or 0.0 for row in layers]
    cosine = median(row.cosine or 0.0 for row in layers)
    equal = [d <= max(RESOLUTION, ROUNDING_ROOM * r) for d, r in zip(distances, roundings, strict=True)]
    within = all(equal)
    largest = None
    if within:
        outcome = verify(first, second, observable=observable)
        largest = outcome.largest
        within = outcome.equivalent
    if within:
        verdict, reason = "same", "one orbit: the heads and units agree within rounding, and so do the outputs"
    elif cosine >= KINSHIP:
        verdict, reason = "related", f"matched heads are alike (median cosine {cosine:.3f}), but not equal"
        if any(equal):  # a fine-tune of the last layers only has a median distance of zero
            reason += f"; {sum(equal)} of {len(equal)} layers agree within rounding"
    else:
        verdict, reason = "unrelated", f"matched heads are not alike (median cosine {cosine:.3f})"
    return CompareReport(
        str(a.path),
        str(b.path),
        verdict,
        reason,
        spectra,
        median(distances),
        median(roundings),
        cosine,
        largest,
        layers,
    )


def compare_fingerprints(ours: Fingerprint, theirs: Fingerprint, first: str, second: str) -> CompareReport:
    """What two signatures say; spectra only, to four digits."""
    reason = difference(ours.kind, theirs.kind)
    if reason is None and (ours.observable, ours.points) != (theirs.observable, theirs.points):
        reason = f"different observables: {ours.observable} and {theirs.observable}"
    if reason is not None:
        return CompareReport(first, second, "incomparable", reason)
    rows = []
    for a, b in zip(ours.attentions, theirs.attentions, strict=True):
        # Differences of logarithms are relative differences.
        qk, vo = (
            spectral_distance(*(torch.tensor(x, dtype=torch.float64).exp() for x in pair))
            for pair in ((a.qk, b.qk), (a.vo, b.vo))
        )
        rounding = max(PRINTED, a.rounding + b.rounding)
        rows.append(LayerDistance(a.stream, a.layer, a.attention, qk, vo, rounding=rounding))
    verdict, reason = judge_spectra(tuple(rows))
    spectra = median(row.spectra for row in rows)
    return CompareReport(first, second, verdict, reason, spectra, layers=tuple(rows))


def _layers(
    a: Checkpoint, b: Checkpoint, spec: Spec, other: Spec, symmetries: Symmetries, fast: bool, track: Track[Any]
) -> tuple[LayerDistance, ...]:
    observable = symmetries.observable
    ours, theirs = list(circuits(spec, observable)), list(circuits(other, observable))
    eps = (HALF_ULP[coarsest(a)], HALF_ULP[coarsest(b)])
    plain = list(mlps(spec, observable))
    wirings = wire(spec, observable)
    tables = {name: wiring.stream.tables[0].rows.name for name, wiring in wirings.items()}
    others = [wiring.stream.tables[0].rows.name for wiring in wire(other, observable).values()]
    # The same tensor may have another prefix in the other file, and beside it there may be other task heads: names are
    # matched part by part.
    rename = dict(zip(tables.values(), others, strict=True))
    for mine, yours in (*zip(ours, theirs, strict=True), *zip(plain, mlps(other, observable), strict=True)):
        rename.update(zip(mine.names, yours.names, strict=True))

    def pair(names: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {n: load_finite(a, n) for n in names}, {n: load_finite(b, rename[n]) for n in names}

    turns: dict[str, Tensor] = {}
    units: dict[tuple[str, int], Pairing] = {}
    if not fast:
        for name, wiring in wirings.items():
            turns[name] = stream_turn(wiring.stream, symmetries, wiring.place, *pair((tables[name],)))
        for each in track(plain, len(plain), "hidden units"):
            both = pair(each.names)
            coarse = _coarser(eps, *(_excess_of_units(each, t) for t in both))
            units[each.stream, each.layer] = match_units(each, *both, turns[each.stream], coarse)
    rows = []
    for each, _ in track(list(zip(ours, theirs, strict=True)), len(ours), "heads"):
        mine, yours = pair(each.names)
        qk = spectral_distance(*(product_spectrum(*each.query_key(t)) for t in (mine, yours)))
        vo = spectral_distance(*(product_spectrum(*each.value_output(t)) for t in (mine, yours)))
        attention = "cross" if each.attention.memory else "self"
        if fast:
            rounding = sum(spectral_rounding(each, t, e) for t, e in zip((mine, yours), eps, strict=True))
            rows.append(LayerDistance(each.stream, each.layer, attention, qk, vo, rounding=rounding))
            continue
        coarse = _coarser(eps, *(_excess_of_heads(each, t) for t in (mine, yours)))
        found = match_heads(each, mine, yours, turns, coarse)
        unit = units.get((each.stream, each.layer)) if attention == "self" else None
        rows.append(
            LayerDistance(
                each.stream,
                each.layer,
                attention,
                qk,
                vo,
                _median(found["qk"], lambda p: p.distance),
                _median(found["vo"], lambda p: p.distance),
                None if unit is None else unit.distance,
                max(
                    *(_median(found[name], lambda p: p.rounding) for name in ("qk", "vo")),
                    0.0 if unit is None else unit.rounding,
                ),
                min(_median(found[name], lambda p: p.cosine) for name in ("qk", "vo")),
            )
        )
    return tuple(rows)


def _coarser(eps: tuple[float, float], *excess: float) -> tuple[float, float]:
    first, second = (e * x for e, x in zip(eps, excess, strict=True))
    return first, second


def _excess_of_heads(each: Circuits, tensors: dict[str, Tensor]) -> float:
    """By how much more the stored weights of an attention are rounded than what LayerNorms see of them would be.

    Means that no LayerNorm sees are stored all the same, and a weight is rounded relative to all of itself: in a BERT
    with weights of 0.03, scrambled with means of 1, distances are 12 times what rounding of the seen part explains.
    """
    stored = replace(each, query_norm=_keeping_means(each.query_norm), key_norm=_keeping_means(each.key_norm))
    stored = replace(stored, mean_unseen=False)
    ratios = []
    for factors in (Circuits.queries_keys, Circuits.values_outputs):
        pairs = zip(factors(stored, tensors), factors(each, tensors), strict=True)
        squares = [float(whole.square().sum() / seen.square().sum().clamp_min(1e-300)) for whole, seen in pairs]
        ratios.append((sum(squares) / 2) ** 0.5)
    return max(ratios)


def _excess_of_units(each: Units, tensors: dict[str, Tensor]) -> float:
    """The same of an MLP."""
    squares = []
    for linear in (each.mlp.up, each.mlp.gate):
        if linear is not None:
            whole, seen = (folded(tensors, linear, norm) for norm in (_keeping_means(each.norm), each.norm))
            squares.append(float(whole.square().sum() / seen.square().sum().clamp_min(1e-300)))
    down = each.mlp.down.weight.read(tensors[each.mlp.down.weight.name]).double()
    seen = down - down.mean(-1, keepdim=True) if each.mean_unseen else down
    squares.append(float(down.square().sum() / seen.square().sum().clamp_min(1e-300)))
    return (sum(squares) / len(squares)) ** 0.5


def _keeping_means(norm: Norm | None) -> Norm | None:
    return None if norm is None else replace(norm, kind="rms")


def _median(pairings: list[Pairing], of: Callable[[Pairing], float]) -> float:
    return median(of(pairing) for pairing in pairings)


def spectral_distance(x: Tensor, y: Tensor) -> float:
    """Mean over matched heads of ‖s − s'‖ / ‖s‖, for spectra (g, k)."""
    cost = torch.cdist(x, y) / x.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    rows, columns = linear_sum_assignment(cost.numpy())
    return float(cost[rows, columns].mean())


def judge_spectra(layers: tuple[LayerDistance, ...]) -> tuple[Verdict, str]:
    """What spectra alone can say: equal ones do not prove one orbit, but unequal ones exclude it. Wide random matrices
    all have nearly the same spectrum, so only what rounding explains counts as equal."""
    distances = [row.spectra for row in layers]
    far = median(distances)
    if all(d <= max(RESOLUTION, ROUNDING_ROOM * (r.rounding or 0.0)) for d, r in zip(distances, layers, strict=True)):
        return "same", f"spectra agree to {far:.1e}; only the full comparison proves one orbit"
    if far < NEAR:
        return "related", f"spectra are near (median distance {far:.3f}); untrained models of one width are, too"
    return "unrelated", f"spectra are far apart (median distance {far:.3f})"
