"""Numbers of the rooms, against formulas of their own; what never changes, and what does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gaugekit.lab.rooms import ROOMS, frame, head, keys, steps

Numbers = Callable[..., dict[str, Any]]


def asked(room: str) -> Numbers:
    """The numbers of a room by the words of a URL."""

    def numbers(**words: Any) -> dict[str, Any]:
        def word(value: Any) -> str:
            return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

        return ROOMS[room].answer({name: word(value) for name, value in words.items()})

    return numbers


def vector(draw: random.Random, count: int, low: float = -3, high: float = 3) -> list[float]:
    return [round(draw.uniform(low, high), 4) for _ in range(count)]


def wide(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def near(x: Any, y: Any, within: float = 1e-9) -> bool:
    return bool((wide(x) - wide(y)).abs().max() < within)


# --- which numbers share a ruler ------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["batch", "layer", "rms"])
def test_which_outputs_move(axis: str) -> None:
    """By the outputs themselves, with one number a little larger."""
    numbers, draw = asked("ruler"), random.Random(1)
    x = vector(draw, 16)
    for cell in ("1-1", "2-4", "4-3"):
        i, j = (int(digit) - 1 for digit in cell.split("-"))
        found = numbers(x=x, axis=axis, cell=cell)
        step = 1e-6
        larger = [v + (step if k == 4 * i + j else 0) for k, v in enumerate(x)]
        slope = (wide(numbers(x=larger, axis=axis)["output"]) - wide(found["output"])) / step
        assert near(slope, found["pull"], 1e-4)
        assert found["moves"] == 4
        ruler = wide(found["pull"])[:, j] if axis == "batch" else wide(found["pull"])[i]
        assert int((ruler != 0).sum()) == 4  # all of them on its ruler
        assert found["own"] == found["pull"][i][j]


def test_one_axis_is_the_other_of_the_transposed() -> None:
    numbers, x = asked("ruler"), vector(random.Random(2), 16)
    turned = wide(x).reshape(4, 4).mT.flatten().tolist()
    assert near(numbers(x=x, axis="layer")["output"], wide(numbers(x=turned, axis="batch")["output"]).mT)
    assert not near(numbers(x=x, axis="layer")["output"], numbers(x=x, axis="batch")["output"], 0.1)


def test_a_ruler_without_length() -> None:
    found = asked("ruler")(x=[1.5] * 16)
    assert near(found["output"], torch.zeros(4, 4)) and found["moves"] == 0


# --- plane and sphere -----------------------------------------------------------------------------------------------


sphere = asked("sphere")


def test_layer_norm_by_hand() -> None:
    found = sphere(x="1,2,3")
    assert found["projected"] == [-1, 0, 1]
    assert found["output"] == pytest.approx([-math.sqrt(1.5), 0, math.sqrt(1.5)])
    assert found["turned"] == pytest.approx(math.degrees(math.acos(1 / math.sqrt(7))))
    weighted = sphere(x="1,2,3", affine="on", gamma="2,1,0.5")
    assert weighted["output"] == pytest.approx([-2 * math.sqrt(1.5), 0, 0.5 * math.sqrt(1.5)])


def test_what_never_changes() -> None:
    draw = random.Random(0)
    for _ in range(50):
        x = ",".join(f"{draw.uniform(-3, 3):.4f}" for _ in range(3))
        layer, rms = sphere(x=x), sphere(x=x, norm="rms")
        assert layer["length_out"] == pytest.approx(math.sqrt(3)) == rms["length_out"]
        assert layer["mean_out"] == pytest.approx(0, abs=1e-12)
        assert rms["turned"] == pytest.approx(0, abs=1e-6)
        assert abs(rms["mean_out"]) > 1e-6 and layer["turned"] > 1e-3  # and not the other way round
        assert sphere(x=x, norm="rms", eps=1)["length_out"] < math.sqrt(3) - 1e-3


def test_pointwise_ones() -> None:
    x = [0.5, -1.0, 2.0]
    said = ",".join(map(str, x))
    assert sphere(x=said, norm="dyt", alpha=0.7)["output"] == pytest.approx([math.tanh(0.7 * v) for v in x])
    assert sphere(x=said, norm="derf", alpha=0.7)["output"] == pytest.approx([math.erf(0.7 * v) for v in x])
    assert sphere(x=said, norm="none")["output"] == x


def test_nothing_has_no_direction() -> None:
    assert sphere(x="2,2,2")["output"] == [0, 0, 0]
    assert sphere(x="0,0,0", norm="rms")["turned"] == 0


# --- the two-dimensional shock --------------------------------------------------------------------------------------


def test_two_outputs_of_the_whole_plane() -> None:
    numbers, draw = asked("shock"), random.Random(3)
    for _ in range(30):
        a, b = vector(draw, 2)
        found = numbers(x=[a, b])
        sign = 1.0 if a > b else -1.0
        assert near(found["output"], [sign, -sign]) and found["slope"] < 1e-12 and found["side"] == sign
        opened = numbers(x=[a, b], eps=0.5)
        assert abs(opened["output"][0]) < 1 and opened["slope"] > 1e-3
        assert near(opened["output"][0], (a - b) / 2 / math.sqrt((a - b) ** 2 / 4 + 0.5))
    assert numbers(x=[1, 1])["output"] == [0, 0]
    circle = {tuple(numbers(x=vector(draw, 2), norm="rms")["output"]) for _ in range(10)}
    assert len(circle) == 10 and all(math.hypot(*y) == pytest.approx(math.sqrt(2)) for y in circle)


# --- what is forgotten ----------------------------------------------------------------------------------------------


def test_a_fibre_is_one_point() -> None:
    numbers, draw = asked("forgotten"), random.Random(4)
    start = numbers()
    for _ in range(30):
        scale, shift = round(draw.uniform(0.01, 2), 4), round(draw.uniform(-1.5, 1.5), 4)
        found, flipped = numbers(scale=scale, shift=shift), numbers(scale=-scale, shift=shift)
        assert near(found["output"], start["output"]) and found["away"] < 1e-9
        assert near(flipped["output"], [-y for y in start["output"]]) and flipped["away"] > 1
        assert near(flipped["unsigned"], start["output"])
        assert found["length"] == pytest.approx(scale * start["length"])
        assert found["mean"] == pytest.approx(scale * start["mean"] + shift)
    assert numbers(scale=0)["output"] == [0, 0, 0]


# --- what moves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["layer", "rms", "dyt"])
def test_gradients_are_those_of_autograd(kind: str, eps: float) -> None:
    numbers, draw = asked("tangent"), random.Random(5)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "layer": lambda x: F.layer_norm(x, (3,), eps=eps),
        "rms": lambda x: x / (x.square().mean() + eps).sqrt(),
        "dyt": lambda x: torch.tanh(0.5 * x),
    }
    for _ in range(10):
        x, g = vector(draw, 3), vector(draw, 3, -2, 2)
        found = numbers(x=x, g=g, norm=kind, eps=eps)
        jacobian = torch.autograd.functional.jacobian(functions[kind], wide(x))
        assert isinstance(jacobian, Tensor)
        assert near(found["output"], functions[kind](wide(x)))
        assert near(found["behind"], jacobian.mT @ wide(g))
        assert near(found["singular"], torch.linalg.svdvals(jacobian))
        ranks = {"layer": 1 if eps == 0 else 2, "rms": 2 if eps == 0 else 3, "dyt": 3}
        assert found["rank"] == ranks[kind]
        assert (abs(found["along_ray"]) < 1e-9) == (eps == 0 and kind != "dyt")
        assert (abs(found["along_ones"]) < 1e-9) == (kind == "layer")


def test_the_longer_the_weaker() -> None:
    numbers = asked("tangent")
    assert numbers(x="2,-1,0.6")["behind_length"] == pytest.approx(numbers(x="1,-0.5,0.3")["behind_length"] / 2)


# --- why attention cares --------------------------------------------------------------------------------------------


def winners(kind: str) -> set[int]:
    numbers, turns = asked("keys"), [math.radians(t) for t in range(0, 360, 3)]
    return {numbers(q=[round(math.cos(t), 4), round(math.sin(t), 4)], keys=kind)["winner"] for t in turns}


def test_who_can_win() -> None:
    assert winners("plain") == {0, 1, 2, 3, 4}
    assert winners("layer") == set(range(7))
    numbers = asked("keys")
    assert numbers()["never"] == 2 and numbers(keys="layer")["never"] == 0


def test_weights() -> None:
    found = asked("keys")(q="1.2,-0.4", sharpness=2)
    scores = 2 * keys.plain_keys() @ wide([1.2, -0.4])
    weights = torch.softmax(scores, 0)
    assert near(found["weights"], weights) and found["winner"] == int(weights.argmax())
    assert found["entropy"] == pytest.approx(float(-(weights * weights.log()).sum()))
    assert found["lead"] == pytest.approx(float(scores.topk(2).values.diff().abs()))


def test_the_uniform_query() -> None:
    numbers = asked("keys")
    found = numbers(q="0,0", along=3, keys="layer")
    assert near(found["weights"], [1 / 7] * 7) and found["entropy"] == pytest.approx(math.log(7))
    along = [numbers(q="0.7,-1", along=c, keys="layer")["weights"] for c in (-3, 0, 2)]
    assert near(along[0], along[1]) and near(along[1], along[2])
    assert not near(along[0], found["weights"], 0.05)


# --- the fingerprint ------------------------------------------------------------------------------------------------


def test_the_dead_direction() -> None:
    numbers, draw = asked("fingerprint"), random.Random(6)
    for _ in range(10):
        gamma = vector(draw, 3, 0.2, 2.0)
        found, other = numbers(gamma=gamma), numbers(gamma=gamma, norm="rms")
        inverse = 1 / wide(gamma)
        assert near(found["predicted"], inverse / inverse.norm())
        assert abs(found["eigenvalues"][2]) < 1e-12 and abs(found["along"]) < 1e-12
        assert found["cosine"] == pytest.approx(1)
        assert other["along"] > 1e-2 and other["eigenvalues"][2] > 1e-4
        assert near(other["semiaxes"], sorted((math.sqrt(3) * v for v in gamma), reverse=True))


# --- on the sphere --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ngpt", "retract", "exp"])
def test_paths(method: str) -> None:
    numbers, draw = asked("steps"), random.Random(7)
    h = wide(steps.START)
    for _ in range(10):
        f, alpha, count = vector(draw, 3, -2, 2), round(draw.uniform(0.05, 1), 4), draw.randint(1, 12)
        found = numbers(f=f, alpha=alpha, count=count, method=method)
        assert len(found["path"]) == len(found["path_sphere"]) == count + 1
        assert near(found["path"][-1], h + count * alpha * wide(f))
        lengths = wide(found["path_sphere"]).norm(dim=-1)
        assert near(lengths, torch.ones(count + 1))
        assert found["length_sphere"] == pytest.approx(1)
        if method == "ngpt":
            first = h + alpha * (wide(f) / wide(f).norm() - h)
            assert near(found["path_sphere"][1], first / first.norm())
        if method == "exp":
            tangent = alpha * (wide(f) - h * (h @ wide(f)))
            assert found["first_turn_sphere"] == pytest.approx(math.degrees(float(tangent.norm())) % 360, abs=1e-6) or (
                float(tangent.norm()) > math.pi
            )


@pytest.mark.parametrize("method", ["ngpt", "retract", "exp"])
def test_nowhere_to_go(method: str) -> None:
    found = asked("steps")(f="0,0,0", alpha=1, method=method, count=2.5)
    assert len(found["path"]) == 4 and near(found["path_sphere"], [steps.START] * 4)
    assert found["left"] == pytest.approx(90) and found["left_sphere"] == pytest.approx(90)


def test_space_grows_and_turns_less() -> None:
    found = asked("steps")(f="1,1,0.5", alpha=0.3, count=12)
    assert found["length"] > 3 and found["last_turn"] < found["first_turn"] / 3


# --- turn the frame -------------------------------------------------------------------------------------------------


def test_what_turning_leaves() -> None:
    numbers, draw = asked("frame"), random.Random(8)
    first = numbers()
    for _ in range(20):
        found = numbers(theta=round(draw.uniform(-180, 180), 3))
        for name in ("gram", "output", "singular", "dressed", "nudged"):
            assert near(found[name], first[name])
        assert not near(found["states"], first["states"], 1e-3) and not near(found["weight"], first["weight"], 1e-3)
    given = frame.fixed()
    assert near(given["left"].mT @ given["left"], torch.eye(2)) and given["nudge"].norm() == pytest.approx(0.15)


def test_the_ambiguity_opens() -> None:
    numbers = asked("frame")
    moved = [numbers(gap=gap)["moved"] for gap in (2.0, 1.0, 0.4, 0.1)]
    assert moved == sorted(moved) and moved[-1] > 4 * moved[0]


# --- gauge of a head ------------------------------------------------------------------------------------------------

FIXED = ("g_qk", "g_vo", "attention", "output", "loss", "quotient_apart", "quotient_here")


def bases(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    return {
        "theta": round(draw.uniform(-180, 180), 3),
        "first": round(draw.uniform(0.25, 3), 3),
        "shear": round(draw.uniform(-2, 2), 3),
        "second": round(draw.uniform(0.25, 3), 3),
        "mirror": draw.choice(["off", "on"]),
    }


def test_what_a_basis_leaves() -> None:
    numbers = asked("head")
    first = numbers()
    for seed in range(12):
        found = numbers(**bases(seed))
        for name in FIXED:
            assert near(found[name], first[name]), name
        for name in ("q", "k", "v", "o"):
            assert not near(found[name], first[name], 1e-2), name
        assert found["quotient_apart"] < 1e-9 and found["adam_apart"] > 0.05 and found["sgd_apart"] > 1e-3


def test_sgd_does_not_see_rotations_and_adam_does() -> None:
    found = asked("head")(theta=70, first=1, shear=0, second=1)
    assert found["sgd_apart"] < 1e-12 and found["adam_apart"] > 0.05


def test_the_head_is_attention() -> None:
    given = head.fixed()
    q, k, v = (given["x"] @ given[name].mT for name in "qkv")
    output = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0] @ given["o"]
    found = asked("head")()
    assert near(found["output"], output)
    assert found["loss"] == pytest.approx(float((output - given["target"]).square().sum() / 6))
    assert near(found["attention"], torch.tril(wide(found["attention"])))
