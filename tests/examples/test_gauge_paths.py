"""The example runs as it says, and shows what it is there to show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_paths(model: str, tmp_path: Path) -> None:
    file, figure = tmp_path / "paths.json", tmp_path / "paths.svg"
    script = [sys.executable, str(ROOT / "examples" / "gauge_paths.py")]
    done = subprocess.run(
        [
            *script,
            "--model",
            model,
            "--steps",
            "8",
            "--conditions",
            "30",
            "--rates",
            "1",
            "--json",
            str(file),
            "--figure",
            str(figure),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {row["optimizer"]: row["largest_difference"][0] for row in json.loads(file.read_text())["rows"]}
    assert all(name in done.stdout for name in found)
    assert found["QuotientAdam"] < 1e-10 and found["QuotientSGD, momentum"] < 1e-10
    assert all(found[name] > 1e-4 for name in ("SGD", "SGD, momentum", "AdamW", "Horizontal(AdamW)"))
    assert figure.read_text().count("<path") > 7 * 2
