"""The fingerprint: the direction in which normalized states do not vary, and which the norm's weight decides."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gaugekit.geometry.ellipsoid import ellipsoid, kernel_direction
from gaugekit.geometry.normalization import layer_norm, rms_norm
from gaugekit.lab.room import Choice, Room, State, Vector

__all__ = ["FINGERPRINT"]

COUNT = 48


@cache
def states() -> Tensor:
    """(COUNT, 3): drawn once, wider in one direction than in others, around a mean."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([1.0, 0.6, 1.4], dtype=torch.float64)
    drawn = torch.randn(COUNT, 3, dtype=torch.float64, generator=generator) * spread
    return (drawn + torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64)).mul(1000).round() / 1000


def numbers(state: State) -> dict[str, object]:
    gamma = torch.tensor(state["gamma"], dtype=torch.float64)
    layer = state["norm"] == "layer"
    output = (layer_norm if layer else rms_norm)(states(), gamma)
    covariance = output.mT.cov(correction=0)
    predicted = kernel_direction(gamma)
    found = torch.linalg.eigh(covariance)
    return {
        "eigenvalues": found.eigenvalues.flip(0),
        "predicted": predicted,
        "cosine": (found.eigenvectors[:, 0] @ predicted).abs(),
        "along": predicted @ covariance @ predicted,
        "semiaxes": ellipsoid(gamma, kind="layer" if layer else "rms").semiaxes,
    }


FINGERPRINT = Room(
    "fingerprint",
    {"gamma": Vector((1.5, 0.6, 1.0), 0.2, 2.0), "norm": Choice("layer", ("layer", "rms"))},
    numbers,
    {"states": states()},
)
