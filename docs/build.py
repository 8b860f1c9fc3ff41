"""Pages whose code runs: executes the python blocks of a page, in order and in one namespace, and writes what they
print into the text block behind each. Figures are what the code saves.

    python docs/build.py docs/sphere.md [more pages]
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```\n)?", re.DOTALL)


def build(page: Path) -> str:
    """The page with the output of its code; the code runs in the page's folder."""
    namespace: dict[str, Any] = {}

    def run(block: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.chdir(page.parent), contextlib.redirect_stdout(printed):
            exec(compile(block["code"], str(page), "exec"), namespace)
        output = f"\n```text\n{printed.getvalue()}```\n" if printed.getvalue() else ""
        return f"```python\n{block['code']}```\n{output}"

    return BLOCK.sub(run, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(build(path), encoding="utf-8")
