"""Statistics of a stream of numbers, kept in float64 and in a size that does not depend on how many came.

Shapes: n numbers or rows that come at once, d coordinates, c cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugekit.linalg import effective_rank, numerical_rank


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation and extremes of what came."""

    mean: float
    std: float
    smallest: float
    largest: float


class Variances:
    """Rows (d,), for the variance of each coordinate."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self._squares = torch.zeros((), dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        """(n, d) in float64, n > 0."""
        centred, step, weight = _merge(self, rows)
        self._squares = self._squares + centred.square().sum(0) + step.square() * weight

    def variance(self) -> Tensor:
        """(d,), over the number of rows."""
        return self._squares / self.count


class Covariance:
    """Rows (d,), for their covariance (d, d): the only statistic here that needs d² numbers."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self._products = torch.zeros((), dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        """(n, d) in float64, n > 0."""
        centred, step, weight = _merge(self, rows)
        self._products = self._products + centred.mT @ centred + step.outer(step) * weight

    def matrix(self) -> Tensor:
        """(d, d), over the number of rows."""
        return self._products / self.count


def _merge(kept: Variances | Covariance, rows: Tensor) -> tuple[Tensor, Tensor, float]:
    """Merge the means and counts of what is kept and of new rows. Returns the rows about their own mean, the step
    between the two means and the weight of its square, by which sums of squares about the mean grow: a large mean costs
    no digits (Chan et al. 1979)."""
    n, before, mean = len(rows), kept.count, rows.mean(0)
    step = mean - kept.mean
    kept.count = before + n
    kept.mean = kept.mean + step * (n / kept.count)
    return rows - mean, step, before * n / kept.count


class Scalars:
    """Numbers, for their `Spread`."""

    def __init__(self) -> None:
        self._moments = Variances()
        self._smallest, self._largest = math.inf, -math.inf

    def add(self, values: Tensor) -> None:
        """(n,) in float64, n > 0."""
        self._moments.add(values.unsqueeze(-1))
        self._smallest = min(self._smallest, float(values.min()))
        self._largest = max(self._largest, float(values.max()))

    def spread(self) -> Spread:
        std = float(self._moments.variance().sqrt())
        return Spread(float(self._moments.mean), std, self._smallest, self._largest)


@dataclass(frozen=True)
class Curve:
    """How far pairs (x, y) lie on a curve.

    `x`, `y`: means over neighbouring x. R² of y by the best function of x (`best`), by c·tanh(a·x) and by c·x;
    `height` is that c and `scale` that a, in units of y and of 1/x.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    best: float
    tanh: float
    linear: float
    height: float
    scale: float


class Pairs:
    """Pairs (x, y), for their `Curve`. Cells grow with |x|: trained models have entries a thousand times the rest."""

    CELLS = 1600
    DRAWN = 16  # cells that make one point of the curve
    REACH = 12.0  # in asinh(x / unit): cells reach to 80,000 units, and what lies beyond falls into the last

    def __init__(self) -> None:
        self._unit = 0.0
        self._sums = torch.zeros(4, self.CELLS, dtype=torch.float64)  # of 1, x, y and y²

    def add(self, x: Tensor, y: Tensor) -> None:
        """Two tensors of one shape, float64, not empty."""
        x, y = x.reshape(-1), y.reshape(-1)
        # The first batch sets the unit: its root mean square.
        self._unit = self._unit or float(x.square().mean().sqrt()) or 1.0
        place = ((x / self._unit).asinh() / self.REACH + 1) * (self.CELLS / 2)
        cell = place.long().clamp(0, self.CELLS - 1)
        for row, values in zip(self._sums, (torch.ones_like(x), x, y, y * y), strict=True):
            row.index_add_(0, cell, values)

    def curve(self) -> Curve | None:
        """None where y does not vary."""
        count, x, y, squares = self._sums[:, self._sums[0] > 0]
        mean_x, moment = x / count, float(squares.sum())
        total = moment - float(y.sum() ** 2 / count.sum())
        if not total > 0:
            return None

        def fitted(shape: Tensor) -> tuple[float, float]:
            """By how much c·shape with the best c lowers Σy², and that c."""
            c = float(shape @ y / (count @ shape.square()).clamp_min(1e-300))
            return c * float(shape @ y), c

        def by_tanh(logarithm: float) -> tuple[float, float]:
            return fitted((math.exp(logarithm) * mean_x).tanh())

        # One maximum in practice: a coarse search over eight decades finds its neighbourhood, thirds refine it.
        grid = [math.log(10.0) * (k / 8 - 4) - math.log(self._unit) for k in range(65)]
        peak = max(range(len(grid)), key=lambda k: by_tanh(grid[k]))
        low, high = grid[max(peak - 1, 0)], grid[min(peak + 1, len(grid) - 1)]
        for _ in range(40):
            third = (high - low) / 3
            if by_tanh(low + third) < by_tanh(high - third):
                low += third
            else:
                high -= third
        scale = (low + high) / 2
        lowered, height = by_tanh(scale)
        drawn = self._sums.unflatten(1, (-1, self.DRAWN)).sum(-1)
        drawn = drawn[:, drawn[0] > 0]
        best, tanh, linear = (
            1 - (moment - each) / total for each in (float((y * y / count).sum()), lowered, fitted(mean_x)[0])
        )
        points = (drawn[1:3] / drawn[0]).tolist()
        return Curve(tuple(points[0]), tuple(points[1]), best, tanh, linear, height, math.exp(scale))


@dataclass(frozen=True)
class Spectrum:
    """Of Gram matrices, in the mean: the rank above rounding, the effective rank (the exponential of the entropy of
    the eigenvalues' shares), and the largest shares, descending."""

    rank: float
    effective_rank: float
    shares: tuple[float, ...]


class Spectra:
    """Positive matrices, for the mean shape of their eigenvalues."""

    KEPT = 64

    def __init__(self) -> None:
        self._count = 0
        self._sums = torch.zeros((), dtype=torch.float64)

    def add(self, matrices: Tensor) -> None:
        """(b, n, n) in float64, positive semidefinite; n is the same every time."""
        n = matrices.shape[-1]
        values = torch.linalg.eigvalsh(matrices).flip(-1).clamp_min(0)
        shares = values / values.sum(-1, keepdim=True).clamp_min(1e-300)
        ranks = torch.stack([numerical_rank(values, n).double(), effective_rank(values)], -1)
        self._sums = self._sums + torch.cat([ranks, shares[:, : self.KEPT]], -1).sum(0)
        self._count += len(matrices)

    def spectrum(self) -> Spectrum:
        rank, effective, *shares = (self._sums / self._count).tolist()
        return Spectrum(rank, effective, tuple(shares))
