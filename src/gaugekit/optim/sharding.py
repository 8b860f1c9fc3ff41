"""Work on sharded parameters: whole tensors for a moment, a share of the heads for each process.

With FSDP2 a parameter is a DTensor, of which a process holds some rows; a factor's heads may lie across processes (W_O
does). Each process therefore reads whole factors, one batch of pairs at a time, works on its share of their heads,
keeps the state of that share, and writes its rows of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

__all__ = ["as_share", "local", "mesh_of", "rows_like", "share", "united", "whole"]


def mesh_of(x: Tensor) -> DeviceMesh | None:
    return x.device_mesh if isinstance(x, DTensor) else None


def whole(x: Tensor) -> Tensor:
    """All of a tensor, on every process."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def local(x: Tensor) -> Tensor:
    """What this process holds."""
    return x.to_local() if isinstance(x, DTensor) else x


def share(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """This process's share (N', ...) of a tensor (N, ...) that all processes have."""
    return x if mesh is None else _split(x, mesh).to_local()


def as_share(x: Tensor, mesh: DeviceMesh | None, count: int) -> Tensor:
    """A share (N', ...) as part of the tensor (N, ...) that processes hold together, N = count; nothing is sent."""
    if mesh is None:
        return x
    shape = torch.Size((count, *x.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x.contiguous(), mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=shape, stride=stride)


def united(x: Tensor, mesh: DeviceMesh | None, count: int) -> Tensor:
    """The tensor (N, ...) of which every process has a share (N', ...), on every process."""
    return x if mesh is None else whole(as_share(x, mesh, count))


def rows_like(x: Tensor, parameter: Tensor) -> Tensor:
    """Of a tensor of the parameter's shape that all processes have, what this process holds of the parameter."""
    if not isinstance(parameter, DTensor):
        return x
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=parameter.placements).to_local()


def _split(x: Tensor, mesh: DeviceMesh) -> DTensor:
    replicated = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=[Shard(0)] * mesh.ndim)
