"""Whether two checkpoints are one architecture, tensor by tensor, before anything is done with both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from gaugekit.checkpoint import Checkpoint
from gaugekit.errors import GaugekitError
from gaugekit.models import Spec
from gaugekit.models.spec import Norm, QKNorm
from gaugekit.models.view import View
from gaugekit.verbs.kinds import difference, kind
from gaugekit.verbs.rewriting import Opened

__all__ = ["require_alike", "shared"]


def require_alike(reference: Opened, other: Opened) -> dict[str, str]:
    """The other's tensor name for each of the reference's; of heads for other tasks, poolers and the like only where
    both have them in one shape. Reads configs, headers and vocabularies only.

    Raises `GaugekitError` where the two differ in anything but weights, names, such heads and the eps of norms: in
    family, shapes, positions, ties, activations, or in what a token stands for.
    """
    a, b = reference.checkpoint.path, other.checkpoint.path
    kinds = (kind(model.spec, model.symmetries.observable) for model in (reference, other))
    names = matched(reference.spec, other.spec)
    reason = difference(*kinds) or different_specs(reference.spec, other.spec, names)
    reason = reason or different_tokens(reference.checkpoint, other.checkpoint)
    if reason is not None:
        raise GaugekitError(f"{a} and {b} cannot be aligned: {reason}")
    return names


def shared(spec: Spec, names: Mapping[str, str]) -> Spec:
    """The spec of these tensors alone: what is left out is dead."""
    dead = tuple(each for each in spec.dead if each.view.name in names)
    return replace(spec, tensors={name: shape for name, shape in spec.tensors.items() if name in names}, dead=dead)


def matched(ours: Spec, theirs: Spec) -> dict[str, str]:
    """Tensors correspond in the order in which the family declares them; those outside the model proper by name and
    shape, whatever the base model's own name before it."""
    outside = [{dead.view.name for dead in spec.dead if not dead.view.steps} for spec in (ours, theirs)]
    first, second = (
        [name for name in spec.tensors if name not in others]
        for spec, others in zip((ours, theirs), outside, strict=True)
    )
    found = dict(zip(first, second, strict=False))
    longer = {name.partition(".")[2]: name for name in outside[1]}
    for name in outside[0]:
        # Never both without what stands before the first dot: heads for two tasks have weights in common then.
        alike = (name, name.partition(".")[2], longer.get(name))
        mate = next((each for each in alike if each in outside[1]), None)
        if mate is not None and ours.tensors[name] == theirs.tensors[mate]:
            found[name] = mate
    return {name: found[name] for name in ours.tensors if name in found}


def different_specs(ours: Spec, theirs: Spec, names: Mapping[str, str]) -> str | None:
    """The first thing in which the two are not one architecture, or None."""
    counts = [len(spec.tensors) - sum(not dead.view.steps for dead in spec.dead) for spec in (ours, theirs)]
    if counts[0] != counts[1]:
        return f"different tensors: the model proper has {counts[0]} and {counts[1]}"
    for name, mate in names.items():
        if ours.tensors[name] != theirs.tensors[mate]:
            return f"different shapes of {name}: {list(ours.tensors[name])} and {list(theirs.tensors[mate])}"
    return different(ours.streams, theirs.streams, names, "streams")


def different(ours: Any, theirs: Any, names: Mapping[str, str], where: str) -> str | None:
    """The first field in which two descriptions differ; tensors go by corresponding names."""
    if type(ours) is not type(theirs):
        return f"different {where}: {_short(ours)} and {_short(theirs)}"
    if isinstance(ours, View):
        same = names.get(ours.name) == theirs.name and (ours.steps, ours.offset) == (theirs.steps, theirs.offset)
        return None if same else f"different layouts of {ours.name} and {theirs.name}"
    if is_dataclass(ours):
        for field in fields(ours):
            if field.name == "eps" and isinstance(ours, Norm | QKNorm):
                continue
            mine, other = (getattr(each, field.name) for each in (ours, theirs))
            if found := different(mine, other, names, field.name):
                return found
        return None
    if isinstance(ours, tuple):
        if len(ours) != len(theirs):
            return f"different numbers of {where}: {len(ours)} and {len(theirs)}"
        return next(
            (found for x, y in zip(ours, theirs, strict=True) if (found := different(x, y, names, where))), None
        )
    return None if ours == theirs else f"different {where}: {_short(ours)} and {_short(theirs)}"


def _short(value: Any) -> str:
    return type(value).__name__ if is_dataclass(value) else repr(value)


def different_tokens(ours: Checkpoint, theirs: Checkpoint) -> str | None:
    """The first token with another number, or None; also None where one of the two has no vocabulary to read. Of tokens
    that were added to a vocabulary each of the two may have some of its own, in rows that the other does not use."""
    first, second = (vocabulary(each.path) for each in (ours, theirs))
    if not first or not second or first == second:
        return different_additions(*(added(each.path) for each in (ours, theirs)))
    for token, number in sorted(first.items(), key=lambda item: item[1]):
        if second.get(token) != number:
            return f"different vocabularies: token {token!r} is {number} and {second.get(token, 'unknown')}"
    extra = next(token for token in second if token not in first)
    return f"different vocabularies: token {extra!r} is unknown and {second[extra]}"


def different_additions(first: Mapping[str, int], second: Mapping[str, int]) -> str | None:
    """The first added token that has another number in the other, or whose number has another token there, or None."""
    if first == second:
        return None
    tokens = {number: token for token, number in second.items()}
    for token, number in sorted(first.items(), key=lambda item: item[1]):
        if second.get(token, number) != number:
            return f"different vocabularies: token {token!r} is {number} and {second[token]}"
        if (other := tokens.get(number, token)) != token:
            return f"different vocabularies: token {number} is {token!r} and {other!r}"
    return None


def added(directory: Path) -> dict[str, int]:
    """Tokens beside the vocabulary, or that mark something in it, and their numbers; empty where no file lists them."""
    for name in ("tokenizer.json", "added_tokens.json"):
        path = directory / name
        if not directory.is_dir() or not path.is_file():
            continue
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if name == "added_tokens.json":
                return {token: int(number) for token, number in document.items()}
            return {token["content"]: int(token["id"]) for token in document.get("added_tokens") or []}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise GaugekitError(f"{path}: lists no tokens that can be read ({error})") from error
    return {}


def vocabulary(directory: Path) -> dict[str, int]:
    """Tokens and their numbers, from the tokenizer's files; empty where there are none of the usual ones."""
    if not directory.is_dir():
        return {}
    for name in ("tokenizer.json", "vocab.json", "vocab.txt"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
            if name == "vocab.txt":
                # Not by splitlines, which also ends lines at characters that are tokens.
                return {token: number for number, token in enumerate(text.removesuffix("\n").split("\n"))}
            document = json.loads(text)
            found = document["model"]["vocab"] if name == "tokenizer.json" else document
            # Unigram models list pairs of a token and its score.
            found = found.items() if isinstance(found, dict) else ((pair[0], i) for i, pair in enumerate(found))
            return {token: int(number) for token, number in found}
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise GaugekitError(f"{path}: is no vocabulary that can be read ({error})") from error
    return {}
