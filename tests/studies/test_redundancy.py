"""The census of architectures: the configs are the public ones, the counts those of the rules and of formulas."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gaugekit.studies.architectures import ARCHITECTURES
from gaugekit.studies.files import write
from gaugekit.studies.redundancy import PLACES, STUDY, census
from gaugekit.studies.running import run
from gaugekit.studies.study import Result
from gaugekit.verbs.inspect import inspect

BY_NAME = {each.name: each for each in ARCHITECTURES}


def plainly(items: Iterable[Any], total: int | None, what: str) -> Iterable[Any]:
    return items


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(STUDY, out=tmp_path_factory.mktemp("census"), track=plainly)


def test_thirty_architectures_of_the_published_sizes(result: Result) -> None:
    """The model that `transformers` makes of each config has as many parameters as the public one."""
    assert len(ARCHITECTURES) == 30 == len({each.parameters for each in ARCHITECTURES})
    counted = {each.arm.name: each.runs[0]["parameters"] for each in result.arms}
    assert counted == {each.name: each.parameters for each in ARCHITECTURES}
    assert len({each.config["model_type"] for each in ARCHITECTURES}) >= 15


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
def test_counts_are_those_of_inspect(architecture: Any, result: Result, tmp_path: Path) -> None:
    """`gaugekit inspect` reads the config alone, this study the names and shapes of a living model."""
    (tmp_path / "config.json").write_text(json.dumps(dict(architecture.config)))
    report = inspect(tmp_path / "config.json", spectra=False)
    found = result[architecture.name].runs[0]
    assert (found["redundant"], found["observable"]) == (report.redundancy, report.observable)
    assert sum(found["places"].values()) == found["redundant"]
    assert set(found["places"]) == set(PLACES)
    # What only a living model has, a pooler or a classifier, is dead.
    assert found["parameters"] - found["dead"] == report.parameters - report.dead_parameters


def test_gpt2(result: Result) -> None:
    """1,347,352, of which QK and VO 1,179,648: a head of dimension 64 has 64² of each."""
    found = result["GPT-2 124M"].runs[0]
    assert (found["redundant"], found["places"]["qk"], found["places"]["vo"]) == (1_347_352, 144 * 4096, 144 * 4096)
    assert found["share"] == pytest.approx(0.010827, rel=1e-4)
    assert found["attention"] == 12 * (4 * 768 * 768 + 4 * 768)
    assert found["attention_share"] == pytest.approx(2 * 144 * 4096 / found["attention"])
    assert found["dead"] == 0


@pytest.mark.parametrize(
    ("name", "d", "units", "layers", "kv_heads", "k", "tied"),
    [
        ("Llama 2 7B", 4096, 11008, 32, 32, 128, False),
        ("Llama 3 70B", 8192, 28672, 80, 8, 128, False),
        ("SmolLM2 135M", 576, 1536, 30, 3, 64, True),
    ],
)
def test_llamas_by_hand(
    result: Result, name: str, d: int, units: int, layers: int, kv_heads: int, k: int, tied: bool
) -> None:
    expected = {
        "vo": layers * kv_heads * k * k,
        "qk": layers * kv_heads * k,  # a scale and a phase for each of k/2 rotary pairs
        "units": layers * units,
        "norms": 2 * layers * d + (0 if tied else d),  # a tied head does not take up the last one
        "frame": 0 if tied else d * (d - 1) // 2,
        "head": 0 if tied else d,
        "shifts": 0,
    }
    assert result[name].runs[0]["places"] == expected


def test_a_head_is_told_apart_from_other_shifts() -> None:
    """Pythia: an untied head under a LayerNorm with a bias takes up d and one a token, less the one they share."""
    found = census(dict(BY_NAME["Pythia 160M"].config))["places"]
    assert found["head"] > 0 and found["shifts"] > found["head"]
    tied = census({**BY_NAME["Pythia 160M"].config, "tie_word_embeddings": True})["places"]
    assert tied["head"] < found["head"]


def test_a_wrong_config_is_noticed() -> None:
    """The check of parameters sees a change of any size; heads are seen by the census alone."""
    config = dict(BY_NAME["Llama 2 7B"].config)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads"):
        changed = census({**config, key: config[key] // 2})
        assert changed["parameters"] != BY_NAME["Llama 2 7B"].parameters, key


# --- the verdict --------------------------------------------------------------------------------------------


def with_shares(result: Result, shares: list[float]) -> Result:
    arms = tuple(
        replace(each, runs=({**each.runs[0], "share": share},)) for each, share in zip(result.arms, shares, strict=True)
    )
    return replace(result, arms=arms)


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ([0.2] * 16 + [0.001] * 14, "confirmed"),
        ([0.1] * 30, "confirmed"),
        ([0.2] * 14 + [0.001] * 16, "inconclusive"),
        ([0.099] * 30, "inconclusive"),
        ([0.05] + [0.001] * 29, "inconclusive"),
        ([0.0499] * 30, "not confirmed"),
    ],
)
def test_every_verdict_is_possible(result: Result, shares: list[float], verdict: str) -> None:
    conclusion = STUDY.conclude(with_shares(result, shares))
    assert conclusion.verdict == verdict
    assert f"{100 * max(shares):.2f} %" in conclusion.line


def test_tables_and_figure(result: Result, tmp_path: Path) -> None:
    conclusion = STUDY.conclude(result)
    totals, places = conclusion.tables
    assert len(totals.rows) == len(places.rows) == 30
    assert ("GPT-2 124M", "124,439,808", "1,347,352", "1.08 %", "4.16 %") in totals.rows
    shares = [float(row[3].split()[0]) for row in totals.rows]
    assert shares == sorted(shares, reverse=True)
    assert all(math.isclose(sum(float(c) for c in row[1:] if c[0].isdigit()), 100, abs_tol=3) for row in places.rows)
    document, picture = write(STUDY, result, tmp_path)
    assert document.stat().st_size < 150_000 > picture.stat().st_size / 2
