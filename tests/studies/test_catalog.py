"""What every study must be, before any run."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import gaugekit.studies
from gaugekit.errors import ConfigError
from gaugekit.studies.catalog import NAMES, study


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"there is no study 'frame': choose one of redundancy, .*mode_connectivity$"):
        study("frame")


def test_every_study_of_the_folder_is_known() -> None:
    files = Path(gaugekit.studies.__path__[0]).glob("*.py")
    assert {path.stem for path in files if "\nSTUDY = " in path.read_text(encoding="utf-8")} == set(NAMES)


def as_read_back(told: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(told, allow_nan=False))


def test_what_is_told_is_compared() -> None:
    """A tuple is read back as a list, and a number among the keys as text."""
    for told in ({"sizes": (1, 2)}, {"at": {1: 2}}):
        assert as_read_back(told) != told


@pytest.mark.parametrize("name", NAMES)
def test_studies(name: str) -> None:
    each = study(name)
    assert each.name == name
    for text in (each.title, each.question, each.source, each.setting, each.equal, each.not_tested, each.rates_are):
        assert text.strip() == text != "" and "\n" not in text and "  " not in text
    assert each.question.endswith(".") and each.not_tested.endswith(".")
    keys = [arm.key for arm in each.arms]
    assert len(set(keys)) == len(keys) > 1
    for arm in each.arms:
        assert as_read_back(arm.settings) == arm.settings
    told = [json.dumps([arm.group, arm.settings], sort_keys=True) for arm in each.arms]
    assert len(set(told)) == len(told), "two arms are the same"
    assert pickle.loads(pickle.dumps(each.run)) is each.run


@pytest.mark.parametrize("name", NAMES)
def test_budgets(name: str) -> None:
    each = study(name)
    for budget in (each.full, each.quick):
        assert list(budget.rates) == sorted(set(budget.rates)) and all(rate > 0 for rate in budget.rates)
        assert len({f"{rate:g}" for rate in budget.rates}) == len(budget.rates)
        assert len(set(budget.seeds)) == len(budget.seeds) >= 1
        assert len(set(budget.tuning)) == len(budget.tuning) >= 1 and not set(budget.tuning) & set(budget.seeds)
        assert as_read_back(budget.options) == budget.options
    if each.full.rates:
        assert len(each.full.seeds) >= 3 and len(each.full.rates) >= 3
        ratios = [b / a for a, b in zip(each.full.rates, each.full.rates[1:], strict=False)]
        assert max(ratios) < 1.3 * min(ratios), f"the grid is not geometric: {each.full.rates}"
        assert bool(each.quick.rates) and len(each.quick.rates) <= 2
    assert each.quick.steps <= each.full.steps and len(each.quick.seeds) <= 2
    assert math.isfinite(sum(each.full.rates))
