"""Which numbers share a ruler: BatchNorm, LayerNorm and RMSNorm differ in the axis along which they measure."""

from __future__ import annotations

import torch
from torch import Tensor

from gaugekit.geometry.jacobians import layer_norm_jacobian, rms_norm_jacobian
from gaugekit.geometry.normalization import rms_norm, standardize
from gaugekit.lab.room import Choice, Number, Room, State, Vector

__all__ = ["RULER"]

SIDE = 4
MOVES = 1e-9  # derivatives below that are none

TABLE = (
    *(1.2, -0.4, 0.7, 2.6),
    *(0.3, 0.9, -1.1, 1.8),
    *(2.1, 1.7, -0.2, 3.9),
    *(-0.8, 0.2, 0.5, 1.1),
)


def numbers(state: State) -> dict[str, object]:
    x = torch.tensor(state["x"], dtype=torch.float64).reshape(SIDE, SIDE)
    row, column = (int(digit) - 1 for digit in state["cell"].split("-"))
    eps, along_rows = state["eps"], state["axis"] != "batch"
    output = rms_norm(x, eps=eps) if state["axis"] == "rms" else standardize(x, -1 if along_rows else 0, eps)
    ruler, place = (x[row], column) if along_rows else (x[:, column], row)
    jacobian = (rms_norm_jacobian if state["axis"] == "rms" else layer_norm_jacobian)(ruler, eps=eps)
    pull: Tensor = torch.zeros_like(x)
    if along_rows:
        pull[row] = jacobian[:, place]
    else:
        pull[:, column] = jacobian[:, place]
    on_ruler = output[row] if along_rows else output[:, column]
    return {
        "output": output,
        "pull": pull,
        "moves": int((pull.abs() > MOVES).sum()),
        "own": pull[row, column],
        "ruler_mean": ruler.mean(),
        "ruler_deviation": ruler.var(correction=0).sqrt(),
        "output_mean": on_ruler.mean(),
        "output_square": on_ruler.square().mean(),
    }


RULER = Room(
    "ruler",
    {
        "x": Vector(TABLE, -5.0, 5.0),
        "axis": Choice("layer", ("batch", "layer", "rms")),
        "cell": Choice("2-3", tuple(f"{i}-{j}" for i in range(1, SIDE + 1) for j in range(1, SIDE + 1))),
        "eps": Number(0.0, 0.0, 10.0),
    },
    numbers,
)
