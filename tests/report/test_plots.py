"""What the plots are given to draw."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np

from gaugekit.report.heads import head_sets
from gaugekit.report.plots import census, heads, norms
from gaugekit.report.plots.base import bar, dot, thinned
from gaugekit.verbs.inspect import InspectReport


def unpacked(packed: dict[str, str]) -> np.ndarray:
    shape = [int(n) for n in packed["shape"].split(",")]
    return np.frombuffer(base64.b64decode(packed["bdata"]), dtype=packed["dtype"]).reshape(shape)


def test_census_has_a_bar_for_each_symmetry(report: InspectReport) -> None:
    figure = census.census(report)
    assert [(trace["y"], trace["x"]) for trace in figure.data] == [
        (["value-output basis"], [454_000]),
        (["head constant *"], [1_040]),
    ]
    assert "star" in figure.caption
    assert figure.data[1]["customdata"] == [["R^1040", "exact in logprobs", " (<0.001 % of all parameters)"]]


def test_layers_end_outside_and_keep_the_colours_of_the_census(report: InspectReport) -> None:
    figure = census.layers(report)
    assert figure.data[0]["y"] == ["0", "1", "outside layers"]
    assert [trace["x"] for trace in figure.data] == [[227_000, 227_000, None], [None, None, 1_040]]
    bars = census.census(report).data
    assert [trace["marker"] for trace in figure.data] == [trace["marker"] for trace in bars]
    assert [key.name for key in figure.legend] == ["value-output basis", "head constant"]


def test_28_series_look_different() -> None:
    assert len({(each.colour, each.pattern) for each in (bar("", i) for i in range(28))}) == 28
    assert len({(each.colour, each.symbol) for each in (dot("", i) for i in range(28))}) == 28


def test_ranks_are_by_layer_and_head_on_one_scale(report: InspectReport) -> None:
    qk, vo = heads.ranks(head_sets(report)[0], 0)
    assert qk.data[0]["z"] == [[2.5, 2.5], [3.5, 0.0]]
    assert vo.data[0]["z"] == [[2.5, 2.5], [3.5, 3.5]]
    assert (qk.data[0]["zmin"], qk.data[0]["zmax"]) == (vo.data[0]["zmin"], vo.data[0]["zmax"]) == (0.0, 3.5)
    assert (qk.data[0]["y"], qk.data[0]["x"]) == (["0", "1"], ["0", "1"])
    assert qk.data[0]["customdata"][1][1] == [0, 4, 0.0]


def test_a_layer_with_fewer_heads_leaves_cells_empty(report: InspectReport) -> None:
    rows = tuple(row for row in report.heads if (row.layer, row.kv_head) != (0, 1))
    qk, _ = heads.ranks(head_sets(replace(report, heads=rows))[0], 0)
    assert qk.data[0]["z"][0] == [2.5, None]
    assert qk.data[0]["customdata"][0][1] is None


def test_spectra_are_powers_of_ten_below_the_largest(report: InspectReport) -> None:
    qk, vo = heads.spectra(head_sets(report)[0], 0)
    assert qk.data[0]["y"] == ["0.0", "0.1", "1.0", "1.1"]
    log = unpacked(qk.data[0]["z"])
    np.testing.assert_allclose(log[0], np.log10([1, 1 / 2, 1 / 4, 1 / 8]), rtol=1e-6)
    assert np.isnan(log[3]).all()  # the head of zeros has no largest
    assert unpacked(qk.data[0]["customdata"])[3].tolist() == [0.0] * 4
    assert "Empty cells" in qk.caption
    assert "Empty cells" not in vo.caption


def test_all_heads_of_zeros_can_be_drawn(report: InspectReport) -> None:
    rows = tuple(replace(row, spectrum=(0.0, 0.0), effective_rank=0.0) for row in report.heads)
    each = head_sets(replace(report, heads=rows))[0]
    assert heads.spectra(each, 0)[0].data[0]["zmin"] == -1
    assert heads.ranks(each, 0)[0].data[0]["zmax"] > 0


def test_spectra_of_different_lengths_and_tiny_values(report: InspectReport) -> None:
    short, tiny, *others = report.heads
    rows = (replace(short, spectrum=(3.0,)), replace(tiny, spectrum=(1.0, 1e-30)), *others)
    qk, vo = heads.spectra(head_sets(replace(report, heads=rows))[0], 0)
    assert np.isnan(unpacked(qk.data[0]["z"])[0]).tolist() == [False, True, True, True]
    assert qk.data[0]["zmin"] == vo.data[0]["zmin"] == heads.FLOOR


def test_balance_and_norms_show_every_value(report: InspectReport) -> None:
    figure = heads.balance(head_sets(report)[0], 0)
    assert [len(trace["y"]) for trace in figure.data] == [4, 4]
    spread = norms.norms(report)
    assert [key.name for key in spread.legend] == ["model.layers.*.input_layernorm", "model.norm"]
    first: dict[str, Any] = spread.data[0]
    assert first["x"] == [0, 1]
    assert (first["error_y"]["array"], first["error_y"]["arrayminus"]) == ([1.0, 1.0], [1.25, 1.25])
    assert (spread.layout["xaxis"]["tickvals"], spread.layout["xaxis"]["ticktext"]) == ([0, 1], ["0", "1"])


def test_names_are_no_html_to_plotly(hostile: InspectReport) -> None:
    for figure in (census.census(hostile), census.layers(hostile), norms.norms(hostile)):
        assert "&lt;script&gt;" in json.dumps(figure.data)
        assert "<script>" not in json.dumps(figure.data)


def test_thinned() -> None:
    assert thinned([]) == []
    assert thinned([1, 2]) == [1, 2]
    assert thinned(list(range(80))) == [0, 7, 14, 21, 28, 35, 42, 49, 56, 63, 70, 77]
