"""Find, measure and remove the redundancy of transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaugekit.errors import CheckpointError, GaugekitError, UnsupportedArchitecture, UnsupportedObservable
    from gaugekit.models.pairs import pairs
    from gaugekit.verbs.canonicalize import CanonicalizeReport, canonicalize
    from gaugekit.verbs.compare import CompareReport, compare
    from gaugekit.verbs.fingerprint import Fingerprint, fingerprint
    from gaugekit.verbs.inspect import InspectReport, inspect
    from gaugekit.verbs.probe import ProbeReport, probe
    from gaugekit.verbs.scramble import ScrambleReport, scramble
    from gaugekit.verbs.verify import VerifyReport, verify

__all__ = [
    "CanonicalizeReport",
    "CheckpointError",
    "CompareReport",
    "Fingerprint",
    "GaugekitError",
    "InspectReport",
    "ProbeReport",
    "ScrambleReport",
    "UnsupportedArchitecture",
    "UnsupportedObservable",
    "VerifyReport",
    "canonicalize",
    "compare",
    "fingerprint",
    "inspect",
    "pairs",
    "probe",
    "scramble",
    "verify",
]


def __getattr__(name: str) -> Any:
    # Verbs import torch, which takes seconds; `gaugekit --help` and the errors do without.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name[0].isupper() and not name.endswith("Report"):
        home = "gaugekit.verbs.fingerprint" if name == "Fingerprint" else "gaugekit.errors"
    elif name == "pairs":
        home = "gaugekit.models.pairs"
    else:
        home = f"gaugekit.verbs.{name.removesuffix('Report').lower()}"
    return getattr(import_module(home), name)
