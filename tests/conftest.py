"""A browser for whatever is shown in one, and pages that keep what they ask for and complain of; Ctrl-C is heard."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def pytest_configure() -> None:
    """A shell starts what it runs in the background deaf to Ctrl-C, and so would be every command that is tested."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine to show the page in")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


class Heard:
    """Pages of a browser, all that they asked for and all that they complained of."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.asked: list[str] = []
        self.said: list[str] = []
        self.pages: list[Any] = []

    @property
    def fetched(self) -> list[str]:
        """What was asked for and does not lie in a page itself."""
        return [url for url in self.asked if not url.startswith(("data:", "blob:"))]

    def open(self, address: str, width: int = 1280, **options: Any) -> Any:
        page = self._browser.new_page(viewport={"width": width, "height": 800}, **options)
        page.on("request", lambda each: self.asked.append(each.url))
        page.on("console", lambda each: self.said.append(f"{each.type}: {each.text}"))
        page.on("pageerror", lambda each: self.said.append(str(each)))
        page.on("dialog", lambda each: (self.said.append(f"dialog: {each.message}"), each.dismiss()))
        self.pages.append(page)
        page.goto(address)
        return page

    def close(self) -> None:
        while self.pages:
            self.pages.pop().close()


@pytest.fixture
def heard(browser: Any) -> Iterator[Heard]:
    """What a page says on the console is a failure, unless a test takes it out of `said`."""
    found = Heard(browser)
    yield found
    found.close()
    assert found.said == []
