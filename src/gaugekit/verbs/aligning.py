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
from gaugekit.verbs.activations import Activations, compared
from gaugekit.verbs.alike import require_alike
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.nearing import Left, Way, bring
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
    text: Path | None = None,
    refine: int = 0,
    track: Track[Any] = untracked,
) -> Alignment:
    """Move `other` along its orbit to `reference`, one layer of each in memory at a time.

    Args:
        cost: what is compared: weights, or what both compute on `text` ("activations", which runs both models).
        refine: so many steps by gradient on the loss of the mean of both on `text`, which hold both in memory.

    Raises `GaugekitError` where the two are not one architecture.
    """
    names = require_alike(reference, other)
    if text is None and (cost == "activations" or refine):
        raise GaugekitError("activations and the loss of a mean are those on a text: name one")

    def judge(ours: Sequence[Step], theirs: Sequence[Step]) -> Activations:
        assert text is not None
        crosses = compared(reference, other, names, text, (ours, theirs), track)
        return Activations(circuits(reference.spec, reference.symmetries.observable), crosses)

    way = bring(
        reference.spec,
        reference.symmetries,
        reference.load,
        load_as(other, names),
        judge=judge if cost == "activations" else None,
        track=track,
    )
    if not refine:
        return Alignment(way, names)
    assert text is not None
    found = refined(reference, way, text, refine, track=track)
    return Alignment(way.turned(found.steps), names, (found.before, found.after))
