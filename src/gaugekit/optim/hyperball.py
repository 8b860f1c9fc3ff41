"""Training weights that live on spheres: any optimizer, with its steps brought back to the sphere.

Legend
------
p           a parameter, of any shape; each slice of it along one axis is a point of the unit sphere
u           a slice before the step, |u| = 1
g           its gradient; P v = v − u (u · v) is the part of a vector that is tangent at u
δ           what the inner optimizer adds to a slice

"project"   u ← N(u + δ), N(x) = x / |x|                                       [nGPT], "normalized after each step"
"tangent"   g ← P g before the inner step, u ← R(P δ) after it                  Riemannian gradient step
            R(v) = N(u + v), or cos |v| u + sin |v| v / |v| with method="exp"

The two differ at second order in |δ|, and for optimizers with memory or with a scale for each entry in what the radial
part of g, on which no function of the direction depends, leaves in their state.

Sources: [nGPT] Loshchilov et al., arXiv 2410.01131 · Absil, Mahony and Sepulchre, Optimization Algorithms on Matrix
Manifolds (2008), 4.1 and 8.1 · momentum carried by projection: Bécigneul and Ganea, arXiv 1810.00760.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from gaugekit.geometry.rows import wide
from gaugekit.nn.spheres import Sphere, normalize_
from gaugekit.optim.wrapping import MOMENTA, Wrapper, check_gradients

__all__ = ["Hyperball"]


class Hyperball(Wrapper):
    """Any optimizer, whose parameters stay on their spheres.

    Args:
        optimizer: AdamW, SGD, Muon, ... Its other parameters are stepped as they always are.
        spheres: what lives on a sphere, as `gaugekit.nn.spheres.spheres(module)` lists it.
        mode: "project" normalises after each step [nGPT]. "tangent" steps along the sphere: the radial parts of
            gradients (in place, in `.grad`) and of the inner optimizer's displacement are taken away, the point is
            moved by `method`, and the inner optimizer's momenta (state named "momentum_buffer" or "exp_avg") are
            carried to the new point by projection.
        max_angle: in "tangent", the largest angle, in radians, by which a slice may turn in one step (to rounding of
            the weights). A longer step is shortened, in its direction.
        method: in "tangent", "retract" or "exp", as in `gaugekit.geometry.sphere`. A displacement of length |v| turns
            by atan |v|, or by |v|.

    Parameters that are not of unit norm are normalised at once, in place. After each step every slice has norm 1 to
    rounding of its dtype; norms are computed in float32 or better. A slice of zeros has no direction: "tangent" leaves
    it zero, "project" takes what the step makes of it, and both leave one without a step as it is. In "tangent" a slice
    without a displacement keeps its bits.

    With SGD "tangent" is Riemannian SGD, with momentum and Nesterov's too: momentum is summed of tangent gradients and
    carried along. With AdamW it is Adam with a second moment for each entry, which the sphere's geometry knows nothing
    of: Riemannian Adam in the sense of Bécigneul and Ganea has one for each slice, and is what comes of wrapping an
    Adam that has so.

    DTensors sharded along any axis work; slices along the sharded axis cost a reduction, and need an entry in every
    process.

    Not to be confused with Wen et al.'s Hyperball Optimization (2025), which fixes the Frobenius norms of matrices and
    of their steps.

    Raises:
        ValueError: no spheres; an unknown mode or method; max_angle with "project", or outside (0, π]; a sphere that is
            listed twice, or whose parameter is trainable and not the optimizer's, or of whose axis a process holds
            nothing; weight decay on a sphere, here or at a step; at a step, a gradient with NaN or inf entries, before
            anything is moved.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        spheres: Iterable[Sphere],
        mode: Literal["project", "tangent"] = "project",
        max_angle: float | None = None,
        method: Literal["retract", "exp"] = "retract",
    ) -> None:
        super().__init__(optimizer)
        if mode not in ("project", "tangent"):
            raise ValueError(f'mode must be "project" or "tangent", got {mode!r}')
        if method not in ("retract", "exp"):
            raise ValueError(f'method must be "retract" or "exp", got {method!r}')
        if max_angle is not None and mode == "project":
            raise ValueError('max_angle limits steps along the sphere: it needs mode="tangent"')
        if max_angle is not None and not 0 < max_angle <= math.pi:
            raise ValueError(f"max_angle is in radians, above 0 and at most pi, got {max_angle}")
        self.spheres = tuple(spheres)
        if not self.spheres:
            raise ValueError("there are no spheres: does the model declare any? nothing would be kept on one")
        self.mode, self.max_angle, self.method = mode, max_angle, method
        self._moving: list[Sphere] = []
        self._points: list[Tensor] = []  # of those that move, where they were before the step
        self._check_spheres()
        self._check_weight_decay()
        # Normalising is not idempotent to the last bit, and a run resumed from its weights should be the unbroken one.
        normalize_([sphere for sphere in self.spheres if not _is_unit(sphere)])

    def before(self) -> None:
        self._check_weight_decay()
        names = {id(sphere.parameter): sphere.name for sphere in self.spheres}
        check_gradients((names.get(id(p), name), p) for name, p in self.parameters())
        # Without a gradient the inner optimizer leaves a parameter alone.
        self._moving = [sphere for sphere in self.spheres if sphere.parameter.grad is not None]
        if self.mode == "tangent":
            for sphere in self._moving:
                _make_tangent(sphere.parameter.grad, sphere)
            self._points = [sphere.parameter.clone() for sphere in self._moving]

    def after(self) -> None:
        if self.mode == "project":
            normalize_(self._moving)
        for sphere, point in zip(self._moving, self._points, strict=False):
            sphere.parameter.copy_(self._moved(wide(point), wide(sphere.parameter), sphere.dim))
            state = self.state.get(sphere.parameter, {})
            for key in MOMENTA:
                _make_tangent(state.get(key), sphere)
        self._moving, self._points = [], []

    def _moved(self, h: Tensor, stepped: Tensor, dim: int) -> Tensor:
        """Where the unit slices h go that the inner optimizer has put at `stepped`."""
        # cos θ u + sin θ v / |v| as `geometry.sphere` has it, in fewer passes: h is of unit norm and needs no scaling.
        v = stepped - h
        v = v.sub_(h * _radial(h, v, dim))
        largest = v.abs().amax(dim, keepdim=True)
        moves = (largest != 0) & (_dot(h, h, dim) != 0)  # NaN moves too, and shows
        v = v.div_(torch.where(moves, largest, 1.0))  # the square of a large v would overflow
        size = _dot(v, v, dim).sqrt()
        theta = largest * size
        if self.method == "retract":
            theta = theta.atan()
        if self.max_angle is not None:
            theta = theta.clamp(max=self.max_angle)
        turned = (h * theta.cos()).add_(v.mul_(theta.sin() / torch.where(moves, size, 1.0)))
        length = _dot(turned, turned, dim).sqrt()  # 1 but for rounding, which would add up
        return torch.where(moves, turned.div_(torch.where(moves, length, 1.0)), h)

    def _check_spheres(self) -> None:
        stepped, seen = {id(p) for _, p in self.parameters()}, set()
        for sphere in self.spheres:
            if id(sphere.parameter) in seen:
                raise ValueError(f"{sphere.name} is listed twice: a parameter lives on spheres along one axis")
            if sphere.parameter.requires_grad and id(sphere.parameter) not in stepped:
                raise ValueError(f"{sphere.name} is not among the optimizer's parameters: give each optimizer its own")
            if _has_empty_shards(sphere):
                raise ValueError(
                    f"{sphere.name} has processes without an entry of axis {sphere.dim}, the axis of its spheres: "
                    "shard it along another axis, or over fewer processes"
                )
            seen.add(id(sphere.parameter))

    def _check_weight_decay(self) -> None:
        names = {id(sphere.parameter): sphere.name for sphere in self.spheres}
        for group in self.param_groups:
            name = next((names[id(p)] for p in group["params"] if id(p) in names), None)
            if name is not None and group.get("weight_decay", 0) != 0:
                raise ValueError(
                    f"weight decay of {group['weight_decay']} on {name}, which lives on a sphere, would only change "
                    "the length of its steps: set weight_decay=0 in its group"
                )


def _make_tangent(v: Tensor | None, sphere: Sphere) -> None:
    """Takes the radial part of a gradient or a momentum away, in place, if there is one."""
    if isinstance(v, Tensor):
        point = wide(sphere.parameter)
        v.sub_(point * _radial(point, wide(v), sphere.dim))


def _radial(point: Tensor, v: Tensor, dim: int) -> Tensor:
    """(point · v) / |point|² of each slice, of size 1 along dim; 0 at zero."""
    square = _dot(point, point, dim)
    return _dot(point, v, dim).div_(torch.where(square > 0, square, 1.0))


def _dot(x: Tensor, y: Tensor, dim: int) -> Tensor:
    return (x * y).sum(dim, keepdim=True)


def _is_unit(sphere: Sphere) -> bool:
    """Whether every slice has norm 1, to rounding of its dtype, or is zero."""
    x = sphere.parameter.detach()
    length = torch.linalg.vector_norm(wide(x), dim=sphere.dim, keepdim=True)
    return bool((((length - 1).abs() <= 4 * torch.finfo(x.dtype).eps) | (length == 0)).all())


def _has_empty_shards(sphere: Sphere) -> bool:
    """Whether some process holds nothing of a DTensor's axis; the same in all, so that none waits for the others."""
    parameter, dim = sphere.parameter, sphere.dim % sphere.parameter.ndim
    length = parameter.shape[dim]
    for axis, placement in enumerate(getattr(parameter, "placements", ())):
        if length > 0 and placement.is_shard(dim):
            count = getattr(parameter, "device_mesh").size(axis)  # noqa: B009, not typed
            share = -(-length // count)  # of the first process, and of all but the last ones
            if -(-length // share) < count:
                return True
            length = share
    return False
