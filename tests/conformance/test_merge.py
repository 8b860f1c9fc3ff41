"""merge on checkpoints of every family: disguises of a model merge to the model itself, by every method."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import CASES, first_of_each
from merging import RECIPES, apart, merged
from on_disk import Save
from oracle import Case, Tiny

from gaugekit.verbs.scramble import scramble
from gaugekit.verbs.verify import verify

EACH = first_of_each(CASES)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_disguises_merge_to_the_model_itself(case: Case, save: Save, tmp_path: Path) -> None:
    """mergekit PR#365: a permuted copy of a model as a test. Here a copy from anywhere on the orbit, and every method;
    what is written is loaded by `transformers` and computes what the model does."""
    a = save(Tiny(case, eps=1e-5), "a")
    scramble(a, tmp_path / "b", seed=1, observable=case.observable)
    assert apart(a, tmp_path / "b") > 0.1
    for method, recipe in RECIPES.items():
        report = merged(tmp_path, recipe, method)
        assert (report.method, report.written, len(report.sources)) == (method, True, 2)
        assert apart(a, tmp_path / method) < 1e-6
    assert verify(a, tmp_path / "slerp", observable=case.observable).largest < 1e-6


@pytest.mark.parametrize(
    "case", [case for case in EACH if case.model_type in ("gpt2", "llama", "bert", "gpt_neox")], ids=str
)
def test_without_alignment_the_function_is_lost(case: Case, save: Save, tmp_path: Path) -> None:
    """What the test above would see if nothing were aligned."""
    a = save(Tiny(case, eps=1e-5), "a")
    scramble(a, tmp_path / "b", seed=1, observable=case.observable)
    for method in ("linear", "slerp", "task_arithmetic"):
        report = merged(tmp_path, RECIPES[method] + "align: none\n", method)
        assert report.align == "none"
        assert apart(a, tmp_path / method) > 0.1
        assert verify(a, tmp_path / method, observable=case.observable).largest > 0.1
