"""Pages whose code runs say what their code prints today."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if page.read_text(encoding="utf-8").startswith("<!-- runs")]


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    spec = importlib.util.spec_from_file_location("build", DOCS / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_prints_what_the_page_says(page: Path, builder, tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    copy = tmp_path / page.name
    shutil.copy(page, copy)
    assert builder.build(copy) == page.read_text(encoding="utf-8")
    for name in re.findall(r"!\[[^\]]*\]\((figures/[^)]+)\)", page.read_text(encoding="utf-8")):
        assert (DOCS / name).exists(), f"{name} is missing: run docs/build.py"


def test_another_output_is_noticed(builder, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n", encoding="utf-8")
    assert "```text\n1\n```" in builder.build(page)
