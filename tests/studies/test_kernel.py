"""The kernel of a norm: what is measured of outputs whose answer is known, and that each verdict can come out."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
import torch
from drawn import normal

from gaugekit.nn.norms import LayerNorm, RMSNorm
from gaugekit.studies.fitting import made, sized
from gaugekit.studies.kernel import LOST, STUDY, kernel_of, measure, worst
from gaugekit.studies.study import ArmResult, Measured, Result
from gaugekit.studies.watching import Passage

KEYS = ("lost", "rival", "turned", "variance", "next", "null", "own", "exact")


def made_up(lost: float, rival: float, null: int = 1, first: int | None = None, /, **lists: list[float]) -> Measured:
    """Alike in all seven norms but for the lists that are given; `first`: null directions at the start."""
    own = int(null > 0 and lost <= LOST)
    end = dict(zip(KEYS, ([x] * 7 for x in (lost, rival, 3.0, 1e-14, 1e-4, null, own, 1e-31)), strict=True)) | lists
    start = {**end, "rival": [lost] * 7, "null": [null if first is None else first] * 7}
    return {"held_out": 2.0, "through": [[0, worst(start)], [500, worst(end)]], "end": end}


def result(layer: list[Measured], rms: list[Measured]) -> Result:
    runs = (layer, rms)
    arms = tuple(
        ArmResult(arm, {"0.001": 2.0}, 1e-3, False, tuple(each)) for arm, each in zip(STUDY.arms, runs, strict=True)
    )
    return Result(STUDY.name, False, STUDY.full, arms, {})


GOOD, NONE = [made_up(1e-14, 1e-3)] * 3, [made_up(0.9, 0.9, 0)] * 3
BROKEN: Measured = {"failed": "the loss is nan"}


@pytest.mark.parametrize(
    ("layer", "rms", "verdict"),
    [
        (GOOD, NONE, "confirmed"),
        ([*GOOD, made_up(1e-3, 1e-2)], NONE, "not confirmed"),
        (GOOD, [*NONE, made_up(1e-14, 1e-3, 1, 0)], "not confirmed"),  # an RMSNorm with the same null direction
        (GOOD, [*NONE, made_up(0.9, 0.9, 0, 1)], "not confirmed"),  # one that has some at the start
        (GOOD, [*NONE, made_up(0.9, 0.9, 1, 0)], "confirmed"),  # another null direction, opened by training
        # One norm has a null direction, and another one γ⁻¹ where its variance is least, though not null.
        (GOOD, [*NONE, made_up(0.9, 0.9, 1, 0, null=[1, 0] * 3 + [0], lost=[0.9, 1e-14] * 3 + [0.9])], "confirmed"),
        ([*GOOD, made_up(1e-14, 1e-6)], NONE, "inconclusive"),  # γ⁻¹ has not turned: the rival does as well
        ([*GOOD, BROKEN], [*NONE, BROKEN], "inconclusive"),
        ([BROKEN] * 3, NONE, "inconclusive"),
    ],
)
def test_each_verdict_can_come_out(layer: list[Measured], rms: list[Measured], verdict: str) -> None:
    found = result(layer, rms)
    conclusion = STUDY.conclude(found)
    assert conclusion.verdict == verdict
    assert all(len(row) == len(table.columns) for table in conclusion.tables for row in table.rows)
    plt.close(STUDY.draw(found))


def test_further_null_directions_are_said() -> None:
    found = STUDY.conclude(result([*GOOD, made_up(1e-14, 1e-3, 4)], NONE))
    assert found.verdict == "confirmed" and "Further null directions: 3" in found.line


def test_words_and_numbers_are_those_of_norms_and_seeds() -> None:
    """Largest over norms; then the least or the largest over seeds, or their mean."""
    rival, turned = [1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 7e-3], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    some = [made_up(1e-14 * i, 0.0, rival=[i * x for x in rival], turned=[i * x for x in turned]) for i in (1, 2, 3)]
    found = STUDY.conclude(result(some, NONE))
    row = dict(zip(found.tables[0].columns, found.tables[0].rows[0], strict=True))
    assert row["1 − |cos| of γ⁻¹"] == "3.0e-14"
    assert row["1 − |cos| of the uniform direction, end"] == "7.0e-03"
    assert row["turn of γ⁻¹, end (°)"] == "14.00 ± 17.39"
    assert "γ⁻¹ turns by 14.0 ± 17.4°; RMSNorm has no such direction" in found.line


def passage(norm: torch.nn.Module, x: torch.Tensor) -> Passage:
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, x.shape[-1]))
        norm.bias.copy_(normal(x.shape[-1], seed=9))
        return Passage("here", norm, x, norm(x))


def test_a_layer_norm_has_the_predicted_direction_and_the_uniform_one_is_another() -> None:
    found = kernel_of(passage(LayerNorm(8).double(), normal(500, 8)))
    assert found["lost"] < 1e-12 and found["null"] == found["own"] == 1
    assert found["variance"] < 1e-28 and found["next"] > 1e-2
    assert found["rival"] > 1e-2
    assert found["turned"] == pytest.approx(
        torch.rad2deg(torch.acos(1 - torch.tensor(found["rival"], dtype=torch.float64))).item(), rel=1e-6
    )


def test_an_rms_norm_has_none() -> None:
    found = kernel_of(passage(RMSNorm(8, bias=True).double(), normal(500, 8)))
    assert found["null"] == found["own"] == 0 and found["lost"] > 1e-3 and found["variance"] > 1e-2


def test_another_null_direction_is_not_its_own() -> None:
    """A channel that an RMSNorm's input does not have is null in its output, and far from γ⁻¹."""
    x = normal(500, 8)
    x[:, 3] = 0
    found = kernel_of(passage(RMSNorm(8, bias=True).double(), x))
    assert found["null"] == 1 and found["own"] == 0 and found["lost"] > 1e-2


def test_where_more_is_null_the_direction_is_sought_in_all_of_it() -> None:
    x = normal(500, 4) @ normal(4, 8, seed=1)
    found = kernel_of(passage(LayerNorm(8).double(), x))
    assert found["null"] > 2 and found["own"] == 1 and found["lost"] < 1e-12


def test_outputs_that_do_not_vary_are_refused() -> None:
    with pytest.raises(ValueError, match="do not vary"):
        kernel_of(passage(LayerNorm(8).double(), torch.zeros(5, 8, dtype=torch.float64)))


def test_measured_on_a_model_that_has_just_been_drawn() -> None:
    windows = [torch.randint(40, (16, 16), generator=torch.Generator().manual_seed(0))] * 2
    for arm in STUDY.arms:
        found = measure(made(sized(STUDY.quick, 40, **arm.settings), 0), windows)
        assert all(len(values) == 5 for values in found.values())
        assert found["turned"] == pytest.approx([0.0] * 5, abs=1e-5) and found["lost"] == found["rival"]
        layer = arm.settings["norm"] == "layer"
        assert found["null"] == found["own"] == [int(layer)] * 5
        assert (max(found["lost"]) < 1e-9) == layer and (max(found["exact"]) < 1e-28) == layer
        assert (min(found["lost"]) > 1e-2) == (not layer)


def test_the_worst_is_kept() -> None:
    found = {key: [1e-5, 3e-5, 2e-5] for key in KEYS} | {"null": [1, 2, 1], "own": [0, 1, 0]}
    kept = worst(found)
    assert (kept["lost"], kept["least"], kept["nearest"], kept["null"], kept["own"]) == (3e-5, 1e-5, 1e-5, 2, 1)
    assert "next" not in kept


def test_arms_have_equal_parameters_and_differ_in_the_norm_alone() -> None:
    settings = [dict(arm.settings) for arm in STUDY.arms]
    assert {s.pop("norm") for s in settings} == {"layer", "rms"}
    assert settings[0] == settings[1]
    models = [made(sized(STUDY.full, 90, **arm.settings), 0) for arm in STUDY.arms]
    first, second = (dict(model.named_parameters()) for model in models)
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_there_are_tokens_enough_for_a_full_rank() -> None:
    options = STUDY.full.options
    assert 4 * options["batch"] * options["context"] > 10 * options["width"]
