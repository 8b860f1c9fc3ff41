"""Find, measure and remove the redundancy of transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaugekit.errors import CheckpointError, GaugekitError, UnsupportedArchitecture, UnsupportedObservable
    from gaugekit.models.pairs import pairs
    from gaugekit.optim.monitor import OrbitMonitor
    from gaugekit.optim.projected import Horizontal
    from gaugekit.optim.quotient import QuotientAdam, QuotientSGD
    from gaugekit.verbs.align import AlignReport, align
    from gaugekit.verbs.canonicalize import CanonicalizeReport, canonicalize
    from gaugekit.verbs.compare import CompareReport, compare
    from gaugekit.verbs.fingerprint import Fingerprint, fingerprint
    from gaugekit.verbs.inspect import InspectReport, inspect
    from gaugekit.verbs.merge import MergeReport, merge
    from gaugekit.verbs.probe import ProbeReport, probe
    from gaugekit.verbs.reduce import ReduceReport, reduce
    from gaugekit.verbs.scramble import ScrambleReport, scramble
    from gaugekit.verbs.verify import VerifyReport, verify

__all__ = [
    "AlignReport",
    "CanonicalizeReport",
    "CheckpointError",
    "CompareReport",
    "Fingerprint",
    "GaugekitError",
    "Horizontal",
    "InspectReport",
    "MergeReport",
    "OrbitMonitor",
    "ProbeReport",
    "QuotientAdam",
    "QuotientSGD",
    "ReduceReport",
    "ScrambleReport",
    "UnsupportedArchitecture",
    "UnsupportedObservable",
    "VerifyReport",
    "align",
    "canonicalize",
    "compare",
    "fingerprint",
    "inspect",
    "merge",
    "pairs",
    "probe",
    "reduce",
    "scramble",
    "verify",
]


_HOMES = {
    **dict.fromkeys(("CheckpointError", "GaugekitError", "UnsupportedArchitecture", "UnsupportedObservable"), "errors"),
    "Fingerprint": "verbs.fingerprint",
    "Horizontal": "optim.projected",
    "OrbitMonitor": "optim.monitor",
    "QuotientAdam": "optim.quotient",
    "QuotientSGD": "optim.quotient",
    "pairs": "models.pairs",
}


def __getattr__(name: str) -> Any:
    # Nearly all of it imports torch, which takes seconds; `gaugekit --help` and the errors do without.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, f"verbs.{name.removesuffix('Report').lower()}")
    return getattr(import_module(f"gaugekit.{home}"), name)
