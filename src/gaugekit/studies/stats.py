"""Means with confidence intervals, of few runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t as student

__all__ = ["Interval", "interval", "paired"]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and the half width of its interval: `mean` ± `half`, infinite where there are not two finite values.

    A mean that is not finite says what broke off: inf the runs in question; −inf, of a difference, the other side's;
    NaN both.
    """

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half if math.isfinite(self.half) else -math.inf

    @property
    def high(self) -> float:
        return self.mean + self.half if math.isfinite(self.half) else math.inf

    def percent(self, of: float = 1.0) -> Interval:
        """In percent of a number above 0. What broke off stays what it is."""
        if not math.isfinite(self.mean):
            return self
        return Interval(100 * self.mean / of, 100 * self.half / of)

    def text(self, digits: int = 3, unit: str = "", signed: bool = False) -> str:
        if math.isnan(self.mean):
            return "both broke off"
        if math.isinf(self.mean):
            return "broke off" if self.mean > 0 else "the other broke off"
        half = f" ± {self.half:.{digits}f}" if math.isfinite(self.half) else ""
        return f"{self.mean:{'+' if signed else ''}.{digits}f}{half}{unit}"


def interval(values: Sequence[float]) -> Interval:
    """Student's 95 % interval for the mean of independent values. One that is not finite makes both infinite."""
    n = len(values)
    mean = math.fsum(values) / n if all(map(math.isfinite, values)) else math.inf
    if not math.isfinite(mean):
        return Interval(math.inf, math.inf)
    if n < 2:
        return Interval(mean, math.inf)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    return Interval(mean, float(student.ppf((1 + CONFIDENCE) / 2, n - 1)) * deviation / math.sqrt(n))


def paired(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Of the differences first − second, seed by seed: what the seeds share drops out.

    Infinite, with the sign of the difference, where one side broke off in a run and the other in none. Where both did,
    nothing can be said: NaN, and an interval from −inf to inf.
    """
    finite = [all(map(math.isfinite, side)) for side in (first, second)]
    if not any(finite):
        return Interval(math.nan, math.inf)
    if not all(finite):
        return Interval(-math.inf if finite[0] else math.inf, 0.0)
    return interval([a - b for a, b in zip(first, second, strict=True)])
