"""The lab on a port of this machine, and of no other."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from collections.abc import Callable
from contextlib import closing
from urllib.error import URLError

import uvicorn

from gaugekit.errors import GaugekitError
from gaugekit.lab.app import application
from gaugekit.lab.reports import Reports

__all__ = ["PortTaken", "listen", "serve"]

HOST = "127.0.0.1"


class PortTaken(GaugekitError):
    """Something else listens there."""


def listen(port: int) -> socket.socket:
    """A socket on the loopback interface; port 0 is any that is free. Raises `PortTaken`."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
        bound.listen()
    except OSError as error:
        bound.close()
        if _is_lab(port):
            raise PortTaken(
                f"a lab runs at http://{HOST}:{port}/ already: open that, or choose another port by --port"
            ) from error
        raise PortTaken(f"port {port} cannot be used ({error.strerror}): choose another by --port") from error
    return bound


def serve(
    reports: Reports, bound: socket.socket, started: Callable[[str], None], failed: Callable[[str, str], None]
) -> None:
    """Answer until interrupted, which raises `KeyboardInterrupt`. Reports are made meanwhile; `started` is told the
    address once the page can be opened, and `failed` the name of a report that could not be made, and why."""
    address = f"http://{HOST}:{bound.getsockname()[1]}/"
    server = _Server(
        uvicorn.Config(application(reports), log_level="warning", lifespan="off", access_log=False, workers=1),
        lambda: started(address),
    )

    def make() -> None:
        reports.make_all()
        for name, why in reports.failed.items():
            failed(name, why)

    threading.Thread(target=make, daemon=True).start()
    with closing(bound):
        server.run(sockets=[bound])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tell()


def _is_lab(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{HOST}:{port}/session.json", timeout=2) as answer:
            return "reports" in json.load(answer)
    except (OSError, URLError, ValueError):
        return False
