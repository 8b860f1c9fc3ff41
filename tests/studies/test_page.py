"""docs/studies.md says what the results in docs/studies say, and nothing that is no result gets there."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import made_up
import pytest

from gaugekit.errors import ConfigError, DataError
from gaugekit.studies.files import write
from gaugekit.studies.running import run
from gaugekit.studies.study import Arm, Study

DOCS = Path(__file__).parents[2] / "docs"
FIGURE = re.compile(r"!\[[^\]]*\]\((studies/[^)]+)\)")
UNRUN = replace(made_up.STUDY, name="unrun", title="A hyperbola")


def plainly(items: Iterable[Any], total: int | None, what: str) -> Iterable[Any]:
    return items


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("studies_page", DOCS / "studies.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The page of a folder, if two made-up studies were all there are."""
    module = loaded()

    def study(name: str) -> Study:
        return {"made_up": made_up.STUDY, "unrun": UNRUN}[name]

    monkeypatch.setattr(module, "study", study)
    return lambda folder: module.page(folder, ("made_up", "unrun"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the result of the first of them."""
    found = tmp_path / "studies"
    found.mkdir()
    write(made_up.STUDY, run(made_up.STUDY, out=found, track=plainly), found)
    return found


def test_the_page_is_what_the_results_say() -> None:
    page = loaded().page(DOCS / "studies")
    assert (DOCS / "studies.md").read_text(encoding="utf-8") == page, "run docs/studies.py"
    results = [path.stem for path in (DOCS / "studies").glob("*.json")]
    assert sorted(FIGURE.findall(page)) == sorted(f"studies/{name}.svg" for name in results)
    for figure in FIGURE.findall(page):
        assert (DOCS / figure).exists(), f"{figure} is missing: run the study again"


def test_what_a_page_holds(page: Callable[..., str], folder: Path) -> None:
    text = page(folder)
    code = json.loads((folder / "made_up.json").read_text())["machine"]["code"]
    assert page(folder) == text and len(code) == 12
    assert "| [made_up](#made_up) | Parabolas have a lowest point. | inconclusive | nothing was [asked] |" in text
    assert "| [unrun](#unrun) | Parabolas have a lowest point. | not run |  |" in text
    _, first, second = text.split("\n## ")
    assert first.startswith("made_up\n") and second.startswith("unrun\n")
    assert "**Inconclusive at this size: nothing was [asked]**" in first and "**Not run** yet." in second
    assert FIGURE.findall(text) == ["studies/made_up.svg"]
    for words in (
        "Apollonius of Perga", "- Setting: A function.", "- Equal: all of it", "- Not tested: Hyperbolas.",
        "2 steps; seeds 1, 2, 3; learning rates 0.01, 0.1, 1, chosen at seed 1000; runs: 30 ((3 rates + 3 seeds) × 5",
        f"gaugekit {version('gaugekit')} (code {code})", "one thread each, 1 at a time",
        "Choice of learning rates (\\*: best at an edge of the grid):",
        "| first / inside | 12 | 11 | 12 | 0.1 |",
        "| first / edge | 18.14 | 14.18 | 12.23 | 1 \\* |",
        "| second / breaks | 14 | broke off | broke off | 0.01 \\* |",
        "| arm | 0.01 | 0.1 | 1 | chosen |\n| --- | ---: | ---: | ---: | ---: |",
        "| first / inside | 1.01 | a\\|b &lt;c> |",
        "| second / seed | 2 | the loss is nan at step 2 |",
    ):  # fmt: skip
        assert words in first, words
    assert "\n\n\n" not in text
    assert "- Budget: 2 steps" in second and "Machine" not in second


def test_what_rates_are_and_the_seeds_that_choose_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded()
    full = replace(made_up.STUDY.full, tuning=(1000, 1001))
    study = replace(made_up.STUDY, full=full, rates_are="multiples of a base")
    monkeypatch.setattr(module, "study", lambda name: study)
    write(study, run(study, out=folder, track=plainly), folder)
    text = module.page(folder, ("made_up",))
    for words in (
        "seeds 1, 2, 3; multiples of a base 0.01, 0.1, 1, chosen at seeds 1000, 1001;",
        "runs: 45 ((3 rates × 2 seeds + 3 seeds) × 5 arms)",
        "Choice of multiples of a base (",
    ):
        assert words in text
    assert "earning rates 0" not in text


@pytest.mark.parametrize("missing", [True, False])
def test_without_any_result(page: Callable[..., str], tmp_path: Path, missing: bool) -> None:
    if not missing:
        (tmp_path / "studies").mkdir()
    text = page(tmp_path / "studies")
    assert text.count("| not run |") == text.count("**Not run** yet.") == 2
    assert not FIGURE.findall(text)


def change(folder: Path, **values: Any) -> None:
    path = folder / "made_up.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_quick_results_are_refused(page: Callable[..., str], folder: Path) -> None:
    change(folder, quick=True)
    with pytest.raises(DataError, match=r"made_up.json: no full run of made_up: run it again, without --quick$"):
        page(folder)


def test_quick_files_are_refused(page: Callable[..., str], folder: Path) -> None:
    write(made_up.STUDY, run(made_up.STUDY, quick=True, out=folder, track=plainly), folder)
    with pytest.raises(DataError, match=r"made_up.quick.json: no result of a full run of a study: move it away$"):
        page(folder)


def test_results_of_another_study_are_refused(page: Callable[..., str], folder: Path) -> None:
    change(folder, study="unrun")
    with pytest.raises(DataError, match="no full run of made_up"):
        page(folder)


@pytest.mark.parametrize(
    "changed",
    [
        replace(made_up.STUDY, full=replace(made_up.STUDY.full, seeds=(1, 2, 3, 4))),
        replace(made_up.STUDY, full=replace(made_up.STUDY.full, options={"width": 5})),
        replace(made_up.STUDY, full=replace(made_up.STUDY.full, tuning=(1000, 1001))),
        replace(made_up.STUDY, arms=made_up.STUDY.arms[:-1]),
        replace(made_up.STUDY, arms=(Arm("inside", {"best": 0.2}, "first"), *made_up.STUDY.arms[1:])),
    ],
)
def test_results_that_are_out_of_date_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changed: Study
) -> None:
    module = loaded()
    monkeypatch.setattr(module, "study", lambda name: changed)
    with pytest.raises(DataError, match=r"arms and budget are not those that made_up has now: run it again$"):
        module.page(folder, ("made_up",))


def test_unknown_studies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no study 'made_up'"):
        loaded().page(tmp_path, ("made_up",))
