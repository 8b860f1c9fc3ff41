"""YAML that people write: configs of training and recipes of merges."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from gaugekit.errors import ConfigError

__all__ = ["parsed", "read_text"]


def read_text(path: Path) -> str:
    """Raises `ConfigError`."""
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # RuntimeError: no such user's home
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def parsed(text: str, where: str) -> Any:
    """What a text says, of which a key that comes twice is refused, and 3e-4 is a number, as in YAML 1.2.

    Raises: ConfigError that begins with `where`.
    """
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # besides YAMLError whatever a value raises that only looks like a date, and the like
        kind = "" if isinstance(error, yaml.YAMLError) else f"{type(error).__name__}: "
        raise ConfigError(f"{where}: no YAML: {kind}{' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [str(key.value) for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
