"""Two processes under torchrun against one: the same losses, whatever ends them, and one line where they fail."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from two import environment_of_members

from gaugekit.training.reading import read
from gaugekit.training.steps import Step
from gaugekit.training.train import train

TINY = (
    *("model.width=16", "model.layers=2", "model.heads=2", "model.context=16", "run.batch=8", "run.steps=12"),
    *("run.log_every=1", "run.save_every=5", "run.evaluate_every=5", "run.evaluation_batches=1", "optimizer.lr=0.01"),
)
TIMES = ("seconds", "tokens_per_second")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
    "--nproc-per-node=2",
)
PROGRAM = ("-m", "gaugekit.cli.main", "train")
TEXT = "text.txt"
WORKER = str(Path(__file__).with_name("train_worker.py"))

SHARP, COARSE, MUON = 1e-12, 1e-5, 1e-2
"""Of float64, of float32, and of Muon, which rounds to bfloat16."""

KINDS: dict[str, tuple[tuple[str, ...], float]] = {
    "float64": (("run.precision=float64",), SHARP),
    "parts": (("run.precision=float64", "run.accumulation=2", "model.tied=true", "model.bias=true"), SHARP),
    "quotient": (("run.precision=float64", "optimizer.name=quotient_adam"), SHARP),
    "sphere": (("run.precision=float64", "model.residual=sphere", "model.norm=none"), SHARP),
    "float32": (("run.accumulation=2",), COARSE),
    "muon": (("optimizer.name=muon",), MUON),
}
KILLED = ("run.steps=40", "run.save_every=10", "run.evaluate_every=0")


def words(text: Path, *more: str) -> list[str]:
    return [f"data.source={text}", *TINY, *more]


def records(out: Path) -> list[dict[str, Any]]:
    lines = (out / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def apart(a: Path, b: Path) -> float:
    """The largest difference of two logs, and of two models."""
    first, second = records(a), records(b)
    assert [r.keys() for r in first] == [r.keys() for r in second]
    gap = max(abs(x[key] - y[key]) for x, y in zip(first, second, strict=True) for key in x)
    weights = [load_file(each / "model" / "model.safetensors") for each in (a, b)]
    return max(gap, *(float((weights[0][k].double() - weights[1][k].double()).abs().max()) for k in weights[1]))


def stopped(config: list[str], out: Path, steps: int) -> None:
    def watch(step: Step) -> None:
        if step.index + 1 == steps:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(read(None, config), out, watch=watch)


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORCHRUN, *command],
        env=environment_of_members(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **options,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two processes: one for all workers of pytest-xdist, that processes be launched once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained together"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            drawn = random.Random(0)
            (folder / TEXT).write_text(" ".join(drawn.choice(("one", "two", "three", "four")) for _ in range(1000)))
            make_runs(folder, folder / TEXT)
            (folder / "done").touch()
    return folder


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    return folder / TEXT


def make_runs(folder: Path, text: Path) -> None:
    """One of them is killed by SIGKILL between two checkpoints, and then gone on with."""
    killed = words(text, *KILLED)
    kill_at(lambda: taken(folder / "killed") > 12, [*TORCHRUN, *PROGRAM, *killed, "--out", str(folder / "killed")])
    assert not (folder / "killed" / "report.json").exists()
    shutil.copytree(folder / "killed", folder / "killed, then one")
    # One process to begin with.
    stopped(words(text), folder / "one, then two", 8)
    wanted = {name: words(text, *more) for name, (more, _) in KINDS.items()}
    wanted |= {"killed": killed, "unbroken": killed, "one, then two": words(text)}
    (folder / "runs.json").write_text(json.dumps(wanted))
    done = run(WORKER, "runs", str(folder))
    assert done.returncode == 0, done.stderr


def taken(out: Path) -> int:
    return (out / "log.jsonl").read_bytes().count(b"loss") if (out / "log.jsonl").exists() else 0


def kill_at(moment: Callable[[], bool], command: list[str]) -> None:
    """Everything that the command has started ends by SIGKILL, a little after this moment."""
    process = subprocess.Popen(
        command, env=environment_of_members(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        end = time.monotonic() + 120
        while not moment():
            assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.1))
    finally:
        # torchrun gives each of its processes a group of its own.
        for pid in [*children(process.pid), process.pid]:
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# --- against one process --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_as_one(folder: Path, text: Path, tmp_path: Path, kind: str) -> None:
    more, gap = KINDS[kind]
    report = train(read(None, words(text, *more)), tmp_path / "one")
    assert apart(folder / kind, tmp_path / "one") < gap
    found = [json.loads((folder / f"{kind}-{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert (found[0]["processes"], found[0]["parameters"]) == (2, report.parameters)
    assert found[0]["architecture"] == report.architecture


def test_it_would_show(folder: Path) -> None:
    """Runs that differ in something differ by more than what is allowed above."""
    assert apart(folder / "float64", folder / "quotient") > 2 * MUON
    assert apart(folder / "float32", folder / "muon") > 2 * MUON


# --- going on -------------------------------------------------------------------------------------------------


def test_killed_and_gone_on_with(folder: Path) -> None:
    report = json.loads((folder / "killed-0.json").read_text())
    assert 10 <= report["resumed"] < 40 and report["steps"] == 40
    assert records(folder / "killed") == records(folder / "unbroken")
    assert apart(folder / "killed", folder / "unbroken") == 0.0
    assert not list((folder / "killed" / "checkpoints").glob(".*"))


def test_two_processes_and_then_one(folder: Path, text: Path) -> None:
    out = folder / "killed, then one"
    report = train(read(None, words(text, *KILLED)), out)
    assert (report.processes, report.resumed) == (1, json.loads((folder / "killed-0.json").read_text())["resumed"])
    assert 0.0 < apart(out, folder / "unbroken") < 10 * COARSE  # of more steps


def test_one_process_and_then_two(folder: Path, text: Path, tmp_path: Path) -> None:
    train(read(None, words(text)), tmp_path / "one")
    assert json.loads((folder / "one, then two-0.json").read_text())["resumed"] == 5
    assert apart(folder / "one, then two", tmp_path / "one") < COARSE


# --- failing --------------------------------------------------------------------------------------------------


def lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("gaugekit: ")]


def test_what_all_fail_of_is_said_once(text: Path, tmp_path: Path) -> None:
    done = run(*PROGRAM, *words(text, "optimizer.lr=1e30", "run.save_every=0"), "--out", str(tmp_path / "run"))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = lines(done.stderr)
    assert line.startswith("gaugekit: the loss is nan at step 2: ")
    assert "exitcode  : 2" in done.stderr
    assert "terminate called" not in done.stderr


def test_what_one_fails_of_is_said_too(tmp_path: Path) -> None:
    done = run(WORKER, "alone", cwd=tmp_path)
    assert done.returncode == 1
    assert lines(done.stderr) == ["gaugekit: the disk of process 1 has gone"]
    assert "exitcode  : 2" in done.stderr
