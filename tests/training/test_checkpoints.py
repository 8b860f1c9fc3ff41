"""Checkpoints of one process: what comes back, which are kept, and what a damaged or half-written one does."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from gaugekit.errors import TrainingError
from gaugekit.training import checkpoints
from gaugekit.training.checkpoints import State
from gaugekit.training.config import ModelConfig, OptimizerConfig, ScheduleConfig
from gaugekit.training.decoder import Decoder
from gaugekit.training.optimizers import make, schedule
from gaugekit.training.steps import steps

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True, "bias": True, "norm": "rms"},
    "invariant": {"attention": "invariant"},
    "sphere": {"residual": "sphere", "norm": "none", "positions": "rotary", "mlp": "swiglu"},
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def state(kind: str = "plain", name: Any = "adamw", seed: int = 0, text: str = "a text", **sizes: int) -> State:
    torch.manual_seed(seed)
    sizes = {"vocab": 20, "context": 8, "width": 8, "layers": 1, "heads": 2, **sizes}
    model = Decoder(ModelConfig(**sizes, **MODELS[kind]))
    optimizer = make(model, OptimizerConfig(name, lr=0.01))
    return State(model, optimizer, schedule(optimizer, ScheduleConfig(warmup=3), 20), text)


def go(state: State, start: int, stop: int) -> list[float]:
    found = steps(state.model, state.optimizer, batch, start, stop, scheduler=state.scheduler, clip=1.0)
    return [step.loss for step in found]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    made = state()
    go(made, 0, 4)
    return checkpoints.save(tmp_path / "checkpoints", 4, made, keep=2)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "quotient_adam", "horizontal_muon", "gated_adamw"])
def test_what_was_saved_comes_back(tmp_path: Path, name: str) -> None:
    first, second = state(name=name), state(name=name, seed=1)
    go(first, 0, 4)
    path = checkpoints.save(tmp_path, 4, first, keep=1)
    drawn, losses = torch.rand(3), go(first, 4, 9)
    assert checkpoints.load(path, second) == 4
    assert torch.equal(torch.rand(3), drawn)
    assert go(second, 4, 9) == losses
    assert second.scheduler.state_dict() == first.scheduler.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model(tmp_path: Path, kind: str) -> None:
    first, second = state(kind), state(kind, seed=1)
    go(first, 0, 4)
    path = checkpoints.save(tmp_path, 4, first, keep=1)
    losses = go(first, 4, 9)
    checkpoints.load(path, second)
    assert go(second, 4, 9) == losses
    # And it depends on all of it: without the optimizer's state it is another run.
    third = state(kind, seed=1)
    checkpoints.load(path, third)
    third.optimizer.state.clear()
    assert go(third, 4, 9) != losses


def test_saving_changes_nothing(tmp_path: Path) -> None:
    for name in ("adamw", "sgd"):
        losses = go(state(name=name), 0, 8)
        made = state(name=name)
        found = []
        for step in range(8):
            found += go(made, step, step + 1)
            checkpoints.save(tmp_path / name, step + 1, made, keep=1)
        assert found == losses


def test_the_newest_are_kept(tmp_path: Path) -> None:
    folder, made = tmp_path / "checkpoints", state()
    assert checkpoints.newest(folder) is None
    for taken in (8, 9, 10, 100, 99999999, 123456789):
        go(made, 0, 1)
        path = checkpoints.save(folder, taken, made, keep=2)
        assert checkpoints.newest(folder) == path
        assert checkpoints.steps_of(path) == taken
    assert sorted(p.name for p in folder.iterdir()) == ["step-123456789", "step-99999999"]


def test_half_written_ones_are_nothing(saved: Path) -> None:
    folder = saved.parent
    shutil.copytree(saved, folder / ".step-00000009")
    (folder / "step-none").mkdir()
    (folder / "step-00000010").write_text("a file")
    assert checkpoints.newest(folder) == saved
    checkpoints.clean(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000004", "step-00000010", "step-none"]


def test_a_run_may_move_to_a_gpu(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are random numbers more than the checkpoint has."""
    parts = checkpoints._parts
    monkeypatch.setattr(checkpoints, "_parts", lambda state: {**parts(state), checkpoints.CUDA: torch.zeros(16)})
    made, losses = state(seed=1), go(state(), 0, 8)
    assert checkpoints.load(saved, made) == 4
    assert go(made, 4, 8) == losses[4:]


def test_one_that_is_in_the_way_is_written_over(saved: Path) -> None:
    made = state()
    go(made, 0, 4)
    (saved.parent / ".step-00000004").mkdir()
    (saved.parent / ".step-00000004" / "rest").touch()
    assert checkpoints.save(saved.parent, 4, made, keep=2) == saved
    assert checkpoints.load(saved, state(seed=1)) == 4
    assert not (saved / "rest").exists()


# --- damage ---------------------------------------------------------------------------------------------------


def flipped(path: Path) -> Path:
    weights = next(path.glob("*.distcp"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    return path


def truncated(path: Path) -> Path:
    weights = next(path.glob("*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-1])
    return path


def without_weights(path: Path) -> Path:
    next(path.glob("*.distcp")).unlink()
    return path


def without_metadata(path: Path) -> Path:
    (path / ".metadata").unlink()
    return path


def without_manifest(path: Path) -> Path:
    (path / "manifest.json").unlink()
    return path


def with_half_a_manifest(path: Path) -> Path:
    (path / "manifest.json").write_text('{"steps": 4, "files')
    return path


def renamed(path: Path) -> Path:
    return path.rename(path.with_name("step-00000005"))


@pytest.mark.parametrize(
    "damage",
    [flipped, truncated, without_weights, without_metadata, without_manifest, with_half_a_manifest, renamed],
)
def test_damage_is_found(saved: Path, damage: Callable[[Path], Path]) -> None:
    path, made = damage(saved), state(seed=1)
    before = [p.detach().clone() for p in made.model.parameters()]
    with pytest.raises(TrainingError) as error:
        checkpoints.load(path, made)
    assert f"{path}: is damaged (" in str(error.value)
    assert "delete it to go on from the one before" in str(error.value) and "\n" not in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))


def test_other_runs(saved: Path) -> None:
    with pytest.raises(TrainingError, match="is of a run on another text"):
        checkpoints.load(saved, state(text="another"))
    for other in (state(width=16), state(layers=2), state(name="muon")):
        with pytest.raises(TrainingError, match="step-00000004: cannot be read") as error:
            checkpoints.load(saved, other)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("when", ["weights", "deep", "manifest", "rename"])
def test_a_full_disk_leaves_the_older_ones(saved: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = {
        "weights": (checkpoints, "save_parts"),
        "deep": (FileSystemWriter, "write_data"),
        "manifest": (checkpoints, "to_disk"),
        "rename": (Path, "rename"),
    }[when]
    made = state()
    go(made, 0, 5)
    with monkeypatch.context() as patch:
        patch.setattr(*target, full)
        with pytest.raises(TrainingError) as error:
            checkpoints.save(saved.parent, 5, made, keep=1)
    assert str(error.value) == f"{saved.with_name('step-00000005')}: cannot be written (No space left on device)"
    assert checkpoints.newest(saved.parent) == saved
    assert checkpoints.load(saved, state(seed=1)) == 4


def test_interrupted_while_it_is_written_or_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes Ctrl-C for a part that has failed, and says so in an error of its own."""

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    made = state()
    go(made, 0, 5)
    for target, work in (
        ((FileSystemWriter, "write_data"), lambda: checkpoints.save(saved.parent, 5, made, keep=1)),
        ((FileSystemReader, "read_data"), lambda: checkpoints.load(saved, state(seed=1))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*target, interrupted)
            with pytest.raises(KeyboardInterrupt):
                work()
    assert checkpoints.newest(saved.parent) == saved
    assert checkpoints.load(saved, state(seed=1)) == 4


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = state()
    go(made, 0, 1)
    with pytest.raises(TrainingError, match="step-00000001: cannot be written"):
        checkpoints.save(tmp_path / "file", 1, made, keep=1)
