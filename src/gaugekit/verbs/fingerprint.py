"""`fingerprint`: a small signature that no symmetry changes: descent can be checked without shipping weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaugekit.checkpoint import open_checkpoint
from gaugekit.errors import CheckpointError
from gaugekit.linalg import product_spectrum
from gaugekit.models import read_spec
from gaugekit.symmetry import Observable, circuits, derive
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.kinds import kind
from gaugekit.verbs.loading import load_finite
from gaugekit.verbs.matching import spectral_rounding
from gaugekit.verbs.verify import HALF_ULP, coarsest

FORMAT = "gaugekit fingerprint 1"
# Numbers that fit into 100 kB of JSON at seven characters each, with room for the rest.
BUDGET = 12_000


@dataclass(frozen=True)
class AttentionPrint:
    """One attention: quantiles of the log spectra of G_QK and G_VO, one row a key/value head (heads in falling order of
    their first entry), or one row for all heads where there are too many. `rounding`: by how much rounding of the
    stored weights moves a spectrum, relative."""

    stream: str
    layer: int
    attention: str
    qk: tuple[tuple[float, ...], ...]
    vo: tuple[tuple[float, ...], ...]
    rounding: float


@dataclass(frozen=True)
class Fingerprint:
    """The signature of one checkpoint. `kind` is what must agree for two models to be comparable at all."""

    format: str
    family: str
    observable: Observable
    parameters: int
    stored_in: str
    kind: dict[str, Any]
    points: int
    pooled: bool
    attentions: tuple[AttentionPrint, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fingerprint(
    reference: str | PathLike[str],
    *,
    observable: Observable | None = None,
    revision: str | None = None,
    track: Track[Any] = untracked,
) -> Fingerprint:
    """The signature of a checkpoint: spectra of every head's circuits, which no symmetry of the architecture moves, to
    four digits. A copy that is permuted, turned or rescaled has the same one; below 100 kB as JSON. One attention is in
    memory at a time. Raises `GaugekitError`.
    """
    checkpoint = open_checkpoint(reference, revision)
    spec = read_spec(checkpoint)
    observable = derive(spec, observable).observable
    stored = coarsest(checkpoint)
    every = list(circuits(spec, observable))
    heads = sum(2 * each.attention.kv_heads for each in every)
    pooled = heads * 4 > BUDGET
    points = min(64, BUDGET // (2 * len(every) if pooled else heads))
    rows = []
    for each in track(every, len(every), "spectra"):
        tensors = {name: load_finite(checkpoint, name) for name in each.names}
        spectra = (product_spectrum(*each.query_key(tensors)), product_spectrum(*each.value_output(tensors)))
        qk, vo = (signature(s, points, pooled) for s in spectra)
        attention = "cross" if each.attention.memory else "self"
        rounding = spectral_rounding(each, tensors, HALF_ULP[stored])
        rows.append(AttentionPrint(each.stream, each.layer, attention, qk, vo, rounding))
    return Fingerprint(
        FORMAT,
        spec.family,
        observable,
        spec.parameters,
        stored,
        kind(spec, observable),
        points,
        pooled,
        tuple(rows),
    )


def signature(spectra: Tensor, points: int, pooled: bool) -> tuple[tuple[float, ...], ...]:
    """Quantiles of ln s, (heads or 1, points), rounded; spectra (g, k). Zeros count as 1e-12 of the largest value."""
    floor = spectra.max().clamp_min(1e-300) * 1e-12
    logs = spectra.clamp_min(float(floor)).log()
    logs = logs.reshape(1, -1) if pooled else logs
    at = torch.linspace(0, 1, points, dtype=torch.float64)
    rows = torch.quantile(logs, at.flip(0), dim=1).mT
    rows = rows[rows[:, 0].argsort(descending=True)]
    return tuple(tuple(round(float(x), 4) for x in row) for row in rows)


def read_fingerprint(path: str | PathLike[str]) -> Fingerprint | None:
    """A fingerprint that was written as JSON, or None if the path is something else."""
    file = Path(path)
    if file.suffix != ".json" or not file.is_file() or file.name == "config.json":
        return None
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise CheckpointError(f"{file}: is not a {FORMAT}: make one with `gaugekit fingerprint MODEL`")
    try:
        attentions = tuple(
            AttentionPrint(**{**row, "qk": tuple(map(tuple, row["qk"])), "vo": tuple(map(tuple, row["vo"]))})
            for row in raw["attentions"]
        )
        return Fingerprint(**{**raw, "attentions": attentions})
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file}: is damaged ({error}): make it again with `gaugekit fingerprint MODEL`"
        ) from error
