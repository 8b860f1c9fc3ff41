"""Work on sharded parameters: whole tensors for a moment, a share of the heads for each process.

With FSDP2 a parameter is a DTensor, of which a process holds some rows; a factor's heads may lie across processes (W_O
does). Each process therefore reads whole factors, one batch of pairs at a time, works on its share of their heads,
keeps the state of that share, and writes its rows of the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

__all__ = ["Layout", "as_share", "layout_of", "local", "rows_like", "share", "united", "whole"]


@dataclass(frozen=True)
class Layout:
    """How processes share heads: along the axes of the mesh that shard a parameter of the pair. Where parameters are
    copies of each other (hybrid sharding), so are shares: nothing need be sent there."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]


def layout_of(parameters: Iterable[Tensor]) -> Layout | None:
    """None where no parameter is a DTensor. ValueError if their meshes differ."""
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    if not sharded:
        return None
    mesh = sharded[0].device_mesh
    if any(p.device_mesh != mesh for p in sharded):
        raise ValueError("parameters of one pair lie on different meshes: shard the module that holds them as a whole")
    copied = [all(p.placements[axis].is_replicate() for p in sharded) for axis in range(mesh.ndim)]
    return Layout(mesh, tuple(Replicate() if same else Shard(0) for same in copied))


def whole(x: Tensor) -> Tensor:
    """All of a tensor, on every process."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def local(x: Tensor) -> Tensor:
    """What this process holds."""
    return x.to_local() if isinstance(x, DTensor) else x


def share(x: Tensor, layout: Layout | None) -> Tensor:
    """This process's share (N', ...) of a tensor (N, ...) that all processes have."""
    return x if layout is None else _part(x, layout.mesh, layout.placements)


def as_share(x: Tensor, layout: Layout | None, count: int) -> Tensor:
    """A share (N', ...) as part of the tensor (N, ...) that processes hold together, N = count; nothing is sent."""
    if layout is None:
        return x
    shape = torch.Size((count, *x.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        x.contiguous(), layout.mesh, layout.placements, run_check=False, shape=shape, stride=stride
    )


def united(x: Tensor, layout: Layout | None, count: int) -> Tensor:
    """The tensor (N, ...) of which every process has a share (N', ...), on every process."""
    return whole(as_share(x, layout, count))


def rows_like(x: Tensor, parameter: Tensor) -> Tensor:
    """Of a tensor of the parameter's shape that all processes have, what this process holds of the parameter."""
    return _part(x, parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else x


def _part(x: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    copies = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(placements=placements).to_local()
