"""`scramble`: the same model at a random place of its orbit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, get_args

import torch

from gaugekit.errors import GaugekitError
from gaugekit.symmetry import Observable, Symmetry
from gaugekit.symmetry.base import Part
from gaugekit.symmetry.norms import NormScale
from gaugekit.symmetry.orbit import Path, Step, constantless, shifted_by_kernel
from gaugekit.symmetry.stream import Frame
from gaugekit.symmetry.units import ActivationScale
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.rewriting import Opened, Skipped, carry_out, opened, prepare, require_fitting_heads, without_zeros

PARTS: tuple[Part, ...] = get_args(Part)
# Where the rules may have said why a part is trivial.
BLOCKABLE: dict[Part, tuple[str, ...]] = {
    "units": (ActivationScale.name,),
    "norms": (NormScale.name,),
    "frame": (Frame.name,),
}


@dataclass(frozen=True)
class ScrambleReport:
    """What was moved: kinds of symmetry with the number of places, tensors changed, and what was left out."""

    source: str
    out: str
    seed: int
    condition: float
    only: tuple[str, ...] | None
    observable: Observable
    moved: dict[str, int]
    tensors: int
    skipped: tuple[Skipped, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def scramble(
    reference: str | PathLike[str],
    out: str | PathLike[str],
    *,
    seed: int,
    only: Collection[Part] | None = None,
    condition: float = 10.0,
    observable: Observable | None = None,
    max_shard_size: int | str = "5GB",
    dtype: str | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    track: Track[Any] = untracked,
) -> ScrambleReport:
    """Write `reference` to `out`, moved by a random element of its whole symmetry group, or of the parts in `only`.

    The function is preserved exactly in exact arithmetic; on disk up to the rounding of each weight, which grows with
    `condition`, the condition number of the random matrices and scales. Reflections and permutations are included.
    Raises `GaugekitError`; nothing is left half-written.
    """
    unknown = sorted(set(only or ()) - set(PARTS))
    if unknown:
        raise GaugekitError(f"unknown part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    if not 1 <= condition < 1e12:
        raise GaugekitError(f"condition {condition} is out of range: it must be at least 1 and below 1e12")
    model = opened(reference, observable, revision)
    chosen = [s for s in model.every if only is None or s.part in only]
    acting, skipped = without_zeros(model, chosen, lambda symmetry: symmetry.divisors)
    acting, more = _without_constantless(model, acting)
    skipped += more
    if not acting:
        raise GaugekitError(f"{reference}: nothing to move: {_why_not(model, only, skipped)}")
    generator = torch.Generator().manual_seed(seed)
    path = Path([Step(symmetry, symmetry.sample(generator, condition)) for symmetry in acting])
    require_fitting_heads(model)
    layout = prepare(model, path.touches, out, max_shard_size=max_shard_size, dtype=dtype, overwrite=overwrite)
    card = (
        f"# {layout.out.name}\n\nThe same function as `{model.checkpoint.path.name}`, at another place of its symmetry "
        f"orbit: `gaugekit scramble --seed {seed} --condition {condition:g}`"
        f"{'' if only is None else ' --only ' + ','.join(sorted(only))}, observable {model.symmetries.observable}.\n"
    )
    carry_out(model, path, layout, card, track)
    return ScrambleReport(
        str(model.checkpoint.path),
        str(layout.out),
        seed,
        condition,
        None if only is None else tuple(only),
        model.symmetries.observable,
        dict(Counter(symmetry.name for symmetry in acting)),
        len(layout.changed),
        skipped,
    )


def _without_constantless(
    model: Opened, symmetries: Sequence[Symmetry]
) -> tuple[tuple[Symmetry, ...], tuple[Skipped, ...]]:
    """Those that shift no reader without a bias behind a LayerNorm whose bias is zero: there is no room for a constant
    there, and there would be no way back. Reads weights of norms only."""
    kept, skipped = [], []
    for symmetry in symmetries:
        norm = next((norm for norm in shifted_by_kernel(symmetry) if constantless(norm, model.load)), None)
        if norm is None:
            kept.append(symmetry)
        else:
            reason = f"the bias of {norm.where} is zero, and what reads it has none of its own"
            skipped.append(Skipped(symmetry.name, symmetry.where, reason))
    return tuple(kept), tuple(skipped)


def _why_not(model: Opened, only: Collection[Part] | None, skipped: tuple[Skipped, ...]) -> str:
    """The reasons why a part of the group is trivial for this model."""
    asked = {part: BLOCKABLE.get(part, ()) for part in only or PARTS}
    reasons = [f"{b.symmetry}: {b.reason}" for b in model.symmetries.blocked if b.symmetry in sum(asked.values(), ())]
    reasons += [f"{s.symmetry}: {s.reason}" for s in skipped]
    return "; ".join(dict.fromkeys(reasons)) or f"{model.spec.family} has no symmetry of the kind {', '.join(asked)}"
