"""Reports of the model that the lab was started with: made one after the other, while the page is already there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from threading import Lock
from typing import Any

from gaugekit.errors import GaugekitError
from gaugekit.verbs.inspect import Track, untracked

__all__ = ["Made", "Report", "Reports"]


@dataclass(frozen=True)
class Made:
    """A report as its page and as JSON, both text."""

    html: str
    json: str


@dataclass(frozen=True)
class Report:
    """One that is to be made. `make` is given a verb's `track`, and raises `GaugekitError` if it cannot be made."""

    name: str
    make: Callable[[Track[Any]], Made]


class Reports:
    """The model's name, if there is one, and its reports. `track` shows progress elsewhere too.

    `make_all` makes them; everything else may be called from other threads meanwhile.
    """

    def __init__(self, model: str | None = None, reports: Sequence[Report] = (), track: Track[Any] = untracked) -> None:
        self._model = model
        self._reports = tuple(reports)
        self._track = track
        self._made: dict[str, Made] = {}
        self._failed: dict[str, str] = {}
        self._doing: dict[str, str] = {}  # at most one: what is being made, and how far it is
        self._lock = Lock()

    def make_all(self) -> None:
        """In their order; one that cannot be made is said to have failed, and why."""
        for report in self._reports:
            self._say(report.name, "")
            try:
                made = report.make(self._following(report.name))
            except GaugekitError as error:
                with self._lock:
                    self._failed[report.name] = str(error)
            except Exception as error:
                # A thread of the server would take it to its grave.
                line = " ".join(f"{type(error).__name__}: {error}".split())
                with self._lock:
                    self._failed[report.name] = f"an error inside gaugekit: {line}"
            else:
                with self._lock:
                    self._made[report.name] = made

    def ready(self, name: str) -> Made | None:
        with self._lock:
            return self._made.get(name)

    @property
    def failed(self) -> dict[str, str]:
        with self._lock:
            return dict(self._failed)

    def session(self, live: bool) -> dict[str, Any]:
        """What the page asks first. `live`: numbers are computed when they are asked for."""
        with self._lock:
            states = [self._state(report.name) for report in self._reports]
        return {"version": version("gaugekit"), "live": live, "model": self._model, "reports": states}

    def _state(self, name: str) -> dict[str, str]:
        if name in self._failed:
            return {"name": name, "status": "failed", "message": self._failed[name]}
        if name in self._made:
            return {"name": name, "status": "ready", "page": f"./reports/{name}.html", "json": f"./reports/{name}.json"}
        if name in self._doing:
            return {"name": name, "status": "working", "message": self._doing[name]}
        return {"name": name, "status": "waiting"}

    def _say(self, name: str, what: str) -> None:
        with self._lock:
            self._doing = {name: what}

    def _following(self, name: str) -> Track[Any]:
        def track(items: Iterable[Any], total: int | None, what: str) -> Iterator[Any]:
            of = "" if total is None else f" of {total}"
            for done, item in enumerate(self._track(items, total, what)):
                self._say(name, f"{what}, {done}{of}")
                yield item

        return track
