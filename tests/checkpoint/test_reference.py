"""What a reference stands for: paths as they are, hub ids from the local cache, and a plain word otherwise."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from gaugekit.checkpoint import open_checkpoint, reference

MAIN, OTHER = "a" * 40, "b" * 40


def weights(path: Path, value: float = 1.0) -> None:
    (path / "config.json").write_text("{}")
    save_file({"w": torch.full((2, 3), value)}, path / "model.safetensors")


def cached(hub: Path, repo: str, commit: str, ref: str, value: float) -> Path:
    """A snapshot as the hub library lays it out: files are links to blobs without a suffix."""
    root = hub / f"models--{repo.replace('/', '--')}"
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (root / "refs" / ref).write_text(commit)
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    weights(snapshot, value)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        blob = root / "blobs" / f"{commit[:4]}{number}"
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache in place of the user's; any attempt to reach the network fails the test."""
    path = tmp_path / "hub"
    path.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(path))
    monkeypatch.chdir(tmp_path)

    def no_network(*_: object) -> None:
        pytest.fail("reached for the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    return path


def test_a_directory_by_str_and_by_path(directory: Path) -> None:
    weights(directory)
    assert open_checkpoint(directory).path == directory
    assert open_checkpoint(str(directory)).path == directory


def test_the_home_directory_is_expanded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(directory.parent))
    monkeypatch.setenv("USERPROFILE", str(directory.parent))
    assert open_checkpoint("~/checkpoint").path == directory


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_stands_for_its_directory(directory: Path, name: str) -> None:
    weights(directory)
    checkpoint = open_checkpoint(directory / name)
    assert checkpoint.path == directory
    assert checkpoint.format == ("config" if name == "config.json" else "safetensors")


def test_a_bin_file_stands_for_its_directory(directory: Path) -> None:
    torch.save({"w": torch.ones(2)}, directory / "pytorch_model.bin")
    assert open_checkpoint(directory / "pytorch_model.bin").format == "bin"


def test_a_weight_file_without_its_config(tmp_path: Path, refused: Callable[..., str]) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    refused(tmp_path / "model.safetensors", "model.safetensors", "config.json")


def test_a_weight_file_its_directory_would_not_be_opened_through(directory: Path, refused: Callable[..., str]) -> None:
    weights(directory)
    save_file({"w": torch.zeros(2)}, directory / "ema.safetensors")
    refused(directory / "ema.safetensors", "ema.safetensors", "rename")


def test_a_file_of_another_kind(directory: Path, refused: Callable[..., str]) -> None:
    (directory / "notes.txt").write_text("hello")
    refused(directory / "notes.txt", "notes.txt", "not a checkpoint")


def test_an_empty_directory(tmp_path: Path, refused: Callable[..., str]) -> None:
    refused(tmp_path, str(tmp_path), "empty")


def test_an_empty_reference(refused: Callable[..., str]) -> None:
    refused("", "reference is empty")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    "text",
    ["/no/such", "./no", "../no", "~/no-such", "a/b/c", "a/b/c@main", "x.gguf", "org/x.json", "x.safetensors", "x.bin"],
)
def test_what_looks_like_a_path_is_never_sought_in_the_cache(text: str, refused: Callable[..., str]) -> None:
    message = refused(text, "no such file or directory", str(Path(text).expanduser()))
    assert "cache" not in message


@pytest.mark.usefixtures("hub")
def test_a_path_object_is_a_path(refused: Callable[..., str]) -> None:
    refused(Path("org/name"), "org/name", "no such file or directory")


def test_a_revision_of_a_local_path(directory: Path, refused: Callable[..., str]) -> None:
    refused(directory, str(directory), "hub ids only", revision="main")


def test_a_hub_id_in_the_cache(hub: Path) -> None:
    snapshot = cached(hub, "org/name", MAIN, "main", 1.0)
    checkpoint = open_checkpoint("org/name")
    assert checkpoint.path.samefile(snapshot)
    assert torch.equal(checkpoint.load("w"), torch.ones(2, 3))


def test_a_hub_id_without_an_organisation(hub: Path) -> None:
    cached(hub, "name", MAIN, "main", 1.0)
    assert open_checkpoint("name").format == "safetensors"


def test_revisions_by_suffix_by_argument_and_by_commit(hub: Path) -> None:
    cached(hub, "org/name", MAIN, "main", 1.0)
    cached(hub, "org/name", OTHER, "refs/pr/1", 2.0)
    opened = [
        open_checkpoint("org/name@refs/pr/1"),
        open_checkpoint("org/name", revision="refs/pr/1"),
        open_checkpoint("org/name@refs/pr/1", revision="refs/pr/1"),
        open_checkpoint(f"org/name@{OTHER}"),
    ]
    assert [float(checkpoint.load("w")[0, 0]) for checkpoint in opened] == [2.0] * 4


@pytest.mark.usefixtures("hub")
def test_two_revisions_at_once(refused: Callable[..., str]) -> None:
    refused("org/name@one", "org/name@one", "'two'", revision="two")


def test_a_hub_id_that_is_not_in_the_cache(hub: Path, refused: Callable[..., str]) -> None:
    refused("org/name", "neither a path nor in the local", "hf download org/name")
    cached(hub, "org/name", MAIN, "main", 1.0)
    refused("org/name@v2", "'v2'", "hf download org/name --revision v2")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("text", ["not an id", "org/na:me", "-x", "a--b"])
def test_what_is_neither_a_path_nor_an_id(text: str, refused: Callable[..., str]) -> None:
    refused(text, text, "neither")


@pytest.mark.usefixtures("hub")
def test_a_partial_snapshot_is_used_as_far_as_it_goes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub library refuses a snapshot without its README; the reader needs only what it reads."""

    class Incomplete(LocalEntryNotFoundError):
        snapshot_path = str(directory)

    def partial(*_: object, **__: object) -> str:
        raise Incomplete("README.md is missing")

    monkeypatch.setattr(reference, "snapshot_download", partial)
    assert open_checkpoint("org/name").format == "config"


def test_hf_home_is_honoured(tmp_path: Path) -> None:
    snapshot = cached(tmp_path / "home" / "hub", "org/name", MAIN, "main", 1.0)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    program = "from gaugekit.checkpoint import open_checkpoint; print(open_checkpoint('org/name').path)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(result.stdout.strip()).samefile(snapshot)
