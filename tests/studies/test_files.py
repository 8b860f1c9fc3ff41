"""Results on disk: read back they are what was written, infinities too, and figures are drawn the same each time."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_up
import pytest

import gaugekit.studies.files as files
from gaugekit.errors import ConfigError, DataError
from gaugekit.studies.running import run
from gaugekit.studies.study import Measured, Result


def plainly(items: Iterable[Any], total: int | None, what: str) -> Iterable[Any]:
    return items


@pytest.fixture
def result(tmp_path: Path) -> Result:
    (tmp_path / "runs").mkdir()
    return run(made_up.STUDY, out=tmp_path / "runs", track=plainly)


def test_round_trip(result: Result, tmp_path: Path) -> None:
    document, picture = files.write(made_up.STUDY, result, tmp_path)
    assert (document.name, picture.name) == ("made_up.json", "made_up.svg")
    assert files.read(document) == result
    assert any(math.inf in each.tuning.values() for each in result.arms)
    written = made_up.strict(document.read_text(encoding="utf-8"))
    assert written["arms"][2]["tuning"] == {"0.01": pytest.approx(14.0), "0.1": None, "1": None}
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "made_up.json", "made_up.svg"}


def test_numbers_that_are_not_finite_in_runs(result: Result, tmp_path: Path) -> None:
    runs: tuple[Measured, ...] = ({"loss": math.inf, "curve": [[1, math.nan]]}, {"loss": 2.0}, {"loss": math.nan})
    arm = replace(result.arms[0], runs=runs)
    strange = replace(made_up.STUDY, draw=lambda result: made_up.draw(replace(result, arms=())))
    document, _ = files.write(strange, replace(result, arms=(arm,)), tmp_path)
    back = files.read(document).arms[0]
    assert back.runs == ({"loss": None, "curve": [[1, None]]}, {"loss": 2.0}, {"loss": None})
    assert arm.values("loss") == back.values("loss") == [math.inf, 2.0, math.inf]


def test_quick_results_have_other_names(tmp_path: Path) -> None:
    result = run(made_up.STUDY, quick=True, out=tmp_path, track=plainly)
    assert [path.name for path in files.write(made_up.STUDY, result, tmp_path)] == [
        "made_up.quick.json",
        "made_up.quick.svg",
    ]


def test_figures_are_drawn_the_same_each_time(result: Result, tmp_path: Path) -> None:
    _, picture = files.write(made_up.STUDY, result, tmp_path)
    first = picture.read_bytes()
    files.write(made_up.STUDY, result, tmp_path)
    assert picture.read_bytes() == first


def test_what_was_there_stays_when_writing_fails(result: Result, tmp_path: Path) -> None:
    document, picture = files.write(made_up.STUDY, result, tmp_path)
    before = document.read_bytes(), picture.read_bytes()
    unwritable = replace(result.arms[0], runs=({"loss": object()},))
    with pytest.raises(TypeError, match="not JSON serializable"):
        files.write(made_up.STUDY, replace(result, arms=(unwritable,)), tmp_path)
    assert (document.read_bytes(), picture.read_bytes()) == before


BUDGET: dict[str, Any] = {"steps": 1, "rates": [1], "seeds": [1], "tuning": [2], "options": {}}
ARM: dict[str, Any] = {"arm": {"name": "a", "settings": {}}, "tuning": {}, "rate": 1, "at_edge": False, "runs": []}
WHOLE: dict[str, Any] = {"study": "made_up", "quick": False, "budget": BUDGET, "arms": [ARM], "machine": {}}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '{"budget": null}', json.dumps({"budget": {"rate": 1}})),
        json.dumps(WHOLE | {"arms": [ARM | {"tuning": []}]}),
        json.dumps(WHOLE | {"budget": BUDGET | {"tuning": 2}}),
        json.dumps(WHOLE | {"arms": [ARM | {"arm": {}}]}),
    ],
)
def test_files_that_are_no_results(tmp_path: Path, text: str) -> None:
    path = tmp_path / "made_up.json"
    path.write_text(json.dumps(WHOLE))
    assert files.read(path).arms[0].arm.name == "a"
    path.write_text(text)
    with pytest.raises(DataError, match=r"made_up.json: no result of a study \(.*\)$"):
        files.read(path)
    with pytest.raises(DataError, match="no result"):
        files.read(tmp_path / "missing.json")
    with pytest.raises(DataError, match="no result"):
        files.read(tmp_path)


@pytest.mark.parametrize("name", ["made_up.json", "made_up.svg"])
def test_where_nothing_can_be_written(result: Result, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=rf"{name}: cannot be written \(Is a directory\): make room, or take another"):
        files.write(made_up.STUDY, result, tmp_path)
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(DataError, match=r"made_up.json: cannot be written \(No such file or directory\)"):
        files.write(made_up.STUDY, result, tmp_path / "missing")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    files.check_drawing()

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(files, "import_module", missing)
    with pytest.raises(ConfigError, match=r"figures need matplotlib: pip install 'gaugekit\[figures\]'"):
        files.check_drawing()
