"""`merge`: one model out of several, each first moved along its orbit to where the first of them lies."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from gaugekit.checkpoint.staging import reported, terminable
from gaugekit.checkpoint.writer import write
from gaugekit.errors import CheckpointError, GaugekitError
from gaugekit.verbs.aligning import Alignment, Left
from gaugekit.verbs.barriers import Ends, Listener, Ways, Write, ends, listener, ways
from gaugekit.verbs.exporting import RECIPE, Moved, export, plans, require_place
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.merging import Method, linear, merged, slerp
from gaugekit.verbs.recipes import Recipe, read_recipe
from gaugekit.verbs.rewriting import digest
from gaugekit.verbs.together import Load, Mix, Models, open_models

__all__ = ["MergeReport", "Source", "merge"]


@dataclass(frozen=True)
class Source:
    """One of the models. `digest` is the SHA-256 of its tensors, None before they were read; `weight` and `density` are
    None where the method has none of it; `left` is what could not be aligned."""

    path: str
    digest: str | None
    weight: float | None
    density: float | None
    left: tuple[Left, ...]


@dataclass(frozen=True)
class MergeReport:
    """What was merged, how, and what a text says of it.

    sources     the reference first: the base model, or the first of the recipe
    align       the cost by which the others were moved to it, or "none"
    tensors     that get new values
    bytes       of all files of OUT, without a card
    written     false after a dry run
    mergekit    the recipe for mergekit, if that was asked for: OUT then holds aligned models, and no merge
    ways, ends  losses, where a text was given: along the way between two models, or of all models and their merge
    """

    recipe: str
    out: str
    method: Method
    align: str
    sources: tuple[Source, ...]
    tensors: int
    bytes: int
    written: bool = False
    mergekit: str | None = None
    ways: Ways | None = None
    ends: Ends | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def merge(
    recipe: str | PathLike[str],
    out: str | PathLike[str],
    *,
    text: str | PathLike[str] | None = None,
    points: int = 11,
    export_mergekit: bool = False,
    max_shard_size: int | str = "5GB",
    dtype: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    track: Track[Any] = untracked,
) -> MergeReport:
    """Merge the models of a recipe into `out`: a checkpoint like the reference, with new values for all its parameters.

    Args:
        recipe: a YAML file, see `gaugekit.verbs.recipes`.
        text: measure losses on it: of linear and slerp merges of two models at `points` places of the way between
            them, else of the models and of the merge; of models as they are, and aligned.
        export_mergekit: write aligned checkpoints and a recipe instead, so that `mergekit-yaml` does the merging.
        dtype: what is written; by default that of the recipe, else each tensor keeps that of the reference.

    A model and another one of its orbit merge to the model itself, to rounding. Arithmetic is float64, rounded once.
    Raises `GaugekitError`; before any work for a recipe that is not sound, models that are not alike, and a text that
    cannot be read. Nothing is left half-written.
    """
    if points < 3:
        raise GaugekitError(f"{points} points show no way: ask for 3 or more")
    models = open_models(read_recipe(recipe))
    choice, place = models.recipe, _place(out)
    stored = choice.dtype if dtype is None else dtype
    _require_apart(place, models)
    if export_mergekit:
        if choice.align is None:
            raise GaugekitError(f"{choice.path}: says align: none, so mergekit can use the recipe as it is")
        require_place(place, overwrite)
        # What the recipe says of dtypes is mergekit's to heed.
        options = {"max_shard_size": max_shard_size, "dtype": dtype}
        layouts = plans(models.others, models.names, place, choice.others, **options)
    else:
        layouts = {"": models.plan(place, max_shard_size=max_shard_size, dtype=stored, overwrite=overwrite)}
    reader = None if text is None else _reader(models, Path(text))
    report = MergeReport(
        recipe=str(choice.path),
        out=str(place),
        method=choice.settings.method,
        align="none" if choice.align is None else choice.align.cost,
        sources=_sources(models, (), read=False),
        tensors=sum(len(layout.changed) for layout in layouts.values()),
        bytes=sum(layout.total_bytes for layout in layouts.values()),
        mergekit=str(place / RECIPE) if export_mergekit else None,
    )
    if dry_run:
        return report
    aligned = models.aligned(track)
    report = replace(report, sources=_sources(models, aligned, read=True))
    if reader is not None:
        measured = _measured(models, aligned, reader, points, place, stored, track)
        report = replace(report, **{"ways" if isinstance(measured, Ways) else "ends": measured})
    if export_mergekit:
        cards = [_card_of_moved(folder, report, 1 + i) for i, folder in enumerate(layouts)]
        loads = [each.tensors for each in aligned]
        moved = [Moved(*each) for each in zip(models.others, models.names, loads, cards, strict=True)]
        export(choice, models.reference, moved, layouts, place, overwrite, track)
    else:
        results = models.results(partial(merged, choice.settings), models.moved(aligned), track)
        write(layouts[""], results, card=_card(choice, report))
    return replace(report, written=True)


def _sources(models: Models, aligned: Sequence[Alignment], read: bool) -> tuple[Source, ...]:
    settings, number = models.recipe.settings, len(models.every)

    def of_each(values: Sequence[float]) -> list[float | None]:
        return [*[None] * (number - len(values)), *values]  # the reference may have none

    left = [(), *(each.left for each in aligned)] if aligned else [()] * number
    columns = zip(models.every, of_each(settings.weights), of_each(settings.densities), left, strict=True)
    return tuple(
        Source(str(model.checkpoint.path), digest(model.checkpoint) if read else None, weight, density, remains)
        for model, weight, density, remains in columns
    )


def _place(out: str | PathLike[str]) -> Path:
    try:
        return Path(out).expanduser().resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, or no such user's home
        raise CheckpointError(f"{out}: cannot be used ({error}); choose another directory") from error


def _require_apart(place: Path, models: Models) -> None:
    """The result must not take the place of a model that goes into it."""
    for model in models.every:
        path = model.checkpoint.path.resolve()
        if place == path or place in path.parents or path in place.parents:
            raise CheckpointError(
                f"{place}: is, holds or lies inside {path}, which goes into the merge; choose another directory"
            )


def _reader(models: Models, text: Path) -> Listener:
    reader = listener(models.reference, text)
    if reader.measure == "departure" and not _one_way(models):
        raise GaugekitError(
            f"{models.reference.checkpoint.path}: has no head, and so no loss on a text: without one, only linear and "
            "slerp merges of two models are measured; leave out --text"
        )
    return reader


def _one_way(models: Models) -> bool:
    """Whether the merge is a place on a way between two models."""
    return len(models.others) == 1 and models.recipe.settings.method in ("linear", "slerp")


def _measured(
    models: Models,
    aligned: Sequence[Alignment],
    reader: Listener,
    points: int,
    place: Path,
    dtype: str | None,
    track: Track[Any],
) -> Ways | Ends:
    def writing(mix: Mix, theirs: Sequence[Load]) -> Write:
        return lambda where: write(models.plan(where, dtype=dtype), models.results(mix, theirs))

    def between(theirs: Sequence[Load]) -> Callable[[float], Write]:
        return lambda t: writing(_at(models.recipe.settings.method, t), theirs)

    naive, moved = models.moved(()), models.moved(aligned)
    paths = [model.checkpoint.path for model in models.every]
    # Beside the result, where there must be room for it anyway.
    with (
        terminable(),
        reported(place),
        tempfile.TemporaryDirectory(prefix=f".{place.name}.way-", dir=place.parent) as scratch,
    ):
        if _one_way(models):
            t = [i / (points - 1) for i in range(points)]
            ahead = between(moved) if aligned else None
            return ways(reader, paths[0], paths[1], t, between(naive), ahead, Path(scratch), track)
        mix = partial(merged, models.recipe.settings)
        ahead = writing(mix, moved) if aligned else None
        return ends(reader, paths, writing(mix, naive), ahead, Path(scratch), track)


def _at(method: Method, t: float) -> Mix:
    """The model at `t` of the way."""
    if method == "slerp":
        return lambda _, ours, theirs: slerp(ours, theirs[0], t)
    return lambda _, ours, theirs: linear([ours, theirs[0]], (1 - t, t), normalize=False)


def _card(recipe: Recipe, report: MergeReport) -> str:
    how = "as they are" if report.align == "none" else f"the others aligned to the first by {report.align}"
    lines = [f"# {Path(report.out).name}", "", f"A merge by `gaugekit merge`, method {report.method}, {how}:", ""]
    lines += [f"- `{Path(s.path).name}` (SHA-256 of its tensors {s.digest}){_share(s)}" for s in report.sources]
    lines += ["", "```yaml", recipe.text.strip(), "```"]
    lines += ["", *_said(report)]
    return "\n".join(lines) + "\n"


def _share(source: Source) -> str:
    named = {"weight": source.weight, "density": source.density}
    return "".join(f", {name} {value:g}" for name, value in named.items() if value is not None)


def _said(report: MergeReport) -> Iterator[str]:
    """What was measured, in a line."""
    if report.ways is not None:
        w = report.ways
        unit = "nats a token" if w.measure == "loss" else "relative departure of last states"
        moved = "" if w.barrier_aligned is None else f", {w.barrier_aligned:.4f} between the aligned ones"
        barriers = f"the barrier between the models as they are is {w.barrier_naive:.4f} {unit}{moved}"
        yield f"Measured on {w.tokens} tokens: {barriers}."
    if report.ends is not None:
        e = report.ends
        models = ", ".join(f"{loss:.4f}" for loss in e.models)
        moved = "" if e.aligned is None else f", of the aligned ones {e.aligned:.4f}"
        losses = f"{models} of the models, {e.naive:.4f} of the merge of them as they are{moved}"
        yield f"Measured on {e.tokens} tokens: losses, in nats a token, are {losses}."


def _card_of_moved(folder: str, report: MergeReport, number: int) -> str:
    source, reference = report.sources[number], report.sources[0]
    return (
        f"# {folder}\n\nThe same function as `{Path(source.path).name}` (SHA-256 of its tensors {source.digest}), "
        f"moved along its symmetry orbit to `{Path(reference.path).name}` ({reference.digest}) by `gaugekit merge "
        f"--export-mergekit`, cost {report.align}.\n"
    )
