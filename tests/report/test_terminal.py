"""The tables."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gaugekit.report.terminal import render
from gaugekit.report.text import total
from gaugekit.verbs.inspect import InspectReport


def printed(report: InspectReport, width: int = 80, terminal: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=terminal, highlight=False, legacy_windows=False).print(
        render(report)
    )
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_fits_and_holds_the_total(report: InspectReport, width: int) -> None:
    text = printed(report, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert total(report) in text.splitlines()


def test_every_section_is_there(report: InspectReport) -> None:
    text = printed(report, 120)
    for expected in (
        "tiny [bold]llama",  # brackets of a path are no markup
        "value-output basis  (GL(4)^2)^2    454,000  0.338 %  exact                   2",
        "norm input scale",
        "dead parameters 1,024 of 134,515,008",
        "unit order",
        "rotary positions turn every dimension of the keys",
    ):
        assert expected in text


def test_heads_are_summed_up_by_layer(report: InspectReport) -> None:
    lines = [line.split() for line in printed(report).splitlines()]
    # Layer, then for QK and for VO: mean effective rank, range of stable rank, mean relative defect; ties.
    assert ["0", "2.5", "1.5..2.5", "0.250", "2.5", "1.5..2.5", "0.250", "1"] in lines
    assert ["1", "1.8", "0.0..1.5", "0.250", "3.5", "1.5..2.5", "0.250", "1"] in lines


def test_each_kind_of_attention_has_a_table(two_streams: InspectReport) -> None:
    text = printed(two_streams)
    for title in ("encoder self-attention", "decoder self-attention", "decoder cross-attention"):
        assert text.count(f"Heads: {title}") == 1
    assert "encoder 3 x 1,024, decoder 2 x 1,024" in text


def test_headers_only_says_so(headers_only: InspectReport) -> None:
    text = printed(headers_only)
    assert "Spectra were not computed" in text
    assert "stable" not in text


def test_colours_on_a_terminal_only(report: InspectReport) -> None:
    assert "\x1b" not in printed(report)
    assert "\x1b" in printed(report, terminal=True)


def test_names_cannot_command_the_terminal(hostile: InspectReport) -> None:
    text = printed(hostile, 200)
    assert "\x1b" not in text
    assert "[bold]" in text
