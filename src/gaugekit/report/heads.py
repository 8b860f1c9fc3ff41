"""The heads of a report, sorted into what is shown together: one set for each kind of attention of each stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gaugekit.verbs.inspect import HeadRow, InspectReport

Circuit = Literal["qk", "vo"]
CIRCUITS: tuple[Circuit, Circuit] = ("qk", "vo")
NAMES = {"qk": "query-key (QK)", "vo": "value-output (VO)"}


@dataclass(frozen=True)
class HeadSet:
    """Every circuit of one kind of attention ("self" or "cross") in one stream."""

    stream: str
    attention: str
    rows: tuple[HeadRow, ...]

    @property
    def title(self) -> str:
        return f"{self.stream} {self.attention}-attention"

    @property
    def layers(self) -> list[int]:
        return sorted({row.layer for row in self.rows})

    def circuit(self, circuit: Circuit) -> list[HeadRow]:
        """In the order of layers, then heads."""
        rows = (row for row in self.rows if row.circuit == circuit)
        return sorted(rows, key=lambda row: (row.layer, row.kv_head))


def head_sets(report: InspectReport) -> list[HeadSet]:
    sets: dict[tuple[str, str], list[HeadRow]] = {}
    for row in report.heads:
        sets.setdefault((row.stream, row.attention), []).append(row)
    return [HeadSet(stream, attention, tuple(rows)) for (stream, attention), rows in sets.items()]


def degenerate(report: InspectReport) -> Iterator[HeadRow]:
    return (row for row in report.heads if row.degenerate_blocks)
