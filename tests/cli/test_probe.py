"""probe from the command line."""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from commands import heavy_for_help, strict
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import gaugekit
import gaugekit.verbs.probe as verb
from gaugekit.cli import probe as command
from gaugekit.cli.common import INTERNAL
from gaugekit.verbs.attending import HeadStates
from gaugekit.verbs.states import Kernel, NormStates

Run = Callable[..., Any]
WORDS = 48


def give_words(folder: Path, words: int = WORDS) -> Path:
    bare = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    transformers.PreTrainedTokenizerFast(tokenizer_object=bare).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 that has a tokenizer."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    path = tmp_path_factory.mktemp("models") / "reader"
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return give_words(path)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    drawn = torch.randint(0, WORDS, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    path = tmp_path_factory.mktemp("texts") / "book.txt"
    path.write_text("\n".join(f"w{i}" for i in drawn), encoding="utf-8")
    return path


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb that must not be called."""
    monkeypatch.setattr(verb, "probe", lambda *_, **__: pytest.fail("work was begun"))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the verb is called with; it then does what it always does."""
    calls: list[dict[str, Any]] = []
    real = verb.probe

    def probe(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return real(*arguments, **options)

    monkeypatch.setattr(verb, "probe", probe)
    return calls


def test_tables(run: Run, reader: Path, text: Path) -> None:
    result = run("probe", reader, "--text", text, "--length", 32)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("reader\npath ")
    assert "384 in 12 windows of 32" in result.out
    for section in ("Sphere", "Kernel", "Curve and rank", "Heads"):
        assert re.search(rf"^{section}\b", result.out, re.MULTILINE)
    # The prediction holds in a model with random weights: five LayerNorms, one null direction each.
    assert len(re.findall(r" 1\.000000 .* 1 of 1  unique\n", result.out)) == 5


def test_json_is_one_document(run: Run, reader: Path, text: Path) -> None:
    result = run("probe", reader, "--text", text, "--length", 32, "--json")
    assert (result.code, result.err) == (0, "")
    document = strict(result.out)
    assert list(document) == [field.name for field in fields(verb.ProbeReport)]
    assert list(document["norms"][0]) == [field.name for field in fields(NormStates)]
    assert list(document["norms"][0]["kernel"]) == [field.name for field in fields(Kernel)]
    assert list(document["heads"][0]) == [field.name for field in fields(HeadStates)]


def test_a_page_too(run: Run, reader: Path, text: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("probe", reader, "--text", text, "--length", 32, "--html", page, "--json")
    assert (result.code, result.err) == (0, f"wrote page {page}\n")
    assert strict(result.out)["tokens"] == 384
    assert "<h1>reader</h1>" in page.read_text(encoding="utf-8")


def test_options_reach_the_verb(run: Run, reader: Path, text: Path, called: list[dict[str, Any]]) -> None:
    options = ("--length", 16, "--rows", 2, "--max-tokens", 100, "--samples", 3, "--dtype", "float64", "--json")
    document = strict(run("probe", reader, "--text", text, *options).out)
    # Three batches of 2 x 16 fall short of 100 tokens, four do not; samples are taken whole.
    assert (document["tokens"], document["length"], document["samples"]) == (128, 16, 3)
    assert document["computed_in"] == "float64"
    (call,) = called
    del call["track"]
    assert call == {
        "tokenizer": None,
        "length": 16,
        "rows": 2,
        "tokens": 100,
        "samples": 3,
        "dtype": "float64",
        "device": "cpu",
        "revision": None,
    }


def test_zero_tokens_are_all(run: Run, reader: Path, text: Path, called: list[dict[str, Any]]) -> None:
    assert strict(run("probe", reader, "--text", text, "--max-tokens", 0, "--json").out)["tokens"] == 384
    assert called[0]["tokens"] is None


def test_another_tokenizer(run: Run, saved: Path, reader: Path, text: Path) -> None:
    """A Llama without one: its norms forget nothing."""
    for where in (reader, reader / "tokenizer.json"):
        result = run("probe", saved, "--text", text, "--tokenizer", where, "--length", 32)
        assert (result.code, result.err) == (0, "")
        assert "An RMSNorm forgets no direction: none predicted for 5 norms, 0 found." in result.out


@pytest.fixture(scope="session")
def bad(tmp_path_factory: pytest.TempPathFactory, reader: Path) -> Path:
    """Models, tokenizers and texts that do not do."""
    torch.manual_seed(0)
    tmp = tmp_path_factory.mktemp("bad")
    (tmp / "short.txt").write_text("w1")
    (tmp / "empty.txt").write_text("")
    (tmp / "binary.txt").write_bytes(b"\xff\xfe\x80")
    (tmp / "wide.txt").write_text(" ".join(f"w{i}" for i in range(4 * WORDS)))
    give_words(tmp / "wide", 4 * WORDS)
    closed = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}))
    closed.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    closed.save(str(tmp / "closed.json"))
    Tokenizer(models.BPE()).save(str(tmp / "blank.json"))
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_channels=1,
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp / "vision")
    shutil.copytree(reader, tmp / "damaged")
    tensors = load_file(tmp / "damaged" / "model.safetensors")
    tensors["transformer.h.0.ln_1.weight"][3] = torch.nan
    save_file(tensors, tmp / "damaged" / "model.safetensors", metadata={"format": "pt"})
    return tmp


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{model}"], "Missing option '--text'"),
        (["--text", "{text}"], "Missing argument 'MODEL'"),
        (["{model}", "--text", "{bad}/none.txt"], "none.txt: cannot be read as text"),
        (["{model}", "--text", "{bad}"], "cannot be read as text"),
        (["{model}", "--text", "{bad}/short.txt"], "short.txt is too short: it has 1 token"),
        (["{model}", "--text", "{bad}/empty.txt"], "empty.txt is too short: it has no tokens"),
        (["{model}", "--text", "{bad}/binary.txt"], "binary.txt: cannot be read as text"),
        (["{bad}/none", "--text", "{text}"], "no such file"),
        (["{mute}", "--text", "{text}"], "has no tokenizer"),
        (["{model}", "--text", "{text}", "--tokenizer", "{bad}"], "has no tokenizer"),
        (["{model}", "--text", "{text}", "--tokenizer", "{bad}/none.json"], "none.json does not exist"),
        (["{model}", "--text", "{text}", "--tokenizer", "t" * 5000], "cannot be opened (File name too long)"),
        (["{model}", "--text", "{bad}/wide.txt", "--tokenizer", "{bad}/wide"], "it belongs to another model"),
        (
            ["{model}", "--text", "{text}", "--tokenizer", "{bad}/closed.json"],
            "the tokenizer cannot read it (WordLevel",
        ),
        (["{model}", "--text", "{text}", "--tokenizer", "{bad}/blank.json"], "book.txt is too short: it has no tokens"),
        (["{bad}/vision", "--text", "{text}"], "vit reads no text"),
        (["{bad}/damaged", "--text", "{text}"], "transformer.h.0.ln_1.weight holds NaN"),
        (["{model}", "--text", "{text}", "--length", "1"], "'--length'"),
        (["{model}", "--text", "{text}", "--rows", "0"], "'--rows'"),
        (["{model}", "--text", "{text}", "--samples", "0"], "'--samples'"),
        (["{model}", "--text", "{text}", "--max-tokens", "-1"], "'--max-tokens'"),
        (["{model}", "--text", "{text}", "--rows", "many"], "'--rows'"),
        (["{model}", "--text", "{text}", "--dtype", "int8"], "'int8' is not one of"),
    ],
)
def test_bad_usage(
    run: Run, reader: Path, saved: Path, text: Path, bad: Path, arguments: list[str], words: str
) -> None:
    result = run("probe", *(each.format(model=reader, mute=saved, text=text, bad=bad) for each in arguments))
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(rf"gaugekit: .*{re.escape(words)}.*\n", result.err)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--html", "missing/page.html"), "there is no directory"),
        (("--html", "reader/model.safetensors"), "will not be replaced"),
        (("--device", "abacus"), "--device abacus: not usable here"),
        (("--device", "meta"), "--device meta: not usable here"),
    ],
)
def test_refused_before_any_work(
    run: Run, reader: Path, text: Path, monkeypatch: pytest.MonkeyPatch, idle: None, option: tuple[str, str], words: str
) -> None:
    monkeypatch.chdir(reader.parent)
    result = run("probe", reader, "--text", text, *option)
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(rf"gaugekit: .*{re.escape(words)}.*\n", result.err)


def test_no_page_is_left_behind_by_an_error(run: Run, saved: Path, text: Path, tmp_path: Path) -> None:
    assert run("probe", saved, "--text", text, "--html", tmp_path / "page.html").code == 2
    assert not list(tmp_path.iterdir())


def test_unexpected_errors_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(verb, "probe", probe)
    result = run("probe", "x", "--text", "y")
    assert (result.code, result.out) == (INTERNAL, "")
    assert result.err == "gaugekit: internal error: ZeroDivisionError: boom; run again with --debug to see where\n"
    assert run("probe", "x", "--text", "y", "--debug").err.startswith("Traceback")


def test_help_is_quick_and_names_every_option(run: Run) -> None:
    text = run("probe", "--help").out
    for option in (
        *("--text", "--tokenizer", "--length", "--rows", "--max-tokens", "--samples", "--dtype", "--device"),
        *("--revision", "--json", "--html", "--debug"),
    ):
        assert option in text
    assert "[@revision]" in " ".join(text.split())
    assert "Exit codes: 0 done" in text
    assert heavy_for_help("probe") == ""


def test_choices_and_defaults_are_those_of_the_verb() -> None:
    assert get_args(command.Precision) == get_args(verb.Precision)
    here, there = (inspect.signature(each).parameters for each in (command.probe, verb.probe))
    for name in ("length", "rows", "samples", "dtype", "device", "revision", "tokenizer"):
        assert here[name].default == there[name].default
    assert here["max_tokens"].default == there["tokens"].default


def test_the_library_has_it_too() -> None:
    assert gaugekit.probe is verb.probe
    assert gaugekit.ProbeReport is verb.ProbeReport
