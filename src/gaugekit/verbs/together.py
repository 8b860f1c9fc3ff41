"""Several checkpoints of one architecture, opened together and read piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from gaugekit.checkpoint.writer import Plan
from gaugekit.errors import GaugekitError
from gaugekit.models import Spec
from gaugekit.symmetry.orbit import pieces
from gaugekit.verbs.aligning import Alignment, align_models
from gaugekit.verbs.alike import require_alike, shared
from gaugekit.verbs.configs import require_same_function
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.recipes import Recipe
from gaugekit.verbs.rewriting import Opened, opened, prepare, with_copies

__all__ = ["Load", "Mix", "Models", "open_models"]

Load = Callable[[Sequence[str]], Mapping[str, Tensor]]  # tensors by the reference's names, float64
Mix = Callable[[str, Tensor, Sequence[Tensor]], Tensor]  # a name, ours and theirs: the result


@dataclass(frozen=True, eq=False)
class Models:
    """The models of a recipe, opened and found alike; `names`: of each other model's tensors, by the reference's."""

    recipe: Recipe
    reference: Opened
    others: tuple[Opened, ...]
    names: tuple[Mapping[str, str], ...]

    def plan(self, place: Path, **options: Any) -> Plan:
        """Of a result: the reference with new values for all parameters that every model has."""
        return prepare(self.reference, self.spec.tensors, place, **options)

    @property
    def spec(self) -> Spec:
        """Of the tensors that every model has."""
        common = [name for name in self.reference.spec.tensors if all(name in names for names in self.names)]
        return shared(self.reference.spec, {name: name for name in common})

    def aligned(self, track: Track[Any]) -> tuple[Alignment, ...]:
        """The others on their way to the reference; none where the recipe does not align."""
        choice = self.recipe.align
        if choice is None:
            return ()
        return tuple(
            align_models(self.reference, other, cost=choice.cost, text=choice.text, refine=choice.refine, track=track)
            for other in self.others
        )

    def moved(self, aligned: Sequence[Alignment]) -> tuple[Load, ...]:
        """The others where they are aligned, or else as they are."""

        def load(model: Opened, rename: Mapping[str, str], names: Sequence[str]) -> Mapping[str, Tensor]:
            return {name: model.load(rename[name]).double() for name in names}

        if aligned:
            return tuple(each.tensors for each in aligned)
        return tuple(partial(load, model, rename) for model, rename in zip(self.others, self.names, strict=True))

    def results(self, mix: Mix, theirs: Sequence[Load], track: Track[Any] = untracked) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a result, a layer of each model in memory at a time. Tied copies stay equal."""
        every = list(pieces(self.spec))
        for names in track(every, len(every), "layers"):
            ours = {name: self.reference.load(name).double() for name in names}
            rest = [load(names) for load in theirs]
            for name in names:
                mixed = mix(name, ours[name], [self._read(name, ours[name], each[name]) for each in rest])
                if not mixed.isfinite().all():
                    raise GaugekitError(f"{self.recipe.path}: the weights are too large, {name} is infinite")
                yield from with_copies(self.reference, {name: mixed})

    def _read(self, name: str, ours: Tensor, theirs: Tensor) -> Tensor:
        """Theirs with our rows where nothing reads them: no alignment brings these together, and a method that measures
        a whole tensor would let them weigh on the others. Only where models are aligned at all."""
        rows = [each.view for each in self.reference.spec.dead if each.view.name == name and each.view.steps]
        if self.recipe.align is None or not rows:
            return theirs
        theirs = theirs.clone()
        for view in rows:
            view.write(theirs, view.read(ours))
        return theirs

    @property
    def every(self) -> tuple[Opened, ...]:
        """The reference first."""
        return (self.reference, *self.others)


def open_models(recipe: Recipe) -> Models:
    """Open what a recipe names. Raises `GaugekitError` where two of them cannot be merged; reads no weights."""
    observable = None if recipe.align is None else recipe.align.observable
    reference, *others = (opened(where, observable) for where in (recipe.reference, *recipe.others))
    names = []
    for other in others:
        names.append(require_alike(reference, other))
        require_same_function(reference, other)
    return Models(recipe, reference, tuple(others), tuple(names))
