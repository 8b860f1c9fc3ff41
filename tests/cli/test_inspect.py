"""What `gaugekit inspect` prints, and where."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

import gaugekit.verbs.inspect as verb
from gaugekit.cli import inspect as command
from gaugekit.cli import options
from gaugekit.strict import strict_json
from gaugekit.symmetry import Observable


def strict(text: str) -> dict[str, Any]:
    """One JSON document and a newline, without NaN."""
    assert text.endswith("}\n")
    return json.loads(text, parse_constant=pytest.fail)


def test_json_is_one_document_with_the_keys_of_the_contract(run: Callable[..., Any], checkpoint: Path) -> None:
    result = run("inspect", checkpoint, "--json")
    assert (result.code, result.err) == (0, "")
    document = strict(result.out)
    assert list(document) == [
        "model",
        "observable",
        "parameters",
        "redundancy",
        "dead",
        "discrete",
        "at_zero_eps",
        "blocked",
        "heads",
        "norms",
    ]
    assert document["model"]["path"] == str(checkpoint)
    assert document == json.loads(json.dumps(verb.inspect(checkpoint).to_dict()))
    assert document["redundancy"]["total"] == sum(row["dimension"] for row in document["redundancy"]["by_symmetry"])
    assert len(document["heads"]) == 2 * 2 * 2
    assert len(document["norms"]) == 5


def test_tables_are_the_default(run: Callable[..., Any], checkpoint: Path) -> None:
    result = run("inspect", checkpoint)
    assert (result.code, result.err) == (0, "")
    assert re.search(r"^redundant dimensions [\d,]+ of [\d,]+ parameters \([\d.]+ %\)$", result.out, re.MULTILINE)
    assert "value-output basis" in result.out
    assert not re.search(r"[ \t]$", result.out, re.MULTILINE)
    assert "\x1b" not in result.out


def test_no_spectra(run: Callable[..., Any], checkpoint: Path) -> None:
    document = strict(run("inspect", checkpoint, "--json", "--no-spectra").out)
    assert (document["heads"], document["norms"]) == ([], [])
    assert document["redundancy"] == strict(run("inspect", checkpoint, "--json").out)["redundancy"]
    assert "Spectra were not computed" in run("inspect", checkpoint, "--no-spectra").out


def test_observable(run: Callable[..., Any], checkpoint: Path) -> None:
    hidden = strict(run("inspect", checkpoint, "--json", "--no-spectra", "--observable", "hidden").out)
    default = strict(run("inspect", checkpoint, "--json", "--no-spectra").out)
    assert (hidden["observable"], default["observable"]) == ("hidden", "logprobs")
    assert hidden["dead"]["total"] == 48 * 16  # the unembedding
    assert default["dead"]["total"] == 0


def test_dtype_rounds_first(run: Callable[..., Any], checkpoint: Path) -> None:
    heads = [
        strict(run("inspect", checkpoint, "--json", "--dtype", dtype).out)["heads"][0]["spectrum"]
        for dtype in ("stored", "float32", "bfloat16")
    ]
    assert heads[0] == heads[1]
    assert heads[2] != heads[0]
    assert heads[2] == pytest.approx(heads[0], rel=0.05)


def test_json_and_page_together(run: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("inspect", checkpoint, "--json", "--html", page)
    assert result.code == 0
    strict(result.out)
    assert result.err == f"wrote page {page}\n"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_page_is_there_before_anything_is_printed(
    run: Callable[..., Any], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    result = run("inspect", checkpoint, "--json", "--html", tmp_path / "page.html")
    assert (result.code, result.out) == (2, "")
    assert result.err == f"gaugekit: {tmp_path / 'page.html'}: cannot be written (No space left on device)\n"
    assert not list(tmp_path.glob("*.html")) + list(tmp_path.glob(".*"))


def test_a_path_is_not_markup(run: Callable[..., Any], checkpoint: Path) -> None:
    renamed = checkpoint.rename(checkpoint.with_name("[bold]tiny"))
    assert run("inspect", renamed).out.startswith("[bold]tiny\n")
    result = run("inspect", renamed.with_name("[red]missing"))
    assert result.err.startswith(f"gaugekit: {renamed.parent}/[red]missing: ")


def test_infinities_become_null() -> None:
    document = {"a": (1.0, float("inf")), "b": [{"c": float("nan")}], "d": "NaN", "e": True}
    text = strict_json(document)
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [1.0, None], "b": [{"c": None}], "d": "NaN", "e": True}


def test_choices_are_those_of_the_verb() -> None:
    assert get_args(options.ObservableName) == get_args(Observable)
    assert get_args(command.Precision) == get_args(verb.Precision)
