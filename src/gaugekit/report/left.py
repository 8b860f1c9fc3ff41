"""What could not be aligned, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from gaugekit.report.tables import add_row, heading, new_table
from gaugekit.report.text import count

if TYPE_CHECKING:
    from gaugekit.verbs.aligning import Left

SHOWN = 40  # rows of what may be as long as the model is deep; the JSON has them all


def left_rows(left: Iterable[Left], *of: str) -> list[tuple[str, ...]]:
    """(symmetry, *of, where, reason) of each; what is said of several places is said once, of the first."""
    said: dict[tuple[str, str], tuple[str, ...]] = {}
    for item in left:
        said.setdefault((item.symmetry, item.reason), (item.symmetry, *of, item.where, item.reason))
    return list(said.values())


def left_section(rows: Sequence[Sequence[str]], *of: str) -> Iterator[RenderableType]:
    """A table of them, `of` naming the columns that were added; nothing where nothing is left."""
    if not rows:
        return
    yield heading("Not aligned", "symmetries that were left alone, and why")
    table = new_table("symmetry", *of, "where", "reason")
    for row in islice(rows, SHOWN):
        add_row(table, *row)
    yield table
    if len(rows) > SHOWN:
        yield Text(f"and {count(len(rows) - SHOWN)} more: --json lists all", style="dim")
