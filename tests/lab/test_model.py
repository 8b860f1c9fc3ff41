"""The reports of a model: made while the page is there, served by name, and exported."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import urlopen

import pytest
import transformers
from cases import llama_like

import gaugekit.verbs.texts as texts
from gaugekit.cli.main import main
from gaugekit.errors import GaugekitError, UnsupportedArchitecture
from gaugekit.lab.app import STATIC
from gaugekit.lab.export import export
from gaugekit.lab.model import Reading, reports_of
from gaugekit.lab.reports import Made, Report, Reports
from gaugekit.verbs.compare import compare
from gaugekit.verbs.fingerprint import fingerprint
from gaugekit.verbs.inspect import inspect
from gaugekit.verbs.probe import probe

NAMES = ["inspect", "probe", "compare"]


def get(address: str, path: str = "") -> tuple[int, str]:
    """A path is asked for as it is written: no address is made simpler on the way."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    connection.putrequest("GET", path or parts.path)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def fail(_: Any) -> Made:
    raise GaugekitError("no such thing")


def states(reports: Reports) -> list[dict[str, str]]:
    return reports.session(True)["reports"]


def test_reports_are_those_of_the_verbs(
    made: Reports, model: Path, text: Path, serving: Callable[[Reports], Any]
) -> None:
    with serving(made) as address:
        session = json.loads(get(f"{address}session.json")[1])
        assert (session["model"], session["live"]) == ("tiny", True)
        assert [(each["name"], each["status"]) for each in session["reports"]] == [(name, "ready") for name in NAMES]
        for report in session["reports"]:
            with urlopen(urljoin(address, report["page"])) as answer:
                assert "script-src 'unsafe-inline'" in answer.headers["content-security-policy"]
                assert f"gaugekit {report['name']}</title>" in answer.read().decode()
        expected = {
            "inspect": inspect(model),
            "probe": probe(model, text, tokens=512),
            "compare": compare(model, model),
        }
        for name, report in expected.items():
            status, body = get(f"{address}reports/{name}.json")
            assert status == 200 and json.loads(body) == json.loads(json.dumps(report.to_dict()))
        assert json.loads(get(f"{address}reports/probe.json")[1])["tokens"] == 1024  # whole windows of four rows


def test_not_yet_and_never(serving: Callable[[Reports], Any]) -> None:
    seen = []

    def break_(_: Any) -> Made:
        seen.append([each["status"] for each in states(reports)])
        raise ZeroDivisionError("oh\n  dear")

    def make(track: Any) -> Made:
        for _ in track("abc", 3, "letters"):
            seen.append(states(reports)[2]["message"])
        return Made("h", "{}")

    reports = Reports("m", [Report("inspect", fail), Report("probe", break_), Report("compare", make)])
    with serving(reports) as address:
        assert {each["status"] for each in states(reports)} == {"waiting"}
        assert get(f"{address}reports/inspect.json")[0] == get(f"{address}reports/compare.html")[0] == 404
        reports.make_all()  # what fails does not keep others from being made
        assert seen == [["failed", "working", "waiting"], "letters, 0 of 3", "letters, 1 of 3", "letters, 2 of 3"]
        assert [each["status"] for each in states(reports)] == ["failed", "failed", "ready"]
        messages = [each.get("message") for each in states(reports)]
        assert messages == ["no such thing", "an error inside gaugekit: ZeroDivisionError: oh dear", None]
        assert get(f"{address}reports/inspect.html")[0] == get(f"{address}reports/none.html")[0] == 404
        assert get(f"{address}reports/compare.html") == (200, "h")


def test_progress_is_shown_elsewhere_too() -> None:
    told = []

    def track(items: Any, total: int | None, what: str) -> Any:
        told.append((total, what))
        return items

    def make(track: Any) -> Made:
        return Made("".join(track("ab", None, "letters")), "{}")

    reports = Reports("m", [Report("inspect", make)], track)
    reports.make_all()
    assert told == [(None, "letters")]
    assert reports.ready("inspect") == Made("ab", "{}")


def test_nothing_but_reports(made: Reports, model: Path, serving: Callable[[Reports], Any]) -> None:
    """Reports have names: neither a path nor what leads out of a folder is one, however it is written."""
    config = model / "config.json"
    inside = config.read_text()
    with serving(made) as address:
        for place in (
            str(config),
            str(config.with_suffix("")),
            f"../{config}",
            "../app",
            "../..",
            "inspect/../inspect",
        ):
            for word in (place, quote(place, safe=""), quote(quote(place, safe=""), safe="")):
                for path in (f"/reports/{word}", f"/reports/{word}.json", f"/reports/{word}.html", f"/{word}"):
                    status, body = get(address, path)
                    assert status == 404 and inside not in body, path
        assert get(address, "/reports/inspect.json")[0] == 200


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "none"}, "none: no such file"),
        ({"text": "none"}, "cannot be read as text"),
        ({"text": "short"}, "short is too short: it has 1 token"),
        ({"other": "none"}, "none: no such file"),
        ({"other": "wide"}, "tiny and .*wide cannot be compared: different widths: .8. and .32."),
        ({"other": "print.json"}, "tiny and .*print.json cannot be compared: different widths"),
        ({"other": "noted.json"}, "is not a gaugekit fingerprint"),
        ({"other": "bare"}, "has a config but no weights: it can be inspected, but not compared"),
        ({"model": "bare"}, "has a config but no weights: it can be inspected, but not probed"),
        ({"tokenizer": "none"}, "does not exist"),
        ({"tokenizer": "wide"}, "has no tokenizer"),
    ],
)
def test_bad_input_is_told_at_once(change: dict[str, str], words: str, model: Path, text: Path, tmp_path: Path) -> None:
    sizes = llama_like(vocab_size=13, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, head_dim=4)
    config = transformers.LlamaConfig(**sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "wide")
    config.save_pretrained(tmp_path / "bare")
    (tmp_path / "print.json").write_text(json.dumps(fingerprint(tmp_path / "wide").to_dict()))
    (tmp_path / "noted.json").write_text("{}")
    (tmp_path / "short").write_text("a")
    given = {"model": str(model), "text": str(text), "other": str(model), "tokenizer": str(model)}
    given |= {name: str(tmp_path / value) for name, value in change.items()}
    given = {name: value.replace("bare", "bare/config.json") for name, value in given.items()}
    reading = Reading(Path(given["text"]), 64, Path(given["tokenizer"]))
    with pytest.raises(GaugekitError, match=words):
        reports_of(given["model"], reading=reading, other=given["other"])


def test_an_unknown_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(UnsupportedArchitecture, match="model type 'abacus' is not supported"):
        reports_of(str(tmp_path / "config.json"))


def test_a_config_alone_is_inspected(model: Path) -> None:
    reports = reports_of(str(model / "config.json"))
    reports.make_all()
    assert reports.session(True)["model"] == "tiny"
    found = reports.ready("inspect")
    assert found is not None and json.loads(found.json)["heads"] == []


def test_a_fingerprint_stands_for_a_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "print.json").write_text(json.dumps(fingerprint(model).to_dict()))
    reports = reports_of(str(model), other=str(tmp_path / "print.json"))
    reports.make_all()
    found = reports.ready("compare")
    assert found is not None and json.loads(found.json)["verdict"] in ("related", "same")


def test_a_fingerprint_of_another_observable(model: Path, tmp_path: Path) -> None:
    (tmp_path / "print.json").write_text(json.dumps(fingerprint(model, observable="hidden").to_dict()))
    reports = reports_of(str(model), other=str(tmp_path / "print.json"))
    reports.make_all()
    assert "cannot be compared: different observables" in reports.failed["compare"]


# --- as files -------------------------------------------------------------------------------------------------------


def test_export(made: Reports, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(made, out)
    session = json.loads((out / "session.json").read_text())
    assert session == made.session(live=False) and session["live"] is False
    for report in session["reports"]:
        found = made.ready(report["name"])
        assert found is not None
        assert (out / report["page"]).read_text(encoding="utf-8") == found.html
        assert (out / report["json"]).read_text(encoding="utf-8") == found.json
    expected = {file.relative_to(STATIC) for file in STATIC.rglob("*") if file.is_file()}
    reports = {Path("reports") / f"{name}.{kind}" for name in NAMES for kind in ("json", "html")}
    found = {file.relative_to(out) for file in out.rglob("*") if file.is_file()}
    assert found == expected | reports | {Path("session.json")}
    for file in expected:
        assert (out / file).read_bytes() == (STATIC / file).read_bytes()


def test_what_an_export_replaces(made: Reports, tmp_path: Path) -> None:
    """An earlier one if it is asked to, and nothing else."""
    out = tmp_path / "out"
    export(made, out)
    with pytest.raises(GaugekitError, match="exists already"):
        export(made, out)
    export(Reports(), out, overwrite=True)
    assert not (out / "reports").exists()
    for name, files in {
        "mine": {"mine.txt": "mine"},
        "app": {"index.html": "mine", "session.json": '{"user": 1}'},
        "list": {"index.html": "mine", "session.json": "[1]"},
        "broken": {"index.html": "mine", "session.json": "{"},
    }.items():
        other = tmp_path / name
        other.mkdir()
        for file, content in files.items():
            (other / file).write_text(content)
        with pytest.raises(GaugekitError, match=f"{name}: is no earlier export"):
            export(made, other, overwrite=True)
        assert {each.name: each.read_text() for each in other.iterdir()} == files
    (tmp_path / "file").write_text("mine")
    with pytest.raises(GaugekitError, match="is no earlier export"):
        export(made, tmp_path / "file", overwrite=True)
    with pytest.raises(GaugekitError, match="there is no directory"):
        export(made, tmp_path / "none" / "out")
    with pytest.raises(GaugekitError, match="cannot be written"):
        export(made, tmp_path / ("o" * 5000))


def test_an_export_is_whole_or_not_there(made: Reports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports("m", [Report("inspect", fail)])
    reports.make_all()
    with pytest.raises(GaugekitError, match=r"^inspect: no such thing$"):
        export(reports, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    export(made, tmp_path / "out")
    before = (tmp_path / "out" / "session.json").read_bytes()
    real = Path.write_text

    def full(self: Path, *arguments: Any, **options: Any) -> int:
        if self.suffix == ".html":
            raise OSError(28, "No space left on device")
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    for overwrite, place in ((True, "out"), (False, "new")):
        with pytest.raises((OSError, GaugekitError)):
            export(made, tmp_path / place, overwrite=overwrite)
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "session.json").read_bytes() == before


# --- the command line -----------------------------------------------------------------------------------------------


def test_from_the_command_line(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "gaugekit.cli.main", "lab", str(model), "--export", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{out}\n", "")
    assert json.loads((out / "session.json").read_text())["reports"][0]["status"] == "ready"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "file.txt"], "--text and --compare are about a model: name one"),
        (["--compare", "other"], "--text and --compare are about a model: name one"),
        (["{model}", "--tokenizer", "{model}"], "--tokenizer is for a text: name one by --text"),
        (["{model}/none"], "none: no such file"),
        (["{model}", "--text", "{model}/none.txt"], "none.txt: cannot be read as text"),
        (["{model}", "--text", "{text}", "--max-tokens", "-1"], "'--max-tokens'"),
        (["{model}", "--export", "{model}"], "exists already"),
        (["{model}", "--export", "{model}", "--overwrite"], "is no earlier export"),
    ],
)
def test_one_line_and_exit_code_2(
    arguments: list[str], words: str, model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["lab", "--no-open", *(each.format(model=model, text=text) for each in arguments)])
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert re.fullmatch(rf"gaugekit: .*{re.escape(words)}.*\n", said.err)


def test_options_reach_the_text(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = []
    real = texts.open_tokenizer
    monkeypatch.setattr(texts, "open_tokenizer", lambda *given: (opened.append(given[1]), real(*given))[1])
    options = ["--text", str(text), "--max-tokens", "300", "--tokenizer", str(model)]
    assert main(["lab", str(model), *options, "--export", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    assert set(opened) == {model}
    assert json.loads((tmp_path / "out" / "reports" / "probe.json").read_text())["tokens"] == 1024
