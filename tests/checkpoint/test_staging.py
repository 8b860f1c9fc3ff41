"""The result is there complete or not at all: places refused, full disks, signals, and replacing what was there."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from gaugekit.checkpoint import Plan, open_checkpoint, plan, staging, write

KILLED = """
import os, sys, time
import torch
from gaugekit.checkpoint import open_checkpoint, plan, write

source, out = sys.argv[1:]

def given():
    yield "a", torch.zeros(6, 4)
    print(*os.listdir(os.path.dirname(out)), flush=True)
    time.sleep(60)

write(plan(open_checkpoint(source), out, ["a", "b"], overwrite=True), given())
"""


def planned(source: Path, out: Path, **options: Any) -> Plan:
    return plan(open_checkpoint(source), out, ["a"], **options)


def given() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.ones(6, 4)


def is_new(out: Path) -> bool:
    return torch.equal(open_checkpoint(out).load("a"), torch.ones(6, 4).bfloat16())


@pytest.fixture
def occupied(tmp_path: Path) -> Path:
    """A place where a checkpoint is already."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"old": true}')
    (out / "extra").mkdir()
    (out / "extra" / "file").touch()
    return out


def is_old(out: Path) -> bool:
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    return names == ["config.json", "extra", "extra/file"]


@pytest.fixture
def nothing_left(tmp_path: Path, hidden: Callable[[Path], list[str]]) -> Callable[[], bool]:
    return lambda: not hidden(tmp_path)


def test_the_directory_is_as_open_as_any(mixed: Path, tmp_path: Path) -> None:
    write(planned(mixed, tmp_path / "out"), given())
    usual = tmp_path / "usual"
    usual.mkdir()
    assert (tmp_path / "out").stat().st_mode == usual.stat().st_mode


def test_places_that_are_refused(mixed: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    file = tmp_path / "file"
    file.touch()
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").touch()
    link = tmp_path / "link"
    link.symlink_to(mixed)
    for out, message in (
        (mixed, "source itself"),
        (mixed.parent / "x" / ".." / mixed.name, "source itself"),
        (link, "source itself"),
        (mixed / "out", "inside the source"),
        (link / "deep" / "out", "inside the source"),
        (tmp_path, "holds the source"),
        (Path("/"), "holds the source"),
        (tmp_path / "no" / "out", "there is no directory"),
        (file / "out", "there is no directory"),
        (file, "is a file"),
        (other, "no checkpoint"),
    ):
        refused(lambda out=out: planned(mixed, out, overwrite=True), str(out.resolve()), message)
    assert (other / "precious").exists()


def test_what_exists_is_kept(mixed: Path, occupied: Path, refused: Callable[..., str]) -> None:
    refused(lambda: planned(mixed, occupied), str(occupied), "exists already")
    made = planned(mixed, occupied.with_name("later"))
    occupied.rename(made.out)
    refused(lambda: write(made, given()), str(made.out), "exists already")
    assert is_old(made.out)


def test_what_comes_into_being_meanwhile_is_kept(
    mixed: Path, tmp_path: Path, refused: Callable[..., str], nothing_left: Callable[[], bool]
) -> None:
    made = planned(mixed, tmp_path / "out")

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        yield from given()
        made.out.mkdir()

    refused(lambda: write(made, slow()), str(made.out), "meanwhile")
    assert list(made.out.iterdir()) == []
    assert nothing_left()


def test_overwriting(mixed: Path, occupied: Path, nothing_left: Callable[[], bool]) -> None:
    made = planned(mixed, occupied, overwrite=True)

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        assert is_old(occupied)
        yield from given()
        assert is_old(occupied)

    write(made, slow())
    assert is_new(occupied)
    assert sorted(path.name for path in occupied.iterdir()) == ["config.json", "model.safetensors"]
    assert nothing_left()


def test_overwriting_an_empty_directory(mixed: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(planned(mixed, tmp_path / "out", overwrite=True), given())
    assert is_new(tmp_path / "out")


def test_overwriting_what_a_link_points_to(mixed: Path, occupied: Path) -> None:
    link = occupied.with_name("link")
    link.symlink_to(occupied)
    write(planned(mixed, link, overwrite=True), given())
    assert link.is_symlink()
    assert is_new(occupied)


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt(), OSError(errno.EACCES, "mine")])
def test_errors_of_the_caller(
    mixed: Path, occupied: Path, error: BaseException, nothing_left: Callable[[], bool]
) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from given()
        raise error

    for out in (occupied, occupied.with_name("new")):
        with pytest.raises(type(error)) as caught:
            write(planned(mixed, out, overwrite=True), failing())
        assert caught.value is error
        assert nothing_left()
    assert is_old(occupied)
    assert not out.exists()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_a_failure_between_the_two_renames(
    mixed: Path,
    occupied: Path,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    nothing_left: Callable[[], bool],
) -> None:
    made = planned(mixed, occupied, overwrite=True)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            assert not occupied.exists()
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises((KeyboardInterrupt, staging.CheckpointError)):
        write(made, given())
    assert is_old(occupied)
    assert nothing_left()


def test_cleaning_up_survives_one_interrupt(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: Callable[[], bool]
) -> None:
    rmtree, calls = shutil.rmtree, []

    def interrupted(path: Path, **options: Any) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(planned(mixed, tmp_path / "out"), [])
    assert calls
    assert nothing_left()


def test_all_is_on_the_disk_before_it_is_visible(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mixed / "folder").mkdir()
    (mixed / "folder" / "file").touch()
    made = planned(mixed, tmp_path / "out", max_shard_size=100)
    fsync, synced = staging._fsync, []

    def watched(path: Path, flags: int) -> None:
        synced.append((path.name, made.out.exists()))
        fsync(path, flags)

    monkeypatch.setattr(staging, "_fsync", watched)
    write(made, given())
    before = {name for name, visible in synced if not visible}
    assert {path.name for path in made.out.rglob("*")} <= before
    assert synced[-1] == (tmp_path.name, True)


def test_a_disk_too_small(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    made = planned(mixed, tmp_path / "out")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 99, 99))
    for attempt in (lambda: planned(mixed, tmp_path / "out"), lambda: write(made, given())):
        refused(attempt, str(made.out), f"needs {made.total_bytes} bytes", "has 99 bytes free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, made.total_bytes))
    write(made, given())


@pytest.mark.parametrize("function", ["posix_fallocate", "fsync"])
def test_a_disk_that_fills_up(
    mixed: Path,
    occupied: Path,
    function: Literal["posix_fallocate", "fsync"],
    monkeypatch: pytest.MonkeyPatch,
    refused: Callable[..., str],
    nothing_left: Callable[[], bool],
) -> None:
    made = planned(mixed, occupied, overwrite=True)
    taken = []

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def once() -> Iterator[tuple[str, torch.Tensor]]:
        taken.append("a")
        yield from given()

    monkeypatch.setattr(os, function, full, raising=False)
    refused(lambda: write(made, once()), str(occupied), "disk is full")
    assert taken == ([] if function == "posix_fallocate" else ["a"])  # The first before anything is computed.
    assert is_old(occupied)
    assert nothing_left()


@pytest.mark.parametrize("how", ["missing", "refusing"])
def test_systems_that_cannot_take_up_space(
    mixed: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    if how == "missing":
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    else:
        monkeypatch.setattr(os, "posix_fallocate", refusing, raising=False)
    write(planned(mixed, tmp_path / "out"), given())
    assert is_new(tmp_path / "out")


def test_a_parent_that_is_not_writable(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    made = planned(mixed, tmp_path / "out")
    monkeypatch.setattr(Path, "mkdir", denied)  # Real permissions do not bind root, as whom tests are often run.
    refused(lambda: write(made, given()), str(made.out), "cannot be written (Permission denied)")


@pytest.mark.skipif(os.name != "posix", reason="there are no signals to send")
@pytest.mark.parametrize("there", [False, True])
def test_sigterm_in_the_middle(
    mixed: Path, occupied: Path, there: bool, hidden: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    out = occupied if there else tmp_path / "new"
    command = [sys.executable, "-c", KILLED, str(mixed), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            listed = process.stdout.readline()
            assert f".{out.name}.partial-" in listed
            assert len(hidden(tmp_path)) == 1
            process.terminate()
            assert process.wait(30) == 143
        finally:
            process.kill()
    assert not hidden(tmp_path)
    assert is_old(out) if there else not out.exists()


@pytest.mark.skipif(os.name != "posix", reason="there are no signals to send")
def test_handlers_are_put_back(mixed: Path, tmp_path: Path) -> None:
    def mine(*_: object) -> None:
        raise AssertionError

    def watching() -> Iterator[tuple[str, torch.Tensor]]:
        during.append(signal.getsignal(signal.SIGTERM))
        yield from given()

    during: list[Any] = []
    before = signal.signal(signal.SIGTERM, mine)
    try:
        write(planned(mixed, tmp_path / "one"), watching())
        assert signal.getsignal(signal.SIGTERM) is mine
        with pytest.raises(ValueError, match="not been given"):
            write(planned(mixed, tmp_path / "two"), [])
        assert signal.getsignal(signal.SIGTERM) is mine
        assert during[0] not in (mine, signal.SIG_DFL)

        thread = threading.Thread(target=lambda: write(planned(mixed, tmp_path / "three"), watching()))
        thread.start()
        thread.join()
        assert is_new(tmp_path / "three")
        assert during[1] is mine

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write(planned(mixed, tmp_path / "four"), watching())
        assert during[2] == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
