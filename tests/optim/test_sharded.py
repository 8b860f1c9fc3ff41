"""Quotient optimizers on parameters that FSDP2 shards: two processes under torchrun against one, and checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from two import environment_of_members

Found = list[dict[str, Any]]

WORKER = Path(__file__).with_name("sharded_worker.py")
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
HEADS = {"plain": 4, "others.0": 3, "others.1": 7, "adapted": 1}
EXACT = 1e-12
ROUNDED = {"float64": EXACT, "float32": 1e-6}
RESUMED = ("adam float64", "adam float32", "adam bfloat16", "sgd float64", "plain sgd float64")


def launch(out: Path, processes: int, commands: str, *folders: Path) -> Found:
    """What each process found. One process runs without torch.distributed."""
    found = [out.with_name(f"{out.name}-{rank}.json") for rank in range(processes)]
    with open(out, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(path.exists() for path in found):
            run_worker(out, processes, commands, *folders)
    return [json.loads(path.read_text()) for path in found]


def run_worker(out: Path, processes: int, commands: str, *folders: Path) -> None:
    run = (*TORCHRUN, f"--nproc-per-node={processes}") if processes > 1 else ()
    for folder in folders:
        folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, *run, str(WORKER), str(out), commands, *map(str, folders)],
        env=environment_of_members(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all workers of pytest-xdist, that processes be launched once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "sharded"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Found:
    return launch(folder / "alone", 1, "save:0", folder / "of one")


@pytest.fixture(scope="module")
def together(folder: Path) -> Found:
    return launch(
        folder / "together", 2, "compare,meshes,masters,mixed,horizontal,stale,gathered,save:0", folder / "of two"
    )


@pytest.fixture(scope="module")
def resumed(folder: Path, alone: Found, together: Found) -> Found:
    """Two new processes."""
    return launch(folder / "resumed", 2, "resume:0,resume:1", folder / "of one", folder / "of two")


@pytest.fixture(scope="module")
def resumed_alone(folder: Path, alone: Found, together: Found) -> Found:
    return launch(folder / "resumed alone", 1, "resume:0,resume:1", folder / "of one", folder / "of two")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_sharded_steps_are_those_of_one_process(together: Found, name: str, dtype: str) -> None:
    for process in together:
        found = process["compare"][f"{name} {dtype}"]
        assert found["start"] == 0
        assert found["moved"] > 0.02
        assert found["one step"] < ROUNDED[dtype]
        assert found["all steps"] < 10 * ROUNDED[dtype]
        assert found["perturbed"] > 30 * ROUNDED["float32"]  # the gradient of one process off by a hundredth


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_state_is_shared_by_heads(together: Found, name: str) -> None:
    first, second = (process["compare"][f"{name} float64"] for process in together)
    assert first["held"].keys() == first["of"].keys()
    for pair, count in first["of"].items():
        heads = next(n for kind, n in HEADS.items() if kind in pair)
        assert first["held"][pair] == count * ((heads + 1) // 2) // heads
        assert second["held"][pair] == count - first["held"][pair]


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_nan_in_one_process_is_refused_by_all(together: Found, name: str) -> None:
    for process in together:
        error, motion = process["compare"][f"{name} float64"]["broken"]
        assert "the gradient of first.plain.vo has NaN or inf entries: no step was taken" in error
        assert motion == 0


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_hybrid_meshes(together: Found, name: str) -> None:
    """State is shared along axes that shard parameters, and copied along those that copy them."""
    for process in together:
        whole = process["compare"][f"{name} float64"]
        for shape, held in (("(1, 2)", whole["held"]), ("(2, 1)", whole["of"])):
            gap, found = process["meshes"][f"{name} {shape}"]
            assert gap < EXACT
            assert found == held


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_half_precision_with_masters(together: Found, name: str) -> None:
    for process in together:
        gap, of_masters, moved = process["masters"][name]
        assert moved > 0.1
        assert gap < 0.02  # where a master lies on the border between two halves
        assert of_masters < 1e-4


def test_pairs_with_one_parameter_sharded(together: Found) -> None:
    for process in together:
        assert len(process["mixed"]) == 4
        assert max(process["mixed"].values()) < EXACT


def test_horizontal_steps(together: Found) -> None:
    for process in together:
        assert process["horizontal"]["gap"] < EXACT
        assert process["horizontal"]["moved"] > 0.01


def test_pairs_of_replaced_parameters_are_refused(together: Found) -> None:
    """The optimizer would leave them where they are, and nothing would be said."""
    for process in together:
        assert "holds no parameter of pair first.plain.vo" in process["stale"]["error"]
        assert "find its pairs anew" in process["stale"]["error"]


# --- checkpoints ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", RESUMED)
def test_state_has_its_keys_from_the_start(alone: Found, together: Found, run: str) -> None:
    """torch makes state by a step without gradients, to load into: it has the names and shapes that steps give it, in
    one process as in two, and nothing moves."""
    for process in (*alone, *together):
        found = process["save:0"][run]
        assert found["first"] == found["then"] == alone[0]["save:0"][run]["then"]
        assert found["moved"] == 0


@pytest.mark.parametrize("run", RESUMED)
def test_resumed_run_is_the_unbroken_one(resumed: Found, resumed_alone: Found, run: str) -> None:
    """To the last bit with as many processes as before, in a model of other weights or of memory never written."""
    assert resumed_alone[0]["resume:0"][run] == 0
    for process in resumed:
        assert process["resume:1"][run] == 0


@pytest.mark.parametrize("run", ["adam float64", "sgd float64", "plain sgd float64"])
def test_resumed_with_other_processes(resumed: Found, resumed_alone: Found, run: str) -> None:
    for found in (resumed_alone[0]["resume:1"], *(process["resume:0"] for process in resumed)):
        assert found[run] < EXACT


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_state_gathered_whole_and_spread_again(together: Found, name: str) -> None:
    for process in together:
        gap, same = process["gathered"][name]
        assert gap == 0
        assert same
