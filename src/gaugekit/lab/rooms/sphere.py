"""Plane and sphere: what the norms make of a vector in space."""

from __future__ import annotations

import torch
from torch import Tensor

from gaugekit.geometry import normalization
from gaugekit.geometry.sphere import angle
from gaugekit.lab.room import Choice, Number, Room, State, Vector

__all__ = ["SPHERE"]

NORMS = ("layer", "rms", "dyt", "derf", "none")


def normalized(state: State, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """x (..., d) behind the norm of a state: `norm`, `eps`, and `alpha` of DyT and Derf (whose shift is 0)."""
    kind, eps, alpha = state["norm"], state["eps"], state["alpha"]
    if kind == "layer":
        return normalization.layer_norm(x, weight, eps=eps)
    if kind == "rms":
        return normalization.rms_norm(x, weight, eps=eps)
    if kind == "dyt":
        return normalization.dyt(x, alpha, weight)
    if kind == "derf":
        return normalization.derf(x, alpha, 0.0, weight)
    return x if weight is None else x * weight


def turned(x: Tensor, y: Tensor) -> float:
    """The angle between two vectors in degrees; 0 where one of them is zero."""
    return float(torch.rad2deg(angle(x, y))) if x.any() and y.any() else 0.0


def numbers(state: State) -> dict[str, object]:
    x = torch.tensor(state["x"], dtype=torch.float64)
    weight = torch.tensor(state["gamma"], dtype=torch.float64) if state["affine"] == "on" else None
    projected, output = normalization.centre(x), normalized(state, x, weight)
    return {
        "projected": projected,
        "output": output,
        "length_in": x.norm(),
        "length_projected": projected.norm(),
        "length_out": output.norm(),
        "mean_out": output.mean(),
        "turned": turned(x, output),
    }


SPHERE = Room(
    "sphere",
    {
        "x": Vector((2.6, -0.8, 2.4), -3.0, 3.0),
        "norm": Choice("layer", NORMS),
        "eps": Number(0.0, 0.0, 10.0),
        "alpha": Number(0.5, 0.1, 3.0),
        "affine": Choice("off", ("off", "on")),
        "gamma": Vector((1.6, 0.7, 1.0), 0.2, 2.0),
    },
    numbers,
)
