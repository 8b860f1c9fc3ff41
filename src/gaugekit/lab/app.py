"""The lab as a web application: the page, numbers of rooms, and reports of the model.

Nothing that a request says is a path: rooms and reports have names, and files are those of the page alone.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from gaugekit.lab.reports import Made, Reports
from gaugekit.lab.room import BadState
from gaugekit.lab.rooms import ROOMS

__all__ = ["STATIC", "application"]

STATIC = Path(__file__).parent / "static"
"""The front end, built from `web/`."""

HOSTS = ("127.0.0.1", "localhost", "[::1]")

# The page runs its own files alone; a report is one file that brings its script and style with it.
PAGE = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"
REPORT = (
    "default-src 'none'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'self'"
)


def application(reports: Reports) -> Starlette:
    """The lab with the reports of a model, which may still be on their way."""

    def session(_: Request) -> Response:
        return JSONResponse(reports.session(live=True))

    async def room(request: Request) -> Response:
        found = ROOMS.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404, f"there is no such room: the rooms are {', '.join(ROOMS)}")
        words = request.query_params
        if len(words.multi_items()) != len(words):
            raise HTTPException(400, "a parameter is given twice")
        numbers = await asyncio.to_thread(found.answer, dict(words))
        return JSONResponse({"numbers": numbers})

    def made(request: Request) -> Made:
        report = reports.ready(request.path_params["name"])
        if report is None:
            raise HTTPException(404, "there is no such report, or it is not ready")
        return report

    def document(request: Request) -> Response:
        return Response(made(request).json, media_type="application/json")

    def page(request: Request) -> Response:
        return HTMLResponse(made(request).html, headers={"content-security-policy": REPORT})

    app = Starlette(
        routes=[
            Route("/session.json", session),
            Route("/api/rooms/{name}", room),
            Route("/reports/{name}.json", document),
            Route("/reports/{name}.html", page),
            Mount("/", StaticFiles(directory=STATIC, html=True)),
        ],
        exception_handlers={BadState: _bad_state, HTTPException: _refused},
    )
    app.add_middleware(Guarded)
    return app


class Guarded:
    """Answers only who calls the lab by a name of this machine, and says what a browser may do with the answer.

    A page elsewhere whose name is made to point here (DNS rebinding) still sends its own name.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host = Headers(scope=scope).get("host", "")
        name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
        if name.lower() not in HOSTS:
            await PlainTextResponse("the lab answers to localhost only", 421)(scope, receive, send)
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                said = {key.lower() for key, _ in message["headers"]}
                for key, value in (
                    (b"content-security-policy", PAGE.encode()),
                    (b"cross-origin-resource-policy", b"same-origin"),
                    (b"referrer-policy", b"no-referrer"),
                    (b"x-content-type-options", b"nosniff"),
                    (b"cache-control", b"no-cache"),
                ):
                    if key not in said:
                        message["headers"].append((key, value))
            await send(message)

        await self._app(scope, receive, guarded)


def _bad_state(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)
