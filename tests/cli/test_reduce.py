"""reduce from the command line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from commands import heavy_for_help
from tokenizers import Tokenizer, models, pre_tokenizers

from gaugekit.cli import reduce as command
from gaugekit.verbs.probe import Precision
from gaugekit.verbs.reduce import Form

Run = Callable[..., Any]
WORDS = 48  # as many as the checkpoint of these tests has tokens

KEYS = {
    "source": str,
    "out": str,
    "form": str,
    "vo": float,
    "qk": float,
    "lossless": bool,
    "text": str,
    "text_tokens": int,
    "layers": list,
    "vo_lost": float,
    "vo_lost_by_head": float,
    "parameters": list,
    "kv_bytes": list,
    "eval_text": str,
    "eval_tokens": int,
    "before": dict,
    "after": dict,
    "skipped": list,
    "tensors": int,
    "bytes": int,
    "written": bool,
}
LAYER = ["where", "head_dim", "vo", "vo_plain", "vo_weighted", "qk", "qk_plain", "qk_weighted"]


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A tokenizer and two texts."""
    folder = tmp_path_factory.mktemp("words")
    bare = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, "w0"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    transformers.PreTrainedTokenizerFast(tokenizer_object=bare).save_pretrained(folder)
    for name, seed in (("book.txt", 0), ("other.txt", 1)):
        drawn = torch.randint(WORDS, (300,), generator=torch.Generator().manual_seed(seed))
        (folder / name).write_text(" ".join(f"w{i}" for i in drawn.tolist()))
    return folder / "tokenizer.json", folder / "book.txt", folder / "other.txt"


def test_plain(run: Run, saved: Path, tmp_path: Path) -> None:
    result = run("reduce", saved, tmp_path / "out", "--vo", 0.5)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("out\n")
    for line in (
        r"kept +50 % of values and outputs",
        r"form +same",
        r"weighting +plain: all inputs count alike",
        r"layer 0 attention +[1-4](\.\.[1-4])?/4 +0\.\d{3}",
        r"values and outputs lose \S+ % of what they write, mean over layers",
        r"parameters: [\d,]+, as before",
        r"cache of a token: 128 bytes, as before",
        r"4 tensors changed; .* on disk",
    ):
        assert re.search(f"^{line}", result.out, re.MULTILINE), line
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")


def test_names_that_a_terminal_would_obey(
    run: Run, saved: Path, words: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    tokenizer, book, other = words
    odd = [shutil.copy(path, tmp_path / f"\x1b[31m{path.name}") for path in (book, other)]
    options = ("--text", odd[0], "--eval-text", odd[1], "--tokenizer", tokenizer, "--length", 25, "--max-tokens", 50)
    result = run("reduce", saved, tmp_path / "out", "--vo", 0.5, *options)
    assert result.code == 0
    assert "\x1b" not in result.out and result.out.count("\\x1b") == 2


def test_smaller_by_a_text(run: Run, saved: Path, words: tuple[Path, Path, Path], tmp_path: Path) -> None:
    tokenizer, book, other = words
    options = ("--text", book, "--tokenizer", tokenizer, "--length", 25, "--max-tokens", 200)
    arguments = (saved, tmp_path / "out", "--vo", 0.5, "--qk", 0.5, *options, "--form", "smaller", "--eval-text", other)
    result = run("reduce", *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    assert result.out.count("\n") == 1
    document = json.loads(result.out, parse_constant=pytest.fail)
    assert list(document) == list(KEYS)
    assert all(isinstance(document[name], kind) for name, kind in KEYS.items())
    assert list(document["layers"][0]) == LAYER
    assert set(document["before"]) == {"nats", "perplexity", "reading", "writing"}
    assert (document["text_tokens"], document["eval_tokens"]) == (200, 200)
    assert document["kv_bytes"] == [128, 96]
    before, after = document["parameters"]
    assert after == before - 2 * 2 * 16 * (2 + 4)
    result = run("reduce", *arguments, "--overwrite")
    assert (result.code, result.err) == (0, "")
    for line in (
        r"weighting +activations: 200 tokens of",
        r"cache of a token: 96 bytes of 128 bytes \(25 % less\)",
        r"parameters: \S+ of \S+ \(\S+ % less\)",
        r"Held-out text  200 tokens of",
        r"before +3\.\d{4} +\S+ +[\d,]+ +[\d,.]+$",
        r"after +3\.\d{4} ",
    ):
        assert re.search(f"^{line}", result.out, re.MULTILINE), line


def test_lossless(run: Run, saved: Path, tmp_path: Path) -> None:
    result = run("reduce", saved, tmp_path / "out", "--lossless")
    assert (result.code, result.err) == (0, "")
    assert re.search(r"^kept +all that is above rounding$", result.out, re.MULTILINE)
    assert "lose" not in result.out
    document = json.loads(run("reduce", saved, tmp_path / "out", "--lossless", "--overwrite", "--json").out)
    assert document["form"] == "smaller"
    assert document["parameters"][0] - document["parameters"][1] == 2 * 2 * 4**2


def test_a_dry_run_writes_nothing(run: Run, saved: Path, tmp_path: Path) -> None:
    result = run("reduce", saved, tmp_path / "out", "--vo", 0.5, "--form", "smaller", "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert "dry run: nothing was written\n" in result.out and "not written" in result.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{model}", "{out}"], "nothing to reduce: give --vo or --qk"),
        (["{model}", "{out}", "--vo", "0"], "--vo 0: it is the share that is kept"),
        (["{model}", "{out}", "--vo", "75"], "--vo 75: it is the share that is kept"),
        (["{model}", "{out}", "--vo", "much"], "Invalid value for '--vo'"),
        (["{model}", "{out}", "--lossless", "--qk", "0.5"], "leave out --vo, --qk and --text"),
        (["{model}", "{out}", "--qk", "0.5", "--form", "smaller"], "give --vo"),
        (["{model}", "{out}", "--vo", "0.5", "--form", "tiny"], "'tiny' is not one of"),
        (["{model}", "{out}", "--vo", "0.5", "--text", "{out}"], "has no tokenizer"),
        (["{model}", "{out}", "--vo", "0.5", "--text", "{out}", "--length", "1"], "'--length'"),
        (["{model}", "{out}", "--vo", "0.5", "--dry-run", "--eval-text", "{out}"], "leave out one of them"),
        (["{model}", "{out}", "--vo", "0.5", "--device", "none"], "--device none"),
        (["{model}", "{out}", "--vo", "0.5", "--dtype", "int8"], "'int8' is not one of"),
        (["{model}", "{model}", "--vo", "0.5"], "is the source itself"),
        (["{model}", "{out}/none/out", "--vo", "0.5"], "there is no directory"),
        (["{out}", "{out}", "--vo", "0.5"], "no such file"),
    ],
)
def test_bad_usage(run: Run, saved: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    result = run("reduce", *(each.format(model=saved, out=tmp_path / "out") for each in arguments))
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(rf"gaugekit: .*{re.escape(words)}.*\n", result.err)
    assert not list(tmp_path.iterdir())


def test_help_is_quick(run: Run) -> None:
    text = run("reduce", "--help").out
    for option in ("--vo", "--qk", "--lossless", "--text", "--form", "--eval-text", "--run-dtype", "--dry-run"):
        assert option in text
    assert heavy_for_help("reduce") == ""


def test_choices_are_those_of_the_verb() -> None:
    assert get_args(command.Form) == get_args(Form)
    assert get_args(command.Precision) == get_args(Precision)
