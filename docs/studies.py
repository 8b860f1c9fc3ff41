"""Writes docs/studies.md from the results in docs/studies/, which `gaugekit study run NAME --out docs/studies` makes.

python docs/studies.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from gaugekit.errors import DataError, GaugekitError
from gaugekit.report.study import broken, budget_line, numeric, rates, runs, verdict, where
from gaugekit.studies.catalog import NAMES, study
from gaugekit.studies.files import read
from gaugekit.studies.study import Budget, Result, Study, Table

DOCS = Path(__file__).parent
INTRODUCTION = """\
<!-- written by docs/studies.py from docs/studies/*.json: change those -->

# Studies

Papers on the geometry of transformers make claims that can be tested. Each study below tests one: a question, arms that
differ in what is compared and in nothing that is not said, and a verdict: confirmed, not confirmed, or inconclusive at
this size. What decides stands in the study's file, `src/gaugekit/studies/NAME.py`, with the numbers.

**One small size.** What is trained are small models, most of them of a fraction of a million parameters, on small
tasks, for seconds a run: two cores finish all studies in a few hours. What is true at this size need not be true at
another.

**Data.** Text is Python's own documentation, by characters: eight tenths are trained on, one is for validation and one
is held out, both without their lines of 40 characters and more that also stand in the first part. Tasks that are made
up have draws of their own for each of the three.

**Learning rates** are chosen for every arm by itself, over the same grid for all arms of a study, by what is measured
on validation data at seeds that are not reported; then every arm runs at its best rate for every seed. A rate with a
star is the best at an edge of the grid: a better one may lie outside.

**Seeds.** A seed draws the same batches for all arms that have the same task, and the same weights for models whose
shapes are equal, before what an arm makes of them. So differences are taken seed by seed.

**Numbers.** Unless a table says otherwise, a ± b is a mean over seeds with half the width of its 95 % interval
(Student's t), and curves are means, in the range of the seeds. Seconds of steps are CPU seconds on one thread. A run
has broken off where a loss, a gradient or a weight is not finite. That counts as worse than any number, or, where a
study says so, lets it conclude nothing.

**Words**, of which [the mathematics](mathematics.md) says more:

- *gauge*: coordinates inside a model in which its weights are written. Another gauge has other weights and computes the
  same.
- *orbit*: all weights that a model can be moved to so.
- *frame*: the gauge of the states: the axes along which their channels are read and written.
- *QK and VO*: the two products of a head, G_QK = W_Qᵀ W_K, which scores, and G_VO = W_O W_V, which carries. What a head
  does depends on its weights through them alone (rotary positions stand between the factors of the first).
- *charges, balanced*: of a product BᵀA the charges A Aᵀ − B Bᵀ, which gradient flow leaves as they are. Where they are
  zero the factors are balanced, and as short as this product lets them be.
- *γ⁻¹*: one over the weight of a norm, channel by channel; along it the outputs of a LayerNorm do not vary.
- *held-out nats*: the mean of −log p of the right answers, where p is the model's probability, on data that no choice
  was made with. Less is better.

**To run them again**, with the figures that `pip install 'gaugekit[figures]'` draws; `gaugekit study list` names them
all:

```
gaugekit study run NAME --out docs/studies
python docs/studies.py
```
"""


def page(folder: Path, names: tuple[str, ...] = NAMES) -> str:
    """The page of the results in a folder, which may lack some or all.

    Raises: DataError for a result that is quick, of another study, or of other arms or another budget than the study
        has now.
    """
    strange = sorted({path.name for path in folder.glob("*.json")} - {f"{name}.json" for name in names})
    if strange:
        raise DataError(f"{folder / strange[0]}: no result of a full run of a study: move it away")
    found = [(study(name), of(study(name), folder / f"{name}.json")) for name in names]
    rows = tuple(row(each, result) for each, result in found)
    parts = [INTRODUCTION, *markdown(Table("", ("study", "claim", "verdict", "why"), rows))]
    for each, result in found:
        parts += section(each, result, folder.name)
    return "\n".join(parts)


def of(each: Study, path: Path) -> Result | None:
    if not path.exists():
        return None
    result = read(path)
    if result.quick or result.study != each.name:
        raise DataError(f"{path}: no full run of {each.name}: run it again, without --quick")
    arms, now = [(a.arm.key, a.arm.settings) for a in result.arms], [(a.key, a.settings) for a in each.arms]
    if plain(arms) != plain(now) or plain(told(result.budget)) != plain(told(each.full)):
        raise DataError(f"{path}: arms and budget are not those that {each.name} has now: run it again")
    return result


def told(budget: Budget) -> list[object]:
    return [budget.steps, budget.rates, budget.seeds, budget.tuning, budget.options]


def plain(value: object) -> str:
    """As it is written: JSON knows no tuples."""
    return json.dumps(value, sort_keys=True)


def row(each: Study, result: Result | None) -> tuple[str, ...]:
    name = f"[{each.name}](#{each.name})"
    if result is None:
        return name, each.question, "not run", ""
    conclusion = each.conclude(result)
    return name, each.question, conclusion.verdict, conclusion.line


def section(each: Study, result: Result | None, folder: str) -> Iterator[str]:
    yield f"## {each.name}\n"
    yield f"*{each.title}.* Claim: {each.question} Source: {each.source}.\n"
    conclusion = None if result is None else each.conclude(result)
    if conclusion is None:
        yield "**Not run** yet.\n"
    else:
        yield f"**{sentence(verdict(conclusion))}**\n"
    yield f"- Setting: {each.setting}"
    yield f"- Equal: {each.equal}"
    yield f"- Budget: {budget_line(each, each.full)}; runs: {runs(each, each.full)}"
    if result is not None:
        yield f"- Machine: {where(result)}"
    yield f"- Not tested: {each.not_tested}\n"
    if result is None or conclusion is None:
        return
    yield f"![{each.title}]({folder}/{each.name}.svg)\n"
    for table in (*conclusion.tables, broken(result), rates(each, result)):
        if table is not None:
            yield f"{escaped(table.title)}:\n"
            yield from markdown(table)


def sentence(text: str) -> str:
    return escaped(text[:1].upper() + text[1:])


def markdown(table: Table) -> Iterator[str]:
    lines = ["---:" if number else "---" for number in numeric(table)]
    for cells in (table.columns, lines, *table.rows):
        yield f"| {' | '.join(escaped(cell) for cell in cells)} |"
    yield ""


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


if __name__ == "__main__":
    try:
        (DOCS / "studies.md").write_text(page(DOCS / "studies"), encoding="utf-8")
    except GaugekitError as error:
        sys.exit(f"docs/studies.py: {error}")
