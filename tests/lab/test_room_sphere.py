"""Plane and sphere."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from gaugekit.lab.rooms import ROOMS

SPHERE = ROOMS["sphere"]


def numbers(**words: Any) -> dict[str, Any]:
    return SPHERE.answer({name: str(word) for name, word in words.items()})


def test_layer_norm_by_hand() -> None:
    found = numbers(x="1,2,3")
    assert found["projected"] == [-1, 0, 1]
    assert found["output"] == pytest.approx([-math.sqrt(1.5), 0, math.sqrt(1.5)])
    assert found["turned"] == pytest.approx(math.degrees(math.acos(1 / math.sqrt(7))))
    weighted = numbers(x="1,2,3", affine="on", gamma="2,1,0.5")
    assert weighted["output"] == pytest.approx([-2 * math.sqrt(1.5), 0, 0.5 * math.sqrt(1.5)])


def test_what_never_changes() -> None:
    draw = random.Random(0)
    for _ in range(50):
        x = ",".join(f"{draw.uniform(-3, 3):.4f}" for _ in range(3))
        layer, rms = numbers(x=x), numbers(x=x, norm="rms")
        assert layer["length_out"] == pytest.approx(math.sqrt(3)) == rms["length_out"]
        assert layer["mean_out"] == pytest.approx(0, abs=1e-12)
        assert rms["turned"] == pytest.approx(0, abs=1e-6)
        assert abs(rms["mean_out"]) > 1e-6 and layer["turned"] > 1e-3  # and not the other way round
        assert numbers(x=x, norm="rms", eps=1)["length_out"] < math.sqrt(3) - 1e-3


def test_pointwise_ones() -> None:
    x = [0.5, -1.0, 2.0]
    said = ",".join(map(str, x))
    assert numbers(x=said, norm="dyt", alpha=0.7)["output"] == pytest.approx([math.tanh(0.7 * v) for v in x])
    assert numbers(x=said, norm="derf", alpha=0.7)["output"] == pytest.approx([math.erf(0.7 * v) for v in x])
    assert numbers(x=said, norm="none")["output"] == x


def test_nothing_has_no_direction() -> None:
    assert numbers(x="2,2,2")["output"] == [0, 0, 0]
    assert numbers(x="0,0,0", norm="rms")["turned"] == 0
