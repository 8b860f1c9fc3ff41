"""Means with confidence intervals, of few runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t as student

__all__ = ["Interval", "interval", "paired"]


@dataclass(frozen=True)
class Interval:
    """A mean and the half width of its interval: `mean` ± `half`, infinite where there are not two finite values."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half if math.isfinite(self.half) else -math.inf

    @property
    def high(self) -> float:
        return self.mean + self.half if math.isfinite(self.half) else math.inf

    def excludes(self, value: float) -> bool:
        return not self.low <= value <= self.high

    def text(self, digits: int = 3) -> str:
        if not math.isfinite(self.mean):
            return "broke off"
        return f"{self.mean:.{digits}f}" + (f" ± {self.half:.{digits}f}" if math.isfinite(self.half) else "")


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's interval for the mean of independent values. One that is not finite makes both infinite."""
    n = len(values)
    mean = math.fsum(values) / n
    if not math.isfinite(mean):
        return Interval(math.inf, math.inf)
    if n < 2:
        return Interval(mean, math.inf)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return Interval(mean, float(student.ppf((1 + confidence) / 2, n - 1)) * deviation / math.sqrt(n))


def paired(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> Interval:
    """Of the differences first − second, seed by seed: what the seeds share drops out.

    Infinite, with the sign of the difference, where one side broke off in a run and the other in none; nothing can be
    said (0 ± inf) where both did.
    """
    finite = [all(map(math.isfinite, side)) for side in (first, second)]
    if not any(finite):
        return Interval(0.0, math.inf)
    if not all(finite):
        return Interval(-math.inf if finite[0] else math.inf, 0.0)
    return interval([a - b for a, b in zip(first, second, strict=True)], confidence)
