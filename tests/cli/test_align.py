"""align from the command line."""

from __future__ import annotations

import json
import re
import shutil
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
from on_disk import WEIGHTS, edited, letters, reconfigured, tokenizer
from safetensors.torch import load_file

from gaugekit.cli import align as command
from gaugekit.cli.common import NOT_EQUIVALENT
from gaugekit.verbs.aligning import Cost
from gaugekit.verbs.mates import Allowed

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a disguise of it, another one, one of another family, and a text in letters that they read."""
    folder = tmp_path_factory.mktemp("models")
    config: dict[str, Any] = {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }
    for seed, name in enumerate(("a", "other")):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).save_pretrained(folder / name)
        tokenizer(24).save_pretrained(folder / name)
    shape: dict[str, Any] = {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=24, **shape)).save_pretrained(folder / "stranger")
    import_module("gaugekit.verbs.scramble").scramble(folder / "a", folder / "b", seed=1)
    letters(folder / "text.txt", 24, 1200)
    return folder


KEYS = [
    "reference",
    "source",
    "out",
    "observable",
    "cost",
    "allowed",
    "before",
    "after",
    "places",
    "sweeps",
    "left",
    "refined",
    "tensors",
    "bytes",
    "written",
    "verify",
]


def test_a_disguise(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("align", folder / "a", folder / "b", tmp_path / "c")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("c\n")
    assert re.search(r"^ *layer 1 +\d\.\d{3} +\d\.\de-0[5-8]$", result.out, re.MULTILINE)
    assert re.search(
        r"^distance \d\.\d{3} before, \d\.\de-0[5-8] after; 1 sweep; .* on disk$", result.out, re.MULTILINE
    )
    assert "\nequivalent  log-probabilities differ by at most " in result.out
    assert "Not aligned" not in result.out and "loss of the mean" not in result.out
    first, second = load_file(folder / "a" / WEIGHTS), load_file(tmp_path / "c" / WEIGHTS)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=1e-5)
    card = (tmp_path / "c" / "README.md").read_text(encoding="utf-8")
    assert "Measured by `gaugekit verify`" in card
    assert "Verified" in result.out
    assert "Verified" not in run("align", folder / "a", folder / "b", tmp_path / "d", "--no-verify").out
    assert "Measured" not in (tmp_path / "d" / "README.md").read_text(encoding="utf-8")


def test_json_is_one_document_with_the_keys_of_the_contract(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("align", folder / "a", folder / "other", tmp_path / "c", "--json")
    assert (result.code, result.err) == (0, "")
    document = strict(result.out)
    assert list(document) == KEYS
    assert document["written"] and document["verify"]["equivalent"] and document["after"] > 0.1
    assert set(document["places"][0]) == {"where", "before", "after"}
    assert (document["refined"], document["left"]) == (None, [])
    text = (Path(__file__).parents[2] / "docs" / "align.md").read_text(encoding="utf-8")
    assert all(re.search(rf"\b{key}\b", text) for key in document), "docs/align.md lacks a key"
    bare = strict(run("align", folder / "a", folder / "other", tmp_path / "d", "--json", "--no-verify").out)
    assert bare["verify"] is None
    without = ("out", "verify")
    assert {k: v for k, v in bare.items() if k not in without} == {
        k: v for k, v in document.items() if k not in without
    }


def test_what_is_not_a_number_in_json(run: Run, folder: Path, tmp_path: Path) -> None:
    """A distance to weights that are all zero has no relative size."""
    zero = shutil.copytree(folder / "a", tmp_path / "zero")
    edited(zero, lambda tensors: tensors["lm_head.weight"].zero_())
    result = run("align", zero, folder / "a", tmp_path / "c", "--json")
    assert (result.code, result.err) == (0, "")
    head = next(place for place in strict(result.out)["places"] if place["where"] == "lm_head.weight")
    assert head["before"] is None
    page = tmp_path / "page.html"
    assert run("align", zero, folder / "a", tmp_path / "d", "--html", page).code == 0
    found = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', page.read_text("utf-8"), re.DOTALL
    )
    assert found is not None
    json.loads(found[1], parse_constant=pytest.fail)


@pytest.mark.parametrize(
    "options",
    [
        ["--cost", "activations"],
        ["--refine", "3"],
        ["--cost", "activations", "--refine", "3"],
        ["--allow", "permutations"],
    ],
    ids=" ".join,
)
def test_other_ways(run: Run, folder: Path, tmp_path: Path, options: list[str]) -> None:
    text = ["--text", str(folder / "text.txt")] if "--allow" not in options else []
    document = strict(run("align", folder / "a", folder / "other", tmp_path / "c", *options, *text, "--json").out)
    assert document["verify"]["equivalent"]
    assert document["cost"] == ("activations" if "activations" in options else "weights")
    assert document["allowed"] == ("permutations" if "permutations" in options else "all")
    assert (document["refined"] is not None) == ("--refine" in options)
    card = (tmp_path / "c" / "README.md").read_text(encoding="utf-8")
    assert f"--cost {document['cost']} --allow {document['allowed']}" in card
    if "--refine" in options:
        result = run("align", folder / "a", folder / "other", tmp_path / "d", *options, *text)
        before, after = document["refined"]
        line = f"loss of the mean of both: {before:.4f} nats a token before refinement, {after:.4f} after"
        assert line in " ".join(result.out.split())


def test_a_dry_run_writes_nothing(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("align", folder / "a", folder / "other", tmp_path / "c", "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert "dry run: nothing was written\n" in result.out and "Verified" not in result.out
    dry = strict(run("align", folder / "a", folder / "other", tmp_path / "c", "--dry-run", "--json").out)
    assert (dry["written"], dry["verify"]) == (False, None)
    assert not list(tmp_path.iterdir())
    wet = strict(run("align", folder / "a", folder / "other", tmp_path / "c", "--json").out)
    assert dry | {"written": True, "verify": wet["verify"]} == wet


def test_the_sources_card_stays_byte_by_byte(run: Run, folder: Path, tmp_path: Path) -> None:
    """mergekit#469: files are copied verbatim, also those in another encoding than ours."""
    source, own = shutil.copytree(folder / "b", tmp_path / "b"), b"caf\xe9\r\nline\r\n"
    (source / "README.md").write_bytes(own)
    result = run("align", folder / "a", source, tmp_path / "out")
    assert (result.code, result.err) == (0, "")
    card = (tmp_path / "out" / "README.md").read_bytes()
    assert card.endswith(b"\n\n" + own) and b"\nMeasured by `gaugekit verify`: the logprobs of the two" in card


def test_dtype_and_shards(run: Run, folder: Path, tmp_path: Path) -> None:
    options = ("--dtype", "bfloat16", "--max-shard-size", "3kB")
    assert run("align", folder / "a", folder / "b", tmp_path / "c", *options).code == 0
    files = sorted((tmp_path / "c").glob("*.safetensors"))
    assert len(files) > 1
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {torch.bfloat16}


def test_the_page(run: Run, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("align", folder / "a", folder / "b", tmp_path / "c", "--html", page)
    assert (result.code, result.err) == (0, f"wrote page {page}\n")
    text = page.read_text(encoding="utf-8")
    assert "<h1>b, in the coordinates of a</h1>" in text
    # Also of a dry run.
    assert (
        run("align", folder / "a", folder / "b", tmp_path / "d", "--dry-run", "--html", page, "--overwrite").code == 0
    )
    assert not (tmp_path / "d").exists()


def test_verify_can_fail(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verb = import_module("gaugekit.verbs.verify")
    monkeypatch.setattr(verb, "FLOOR", 0.0)
    monkeypatch.setattr(verb, "ROUNDING_ROOM", 0.0)
    result = run("align", folder / "a", folder / "b", tmp_path / "c")
    assert (result.code, result.err) == (NOT_EQUIVALENT, "")
    assert "\nnot equivalent  " in result.out
    assert (tmp_path / "c" / WEIGHTS).exists()


def test_out_exists(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "c"
    assert run("align", folder / "a", folder / "b", out).code == 0
    before = (out / WEIGHTS).stat().st_ino
    result = run("align", folder / "a", folder / "b", out)
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(r"gaugekit: .*/c: exists already; .*\n", result.err)
    assert (out / WEIGHTS).stat().st_ino == before
    assert run("align", folder / "a", folder / "b", out, "--overwrite").code == 0
    assert (out / WEIGHTS).stat().st_ino != before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{a}", "{b}"], "Missing argument 'OUT'"),
        (["{a}", "{folder}/none", "{out}"], "no such file"),
        (["{a}", "{folder}/stranger", "{out}"], "different families: llama and gpt2"),
        (["{a}", "{bad}", "{out}"], "holds NaN or infinite numbers"),
        (["{bad}", "{b}", "{out}"], "holds NaN or infinite numbers"),
        (["{a}", "{rope}", "{out}"], "different rotary positions"),
        (["{a}", "{tied}", "{out}"], "different ties: False and True"),
        (["{a}", "{words}", "{out}"], "different vocabularies: token 'a' is 0 and 1"),
        (["{a}", "{b}", "{a}", "--overwrite"], "to which the other is moved"),
        (["{a}", "{b}", "{b}"], "is the source itself"),
        (["{a}", "{b}", "{missing}/out"], "there is no directory"),
        (["{a}", "{b}", "{out}", "--refine", "2"], "--refine learns from a text: name one by --text"),
        (["{a}", "{b}", "{out}", "--cost", "activations"], "name one by --text"),
        (["{a}", "{b}", "{out}", "--text", "{folder}/text.txt"], "leave it out, or ask for these"),
        (["{a}", "{b}", "{out}", "--refine", "2", "--text", "{folder}/none"], "cannot be read as text"),
        (["{a}", "{b}", "{out}", "--refine", "-1", "--text", "{folder}/text.txt"], "'--refine'"),
        (["{a}", "{b}", "{out}", "--cost", "lengths"], "'lengths' is not one of"),
        (["{a}", "{b}", "{out}", "--allow", "some"], "'some' is not one of"),
        (
            ["{a}", "{b}", "{out}", "--allow", "permutations", "--refine", "2", "--text", "{folder}/text.txt"],
            "permutations alone are found by weights, and not refined",
        ),
        (["{a}", "{b}", "{out}", "--observable", "looks"], "'looks' is not one of"),
        (["{a}", "{b}", "{out}", "--dtype", "int8"], "'int8' is not one of"),
        (["{a}", "{b}", "{out}", "--max-shard-size", "big"], "'big' is no size"),
        (["{a}", "{b}", "{out}", "--html", "{missing}/page.html"], "there is no directory"),
    ],
)
def test_bad_usage(
    run: Run, folder: Path, broken: dict[str, Path], tmp_path: Path, arguments: list[str], words: str
) -> None:
    names = {"folder": folder, "a": folder / "a", "b": folder / "b", "out": tmp_path / "out"}
    names |= {"missing": tmp_path / "no"} | broken
    result = run("align", *(each.format(**names) for each in arguments))
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(rf"gaugekit: .*{re.escape(words)}.*\n", result.err)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="session")
def broken(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of the model: with NaN, with other positions, tied, and with two tokens exchanged."""
    place = tmp_path_factory.mktemp("broken")
    found = {name: shutil.copytree(folder / "a", place / name) for name in ("bad", "rope", "tied", "words")}
    edited(found["bad"], lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[5].fill_(torch.nan))
    reconfigured(found["rope"], rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    reconfigured(found["tied"], tie_word_embeddings=True)
    vocabulary = found["words"] / "tokenizer.json"
    document = json.loads(vocabulary.read_text())
    document["model"]["vocab"] |= {"a": 1, "b": 0}
    vocabulary.write_text(json.dumps(document))
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send here")
def test_an_interrupt_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    running = Stopped("gaugekit.checkpoint.writer", "_store", "align", folder / "a", folder / "b", tmp_path / "c")
    assert [path.name.startswith(".c.partial-") for path in tmp_path.iterdir()] == [True]
    assert running.by(signal.SIGINT) == (130, "gaugekit: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_help_is_quick(run: Run) -> None:
    text = " ".join(run("align", "--help").out.split())
    for option in ("--cost", "--allow", "--text", "--refine", "--no-verify"):
        assert option in text
    assert heavy_for_help("align") == ""


def test_choices_are_those_of_the_verb() -> None:
    assert get_args(command.Cost) == get_args(Cost)
    assert get_args(command.Allowed) == get_args(Allowed)
