"""Words and numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gaugekit.report.text import facts, layer_label, model_name, plain, plural, share, shorten, total
from gaugekit.verbs.inspect import InspectReport


def test_total_has_thousands_and_a_percentage(report: InspectReport) -> None:
    assert total(report) == "redundant dimensions 455,040 of 134,515,008 parameters (0.338 %)"


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0.0, "0 %"), (1e-9, "<0.001 %"), (0.003382, "0.338 %"), (0.12345, "12.3 %"), (0.9999, "100 %"), (1.0, "100 %")],
)
def test_share(fraction: float, text: str) -> None:
    assert share(fraction) == text


@pytest.mark.parametrize(("number", "text"), [(1, "1 head"), (2, "2 heads"), (1000, "1,000 heads")])
def test_plural(number: int, text: str) -> None:
    assert plural(number, "head") == text


@pytest.mark.parametrize(
    ("group", "limit", "text"),
    [
        ("(GL(64)^3)^30", 44, "(GL(64)^3)^30"),
        ("(R^384)^6 x R^12 x (R^1536)^6 x R^30521 x R^512", 44, "(R^384)^6 x R^12 x (R^1536)^6 x … 2 more"),
        ("(R^2 x R^3)^4 x R^5 x R^678", 24, "(R^2 x R^3)^4 x … 2 more"),
        ("(R^2 x R^3 x R^4)^9 x R^5", 24, "(R^2 x R^3 x…^4)^9 x R^5"),
        ("S_" + "3" * 60, 11, "S_333…33333"),
    ],
)
def test_long_groups_end_at_a_factor_if_they_can(group: str, limit: int, text: str) -> None:
    assert shorten(group, limit) == text
    assert len(text) <= limit


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/cache/models--org--some-name/snapshots/0123abc", "org/some-name"),
        ("/models/tiny.gguf", "tiny.gguf"),
        ("/models/tiny", "tiny"),
        ("/packages/tiny/model", "tiny/model"),
    ],
)
def test_model_name(report: InspectReport, path: str, name: str) -> None:
    assert model_name(replace(report, model=report.model | {"path": path})) == name


def test_the_current_directory_has_a_name(
    report: InspectReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_name(replace(report, model=report.model | {"path": "."})) == tmp_path.name


def test_facts_name_key_value_heads_only_where_they_differ(report: InspectReport) -> None:
    assert dict(facts(report))["shape"] == "2 layers, d_model 1,024, 4 heads on 2 key/value heads of dimension 4"
    alike = replace(report, model=report.model | {"kv_heads": 4})
    assert dict(facts(alike))["shape"].endswith("4 heads of dimension 4")


def test_layer_labels() -> None:
    assert [layer_label(each) for each in ("layer 3", "encoder layer 0", "")] == ["3", "encoder 0", "outside layers"]


def test_plain_takes_power_from_control_characters() -> None:
    assert plain("a\x1b[31m\nb\udcff ü") == "a\\x1b[31m\\nb\\udcff ü"
