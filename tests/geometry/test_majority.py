"""The majority example: its arms, its short cut, and what is a theorem about its keys."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gaugekit.geometry.keys import unselectable
from gaugekit.geometry.normalization import layer_norm

PATH = Path(__file__).parents[2] / "docs" / "examples" / "majority.py"
SPEC = importlib.util.spec_from_file_location("majority_example", PATH)
assert SPEC is not None and SPEC.loader is not None
majority = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = majority
SPEC.loader.exec_module(majority)

SCALED, FREE = ["layer", "scaling only"], ["projection only", "none"]


def test_sequences_have_a_clear_majority() -> None:
    counts = majority.sequences(500, torch.Generator().manual_seed(0))
    assert counts.shape == (500, 20)
    assert bool((counts.sum(-1) == 50).all()) and bool((counts >= 1).all())
    best = counts.topk(2).values
    assert bool((best[:, 0] - best[:, 1] >= 6).all())
    assert bool((counts.argmax(-1).bincount(minlength=20) > 5).all())


def test_arms_differ_in_one_thing() -> None:
    """In Brody et al.'s code the arm without projection also changed the radius by 8: control arms differ in one."""
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    arms = {arm: norm(x) for arm, norm in majority.ARMS.items()}
    for arm in SCALED:
        radius = torch.linalg.vector_norm(arms[arm], dim=-1)
        torch.testing.assert_close(radius, torch.full_like(radius, math.sqrt(8)))
    for arm, projected in (("layer", True), ("projection only", True), ("scaling only", False), ("none", False)):
        assert (float(arms[arm].sum(-1).abs().max()) < 1e-12) == projected
    torch.testing.assert_close(arms["layer"], majority.ARMS["scaling only"](arms["projection only"]))
    torch.testing.assert_close(arms["layer"], layer_norm(x))
    assert torch.equal(arms["none"], x)


def test_arms_of_a_seed_share_parameters_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Tensor]] = {}
    plain = majority.loss_and_accuracy

    def recorded(model: torch.nn.Module, counts: Tensor) -> tuple[Tensor, Tensor]:
        seen[arm] += [p.detach().clone() for p in model.parameters()] if not seen[arm] else []
        seen[arm].append(counts)
        return plain(model, counts)

    monkeypatch.setattr(majority, "loss_and_accuracy", recorded)
    for arm in majority.ARMS:
        seen[arm] = []
        majority.run(arm, seed=3, steps=2, number=600)
    for arm in majority.ARMS:
        assert len(seen[arm]) == len(seen["none"]) == 7 + 4  # parameters; measured, two steps, measured
        assert all(torch.equal(a, b) for a, b in zip(seen[arm], seen["none"], strict=True))
    assert not torch.equal(seen["none"][-2], seen["none"][-3])


@pytest.mark.parametrize("arm", SCALED + FREE)
def test_counting_classes_is_attention_over_all_tokens(arm: str) -> None:
    model = majority.Majority(majority.ARMS[arm], 8, seed=1).double()
    counts = majority.sequences(3, torch.Generator().manual_seed(0)).double()
    logits = model(counts)
    for b in range(3):
        tokens = torch.repeat_interleave(torch.arange(20), counts[b].long())
        x = model.embedding[tokens]
        y = model.norm(x)
        weights = torch.softmax((y @ model.query.mT) @ (y @ model.key.mT).mT / math.sqrt(8), -1)
        states = x + weights @ y @ model.value.mT @ model.output.mT
        torch.testing.assert_close(logits[b, tokens], states @ model.readout.mT + model.bias)


def test_scaling_leaves_no_key_unselectable() -> None:
    """A theorem with scaling; without it, narrow models start with many unselectable keys, and wide ones with few."""
    for width, seeds in ((3, 10), (8, 100)):
        shares = {
            arm: unselectable(torch.stack([majority.Majority(norm, width, seed).keys() for seed in range(seeds)])).share
            for arm, norm in majority.ARMS.items()
        }
        assert all(shares[arm] == 0 for arm in SCALED)
        assert all(shares[arm] > 0 for arm in FREE)
        assert shares["projection only"] > shares["none"]  # one dimension less


def test_short_runs_learn() -> None:
    runs = [majority.run(arm, seed=0, steps=60, number=2000) for arm in majority.ARMS]
    for run in runs:
        assert run.loss < run.first_loss - 0.5
        if run.arm in SCALED:
            assert run.unselectable_before == run.unselectable_after == 0
    lines = majority.table(runs).splitlines()
    assert len(lines) == 5 and all(arm in lines[i + 1] for i, arm in enumerate(majority.ARMS))


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs.json"
    monkeypatch.setattr(sys, "argv", ["majority.py", "--steps", "1", "--seeds", "1", "--json", str(out)])
    majority.main()
    assert "projection only" in capsys.readouterr().out
    runs = json.loads(out.read_text())
    assert [run["arm"] for run in runs] == list(majority.ARMS)
    assert runs[0]["steps_to"] == {"0.9": None, "0.98": None}
