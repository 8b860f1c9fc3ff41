"""A report of probe, made by hand: no model is read here."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from math import asinh, sinh, tanh
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from gaugekit.report.findings import findings, kernel_words, null_band, times
from gaugekit.report.plots import attending, curves, grams, kernels, sphere
from gaugekit.report.plots.base import log_axis
from gaugekit.report.probe import render
from gaugekit.report.probe_page import render_html, write_html
from gaugekit.verbs.attending import HeadStates
from gaugekit.verbs.moments import Curve, Spectrum, Spread
from gaugekit.verbs.probe import ProbeReport
from gaugekit.verbs.states import Kernel, NormStates

HOSTILE = "</script><script>alert(1)</script><img src='http://evil.test/x.png' onerror=alert(2)>\"\x1b[31m\n[bold]$x$"

UNIQUE = Kernel(1, 4.6e-14, 0.99999994, 0.99999994, 1, 1e-8, (3.8e-14, 0.011, 0.012, 0.013, 0.014))
NOT_UNIQUE = Kernel(1, 2.0e-75, 0.781825, 1.0, 3, 1e-8, (-4.2e-17, 5.2e-17, 1.1e-16, 0.02, 0.03))
FORGETS_NONE = Kernel(0, None, None, None, 0, 1e-8, (0.006, 0.007, 0.008, 0.009))
SLOPE = 4.0  # of the curves at 0


def curve(bend: float = 0.1, points: int = 41, reach: float = 40.0) -> Curve:
    """n̂ = tanh(bend·s)/bend at s = SLOPE·x, denser about 0, with x up to `reach` / SLOPE."""
    scaled = [sinh(asinh(reach) * (2 * k / (points - 1) - 1)) for k in range(points)]
    heights = tuple(tanh(bend * s) / bend for s in scaled)
    return Curve(
        tuple(s / SLOPE for s in scaled),
        heights,
        best=0.98,
        tanh=0.96,
        linear=0.61,
        height=1 / bend,
        scale=SLOPE * bend,
    )


def norm(layer: int | None, place: str, **change: Any) -> NormStates:
    row = NormStates(
        where=f"h.{layer}.ln",
        layer=layer,
        place=place,
        kind="layer",
        width=384,
        tokens=4096,
        radius=Spread(0.9871, 0.003, 0.9804, 0.998),
        zero_sum=1.4e-16,
        deviation=2.5e-6,
        angle_before=Spread(85.24, 5.9, 67.0, 100.2),
        angle_normalized=Spread(90.0, 1e-14, 90.0, 90.0),
        angle_after=Spread(89.89, 0.9, 87.7, 92.5),
        null_angle=2.924,
        along_ones_before=0.0125,
        along_ones_after=0.00029,
        null_share=1 / 384,
        kernel=UNIQUE,
        curve=curve(),
        gram_before=Spectrum(256.0, 18.04, (0.38, 0.12, 0.05)),
        gram_after=Spectrum(255.0, 21.71, (0.3, 0.1, 0.0)),
    )
    return replace(row, **change)


def rms(layer: int | None, place: str, **change: Any) -> NormStates:
    return norm(layer, place, **{"kind": "rms", "zero_sum": 0.12, "kernel": FORGETS_NONE} | change)


ENCODER = ProbeReport(
    model="/models/tiny [bold]bert",
    family="bert",
    stream="encoder",
    text="/texts/a book.txt",
    tokens=4096,
    distinct=1234,
    length=256,
    samples=4,
    computed_in="float32",
    norms=(
        norm(None, "embedding", radius=Spread(1.0, 1e-13, 1.0, 1.0)),
        norm(0, "sum with attention"),
        norm(0, "sum with MLP", kernel=NOT_UNIQUE, deviation=8.7e-6, angle_before=Spread(97.5, 2.0, 90.0, 101.0)),
    ),
    heads=(HeadStates(0, (1.5, 3.0), 5.0, (0.0, 0.0625), (0.25, 0.5)),),
)
DECODER = replace(
    ENCODER,
    family="llama",
    stream="decoder",
    norms=(
        *(rms(layer, f"before {body}") for layer in range(30) for body in ("attention", "MLP")),
        rms(None, "final", kernel=replace(FORGETS_NONE, null=2)),
    ),
    heads=tuple(HeadStates(layer, (0.5, 2.0, 1.0), 4.0, (0.0,), (0.0,)) for layer in range(30)),
)
FEW_TOKENS = replace(
    ENCODER,
    norms=(norm(0, "before both", tokens=300, kernel=None, curve=None, along_ones_before=None, along_ones_after=None),),
    heads=(HeadStates(0, (0.0,), 0.0, (0.5,), None),),
)
BARE = replace(ENCODER, norms=(), heads=())
DANGEROUS = replace(
    ENCODER,
    **dict.fromkeys(("model", "family", "stream", "text"), HOSTILE),
    norms=tuple(replace(each, place=HOSTILE, where=HOSTILE) for each in ENCODER.norms),
)
ALL = {"encoder": ENCODER, "decoder": DECODER, "few tokens": FEW_TOKENS, "bare": BARE, "hostile": DANGEROUS}


def printed(report: ProbeReport, width: int = 100, terminal: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, highlight=False, legacy_windows=False)
    console.print(render(report))
    return file.getvalue()


def words(report: ProbeReport) -> str:
    return " ".join(printed(report, 400).split())


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", ["encoder", "decoder", "few tokens", "bare"])
def test_fits_whole_and_plain_when_piped(name: str, width: int) -> None:
    text = printed(ALL[name], width)
    assert max(cell_len(line.rstrip()) for line in text.splitlines()) <= width  # n̂ is two characters and one cell
    assert "…" not in text
    assert "\x1b" not in text
    assert "\x1b" in printed(ALL[name], width, terminal=True)


def test_the_terminal_says_what_counts_as_null() -> None:
    assert "null: eigenvalues below 1.0e-08," in words(ENCODER)
    coarse = tuple(norm(0, "before both", kernel=replace(UNIQUE, threshold=6.1e-5)) for _ in range(2))
    assert "null: eigenvalues below 6.1e-05," in words(replace(ENCODER, computed_in="bfloat16", norms=coarse))


def test_names_cannot_command_the_terminal() -> None:
    text = printed(DANGEROUS, 400)
    assert "\x1b" not in text
    assert "[bold]" in text


def test_the_terminal_says_what_was_run() -> None:
    text = words(ENCODER)
    assert text.startswith("tiny [bold]bert path /models/tiny [bold]bert family bert (encoder) text /texts/a book.txt ")
    assert "tokens 4,096 in 16 windows of 256, 1,234 different ones samples 4 windows for" in text
    assert "run in float32, statistics in float64" in text
    assert "outputs γ ⊙ n̂ + β to 8.7e-06 of their root mean square (layer 0, sum with MLP)" in text


def test_every_norm_and_layer_has_its_numbers() -> None:
    lines = [" ".join(line.split()) for line in printed(ENCODER).splitlines()]
    for expected in (
        "Sphere random vectors: angle to 1 of 90° ± 2.92°, variance 1",
        "embedding 1.000 1.4e-16 85.2 ± 5.9 89.9 ± 0.9 4.800 0.111",
        "0 sum with attention 0.987 (0.980) 1.4e-16 85.2 ± 5.9 89.9 ± 0.9 4.800 0.111",
        "embedding 1.000000 4.6e-14 3.8e-14 0.011 1 of 1 unique",
        "0 sum with attention 0.610 0.960 0.980 18.0 21.7",
        "Curve and rank ranks of at most 256",
        "0 2.25 1.50..3.00 5.00 3.12 6.25 37.50 50.00",
    ):
        assert expected in lines


def test_where_more_is_null_than_predicted_it_is_not_called_unique() -> None:
    text = words(ENCODER)
    assert "0 sum with MLP 0.781825 2.0e-75 -4.2e-17 5.2e-17 3 of 1 not unique; to all null 1.000000" in text
    assert "no eigenvector among them stands out" in text
    assert "fewer different tokens" in text
    without = words(replace(ENCODER, norms=ENCODER.norms[:2]))
    assert "no eigenvector among them stands out" not in without
    assert "fewer different tokens" not in without


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "unique"),
        ({"kernel": NOT_UNIQUE}, "not unique; to all null 1.000000"),
        ({"kernel": replace(UNIQUE, predicted=3, null=1)}, "2 not null"),
        ({"kernel": FORGETS_NONE}, "none"),
        ({"kernel": replace(FORGETS_NONE, null=2)}, "2 not predicted"),
        ({"kernel": None}, "nothing varies"),
        ({"kernel": None, "tokens": 384}, "too few tokens to tell"),
    ],
)
def test_a_kernel_in_words(change: dict[str, Any], expected: str) -> None:
    assert kernel_words(norm(0, "before MLP", **change)) == expected


def test_rms_norms_are_said_to_forget_nothing() -> None:
    text = words(DECODER)
    assert "An RMSNorm forgets no direction: none predicted for 61 norms, 2 found. final: 2 directions null" in text
    assert "cosine" not in text
    some = replace(DECODER, norms=DECODER.norms[:2])
    assert "none predicted for 2 norms, 0 found. Curve and rank" in words(some)


def test_an_rms_norm_with_zeros_has_a_prediction() -> None:
    dead = rms(0, "before MLP", kernel=replace(UNIQUE, predicted=2, null=2, smallest=(0.0, 1e-17, 0.3)))
    text = words(replace(ENCODER, norms=(dead,)))
    assert "0 before MLP 1.000000 4.6e-14 1.0e-17 0.300 2 of 2 unique" in text
    assert "forgets no direction" not in text


def test_half_precision_hides_kernels_and_says_so() -> None:
    half = replace(ENCODER, computed_in="bfloat16")
    sentence = "bfloat16 rounds outputs, which leaves some variance in every direction: float32 shows what is null."
    assert sentence in words(half)
    assert sentence in render_html(half)
    for other in (words(ENCODER), render_html(ENCODER)):
        assert "rounds outputs" not in other


def test_what_is_missing_is_left_out() -> None:
    text = words(FEW_TOKENS)
    assert "1 norm: the covariance of 300 tokens in 384 dimensions has null directions of its own" in text
    assert "0 before both 18.0 21.7" in text  # no curve
    assert "0 before both 0.987 (0.980) 1.4e-16 85.2 ± 5.9 89.9 ± 0.9 x:" in text  # no variance at all
    assert "0 0.00 0.00..0.00 0.00 50.00 50.00 entropy:" in text  # no norm before the keys
    still = replace(FEW_TOKENS, norms=(norm(0, "before both", kernel=None),))
    assert "1 norm: nothing varies." in words(still)


def test_findings_are_computed() -> None:
    found = {finding.words: finding.number for finding in findings(ENCODER)}
    assert list(found.values()) == [
        "0.9804",
        "0 → 3 of 3",
        "4.8× → 0.11×",
        "2 of 3",
        "0.960",
        "18.0 → 21.7",
        "45 %",
        "37.5 % → 3.12 %",
    ]
    assert "within 90° ± 2.92°" in list(found)[1]
    assert "at 1 more directions are null than predicted" in list(found)[3]
    assert "0.610 as c·x, 0.980 as any function" in list(found)[4]
    assert "from 30 % to 60 %" in list(found)[6]


def test_findings_change_with_what_was_found() -> None:
    inside = tuple(replace(each, angle_before=Spread(92.9, 1.0, 90.0, 94.0)) for each in ENCODER.norms)
    assert [each.number for each in findings(replace(ENCODER, norms=inside))][1] == "3 → 3 of 3"
    outside = tuple(replace(each, angle_before=Spread(93.0, 1.0, 90.0, 94.0)) for each in ENCODER.norms)
    assert [each.number for each in findings(replace(ENCODER, norms=outside))][1] == "0 → 3 of 3"
    unlike = replace(ENCODER, norms=(norm(0, "final", kernel=replace(UNIQUE, cosine=0.99)),))
    assert [each.number for each in findings(unlike)][3] == "0 of 1"
    assert [each.number for each in findings(DECODER)][3] == "2"
    few = [each.number for each in findings(FEW_TOKENS)]
    assert few == ["0.9804", "0 → 1 of 1", "– → –", "–", "18.0 → 21.7", "50 %"]
    assert list(findings(BARE)) == []


def test_null_bands_of_different_widths() -> None:
    assert null_band((norm(0, "a"), norm(1, "b", null_angle=2.39))) == "90° ± 2.39°..2.92°"


@pytest.mark.parametrize(
    ("factor", "text"), [(0.0, "0×"), (0.0368, "0.037×"), (4.8, "4.8×"), (214.3, "214×"), (3.12e-30, "3.1e-30×")]
)
def test_times(factor: float, text: str) -> None:
    assert times(factor) == text


def traces(figure: Any) -> dict[str, Any]:
    return {trace["name"]: trace for trace in figure.data}


def test_angles_are_beside_those_of_random_vectors() -> None:
    figure = sphere.angles(ENCODER.norms)
    assert list(traces(figure)) == ["before (x)", "normalized (n̂)", "after (y)"]
    before = traces(figure)["before (x)"]
    assert before["y"] == [85.24, 85.24, 97.5]
    assert before["error_y"]["array"] == [5.9, 5.9, 2.0]
    assert before["x"] == pytest.approx([-0.2, 0.8, 1.8])
    assert before["customdata"][0] == ["embedding", "85.24° ± 5.90°, 67.00° to 100.20°"]
    (band,) = figure.layout["shapes"]
    assert (band["y0"], band["y1"]) == pytest.approx((87.076, 92.924))
    low, high = figure.layout["yaxis"]["range"]
    assert low < 79.34 and high > 99.5
    assert figure.layout["xaxis"]["ticktext"] == ["0"] and figure.layout["xaxis"]["tickvals"] == [1]


def test_an_rms_norm_does_not_turn_and_is_not_drawn_twice() -> None:
    figure = sphere.angles(DECODER.norms)
    assert list(traces(figure)) == ["before (x)", "after (y)"]
    assert len(figure.layout["xaxis"]["ticktext"]) == 10  # 30 layers, thinned


def test_variance_has_the_line_of_random_states_and_gaps() -> None:
    rows = (
        norm(0, "a"),
        norm(1, "b", along_ones_after=0.0),
        norm(2, "c", along_ones_before=None),
        norm(3, "d", along_ones_before=float("inf")),
    )
    figure = sphere.variance(rows)
    line, before, after = figure.data
    assert line["y"] == [1 / 384] * 4 and line["line"]["dash"] == "dash"
    assert before["y"] == [0.0125, 0.0125, None, None]
    assert after["y"][1] == sphere.LEAST and after["customdata"][1] == ["layer 1, b", "0"]
    assert figure.layout["yaxis"]["type"] == "log"
    json.dumps(figure.to_plotly(), allow_nan=False)


def test_radii_are_not_magnified_until_rounding_is_seen() -> None:
    exact = sphere.radius(ENCODER.norms[:1])
    assert exact.layout["yaxis"]["range"][0] < 0.98
    short = sphere.radius((norm(0, "a", radius=Spread(0.6, 0.1, 0.2, 0.9)),))
    assert short.layout["yaxis"]["range"][0] < 0.2
    assert short.data[0]["error_y"]["arrayminus"] == pytest.approx([0.4])


def test_eigenvalues_on_both_sides_of_the_prediction() -> None:
    figure = kernels.eigenvalues(ENCODER.norms)
    assert traces(figure)["last predicted to be null"]["y"] == [3.8e-14, 3.8e-14, kernels.LEAST]
    assert traces(figure)["last predicted to be null"]["customdata"][2][1] == "-4.2e-17"
    assert traces(figure)["first predicted not to be"]["y"] == [0.011, 0.011, 5.2e-17]
    assert traces(figure)["counted as null"]["y"] == [1e-8] * 3
    assert "a LayerNorm forgets one direction" in figure.caption and "RMSNorm" not in figure.caption
    other = kernels.eigenvalues(DECODER.norms)
    assert list(traces(other)) == ["counted as null", "first predicted not to be"]
    assert [key.name for key in other.legend] == ["first predicted not to be", "counted as null"]
    assert "an RMSNorm forgets none" in other.caption


def test_cosines_show_both_where_the_kernel_is_not_unique() -> None:
    (figure,) = kernels.cosines(ENCODER.norms)
    single, all_null = figure.data
    assert single["y"] == pytest.approx([6e-8, 6e-8, 0.218175], rel=1e-6)
    assert all_null["y"] == [None, None, kernels.SAME]
    assert "not unique" in single["customdata"][2][0]
    (unique,) = kernels.cosines(ENCODER.norms[:2])
    assert len(unique.data) == len(unique.legend) == 1
    assert list(kernels.cosines(DECODER.norms)) == []


def test_curves_of_five_norms_begin_with_slope_one() -> None:
    figure = curves.curves(DECODER.norms)
    names = [trace["name"] for trace in figure.data if trace.get("showlegend", True)]
    assert names == [
        "layer 0, before attention",
        "layer 7, before MLP",
        "layer 15, before attention",
        "layer 22, before MLP",
        "final",
    ]
    measured, fitted = figure.data[:2]
    at = min(range(len(measured["x"])), key=lambda k: abs(measured["x"][k] - 0.3))
    assert measured["y"][at] == pytest.approx(measured["x"][at], rel=0.01)
    # What is exactly a tanh lies on the dotted line, but for the slope, which is taken from entries up to 1.
    for x, y in zip(fitted["x"], fitted["y"], strict=True):
        assert y == pytest.approx(10 * tanh(0.1 * x), abs=0.1)
    assert measured["legendgroup"] == fitted["legendgroup"]
    low, high = figure.layout["xaxis"]["range"]
    assert -low == high == pytest.approx(1.03 * curves.REACH)


def test_massive_entries_do_not_set_the_slope() -> None:
    bulk = curve(reach=10.0)
    massive = replace(bulk, x=(*bulk.x, 200.0, 2000.0), y=(*bulk.y, 0.01, 0.05))
    figure = curves.curves((norm(0, "a", curve=massive),))
    middle = [(x, y) for x, y in zip(figure.data[0]["x"], figure.data[0]["y"], strict=True) if 0 < abs(x) < 0.5]
    assert all(y == pytest.approx(x, rel=0.02) for x, y in middle)


def test_one_point_or_few_norms_can_be_drawn() -> None:
    point = Curve((0.0, 2.0), (0.0, 3.0), 1.0, 1.0, 1.0, 3.0, 0.5)
    figure = curves.curves((norm(0, "a", curve=point), norm(1, "b", curve=None)))
    assert len(figure.data) == 2
    json.dumps(figure.to_plotly(), allow_nan=False)


def test_fits_have_gaps_and_room() -> None:
    figure = curves.fits((norm(0, "a"), norm(1, "b", curve=None)))
    assert {name: trace["y"] for name, trace in traces(figure).items()} == {
        "line c·x": [0.61, None],
        "c·tanh(a·x)": [0.96, None],
        "any function of x": [0.98, None],
    }
    low, high = figure.layout["yaxis"]["range"]
    assert 0.5 < low < 0.61 and high > 1


def test_gram_spectra_are_powers_of_ten_on_one_scale() -> None:
    before, after = grams.spectra(ENCODER.norms)
    assert before.data[0]["z"]["shape"] == "3, 3"
    assert after.data[0]["z"]["shape"] == "3, 2"  # the last share is zero everywhere
    assert before.data[0]["zmin"] == after.data[0]["zmin"] == pytest.approx(-1.30103, abs=1e-5)
    nothing = norm(0, "a", gram_before=Spectrum(0.0, 0.0, (0.0, 0.0)), gram_after=Spectrum(0.0, 0.0, (0.0, 0.0)))
    for figure in grams.spectra((nothing,)):
        json.dumps(figure.to_plotly(), allow_nan=False)
    assert traces(grams.ranks(ENCODER.norms))["before (x)"]["y"] == [18.04] * 3
    assert "at most 256" in grams.ranks(ENCODER.norms).caption


def test_entropy_is_a_share_of_uniform_attention() -> None:
    rows = (HeadStates(0, (1.0, 2.0), 4.0, (0.0,), None), HeadStates(1, (0.0,), 0.0, (0.0,), None))
    trace = attending.entropy(rows).data[0]
    assert trace["z"] == [[0.25, 0.5], [None, None]]
    assert trace["customdata"][0] == [[1.0, 4.0], [2.0, 4.0]]
    assert (trace["x"], trace["y"]) == (["0", "1"], ["0", "1"])


def test_unselectable_keys_have_a_dot_a_head() -> None:
    figure = attending.unselectable(ENCODER.heads)
    assert {name: trace["y"] for name, trace in traces(figure).items()} == {
        "as the norm scales them": [0.0, 0.0625],
        "unscaled": [0.25, 0.5],
    }
    assert len(attending.unselectable(FEW_TOKENS.heads).data) == 1


def test_a_logarithmic_axis_holds_all_and_survives_none() -> None:
    low, high = log_axis("", [1e-17, None, 0.5])["range"]
    assert low < -17 and high > -0.3
    assert log_axis("", [])["range"] == pytest.approx([-0.08, 1.08])


def without_plotly(page: str) -> str:
    start = page.index("plotly.js v")
    return page[:start] + page[page.index("</script>", start) :]


SPHERE = ["angles", "variance", "radius"]
RANK = ["gram-ranks", "gram-spectra-before", "gram-spectra-after"]
PLOTS = {
    "encoder": [*SPHERE, "eigenvalues", "cosines", "curves", "fits", *RANK, "entropy", "unselectable"],
    "decoder": [*SPHERE, "eigenvalues", "curves", "fits", *RANK, "entropy"],
    "few tokens": [*SPHERE, *RANK, "entropy", "unselectable"],
    "bare": [],
    "hostile": [*SPHERE, "eigenvalues", "cosines", "curves", "fits", *RANK, "entropy", "unselectable"],
}


@pytest.mark.parametrize("name", ALL)
def test_the_page_has_a_place_for_every_figure(name: str) -> None:
    page = render_html(ALL[name])
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    figures: list[dict[str, Any]] = json.loads(found[1], parse_constant=pytest.fail)
    assert [figure["id"] for figure in figures] == PLOTS[name]
    assert re.findall(r'class="plot" id="([^"]*)"', without_plotly(page)) == PLOTS[name]


def test_the_page_says_everything_in_text_too() -> None:
    page = without_plotly(render_html(ENCODER))
    for expected in (
        "<title>tiny [bold]bert · gaugekit probe</title>",
        "<h1>tiny [bold]bert</h1>",
        "<strong>2 of 3</strong> norms forget the direction that their weights predict, to a cosine of 0.9999",
        "<strong>37.5 % → 3.12 %</strong> of keys could not be selected by any query",
        "<dd>4,096 in 16 windows of 256, 1,234 different ones</dd>",
        '<td class="number">85.24 ± 5.90</td>',
        '<td class="number">0.9804</td>',
        '<td class="number">4.800</td>',
        '<td class="number">0.781825</td>',
        "<td>not unique; to all null 1.000000</td>",
        '<td class="number">18.0</td>',
        '<td class="number">3.125 %</td>',
    ):
        assert expected in page
    assert not re.search(r"https?://|url\(|@import", page)


def test_the_page_says_what_is_missing() -> None:
    few = without_plotly(render_html(FEW_TOKENS))
    assert "300 tokens are too few to tell" in few
    assert "No normalized state varies." in few
    assert "<td>too few tokens to tell</td>" in few
    bare = without_plotly(render_html(BARE))
    assert "This stream has no norms." in bare and "This stream has no self-attention." in bare
    all_selectable = "Each of the keys examined is selected by some query, and would be without the norms' scales."
    all_selectable = all_selectable.replace("'", "&#39;")
    assert all_selectable in render_html(DECODER) and all_selectable not in render_html(ENCODER)


def test_long_tables_are_closed_at_first() -> None:
    assert without_plotly(render_html(DECODER)).count("<details open>") == 0
    assert without_plotly(render_html(ENCODER)).count("<details open>") == 4


def test_names_are_escaped_everywhere() -> None:
    page = without_plotly(render_html(DANGEROUS))
    assert "<script>alert" not in page and "<img" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert page.count("<script") == 3  # the data, plotly, and what draws
    for build in (sphere.angles, sphere.variance, kernels.eigenvalues, curves.curves, grams.ranks):
        assert "<script>" not in json.dumps(build(DANGEROUS.norms).data)
    assert "<script>" not in json.dumps([figure.data for figure in grams.spectra(DANGEROUS.norms)])


@pytest.fixture
def opened(heard: Any, tmp_path: Path) -> Callable[..., Any]:
    """Open the page of a report."""

    def call(report: ProbeReport, width: int) -> Any:
        path = tmp_path / "page.html"
        write_html(report, path)
        return heard.open(path.as_uri(), width)

    return call


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ALL)
def test_the_page_shows_in_a_browser(
    opened: Callable[..., Any], heard: Any, tmp_path: Path, name: str, width: int
) -> None:
    page = opened(ALL[name], width)
    if PLOTS[name]:
        page.wait_for_selector(f"#{PLOTS[name][-1]} .main-svg", state="attached")
    drawn = page.eval_on_selector_all(
        ".plot[id]", "all => all.filter(e => e.querySelector('.main-svg')).map(e => e.id)"
    )
    assert drawn == PLOTS[name]
    assert heard.fetched == [(tmp_path / "page.html").as_uri()]
    assert heard.said == []
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out of the page


def test_a_click_on_a_name_hides_its_curve_and_its_tanh(opened: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    page = opened(ENCODER, 1280)
    page.wait_for_selector("#curves .legendtoggle")
    lines = "#curves .scatterlayer .trace"
    expect(page.locator(lines)).to_have_count(6)
    page.locator("#curves .legendtoggle").first.click()
    expect(page.locator(lines)).to_have_count(4)
