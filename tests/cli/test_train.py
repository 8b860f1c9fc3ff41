"""train from the command line."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import heavy_for_help, strict
from two import environment_of_members

import gaugekit.training.steps
import gaugekit.training.train as training
from gaugekit.cli.common import INTERNAL, INTERRUPTED

Run = Callable[..., Any]
TINY = (
    *("model.width=16", "model.layers=1", "model.heads=2", "model.context=16", "run.batch=2"),
    *("run.log_every=1", "run.save_every=4", "run.evaluation_batches=1"),
)
PROGRAM = [sys.executable, "-m", "gaugekit.cli.main", "train"]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    drawn = random.Random(0)
    path.write_text(" ".join(drawn.choice(("one", "two", "three", "four", "five")) for _ in range(1000)))
    return path


@pytest.fixture
def words(text: Path) -> list[str]:
    return [f"data.source={text}", *TINY, "run.steps=10"]


# --- what it says ---------------------------------------------------------------------------------------------


def test_a_run_and_the_same_again(run: Run, words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run("train", *words, "--out", out)
    assert result.code == 0
    assert re.fullmatch(r"step 10 of 10: loss \d\.\d{3}, [\d,]+ tokens/s, 0:00:00 left\n", result.err)
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in result.out.replace("\n  ", "").splitlines()[1:])
    assert list(lines) == [*("parameters", "steps", "training loss", "held-out loss", "speed", "checkpoint", "model")]
    assert lines["steps"] == "10 steps; 320 tokens"
    assert re.fullmatch(r"[\d,]+ tokens/s", lines["speed"])
    assert (out / "checkpoints" / "step-00000010").is_dir() and (out / "model" / "config.json").is_file()

    again = run("train", *words, "--out", out, "--json")
    assert again.code == 0
    assert again.err == f"{out}: is finished, all 10 steps have been taken; nothing was done\n"
    document = strict(again.out)
    assert document == json.loads((out / "report.json").read_text()) | {"already_finished": True}
    assert f"{document['held_out']:.4f}" in lines["held-out loss"]
    assert document["checkpoint"].endswith("step-00000010")


def test_json_and_a_file(run: Run, words: list[str], tmp_path: Path) -> None:
    """Words go over what the file says."""
    (tmp_path / "config.yaml").write_text("run: {steps: 100, seed: 3}\noptimizer: {lr: 3e-3}\n")
    result = run("train", tmp_path / "config.yaml", *words, "--out", tmp_path / "run", "--json")
    assert result.code == 0
    assert strict(result.out)["steps"] == 10
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["run"]["seed"], config["optimizer"]["lr"], config["run"]["steps"]) == (3, 0.003, 10)


def test_progress_on_a_terminal(run: Run, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    result = run("train", *words, "--out", tmp_path / "run")
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", result.err)
    assert re.search(r"loss \d\.\d{3}, [\d,]+ tokens/s .* 10/10 0:00:00", shown)
    assert "step 10 of 10" not in shown


def test_going_on_is_told(run: Run, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(training, "export", interrupted)
        assert run("train", *words, "--out", tmp_path / "run").code == INTERRUPTED
        patch.setattr(training, "prepare", interrupted)
        err = run("train", *words, "--out", tmp_path / "other").err
        assert err == "gaugekit: interrupted; there is no checkpoint yet\n"
        assert not (tmp_path / "other").exists()
    os.rename(tmp_path / "run" / "checkpoints" / "step-00000010", tmp_path / "elsewhere")
    result = run("train", *words, "--out", tmp_path / "run")
    assert result.code == 0
    assert "10 steps, of which 8 earlier; 320 tokens" in result.out


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


# --- a dry run ------------------------------------------------------------------------------------------------


def test_a_dry_run(run: Run, words: list[str], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    result = run("train", *words, "--out", tmp_path / "runs" / "a", "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("Nothing was run or written\n")
    assert "320: 10 steps of 32" in result.out
    result = run("train", *words, "--dry-run", "--json")
    assert (result.code, result.err) == (0, "")
    document = strict(result.out)
    assert document["parameters"] == 2 * 256 * 16 + 16 * 16 + 12 * 16 * 16 + 2 * 2 * 16 + 2 * 16
    assert document["weights"] == document["gradients"] == 4 * document["parameters"]
    assert document["config"]["run"]["steps"] == 10
    assert sorted(tmp_path.rglob("*")) == before


# --- what goes wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model.widht=3", "--out", "run"], "unknown key widht: did you mean width?"),
        (["modle.width=3", "--out", "run"], "unknown key modle: did you mean model?"),
        (["model.width=wide", "--out", "run"], "must be a whole number, got 'wide'"),
        (["run.seed=-1", "--out", "run"], "run.seed must be from 0 to 2^63 - 1, got -1"),
        (["run.steps=0", "--out", "run"], "run.steps must be at least 1, got 0"),
        (["none.yaml", "--out", "run"], "none.yaml: cannot be read"),
        (["wrong.yaml", "--out", "run"], "wrong.yaml: unknown key modle"),
        (["short.txt", "--out", "run"], "short.txt: must be a mapping"),
        (["run.steps=5", "more.yaml", "--out", "run"], "'more.yaml': options are section.key=value"),
        (["data.source=none.txt", "--out", "run"], "none.txt: does not exist"),
        (["data.source=short.txt", "model.context=64", "--out", "run"], "a window of 64 needs 65"),
        (["run.tracker=wandb", "--out", "run"], "pip install 'gaugekit[wandb]'"),
        (["run.device=abacus", "--out", "run"], "run.device=abacus: not usable here"),
        (["--out", "short.txt"], "short.txt: is no directory"),
        (["--out", "folder"], "holds notes.txt and is no run"),
        (["run.steps=5"], "--out DIR is needed"),
        (["--out"], "'--out' requires an argument"),
        (["data.tokenizer=bpe", "data.vocab=-5", "--dry-run"], "data.vocab must be at least 257 for bpe"),
        (["data.source=none.txt", "--dry-run"], "none.txt: does not exist"),
    ],
)
def test_bad_usage(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gaugekit.training.trackers.find_spec", lambda name: None)
    (tmp_path / "short.txt").write_text("too short to train on")
    (tmp_path / "wrong.yaml").write_text("modle: {width: 16}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    result = run("train", *arguments)
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(rf"gaugekit: .*{re.escape(said)}.*\n", result.err)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_loss_that_is_not_finite(run: Run, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, whole = [0], gaugekit.training.steps.loss_sum

    def poisoned(model: Any, *rest: Any) -> Any:
        calls[0] += 1
        return whole(model, *rest) * (float("nan") if calls[0] == 7 else 1.0)

    monkeypatch.setattr(gaugekit.training.steps, "loss_sum", poisoned)
    result = run("train", *words, "--out", tmp_path / "run")
    assert (result.code, result.out) == (2, "")
    last = tmp_path / "run" / "checkpoints" / "step-00000004"
    assert result.err == (
        "gaugekit: the loss is nan at step 7: lower optimizer.lr, or look at the data; "
        f"the last good checkpoint is {last}\n"
    )
    assert last.is_dir() and not (tmp_path / "run" / "model").exists()


def test_interrupted(words: list[str], tmp_path: Path) -> None:
    """Ctrl-C in the middle of a run: one line, the checkpoint stays, and the same command goes on."""
    log, command = tmp_path / "run" / "log.jsonl", [*PROGRAM, *words, "run.steps=100000", "--out", tmp_path / "run"]
    process = subprocess.Popen(
        command, env=environment_of_members(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 120
    while not (log.exists() and log.read_bytes().count(b"\n") > 5):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (INTERRUPTED, "")
    last = err.splitlines()[-1]
    *_, newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert last == f"gaugekit: interrupted; the same command goes on from {newest}"
    assert all(line.startswith("step ") for line in err.splitlines()[:-1])


def test_unexpected_errors_are_named(
    run: Run, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(training, "train", broken)
    result = run("train", *words, "--out", tmp_path / "run")
    assert (result.code, result.out) == (INTERNAL, "")
    assert result.err == "gaugekit: internal error: ZeroDivisionError: boom; run again with --debug to see where\n"
    assert run("train", *words, "--out", tmp_path / "run", "--debug").err.startswith("Traceback")


def test_help_is_quick_and_names_every_option(run: Run) -> None:
    text = " ".join(run("train", "--help").out.split())
    for option in ("--out", "--dry-run", "--json", "--debug", "SECTION.KEY=VALUE", "torchrun", "Exit codes: 0 done"):
        assert option in text
    assert heavy_for_help("train") == ""
