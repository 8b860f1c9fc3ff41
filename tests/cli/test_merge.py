"""merge from the command line."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import Stopped, heavy_for_help, strict
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

Run = Callable[..., Any]
WEIGHTS = "model.safetensors"
TEXT = "the model reads what was written and writes what was read so that nobody knows who began "


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one shape with a tokenizer of words, and a text."""
    folder = tmp_path_factory.mktemp("models")
    known = sorted(set(TEXT.split()))
    bare = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token=known[0]))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
        transformers.PreTrainedTokenizerFast(tokenizer_object=bare).save_pretrained(folder / name)
    (folder / "words.txt").write_text(TEXT * 20)
    return folder


@pytest.fixture
def recipe(pair: Path, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    entries = "".join(f"  - {{model: {pair / name}, parameters: {{weight: 0.5}}}}\n" for name in ("one", "two"))
    path.write_text(f"merge_method: linear\nmodels:\n{entries}")
    return path


KEYS = [
    "recipe",
    "out",
    "method",
    "align",
    "sources",
    "tensors",
    "bytes",
    "written",
    "mergekit",
    "ways",
    "ends",
]


def test_merge(run: Run, pair: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("merge", recipe, out)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("out\n")
    assert "to the first model, by weights" in result.out
    assert re.search(r"^one +0\.5$", result.out, re.MULTILINE)
    assert re.search(r"^21 tensors changed; .* on disk$", result.out, re.MULTILINE)
    assert load_file(out / WEIGHTS).keys() == load_file(pair / "one" / WEIGHTS).keys()
    transformers.AutoModelForCausalLM.from_pretrained(out)
    document = strict(run("merge", recipe, tmp_path / "again", "--json").out)
    assert list(document) == KEYS
    assert [source["weight"] for source in document["sources"]] == [0.5, 0.5]
    assert all(re.fullmatch("[0-9a-f]{64}", source["digest"]) for source in document["sources"])
    assert (out / WEIGHTS).read_bytes() == (tmp_path / "again" / WEIGHTS).read_bytes()


def test_the_way_is_shown(run: Run, pair: Path, recipe: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ("--text", pair / "words.txt", "--points", 3)
    result = run("merge", recipe, tmp_path / "out", *options, "--html", page)
    assert (result.code, result.err) == (0, f"wrote page {page}\n")
    assert re.search(r"^0\.5 +\d\.\d{4} +\d\.\d{4}$", result.out, re.MULTILINE)
    assert re.search(r"^barrier as they are: .* nats a token\nbarrier aligned: .* nats a token$", result.out, re.M)
    text = page.read_text(encoding="utf-8")
    assert "<h1>out</h1>" in text and 'id="way"' in text
    document = strict(run("merge", recipe, tmp_path / "again", *options, "--json").out)
    assert document["ways"]["t"] == [0.0, 0.5, 1.0]
    assert document["ends"] is None


def test_for_mergekit(run: Run, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("merge", recipe, out, "--export-mergekit")
    assert (result.code, result.err) == (0, "")
    assert str(out / "mergekit.yaml") in result.out.replace("\n", "").replace(" ", "")
    assert sorted(path.name for path in out.iterdir()) == ["mergekit.yaml", "two"]
    again = run("merge", recipe, out, "--export-mergekit")
    assert (again.code, again.out) == (2, "")
    assert re.fullmatch(r"gaugekit: .*/out: exists already; .*\n", again.err)
    assert run("merge", recipe, out, "--export-mergekit", "--overwrite", "--dtype", "bfloat16").code == 0
    assert {x.dtype for x in load_file(out / "two" / WEIGHTS).values()} == {torch.bfloat16}


def test_a_dry_run_writes_nothing(run: Run, pair: Path, recipe: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    for options in ((), ("--export-mergekit",), ("--text", pair / "words.txt")):
        result = run("merge", recipe, tmp_path / "out", "--dry-run", *options)
        assert (result.code, result.err) == (0, "")
        assert "dry run: nothing was written\n" in result.out and "tensors would change" in result.out
        assert strict(run("merge", recipe, tmp_path / "out", "--dry-run", "--json", *options).out)["written"] is False
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{recipe}"], "Missing argument 'OUT'"),
        (["{folder}/none.yaml", "{out}"], "cannot be read"),
        (["~nobody-at-all/none.yaml", "{out}"], "cannot be read"),
        (["{recipe}", "~nobody-at-all/out"], "cannot be used"),
        (["{pair}/words.txt", "{out}"], "a recipe is a mapping"),
        (["{recipe}", "{pair}/one"], "which goes into the merge"),
        (["{recipe}", "{folder}/no/out"], "there is no directory"),
        (["{recipe}", "{folder}/" + "o" * 5000, "--export-mergekit"], "cannot be written (File name too long)"),
        (["{recipe}", "{out}", "--points", "2"], "'--points'"),
        (["{recipe}", "{out}", "--dtype", "int8"], "'int8' is not one of"),
        (["{recipe}", "{out}", "--text", "{folder}/none.txt"], "cannot be read as text"),
        (["{recipe}", "{out}", "--max-shard-size", "big"], "'big' is no size"),
        (["{recipe}", "{out}", "--max-shard-size", "big", "--export-mergekit"], "'big' is no size"),
        (["{recipe}", "{out}", "--html", "{folder}/no/page.html"], "there is no directory"),
        (["{recipe}", "{out}", "--html", "{folder}/page.html", "--dry-run"], "leave out one of them"),
    ],
)
def test_bad_usage(run: Run, pair: Path, recipe: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    names = {"recipe": recipe, "pair": pair, "folder": tmp_path, "out": tmp_path / "out"}
    result = run("merge", *(each.format(**names) for each in arguments))
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(rf"gaugekit: .*{re.escape(words)}.*\n", result.err)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("where", ["~nobody-at-all/model", "m" * 5000])
def test_a_model_that_is_no_path(run: Run, recipe: Path, tmp_path: Path, where: str) -> None:
    recipe.write_text(f"{recipe.read_text()}  - {{model: {where}, parameters: {{weight: 1}}}}\n")
    result = run("merge", recipe, tmp_path / "out")
    assert result.code == 2
    assert re.fullmatch(rf"gaugekit: {where}: cannot be opened \(.*\); check the path\n", result.err)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send here")
@pytest.mark.parametrize("options", [["--text", "words.txt"], ["--export-mergekit"]], ids=["way", "export"])
def test_an_interrupt_leaves_nothing(pair: Path, recipe: Path, tmp_path: Path, options: list[str]) -> None:
    place = ("barriers", "load_model") if "--text" in options else ("exporting", "write")
    options = [str(pair / each) if each.endswith(".txt") else each for each in options]
    running = Stopped(f"gaugekit.verbs.{place[0]}", place[1], "merge", recipe, tmp_path / "out", *options)
    assert any(path.name.startswith(".out.") for path in tmp_path.iterdir())
    assert running.by(signal.SIGINT) == (130, "gaugekit: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_help_is_quick(run: Run) -> None:
    text = " ".join(run("merge", "--help").out.split())
    assert "task_arithmetic, ties, dare_linear, dare_ties" in text
    assert heavy_for_help("merge") == ""
