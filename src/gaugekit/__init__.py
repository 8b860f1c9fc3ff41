"""Find, measure and remove the redundancy of transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaugekit.errors import CheckpointError, GaugekitError, UnsupportedArchitecture, UnsupportedObservable
    from gaugekit.verbs.inspect import InspectReport, inspect

__all__ = [
    "CheckpointError",
    "GaugekitError",
    "InspectReport",
    "UnsupportedArchitecture",
    "UnsupportedObservable",
    "inspect",
]

_HOME = {"InspectReport": "gaugekit.verbs.inspect", "inspect": "gaugekit.verbs.inspect"}


def __getattr__(name: str) -> Any:
    # Verbs import torch, which takes seconds; `gaugekit --help` and the errors do without.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "gaugekit.errors")), name)
