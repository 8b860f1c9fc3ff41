"""Every room in a browser: it opens, it can be dragged, and what it prints is what Python says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from gaugekit.lab.data import document
from gaugekit.lab.room import Choice, Number, Vector
from gaugekit.lab.rooms import ROOMS

WIDTHS = (1280, 390)
AGREE = 1e-9  # relative, of what the browser and Python compute
STATES = 40  # drawn at random, of a room

everywhere = pytest.mark.parametrize("name", ROOMS)


def settled(page: Any) -> None:
    """Python has answered for the state that is shown."""
    page.wait_for_selector("[data-check=done]")


def printed(page: Any) -> dict[str, tuple[str, bool]]:
    """All printed numbers by their labels, and whether they are said never to change."""
    cells = page.locator("[data-number]").evaluate_all(
        "cells => cells.map(cell => [cell.dataset.number, cell.textContent, 'invariant' in cell.dataset])"
    )
    return {label: (text, invariant) for label, text, invariant in cells}


def drag(page: Any, right: float, down: float) -> None:
    box = page.locator(".handle").first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + right / 2, y + down / 2)
    page.mouse.move(x + right, y + down)
    page.mouse.up()


def test_what_the_page_is_built_with() -> None:
    """`python -m gaugekit.lab.data > web/src/data.json` was run after the last change."""
    built = Path(__file__).parents[2] / "web" / "src" / "data.json"
    assert built.read_text(encoding="utf-8") == document()


def test_the_rooms_of_the_page(lab: str, heard: Any) -> None:
    page = heard.open(lab)
    assert page.evaluate("lab.rooms") == list(ROOMS)
    links = page.locator("nav a")
    assert links.count() == len(ROOMS) + 1
    for i in range(links.count()):
        links.nth(i).click()
        title = links.nth(i).inner_text()
        page.get_by_role("heading", level=1, name=title, exact=True).wait_for()
        page.wait_for_function("title => document.title == title", arg=f"{title} · gaugekit lab", timeout=2000)
        if i:  # a screen reader goes on from there
            page.wait_for_function("document.activeElement.tagName == 'H1'", timeout=2000)
    assert all(url.startswith(lab) for url in heard.asked)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@everywhere
def test_it_opens(lab: str, heard: Any, name: str, width: int, scheme: str) -> None:
    page = heard.open(f"{lab}#{name}", width, color_scheme=scheme)
    settled(page)
    assert float(page.locator("[data-check]").get_attribute("data-apart")) < AGREE
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out of the page
    assert all(url.startswith(lab) for url in heard.asked)
    assert page.locator("h1").count() == 1
    unnamed = page.evaluate(
        """[...document.querySelectorAll("input, select, button, [tabindex='0'], svg[role]")].filter(each =>
            !each.getAttribute("aria-label") && !each.textContent.trim() && !(each.labels && each.labels.length)
        ).map(each => each.outerHTML)"""
    )
    assert unnamed == []


@everywhere
def test_dragging(lab: str, heard: Any, name: str) -> None:
    """Something moves, and what is said never to change does not."""
    page = heard.open(f"{lab}#{name}")
    settled(page)
    before = printed(page)
    assert before
    for right, down in ((35, -25), (-60, 10), (20, 45)):
        drag(page, right, down)
        page.wait_for_timeout(400)  # the address follows, then Python is asked
        settled(page)
        after = printed(page)
        fixed = {label for label, (_, invariant) in before.items() if invariant}
        assert {label for label, (_, invariant) in after.items() if invariant} == fixed
        assert {label: after[label] for label in fixed} == {label: before[label] for label in fixed}
    assert any(after[label] != before[label] for label in before)
    assert "?" in page.url
    assert float(page.locator("[data-check]").get_attribute("data-apart")) < AGREE


@everywhere
def test_arrow_keys(lab: str, heard: Any, name: str) -> None:
    page = heard.open(f"{lab}#{name}")
    settled(page)
    before = printed(page)
    handle = page.locator(".handle").first
    assert handle.get_attribute("aria-label")
    handle.focus()
    for key in ("ArrowUp", "Shift+ArrowRight"):
        page.keyboard.press(key)
    page.wait_for_timeout(400)
    settled(page)
    assert printed(page) != before


@everywhere
def test_a_view_can_be_shared(lab: str, heard: Any, name: str) -> None:
    """Whoever opens the address sees the same numbers; Start again leads back."""
    page = heard.open(f"{lab}#{name}")
    settled(page)
    first = printed(page)
    drag(page, 30, -40)
    page.wait_for_timeout(400)
    settled(page)
    seen, address = printed(page), page.url
    other = heard.open(address)
    settled(other)
    assert printed(other) == seen != first
    other.get_by_role("button", name="Start again").click()
    other.wait_for_timeout(400)
    settled(other)
    assert printed(other) == first and "?" not in other.url


def words(name: str, seed: int) -> str:
    """A state at random; often at a bound, where something may be zero or tied."""
    draw = random.Random(f"{name} {seed}")

    def number(low: float, high: float) -> str:
        if draw.random() < 0.15:
            return f"{draw.choice([low, high, min(max(0.0, low), high)]):g}"
        return f"{draw.uniform(low, high):.4f}"

    said = []
    for key, parameter in ROOMS[name].parameters.items():
        if isinstance(parameter, Number):
            said.append(f"{key}={number(parameter.low, parameter.high)}")
        elif isinstance(parameter, Vector):
            entries = [number(parameter.low, parameter.high) for _ in parameter.default]
            if draw.random() < 0.1:
                entries = entries[:1] * len(entries)
            said.append(f"{key}={','.join(entries)}")
        else:
            assert isinstance(parameter, Choice)
            said.append(f"{key}={draw.choice(parameter.options)}")
    return "&".join(said)


def difference(x: Any, y: Any) -> float:
    if isinstance(x, list):
        assert isinstance(y, list) and len(x) == len(y)
        return max((difference(a, b) for a, b in zip(x, y, strict=True)), default=0.0)
    return abs(x - y) / max(1.0, abs(x), abs(y))


@everywhere
def test_the_browser_computes_what_python_does(lab: str, heard: Any, name: str) -> None:
    page = heard.open(lab)
    states = [words(name, seed) for seed in range(STATES)]
    found = page.evaluate("([name, states]) => states.map(said => lab.numbers(name, said))", [name, states])
    for said, ours in zip(states, found, strict=True):
        with urlopen(f"{lab}api/rooms/{name}?{said}") as answer:
            theirs = json.load(answer)["numbers"]
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert difference(value, ours[key]) < AGREE, (said, key, value, ours[key])


def test_states_that_a_room_does_not_have(lab: str, heard: Any) -> None:
    """An address with mistakes opens the nearest view that there is."""
    page = heard.open(f"{lab}#sphere?x=99,1,oops&norm=none&eps=1e9&what=1")
    settled(page)
    assert page.locator("input[value=none]").is_checked()
    assert page.url.endswith("#sphere?norm=none&eps=10")
    page.goto(f"{lab}#nowhere")
    page.wait_for_timeout(200)
    assert page.locator("h1").inner_text() == page.locator("nav a").first.inner_text()


def test_a_server_that_went_away(lab: str, heard: Any) -> None:
    """The browser's numbers stay, and it is said that nobody checks them."""
    page = heard.open(f"{lab}#sphere")
    settled(page)
    page.route("**/api/**", lambda route: route.abort())
    drag(page, 30, 20)
    page.wait_for_selector("[data-check=failed]")
    assert printed(page)
    assert heard.said and all("Failed to load resource" in line for line in heard.said)
    heard.said.clear()
