"""Turn the frame: what a rotation of the stream changes, what it does not, and the frame that dressing chooses."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from gaugekit.geometry.dressing import dress
from gaugekit.lab.room import Number, Room, State
from gaugekit.lab.rooms.turning import turning
from gaugekit.linalg import random_orthogonal

__all__ = ["FRAME"]

TOKENS, WIDTH, UNITS = 4, 2, 3
LARGEST = 2.4  # the first singular value of the states
NUDGE = 0.15  # length of what the states are nudged by


@cache
def fixed() -> dict[str, Tensor]:
    """left (4, 2) and right (2, 2): of the states' singular value decomposition; weight (3, 2), that reads the stream;
    nudge (4, 2)."""
    generator = torch.Generator().manual_seed(3)
    left = random_orthogonal(TOKENS, generator)[:, :WIDTH]
    right = turning(-math.degrees(0.5))
    weight = torch.randn(UNITS, WIDTH, dtype=torch.float64, generator=generator).mul(100).round() / 100
    # A nudge that mixes the two directions: it turns the frame most where the two are of one length.
    mixed = left @ torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64) @ right
    return {"left": left, "right": right, "weight": weight, "nudge": NUDGE * mixed / mixed.norm()}


def numbers(state: State) -> dict[str, object]:
    given = fixed()
    turn = turning(state["theta"])
    sizes = torch.tensor([LARGEST, LARGEST - state["gap"]], dtype=torch.float64)
    states = (given["left"] * sizes) @ given["right"] @ turn.mT
    weight, nudge = given["weight"] @ turn.mT, given["nudge"] @ turn.mT
    dressed, nudged = dress(states), dress(states + nudge)
    return {
        "states": states,
        "weight": weight,
        "gram": states @ states.mT,
        "output": torch.tanh(states @ weight.mT),
        "singular": torch.linalg.svdvals(states),
        "dressed": dressed.states,
        "nudged": nudged.states,
        "moved": (nudged.states - dressed.states).norm() / nudge.norm(),
    }


FRAME = Room(
    "frame",
    {"theta": Number(0.0, -180.0, 180.0), "gap": Number(1.1, 0.01, 2.0)},
    numbers,
    fixed() | {"largest": LARGEST},
)
