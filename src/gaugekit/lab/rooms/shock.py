"""The two-dimensional shock: LayerNorm of a plane has two outputs, and jumps between them."""

from __future__ import annotations

import torch

from gaugekit.geometry.jacobians import layer_norm_jacobian, rms_norm_jacobian
from gaugekit.geometry.normalization import centre, layer_norm, rms_norm
from gaugekit.lab.room import Choice, Number, Room, State, Vector

__all__ = ["SHOCK"]


def numbers(state: State) -> dict[str, object]:
    x, eps = torch.tensor(state["x"], dtype=torch.float64), state["eps"]
    layer = state["norm"] == "layer"
    output = (layer_norm if layer else rms_norm)(x, eps=eps)
    jacobian = (layer_norm_jacobian if layer else rms_norm_jacobian)(x, eps=eps)
    return {
        "projected": centre(x),
        "output": output,
        "length": output.norm(),
        "sum": output.sum(),
        "side": float(torch.sign(x[0] - x[1])),
        "slope": torch.linalg.matrix_norm(jacobian, 2),
    }


SHOCK = Room(
    "shock",
    {
        "x": Vector((1.9, 0.6), -3.0, 3.0),
        "norm": Choice("layer", ("layer", "rms")),
        "eps": Number(0.0, 0.0, 10.0),
    },
    numbers,
)
