"""The uniform direction: what is measured of states whose answer is known, and that each verdict can come out."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import pytest
import torch
from drawn import normal

from gaugekit.geometry.normalization import centre, uniform_direction
from gaugekit.studies.fitting import made, sized
from gaugekit.studies.study import ArmResult, Measured, Result
from gaugekit.studies.uniform_direction import STUDY, measure, null_spread, shares

PLACES = 7


def made_up(share: float, rank: float) -> Measured:
    point = {"share": share, "rank": rank, "random": [0.4, 0.9, 1.8], "angles": [88.0] * PLACES}
    end = [[88.0, 6.0, share]] * PLACES
    return {"held_out": 2.0, "through": [[0, {**point, "share": 1.0}], [500, point]], "end": end}


def result(layer: list[Measured], rms: list[Measured]) -> Result:
    runs = (layer, rms)
    arms = tuple(
        ArmResult(arm, {"0.001": 2.0}, 1e-3, True, tuple(each)) for arm, each in zip(STUDY.arms, runs, strict=True)
    )
    return Result(STUDY.name, False, STUDY.full, arms, {})


def seeds(share: float, rank: float) -> list[Measured]:
    return [made_up(share * factor, rank) for factor in (0.9, 1.0, 1.1)]


BROKEN: Measured = {"failed": "the loss is nan"}
FAR, NEAR = seeds(0.05, 0.0), seeds(1.2, 0.7)


@pytest.mark.parametrize(
    ("layer", "rms", "verdict"),
    [
        (FAR, FAR, "confirmed"),
        (FAR, NEAR, "not confirmed"),
        (NEAR, FAR, "not confirmed"),
        (FAR, seeds(0.3, 0.3), "not confirmed"),  # so do random directions
        (FAR, [made_up(share, 0.0) for share in (0.1, 0.4, 1.6)], "inconclusive"),
        (FAR, [BROKEN] * 3, "inconclusive"),
        (FAR, [*FAR, BROKEN], "inconclusive"),
        ([*FAR, BROKEN], FAR, "inconclusive"),
        (FAR, [*NEAR, BROKEN], "not confirmed"),
        ([BROKEN] * 3, NEAR, "not confirmed"),
    ],
)
def test_each_verdict_can_come_out(layer: list[Measured], rms: list[Measured], verdict: str) -> None:
    found = result(layer, rms)
    conclusion = STUDY.conclude(found)
    assert conclusion.verdict == verdict
    assert all(len(row) == len(table.columns) for table in conclusion.tables for row in table.rows)
    assert "(edge)" in conclusion.tables[0].rows[0][1]
    plt.close(STUDY.draw(found))


def test_broken_runs_are_said() -> None:
    found = STUDY.conclude(result([BROKEN] * 3, [*FAR, BROKEN]))
    assert "LayerNorm undecided: broke off;" in found.line
    assert "RMSNorm undecided: mean angles 88° to 88°" in found.line and "(1 of 4 runs broke off)" in found.line
    assert found.tables[0].rows[0][2:] == ("broke off",) * 5
    assert found.tables[0].rows[1][2] == "broke off" and "broke off" not in found.tables[0].rows[1][3:]


def test_ninety_degrees_alone_confirm_nothing() -> None:
    """States as random vectors are: at 90° to 1, and to anything."""
    assert STUDY.conclude(result(seeds(1.0, 0.5), seeds(1.0, 0.5))).verdict == "not confirmed"


def test_shares_of_random_states_are_one_and_of_centred_ones_zero() -> None:
    d, n = 24, 40_000
    directions = torch.cat([uniform_direction(d).unsqueeze(0), normal(5, d, seed=1)])
    found = shares(normal(n, d), directions)
    torch.testing.assert_close(found, torch.ones(6, dtype=torch.float64), rtol=0, atol=5 * math.sqrt(2 / n))
    assert shares(centre(normal(100, d)), directions)[0] < 1e-12
    assert shares(uniform_direction(d).expand(3, d), directions)[0] == pytest.approx(d)


def test_shares_do_not_see_lengths_and_add_up_over_a_basis() -> None:
    x = normal(50, 6)
    lengths = normal(50, 1, seed=2).abs()
    basis = torch.linalg.qr(normal(6, 6, seed=3)).Q
    torch.testing.assert_close(shares(x, basis), shares(x * lengths, 3 * basis))
    assert float(shares(x, basis).sum()) == pytest.approx(6.0)


@pytest.mark.parametrize("d", [3, 64])
def test_spread_of_random_angles(d: int) -> None:
    x = torch.nn.functional.normalize(normal(200_000, d), dim=-1)[:, 0]
    assert null_spread(d) == pytest.approx(float(x.acos().rad2deg().std()), rel=0.01)


def test_spread_on_the_sphere_in_three_dimensions_is_known() -> None:
    """cos is uniform there, and the variance of the angle (π² − 8)/4."""
    assert null_spread(3) == pytest.approx(math.degrees(math.sqrt((math.pi**2 - 8) / 4)))


def test_measured_on_a_model_whose_states_are_known() -> None:
    """With embeddings that sum to zero and branches that write nothing, no state has a part along 1."""
    model = made(sized(STUDY.quick, 40, norm="layer", positions="none"), 0)
    windows = [torch.randint(40, (8, 16), generator=torch.Generator().manual_seed(0))]
    before = measure(model, windows)
    assert 0.05 < before["share"] < 20
    with torch.no_grad():
        model.embedding.weight.copy_(centre(model.embedding.weight))
        for block in model.blocks:
            block.attention.out.weight.zero_()
            block.mlp.down.weight.zero_()
    found = measure(model, windows)
    assert found["share"] < 1e-10 and found["rank"] == 0.0
    assert all(row[0] == pytest.approx(90, abs=1e-3) and row[1] < 1e-3 for row in found["places"])
    assert found["random"] == sorted(found["random"]) and 0.3 < found["random"][1] < 1.3


def test_arms_have_equal_parameters_and_differ_in_the_norm_alone() -> None:
    settings = [dict(arm.settings) for arm in STUDY.arms]
    assert {s.pop("norm") for s in settings} == {"layer", "rms"}
    assert settings[0] == settings[1]
    models = [made(sized(STUDY.full, 90, **arm.settings), 0) for arm in STUDY.arms]
    first, second = (dict(model.named_parameters()) for model in models)
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
