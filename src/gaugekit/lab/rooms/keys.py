"""Why attention cares: which keys a query can make win, and the query that attends to all alike."""

from __future__ import annotations

import torch
from torch import Tensor

from gaugekit.geometry.keys import uniform_query, unselectable
from gaugekit.geometry.normalization import layer_norm
from gaugekit.lab.room import Choice, Number, Room, State, Vector
from gaugekit.linalg import orthonormal_complement_of_ones

__all__ = ["KEYS"]

TIE = 1e-9  # scores nearer than that are tied: the first of them wins


def plain_keys() -> Tensor:
    """(7, 2): five corners, and two that lie inside the hull of the others."""
    corners = [(1.5, 0.9), (-0.5, 1.7), (-1.8, 0.1), (-0.7, -1.5), (1.1, -1.3)]
    return torch.tensor([*corners, (0.35, 0.3), (-0.55, -0.35)], dtype=torch.float64)


def states() -> Tensor:
    """(7, 3): the plain keys as vectors of space."""
    lift = torch.tensor([0.4, -0.2, 0.3, 0.9, -0.6, 1.1, 0.2], dtype=torch.float64)
    return plain_keys() @ frame().mT + lift.unsqueeze(-1)


def frame() -> Tensor:
    """(3, 2): coordinates of the plane of mean zero."""
    return orthonormal_complement_of_ones(3).to(torch.float64)


def numbers(state: State) -> dict[str, object]:
    q = torch.tensor(state["q"], dtype=torch.float64)
    if state["keys"] == "plain":
        keys, query = plain_keys(), q
    else:
        keys = layer_norm(states())
        query = frame() @ q + state["along"] * uniform_query(torch.ones(3, dtype=torch.float64))
    scores = state["sharpness"] * (keys @ query)
    weights = torch.softmax(scores, 0)
    best = scores.sort(descending=True).values
    return {
        "weights": weights,
        "winner": int((scores >= best[0] - TIE).to(torch.uint8).argmax()),
        "lead": best[0] - best[1],
        "entropy": torch.special.entr(weights).sum(),
        "never": int(unselectable(keys).mask.sum()),
    }


KEYS = Room(
    "keys",
    {
        "q": Vector((0.9, 0.7), -2.0, 2.0),
        "keys": Choice("plain", ("plain", "layer")),
        "along": Number(0.0, -3.0, 3.0),
        "sharpness": Number(1.5, 0.1, 10.0),
    },
    numbers,
    {
        "plain": plain_keys(),
        "layer": layer_norm(states()) @ frame(),
        "never": unselectable(plain_keys()).mask.to(torch.float64),
    },
)
