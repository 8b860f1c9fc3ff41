"""Every way to fail: one line on stderr, nothing on stdout, a documented exit code."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import gaugekit.verbs.inspect as verb
from gaugekit.cli.common import BROKEN_PIPE, EXIT_CODES, INTERNAL, INTERRUPTED


class Opens:
    """Pickled, it opens a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def missing(path: Path) -> Path:
    return path / "no" / "such" / "thing"


def empty(path: Path) -> Path:
    (path / "empty").mkdir()
    return path / "empty"


def truncated(path: Path) -> Path:
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    return path


def unindexed(path: Path) -> Path:
    """A shard that the index names is not there."""
    names = load_file(path / "model.safetensors")
    shards = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for shard in set(shards.values()):
        save_file({name: tensor for name, tensor in names.items() if shards[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    (path / "model.safetensors").unlink()
    (path / "model-00002-of-00002.safetensors").unlink()
    return path


def configured(path: Path, **change: Any) -> Path:
    config = json.loads((path / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return path


def untyped(path: Path) -> Path:
    return configured(path, model_type=None, architectures=None)


def unknown(path: Path) -> Path:
    return configured(path, model_type="perceiver", architectures=["PerceiverModel"])


def poisoned(path: Path) -> Path:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def pickled(path: Path) -> Path:
    (path / "model.safetensors").unlink()
    torch.save({"weight": torch.ones(2), "code": Opens(path / "opened")}, path / "pytorch_model.bin")
    return path


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (missing, "no such file"),
        (empty, "empty"),
        (truncated, "truncated"),
        (unindexed, "model-00002-of-00002.safetensors: this shard is missing"),
        (untyped, "model_type"),
        (unknown, "perceiver"),
        (poisoned, "model.layers.1.mlp.up_proj.weight holds NaN"),
        (pickled, "pickled code"),
    ],
)
@pytest.mark.parametrize("option", [(), ("--json",)])
def test_bad_checkpoints(
    run: Callable[..., Any], checkpoint: Path, damage: Callable[[Path], Path], words: str, option: tuple[str, ...]
) -> None:
    result = run("inspect", damage(checkpoint), *option)
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(rf"gaugekit: .*{re.escape(words)}.*\n", result.err)
    assert not (checkpoint / "opened").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect"], "Missing argument 'MODEL'"),
        (["inspect", "x", "--nothing"], "No such option: --nothing"),
        (["inspect", "x", "--html"], "'--html' requires an argument"),
        (["inspect", "x", "--dtype", "int8"], "'int8' is not one of"),
        (["inspect", "x", "--observable", "loss"], "'loss' is not one of"),
        (["inspect", "x", "y"], "unexpected extra argument"),
        (["inspct", "x"], "Did you mean 'inspect'?"),
        (["--nothing"], "No such option: --nothing"),
    ],
)
def test_bad_usage(run: Callable[..., Any], arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(rf"gaugekit: .*{re.escape(words)}.*\n", result.err)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb that must not be called."""
    monkeypatch.setattr(verb, "inspect", lambda *_, **__: pytest.fail("work was begun"))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--html", "missing/page.html"), "there is no directory"),
        (("--html", "."), "is a directory"),
        (("--html", "tiny/model.safetensors"), "will not be replaced"),
        (("--html", "tiny/model.safetensors/page.html"), "there is no directory"),
        (("--device", "abacus"), "--device abacus: not usable here"),
        (("--device", "meta"), "--device meta: not usable here"),
    ],
)
def test_refused_before_any_work(
    run: Callable[..., Any],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    idle: None,
    option: tuple[str, str],
    words: str,
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    result = run("inspect", checkpoint, *option)
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(rf"gaugekit: .*{re.escape(words)}.*\n", result.err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here, so --device cuda is right")
def test_no_cuda(run: Callable[..., Any], checkpoint: Path, idle: None) -> None:
    result = run("inspect", checkpoint, "--device", "cuda")
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(r"gaugekit: --device cuda: not usable here \(.*\); use --device cpu\n", result.err)


def failing(error: BaseException) -> Callable[..., Any]:
    def inspect(*_: Any, **__: Any) -> Any:
        raise error

    return inspect


def test_unexpected_errors_are_named(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "inspect", failing(ZeroDivisionError("by [zero]\nand a stack of frames")))
    result = run("inspect", "x")
    assert (result.code, result.out) == (INTERNAL, "")
    assert result.err == (
        "gaugekit: internal error: ZeroDivisionError: by [zero]; run again with --debug to see where\n"
    )
    assert "3 an error inside gaugekit" in EXIT_CODES


def test_interrupted(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "inspect", failing(KeyboardInterrupt()))
    assert run("inspect", "x") == (INTERRUPTED, "", "gaugekit: interrupted\n")


def test_interrupted_while_a_library_calls_it_something_else(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def inspect(*_: Any, **__: Any) -> Any:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise verb.CheckpointError("cannot be loaded") from None

    monkeypatch.setattr(verb, "inspect", inspect)
    before = signal.getsignal(signal.SIGINT)
    assert run("inspect", "x") == (INTERRUPTED, "", "gaugekit: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr(verb, "inspect", failing(verb.CheckpointError("cannot be loaded")))
    assert run("inspect", "x") == (2, "", "gaugekit: cannot be loaded\n")


def test_broken_pipes_are_quiet(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "inspect", failing(BrokenPipeError(32, "Broken pipe")))
    assert run("inspect", "x") == (BROKEN_PIPE, "", "")


@pytest.mark.parametrize("error", [ZeroDivisionError("boom"), verb.CheckpointError("boom")])
def test_debug_shows_the_traceback(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(verb, "inspect", failing(error))
    result = run("inspect", "x", "--debug")
    assert result.code == (2 if isinstance(error, verb.CheckpointError) else INTERNAL)
    assert result.err.startswith("Traceback (most recent call last):\n")
    assert result.err.splitlines()[-1].startswith("gaugekit: ")
    assert result.err.splitlines()[-1].endswith("boom")
    assert "Traceback" not in run("inspect", "x").err


def test_messages_are_one_line_and_harmless(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "inspect", failing(verb.CheckpointError("a\n  b: \x1b[31m[red]\udcff")))
    assert run("inspect", "x").err == "gaugekit: a\\n  b: \\x1b[31m[red]\\udcff\n"
