"""Reports of align, made by hand: no model is read here."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from verified import SAME_OUTPUT

from gaugekit.report.align import render, summary
from gaugekit.report.align_page import render_html, write_html
from gaugekit.report.left import SHOWN, left_rows
from gaugekit.report.plots.nearer import LEAST, nearer
from gaugekit.verbs.align import AlignReport, Distance
from gaugekit.verbs.aligning import Left
from gaugekit.verbs.verify import VerifyReport

HOSTILE = "</script><script>alert(1)</script><img src='http://evil.test/x.png' onerror=alert(2)>\"\x1b[31m\n[bold]$x$"

TIED = Left("residual frame", "stream", "the unembedding is tied to the token table")
ALIGNED = AlignReport(
    reference="/models/one",
    source="/models/two",
    out="/models/moved [bold]",
    observable="logprobs",
    cost="weights",
    allowed="all",
    before=1.41234,
    after=0.5,
    places=(
        Distance("layer 0", 1.25, 0.4375),
        Distance("layer 1", 1.5, 4.5e-7),
        Distance("model.embed_tokens.weight", 1.4375, 0.0),
    ),
    sweeps=(1.3, 0.9, 0.5),
    left=(TIED, replace(TIED, where="other stream"), Left("norm weight", "layer 0", "it has zero entries")),
    refined=None,
    tensors=21,
    bytes=538_090_408,
    written=True,
)
VERIFIED = replace(SAME_OUTPUT, first="/models/two", second="/models/moved", layers=(0.0, 1e-7))
BROKEN = replace(
    ALIGNED,
    before=float("inf"),
    places=(Distance("layer 0", float("nan"), 0.5), Distance("layer 1", float("inf"), float("inf"))),
)
DANGEROUS = replace(
    ALIGNED,
    reference=f"/models/{HOSTILE}",
    source=f"/models/{HOSTILE}",
    out=f"/models/{HOSTILE}",
    places=(Distance(HOSTILE, 1.0, 0.5),),
    left=(Left(HOSTILE, HOSTILE, HOSTILE),),
)


def text(report: AlignReport, outcome: VerifyReport | None = None, width: int = 120, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False, legacy_windows=False)
    console.print(render(report, outcome))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_how_near_and_what_was_left() -> None:
    shown = text(ALIGNED, VERIFIED)
    assert shown.startswith("moved [bold]\n")
    for line in (
        r"reference +/models/one",
        r"moved +/models/two",
        r"written to +/models/moved \[bold\]",
        r"brought together +weights",
        r"observable +logprobs \(log-probabilities\)",
        r"layer 0 +1\.250 +0\.438",
        r"layer 1 +1\.500 +4\.5e-07",
        r"model\.embed_tokens\.weight +1\.438 +0",
        r"distance 1\.412 before, 0\.500 after; 2 sweeps; 538\.1 MB on disk",
        r"residual frame +stream +the unembedding is tied to the token table",
        r"norm weight +layer 0 +it has zero entries",
        r"equivalent +log-probabilities differ by at most 7\.7e-06, .*",
    ):
        assert re.search(rf"^{line}$", shown, re.MULTILINE), line
    assert "other stream" not in shown  # said once
    assert left_rows(ALIGNED.left) == [(x.symmetry, x.where, x.reason) for x in (ALIGNED.left[0], ALIGNED.left[2])]
    assert summary(ALIGNED) == "distance 1.412 before, 0.500 after"
    for word in ("dry run", "loss of the mean", "--json"):
        assert word not in shown


def test_other_kinds() -> None:
    dry = text(replace(ALIGNED, written=False, left=(), sweeps=(1.3, 0.5)))
    assert "dry run: nothing was written" in dry and re.search(r"^not written +/models/moved", dry, re.MULTILINE)
    assert "; 1 sweep; " in dry
    assert "Not aligned" not in dry and "Verified" not in dry
    assert "activations" in text(replace(ALIGNED, cost="activations"))
    assert "weights, by permutations alone" in text(replace(ALIGNED, allowed="permutations"))
    refined = text(replace(ALIGNED, refined=(3.5, 3.25)))
    assert "loss of the mean of both: 3.5000 nats a token before refinement, 3.2500 after" in refined
    assert "not equivalent  " in text(ALIGNED, replace(VERIFIED, equivalent=False, largest=0.5))


def test_long_tables_are_cut_and_say_so() -> None:
    places = tuple(Distance(f"layer {i}", 1.0, 0.5) for i in range(SHOWN + 3))
    many = tuple(replace(TIED, reason=f"reason {i}") for i in range(SHOWN + 3))
    shown = text(replace(ALIGNED, places=places, left=many))
    assert "and 3 more: --json lists all" in shown
    assert f"layer {SHOWN - 1} " in shown and f"layer {SHOWN} " not in shown
    assert f"reason {SHOWN - 1}" in shown and f"reason {SHOWN}" not in shown
    assert shown.count("and 3 more: --json lists all") == 2
    assert "--json" not in text(replace(ALIGNED, places=places[:SHOWN], left=many[:SHOWN]))


@pytest.mark.parametrize("width", [80, 120])
def test_fits_and_is_plain_when_piped(width: int) -> None:
    shown = text(ALIGNED, VERIFIED, width)
    assert max(map(len, shown.splitlines())) <= width and "\x1b" not in shown
    assert "\x1b" in text(ALIGNED, VERIFIED, width, terminal=True)


def test_distances_that_are_not_finite() -> None:
    assert re.search(r"^layer 1 +inf +inf$", text(BROKEN), re.MULTILINE)
    assert "distance inf before, 0.500 after" in text(BROKEN)
    (figure,) = figures(render_html(BROKEN))
    assert [trace["y"] for trace in figure["data"]] == [[None, None], [0.5, None]]
    json.dumps(nearer(replace(BROKEN, places=())).to_plotly(), allow_nan=False)


def figures(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1], parse_constant=pytest.fail)


def without_plotly(page: str) -> str:
    start = page.index("plotly.js v")
    return page[:start] + page[page.index("</script>", start) :]


def test_the_page(tmp_path: Path) -> None:
    write_html(ALIGNED, VERIFIED, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for expected in (
        "<title>two, in the coordinates of one · gaugekit align</title>",
        "<h1>two, in the coordinates of one</h1>",
        "<strong>1.412</strong> distance as stored, relative to the reference",
        "<strong>0.500</strong> distance aligned",
        "<strong>7.7e-06</strong> largest change of its outputs; within rounding",
        '<td class="number">4.5e-07</td>',
        "<td>the unembedding is tied to the token table</td>",
    ):
        assert expected in page, expected
    assert "other stream" not in without_plotly(page)
    assert not re.search(r"https?://|url\(|@import", without_plotly(page))
    (figure,) = figures(page)
    stored, aligned = figure["data"]
    assert stored["y"] == [1.25, 1.5, 1.4375] and aligned["y"] == [0.4375, 4.5e-7, LEAST]
    assert aligned["customdata"] == ["0.438", "4.5e-07", "0"]
    assert "Distances below a billionth stand at the bottom." in page
    low, high = figure["layout"]["yaxis"]["range"]
    assert low < -9 and high > 0.17


def test_pages_without_some_parts() -> None:
    bare = without_plotly(render_html(replace(ALIGNED, left=(), places=ALIGNED.places[:2])))
    assert "Not aligned" not in bare and "largest change" not in bare and "a billionth" not in bare
    other = without_plotly(render_html(ALIGNED, replace(VERIFIED, equivalent=False)))
    assert "largest change of its outputs; beyond rounding" in other
    refined = without_plotly(render_html(replace(ALIGNED, refined=(3.5, 3.25))))
    assert "<strong>3.250</strong> nats a token lost by the mean of both; 3.500 before refinement" in refined
    assert "nats" not in other


def test_names_from_outside() -> None:
    page = without_plotly(render_html(DANGEROUS, replace(VERIFIED, first=HOSTILE)))
    assert "<script>alert" not in page and "<img" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert page.count("<script") == 3  # the data, plotly, and what draws
    shown = text(DANGEROUS, width=400)
    assert "\x1b" not in shown and "[bold]" in shown


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("report", [ALIGNED, BROKEN, DANGEROUS], ids=["aligned", "broken", "hostile"])
def test_the_page_shows_in_a_browser(heard: Any, tmp_path: Path, report: AlignReport, width: int) -> None:
    path = tmp_path / "page.html"
    write_html(report, VERIFIED, path)
    page = heard.open(path.as_uri(), width)
    page.wait_for_selector("#nearer .main-svg", state="attached")
    assert heard.fetched == [path.as_uri()]
    assert heard.said == []
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out of the page
