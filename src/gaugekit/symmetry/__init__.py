"""What acts on a model without changing what it computes."""

from gaugekit.symmetry.base import Observable, Symmetry, power
from gaugekit.symmetry.circuits import Circuits, circuits
from gaugekit.symmetry.rules import Blocked, Symmetries, derive, observables

__all__ = ["Blocked", "Circuits", "Observable", "Symmetries", "Symmetry", "circuits", "derive", "observables", "power"]
