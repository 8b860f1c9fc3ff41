"""The command: what it lists, what it runs and writes, and every way to fail."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_up
import pytest

import gaugekit.studies.catalog as catalog
import gaugekit.studies.files as files
from gaugekit.cli.common import INTERNAL, INTERRUPTED
from gaugekit.errors import ConfigError
from gaugekit.studies.study import Arm, Budget, Measured, Study

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def studies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Study]:
    """Two made-up studies are all there are, and the folder is a new one."""
    found = {"made_up": made_up.STUDY, "again": replace(made_up.STUDY, name="again")}

    def study(name: str) -> Study:
        if name not in found:
            raise ConfigError(f"there is no study {name!r}: choose one of {', '.join(found)}")
        return found[name]

    monkeypatch.setattr(catalog, "NAMES", tuple(found))
    monkeypatch.setattr(catalog, "study", study)
    monkeypatch.chdir(tmp_path)
    return found


def test_list(run: Run) -> None:
    result = run("study", "list")
    assert (result.code, result.err) == (0, "")
    for words in (
        "made_up  A parabola", "Parabolas have a lowest point.", "first / inside, first / edge, second / breaks",
        "30 ((3 rates + 3 seeds) × 5 arms)",
    ):  # fmt: skip
        assert words in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    listed = made_up.strict(run("study", "list", "--json").out)["studies"]
    assert [each["name"] for each in listed] == ["made_up", "again"]
    assert (listed[0]["runs"], listed[0]["rates"], listed[0]["seeds"]) == (30, [0.01, 0.1, 1.0], [1, 2, 3])
    assert listed[0]["tuning"] == [1000]


def test_run(run: Run, tmp_path: Path) -> None:
    result = run("study", "run", "made_up")
    assert result.code == 0
    assert result.err == "wrote out/studies/made_up.json\nwrote out/studies/made_up.svg\n"
    assert sorted(path.name for path in (tmp_path / "out" / "studies").iterdir()) == [
        "made_up.json",
        "made_up.runs.jsonl",
        "made_up.svg",
    ]
    for words in (
        "made_up: A parabola", "source Apollonius of Perga",
        "Choice of learning rates (*: best at an edge of the grid)", "first / edge 18.14 14.18 12.23 1 *",
        "Losses", "a|b <c>", "Runs that broke off", "second / seed 2 the loss is nan at step 2",
        "inconclusive at this size: nothing was [asked]",
    ):  # fmt: skip
        assert words in re.sub(" +", " ", result.out), words
    assert "quick run" not in result.out
    assert max(map(len, result.out.splitlines())) <= 80


def test_json_is_one_document(run: Run, tmp_path: Path) -> None:
    result = run("study", "run", "all", "--quick", "--out", tmp_path / "a" / "b", "--json")
    assert result.code == 0 and result.out.count("\n") == 1
    first, second = made_up.strict(result.out)["studies"]
    assert (first["study"], second["study"], first["quick"]) == ("made_up", "again", True)
    assert first["conclusion"]["verdict"] == "inconclusive"
    written = made_up.strict((tmp_path / "a" / "b" / "made_up.quick.json").read_text())
    assert {key: value for key, value in first.items() if key != "conclusion"} == written


def test_a_quick_run_says_so(run: Run) -> None:
    assert "A quick run: it shows that everything works" in run("study", "run", "made_up", "--quick").out


def test_names_are_run_once(run: Run) -> None:
    out = run("study", "run", "again", "made_up", "again", "all", "--quick", "--json").out
    assert [each["study"] for each in json.loads(out)["studies"]] == ["again", "made_up"]


def test_several_processes(run: Run, studies: dict[str, Study]) -> None:
    study = replace(made_up.STUDY, arms=made_up.STUDY.arms[:2], run=made_up.untrained, quick=Budget(seeds=(1,)))
    studies["made_up"] = study
    document = json.loads(run("study", "run", "made_up", "--quick", "--jobs", "2", "--json").out)["studies"][0]
    assert document["machine"]["jobs"] == "2"
    assert [arm["runs"][0]["loss"] for arm in document["arms"]] == pytest.approx([1.01, 2.01])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "Missing argument 'NAME...'"),
        (["run", "frames"], "there is no study 'frames': choose one of made_up, again"),
        (["run", "made_up", "frames"], "there is no study 'frames'"),
        (["run", "all", "frames"], "there is no study 'frames'"),
        (["run", "made_up", "--jobs", "0"], "Invalid value for '--jobs': "),
        (["run", "made_up", "--jobs", "two"], "Invalid value for '--jobs': "),
        (["run", "made_up", "--out", "file"], "--out file: cannot be made (File exists); choose another folder"),
        (["run", "made_up", "--out", "file/in"], "--out file/in: cannot be made (Not a directory)"),
        (["rnu"], "No such command 'rnu'"),
        (["list", "made_up"], "unexpected extra argument"),
    ],
)
def test_bad_usage(run: Run, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "file").touch()
    result = run("study", *arguments)
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(rf"gaugekit: .*{re.escape(words)}.*\n", result.err)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_matplotlib_nothing_is_run(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(files, "import_module", missing)
    result = run("study", "run", "made_up")
    assert result == (2, "", "gaugekit: figures need matplotlib: pip install 'gaugekit[figures]'\n")
    assert not list(tmp_path.iterdir())


def test_damaged_runs(run: Run, tmp_path: Path) -> None:
    run("study", "run", "made_up", "--quick", "--out", tmp_path)
    kept = tmp_path / "made_up.quick.runs.jsonl"
    kept.write_text("{}\n" + kept.read_text())
    result = run("study", "run", "made_up", "--quick", "--out", tmp_path)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"gaugekit: {kept}: line 1 is no run: delete it, or the file\n"


@pytest.mark.parametrize("name", ["made_up.quick.runs.jsonl", "made_up.quick.json", "made_up.quick.svg"])
def test_a_directory_where_a_file_should_be(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    result = run("study", "run", "made_up", "--quick", "--out", tmp_path)
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(rf"gaugekit: {tmp_path / name}: cannot be (read|written) \(Is a directory\): .*\n", result.err)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), INTERRUPTED), (ZeroDivisionError("no"), INTERNAL)])
def test_runs_are_kept(run: Run, studies: dict[str, Study], tmp_path: Path, error: BaseException, code: int) -> None:
    """An interrupted study goes on where it was, and so does one that failed, when what failed was put right."""
    calls: list[str] = []

    def failing(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
        if len(calls) == 7:
            raise error
        calls.append(arm.key)
        return made_up.run(arm, rate, seed, budget)

    studies["made_up"] = replace(made_up.STUDY, run=failing)
    result = run("study", "run", "made_up", "--out", tmp_path)
    assert (result.code, result.out) == (code, "")
    assert result.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["made_up.runs.jsonl"]
    assert (tmp_path / "made_up.runs.jsonl").read_text().count("\n") == 7
    calls.append("past it")
    assert run("study", "run", "made_up", "--out", tmp_path).code == 0
    assert len(calls) == 30 + 1


def test_help(run: Run) -> None:
    for arguments in (["study", "--help"], ["study", "list", "--help"], ["study", "run", "-h"]):
        result = run(*arguments)
        assert (result.code, result.err) == (0, "")
        assert "Exit codes: 0 done" in result.out
    for option in ("--quick", "--out", "--jobs", "--json", "--debug", "NAME..."):
        assert option in result.out
