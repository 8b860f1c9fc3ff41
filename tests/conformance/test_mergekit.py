"""Aligned models for mergekit: its own command makes of them what merge does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from cases import gpt_like, llama_like
from merging import LINEAR, RECIPES, apart, merged, tensors
from on_disk import Save
from oracle import Case, Tiny

from gaugekit.errors import CheckpointError, GaugekitError
from gaugekit.verbs.scramble import scramble
from gaugekit.verbs.verify import verify

# One process for all recipes: it takes seconds to start.
MERGEKIT = """
import sys
from mergekit.scripts.run_yaml import main
for recipe, out in zip(sys.argv[1::2], sys.argv[2::2]):
    main([recipe, out, "--quiet"], standalone_mode=False)
"""


def mergekit(*pairs: tuple[Path, Path]) -> None:
    arguments = [str(path) for pair in pairs for path in pair]
    ran = subprocess.run([sys.executable, "-c", MERGEKIT, *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


SHAPES = {
    "gpt2": Case("gpt2", gpt_like()),
    "llama": Case("llama", llama_like()),
    "tied": Case("llama", llama_like(tie_word_embeddings=True)),
}


def test_mergekit_merges_what_was_aligned(save: Save, tmp_path: Path) -> None:
    pairs = []
    for shape, case in SHAPES.items():
        folder = tmp_path / shape
        folder.mkdir()
        a, b = (save(Tiny(case, seed=seed, eps=1e-5), f"{shape}/{name}") for seed, name in enumerate("ab"))
        scramble(b, folder / "c", seed=3)
        for method in ("linear", "slerp", "ties"):
            recipe = RECIPES[method].replace("model: b", "model: c")
            merged(folder, recipe, method)
            report = merged(folder, recipe, f"{method}-aligned", export_mergekit=True)
            assert report.mergekit == str(folder / f"{method}-aligned" / "mergekit.yaml")
            pairs.append((folder / f"{method}-aligned" / "mergekit.yaml", folder / f"{method}-theirs"))
            assert sorted(path.name for path in (folder / f"{method}-aligned").iterdir()) == ["c", "mergekit.yaml"]
        aligned = folder / "ties-aligned" / "c"
        assert verify(b, aligned).equivalent
        assert apart(a, aligned) < apart(a, folder / "c")
        assert "moved along its symmetry orbit to `a`" in (aligned / "README.md").read_text()
    mergekit(*pairs)
    for shape in SHAPES:
        folder = tmp_path / shape
        for method in ("linear", "slerp", "ties"):
            assert apart(folder / method, folder / f"{method}-theirs") < 1e-6
            assert apart(folder / "a", folder / method) > 1e-2
            transformers.AutoModelForCausalLM.from_pretrained(folder / f"{method}-theirs")
        assert apart(folder / "linear", folder / "slerp") > 1e-2


def test_several_models_of_one_name(save: Save, tmp_path: Path) -> None:
    """Folders are named by the models, and stay apart. Each keeps its own dtype and files."""
    tiny = Tiny(Case("llama", llama_like()))
    save(tiny, "a")
    for folder, dtype in (("one", torch.float32), ("two", torch.bfloat16)):
        (tmp_path / folder).mkdir()
        (save(tiny, f"{folder}/b", dtype=dtype) / "notes.txt").write_text(folder)
    recipe = "merge_method: ties\nbase_model: a\nmodels: [{model: one/b}, {model: two/b}]\nparameters: {weight: 1}\n"
    report = merged(tmp_path, recipe + "dtype: float16\n", export_mergekit=True)  # mergekit's to heed
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["b", "b-2", "mergekit.yaml"]
    for folder, name, dtype in (("one", "b", torch.float32), ("two", "b-2", torch.bfloat16)):
        assert {x.dtype for x in tensors(out / name).values()} == {dtype}
        assert (out / name / "notes.txt").read_text() == folder
    assert report.tensors == 2 * len(tensors(out / "b"))
    assert str(out / "b-2") in (out / "mergekit.yaml").read_text()
    assert str(tmp_path / "a") in (out / "mergekit.yaml").read_text()


def test_where_an_export_may_go(save: Save, tmp_path: Path) -> None:
    tiny = Tiny(Case("llama", llama_like()))
    save(tiny, "a"), save(tiny, "b")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("all of it")
    for overwrite, words in ((False, "exists already"), (True, "is not overwritten, because it has no mergekit.yaml")):
        with pytest.raises(CheckpointError, match=words):
            merged(tmp_path, LINEAR, "precious", export_mergekit=True, overwrite=overwrite)
    with pytest.raises(CheckpointError, match="there is no directory"):
        merged(tmp_path, LINEAR, "no/out", export_mergekit=True)
    with pytest.raises(CheckpointError, match="which goes into the merge"):
        merged(tmp_path, LINEAR, "b", export_mergekit=True, overwrite=True)
    dry = merged(tmp_path, LINEAR, export_mergekit=True, dry_run=True)
    assert not (tmp_path / "out").exists()
    for overwrite in (False, True):
        report = merged(tmp_path, LINEAR, export_mergekit=True, overwrite=overwrite)
        assert (report.bytes, report.tensors) == (dry.bytes, dry.tensors)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "out", "precious", "recipe.yaml"}


def test_nothing_is_left_of_an_export_that_fails(save: Save, tmp_path: Path) -> None:
    tiny = Tiny(Case("llama", llama_like()))
    save(tiny, "a"), save(tiny, "b")
    with pytest.raises(GaugekitError, match="mergekit can use the recipe as it is"):
        merged(tmp_path, LINEAR + "align: none\n", export_mergekit=True)
    big = tiny.theta.clone()
    big[tiny.index["lm_head.weight"].reshape(-1)] *= 1e7
    save(tiny, "b", big)
    with pytest.raises(CheckpointError, match="too large for F16"):
        merged(tmp_path, LINEAR, dtype="float16", export_mergekit=True)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "recipe.yaml"}


def test_the_reference_is_named_and_not_copied(save: Save, tmp_path: Path) -> None:
    tiny = Tiny(Case("llama", llama_like()))
    a, _ = save(tiny, "a"), save(tiny, "b")
    merged(tmp_path, RECIPES["slerp"], export_mergekit=True)
    assert json.loads((tmp_path / "out" / "b" / "config.json").read_text())["model_type"] == "llama"
    lines = (tmp_path / "out" / "mergekit.yaml").read_text().splitlines()
    assert lines[:2] == ["merge_method: slerp", f"base_model: {a}"]
