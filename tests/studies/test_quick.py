"""A quick run of every study: the structure of what comes out, and that it is finite; never the verdict."""

from __future__ import annotations

import io
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import pytest
from made_up import strict
from rich.console import Console

from gaugekit.report.study import render
from gaugekit.studies.catalog import NAMES, study
from gaugekit.studies.files import read, write
from gaugekit.studies.running import run
from gaugekit.studies.study import ArmResult, Conclusion, Result, Study, Verdict


def plainly(items: Iterable[Any], total: int | None, what: str) -> Iterable[Any]:
    return items


@pytest.mark.parametrize("name", NAMES)
def test_quick(name: str, tmp_path: Path) -> None:
    each = study(name)
    result = run(each, quick=True, out=tmp_path, track=plainly)
    assert (result.study, result.quick, result.budget) == (name, True, each.quick)
    assert [a.arm for a in result.arms] == list(each.arms)
    for arm in result.arms:
        check_arm(each, arm)
    document, picture = write(each, result, tmp_path)
    text = document.read_text(encoding="utf-8")
    strict(text)
    back = read(document)
    assert back.arms == result.arms
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert max(len(text), picture.stat().st_size) < 500_000
    check_conclusion(each, back, each.conclude(back))


def check_arm(each: Study, arm: ArmResult) -> None:
    assert len(arm.runs) == len(each.quick.seeds)
    if each.quick.rates:
        assert arm.rate in each.quick.rates
        assert list(arm.tuning) == [f"{rate:g}" for rate in each.quick.rates]
        assert math.isfinite(min(arm.tuning.values())), f"{arm.arm.key} breaks off at every rate"
    else:
        assert (arm.rate, arm.tuning) == (None, {})
    for measured in arm.runs:
        assert "failed" not in measured, f"{arm.arm.key}: {measured['failed']}"
        assert all(math.isfinite(number) for number in numbers(measured)), arm.arm.key
        if each.quick.rates:
            assert math.isfinite(measured[each.metric])


def numbers(value: Any) -> Iterable[float]:
    """Every number in plain data."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif value is not None and not isinstance(value, str | bool):
        yield value


def check_conclusion(each: Study, result: Result, conclusion: Conclusion) -> None:
    assert conclusion.verdict in get_args(Verdict)
    assert conclusion.line.strip() == conclusion.line != "" and "\n" not in conclusion.line
    assert "nan" not in conclusion.line.lower().split()
    assert conclusion.tables
    for table in conclusion.tables:
        assert table.rows and table.title
        for row in table.rows:
            assert len(row) == len(table.columns) and all(isinstance(cell, str) for cell in row)
            assert not {"nan", "inf", "-inf", "None"} & set(row)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(each, result, conclusion))
    assert conclusion.line.split()[0] in console.export_text()
