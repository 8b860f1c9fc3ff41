"""On the sphere: the same residual update in space and on the sphere, layer after layer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gaugekit.geometry.sphere import angle, lerp, step
from gaugekit.lab.room import Choice, Number, Room, State, Vector

__all__ = ["STEPS"]

# Of length 1, and opposite to no vector with few digits: nGPT's step to the antipode may end in zero.
START = (math.sqrt(3 / 6), -math.sqrt(1 / 6), math.sqrt(2 / 6))
MOST = 12


def path(update: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """(count + 1, 3): the state before each layer, and behind the last."""
    places = [torch.tensor(START, dtype=torch.float64)]
    for _ in range(count):
        places.append(update(places[-1]))
    return torch.stack(places)


def numbers(state: State) -> dict[str, object]:
    f = torch.tensor(state["f"], dtype=torch.float64)
    alpha, count, method = state["alpha"], math.floor(state["count"] + 0.5), state["method"]

    def on_sphere(h: Tensor) -> Tensor:
        if not f.any():  # nowhere to go
            return h
        return lerp(h, f, alpha) if method == "ngpt" else step(h, alpha * f, method=method)

    flat, round_ = path(lambda h: h + alpha * f, count), path(on_sphere, count)
    turned, turned_round = (torch.rad2deg(angle(each[:-1], each[1:])) for each in (flat, round_))
    left, left_round = (torch.rad2deg(angle(each[-1], f)) for each in (flat, round_))
    return {
        "length": flat[-1].norm(),
        "length_sphere": round_[-1].norm(),
        "first_turn": turned[0],
        "last_turn": turned[-1],
        "first_turn_sphere": turned_round[0],
        "last_turn_sphere": turned_round[-1],
        "left": left,
        "left_sphere": left_round,
        "path": flat,
        "path_sphere": round_,
    }


STEPS = Room(
    "steps",
    {
        "f": Vector((-0.5, 0.9, 1.2), -2.0, 2.0),
        "alpha": Number(0.3, 0.0, 1.5),
        "count": Number(6.0, 1.0, float(MOST)),
        "method": Choice("ngpt", ("ngpt", "retract", "exp")),
    },
    numbers,
    {"start": START},
)
