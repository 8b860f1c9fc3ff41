"""Studies in the terminal: a list of them, and what came out of one. The page of all of them takes its words here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gaugekit.report.tables import add_row, fact_lines, header, heading, new_table
from gaugekit.report.text import plain, plural
from gaugekit.studies.study import Table

if TYPE_CHECKING:
    from gaugekit.studies.study import Budget, Conclusion, Result, Study

EDGE = "best at an edge of the grid"
QUICK = "A quick run: it shows that everything works, and says nothing about the claim."
NUMBER = re.compile(r"([<>≈≤≥~+±−-]\s?)?\d.{0,23}|(the other |both )?broke off|[–—-]?")


def render_list(studies: Iterable[Study]) -> RenderableType:
    """What there is: a few lines for each."""
    return Group(*(part for study in studies for part in _listed(study)))


def render(study: Study, result: Result, conclusion: Conclusion) -> RenderableType:
    """What came out, with the tables behind the verdict."""
    return Group(*_parts(study, result, conclusion))


def verdict(conclusion: Conclusion) -> str:
    what = "inconclusive at this size" if conclusion.verdict == "inconclusive" else conclusion.verdict
    return f"{what}: {conclusion.line}"


def runs(study: Study, budget: Budget) -> str:
    """How many runs a study takes, and why."""
    arms, seeds = plural(len(study.arms), "arm"), plural(len(budget.seeds), "seed")
    count = len(study.arms) * budget.runs
    if not budget.rates:
        return f"{count} ({seeds} × {arms}; nothing is tuned)"
    rates, tuning = plural(len(budget.rates), "rate"), len(budget.tuning)
    return f"{count} (({rates}{f' × {tuning} seeds' if tuning > 1 else ''} + {seeds}) × {arms})"


def budget_line(study: Study, budget: Budget) -> str:
    """Steps, seeds and the grid of rates."""
    if not (budget.steps or budget.rates):
        return "nothing is trained"
    parts = [plural(budget.steps, "step")] if budget.steps else []
    parts.append(_seeds(budget.seeds))
    if budget.rates:
        grid = ", ".join(f"{rate:g}" for rate in budget.rates)
        parts.append(f"{study.rates_are} {grid}, chosen at {_seeds(budget.tuning)}")
    return "; ".join(parts)


def where(result: Result) -> str:
    """The machine, the code, and what the runs took."""
    m = result.machine
    parts = [f"{m['processor']}, torch {m['torch']}, Python {m['python']}, gaugekit {m['gaugekit']} (code {m['code']})"]
    seconds = float(m["seconds"])
    took = f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"
    parts.append(f"{took} of runs on one thread each, {m['jobs']} at a time")
    return "; ".join(parts)


def rates(study: Study, result: Result) -> Table | None:
    """Metric of every arm at every rate of the grid, and the rate chosen; None where nothing is tuned."""
    if not result.budget.rates:
        return None
    grid = [f"{rate:g}" for rate in result.budget.rates]
    rows = []
    for each in result.arms:
        assert each.rate is not None
        chosen = f"{each.rate:g}" + (" *" if each.at_edge else "")
        rows.append((each.arm.key, *(_metric(each.tuning[rate]) for rate in grid), chosen))
    title = f"Choice of {study.rates_are}{f' (*: {EDGE})' if any(a.at_edge for a in result.arms) else ''}"
    return Table(title, ("arm", *grid, "chosen"), tuple(rows))


def broken(result: Result) -> Table | None:
    """Reported runs that broke off, with the reason; None where all are whole."""
    rows = [
        (each.arm.key, str(seed), run["failed"])
        for each in result.arms
        for seed, run in zip(result.budget.seeds, each.runs, strict=True)
        if "failed" in run
    ]
    return Table("Runs that broke off", ("arm", "seed", "why"), tuple(rows)) if rows else None


def numeric(table: Table) -> tuple[bool, ...]:
    """For each column whether it holds numbers, which stand at the right."""
    return tuple(
        any(cells) and all(NUMBER.fullmatch(cell) for cell in cells) for cells in zip(*table.rows, strict=True)
    ) or (False,) * len(table.columns)


def _seeds(seeds: tuple[int, ...]) -> str:
    return f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}"


def _metric(value: float) -> str:
    return f"{value:.4g}" if value < float("inf") else "broke off"


def _listed(study: Study) -> Iterator[RenderableType]:
    yield Text.assemble((study.name, "bold"), f"  {plain(study.title)}")
    yield fact_lines(
        [
            ("  claim", study.question),
            ("  arms", ", ".join(_named(study))),
            ("  runs", runs(study, study.full)),
        ]
    )


def _named(study: Study, most: int = 12) -> list[str]:
    names = [arm.key for arm in study.arms]
    return names if len(names) <= most else [*names[:most], f"{len(names) - most} more"]


def _parts(study: Study, result: Result, conclusion: Conclusion) -> Iterator[RenderableType]:
    facts = [
        ("claim", study.question),
        ("source", study.source),
        ("setting", study.setting),
        ("equal", study.equal),
        ("budget", budget_line(study, result.budget)),
        ("machine", where(result)),
    ]
    yield from header(f"{study.name}: {study.title}", facts)
    for table in (rates(study, result), *conclusion.tables, broken(result)):
        if table is not None:
            yield heading(plain(table.title))
            yield _table(table)
    yield Text.assemble("\n", (plain(verdict(conclusion)), "bold"))
    if result.quick:
        yield Text(QUICK, style="dim")


def _table(table: Table) -> RenderableType:
    drawn = new_table(*table.columns)
    for i, (column, number) in enumerate(zip(drawn.columns, numeric(table), strict=True)):
        if number:  # cells stay whole, headers may be folded
            column.justify, column.min_width = "right", max(len(row[i]) for row in table.rows)
    for row in table.rows:
        add_row(drawn, *row)
    return drawn
