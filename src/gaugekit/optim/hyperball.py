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
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from gaugekit.geometry.rows import wide
from gaugekit.geometry.sphere import exp, retract, to_tangent
from gaugekit.nn.hypersphere import Sphere, normalize_
from gaugekit.optim.wrapping import Wrapper, check_gradients

__all__ = ["Hyperball"]

MOMENTA = ("momentum_buffer", "exp_avg")
"""Where torch's optimizers keep sums of gradients: SGD, RMSprop and Muon in the first, the family of Adam in the second."""


class Hyperball(Wrapper):
    """Any optimizer, whose parameters stay on their spheres.

    Args:
        optimizer: AdamW, SGD, Muon, ... Its other parameters are stepped as they always are.
        spheres: what lives on a sphere, as `gaugekit.nn.hypersphere.spheres(module)` lists it.
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

    DTensors sharded along any axis work; slices along the sharded axis cost a reduction.

    Raises:
        ValueError: an unknown mode or method; max_angle with "project", or outside (0, π]; a sphere that is listed
            twice, or whose parameter is trainable and not the optimizer's; weight decay on a sphere, here or at a step;
            at a step, a gradient with NaN or inf entries, before anything is moved.
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
        self.mode, self.max_angle, self.method = mode, max_angle, method
        self._points: list[Tensor] = []
        self._check_spheres()
        self._check_weight_decay()
        # Normalising is not idempotent to the last bit, and a run resumed from its weights should be the unbroken one.
        normalize_([sphere for sphere in self.spheres if not _is_unit(sphere)])

    def before(self) -> None:
        self._check_weight_decay()
        names = {id(sphere.parameter): sphere.name for sphere in self.spheres}
        check_gradients((names.get(id(p), name), p) for name, p in self.parameters())
        if self.mode == "tangent":
            for sphere in self._moving():
                point, gradient = sphere.parameter, sphere.parameter.grad
                assert gradient is not None
                gradient.copy_(_tangent_part(point, gradient, sphere.dim))
            self._points = [sphere.parameter.clone() for sphere in self._moving()]

    def after(self) -> None:
        if self.mode == "project":
            return normalize_(self._moving())
        for sphere, point in zip(self._moving(), self._points, strict=True):
            parameter, dim = sphere.parameter, sphere.dim
            old = wide(point).movedim(dim, -1)
            parameter.copy_(self._moved(old, wide(parameter).movedim(dim, -1) - old).movedim(-1, dim))
            state = self.state[parameter]
            for momentum in (state[key] for key in MOMENTA if isinstance(state.get(key), Tensor)):
                momentum.copy_(_tangent_part(parameter, momentum, dim))
        self._points = []
        return None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_points": []}

    def _moving(self) -> list[Sphere]:
        """The spheres that the inner optimizer steps: without a gradient it leaves a parameter alone."""
        return [sphere for sphere in self.spheres if sphere.parameter.grad is not None]

    def _moved(self, h: Tensor, displacement: Tensor) -> Tensor:
        """Where the points h (..., d) go, (..., d)."""
        v = to_tangent(h, displacement)
        longest = v.abs().amax(-1, keepdim=True)
        moves = (longest > 0) & (h.abs().amax(-1, keepdim=True) > 0)
        if self.max_angle is not None:
            limit = self.max_angle
            if self.method == "retract":
                limit = math.tan(limit) if limit < math.pi / 2 else math.inf
            direction = v / torch.where(moves, longest, 1.0)  # lengths of large vectors would overflow
            length = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
            v = torch.where(longest * length > limit, direction * (limit / length), v)
        return torch.where(moves, (retract if self.method == "retract" else exp)(h, v), h)

    def _check_spheres(self) -> None:
        stepped, seen = {id(p) for _, p in self.parameters()}, set()
        for sphere in self.spheres:
            if id(sphere.parameter) in seen:
                raise ValueError(f"{sphere.name} is listed twice: a parameter lives on spheres along one axis")
            if sphere.parameter.requires_grad and id(sphere.parameter) not in stepped:
                raise ValueError(f"{sphere.name} is not among the optimizer's parameters: give each optimizer its own")
            seen.add(id(sphere.parameter))

    def _check_weight_decay(self) -> None:
        names = {id(sphere.parameter): sphere.name for sphere in self.spheres}
        for group in self.param_groups:
            name = next((names[id(p)] for p in group["params"] if id(p) in names), None)
            if name is not None and group.get("weight_decay", 0) != 0:
                raise ValueError(
                    f"weight decay of {group['weight_decay']} on {name}, which lives on a sphere, would only change the "
                    "length of its steps: set weight_decay=0 in its group"
                )


def _tangent_part(point: Tensor, v: Tensor, dim: int) -> Tensor:
    return to_tangent(wide(point).movedim(dim, -1), wide(v).movedim(dim, -1)).movedim(-1, dim)


def _is_unit(sphere: Sphere) -> bool:
    """Whether every slice has norm 1, to rounding of its dtype, or is zero."""
    x = sphere.parameter.detach()
    length = torch.linalg.vector_norm(wide(x), dim=sphere.dim, keepdim=True)
    return bool((((length - 1).abs() <= 4 * torch.finfo(x.dtype).eps) | (length == 0)).all())
