"""What is forgotten: LayerNorm at eps = 0 sees neither a shift along 1 nor a length, and a negative scale as a flip."""

from __future__ import annotations

import torch

from gaugekit.geometry.normalization import centre, fibre, layer_norm
from gaugekit.lab.room import Number, Room, State

__all__ = ["FORGOTTEN"]

START = (1.5, -0.9, 0.3)


def numbers(state: State) -> dict[str, object]:
    x, scale, shift = torch.tensor(START, dtype=torch.float64), state["scale"], state["shift"]
    # At scale 0 the point lies on the line along 1, which no fibre holds.
    moved = fibre(x, scale, shift) if scale else torch.full_like(x, shift)
    output = layer_norm(moved)
    return {
        "moved": moved,
        "output": output,
        "unsigned": output * (1 if scale > 0 else -1 if scale < 0 else 0),
        "mean": moved.mean(),
        "length": centre(moved).norm(),
        "away": (output - layer_norm(x)).norm(),
    }


FORGOTTEN = Room(
    "forgotten",
    {"scale": Number(1.0, -2.0, 2.0), "shift": Number(0.0, -1.5, 1.5)},
    numbers,
    {"start": START},
)
