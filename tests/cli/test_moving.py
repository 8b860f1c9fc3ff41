"""scramble, verify, canonicalize and compare from the command line."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from commands import Stopped, heavy_for_help, strict
from safetensors.torch import load_file, save_file

from gaugekit.cli import canonicalize as canonicalize_command
from gaugekit.cli import options
from gaugekit.cli import verify as verify_command
from gaugekit.cli.common import EXIT_CODES, NOT_EQUIVALENT
from gaugekit.symmetry import Observable
from gaugekit.verbs.canonicalize import Gauge, Level
from gaugekit.verbs.scramble import PARTS

Run = Callable[..., Any]
WEIGHTS = "model.safetensors"


def edited(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(path / WEIGHTS)
    edit(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return path


@pytest.fixture
def poisoned(checkpoint: Path) -> Path:
    return edited(checkpoint, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[5].fill_(torch.nan))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another family, with the same tokens."""
    config = transformers.GPT2Config(
        vocab_size=48, n_embd=16, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    path = tmp_path_factory.mktemp("models") / "stranger"
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return path


def test_there_and_back(run: Run, saved: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    result = run("scramble", saved, moved, "--seed", "1")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("moved\n")
    assert (
        load_file(moved / WEIGHTS)["lm_head.weight"].sub(load_file(saved / WEIGHTS)["lm_head.weight"]).abs().max()
        > 0.01
    )

    result = run("verify", saved, moved)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("equivalent  log-probabilities differ by at most ")

    result = run("compare", saved, moved)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("same  ")

    for source, out in ((saved, "a"), (moved, "b")):
        result = run("canonicalize", source, tmp_path / out, "--verify", "--json")
        assert (result.code, result.err) == (0, "")
        document = strict(result.out)
        assert document["written"] and document["verify"]["equivalent"]
    first, second = load_file(tmp_path / "a" / WEIGHTS), load_file(tmp_path / "b" / WEIGHTS)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=2e-5)
    # b has been through the rounding of moved, of which verify cannot know.
    assert run("verify", tmp_path / "a", tmp_path / "b", "--tolerance", "1e-4").code == 0


def test_the_same_seed_gives_the_same_files(run: Run, saved: Path, tmp_path: Path) -> None:
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run("scramble", saved, tmp_path / out, "--seed", seed).code == 0
    a, b, c = ((tmp_path / out / WEIGHTS).read_bytes() for out in "abc")
    assert a == b != c


def test_only_some_parts(run: Run, saved: Path, tmp_path: Path) -> None:
    document = strict(run("scramble", saved, tmp_path / "out", "--seed", 1, "--only", "vo, qk,vo", "--json").out)
    assert document["moved"] == {"value-output basis": 2, "query-key basis": 2}
    assert document["tensors"] == 8


def test_another_model_is_not_equivalent(run: Run, saved: Path, checkpoint: Path) -> None:
    edited(checkpoint, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].mul_(3))
    result = run("verify", saved, checkpoint)
    assert (result.code, result.err) == (NOT_EQUIVALENT, "")
    assert result.out.startswith("not equivalent  ")
    result = run("verify", saved, checkpoint, "--json")
    assert (result.code, result.err) == (NOT_EQUIVALENT, "")
    assert strict(result.out)["equivalent"] is False
    assert run("verify", saved, checkpoint, "--tolerance", "100").code == 0
    assert "verify, canonicalize --verify and align: 1 not equivalent" in EXIT_CODES


def test_canonicalize_verify_can_fail(run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verb = import_module("gaugekit.verbs.verify")
    monkeypatch.setattr(verb, "FLOOR", 0.0)
    monkeypatch.setattr(verb, "ROUNDING_ROOM", 0.0)
    result = run("canonicalize", saved, tmp_path / "out", "--verify")
    assert (result.code, result.err) == (NOT_EQUIVALENT, "")
    assert "\nnot equivalent  " in result.out
    assert (tmp_path / "out" / WEIGHTS).exists()


JSON_KEYS = {
    "scramble": ["source", "out", "seed", "condition", "only", "observable", "moved", "tensors", "skipped"],
    "canonicalize": [
        "source",
        "out",
        "level",
        "gauge",
        "observable",
        "fixed",
        "skipped",
        "blocked",
        "ambiguous",
        "tensors",
        "bytes",
        "written",
        "need_not_be_stored",
        "ties",
        "layer_norms",
        "not_rms",
        "verify",
    ],
    "verify": [
        "first",
        "second",
        "observable",
        "computed_in",
        "stored_in",
        "tokens",
        "largest",
        "scale",
        "mean_kl",
        "top1",
        "rounding",
        "tolerance",
        "equivalent",
        "layer",
        "layers",
    ],
    "compare": [
        "first",
        "second",
        "verdict",
        "reason",
        "spectra",
        "distance",
        "rounding",
        "cosine",
        "largest_difference",
        "layers",
    ],
}


def test_json_is_one_document_with_the_keys_of_the_contract(run: Run, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for command, arguments in (
        ("scramble", (saved, out, "--seed", 1)),
        ("canonicalize", (saved, tmp_path / "canonical")),
        ("verify", (saved, out)),
        ("compare", (saved, out)),
    ):
        result = run(command, *arguments, "--json")
        assert (result.code, result.err) == (0, "")
        document = strict(result.out)
        assert list(document) == JSON_KEYS[command]
        text = (Path(__file__).parents[2] / "docs" / "orbits.md").read_text(encoding="utf-8")
        assert all(re.search(rf"\b{key}\b", text) for key in document), "docs/orbits.md lacks a key"


def test_a_dry_run_writes_nothing(run: Run, saved: Path, tmp_path: Path) -> None:
    result = run("canonicalize", saved, tmp_path / "out", "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert "dry run: nothing was written\n" in result.out
    document = strict(run("canonicalize", saved, tmp_path / "out", "--dry-run", "--json").out)
    assert (document["written"], document["verify"]) == (False, None)
    assert not list(tmp_path.iterdir())


def test_dtype_and_shards(run: Run, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--dtype", "bfloat16", "--max-shard-size", "6kB")
    assert run("canonicalize", saved, out, *options, "--verify").code == 0
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 1
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {torch.bfloat16}


@pytest.mark.parametrize("command", [("scramble", "--seed", "1"), ("canonicalize",)])
class TestOut:
    """Where the result goes: refused before anything is written there."""

    def test_exists(self, run: Run, saved: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
        out = tmp_path / "out"
        name, *rest = command
        assert run(name, saved, out, *rest).code == 0
        before = (out / WEIGHTS).stat().st_ino
        result = run(name, saved, out, *rest)
        assert (result.code, result.out) == (2, "")
        assert re.fullmatch(r"gaugekit: .*/out: exists already; .*\n", result.err)
        assert (out / WEIGHTS).stat().st_ino == before
        assert run(name, saved, out, *rest, "--overwrite").code == 0
        assert (out / WEIGHTS).stat().st_ino != before

    def test_no_parent(self, run: Run, saved: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
        name, *rest = command
        result = run(name, saved, tmp_path / "no" / "out", *rest)
        assert (result.code, result.out) == (2, "")
        assert re.fullmatch(r"gaugekit: .*/no/out: there is no directory .*\n", result.err)

    def test_nothing_is_written_of_damaged_weights(
        self, run: Run, poisoned: Path, tmp_path: Path, command: tuple[str, ...]
    ) -> None:
        name, *rest = command
        result = run(name, poisoned, tmp_path / "out", *rest)
        assert (result.code, result.out) == (2, "")
        assert re.fullmatch(r"gaugekit: .*model\.layers\.1\.mlp\.up_proj\.weight holds NaN.*\n", result.err)
        assert [path.name for path in tmp_path.iterdir()] == [poisoned.name]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["scramble", "{model}", "{out}"], "Missing option '--seed'"),
        (["scramble", "{model}", "{out}", "--seed", "-1"], "'--seed'"),
        (["scramble", "{model}", "{out}", "--seed", "1", "--only", "nonsense"], "unknown part 'nonsense'"),
        (["scramble", "{model}", "{out}", "--seed", "1", "--only", ""], "unknown part ''"),
        (["scramble", "{model}", "{out}", "--seed", "1", "--condition", "0.5"], "at least 1"),
        (["scramble", "{model}", "{out}", "--seed", "1", "--dtype", "int8"], "'int8' is not one of"),
        (["scramble", "{model}", "{out}", "--seed", "1", "--max-shard-size", "big"], "'big' is no size"),
        (["canonicalize", "{model}", "{out}", "--level", "some"], "'some' is not one of"),
        (["canonicalize", "{model}", "{out}", "--dry-run", "--verify"], "leave out one of them"),
        (["canonicalize", "{model}", "{model}"], "is the source itself"),
        (["verify", "{model}", "{out}"], "no such file"),
        (["verify", "{model}", "{model}", "--tolerance", "nan"], "--tolerance nan"),
        (["verify", "{model}", "{model}", "--rows", "0"], "'--rows'"),
        (["verify", "{model}", "{model}", "--text", "{model}/config.json"], "has no tokenizer"),
        (["compare", "{model}", "{out}"], "no such file"),
        (["compare", "{model}", "{model}", "--html", "{out}/page.html"], "there is no directory"),
    ],
)
def test_bad_usage(run: Run, saved: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    result = run(*(each.format(model=saved, out=tmp_path / "out") for each in arguments))
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(rf"gaugekit: .*{re.escape(words)}.*\n", result.err)
    assert not list(tmp_path.iterdir())


def test_relatives_and_pages(run: Run, saved: Path, checkpoint: Path, tmp_path: Path) -> None:
    edited(checkpoint, lambda tensors: [tensor.mul_(1 + 0.02 * torch.rand_like(tensor)) for tensor in tensors.values()])
    page = tmp_path / "page.html"
    result = run("compare", saved, checkpoint, "--html", page, "--json")
    assert (result.code, result.err) == (0, f"wrote page {page}\n")
    assert strict(result.out)["verdict"] == "related"
    assert "<h1>Related: tiny and tiny</h1>" in page.read_text(encoding="utf-8")
    fast = strict(run("compare", saved, checkpoint, "--fast", "--json").out)
    assert fast["distance"] is None
    assert fast["layers"][0]["qk"] is None


def test_what_cannot_be_compared(run: Run, saved: Path, stranger: Path, tmp_path: Path) -> None:
    line = f"gaugekit: {saved} and {stranger} cannot be compared: different families: llama and gpt2\n"
    page = tmp_path / "page.html"
    assert run("compare", saved, stranger, "--html", page) == (2, "", line)
    assert not page.exists()
    result = run("compare", saved, stranger, "--json")
    assert (result.code, result.err) == (2, line)
    assert strict(result.out)["verdict"] == "incomparable"


def test_verify_refuses_different_inputs(run: Run, saved: Path, stranger: Path) -> None:
    result = run("verify", saved, stranger)
    assert (result.code, result.out) == (2, "")
    assert result.err.endswith("they take different inputs\n") and result.err.count("\n") == 1


def test_a_zero_norm_weight_is_told(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    edited(checkpoint, lambda tensors: tensors["model.norm.weight"][3].fill_(0))
    result = run("scramble", checkpoint, tmp_path / "out", "--seed", 1)
    assert result.code == 0
    assert "Skipped" in result.out and "model.norm.weight has a zero" in result.out
    assert run("verify", checkpoint, tmp_path / "out").code == 0


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGTERM to catch here")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_nothing(saved: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    out = tmp_path / "out"
    program = Stopped("gaugekit.checkpoint.writer", "_store", "canonicalize", saved, out)
    assert [path.name.startswith(".out.partial-") for path in tmp_path.iterdir()] == [True]
    assert program.by(number) == (code, "gaugekit: interrupted\n" if number == signal.SIGINT else "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["scramble", "verify", "canonicalize", "compare"])
def test_help_is_quick_and_names_the_exit_codes(run: Run, command: str) -> None:
    text = run(command, "--help").out
    assert "1 not equivalent" in " ".join(text.split())
    assert "[@revision]" in text
    assert heavy_for_help(command) == ""


def test_commands_are_in_the_order_in_which_they_are_used(run: Run) -> None:
    found = re.findall(
        r"^\W*(inspect|scramble|verify|canonicalize|compare)\b", run("--help").out.split("Exit codes")[0], re.MULTILINE
    )
    assert found == ["inspect", "scramble", "verify", "canonicalize", "compare"]


def test_choices_are_those_of_the_verbs(run: Run) -> None:
    assert get_args(options.ObservableName) == get_args(Observable)
    assert get_args(canonicalize_command.Level) == get_args(Level)
    assert get_args(canonicalize_command.Gauge) == get_args(Gauge)
    assert get_args(verify_command.Precision) == ("auto", "float64", "float32")
    for part in PARTS:
        assert part in run("scramble", "--help").out
