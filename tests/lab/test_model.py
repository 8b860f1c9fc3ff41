"""The reports of a model: made while the page is there, served by name, and exported."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit
from urllib.request import urlopen

import pytest
import transformers
from cases import llama_like
from on_disk import letters, tokenizer

from gaugekit.errors import GaugekitError
from gaugekit.lab.app import STATIC
from gaugekit.lab.export import export
from gaugekit.lab.model import Reading, reports_of
from gaugekit.lab.reports import Made, Report, Reports
from gaugekit.verbs.compare import compare
from gaugekit.verbs.fingerprint import fingerprint
from gaugekit.verbs.inspect import inspect


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, four heads on two key/value heads, and a tokenizer of 13 letters."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    sizes = llama_like(vocab_size=13, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    tokenizer(13).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters(tmp_path_factory.mktemp("texts") / "text.txt", 13, 2000)


@pytest.fixture(scope="session")
def made(model: Path, text: Path) -> Reports:
    reports = reports_of(str(model), reading=Reading(text, 512), other=str(model))
    reports.make_all()
    return reports


def get(address: str) -> tuple[int, str]:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    connection.request("GET", parts.path)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_reports_are_those_of_the_verbs(made: Reports, model: Path, serving: Callable[[Reports], Any]) -> None:
    with serving(made) as address:
        session = json.loads(get(f"{address}session.json")[1])
        assert (session["model"], session["live"]) == ("model", True)
        assert [(each["name"], each["status"]) for each in session["reports"]] == [
            ("inspect", "ready"),
            ("probe", "ready"),
            ("compare", "ready"),
        ]
        for report in session["reports"]:
            with urlopen(urljoin(address, report["page"])) as answer:
                assert "script-src 'unsafe-inline'" in answer.headers["content-security-policy"]
                assert f"gaugekit {report['name']}</title>" in answer.read().decode()
        status, body = get(f"{address}reports/inspect.json")
        assert status == 200 and json.loads(body) == json.loads(json.dumps(inspect(model).to_dict()))
        assert json.loads(get(f"{address}reports/probe.json")[1])["tokens"] == 1024  # whole windows of four rows
        assert json.loads(get(f"{address}reports/compare.json")[1])["verdict"] == compare(model, model).verdict


def test_not_yet_and_never(serving: Callable[[Reports], Any]) -> None:
    def fail() -> Made:
        raise GaugekitError("no such thing")

    def break_() -> Made:
        raise ZeroDivisionError("oh")

    reports = Reports(
        "m", [Report("inspect", fail), Report("probe", break_), Report("compare", lambda: Made("h", "{}"))]
    )
    with serving(reports) as address:
        assert {each["status"] for each in reports.session(True)["reports"]} == {"working"}
        assert get(f"{address}reports/inspect.json")[0] == 404
        reports.make_all()  # what fails does not keep others from being made
        assert [each["status"] for each in reports.session(True)["reports"]] == ["failed", "failed", "ready"]
        messages = [each.get("message") for each in reports.session(True)["reports"]]
        assert messages == ["no such thing", "an error inside gaugekit: ZeroDivisionError: oh", None]
        assert get(f"{address}reports/inspect.html")[0] == get(f"{address}reports/none.html")[0] == 404
        assert get(f"{address}reports/compare.html") == (200, "h")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "none"}, "none"),
        ({"text": "none"}, "cannot be read as text"),
        ({"other": "none"}, "none"),
        ({"tokenizer": "none"}, "does not exist"),
    ],
)
def test_bad_input_is_told_at_once(change: dict[str, str], words: str, model: Path, text: Path, tmp_path: Path) -> None:
    given = {"model": str(model), "text": str(text), "other": str(model), "tokenizer": str(model)}
    given |= {name: str(tmp_path / value) for name, value in change.items()}
    reading = Reading(Path(given["text"]), 64, Path(given["tokenizer"]))
    with pytest.raises(GaugekitError, match=words):
        reports_of(given["model"], reading=reading, other=given["other"])


def test_a_fingerprint_stands_for_a_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "print.json").write_text(json.dumps(fingerprint(model).to_dict()))
    reports = reports_of(str(model), other=str(tmp_path / "print.json"))
    reports.make_all()
    found = reports.ready("compare")
    assert found is not None and json.loads(found.json)["verdict"] in ("related", "same")


def test_export(made: Reports, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(made, out)
    session = json.loads((out / "session.json").read_text())
    assert session["live"] is False
    for report in session["reports"]:
        found = made.ready(report["name"])
        assert found is not None
        assert (out / report["page"]).read_text(encoding="utf-8") == found.html
        assert (out / report["json"]).read_text(encoding="utf-8") == found.json
    for file in STATIC.rglob("*"):
        assert file.is_dir() or (out / file.relative_to(STATIC)).read_bytes() == file.read_bytes()
    with pytest.raises(GaugekitError, match="exists already"):
        export(made, out)
    export(Reports(), out, overwrite=True)
    assert not (out / "reports").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    with pytest.raises(GaugekitError, match="is no earlier export"):
        export(made, other, overwrite=True)
    assert (other / "mine.txt").read_text() == "mine"


def test_an_export_is_whole_or_not_there(tmp_path: Path) -> None:
    def fail() -> Made:
        raise GaugekitError("no such thing")

    reports = Reports("m", [Report("inspect", fail)])
    reports.make_all()
    with pytest.raises(GaugekitError, match=r"^inspect: no such thing$"):
        export(reports, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_from_the_command_line(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gaugekit.cli.main", "lab"]

    def run(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    out = tmp_path / "out"
    assert run(str(model), "--export", str(out)) == (0, f"{out}\n", "")
    assert json.loads((out / "session.json").read_text())["reports"][0]["status"] == "ready"
    code, _, err = run("--text", "file.txt", "--export", str(tmp_path / "x"))
    assert (code, err) == (2, "gaugekit: --text and --compare are about a model: name one\n")
    code, _, err = run(str(tmp_path / "none"), "--no-open")
    assert code == 2 and err.count("\n") == 1


# --- the page -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1280, 390])
def test_from_layer_to_head(made: Reports, serving: Callable[[Reports], Any], heard: Any, width: int) -> None:
    with serving(made) as address:
        page = heard.open(f"{address}#model", width)
        page.get_by_role("heading", name="Layer 0, head 0").wait_for()
        for key, title in (("ArrowDown", "Layer 1, head 0"), ("ArrowRight", "Layer 1, head 1")):
            page.locator("[role=gridcell][aria-selected=true]").focus()
            page.keyboard.press(key)
            page.get_by_role("heading", name=title).wait_for()
        assert page.url.endswith("#model?row=1&head=1&measure=effective_qk")
        assert "shared by query heads 2 to 3" in page.locator(".panel").inner_text()
        page.get_by_label("Shown:").select_option("entropy")
        cell = page.locator("[role=gridcell][aria-selected=true]")
        entropies = json.loads(made.ready("probe").json)["heads"][1]["entropy"][2:]  # type: ignore[union-attr]
        assert float(cell.inner_text()) == pytest.approx(sum(entropies) / 2, rel=1e-2)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        other = heard.open(page.url, width)
        other.get_by_role("heading", name="Layer 1, head 1").wait_for()
        with page.expect_popup() as opened:
            page.get_by_text("the whole report of inspect").click()
        assert opened.value.url == f"{address}reports/inspect.html"
        opened.value.close()
        assert all(url.startswith(address) for url in heard.asked if not url.startswith(("data:", "blob:")))


def test_an_exported_page(made: Reports, tmp_path: Path, heard: Any) -> None:
    """As files of a plain web server, in a folder of its own: everything is there but Python."""
    import threading
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

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
            page.goto(f"{address}#model?row=1&head=0")
            page.get_by_role("heading", name="Layer 1, head 0").wait_for()
            assert all(url.startswith(address) for url in heard.asked)
            assert not any("/api/" in url for url in heard.asked)
        finally:
            server.shutdown()


def test_without_a_model(lab: str, heard: Any) -> None:
    page = heard.open(f"{lab}#model")
    page.get_by_text("No model was named.").wait_for()
