"""Aligned models for mergekit: a folder with one checkpoint a model and the recipe, so that it does the merging."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gaugekit.checkpoint.staging import reported, staged
from gaugekit.checkpoint.writer import Plan, write
from gaugekit.errors import CheckpointError
from gaugekit.models import Spec
from gaugekit.symmetry.orbit import pieces
from gaugekit.verbs.alike import shared
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.recipes import Recipe, for_mergekit
from gaugekit.verbs.rewriting import Opened, prepare, require_fitting_heads, with_copies

__all__ = ["RECIPE", "Moved", "export", "plans", "require_place"]

RECIPE = "mergekit.yaml"


def require_place(place: Path, overwrite: bool) -> None:
    """Raise `CheckpointError` where no folder can be written, or where something else would be replaced."""
    with reported(place):
        if not place.parent.is_dir():
            raise CheckpointError(f"{place}: there is no directory {place.parent}; create it")
        if not place.exists():
            return
        if not place.is_dir():
            raise CheckpointError(f"{place}: is a file; choose another name")
        if not overwrite:
            raise CheckpointError(f"{place}: exists already; choose another name, or ask for it to be overwritten")
        if any(place.iterdir()) and not (place / RECIPE).exists():
            raise CheckpointError(
                f"{place}: is not overwritten, because it has no {RECIPE} and so is no earlier export; remove it first"
            )


def plans(
    models: Sequence[Opened], names: Sequence[Mapping[str, str]], place: Path, titles: Sequence[str], **options: Any
) -> dict[str, Plan]:
    """What will be written for each of the models that are moved, by the name of its folder. They lie beside `place` as
    long as that is not there.

    Args:
        names: of each one's tensors by those of the reference.
        titles: what the recipe calls them.
    """
    found: dict[str, Plan] = {}
    for model, rename, title in zip(models, names, titles, strict=True):
        folder = _folder(title, found)
        require_fitting_heads(model)
        found[folder] = prepare(model, rename.values(), place.with_name(f".{place.name}-{folder}"), **options)
    return found


class Moved:
    """A model in its new place: its tensors by the reference's names, and what its card says."""

    def __init__(
        self,
        model: Opened,
        names: Mapping[str, str],
        load: Callable[[Sequence[str]], Mapping[str, Tensor]],
        card: str,
    ) -> None:
        self._model = model
        self._names = names
        self._load = load
        self.card = card

    def tensors(self, spec: Spec, track: Track[Any]) -> Iterator[tuple[str, Tensor]]:
        """By its own names, tied copies included; `spec` is the reference's."""
        every = list(pieces(shared(spec, self._names)))
        for piece in track(every, len(every), "layers"):
            yield from with_copies(self._model, {self._names[name]: x for name, x in self._load(piece).items()})


def export(
    recipe: Recipe,
    reference: Opened,
    moved: Sequence[Moved],
    layouts: Mapping[str, Plan],
    place: Path,
    overwrite: bool,
    track: Track[Any] = untracked,
) -> None:
    """Write the folder: complete, or not at all. The reference is named where it lies, and not copied."""
    with staged(place, replace=overwrite) as partial:
        places = {recipe.reference: reference.checkpoint.path.resolve()}
        for title, each, (folder, layout) in zip(recipe.others, moved, layouts.items(), strict=True):
            write(replace(layout, out=partial / folder), each.tensors(reference.spec, track), card=each.card)
            places[title] = place / folder
        with reported(place):
            (partial / RECIPE).write_text(for_mergekit(recipe, places), encoding="utf-8")


def _folder(title: str, taken: Mapping[str, Plan]) -> str:
    """The last part of a path or hub id, as a name that nothing else has."""
    name = re.sub(r"[^\w.-]", "-", Path(title).name).strip(".-") or "model"
    number, unique = 1, name
    while unique in taken or unique == RECIPE:
        number += 1
        unique = f"{name}-{number}"
    return unique
