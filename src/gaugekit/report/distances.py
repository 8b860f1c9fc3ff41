"""The layers of a comparison, sorted into what is shown together, and its numbers in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gaugekit.report.text import measure, plain

if TYPE_CHECKING:
    from gaugekit.verbs.compare import CompareReport, LayerDistance


@dataclass(frozen=True)
class LayerSet:
    """The layers of one kind of attention ("self" or "cross") in one stream."""

    stream: str
    attention: str
    rows: tuple[LayerDistance, ...]

    @property
    def title(self) -> str:
        return f"{self.stream} {self.attention}-attention"

    @property
    def fast(self) -> bool:
        """Whether only spectra were compared."""
        return all(row.qk is None for row in self.rows)


def layer_sets(report: CompareReport) -> list[LayerSet]:
    sets: dict[tuple[str, str], list[LayerDistance]] = {}
    for row in report.layers:
        sets.setdefault((row.stream, row.attention), []).append(row)
    return [LayerSet(stream, attention, tuple(rows)) for (stream, attention), rows in sets.items()]


def facts(report: CompareReport) -> Iterator[tuple[str, str]]:
    """The comparison in a few lines of (what, value)."""
    yield "first", plain(report.first)
    yield "second", plain(report.second)
    numbers = {
        "spectra": (report.spectra, "median distance of the heads' spectra, which no symmetry moves"),
        "distance": (report.distance, "median over layers, the symmetries removed"),
        "rounding": (report.rounding, "what rounding of the stored weights explains of it"),
        "cosine": (report.cosine, "median likeness of matched heads"),
        "outputs": (report.largest_difference, "largest difference when both were run"),
    }
    for what, (value, meaning) in numbers.items():
        if value is not None:
            yield what, f"{measure(value)} ({meaning})"
