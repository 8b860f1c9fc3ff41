"""Who is answered, with what, and what is refused."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from gaugekit.lab.app import STATIC
from gaugekit.lab.rooms import ROOMS
from gaugekit.lab.server import PortTaken, listen

ELSEWHERE = ["example.com", "example.com:80", "127.0.0.1.example.com", "localhost.example.com", "[::2]", "0.0.0.0", ""]


def ask(lab: str, path: str, **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    """One request as it is written: no address is made simpler on the way."""
    connection = http.client.HTTPConnection(urlsplit(lab).netloc, timeout=10)
    connection.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), answer.headers
    connection.close()
    return found


@pytest.mark.parametrize("path", ["/", "/session.json", "/api/rooms/sphere", "/icon.svg"])
def test_names_of_this_machine_alone(lab: str, path: str) -> None:
    port = urlsplit(lab).port
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "LocalHost", f"[::1]:{port}"):
        assert ask(lab, path, Host=host)[0] == 200, host
    for host in ELSEWHERE:
        status, body, _ = ask(lab, path, Host=host)
        assert (status, body) == (421, "the lab answers to localhost only"), host


def test_what_a_browser_may_do(lab: str) -> None:
    for path in ("/", "/session.json", "/api/rooms/sphere", "/none"):
        headers = ask(lab, path)[2]
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_it_listens_on_loopback_only() -> None:
    with listen(0) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("name", ROOMS)
def test_numbers_of_a_room(lab: str, name: str) -> None:
    status, body, _ = ask(lab, f"/api/rooms/{name}")
    assert status == 200
    assert json.loads(body) == {"numbers": ROOMS[name].answer({})}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("x=1,2", "x of sphere has 2 numbers instead of 3"),
        ("x=1,2,", "x of sphere must be a number, and '' is none"),
        ("x=1,2,4", "x of sphere must lie from -3 to 3"),
        ("x=1,2,nan", "x of sphere must lie from -3 to 3"),
        ("norm=group", "norm of sphere must be one of layer, rms, dyt, derf, none"),
        ("eps=-1", "eps of sphere must lie from 0 to 10"),
        ("path=/etc/passwd", "sphere has no 'path': it has x, norm, eps, alpha, affine, gamma"),
        ("eps=1&eps=2", "a parameter is given twice"),
    ],
)
def test_states_that_a_room_does_not_have(lab: str, said: str, words: str) -> None:
    status, body, _ = ask(lab, f"/api/rooms/sphere?{said}")
    assert (status, json.loads(body)) == (400, {"error": words})


def test_no_such_room(lab: str) -> None:
    status, body, _ = ask(lab, "/api/rooms/none")
    assert status == 404 and "there is no such room" in json.loads(body)["error"]


def test_nothing_outside_the_page(lab: str, tmp_path: Path) -> None:
    """Neither above the page's folder nor by an absolute path, however it is written."""
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    source = STATIC.parent / "app.py"
    assert source.is_file()
    for path in (
        "/../app.py",
        "/%2e%2e/app.py",
        "/..%2fapp.py",
        "/assets/../../app.py",
        "/assets/..%5c..%5capp.py",
        f"/{secret}",
        f"/{quote(str(secret), safe='')}",
        f"/reports/{quote(str(secret), safe='')}.json",
        "/reports/../app.py",
        "/reports/%2e%2e%2fapp.json",
        f"/api/rooms/{quote(str(secret), safe='')}",
    ):
        status, body, _ = ask(lab, path)
        assert status in (404, 405), path
        assert "secret" not in body.replace(str(secret), "") and "import" not in body
    assert ask(lab, "/index.html")[0] == 200


def test_only_get(lab: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(lab).netloc, timeout=10)
    for path in ("/session.json", "/api/rooms/sphere", "/"):
        connection.request("POST", path, body="{}")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 405
    connection.close()


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"^port {port} cannot be used \(.*\): choose another by --port$"):
            listen(port)


def test_a_second_lab(lab: str) -> None:
    port = urlsplit(lab).port
    assert port is not None
    with pytest.raises(PortTaken, match=rf"^a lab runs at http://127.0.0.1:{port}/ already: open that, or"):
        listen(port)


def test_from_the_command_line(lab: str, tmp_path: Path) -> None:
    """The port is said, Ctrl-C ends it with 130, and a port in use is one line and exit code 2."""
    import signal

    command = [sys.executable, "-m", "gaugekit.cli.main", "lab", "--no-open"]
    process = subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("the lab is at http://127.0.0.1:")
    address = line.split()[4]
    assert ask(address, "/session.json")[0] == 200
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "gaugekit: interrupted\n")
    port = urlsplit(lab).port
    done = subprocess.run([*command, "--port", str(port)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"gaugekit: a lab runs at http://127.0.0.1:{port}/ already")
