"""Reports of merge, made by hand: no model is read here."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gaugekit.report.left import SHOWN
from gaugekit.report.merge import render
from gaugekit.report.merge_page import render_html, write_html
from gaugekit.report.plots.ways import way
from gaugekit.verbs.aligning import Left
from gaugekit.verbs.barriers import Ends, Ways
from gaugekit.verbs.merge import MergeReport, Source

HOSTILE = "</script><script>alert(1)</script><img src='http://evil.test/x.png' onerror=alert(2)>\"\x1b[31m\n[bold]$x$"

FRAME = Left("residual frame", "stream", "the unembedding is tied to the token table")
WAYS = Ways("loss", "/texts/a.txt", 1909, (0.0, 0.5, 1.0), (2.0, 4.5, 3.0), (2.0, 2.75, 3.0), 2.0, 0.25)
ENDS = Ends("/texts/a.txt", 1909, (2.0, 3.0, 3.25), 7.125, 2.875)
MERGED = MergeReport(
    recipe="/recipes/ties.yaml",
    out="/models/merged [bold]",
    method="ties",
    align="weights",
    sources=(
        Source("/models/base", "0" * 64, None, None, ()),
        Source("/models/one", "1" * 64, 0.5, 0.25, (FRAME, replace(FRAME, where="other stream"))),
        Source("/models/two", "2" * 64, 1.5, 1.0, ()),
    ),
    tensors=21,
    bytes=538_090_408,
    written=True,
)


def text(report: MergeReport) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(report))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def test_models_and_what_was_left() -> None:
    shown = text(MERGED)
    assert shown.startswith("merged [bold]\n")
    for line in (
        r"recipe +/recipes/ties.yaml",
        r"aligned +to the first model, by weights",
        r"base",
        r"one +0\.5 +0\.25",
        r"two +1\.5 +1",
        r"21 tensors changed; 538\.1 MB on disk",
        r"residual frame +one +stream +the unembedding is tied to the token table",
    ):
        assert re.search(rf"^{line}$", shown, re.MULTILINE), line
    assert "other stream" not in shown  # said once of a model


def test_other_kinds() -> None:
    dry = text(replace(MERGED, written=False, align="none", sources=MERGED.sources[:1]))
    assert "dry run: nothing was written" in dry and "21 tensors would change" in dry
    assert re.search(r"^aligned +no$", dry, re.MULTILINE) and "Not aligned" not in dry
    assert re.search(
        r"^for mergekit +/models/merged/mergekit.yaml$",
        text(replace(MERGED, mergekit="/models/merged/mergekit.yaml")),
        re.MULTILINE,
    )
    many = tuple(replace(FRAME, reason=f"reason {i}") for i in range(SHOWN + 3))
    shown = text(replace(MERGED, sources=(*MERGED.sources[:1], replace(MERGED.sources[1], left=many))))
    assert "and 3 more: --json lists all" in shown
    assert f"reason {SHOWN - 1}" in shown and f"reason {SHOWN}" not in shown


def test_losses() -> None:
    shown = text(replace(MERGED, ways=WAYS))
    assert "nats a token, on 1,909 tokens of /texts/a.txt" in shown
    assert re.search(r"^0\.5 +4\.5000 +2\.7500$", shown, re.MULTILINE)
    assert "\nbarrier as they are: 2.0000 nats a token\nbarrier aligned: 0.2500 nats a token" in shown
    shown = text(replace(MERGED, ways=replace(WAYS, aligned=None, barrier_aligned=None, measure="departure")))
    assert re.search(r"^0\.5 +4\.5000$", shown, re.MULTILINE)
    assert "barrier aligned" not in shown and "of last states" in shown
    shown = text(replace(MERGED, ends=ENDS))
    for line in (r"one +3\.0000", r"merge of them as they are +7\.1250", r"merge of them aligned +2\.8750"):
        assert re.search(rf"^{line}$", shown, re.MULTILINE), line


def figures(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1], parse_constant=pytest.fail)


def test_the_page(tmp_path: Path) -> None:
    write_html(replace(MERGED, ways=WAYS), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for expected in (
        "<h1>merged [bold]</h1>",
        "A merge of 3 models; method ties.",
        "<strong>2.000</strong> barrier, models as they are",
        "<strong>0.250</strong> barrier, models aligned",
        "<td>the unembedding is tied to the token table</td>",
        f"<td>{'1' * 64}</td>",
        '<td class="number">2.7500</td>',
    ):
        assert expected in page
    (figure,) = figures(page)
    curves = {trace["name"]: trace["y"] for trace in figure["data"]}
    assert curves["as they are"] == [2.0, 4.5, 3.0]
    assert curves["aligned"] == [2.0, 2.75, 3.0]
    assert curves["straight line between the ends"] == [2.0, 3.0]


def test_pages_without_a_way() -> None:
    page = render_html(replace(MERGED, ends=ENDS, mergekit="/models/merged/mergekit.yaml"))
    assert figures(page) == []
    assert "3 models, aligned for mergekit to merge; method ties." in page
    assert '<td class="number">7.1250</td>' in page
    bare = render_html(replace(MERGED, sources=MERGED.sources[:1]))
    assert "Not aligned" not in bare and "Losses" not in bare


def test_losses_that_are_not_finite() -> None:
    broken = replace(WAYS, naive=(2.0, float("inf"), 3.0), barrier_naive=float("inf"))
    assert figures(render_html(replace(MERGED, ways=broken)))[0]["data"][1]["y"] == [2.0, None, 3.0]
    assert "barrier as they are: inf" in text(replace(MERGED, ways=broken))
    assert way(broken).id == "way"


def test_names_from_outside() -> None:
    left = (Left(HOSTILE, HOSTILE, HOSTILE),)
    sources = tuple(replace(source, path=f"/models/{HOSTILE}", left=left) for source in MERGED.sources)
    hostile = replace(MERGED, recipe=HOSTILE, out=f"/{HOSTILE}", sources=sources, ways=replace(WAYS, text=HOSTILE))
    page = render_html(hostile)
    assert "alert(1)</script>" not in page and "<img" not in page.replace("&lt;img", "")[: page.index("plotly.js v")]
    assert "\x1b" not in text(hostile)
