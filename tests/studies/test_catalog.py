"""What every study must be, before any run."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

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


@pytest.mark.parametrize("name", NAMES)
def test_studies(name: str) -> None:
    each = study(name)
    assert each.name == name
    for text in (each.title, each.question, each.source, each.setting, each.equal, each.not_tested):
        assert text.strip() == text != "" and "\n" not in text and "  " not in text
    assert each.question.endswith(".") and each.not_tested.endswith(".")
    keys = [arm.key for arm in each.arms]
    assert len(set(keys)) == len(keys) > 1
    for arm in each.arms:
        assert json.loads(json.dumps(arm.settings)) is not None
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
        assert budget.tuning not in budget.seeds
        assert json.loads(json.dumps(budget.options)) is not None
    if each.full.rates:
        assert len(each.full.seeds) >= 3 and len(each.full.rates) >= 3
        ratios = [b / a for a, b in zip(each.full.rates, each.full.rates[1:], strict=False)]
        assert max(ratios) < 1.3 * min(ratios), f"the grid is not geometric: {each.full.rates}"
        assert bool(each.quick.rates) and len(each.quick.rates) <= 2
    assert each.quick.steps <= each.full.steps and len(each.quick.seeds) <= 2
    assert math.isfinite(sum(each.full.rates))
