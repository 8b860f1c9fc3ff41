"""Reports of scramble, canonicalize, verify and compare, made by hand: no model is read here."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from verified import SAME_OUTPUT

from gaugekit.report import compare, verify
from gaugekit.report.compare_page import render_html, write_html
from gaugekit.report.distances import layer_sets
from gaugekit.report.moves import SHOWN, render_canonicalize, render_scramble
from gaugekit.report.plots import distances
from gaugekit.report.text import measure, size
from gaugekit.verbs.canonicalize import Ambiguity, CanonicalizeReport
from gaugekit.verbs.compare import CompareReport, LayerDistance
from gaugekit.verbs.rewriting import Skipped
from gaugekit.verbs.scramble import ScrambleReport

HOSTILE = "</script><script>alert(1)</script><img src='http://evil.test/x.png' onerror=alert(2)>\"\x1b[31m\n[bold]$x$"

SCRAMBLED = ScrambleReport(
    source="/models/tiny",
    out="/models/tiny-s [bold]",
    seed=7,
    condition=10.0,
    only=None,
    observable="logprobs",
    moved={"value-output basis": 2, "norm weight": 1205},
    tensors=21,
    skipped=(Skipped("residual frame", "stream", "model.norm.weight has 1 zero entries, which have no inverse"),),
)

CANONICAL = CanonicalizeReport(
    source="/models/tiny",
    out="/models/tiny-c",
    level="full",
    gauge="balanced",
    observable="logprobs",
    fixed={"value-output basis": 2, "head order": 2},
    skipped=(),
    blocked=("the unembedding is tied to the token table",),
    ambiguous=(Ambiguity("decoder", 1, 0, "vo", 2, 3),),
    tensors=8,
    bytes=538_090_408,
    written=True,
)

OTHER_OUTPUT = replace(
    SAME_OUTPUT, largest=0.393, mean_kl=0.00612, top1=15 / 256, equivalent=False, layer=2, layers=(0.0, 1e-7, 0.31)
)

RELATED = CompareReport(
    first="/models/tiny",
    second="/models/tuned [bold]",
    verdict="related",
    reason="matched heads are alike (median cosine 0.999), but not equal",
    spectra=0.011,
    distance=0.042,
    rounding=6.9e-08,
    cosine=0.9991,
    layers=(
        LayerDistance("decoder", 0, "self", 0.013, 0.008, 0.042, 0.035, 0.034, 6.9e-08, 0.9991),
        LayerDistance("decoder", 1, "self", 0.010, 0.0, 0.041, 0.0, None, 6.8e-08, 0.9992),
    ),
)
FAST = replace(
    RELATED,
    verdict="unrelated",
    reason="spectra are far apart (median distance 0.162)",
    distance=None,
    rounding=None,
    cosine=None,
    layers=(LayerDistance("decoder", 0, "self", 0.136, 0.187),),
)
TWO_STREAMS = replace(
    RELATED,
    layers=(
        *(replace(row, stream="encoder") for row in RELATED.layers),
        *RELATED.layers,
        *(replace(row, attention="cross", mlp=None) for row in RELATED.layers),
    ),
)
DANGEROUS = replace(
    RELATED,
    first=f"/models/{HOSTILE}",
    second=HOSTILE,
    reason=HOSTILE,
    layers=(replace(RELATED.layers[0], stream=HOSTILE),),
)

ALL = {
    "scramble": render_scramble(SCRAMBLED),
    "canonicalize": render_canonicalize(CANONICAL, SAME_OUTPUT),
    "verify": verify.render(OTHER_OUTPUT),
    "compare": compare.render(RELATED),
    "compare fast": compare.render(FAST),
    "compare two streams": compare.render(TWO_STREAMS),
}


def printed(renderable: RenderableType, width: int = 80, terminal: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=terminal, highlight=False, legacy_windows=False).print(renderable)
    return file.getvalue()


def words(renderable: RenderableType) -> str:
    """The text without the breaks and columns of its lines."""
    return " ".join(printed(renderable, 200).split())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ALL)
def test_fits_and_is_plain_when_piped(name: str, width: int) -> None:
    text = printed(ALL[name], width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text
    assert "\x1b" in printed(ALL[name], width, terminal=True)


@pytest.mark.parametrize("name", ["compare", "compare two streams"])
def test_numbers_are_whole_at_80_columns(name: str) -> None:
    assert "…" not in printed(ALL[name], 80)


@pytest.mark.parametrize(
    "renderable",
    [
        render_scramble(replace(SCRAMBLED, out=HOSTILE, skipped=(Skipped(HOSTILE, HOSTILE, HOSTILE),))),
        render_canonicalize(replace(CANONICAL, out=HOSTILE, blocked=(HOSTILE,)), replace(OTHER_OUTPUT, first=HOSTILE)),
        compare.render(DANGEROUS),
    ],
)
def test_names_cannot_command_the_terminal(renderable: RenderableType) -> None:
    text = printed(renderable, 400)
    assert "\x1b" not in text
    assert "[bold]" in text


def test_scramble_tells_what_moved_and_what_did_not() -> None:
    text = words(ALL["scramble"])
    assert text.startswith(
        "tiny-s [bold] source /models/tiny written to /models/tiny-s [bold] seed 7, condition number 10"
    )
    assert "norm weight 1,205" in text
    assert "moved 2 kinds of symmetry at 1,207 places; 21 tensors changed" in text
    assert "residual frame stream model.norm.weight has 1 zero entries, which have no inverse" in text
    assert "Skipped" not in words(render_scramble(replace(SCRAMBLED, skipped=())))


def test_scramble_says_when_nothing_moved() -> None:
    text = words(render_scramble(replace(SCRAMBLED, moved={}, tensors=0)))
    assert "moved nothing: no symmetry that was asked for acts on these weights; 0 tensors changed" in text


def test_canonicalize_tells_what_it_could_not_settle() -> None:
    text = words(render_canonicalize(CANONICAL))
    assert "settled 2 kinds of symmetry at 4 places; 8 tensors changed; 538.1 MB on disk" in text
    assert "The frame stays as it is" in text
    assert "the unembedding is tied to the token table" in text
    assert "decoder 1 0 VO 3..5 O(3)" in text
    assert "dry run" not in text
    assert "Verified" not in text


def test_long_tables_are_cut_and_say_so() -> None:
    many = tuple(replace(CANONICAL.ambiguous[0], layer=layer) for layer in range(SHOWN + 2))
    assert "and 2 more: --json lists all" in words(render_canonicalize(replace(CANONICAL, ambiguous=many)))
    assert "--json" not in words(render_canonicalize(replace(CANONICAL, ambiguous=many[:SHOWN])))


@pytest.mark.parametrize("change", [{"level": "heads"}, {"gauge": "folded"}])
def test_a_frame_that_nobody_asked_for_is_not_mentioned(change: dict[str, Any]) -> None:
    assert "frame" not in words(render_canonicalize(replace(CANONICAL, **change)))


def test_the_pivoted_gauge_tells_what_need_not_be_stored() -> None:
    text = words(render_canonicalize(replace(CANONICAL, gauge="pivoted", need_not_be_stored=1024)))
    assert "1,024 numbers need not be stored" in text
    assert "The frame stays as it is" in text
    assert "need not be stored" not in words(render_canonicalize(CANONICAL))


def test_a_dry_run_says_so() -> None:
    text = words(render_canonicalize(replace(CANONICAL, written=False)))
    assert "not written /models/tiny-c" in text
    assert "would settle 2 kinds of symmetry at 4 places; 8 tensors would change; 538.1 MB on disk" in text
    assert "dry run: nothing was written" in text


def test_verify_begins_with_the_verdict() -> None:
    text = words(verify.render(SAME_OUTPUT))
    assert text.startswith("equivalent log-probabilities differ by at most 7.7e-06, within the tolerance of 0.002 ")
    assert "rounding 5.0e-04, as weights stored in float32 are rounded" in text
    assert "tolerance 0.002, 4 times the effect of rounding, and at least 1e-08" in text
    assert "mean KL 1.2e-13 nats" in text
    assert "top-1 agreement 256 of 256 (100 %)" in text
    assert "first difference" not in text
    other = words(ALL["verify"])
    assert other.startswith("not equivalent log-probabilities differ by up to 0.393, beyond the tolerance of 0.002 ")
    assert "top-1 agreement 15 of 256 (5.86 %)" in other
    assert "first difference in layer 1, whose states are 0.310 apart" in other


def test_verify_of_hidden_states() -> None:
    hidden = replace(OTHER_OUTPUT, observable="hidden", mean_kl=None, top1=None, scale=2.5, layer=None, tolerance=0.01)
    text = words(verify.render(hidden))
    assert "largest difference 0.393 of their standard deviation 2.500" in text
    assert "tolerance 0.01, as given" in text
    assert "first difference in no layer: all states agree up to a turn of the stream" in text
    assert "KL" not in text and "top-1" not in text
    assert "in the embedding" in words(verify.render(replace(hidden, layer=0)))


def test_compare_begins_with_the_verdict_and_its_reason() -> None:
    text = printed(ALL["compare"])
    assert text.startswith("related  matched heads are alike (median cosine 0.999), but not equal\n")
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "0.042", "0.035", "0.034", "6.9e-08", "0.999", "0.013", "0.008"] in lines
    assert ["1", "0.041", "0", "6.8e-08", "0.999", "0.010", "0"] in lines  # no MLP
    assert "rounding  6.9e-08 (what rounding of the stored weights explains of it)" in text
    assert "outputs" not in text
    assert "outputs 7.7e-06" in words(compare.render(replace(RELATED, largest_difference=7.7e-6)))


def test_fast_shows_spectra_only() -> None:
    text = words(ALL["compare fast"])
    assert "layer spectra QK spectra VO" in text and "0 0.136 0.187" in text
    assert "rounding" not in text


def test_each_kind_of_attention_has_a_table() -> None:
    text = printed(ALL["compare two streams"])
    for title in ("encoder self-attention", "decoder self-attention", "decoder cross-attention"):
        assert text.count(f"Layers: {title}") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.0, "0"),
        (4.56e-7, "4.6e-07"),
        (-6e-18, "-6.0e-18"),
        (0.00123, "0.001"),
        (1.5, "1.500"),
        (2e7, "2.0e+07"),
    ],
)
def test_measure(value: float | None, text: str) -> None:
    assert measure(value) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(7, "7 bytes"), (1000, "1.0 kB"), (538_090_408, "538.1 MB"), (5 * 10**12, "5.0 TB")]
)
def test_size(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def without_plotly(page: str) -> str:
    start = page.index("plotly.js v")
    return page[:start] + page[page.index("</script>", start) :]


def test_the_page_says_everything_in_text_too() -> None:
    page = without_plotly(render_html(RELATED))
    for expected in (
        "<title>tiny and tuned [bold] · gaugekit compare</title>",
        "<h1>Related: tiny and tuned [bold]</h1>",
        '<p class="lead">Matched heads are alike (median cosine 0.999), but not equal.</p>',
        "<strong>0.042</strong> distance, symmetries removed",
        "<strong>6.9e-08</strong> explained by rounding",
        "<strong>0.999</strong> cosine of matched heads",
        "<strong>0.011</strong> distance of spectra",
        '<td class="number">0.035</td>',
    ):
        assert expected in page
    assert not re.search(r"https?://|url\(|@import", page)


def test_the_page_of_a_fast_comparison() -> None:
    page = without_plotly(render_html(FAST))
    assert re.findall(r'class="plot" id="([^"]*)"', page) == ["spectra-0"]
    assert "Only the spectra of heads were compared" in page
    assert "cosine of matched heads" not in page


def test_names_are_escaped_everywhere() -> None:
    page = without_plotly(render_html(DANGEROUS))
    assert "<script>alert" not in page and "<img" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert page.count("<script") == 3  # the data, plotly, and what draws


def test_the_plots_are_logarithmic_and_have_the_floor_of_rounding() -> None:
    figure = distances.aligned(layer_sets(RELATED)[0], 0)
    names = ["rounding", "query-key (QK)", "value-output (VO)", "hidden units (MLP)"]
    assert [trace["name"] for trace in figure.data] == names
    assert [key.name for key in figure.legend] == [*names[1:], names[0]]
    line, _, vo, mlp = figure.data
    assert (line["mode"], line["y"]) == ("lines", [6.9e-08, 6.8e-08])
    assert vo["y"] == [0.035, distances.LEAST] and vo["customdata"] == ["0.035", "0"]
    assert mlp["y"] == [0.034, None]
    assert "stand at the bottom" in figure.caption
    axis = figure.layout["yaxis"]
    assert axis["type"] == "log"
    assert axis["range"] == pytest.approx([-9.08, -0.92])


def test_a_plot_without_mlps_or_without_numbers() -> None:
    layers = layer_sets(TWO_STREAMS)[2]
    assert len(distances.aligned(layers, 2).data) == 3
    broken = tuple(replace(row, qk=float("nan"), vo=float("inf"), rounding=None) for row in layers.rows)
    figure = distances.aligned(replace(layers, rows=broken), 2)
    json.dumps(figure.to_plotly(), allow_nan=False)
    assert figure.data[1]["y"] == [None, None]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(
    "report", [RELATED, FAST, TWO_STREAMS, DANGEROUS], ids=["related", "fast", "streams", "hostile"]
)
def test_the_page_shows_in_a_browser(heard: Any, tmp_path: Path, report: CompareReport, width: int) -> None:
    path = tmp_path / "page.html"
    write_html(report, path)
    page = heard.open(path.as_uri(), width)
    sets = range(len(layer_sets(report)))
    kinds = ("spectra",) if report.distance is None else ("aligned", "spectra")
    expected = [f"{kind}-{number}" for number in sets for kind in kinds]
    page.wait_for_selector(f"#{expected[-1]} .main-svg", state="attached")
    drawn = page.eval_on_selector_all(
        ".plot[id]", "all => all.filter(e => e.querySelector('.main-svg')).map(e => e.id)"
    )
    assert drawn == expected
    assert heard.fetched == [path.as_uri()]
    assert heard.said == []
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out of the page
