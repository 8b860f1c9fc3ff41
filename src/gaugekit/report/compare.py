"""What compare reports, for the terminal: the verdict, the distances, and a table of layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gaugekit.report.distances import LayerSet, facts, layer_sets
from gaugekit.report.tables import add_row, fact_lines, heading, new_table
from gaugekit.report.text import measure, plain

if TYPE_CHECKING:
    from gaugekit.verbs.compare import CompareReport

LAYERS = (
    "QK, VO: median relative distance of matched heads' products. MLP: of matched hidden units. rounding: what "
    "rounding of the stored weights explains of QK and VO. cosine: likeness of matched heads."
)
SPECTRA = "Only spectra were compared, which no symmetry moves: relative distance of matched heads."


def render(report: CompareReport) -> RenderableType:
    """The whole report. Print it on any rich console."""
    return Group(*_parts(report))


def _parts(report: CompareReport) -> Iterator[RenderableType]:
    yield Text.assemble((report.verdict, "bold"), f"  {plain(report.reason)}")
    yield fact_lines(facts(report))
    sets = layer_sets(report)
    for each in sets:
        yield from _layers(each, alone=len(sets) == 1)
    if sets:
        yield Text(SPECTRA if sets[0].fast else LAYERS, style="dim")


def _layers(each: LayerSet, alone: bool) -> Iterator[RenderableType]:
    yield heading("Layers" if alone else f"Layers: {each.title}", "distances, the symmetries removed")
    columns = ("spectra QK>", "spectra VO>")
    table = new_table("layer>", *columns if each.fast else ("QK>", "VO>", "MLP>", "rounding>", "cosine>", *columns))
    for row in each.rows:
        aligned = () if each.fast else (row.qk, row.vo, row.mlp, row.rounding, row.cosine)
        add_row(table, str(row.layer), *map(measure, (*aligned, row.spectra_qk, row.spectra_vo)))
    yield table
