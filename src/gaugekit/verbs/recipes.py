"""Recipes of merges: YAML in mergekit's words, as far as it goes for whole models, and two of our own.

merge_method: linear | slerp | task_arithmetic | ties | dare_linear | dare_ties
base_model: PATH                             # t = 0 of slerp; what task vectors are taken from
models:
  - model: PATH
    parameters: {weight: 0.5, density: 0.6}
parameters: {normalize: true, lambda: 1.0, rescale: true, t: 0.5}      # and weight, density for all models
dtype: float32                               # what is written; arithmetic is float64
align: {cost: weights, text: null, refine: 0, observable: null}        # ours: as `gaugekit align` has it, or `none`
seed: 0                                      # ours: of DARE
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from gaugekit.documents import parsed, read_text
from gaugekit.errors import ConfigError
from gaugekit.symmetry import Observable
from gaugekit.verbs.aligning import Cost
from gaugekit.verbs.merging import TASKS, Method, Settings

__all__ = ["Align", "Recipe", "for_mergekit", "read_recipe"]

KEYS = ("merge_method", "base_model", "models", "parameters", "dtype", "align", "seed")
DTYPES = ("float16", "bfloat16", "float32", "float64")
# Of mergekit's keys those that people use and that mean something else than nothing.
ELSEWHERE = {
    "slices": "whole models are merged: list them under models",
    "modules": "whole models are merged: list them under models",
    "tokenizer_source": "the tokenizer of the base (or first) model is copied as it is: leave it out",
    "tokenizer": "the tokenizer of the base (or first) model is copied as it is: leave it out",
    "chat_template": "that of the base (or first) model is copied as it is: leave it out",
    "out_dtype": "arithmetic is float64 and rounded once: say dtype",
}
# What a method reads: of each model (or of all, given once), and of the merge. int8_mask changes no number.
OF_MODELS: dict[Method, tuple[str, ...]] = {
    "linear": ("weight",),
    "slerp": (),
    "task_arithmetic": ("weight",),
    **dict.fromkeys(("ties", "dare_linear", "dare_ties"), ("weight", "density")),
}
OF_MERGE: dict[Method, tuple[str, ...]] = {
    "linear": ("normalize",),
    "slerp": ("t",),
    "task_arithmetic": ("normalize", "lambda", "int8_mask"),
    **dict.fromkeys(("ties", "dare_linear", "dare_ties"), ("normalize", "lambda", "rescale", "int8_mask")),
}


@dataclass(frozen=True)
class Align:
    """By what models are brought together before they are merged."""

    cost: Cost = "weights"
    text: Path | None = None
    refine: int = 0
    observable: Observable | None = None


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read and found sound.

    `reference`: the base model, or the first where there is none; `others`: those beside it, in order. Both are paths
    that exist, or what may be hub ids. `document` is the YAML as parsed, `text` as written.
    """

    path: Path
    reference: str
    others: tuple[str, ...]
    settings: Settings
    dtype: str | None
    align: Align | None
    document: Mapping[str, Any]
    text: str


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe; no model is opened. Paths in it count from its own folder if they exist there.

    Raises:
        ConfigError: a file that cannot be read or is no YAML mapping, an unknown key, method or parameter, a value that
            the method cannot use, or numbers of models or weights that leave nothing to merge.
    """
    path = Path(path)
    text = read_text(path)
    document = parsed(text, str(path))
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: a recipe is a mapping with merge_method and models")
    for key in document:
        if key in ELSEWHERE:
            raise ConfigError(f"{path}: {key} is not supported: {ELSEWHERE[key]}")
    _known(f"{path}", document, KEYS)
    method = document.get("merge_method")
    if method not in get_args(Method):
        raise ConfigError(f"{path}: merge_method must be one of {', '.join(get_args(Method))}, got {method!r}")
    dtype = document.get("dtype")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"{path}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    base, entries, settings = _models(path, document, cast(Method, method))
    reference = entries[0][0] if base is None else base
    others = tuple(where for where, _ in entries if not _same(where, reference))
    align = _align(path, document.get("align", {}))
    return Recipe(path, reference, others, settings, dtype, align, document, text)


def for_mergekit(recipe: Recipe, places: Mapping[str, Path]) -> str:
    """The recipe with models at other places, by their names in `recipe`, for mergekit: without what is ours."""

    def moved(where: str) -> Any:
        return _reference(next(place for name, place in places.items() if _same(name, where)))

    document = {key: value for key, value in recipe.document.items() if key not in ("align", "seed")}
    folder = recipe.path.parent
    document["models"] = [{**entry, "model": moved(_located(entry["model"], folder))} for entry in document["models"]]
    document["base_model"] = moved(recipe.reference)
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _reference(place: Path) -> Any:
    """A path as mergekit reads it: a string of one with @ or + would name a revision or an adapter."""
    text = str(place)
    return {"model": {"path": text}} if "@" in text or "+" in text else text


def _known(where: str, given: Mapping[Any, Any], known: Collection[str], kind: str = "key") -> None:
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            may = f"it may be {', '.join(known)}" if known else "there are none"
            raise ConfigError(f"{where}: unknown {kind} {key}: {f'did you mean {close[0]}?' if close else may}")


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be a mapping, got {value!r}")
    return value


def _models(
    path: Path, document: Mapping[str, Any], method: Method
) -> tuple[str | None, list[tuple[str, Mapping[str, Any]]], Settings]:
    """The base model, all models in order with their parameters, and the method's numbers."""
    base = None
    if document.get("base_model") is not None:
        base = _where(f"{path}: base_model", document["base_model"], path.parent)
    elif method != "linear":
        raise ConfigError(f"{path}: {method} needs a base_model: {_why_base(method)}")
    entries = _entries(path, document, method)
    has_base = base is not None and any(_same(where, base) for where, _ in entries)
    if base is not None and not has_base:
        entries = [(base, {}), *entries]
    if len(entries) < 2:
        raise ConfigError(f"{path}: there is one model only: a merge takes two or more")
    if method == "slerp" and len(entries) != 2:
        raise ConfigError(f"{path}: slerp goes from one model to another: give two, not {len(entries)}")
    shared = _mapping(f"{path}: parameters", document.get("parameters"))
    _known(f"{path}: parameters of {method}", shared, (*OF_MERGE[method], *OF_MODELS[method]), "parameter")
    first = next(each for each in entries if base is None or _same(each[0], base))
    rest = [each for each in entries if each is not first]
    if method != "linear" and first[1]:
        raise ConfigError(
            f"{path}: the base_model {first[0]} has parameters ({', '.join(first[1])}), which {method} has no use for: "
            "they are of the models that are merged into it"
        )
    takers = [first, *rest] if method == "linear" else rest
    weights, densities = (_of_models(path, method, takers, shared, name) for name in ("weight", "density"))
    task = TASKS.get(method)
    normalize = _switch(path, shared, "normalize", task.normalize if task else True)
    if normalize and method != "slerp" and abs(sum(weights)) < 1e-8:
        raise ConfigError(f"{path}: the weights sum to zero, and normalize divides by the sum: change one of them")
    t = 0.5
    if method == "slerp":
        if "t" not in shared:
            raise ConfigError(f"{path}: slerp needs parameters: t, how far to go from base_model (0) to the other (1)")
        t = _number(f"{path}: t", shared["t"])
        if not 0 <= t <= 1:
            raise ConfigError(f"{path}: t must lie between 0 and 1, got {t:g}")
    seed = document.get("seed", 0)
    if type(seed) is not int:
        raise ConfigError(f"{path}: seed must be a whole number, got {seed!r}")
    _switch(path, shared, "int8_mask", False)
    settings = Settings(
        method=method,
        weights=weights,
        densities=densities,
        normalize=normalize,
        rescale=_switch(path, shared, "rescale", task.rescale if task else False),
        scale=_number(f"{path}: lambda", shared.get("lambda", 1.0)),
        t=t,
        seed=seed,
    )
    return base, [first, *rest], settings


def _why_base(method: Method) -> str:
    return "the model at t = 0" if method == "slerp" else "the model that the others were trained from"


def _entries(path: Path, document: Mapping[str, Any], method: Method) -> list[tuple[str, Mapping[str, Any]]]:
    given = document.get("models")
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{path}: models must be a list of entries with a model each")
    entries: list[tuple[str, Mapping[str, Any]]] = []
    for number, entry in enumerate(given, 1):
        place = f"{path}: model {number}"
        if not isinstance(entry, dict) or "model" not in entry:
            raise ConfigError(f"{place} must be a mapping with a key model, got {entry!r}")
        _known(place, entry, ("model", "parameters"))
        where = _where(place, entry["model"], path.parent)
        parameters = _mapping(f"{place}: parameters", entry.get("parameters"))
        _known(f"{place}: parameters of {method}", parameters, OF_MODELS[method], "parameter")
        if any(_same(where, other) for other, _ in entries):
            raise ConfigError(f"{place}: {where} is listed twice: give it one weight")
        entries.append((where, parameters))
    return entries


def _of_models(
    path: Path, method: Method, entries: list[tuple[str, Mapping[str, Any]]], shared: Mapping[str, Any], name: str
) -> tuple[float, ...]:
    """Each model's own value, or that given for all; none where the method has no use for it."""
    if name not in OF_MODELS[method]:
        return ()
    found = []
    for where, own in entries:
        place = f"{path}: {name} of {where}"
        if name == "weight" and name not in own and name not in shared:
            raise ConfigError(f"{place} is missing: {method} needs one for every model that it merges")
        found.append(_number(place, own.get(name, shared.get(name, 1.0))))
        if name == "density" and not 0 < found[-1] <= 1:
            raise ConfigError(f"{place} must be above 0 and at most 1, got {found[-1]:g}")
    return tuple(found)


def _number(where: str, value: Any) -> float:
    """A finite number; YAML has 1e-3 as text."""
    if isinstance(value, list | dict):
        raise ConfigError(f"{where}: values that differ by layer or tensor are not supported: give one number")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{where} must be a number, got {value!r}")
    return number


def _switch(path: Path, given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if value not in (True, False):  # 1 and 0 are equal to them, and recipes have these too
        raise ConfigError(f"{path}: {name} must be true or false, got {value!r}")
    return bool(value)


def _where(place: str, value: Any, folder: Path) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{place}: a model is a path or a hub id (adapters are not supported), got {value!r}")
    return _located(value, folder)


def _located(text: str, folder: Path) -> str:
    """As the recipe has it, or from the recipe's folder if that exists."""
    try:
        near = folder / Path(text).expanduser()
        return str(near) if near.exists() else text
    except (OSError, RuntimeError):  # longer than any path, or no such user's home: not there, as who opens it will say
        return text


def _same(first: str, second: str) -> bool:
    try:
        one, other = Path(first), Path(second)
        return first == second or (one.exists() and other.exists() and one.samefile(other))
    except OSError:
        return False


def _align(path: Path, value: Any) -> Align | None:
    if value == "none":
        return None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: align must be none, or a mapping with cost and the like, got {value!r}")
    _known(f"{path}: align", value, ("cost", "text", "refine", "observable"))
    cost = value.get("cost", "weights")
    if cost not in get_args(Cost):
        raise ConfigError(f"{path}: align: cost must be one of {', '.join(get_args(Cost))}, got {cost!r}")
    refine, observable, text = value.get("refine", 0), value.get("observable"), value.get("text")
    if type(refine) is not int or refine < 0:
        raise ConfigError(f"{path}: align: refine must be a number of steps, got {refine!r}")
    if observable is not None and observable not in get_args(Observable):
        raise ConfigError(f"{path}: align: observable must be one of {', '.join(get_args(Observable))}")
    if text is None:
        if cost == "activations" or refine:
            raise ConfigError(f"{path}: align: cost activations and refine want a text: name one")
        return Align(cost, observable=observable)
    if not isinstance(text, str):
        raise ConfigError(f"{path}: align: text must be a file, got {text!r}")
    place = Path(_located(text, path.parent))
    if not place.is_file():
        raise ConfigError(f"{path}: align: there is no text {text}")
    return Align(cost, place, refine, observable)
