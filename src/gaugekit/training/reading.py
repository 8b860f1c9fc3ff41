"""A config from YAML and `key=value` words: unknown keys and values of another type are refused by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from gaugekit.documents import parsed, read_text
from gaugekit.errors import ConfigError
from gaugekit.training.config import Config

__all__ = ["from_dict", "read", "typed"]

T = TypeVar("T")


def read(path: Path | None, words: Iterable[str] = ()) -> Config:
    """The config of a YAML file (None: all defaults), with `section.key=value` words put over it; checked.

    Raises:
        ConfigError: a file that is missing or no YAML mapping, an unknown key, a value of another type, or values that
            do not go together.
    """
    document: Any = {}
    if path is not None:
        document = parsed(read_text(path), str(path))
    document = {} if document is None else document
    where = str(path) if path is not None else "config"
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: must be a mapping of sections to keys, got a {type(document).__name__}")
    for word in words:
        name, equals, value = word.partition("=")
        *sections, key = name.split(".")
        if not equals or not key:
            raise ConfigError(f"{word!r}: options are section.key=value, such as optimizer.lr=3e-4")
        place = document
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{word!r}: {section} is no section")
        place[key] = parsed(value, repr(word))
    config = from_dict(Config, document, where)
    config.check()
    return config


def from_dict(kind: type[T], values: Mapping[str, Any], where: str = "config") -> T:
    """A dataclass of `gaugekit.training.config` from a mapping, missing keys by default. Raises `ConfigError`."""
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]  # pyright: ignore[reportArgumentType]
    made = {}
    for key, value in values.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {close[0]}?" if close else f"it may be {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key}: {hint}")
        made[key] = typed(hints[key], value, f"{where}: {key}" if where.endswith(("yaml", "yml")) else f"{where}.{key}")
    return kind(**made)


def typed(hint: Any, value: Any, where: str) -> Any:
    """The value as its field has it, which may be a number given as text, or a whole one where a float is meant. Raises
    `ConfigError` that begins with `where`.

    Args:
        hint: int, float, str, bool, list, dict, a `Literal`, a tuple of these, or a dataclass.
    """
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: must be a section with keys of its own, got {value!r}")
        return from_dict(hint, value, where)
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        # YAML reads a bare `none` as text, but `null`, `no` and `~` as no text at all.
        if value not in choices:
            raise ConfigError(f"{where}: must be one of {', '.join(map(str, choices))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(choices):
            raise ConfigError(f"{where}: must be a list of {len(choices)} numbers, got {value!r}")
        return tuple(typed(c, v, where) for c, v in zip(choices, value, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: must be a mapping, got {value!r}")
        return value
    if hint is float and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isnan(number):
            raise ConfigError(f"{where}: must be a number, got {value!r}")
        return number
    if type(value) is not hint:
        name = {int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list"}[hint]
        raise ConfigError(f"{where}: must be {name}, got {value!r}")
    return value
