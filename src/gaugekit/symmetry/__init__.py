"""What acts on a model without changing what it computes."""

from gaugekit.symmetry.base import Observable, Symmetry
from gaugekit.symmetry.rules import Blocked, Symmetries, derive, observables

__all__ = ["Blocked", "Observable", "Symmetries", "Symmetry", "derive", "observables"]
