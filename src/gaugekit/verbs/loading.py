"""Reading tensors that must be numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from gaugekit.checkpoint import PART, Checkpoint
from gaugekit.errors import CheckpointError


def load_finite(checkpoint: Checkpoint, name: str) -> Tensor:
    """One tensor; refused if it is quantised, or if one of its entries is not finite."""
    tensor = checkpoint.load(name)
    for part in tensor.reshape(-1).split(PART):
        require_finite(name, part)
    return tensor


def require_finite(name: str, part: Tensor) -> None:
    """Raise `CheckpointError` if a part of the tensor `name` holds integers, floats of eight bits, which mean nothing
    without their scales, NaN or infinities."""
    if not part.is_floating_point() or part.dtype.itemsize < 2:
        raise CheckpointError(
            f"tensor {name} holds {str(part.dtype).removeprefix('torch.')} numbers: the checkpoint is quantised; "
            "use the unquantised one (inspect --no-spectra reads headers only)"
        )
    if not torch.isfinite(part).all():
        raise CheckpointError(f"tensor {name} holds NaN or infinite numbers: the checkpoint is damaged")
