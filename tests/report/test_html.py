"""The page: complete in itself, and safe whatever the checkpoint is called."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gaugekit.report.html import render_html, write_html
from gaugekit.verbs.inspect import InspectReport

PLOTS = ("ranks-{}-qk", "ranks-{}-vo", "spectra-{}-qk", "spectra-{}-vo", "balance-{}")


def plots(sets: int) -> list[str]:
    return ["census", "layers", *(plot.format(number) for number in range(sets) for plot in PLOTS), "norms"]


def without_plotly(page: str) -> str:
    """The page but for the script of plotly, which is nobody's to check here."""
    start = page.index("plotly.js v")
    return page[:start] + page[page.index("</script>", start) :]


class Outline(HTMLParser):
    """Which tags are opened, with which attributes, and what the headings say."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.headings: list[str] = []
        self._heading = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self._heading = tag in ("h1", "h2", "h3", "h4")
        if self._heading:
            self.headings.append(f"{tag} ")

    def handle_endtag(self, tag: str) -> None:
        self._heading = False

    def handle_data(self, data: str) -> None:
        if self._heading:
            self.headings[-1] += data


def test_says_everything_in_text_too(report: InspectReport) -> None:
    page = without_plotly(render_html(report))
    for expected in (
        "<title>tiny [bold]llama · gaugekit inspect</title>",
        "<strong>455,040</strong> redundant dimensions",
        "<strong>0.338 %</strong>",
        "<strong>1,024</strong> dead parameters",
        "<strong>134,515,008</strong> parameters",
        "(GL(4)^2)^2",
        "exact in logprobs",
        "norm input scale",
        "padding row",
        "unit order",
        "rotary positions turn every dimension of the keys",
        "layer 0 attention, layer 1 attention",
        "Degenerate blocks: 2 circuits",
        "1–4",
        "2–3",
    ):
        assert expected in page


def test_asks_for_nothing(report: InspectReport) -> None:
    page = without_plotly(render_html(report))
    assert not re.search(r"https?://|url\(|@import", page)
    outline = Outline(page)
    assert not {"link", "img", "iframe", "object", "embed"} & set(outline.tags)
    assert not {"src", "href", "srcset"} & set(outline.attributes)


def test_headings_have_an_order(two_streams: InspectReport) -> None:
    headings = Outline(without_plotly(render_html(two_streams))).headings
    assert [heading for heading in headings if heading.startswith(("h1", "h2"))] == [
        "h1 tiny [bold]llama",
        "h2 Symmetries",
        "h2 Heads",
        "h2 Norms",
        "h2 Dead parameters",
        "h2 Discrete symmetries",
        "h2 Blocked symmetries",
    ]
    for title in ("Encoder self-attention", "Decoder self-attention", "Decoder cross-attention"):
        assert f"h3 {title}" in headings
    assert headings.count("h4 Effective rank, query-key (QK)") == 3


def test_headers_only_says_so(headers_only: InspectReport) -> None:
    page = without_plotly(render_html(headers_only))
    assert "Spectra, ranks and balance were not computed" in page
    assert "Norm weights were not read" in page
    assert re.findall(r'class="plot" id="([^"]*)"', page) == ["census", "layers"]


def test_a_model_without_any_symmetry(report: InspectReport) -> None:
    bare = replace(report, by_symmetry=(), by_layer=(), dead=(), discrete=(), at_zero_eps=(), blocked=(), parameters=0)
    page = without_plotly(render_html(bare))
    assert "No continuous symmetry acts on this model." in page
    assert "<strong>0 %</strong>" in page


def test_the_data_are_strict_json(report: InspectReport) -> None:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', render_html(report), re.DOTALL)
    assert found is not None
    figures: list[dict[str, Any]] = json.loads(found[1], parse_constant=pytest.fail)
    assert [figure["id"] for figure in figures] == plots(1)


def test_names_are_escaped_everywhere(hostile: InspectReport) -> None:
    page = without_plotly(render_html(hostile))
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)" in page
    outline = Outline(page)
    assert outline.tags.count("script") == 3  # the data, plotly, and what draws
    assert "onerror" not in outline.attributes


def test_the_file_is_the_page(report: InspectReport, tmp_path: Path) -> None:
    write_html(report, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == render_html(report)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["report", "two_streams", "hostile", "headers_only"])
def test_shows_in_a_browser(heard: Any, request: pytest.FixtureRequest, tmp_path: Path, name: str, width: int) -> None:
    path = tmp_path / "page.html"
    write_html(request.getfixturevalue(name), path)
    page = heard.open(path.as_uri(), width)
    expected = {"two_streams": plots(3), "headers_only": ["census", "layers"]}.get(name, plots(1))
    page.wait_for_selector(f"#{expected[-1]} .main-svg", state="attached")
    drawn = page.eval_on_selector_all(
        ".plot[id]", "all => all.filter(e => e.querySelector('.main-svg')).map(e => e.id)"
    )
    assert drawn == expected
    assert heard.fetched == [path.as_uri()]
    assert heard.said == []
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out of the page
    buttons = page.eval_on_selector_all(".modebar-btn", "all => [...new Set(all.map(e => e.dataset.title))]")
    assert buttons == ["Download plot as a PNG", "Zoom in", "Zoom out", "Reset axes"]  # none that shares


def test_plots_turn_dark_with_the_page(browser: Any, report: InspectReport, tmp_path: Path) -> None:
    write_html(report, tmp_path / "page.html")
    page = browser.new_page(color_scheme="light")
    page.goto((tmp_path / "page.html").as_uri())

    def backgrounds() -> tuple[str, str]:
        surface = "e => getComputedStyle(e).backgroundColor"
        return page.eval_on_selector("figure", surface), page.eval_on_selector("#census .main-svg", surface)

    page.wait_for_selector("#norms .main-svg")
    assert backgrounds() == ("rgb(255, 255, 255)",) * 2
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector("#norms .main-svg[style*='24, 28, 34']", state="attached")
    assert backgrounds() == ("rgb(24, 28, 34)",) * 2
    page.close()
