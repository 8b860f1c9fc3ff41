"""What reports in the terminal are made of: a header of facts, headings, tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gaugekit.report.text import plain


def header(name: str, facts: Iterable[tuple[str, str]]) -> Iterator[RenderableType]:
    yield Text(plain(name), style="bold")
    yield fact_lines(facts)


def fact_lines(facts: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for what, value in facts:
        grid.add_row(Text(what), Text(plain(value)))
    return grid


def heading(title: str, what: str = "") -> Text:
    return Text.assemble("\n", (title, "bold"), (f"  {what}" if what else "", "dim"))


def new_table(*headers: str) -> Table:
    """A table with these columns; those that end in ">" hold numbers."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for header in headers:
        if header.endswith(">"):
            table.add_column(Text(header[:-1]), justify="right", no_wrap=True)
        else:
            table.add_column(Text(header), overflow="fold", no_wrap=header == "symmetry")
    return table


def add_row(table: Table, *cells: str) -> None:
    # As Text, not as strings: rich reads brackets in strings as markup.
    table.add_row(*(Text(plain(cell)) for cell in cells))
