"""The studies there are, by name."""

from __future__ import annotations

from importlib import import_module

from gaugekit.errors import ConfigError
from gaugekit.studies.study import Study

__all__ = ["NAMES", "study"]

NAMES = (
    "redundancy",
    "frames",
    "parameters",
    "paths",
    "uniform_direction",
    "kernel",
    "selectability",
    "hypersphere",
    "without_normalization",
    "mode_connectivity",
)


def study(name: str) -> Study:
    """Raises `ConfigError` for a name that is none of `NAMES`."""
    if name not in NAMES:
        raise ConfigError(f"there is no study {name!r}: choose one of {', '.join(NAMES)}")
    return import_module(f"gaugekit.studies.{name}").STUDY
