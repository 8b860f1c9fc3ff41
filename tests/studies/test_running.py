"""What is run, in which order, what is kept, and what is not made again."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_up
import pytest
import torch

import gaugekit
from gaugekit.errors import DataError
from gaugekit.studies import kept as keeping
from gaugekit.studies.running import run
from gaugekit.studies.study import Arm, Budget, Measured, Study

Calls = list[tuple[str, float, int]]


def plainly(items: Iterable[Any], total: int | None, what: str) -> Iterable[Any]:
    return items


def counting(study: Study = made_up.STUDY, stop: int = -1) -> tuple[Study, Calls]:
    """The study, and the list of its calls; the one of number `stop` is interrupted."""
    calls: Calls = []

    def counted(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
        if len(calls) == stop:
            raise KeyboardInterrupt
        calls.append((arm.key, rate, seed))
        return study.run(arm, rate, seed, budget)

    return replace(study, run=counted), calls


def test_every_arm_tries_every_rate_and_then_all_seeds_at_its_best(tmp_path: Path) -> None:
    study, calls = counting()
    result = run(study, out=tmp_path, track=plainly)
    tuning = [(arm.key, rate, 1000) for arm in study.arms for rate in made_up.RATES]
    best = [0.1, 1.0, 0.01, 0.1, 0.01]
    reported = [(arm.key, rate, seed) for arm, rate in zip(study.arms, best, strict=True) for seed in (1, 2, 3)]
    assert calls == tuning + reported
    assert [each.rate for each in result.arms] == best
    assert [each.at_edge for each in result.arms] == [False, True, True, False, True]
    inside = result["first / inside"]
    assert inside.tuning == pytest.approx({"0.01": 12.0, "0.1": 11.0, "1": 12.0})
    assert inside.values("loss") == pytest.approx([1.01, 1.02, 1.03])
    assert (result.study, result.quick, result.budget) == ("made_up", False, study.full)
    assert set(result.groups()) == {"first", "second"}
    with pytest.raises(KeyError, match="no arm 'inside'"):
        result["inside"]


def test_rates_are_chosen_by_the_mean_over_all_seeds_for_it(tmp_path: Path) -> None:
    """Each of the seeds by itself would choose another rate; inf where one broke off."""

    def run_(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
        assert budget.tuning == (7, 8)
        return {"loss": {7: {0.01: 0.0, 0.1: 2.0, 1.0: 5.0}, 8: {0.01: 5.0, 0.1: 2.0, 1.0: math.nan}}[seed][rate]}

    study = replace(made_up.STUDY, run=run_, full=replace(made_up.STUDY.full, tuning=(7, 8), seeds=(7, 8)))
    result = run(study, out=tmp_path, track=plainly)
    assert all(each.tuning == {"0.01": 2.5, "0.1": 2.0, "1": math.inf} for each in result.arms)
    assert {each.rate for each in result.arms} == {0.1}
    assert study.full.runs == 3 * 2 + 2
    assert len(keys(tmp_path / "made_up.runs.jsonl")) == 5 * 3 * 2  # the reported ones were among them


def test_runs_that_break_off_are_results(tmp_path: Path) -> None:
    result = run(made_up.STUDY, out=tmp_path, track=plainly)
    assert result["second / breaks"].tuning == {"0.01": pytest.approx(14.0), "0.1": math.inf, "1": math.inf}
    assert result["second / breaks"].rate == 0.01
    seeds = result["second / seed"]
    assert seeds.runs[1] == {"failed": "the loss is nan at step 2"}
    assert seeds.values("loss") == [pytest.approx(4.01), math.inf, pytest.approx(4.03)]
    assert result["second / never"].values("loss") == [math.inf] * 3


def test_a_decomposition_that_fails_breaks_a_run_off(tmp_path: Path) -> None:
    def failing(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
        torch.linalg.cholesky(-torch.eye(2) * (seed == 2) + torch.eye(2) * (seed != 2))
        return {"loss": 1.0}

    result = run(replace(made_up.STUDY, run=failing), out=tmp_path, track=plainly)
    first, second, third = result.arms[0].runs
    assert first == third == {"loss": 1.0}
    assert (
        list(second) == ["failed"] and second["failed"].startswith("linalg.cholesky") and "\n" not in second["failed"]
    )


def test_a_metric_that_is_not_finite_is_not_chosen(tmp_path: Path) -> None:
    def nan_where_best(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
        return {"loss": {0.01: -math.inf, 0.1: math.nan, 1.0: 7.0}[rate]}

    result = run(replace(made_up.STUDY, run=nan_where_best), out=tmp_path, track=plainly)
    assert {each.rate for each in result.arms} == {1.0}
    assert result.arms[0].tuning == {"0.01": math.inf, "0.1": math.inf, "1": 7.0}


def test_where_nothing_is_trained(tmp_path: Path) -> None:
    def counted(arm: Arm, rate: float, seed: int, budget: Budget) -> Measured:
        assert rate == 0.0
        return {"seed": seed}

    study = replace(made_up.STUDY, run=counted, full=Budget(seeds=(4, 5)))
    result = run(study, out=tmp_path, track=plainly)
    assert all((each.rate, each.at_edge, each.tuning) == (None, False, {}) for each in result.arms)
    assert result.arms[0].runs == ({"seed": 4}, {"seed": 5})


def test_one_rate_has_no_edge(tmp_path: Path) -> None:
    study = replace(made_up.STUDY, full=replace(made_up.STUDY.full, rates=(0.1,)))
    assert not any(each.at_edge for each in run(study, out=tmp_path, track=plainly).arms)


def test_an_error_of_another_kind_is_not_hidden(tmp_path: Path) -> None:
    study = replace(made_up.STUDY, arms=(Arm("bug", {"bug": True, "best": 1.0, "height": 0.0}),))
    for jobs in (1, 2):
        with pytest.raises(ZeroDivisionError, match="a bug"):
            run(study, out=tmp_path, jobs=jobs, track=plainly)
    assert not list(tmp_path.iterdir())


def test_two_processes_find_the_same_as_one(tmp_path: Path) -> None:
    results = []
    for jobs in (1, 2):
        (tmp_path / str(jobs)).mkdir()
        results.append(run(made_up.STUDY, out=tmp_path / str(jobs), jobs=jobs, track=plainly))
    assert results[0].arms == results[1].arms
    assert [each.machine["jobs"] for each in results] == ["1", "2"]
    assert results[0].machine["code"] == results[1].machine["code"] and len(results[0].machine["code"]) == 12
    kept = [sorted(keys(tmp_path / str(jobs) / "made_up.runs.jsonl")) for jobs in (1, 2)]
    assert kept[0] == kept[1] and len(kept[0]) == 5 * 6


def keys(kept: Path) -> list[str]:
    return [json.loads(line)["key"] for line in kept.read_text().splitlines()]


def test_runs_have_one_thread_and_no_grid(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        result = run(made_up.STUDY, out=tmp_path, track=plainly)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert {run["threads"] for run in result.arms[0].runs} == {1}
    assert result.arms[0].runs[0]["grid"] == [] and result.budget.rates == made_up.RATES


def test_quick_runs_are_kept_apart(tmp_path: Path) -> None:
    result = run(made_up.STUDY, quick=True, out=tmp_path, track=plainly)
    assert result.quick and result.budget == made_up.STUDY.quick
    assert [path.name for path in tmp_path.iterdir()] == ["made_up.quick.runs.jsonl"]


# --- kept runs ----------------------------------------------------------------------------------------------


def test_kept_runs_are_not_made_again(tmp_path: Path) -> None:
    first = run(made_up.STUDY, out=tmp_path, track=plainly)
    study, calls = counting()
    second = run(study, out=tmp_path, track=plainly)
    assert calls == [] and second.arms == first.arms
    assert second.machine == first.machine


def test_seconds_are_those_of_all_runs_whenever_they_were_made(tmp_path: Path) -> None:
    run(made_up.STUDY, out=tmp_path, track=plainly)
    kept = tmp_path / "made_up.runs.jsonl"
    records = [json.loads(line) for line in kept.read_text().splitlines()]
    assert all(0 <= record["seconds"] < 5 for record in records)
    kept.write_text("".join(json.dumps(record | {"seconds": 10.0}) + "\n" for record in records))
    assert run(made_up.STUDY, out=tmp_path, track=plainly).machine["seconds"] == "300"


def test_a_study_that_was_stopped_goes_on(tmp_path: Path) -> None:
    stopped, before = counting(stop=17)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, out=tmp_path, track=plainly)
    assert len(before) == 17 == len(keys(tmp_path / "made_up.runs.jsonl"))
    study, after = counting()
    (tmp_path / "whole").mkdir()
    assert (
        run(study, out=tmp_path, track=plainly).arms == run(made_up.STUDY, out=tmp_path / "whole", track=plainly).arms
    )
    assert len(after) == 30 - 17 and not set(before) & set(after)


def test_more_seeds_and_rates_leave_the_other_runs(tmp_path: Path) -> None:
    run(made_up.STUDY, out=tmp_path, track=plainly)
    wider = replace(made_up.STUDY.full, rates=(*made_up.RATES, 10.0), seeds=(1, 2, 3, 4))
    study, calls = counting(replace(made_up.STUDY, full=wider))
    result = run(study, out=tmp_path, track=plainly)
    assert [call for call in calls if call[2] == 1000] == [(arm.key, 10.0, 1000) for arm in study.arms]
    assert not result["first / edge"].at_edge
    assert [(rate, seed) for key, rate, seed in calls if key == "first / edge" and seed != 1000] == [(1.0, 4)]


@pytest.mark.parametrize("change", [{"steps": 3}, {"options": {"width": 5}}, {"tuning": (7,)}])
def test_another_budget_has_other_runs(tmp_path: Path, change: dict[str, Any]) -> None:
    run(made_up.STUDY, out=tmp_path, track=plainly)
    study, calls = counting(replace(made_up.STUDY, full=replace(made_up.STUDY.full, **change)))
    run(study, out=tmp_path, track=plainly)
    assert len(calls) == 30


def test_another_arm_of_the_same_name_has_other_runs(tmp_path: Path) -> None:
    run(made_up.STUDY, out=tmp_path, track=plainly)
    changed = Arm("inside", {"best": 0.1, "height": 9.0}, "first")
    study, calls = counting(replace(made_up.STUDY, arms=(changed, *made_up.STUDY.arms[1:])))
    assert run(study, out=tmp_path, track=plainly).arms[0].values("loss")[0] == pytest.approx(9.01)
    assert len(calls) == 6


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_last_line_that_was_being_written_is_made_again(tmp_path: Path, cut: int) -> None:
    whole = run(made_up.STUDY, out=tmp_path, track=plainly)
    kept = tmp_path / "made_up.runs.jsonl"
    text = kept.read_bytes()
    kept.write_bytes(text[:-cut])  # 1: the line is whole but for its end, on which the next one would be written
    study, calls = counting()
    assert run(study, out=tmp_path, track=plainly).arms == whole.arms
    assert calls == [("second / never", 0.01, 3)]
    assert keys(kept) == [json.loads(line)["key"] for line in text.splitlines()]


@pytest.mark.parametrize(
    "line", ["{", "[]", "null", '{"key": "a"}', '{"key": "a", "measured": 3, "seconds": 1, "jobs": 1}', "\xff"]
)
def test_a_damaged_line_is_refused(tmp_path: Path, line: str) -> None:
    run(made_up.STUDY, out=tmp_path, track=plainly)
    kept = tmp_path / "made_up.runs.jsonl"
    lines = kept.read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:4], line.encode("latin-1") + b"\n", *lines[4:]])
    kept.write_bytes(damaged)
    study, calls = counting()
    with pytest.raises(DataError, match=r"made_up.runs.jsonl: line 5 is no run: delete it, or the file$"):
        run(study, out=tmp_path, track=plainly)
    assert calls == [] and kept.read_bytes() == damaged


def test_progress_is_of_what_is_left(tmp_path: Path) -> None:
    seen: list[tuple[int | None, str]] = []

    def track(items: Iterable[Any], total: int | None, what: str) -> Iterable[Any]:
        seen.append((total, what))
        return items

    for _ in range(2):
        run(made_up.STUDY, out=tmp_path, track=track)
    assert seen == [(15, "made_up: choosing learning rates"), (15, "made_up: seeds")]


# --- what made them -----------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sources, where a test may change them."""
    assert gaugekit.__file__ is not None
    source, root = Path(gaugekit.__file__).parent, tmp_path / "copy" / "gaugekit"
    for name in ("__init__.py", "studies", "cli", "report"):
        if (source / name).is_dir():
            shutil.copytree(source / name, root / name)
        else:
            root.mkdir(parents=True)
            shutil.copy(source / name, root / name)
    monkeypatch.setattr(gaugekit, "__file__", str(root / "__init__.py"))
    return root


CHANGES: dict[str, Callable[[Path], object]] = {
    "a character": lambda root: (root / "studies" / "fitting.py").write_text("x"),
    "a new file": lambda root: (root / "studies" / "new.py").touch(),
    "a file less": lambda root: (root / "studies" / "stats.py").unlink(),
    "another name": lambda root: (root / "studies" / "stats.py").rename(root / "studies" / "statistics.py"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_runs_of_other_code_are_kept_and_not_used(tmp_path: Path, copied: Path, what: str) -> None:
    first = run(made_up.STUDY, out=tmp_path, track=plainly)
    kept = tmp_path / "made_up.runs.jsonl"
    before = kept.read_bytes()
    original = {path: path.read_bytes() for path in (copied / "studies").glob("*.py")}
    CHANGES[what](copied)
    study, calls = counting()
    second = run(study, out=tmp_path, track=plainly)
    assert len(calls) == 30 and second.arms == first.arms
    assert second.machine["code"] != first.machine["code"]
    assert kept.read_bytes().startswith(before) and len(keys(kept)) == 60
    # As it was again, the first runs are good again.
    shutil.rmtree(copied / "studies")
    (copied / "studies").mkdir()
    for path, source in original.items():
        path.write_bytes(source)
    calls.clear()
    assert run(study, out=tmp_path, track=plainly) == first and calls == []


def test_code_that_no_run_rests_on_may_change(tmp_path: Path, copied: Path) -> None:
    first = run(made_up.STUDY, out=tmp_path, track=plainly)
    for name in ("cli", "report"):
        (copied / name / "study.py").write_text("x")
    (copied / "studies" / "notes.txt").write_text("x")
    study, calls = counting()
    assert run(study, out=tmp_path, track=plainly) == first and calls == []


@pytest.mark.parametrize(("owner", "name"), [(torch, "__version__"), (keeping.platform, "python_version")])
def test_runs_of_another_torch_or_python_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    run(made_up.STUDY, out=tmp_path, track=plainly)
    monkeypatch.setattr(owner, name, "9.9.9" if name == "__version__" else lambda: "9.9.9")
    study, calls = counting()
    assert "9.9.9" in run(study, out=tmp_path, track=plainly).machine.values() and len(calls) == 30


def test_the_runs_at_a_time_are_those_of_the_records(tmp_path: Path) -> None:
    narrow = replace(made_up.STUDY, full=replace(made_up.STUDY.full, seeds=(1,)))
    run(narrow, out=tmp_path, jobs=2, track=plainly)
    assert run(narrow, out=tmp_path, track=plainly).machine["jobs"] == "2"
    assert run(made_up.STUDY, out=tmp_path, track=plainly).machine["jobs"] == "1 or 2"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    study, calls = counting()
    (tmp_path / "made_up.runs.jsonl").mkdir()
    with pytest.raises(DataError, match=r"made_up.runs.jsonl: cannot be read \(Is a directory\): move it away$"):
        run(study, out=tmp_path, track=plainly)
    assert calls == []


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "made_up.runs.jsonl").symlink_to(tmp_path / "missing" / "file")
    for jobs in (1, 2):
        with pytest.raises(DataError, match=r"made_up.runs.jsonl: cannot be written \(No such file or directory\): "):
            run(made_up.STUDY, out=tmp_path, jobs=jobs, track=plainly)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(DataError, match=r"made_up.runs.jsonl: cannot be read \(Permission denied\): move it away$"):
        keeping.read(tmp_path / "made_up.runs.jsonl")
