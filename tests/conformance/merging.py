"""Recipes of every method for models that lie side by side, and what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from gaugekit.verbs.merge import MergeReport, merge

WEIGHTS = "model.safetensors"

LINEAR = (
    "merge_method: linear\nmodels: [{model: a, parameters: {weight: 0.3}}, {model: b, parameters: {weight: 0.9}}]\n"
)
TASK = "base_model: a\nmodels: [{model: b}]\nparameters: {weight: 0.7}\n"
RECIPES = {
    "linear": LINEAR,
    "slerp": "merge_method: slerp\nbase_model: a\nmodels: [{model: b}]\nparameters: {t: 0.4}\n",
    "task_arithmetic": f"merge_method: task_arithmetic\n{TASK}",
    "ties": f"merge_method: ties\n{TASK.replace('0.7', '0.7, density: 0.5')}",
    "dare_linear": f"merge_method: dare_linear\n{TASK}",
    "dare_ties": f"merge_method: dare_ties\n{TASK.replace('0.7', '0.7, density: 0.4')}",
}


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / WEIGHTS)


def apart(a: Path, b: Path) -> float:
    """Largest difference of any tensor."""
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def merged(folder: Path, recipe: str, out: str = "out", **options: Any) -> MergeReport:
    path = folder / "recipe.yaml"
    path.write_text(recipe, encoding="utf-8")
    return merge(path, folder / out, **options)
