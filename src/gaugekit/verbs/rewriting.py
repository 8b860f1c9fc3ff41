"""Writing a checkpoint that has moved along its orbit: plan from headers, then one piece after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from gaugekit.checkpoint import Checkpoint, open_checkpoint
from gaugekit.checkpoint.writer import Plan, plan, write
from gaugekit.errors import CheckpointError
from gaugekit.models import Spec, read_spec
from gaugekit.models.view import View
from gaugekit.symmetry import Observable, Symmetries, Symmetry, derive
from gaugekit.symmetry.orbit import Path, pieces
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.loading import load_finite


@dataclass(frozen=True)
class Skipped:
    """A symmetry that this checkpoint's weights do not have, and why."""

    symmetry: str
    where: str
    reason: str


@dataclass(frozen=True)
class Opened:
    """A checkpoint with its spec and symmetries."""

    checkpoint: Checkpoint
    spec: Spec
    symmetries: Symmetries

    @property
    def every(self) -> tuple[Symmetry, ...]:
        return (*self.symmetries.continuous, *self.symmetries.discrete)

    def load(self, name: str) -> Tensor:
        """One tensor, refused if it is not finite."""
        return load_finite(self.checkpoint, name)


def opened(reference: str | PathLike[str], observable: Observable | None, revision: str | None = None) -> Opened:
    """Open a checkpoint and derive what acts on it."""
    checkpoint = open_checkpoint(reference, revision)
    spec = read_spec(checkpoint)
    return Opened(checkpoint, spec, derive(spec, observable))


def without_zeros(
    model: Opened, symmetries: Iterable[Symmetry], divisors: Any
) -> tuple[tuple[Symmetry, ...], tuple[Skipped, ...]]:
    """Those symmetries whose divisors have no zero entry, and the others with the reason. Reads norm weights only."""
    zeros: dict[View, int] = {}
    kept, skipped = [], []
    for symmetry in symmetries:
        for view in divisors(symmetry):
            if view not in zeros:
                zeros[view] = int((view.read(model.load(view.name).double()) == 0).sum())
            if zeros[view]:
                many = "a zero entry, which has" if zeros[view] == 1 else f"{zeros[view]} zero entries, which have"
                reason = f"{view.name} has {many} no inverse"
                skipped.append(Skipped(symmetry.name, symmetry.where, reason))
                break
        else:
            kept.append(symmetry)
    return tuple(kept), tuple(skipped)


def require_fitting_heads(model: Opened) -> None:
    """Raise `CheckpointError` where heads for other tasks read states whose coordinates are free to change."""
    if model.symmetries.observable != "similarities":
        return
    heads = [dead.view.name for dead in model.spec.dead if dead.reason.startswith("task head")]
    if heads:
        raise CheckpointError(
            f"{model.checkpoint.path}: {heads[0]} belongs to a head for another task, which reads coordinates of the "
            "last states; --observable similarities lets these change: use --observable hidden, or remove the head"
        )


def prepare(model: Opened, touches: Iterable[str], out: str | PathLike[str], **options: Any) -> Plan:
    """The plan of a checkpoint in which `touches` change, and stored copies of tied tensors with them."""
    changed = set(touches)
    changed |= {copy for copy, original in model.spec.copies if original in changed}
    return plan(model.checkpoint, out, changed, **options)


def carry_out(model: Opened, path: Path, layout: Plan, card: str, track: Track[Any] = untracked) -> None:
    """Move the model piece by piece and write it."""
    write(layout, moved(model, path, track), card=card)


def moved(model: Opened, path: Path, track: Track[Any] = untracked) -> Iterator[tuple[str, Tensor]]:
    """What the path changes, tensor by tensor, stored copies of tied ones with them."""
    every: Sequence[tuple[str, ...]] = list(pieces(model.spec))
    for names in track(every, len(every), "layers"):
        yield from with_copies(model, path.move(names, model.load))


def with_copies(model: Opened, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by the model's own names, and stored copies of tied ones with them, so that they stay equal."""
    copies = {original: copy for copy, original in model.spec.copies}
    for name, value in tensors.items():
        yield name, value
        if name in copies:
            yield copies[name], value


def digest(checkpoint: Checkpoint) -> str:
    """SHA-256 of every tensor's name and bytes, in the order of names: the source that a card names."""
    total = hashlib.sha256()
    for name in sorted(checkpoint.headers):
        total.update(name.encode())
        for part in checkpoint.parts(name):
            total.update(part.contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()
