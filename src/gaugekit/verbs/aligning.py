"""Two checkpoints in one set of coordinates: the second moved along its orbit to the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from gaugekit.errors import GaugekitError
from gaugekit.symmetry import circuits
from gaugekit.symmetry.orbit import Load, Step
from gaugekit.verbs.activations import Activations, compared, heard
from gaugekit.verbs.alike import require_alike, shared
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.mates import Allowed
from gaugekit.verbs.nearing import Left, Way, bring
from gaugekit.verbs.refining import lessons
from gaugekit.verbs.refining import refine as refined
from gaugekit.verbs.rewriting import Opened

__all__ = ["Alignment", "Cost", "Left", "align_models", "load_as", "require_alike"]

Cost = Literal["weights", "activations"]


@dataclass(frozen=True)
class Alignment:
    """The way of one checkpoint to another's coordinates.

    names     the tensor of the moved model for each of the reference's
    refined   losses of the mean of the two, nats a token, before and after refinement; None without it
    """

    way: Way
    names: Mapping[str, str]
    refined: tuple[float, float] | None = None

    @property
    def left(self) -> tuple[Left, ...]:
        """What could not be aligned."""
        return self.way.left

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors of the moved model by the reference's names, in their new place, float64."""
        return self.way.tensors(names)


def load_as(model: Opened, names: Mapping[str, str]) -> Load:
    """Its tensors by the names of another model."""
    return lambda name: model.load(names[name])


def align_models(
    reference: Opened,
    other: Opened,
    *,
    cost: Cost = "weights",
    allowed: Allowed = "all",
    text: Path | None = None,
    refine: int = 0,
    track: Track[Any] = untracked,
) -> Alignment:
    """Move `other` along its orbit to `reference`, one layer of each in memory at a time.

    Args:
        cost: what is compared: weights, or what both compute on `text` ("activations", which runs both models).
        allowed: all symmetries, or "permutations" of heads, units and coordinates alone, for weights.
        refine: so many steps by gradient on the loss of the mean of both on `text`, which hold both in memory.

    Raises `GaugekitError`, before any work, where the two are not one architecture; and if a text is to be read, where
    it cannot be, or the models cannot be run on one.
    """
    names = require_alike(reference, other)
    spec = shared(reference.spec, names)
    if allowed != "all" and (cost != "weights" or refine):
        raise GaugekitError("permutations alone are found by weights, and not refined")
    if text is None and (cost == "activations" or refine):
        raise GaugekitError("activations and the loss of a mean are those on a text: name one")
    lesson = lessons(reference, text) if text is not None and refine else None
    words = heard(reference, other, text) if text is not None and cost == "activations" else ()

    def judge(ours: Sequence[Step], theirs: Sequence[Step]) -> Activations:
        crosses = compared(reference, other, names, words, (ours, theirs), track)
        return Activations(circuits(spec, reference.symmetries.observable), crosses)

    way = bring(
        spec,
        reference.symmetries,
        reference.load,
        load_as(other, names),
        allowed,
        judge=judge if cost == "activations" else None,
        track=track,
    )
    if lesson is None:
        return Alignment(way, names)
    found = refined(reference, spec, way, lesson, refine, track=track)
    return Alignment(way.turned(found.steps), names, (found.before, found.after))
