"""What lies between two models: the loss on a text on the way from one to the other.

A model of the way is written as a checkpoint and loaded as anybody would load it, so nothing is assumed of how names
on disk become modules.

Shapes: n tokens, d stream width.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gaugekit.checkpoint import open_checkpoint
from gaugekit.models import Spec
from gaugekit.symmetry.wiring import wire
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.rewriting import Opened
from gaugekit.verbs.running import forward, load_model
from gaugekit.verbs.texts import text_batches
from gaugekit.verbs.verify import relative_gram

__all__ = ["Ends", "Listener", "Measure", "Ways", "barrier", "ends", "listener", "ways"]

Measure = Literal["loss", "departure"]
Write = Callable[[Path], None]  # a model, as a new directory

LENGTH, ROWS = 128, 4  # tokens in a row, rows that run at a time
TOKENS: dict[Measure, int] = {"loss": 4096, "departure": 1024}  # read of a text; a Gram matrix is (n, n)


@dataclass(frozen=True)
class Ways:
    """The loss on a text along the way between two models, at every `t`: naive, both as they are, and aligned.

    measure     "loss": mean cross-entropy, nats a token. "departure", of encoders without a head:
                (1 − t) d(θ_t, A) + t d(θ_t, B) of last states over the same tokens, with d the relative distance of
                their Gram matrices, which no symmetry moves: 0 at both ends
    tokens      that were predicted, or whose states were compared
    aligned     None where the models are not aligned
    """

    measure: Measure
    text: str
    tokens: int
    t: tuple[float, ...]
    naive: tuple[float, ...]
    aligned: tuple[float, ...] | None
    barrier_naive: float
    barrier_aligned: float | None


@dataclass(frozen=True)
class Ends:
    """The loss on a text, nats a token, of every model and of their merge: naive, as they are, and aligned."""

    text: str
    tokens: int
    models: tuple[float, ...]
    naive: float
    aligned: float | None


def barrier(losses: Sequence[float]) -> float:
    """The largest rise of losses, taken at even steps, above the straight line between the ends [Frankle et al., arXiv
    1912.05671]; inf where one is not finite."""
    if not all(map(isfinite, losses)):
        return inf
    last = len(losses) - 1
    return max(loss - ((last - i) * losses[0] + i * losses[-1]) / last for i, loss in enumerate(losses))


@dataclass(frozen=True, eq=False)
class Listener:
    """A text as rows of tokens (rows, length), and what is measured of a model that reads it."""

    spec: Spec
    text: Path
    measure: Measure
    rows: tuple[Tensor, ...]

    @property
    def tokens(self) -> int:
        """How many are predicted, or give states."""
        first = 1 if self.measure == "loss" else 0
        return sum(ids.shape[0] * (ids.shape[1] - first) for ids in self.rows)

    def loss(self, folder: Path) -> float:
        """Mean cross-entropy of a checkpoint of this architecture, nats a token."""
        model = self._model(folder)
        total = 0.0
        for ids in self.rows:
            logits = forward(model, input_ids=ids).logits[:, :-1]
            total += float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
        return total / self.tokens

    def states(self, folder: Path) -> Tensor:
        """Last states (n, d) of a checkpoint of this architecture, float64."""
        model = self._model(folder)
        return torch.cat([forward(model, input_ids=ids).last_hidden_state.flatten(0, 1) for ids in self.rows]).double()

    def _model(self, folder: Path) -> Any:
        return load_model(open_checkpoint(folder), self.spec, torch.float32)


def listener(model: Opened, text: Path) -> Listener:
    """The start of a text by the model's own tokenizer; no weights are read.

    Raises:
        UnsupportedArchitecture: a model that reads something else than text.
        CheckpointError: a text that cannot be read or is too short, a tokenizer that is missing or another model's.
    """
    spec = model.spec
    measure: Measure = "departure" if spec.main.head is None else "loss"
    rows = text_batches(model.checkpoint, spec, text, LENGTH, ROWS, TOKENS[measure])
    return Listener(spec, text, measure, rows)


def ways(
    reader: Listener,
    first: Path,
    last: Path,
    t: Sequence[float],
    naive: Callable[[float], Write],
    aligned: Callable[[float], Write] | None,
    scratch: Path,
    track: Track[Any] = untracked,
) -> Ways:
    """Measure the way from one checkpoint to another at `t`, which goes from 0 to 1 in even steps.

    Args:
        naive, aligned: what writes the model at t. The aligned way ends at the last model in its new place.
        scratch: a directory for one model at a time.
    """
    hear: Callable[[Path], Any] = reader.loss if reader.measure == "loss" else reader.states
    straight = [hear(first), *_written([naive(x) for x in t[1:-1]], hear, scratch, track), hear(last)]
    moved = None
    if aligned is not None:
        moved = [straight[0], *_written([aligned(x) for x in t[1:]], hear, scratch, track)]

    def values(heard: list[Any]) -> tuple[float, ...]:
        if reader.measure == "loss":
            return tuple(heard)
        unseen = wire(reader.spec, "hidden")[reader.spec.main.name].mean_unseen
        return tuple(departure(x, y, straight[0], straight[-1], unseen) for x, y in zip(t, heard, strict=True))

    losses, losses_moved = values(straight), None if moved is None else values(moved)
    return Ways(
        measure=reader.measure,
        text=str(reader.text),
        tokens=reader.tokens,
        t=tuple(t),
        naive=losses,
        aligned=losses_moved,
        barrier_naive=barrier(losses),
        barrier_aligned=None if losses_moved is None else barrier(losses_moved),
    )


def departure(t: float, states: Tensor, first: Tensor, last: Tensor, mean_unseen: bool) -> float:
    """(1 − t) d(θ_t, A) + t d(θ_t, B) of last states (n, d), with d as in `verify.relative_gram`."""
    before, behind = (float(relative_gram(end, states, mean_unseen)) for end in (first, last))
    return (1 - t) * before + t * behind


def ends(
    reader: Listener,
    models: Sequence[Path],
    naive: Write,
    aligned: Write | None,
    scratch: Path,
    track: Track[Any] = untracked,
) -> Ends:
    """Measure models and their merge; `naive` and `aligned` write that."""
    losses = tuple(reader.loss(model) for model in track(models, len(models), "losses of models"))
    merges = [naive] if aligned is None else [naive, aligned]
    found = _written(merges, reader.loss, scratch, track)
    return Ends(str(reader.text), reader.tokens, losses, found[0], None if aligned is None else found[1])


def _written(models: Sequence[Write], hear: Callable[[Path], Any], scratch: Path, track: Track[Any]) -> list[Any]:
    """What is heard of each of these models; each is removed before the next is written."""
    heard = []
    for write in track(models, len(models), "losses on the way"):
        place = scratch / "model"
        write(place)
        heard.append(hear(place))
        shutil.rmtree(place)
    return heard
