"""Two fine-tunes of one encoder, merged, and put into one set of coordinates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModel

from gaugekit.verbs.align import align
from gaugekit.verbs.merge import merge
from gaugekit.verbs.scramble import scramble
from gaugekit.verbs.verify import verify

BASE, FIRST, SECOND = "bert_pretrained", "bert_ft", "bert_ft_10k_25s"


def recipe(folder: Path, method: str, models: dict[str, float], **more: object) -> Path:
    entries = [{"model": path, "parameters": {"weight": weight}} for path, weight in models.items()]
    path = folder / f"{method}.yaml"
    path.write_text(yaml.safe_dump({"merge_method": method, "models": entries, **more}), encoding="utf-8")
    return path


def states(folder: Path) -> torch.Tensor:
    ids = torch.randint(20, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return AutoModel.from_pretrained(folder, dtype=torch.float64)(input_ids=ids).last_hidden_state


@pytest.mark.parametrize("method", ["linear", "ties", "dare_linear"])
def test_fine_tunes_of_one_base(method: str, rxnfp: Path, tmp_path: Path) -> None:
    """They have heads for other tasks, which the result takes from the reference; it loads by `transformers`."""
    models = {str(rxnfp / FIRST): 0.5, str(rxnfp / SECOND): 0.5}
    more = {} if method == "linear" else {"base_model": str(rxnfp / BASE)}
    report = merge(recipe(tmp_path, method, models, **more), tmp_path / "out")
    assert report.written
    found = states(tmp_path / "out")
    assert torch.isfinite(found).all()
    ends = [states(rxnfp / name) for name in (FIRST, SECOND)]
    apart = (ends[0] - ends[1]).norm()
    # A model of its own, nearer to each of the two than they are to each other.
    assert all(0.05 * apart < (found - end).norm() < apart for end in ends)


def test_a_disguised_fine_tune_merges_as_the_plain_one(rxnfp: Path, tmp_path: Path) -> None:
    scramble(rxnfp / SECOND, tmp_path / "disguised", seed=2, dtype="float64")
    for name, second in (("plain", rxnfp / SECOND), ("hidden", tmp_path / "disguised")):
        merge(recipe(tmp_path, "linear", {str(rxnfp / FIRST): 0.5, str(second): 0.5}), tmp_path / name)
    plain, hidden = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "hidden"))
    assert max(float((plain[name] - hidden[name]).abs().max()) for name in plain if "pooler" not in name) < 1e-5
    # As they are, the mean of a model and a disguise computes something else.
    models = {str(rxnfp / FIRST): 0.5, str(tmp_path / "disguised"): 0.5}
    merge(recipe(tmp_path, "linear", models, align="none"), tmp_path / "naive")
    assert (states(tmp_path / "naive") - states(tmp_path / "plain")).norm() > states(tmp_path / "plain").norm() / 2


def test_alignment_keeps_a_fine_tune(rxnfp: Path, tmp_path: Path) -> None:
    report = align(rxnfp / BASE, rxnfp / FIRST, tmp_path / "out")
    assert report.after < 1.02 * report.before
    assert verify(rxnfp / FIRST, tmp_path / "out").equivalent
