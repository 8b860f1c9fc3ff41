"""A run from config to exported model: what lies in its folder, and that after any end it goes on as if it had none."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from two import environment_of_members

import gaugekit.training.steps
from gaugekit.errors import CheckpointError, ConfigError, DataError, GaugekitError, TrainingError
from gaugekit.training.config import Config
from gaugekit.training.data import Windows, evaluation, prepare
from gaugekit.training.decoder import Decoder
from gaugekit.training.reading import read
from gaugekit.training.steps import Step
from gaugekit.training.train import TrainReport, train

TINY = (
    *("model.width=16", "model.layers=2", "model.heads=2", "model.context=16", "run.batch=4", "run.steps=30"),
    *("run.log_every=1", "run.save_every=7", "run.evaluate_every=10", "run.evaluation_batches=2", "run.keep=3"),
    "optimizer.lr=0.01",
)
TIMES = ("seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    drawn = random.Random(0)
    path.write_text(" ".join(drawn.choice(("one", "two", "three", "four", "five")) for _ in range(1000)))
    return path


def tiny(text: Path, *words: str) -> Config:
    return read(None, [f"data.source={text}", *TINY, *words])


def log(out: Path) -> list[dict[str, Any]]:
    """The records, without what is measured in seconds."""
    lines = (out / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def weights(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def kept(out: Path) -> list[int]:
    """Steps of the checkpoints."""
    return sorted(int(p.name.removeprefix("step-")) for p in (out / "checkpoints").iterdir())


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Stop(BaseException):
    """As sudden as a kill, but for what Python does on its way out."""


def stop_after(steps: int) -> Callable[[Step], None]:
    def watch(step: Step) -> None:
        if step.index + 1 == steps:
            raise Stop

    return watch


def stopped(config: Config, out: Path, steps: int) -> None:
    with pytest.raises(Stop):
        train(config, out, watch=stop_after(steps))


# --- what a run leaves ----------------------------------------------------------------------------------------


def test_what_a_run_leaves(text: Path, tmp_path: Path) -> None:
    config, seen = tiny(text), []
    report = train(config, tmp_path / "runs" / "a", watch=seen.append)
    out = (tmp_path / "runs" / "a").resolve()
    assert sorted(p.name for p in out.iterdir()) == [
        *("checkpoints", "config.json", "data", "log.jsonl", "model", "report.json")
    ]
    assert kept(out) == [21, 28, 30]
    assert json.loads((out / "config.json").read_text())["model"]["vocab"] == 256
    assert json.loads((out / "report.json").read_text()) == report.to_dict()

    records = log(out)
    losses = [r for r in records if "loss" in r]
    assert [r["step"] for r in losses] == list(range(1, 31)) == [step.index + 1 for step in seen]
    assert [r["loss"] for r in losses] == [step.loss for step in seen]
    assert losses[-1] == {
        "step": 30,
        "loss": report.loss,
        "rate": pytest.approx(1e-3, rel=0.1),
        "gradient": seen[-1].gradient,
        "tokens": 30 * 4 * 16,
    }
    assert [r["step"] for r in records if "held_out" in r] == [10, 20, 30]
    assert losses[-1]["loss"] < losses[0]["loss"] - 0.5
    assert (report.steps, report.tokens, report.processes, report.resumed) == (30, 1920, 1, 0)
    assert report.parameters == 2 * 256 * 16 + 16 * 16 + 2 * (12 * 16 * 16 + 2 * 2 * 16) + 2 * 16
    assert not report.already_finished

    data = prepare(config.data, out / "data")
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    with torch.no_grad():
        held_out = [
            torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
            for tokens, targets in evaluation(data.held_out, 16, 4, 2)
        ]
    assert torch.stack(held_out).mean().item() == pytest.approx(report.held_out, abs=1e-5)


def test_a_finished_run_is_left_alone(text: Path, tmp_path: Path) -> None:
    report = train(tiny(text, "run.steps=5"), tmp_path / "run")
    before = files(tmp_path)
    again = train(tiny(text, "run.steps=5"), tmp_path / "run", watch=lambda step: pytest.fail("it was run"))
    assert again == replace(report, already_finished=True)
    assert files(tmp_path) == before
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # then there is nothing to say that it is this config's
    assert train(tiny(text, "run.steps=5", "optimizer.lr=0.1"), tmp_path / "run").loss != report.loss


def test_seeds_and_random_numbers(text: Path, tmp_path: Path) -> None:
    """A run depends on its seed alone, and leaves the caller's random numbers as they were."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(ord(name))
        before = torch.get_rng_state()
        train(tiny(text, "run.steps=5", f"run.seed={seed}"), tmp_path / name)
        assert torch.equal(torch.get_rng_state(), before)
    assert log(tmp_path / "a") == log(tmp_path / "b") != log(tmp_path / "c")
    torch.manual_seed(1)
    config = tiny(text, "model.vocab=256")
    tokens, targets = Windows(prepare(config.data, tmp_path / "c" / "data").train, 16, 4, seed=1)(0)
    first = torch.nn.functional.cross_entropy(Decoder(config.model)(tokens).flatten(0, 1), targets.flatten())
    assert log(tmp_path / "c")[0]["loss"] == pytest.approx(first.item(), abs=1e-6)
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_precisions_and_accumulation(text: Path, tmp_path: Path) -> None:
    ends: dict[str, TrainReport] = {}
    for name, words in {
        "float32": [],
        "float64": ["run.precision=float64"],
        "parts": ["run.precision=float64", "run.accumulation=2"],
        "bfloat16": ["run.precision=bfloat16"],
    }.items():
        ends[name] = train(tiny(text, "run.steps=10", *words), tmp_path / name)
    assert ends["parts"].loss == pytest.approx(ends["float64"].loss, abs=1e-13)
    assert ends["parts"].held_out == pytest.approx(ends["float64"].held_out, abs=1e-13)
    assert 0 < abs(ends["float32"].loss - ends["float64"].loss) < 1e-5
    assert 1e-5 < abs(ends["bfloat16"].loss - ends["float32"].loss) < 0.05


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
def test_compiled(text: Path, tmp_path: Path) -> None:
    words = ("run.steps=3", "model.layers=1", "optimizer.lr=0.01")
    plain = train(tiny(text, *words), tmp_path / "plain")
    compiled = train(tiny(text, *words, "run.compile=true"), tmp_path / "compiled")
    assert compiled.loss == pytest.approx(plain.loss, abs=1e-4)
    assert compiled.architecture == plain.architecture
    assert files(tmp_path / "compiled" / "model").keys() == files(tmp_path / "plain" / "model").keys()


def test_no_compiler(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"run.compile=true needs a C\+\+ compiler"):
        train(tiny(text, "run.compile=true"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- the end of a process -------------------------------------------------------------------------------------

KINDS = {
    "adamw": (),
    "muon": ("optimizer.name=muon", "schedule.name=logarithmic"),
    "quotient_adam": ("optimizer.name=quotient_adam", "schedule.warmup=5"),
    "quotient_sgd": ("optimizer.name=quotient_sgd", "optimizer.lr=0.1", "model.positions=rotary", "run.accumulation=2"),
    "horizontal_adamw": ("optimizer.name=horizontal_adamw", "optimizer.options={rebalance: 3}"),
    "sphere": ("model.residual=sphere", "model.norm=none", "optimizer.options={mode: tangent}"),
    "sgd": ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0", "model.tied=true"),
    "bfloat16": ("run.precision=bfloat16", "model.attention=relational", "schedule.name=constant"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_going_on_is_as_never_having_stopped(text: Path, tmp_path: Path, kind: str) -> None:
    config = tiny(text, "run.steps=20", *KINDS[kind])
    train(config, tmp_path / "unbroken")
    drawn = random.Random(kind)
    first, second = sorted(drawn.sample(range(7, 20), 2))
    stopped(config, tmp_path / "run", 3)  # before there is a checkpoint
    stopped(config, tmp_path / "run", first)
    stopped(config, tmp_path / "run", second)
    report = train(config, tmp_path / "run")
    assert report.resumed == (second - 1) // 7 * 7  # it stopped before its checkpoint
    assert log(tmp_path / "run") == log(tmp_path / "unbroken")
    assert weights(tmp_path / "run") == weights(tmp_path / "unbroken")


KILLED = """
import os, sys, time
from pathlib import Path
from gaugekit.training.reading import read
from gaugekit.training.train import train

for name, *words in eval(sys.argv[2]):
    if os.fork() == 0:
        train(read(None, words), Path(sys.argv[1], name), watch=lambda step: time.sleep(0.01))
        os._exit(0)
time.sleep(300)
"""


def test_killed_at_a_random_moment(text: Path, tmp_path: Path) -> None:
    """Three runs at a time, each killed by SIGKILL somewhere after its first checkpoint."""
    kinds = ("adamw", "muon", "quotient_adam")
    configs = {kind: [f"data.source={text}", *TINY, "run.steps=60", *KINDS[kind]] for kind in kinds}
    group = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), repr([(kind, *words) for kind, words in configs.items()])],
        env=environment_of_members(),
        start_new_session=True,
    )
    try:
        wait_for(lambda: all(taken(tmp_path / kind) > 8 for kind in kinds))
        time.sleep(random.uniform(0, 0.15))
    finally:
        os.killpg(group.pid, signal.SIGKILL)
        group.wait()
    wait_for(lambda: all(is_left(tmp_path / kind / "log.jsonl") for kind in kinds))
    for kind in kinds:
        out, config = tmp_path / kind, read(None, configs[kind])
        assert not (out / "report.json").exists()
        # As if it had been writing just then.
        shutil.copytree(next((out / "checkpoints").glob("step-*")), out / "checkpoints" / ".step-00000059")
        (out / ".model.partial-1").mkdir()
        with (out / "log.jsonl").open("a") as file:
            file.write('{"step": 60, "lo')
        report = train(config, out)
        assert 7 <= report.resumed < 60
        train(config, tmp_path / "unbroken" / kind)
        assert log(out) == log(tmp_path / "unbroken" / kind)
        assert weights(out) == weights(tmp_path / "unbroken" / kind)
        assert not [p for folder in (out, out / "checkpoints") for p in folder.iterdir() if p.name.startswith(".")]


def is_left(path: Path) -> bool:
    """Whether nobody holds the log any more: the kernel takes a moment to end a killed process."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def taken(out: Path) -> int:
    """Steps in the log of a running process."""
    return (out / "log.jsonl").read_bytes().count(b"loss") if (out / "log.jsonl").exists() else 0


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def test_stopped_before_the_export(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(text, "run.steps=9")
    unbroken = train(config, tmp_path / "unbroken")
    with monkeypatch.context() as patch:
        patch.setattr("gaugekit.training.train.export", stopping)
        with pytest.raises(Stop):
            train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()
    report = train(config, tmp_path / "run", watch=lambda step: pytest.fail("all steps had been taken"))
    assert (report.resumed, report.loss, report.held_out) == (9, unbroken.loss, unbroken.held_out)
    assert weights(tmp_path / "run") == weights(tmp_path / "unbroken")


@pytest.mark.parametrize("last", [0, 8])
def test_a_log_that_has_lost_its_end(text: Path, tmp_path: Path, last: int) -> None:
    config, run = tiny(text, "run.steps=9"), tmp_path / "run"
    report = train(config, run)
    before = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text("".join(line for line in before if json.loads(line)["step"] <= last))
    (run / "report.json").unlink()
    shutil.rmtree(run / "model")
    with pytest.raises(TrainingError, match=r"log\.jsonl: has lost records; delete the newest checkpoint"):
        train(config, run)
    assert not (run / "model").exists() and not (run / "report.json").exists()
    shutil.rmtree(report.checkpoint)
    assert train(config, run).loss == report.loss


def stopping(*_: Any, **__: Any) -> Any:
    raise Stop


# --- another config -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optimizer.lr=0.5", r"optimizer.lr=0.5 \(was 0.01\)"),
        ("model.width=32", r"model.width=32 \(was 16\)"),
        ("run.seed=1", "run.seed=1"),
        ("run.batch=8", "run.batch=8"),
        ("run.precision=float64", "run.precision"),
        ("data.held_out=0.2", "data.held_out"),
        ("schedule.final=0.2", "schedule.final"),
        ("optimizer.options={amsgrad: true}", "optimizer.options"),
        ("run.steps=40", "run.steps=40"),
        ("run.steps=20", "run.steps=20"),
    ],
)
def test_another_config_is_refused(text: Path, tmp_path: Path, word: str, said: str) -> None:
    stopped(tiny(text), tmp_path / "run", 8)
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=rf"is a run of another config: {said}.*take the old values, or another"):
        train(tiny(text, word), tmp_path / "run")
    assert files(tmp_path) == before


def test_keys_that_may_change(text: Path, tmp_path: Path) -> None:
    train(tiny(text), tmp_path / "unbroken")
    stopped(tiny(text), tmp_path / "run", 8)
    train(tiny(text, "run.save_every=0", "run.keep=1", "run.accumulation=2", "run.project=other"), tmp_path / "run")
    gaps = [
        abs(a["loss"] - b["loss"])
        for a, b in zip(log(tmp_path / "run"), log(tmp_path / "unbroken"), strict=True)
        if "loss" in a
    ]
    assert gaps[:7] == [0.0] * 7 and max(gaps) < 1e-5
    assert kept(tmp_path / "run") == [30]


def test_without_a_checkpoint_any_config_may_follow(text: Path, tmp_path: Path) -> None:
    stopped(tiny(text), tmp_path / "run", 5)
    assert train(tiny(text, "run.steps=2", "optimizer.lr=0.5"), tmp_path / "run").resumed == 0
    assert [r["step"] for r in log(tmp_path / "run")] == [1, 2, 2]


def test_more_steps_at_a_constant_rate(text: Path, tmp_path: Path) -> None:
    words = ("schedule.name=constant", "schedule.warmup=3", "run.evaluate_every=0", "run.save_every=0")
    long = train(tiny(text, *words, "run.steps=20"), tmp_path / "long")
    train(tiny(text, *words, "run.steps=8"), tmp_path / "run")
    report = train(tiny(text, *words, "run.steps=20"), tmp_path / "run")
    assert (report.resumed, report.steps, report.loss) == (8, 20, long.loss)
    assert weights(tmp_path / "run") == weights(tmp_path / "long")
    with pytest.raises(ConfigError, match=r"run.steps=8"):
        train(tiny(text, *words, "run.steps=8"), tmp_path / "run")


def test_a_text_may_move(text: Path, tmp_path: Path) -> None:
    train(tiny(text), tmp_path / "unbroken")
    stopped(tiny(text), tmp_path / "run", 8)
    mine = tmp_path / "mine.txt"
    mine.write_text(text.read_text())
    train(tiny(mine), tmp_path / "run")
    assert log(tmp_path / "run") == log(tmp_path / "unbroken")


def test_another_text_is_refused(text: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text(text.read_text())
    stopped(tiny(mine), tmp_path / "run", 8)
    mine.write_text(text.read_text() + " six")
    with pytest.raises(TrainingError, match="step-00000007: is of a run on another text"):
        train(tiny(mine), tmp_path / "run")


# --- what goes wrong ------------------------------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, step: int, training: bool = True) -> None:
    """From this step on (or evaluation), losses are NaN."""
    calls, whole = [0], gaugekit.training.steps.loss_sum

    def poisoned(model: Any, *rest: Any) -> torch.Tensor:
        calls[0] += model.training == training
        return whole(model, *rest) * (float("nan") if calls[0] >= step and model.training == training else 1.0)

    monkeypatch.setattr(gaugekit.training.steps, "loss_sum", poisoned)


def test_a_loss_that_is_not_finite(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        poison(patch, 16)
        last = "the last good checkpoint is .*step-00000014"
        with pytest.raises(TrainingError, match=f"^the loss is nan at step 16: lower optimizer.lr.*; {last}$"):
            train(tiny(text), tmp_path / "run")
        assert kept(tmp_path / "run") == [7, 14]
        with pytest.raises(TrainingError, match=r"the loss is nan at step 1: .*; there is no checkpoint yet$"):
            train(tiny(text, "run.save_every=0"), tmp_path / "none")
    train(tiny(text), tmp_path / "run")  # and it is good
    train(tiny(text), tmp_path / "unbroken")
    assert log(tmp_path / "run") == log(tmp_path / "unbroken")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 58.2 TiB"),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_memory_that_is_not_enough(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise error

    said = "there is not enough memory: raise run.accumulation"
    with monkeypatch.context() as patch:
        patch.setattr("gaugekit.training.train.Decoder", full)
        with pytest.raises(TrainingError, match=said):
            train(tiny(text), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    with monkeypatch.context() as patch:
        patch.setattr("gaugekit.training.train.evaluate", full)
        with pytest.raises(TrainingError, match=rf"{said}.*; the last good checkpoint is .*step-00000007$"):
            train(tiny(text), tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("gaugekit.training.train.evaluate", bug)
        with pytest.raises(RuntimeError, match="a bug"):
            train(tiny(text), tmp_path / "run")


def bug(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


def test_weights_and_held_out_losses_that_are_not_finite(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrainingError, match=r"the norm of the weights is inf after step 1: .*no checkpoint yet"):
        train(tiny(text, "optimizer.lr=1e30", "run.save_every=1"), tmp_path / "weights")
    assert not (tmp_path / "weights" / "checkpoints").exists()
    poison(monkeypatch, 1, training=False)
    with pytest.raises(TrainingError, match=r"the held-out loss is nan after step 10: .*step-00000007"):
        train(tiny(text), tmp_path / "held out")


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["data.source=none.txt"], DataError, "none.txt: does not exist"),
        (["data.source=<short>"], DataError, "has 27 tokens, and a window of 64 needs 65"),
        (["data.source=<empty>"], DataError, "is empty"),
        (["model.vocab=100"], ConfigError, "model.vocab=100 is less than the tokenizer's 256"),
        (["optimizer.options={beta: 1}"], ConfigError, "optimizer.options.beta"),
        (["model.norm_options={beta: 1}"], ConfigError, "model.norm_options"),
        (["run.device=abacus"], TrainingError, "run.device=abacus: not usable here"),
        (["run.device=meta"], TrainingError, "run.device=meta: not usable here"),
        (["run.tracker=trackio"], ConfigError, r"pip install 'gaugekit\[trackio\]'"),
    ],
)
@pytest.mark.parametrize("there", [False, True])
def test_nothing_is_left_of_what_cannot_start(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    error: type[GaugekitError],
    said: str,
    there: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gaugekit.training.trackers.find_spec", lambda name: None)
    for name, content in (("short", "too short to train on at all. "[:30]), ("empty", "")):
        (tmp_path / name).write_text(content)
    if there:
        (tmp_path / "runs").mkdir()
    before = sorted(tmp_path.rglob("*"))
    config = tiny(text, "model.context=64", *(re.sub("<(.*)>", rf"{tmp_path}/\1", word) for word in words))
    with pytest.raises(error, match=said):
        train(config, tmp_path / "runs" / "a")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_batch_that_does_not_split(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaugekit.training.distributed.world", lambda: 3)
    said = "run.batch=4 does not split over 3 processes and run.accumulation=2: take a multiple of 6"
    with pytest.raises(ConfigError, match=said):
        train(tiny(text, "run.accumulation=2"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_of_other_things(text: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(TrainingError, match=r"run: holds notes.txt and is no run"):
        train(tiny(text), tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text('{"architectures": []}')
    with pytest.raises(ConfigError, match=r"config.json: unknown key architectures"):
        train(tiny(text), tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(TrainingError, match=r"config.json: cannot be read"):
        train(tiny(text), tmp_path / "run")
    with pytest.raises(TrainingError, match=r"notes.txt: is no directory"):
        train(tiny(text), tmp_path / "run" / "notes.txt")
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_damaged_checkpoint_is_named(text: Path, tmp_path: Path) -> None:
    stopped(tiny(text), tmp_path / "run", 15)
    last = tmp_path / "run" / "checkpoints" / "step-00000014"
    (last / "manifest.json").unlink()
    with pytest.raises(TrainingError, match=r"step-00000014: is damaged .* delete it to go on from the one before"):
        train(tiny(text), tmp_path / "run")
    shutil.rmtree(last)
    assert train(tiny(text), tmp_path / "run").resumed == 7


def test_two_at_a_time_are_refused(text: Path, tmp_path: Path) -> None:
    said: list[str] = []

    def watch(step: Step) -> None:
        if step.index == 3:
            with pytest.raises(TrainingError) as error:
                train(tiny(text), tmp_path / "run")
            said.append(str(error.value))

    train(tiny(text), tmp_path / "run", watch=watch)
    assert said == [f"{tmp_path / 'run'}: another process is training here; wait for it, or end it"]
    train(tiny(text), tmp_path / "unbroken")
    assert log(tmp_path / "run") == log(tmp_path / "unbroken")


def test_a_full_disk(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, said in (("dump", "config.json"), ("dumps", "log.jsonl")):
        with monkeypatch.context() as patch:
            patch.setattr("gaugekit.training.runs.json", types.SimpleNamespace(**{**vars(json), name: full}))
            with pytest.raises(CheckpointError, match=f"{said}: the disk is full"):
                train(tiny(text), tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be"):
        train(tiny(text), tmp_path / "file" / "run")


# --- trackers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_trackers_get_every_record(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    told: list[Any] = []
    package = types.ModuleType(name)
    package.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    package.init = lambda **given: told.append(given)  # type: ignore[attr-defined]
    package.log = lambda values, step: told.append({"step": step, **values})  # type: ignore[attr-defined]
    package.finish = lambda: print("a dashboard") or told.append("finished")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, package)
    train(tiny(text, "run.steps=10", f"run.tracker={name}", "run.project=p"), tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert told[0] | {"config": {}} == {"project": "p", "name": "run", "config": {}}
    assert told[0]["config"]["model"]["width"] == 16
    assert told[1:] == [*records, "finished"]
    assert capsys.readouterr() == ("", "a dashboard\n")  # stdout is for results

    package.init = lambda **_: int("no\naccount")  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match=rf"^run.tracker={name}: invalid .*no\\naccount'; there is no checkpoint"):
        train(tiny(text, f"run.tracker={name}"), tmp_path / "other")
