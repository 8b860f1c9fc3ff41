"""What moves: the Jacobian of a norm at a point, and what it does to a gradient."""

from __future__ import annotations

import math

import torch

from gaugekit.geometry.jacobians import dyt_jacobian, layer_norm_jacobian, rms_norm_jacobian
from gaugekit.geometry.normalization import centre, dyt, layer_norm, rms_norm
from gaugekit.lab.room import Choice, Number, Room, State, Vector

__all__ = ["TANGENT"]

ALPHA = 0.5  # of DyT
NOTHING = 1e-9


def numbers(state: State) -> dict[str, object]:
    x, g = (torch.tensor(state[name], dtype=torch.float64) for name in ("x", "g"))
    kind, eps = state["norm"], state["eps"]
    if kind == "dyt":
        output, jacobian = dyt(x, ALPHA), dyt_jacobian(x, ALPHA)
    elif kind == "layer":
        output, jacobian = layer_norm(x, eps=eps), layer_norm_jacobian(x, eps=eps)
    else:
        output, jacobian = rms_norm(x, eps=eps), rms_norm_jacobian(x, eps=eps)
    behind = jacobian.mT @ g
    radial = centre(x) if kind == "layer" else x
    size = radial.norm()
    return {
        "output": output,
        "singular": torch.linalg.svdvals(jacobian),
        "rank": int((torch.linalg.svdvals(jacobian) > NOTHING).sum()),
        "behind": behind,
        "before_length": g.norm(),
        "behind_length": behind.norm(),
        "along_ones": behind.sum() / math.sqrt(3),
        "along_ray": behind @ radial / size if size > 0 else 0.0,
    }


TANGENT = Room(
    "tangent",
    {
        "x": Vector((2.6, -0.8, 2.4), -3.0, 3.0),
        "g": Vector((-0.6, -0.9, -1.1), -2.0, 2.0),
        "norm": Choice("layer", ("layer", "rms", "dyt")),
        "eps": Number(0.0, 0.0, 10.0),
    },
    numbers,
    {"alpha": ALPHA},
)
