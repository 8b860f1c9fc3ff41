"""`align`: one checkpoint moved along its orbit to where another one lies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from gaugekit.checkpoint.writer import write
from gaugekit.errors import CheckpointError
from gaugekit.models import Spec
from gaugekit.symmetry import Observable
from gaugekit.symmetry.orbit import pieces
from gaugekit.verbs.aligning import Alignment, Cost, Left, align_models
from gaugekit.verbs.alike import require_alike, shared
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.mates import Allowed
from gaugekit.verbs.nearing import Meter
from gaugekit.verbs.rewriting import Opened, digest, opened, prepare, require_fitting_heads, with_copies

__all__ = ["AlignReport", "Distance", "align"]


@dataclass(frozen=True)
class Distance:
    """‖θ − θ'‖ / ‖θ‖ over the weights of one place: a layer, or a tensor that stands in none. `before`: as stored."""

    where: str
    before: float
    after: float


@dataclass(frozen=True)
class AlignReport:
    """How near one model was brought to another.

    before, after   ‖θ − θ'‖ / ‖θ‖ over all weights but dead ones
    sweeps          the same where scales and shifts of both are settled: before the search, and after each sweep
    left            what could not be aligned, and why
    refined         loss on the text of the mean of both models, nats a token, before and after refinement; None without
    written         false after a dry run; then `bytes` are what the files would take
    """

    reference: str
    source: str
    out: str
    observable: Observable
    cost: Cost
    allowed: Allowed
    before: float
    after: float
    places: tuple[Distance, ...]
    sweeps: tuple[float, ...]
    left: tuple[Left, ...]
    refined: tuple[float, float] | None
    tensors: int
    bytes: int
    written: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def align(
    reference: str | PathLike[str],
    source: str | PathLike[str],
    out: str | PathLike[str],
    *,
    cost: Cost = "weights",
    allowed: Allowed = "all",
    text: str | PathLike[str] | None = None,
    refine: int = 0,
    observable: Observable | None = None,
    max_shard_size: int | str = "5GB",
    dtype: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    track: Track[Any] = untracked,
) -> AlignReport:
    """Write `source` to `out`, moved along its orbit to where `reference` lies: frame, heads, units, norms, constants.

    What `source` computes does not change but for rounding of the stored weights (`verify` measures it). The result
    does not depend on where on its orbit `source` was. A source that is a disguise of the reference becomes it, to
    rounding.

    Args:
        cost: what is brought together: weights, or what both compute on `text` ("activations").
        allowed: all symmetries, or "permutations" of heads, units and coordinates alone, for weights.
        refine: steps by gradient, after that, on the loss of the mean of both on `text`.

    Raises `GaugekitError`: before any work where the two are not one architecture; nothing is left half-written.
    """
    ours, theirs = opened(reference, observable), opened(source, observable)
    # Everything may change. What cannot be written is refused here, before long work.
    changed = require_alike(ours, theirs).values()
    require_fitting_heads(theirs)
    layout = prepare(theirs, changed, out, max_shard_size=max_shard_size, dtype=dtype, overwrite=overwrite)
    _require_apart(layout.out, ours.checkpoint.path.resolve())
    where = None if text is None else Path(text)
    alignment = align_models(ours, theirs, cost=cost, allowed=allowed, text=where, refine=refine, track=track)
    found = Found(ours, theirs, alignment)
    if dry_run:
        for _ in found.moved(track):
            pass
    else:
        card = (
            f"# {layout.out.name}\n\nThe same function as `{theirs.checkpoint.path.name}` (SHA-256 of its tensors "
            f"{digest(theirs.checkpoint)}), moved along its symmetry orbit to where `{ours.checkpoint.path.name}` "
            f"(SHA-256 of its tensors {digest(ours.checkpoint)}) lies: "
            f"`gaugekit align --cost {cost} --allow {allowed}`, observable {theirs.symmetries.observable}.\n"
        )
        write(layout, found.moved(track), card=card)
    return AlignReport(
        reference=str(ours.checkpoint.path),
        source=str(theirs.checkpoint.path),
        out=str(layout.out),
        observable=theirs.symmetries.observable,
        cost=cost,
        allowed=allowed,
        before=found.before.distance,
        after=found.after.distance,
        places=tuple(found.places),
        sweeps=alignment.way.distances,
        left=alignment.left,
        refined=alignment.refined,
        tensors=len(layout.changed),
        bytes=layout.total_bytes,
        written=not dry_run,
    )


def _require_apart(place: Path, reference: Path) -> None:
    """The result must not take the reference's place; `prepare` looks after the source's."""
    if place == reference or place in reference.parents or reference in place.parents:
        raise CheckpointError(
            f"{place}: is, holds or lies inside {reference}, to which the other is moved; choose another directory"
        )


class Found:
    """Goes once through the moved model, and measures on the way how near it has come."""

    def __init__(self, ours: Opened, theirs: Opened, alignment: Alignment) -> None:
        unseen = [dead.view for dead in ours.spec.dead]
        self.before, self.after = Meter(unseen), Meter(unseen)
        self.places: list[Distance] = []
        self._unseen, self._ours, self._theirs, self._alignment = unseen, ours, theirs, alignment

    def moved(self, track: Track[Any]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its own name."""
        every = list(places(shared(self._ours.spec, self._alignment.names)))
        for where, held in track(every, len(every), "layers"):
            # No name here, so that no table is held while the next is made.
            yield from with_copies(self._theirs, self._measured(where, held))

    def _measured(self, where: str, held: tuple[str, ...]) -> dict[str, Tensor]:
        names = self._alignment.names
        tensors = self._alignment.tensors(held)
        ours = {name: self._ours.load(name) for name in held}
        stored = {name: self._theirs.load(names[name]) for name in held}
        here = Meter(self._unseen), Meter(self._unseen)
        for meter, theirs in zip((self.before, self.after, *here), (stored, tensors, stored, tensors), strict=True):
            meter.add(ours, theirs)
        self.places.append(Distance(where, *(meter.distance for meter in here)))
        return {names[name]: value for name, value in tensors.items()}


def places(spec: Spec) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each piece of a model with what it is called: its layer, or its first tensor."""
    layers = [
        f"{stream.name} layer {layer}" if len(spec.streams) > 1 else f"layer {layer}"
        for stream in spec.streams
        for layer in range(len(stream.blocks))
    ]
    for number, names in enumerate(pieces(spec)):
        if names:
            yield layers[number] if number < len(layers) else names[0], names
