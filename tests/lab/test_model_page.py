"""The room of the model: from the model to a layer to a head, by keys, pointer and address."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import transformers

from gaugekit.errors import GaugekitError
from gaugekit.lab.export import export
from gaugekit.lab.model import reports_of
from gaugekit.lab.reports import Made, Report, Reports

WIDTHS = (1280, 390)
CHOSEN = ".map [role=gridcell][aria-selected=true]"

Serving = Callable[[Reports], Any]


@pytest.fixture
def serving(serving: Serving, heard: Any) -> Serving:
    """Pages go before the lab does: one that was still asking would complain."""

    @contextmanager
    def opened(reports: Reports) -> Iterator[str]:
        with serving(reports) as address:
            yield address
            heard.close()

    return opened


def document(reports: Reports, name: str) -> dict[str, Any]:
    found = reports.ready(name)
    assert found is not None
    return json.loads(found.json)


def shows(page: Any, words: list[str]) -> None:
    """The way from the model to what is chosen."""
    found = "[...document.querySelectorAll('.crumbs > *')].map(each => each.textContent)"
    page.wait_for_function(f"words => JSON.stringify({found}) == JSON.stringify(words)", arg=words, timeout=5000)


def goes_to(page: Any, said: str) -> None:
    page.wait_for_function("said => location.hash == said", arg=said, timeout=5000)


def number(text: str) -> float:
    return float(text.split()[0].replace("−", "-"))


def listed(page: Any, title: str) -> list[str]:
    """What stands behind a heading of the panel."""
    return page.locator(f".beside tr:has(th:text-is('{title}')) td").all_inner_texts()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_from_the_model_to_a_head(made: Reports, serving: Serving, heard: Any, width: int, scheme: str) -> None:
    """By keys alone; the address follows, and whoever opens it sees the same."""
    inspect, probe = document(made, "inspect"), document(made, "probe")
    with serving(made) as address:
        page = heard.open(f"{address}#model", width, color_scheme=scheme)
        page.get_by_role("grid").wait_for()
        shows(page, ["tiny"])
        beside = page.locator(".beside").inner_text()
        assert f"{inspect['redundancy']['total']:,} dimensions" in beside and "4 heads on 2 key/value heads" in beside
        for row in inspect["redundancy"]["by_symmetry"]:
            assert row["name"] in beside and f"{row['dimension']:,}" in beside

        page.locator(".map [tabindex='0']").focus()
        for key, said, words in (
            ("Enter", "#model?layer=0&head=0", ["tiny", "layer 0", "head 0"]),
            ("ArrowDown", "#model?layer=1&head=0", ["tiny", "layer 1", "head 0"]),
            ("ArrowRight", "#model?layer=1&head=1", ["tiny", "layer 1", "head 1"]),
            ("ArrowDown", "#model?layer=1&head=1", ["tiny", "layer 1", "head 1"]),
            ("End", "#model?layer=1&head=3", ["tiny", "layer 1", "head 3"]),
            ("Shift+ArrowLeft", "#model?layer=1", ["tiny", "layer 1"]),
            ("Escape", "#model", ["tiny"]),
            ("ArrowRight", "#model?layer=0&head=0", ["tiny", "layer 0", "head 0"]),
            ("Control+End", "#model?layer=1&head=3", ["tiny", "layer 1", "head 3"]),
            ("ArrowLeft", "#model?layer=1&head=2", ["tiny", "layer 1", "head 2"]),
        ):
            page.keyboard.press(key)
            goes_to(page, said)
            shows(page, words)
            assert page.evaluate("document.activeElement.dataset.at") == ",".join(
                word.split()[1] for word in words[1:]
            ) or words == ["tiny"]
            assert page.locator(".map [tabindex='0']").count() == 1

        row = {each["circuit"]: each for each in inspect["heads"] if (each["layer"], each["kv_head"]) == (1, 1)}
        assert "Query heads 2 to 3 share key/value head 1" in page.locator(".beside").inner_text()
        for title, name in (("effective rank", "effective_rank"), ("stable rank", "stable_rank")):
            found = [number(each) for each in listed(page, title)]
            assert found == pytest.approx([row["qk"][name], row["vo"][name]], rel=1e-3)
        page.locator(".beside table", has_text="On the text").wait_for()
        states = probe["heads"][1]
        assert number(listed(page, "entropy of attention")[0]) == pytest.approx(states["entropy"][2], rel=1e-2)
        page.get_by_label("Tinted by", exact=True).select_option("entropy")
        goes_to(page, "#model?layer=1&head=2&measure=entropy")
        cell = page.locator(CHOSEN)
        value = cell.get_attribute("aria-label").removeprefix("layer 1, head 2: ")
        assert number(value) == pytest.approx(states["entropy"][2], rel=1e-2)

        assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out of the page
        other = heard.open(page.url, width, color_scheme=scheme)
        other.locator(CHOSEN).wait_for()
        beside = page.locator(".beside").inner_text()
        seen = "words => document.querySelector('.beside').innerText == words"
        other.wait_for_function(seen, arg=beside, timeout=5000)  # reports come one after the other
        assert all(url.startswith(address) for url in heard.asked)


def test_links_and_the_way_back(made: Reports, serving: Serving, heard: Any) -> None:
    probe, compare = document(made, "probe"), document(made, "compare")
    with serving(made) as address:
        page = heard.open(f"{address}#model?layer=1&head=3&measure=unselectable")
        page.locator(CHOSEN).wait_for()
        page.locator(".crumbs").get_by_role("link", name="layer 1").click()
        goes_to(page, "#model?layer=1&measure=unselectable")
        shows(page, ["tiny", "layer 1"])
        for words in ("on the text", "Distance from tiny"):
            page.locator(".beside table", has_text=words).wait_for()
        places = [each["place"] for each in probe["norms"] if each["layer"] == 1]
        heads = page.locator(".beside table", has_text="on the text").locator("thead th").all_inner_texts()
        assert heads == places == ["before attention", "before MLP"]
        angles = [each["angle_after"]["mean"] for each in probe["norms"] if each["layer"] == 1]
        found = [number(each.rstrip("°")) for each in listed(page, "angle to 1, out")]
        assert found == pytest.approx(angles, rel=1e-2)
        assert listed(page, "spectra")[:2] == ["0", "0"] and compare["layers"][1]["spectra_qk"] == 0
        page.get_by_role("navigation", name="Heads of layer 1").get_by_role("link", name="2").click()
        goes_to(page, "#model?layer=1&head=2&measure=unselectable")
        page.locator(".crumbs").get_by_role("link", name="tiny").click()
        goes_to(page, "#model?measure=unselectable")
        shows(page, ["tiny"])
        assert "with tiny: same; one orbit" in page.locator(".beside").inner_text()
        page.go_back()
        goes_to(page, "#model?layer=1&head=2&measure=unselectable")
        shows(page, ["tiny", "layer 1", "head 2"])
        page.locator("nav").get_by_role("link", name="Your model").click()
        goes_to(page, "#model")
        shows(page, ["tiny"])


def test_by_pointer(made: Reports, serving: Serving, heard: Any) -> None:
    with serving(made) as address:
        page = heard.open(f"{address}#model")
        page.get_by_role("grid").wait_for()

        def middle(place: str) -> tuple[float, float]:
            box = page.locator(f"[data-at='{place}']").bounding_box()
            return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

        page.mouse.move(*middle("0,1"))
        page.mouse.down()
        shows(page, ["tiny", "layer 0", "head 1"])
        page.mouse.move(*middle("1,2"), steps=3)
        shows(page, ["tiny", "layer 1", "head 2"])
        page.mouse.move(*middle("1"), steps=3)
        shows(page, ["tiny", "layer 1"])
        page.mouse.up()
        page.mouse.move(*middle("0,0"))
        goes_to(page, "#model?layer=1")


@pytest.mark.parametrize(
    ("said", "nearest"),
    [
        ("layer=2", ""),
        ("layer=-1&head=0", ""),
        ("head=1", ""),
        ("layer=1&head=4", "?layer=1"),
        ("layer=0x1&head=1e0&measure=oops&stream=none&more=1", ""),
        ("layer=1&head=1&measure=qk-effective", "?layer=1&head=1"),
    ],
)
def test_addresses_with_mistakes(made: Reports, serving: Serving, heard: Any, said: str, nearest: str) -> None:
    with serving(made) as address:
        page = heard.open(f"{address}#model?{said}")
        goes_to(page, f"#model{nearest}")


def test_whole_reports(made: Reports, serving: Serving, heard: Any) -> None:
    with serving(made) as address:
        page = heard.open(f"{address}#model")
        for name in ("inspect", "probe", "compare"):
            with page.expect_popup() as opened:
                page.get_by_role("list", name="Whole reports").get_by_role("link", name=name).click()
            report = opened.value
            report.on("console", lambda each: heard.said.append(each.text))
            report.on("request", lambda each: heard.asked.append(each.url))
            report.wait_for_selector(".main-svg", state="attached")
            assert report.url == f"{address}reports/{name}.html"
            report.close()
        assert all(url.startswith((address, "data:", "blob:")) for url in heard.asked)


def test_while_reports_are_made(made: Reports, serving: Serving, heard: Any) -> None:
    """What is there is shown already, and what goes wrong is said."""
    gates = {name: threading.Event() for name in ("inspect", "probe")}

    def inspect(track: Any) -> Made:
        for _ in track(range(2), 2, "spectra"):
            assert gates["inspect"].wait(20)
        found = made.ready("inspect")
        assert found is not None
        return found

    def probe(_: Any) -> Made:
        assert gates["probe"].wait(20)
        raise GaugekitError("no such text <b>")

    def compare(_: Any) -> Made:
        found = made.ready("compare")
        assert found is not None
        return found

    reports = Reports("slow", [Report("inspect", inspect), Report("probe", probe), Report("compare", compare)])
    with serving(reports) as address:
        work = threading.Thread(target=reports.make_all)
        work.start()
        try:
            page = heard.open(f"{address}#model?layer=1&head=1&measure=entropy")

            def said(name: str, words: str) -> None:
                page.locator(f"[data-report={name}]", has_text=words).wait_for(timeout=5000)

            said("inspect", "inspect is being made: spectra, 0 of 2 …")
            said("probe", "probe waits for its turn")
            assert page.locator(".crumbs").inner_text() == "slow"
            page.wait_for_timeout(300)
            assert page.url.endswith("#model?layer=1&head=1&measure=entropy")  # kept until there is something to show
            gates["inspect"].set()
            page.locator(CHOSEN).wait_for(timeout=5000)
            said("probe", "probe is being made …")
            assert page.locator(CHOSEN).get_attribute("aria-label") == "layer 1, head 1: not measured"
            gates["probe"].set()
            said("probe", "probe failed: no such text <b>")
            page.locator(".beside").get_by_text("medians over its heads").wait_for(timeout=5000)
        finally:
            for gate in gates.values():
                gate.set()
            work.join()


def test_a_model_that_cannot_be_read(serving: Serving, heard: Any) -> None:
    def fail(_: Any) -> Made:
        raise GaugekitError("tensor w holds NaN")

    reports = Reports("damaged", [Report("inspect", fail)])
    reports.make_all()
    with serving(reports) as address:
        page = heard.open(f"{address}#model")
        page.locator(".missing", has_text="inspect failed: tensor w holds NaN").wait_for()


def test_a_lab_that_was_ended(serving: Serving, heard: Any) -> None:
    reports = Reports("gone", [Report("inspect", lambda _: Made("", "{}"))])
    with serving(reports) as address:
        page = heard.open(f"{address}#model")
        page.locator("[data-report=inspect]", has_text="waits").wait_for()
        page.route("**/session.json", lambda route: route.abort())
        page.locator(".missing", has_text="the lab was ended before it was made").wait_for()
    heard.said.clear()  # the browser says that it could not load the list of reports


def test_several_streams(serving: Serving, heard: Any, tmp_path: Path) -> None:
    config = transformers.WhisperConfig(
        vocab_size=16, d_model=16, encoder_layers=3, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=8,
        max_target_positions=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    transformers.WhisperForConditionalGeneration(config).save_pretrained(tmp_path / "ear")
    reports = reports_of(str(tmp_path / "ear"))
    reports.make_all()
    heads = document(reports, "inspect")["heads"]
    with serving(reports) as address:
        page = heard.open(f"{address}#model?layer=2&head=1", 390)
        page.locator(CHOSEN).wait_for()
        assert page.locator(".map [role=rowheader]").count() == 3
        page.get_by_text("decoder, cross-attention").click()
        goes_to(page, "#model?stream=decoder&attention=cross")  # which has no layer 2
        assert page.locator(".map [role=rowheader]").count() == 2
        page.locator("[data-at='1,0']").click()
        goes_to(page, "#model?stream=decoder&attention=cross&layer=1&head=0")
        (row,) = (
            each
            for each in heads
            if [each[key] for key in ("stream", "attention", "layer", "kv_head", "circuit")]
            == ["decoder", "cross", 1, 0, "qk"]
        )
        assert number(listed(page, "effective rank")[0]) == pytest.approx(row["effective_rank"], rel=1e-3)
        page.locator(".crumbs").get_by_role("link", name="layer 1").click()
        shows(page, ["ear", "layer 1"])
        names = page.locator(".beside table", has_text="mean γ").locator("tbody th").all_inner_texts()
        assert names == ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"]
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_headers_alone(model: Path, serving: Serving, heard: Any) -> None:
    reports = reports_of(str(model / "config.json"))
    reports.make_all()
    with serving(reports) as address:
        page = heard.open(f"{address}#model?layer=1")
        page.locator(".missing", has_text="Only headers could be read").wait_for()
        assert "value-output basis" in page.locator(".beside").inner_text()


def test_without_a_model(lab: str, heard: Any) -> None:
    page = heard.open(f"{lab}#model", 390)
    page.get_by_text("No model was named.").wait_for()
    page.get_by_text("gaugekit lab MODEL --text FILE --compare OTHER").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_an_exported_page(made: Reports, tmp_path: Path, heard: Any) -> None:
    """As files of a plain web server, in a folder of its own: everything is there but Python."""
    (tmp_path / "site").mkdir()
    export(made, tmp_path / "site" / "lab")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "site"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_address[1]}/lab/"
            page = heard.open(f"{address}#sphere")
            page.wait_for_selector("[data-check=off]")
            assert "Computed in the browser" in page.locator("[data-check]").inner_text()
            page.goto(f"{address}#model?layer=1&head=0")
            page.locator(CHOSEN).wait_for()
            for words in ("Singular values", "On the text", "medians over its heads"):  # all three have come
                page.locator(".beside").get_by_text(words).first.wait_for()
            assert all(url.startswith(address) for url in heard.asked)
            assert not any("/api/" in url for url in heard.asked)
        finally:
            server.shutdown()
