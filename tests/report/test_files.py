"""Whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gaugekit.report.files import OutputError, check_writable, write


def test_writes_and_replaces(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write(page, "old")
    write(page, "new ü \udcff")
    assert page.read_text(encoding="utf-8") == "new ü &#56575;"
    assert os.listdir(tmp_path) == ["page.html"]


def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write(tmp_path / "page.html", "")
    finally:
        os.umask(before)
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_broken_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    page = tmp_path / "page.html"
    write(page, "old")

    def fail(_: int) -> None:
        assert len(os.listdir(tmp_path)) == 2  # the page is written beside the old one
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError if isinstance(error, OSError) else KeyboardInterrupt):
        write(page, "new")
    assert page.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to("page.html")
    write(tmp_path / "link.html", "new")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").read_text() == "new"


def test_refuses_what_it_would_destroy_or_cannot_make(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_text("precious")
    os.mkfifo(tmp_path / "pipe.html")
    (tmp_path / "circle.html").symlink_to("circle.html")
    places = {
        weights: "no .html file",
        tmp_path: "is a directory",
        tmp_path / "pipe.html": "not a regular file",
        tmp_path / "missing" / "page.html": "there is no directory",
        weights / "page.html": "there is no directory",
        Path("~nobody-of-that-name/page.html"): "page.html",
        tmp_path / ("x" * 300 + ".html"): "cannot be written",
    }
    for place, why in places.items():
        with pytest.raises(OutputError, match=why):
            write(place, "page")
    assert weights.read_text() == "precious"


def test_checking_leaves_no_trace(tmp_path: Path) -> None:
    check_writable(tmp_path / "page.html")
    assert os.listdir(tmp_path) == []
