"""Optimizers of the product of two factors, written on the factors: the path of G = BᴴA does not depend on which A and
B represent it.

Every quantity here is either unchanged by A → S A, B → S⁻ᴴ B or moves along with it, so two starts of one function stay
equivalent, to rounding. A plain optimizer's steps depend on S: SGD's where S is not orthogonal, Adam's always.

How long a step is. In the frames where C_A A and C_B B have orthonormal rows a step is a motion of G, and a learning
rate has the unit of G's entries (Adam), or of those over their gradient's (SGD): that is unit="product". unit="factor"
multiplies it by what a plain step on balanced factors (A Aᴴ = B Bᴴ) would be multiplied by, √σ (Adam) or σ (SGD), σ the
root of the mean square of G's singular values. Then a rate found for the plain optimizer does here, too, and pairs and
other parameters can share one. A product that is zero when training starts, as LoRA's is, has no unit of its own: there
"factor" is "product".

Legend: see `gaugekit.optim.frames`. ξ tangent of a factor; ∂A = B ∂G, ∂B = A ∂Gᴴ gradients; K = A Aᴴ, L = B Bᴴ.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from gaugekit.optim.frames import (
    Lifted,
    across,
    advance,
    first_frames,
    inverse_root,
    orthonormalizing,
    plus,
    rounding,
    times,
)
from gaugekit.optim.paired import Moved, Paired, ParamGroup
from gaugekit.optim.pairs import Pair

__all__ = ["QuotientAdam", "QuotientSGD"]

Unit = Literal["factor", "product"]


class QuotientSGD(Paired):
    """Gradient descent on the products of pairs, SGD on everything else.

    The gradient is that of the metric tr(L ξ_A ξ_Aᴴ) + tr(K ξ_B ξ_Bᴴ): ξ_A = L⁻¹∂A, ξ_B = K⁻¹∂B, times σ with
    unit="factor". So G moves by −lr σ (P_B ∂G + ∂G P_A), P the projections onto the factors' row spaces. Momentum is a
    tangent vector, moved along with the point, whose part along the orbit is taken out at each step, in the same
    metric. weight_decay adds the gradient of weight_decay · ‖G‖²/2.

    L is taken as L + s² K⁻¹, s² the mean square of the rows of lr σ ∂B where A is orthonormal, lr being the largest
    that a scheduler goes to: as much as B may move, so that steps of A are bounded where B is zero, or small.
    Rank-deficient factors: see `QuotientAdam`; what rounding leaves of A's gradient in directions where a frozen B has
    nothing is taken out.

    Without pairs this is torch.optim.SGD, bit for bit.

    Args:
        params: as for SGD; all parameters, those of pairs included.
        pairs: see `gaugekit.pairs`.
        unit: "factor" or "product", see above.
        lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, fused: as SGD's; the last two concern other
            parameters only.
        masters: see `Paired`.

    Raises:
        ValueError: as SGD and `Paired`, and for an unknown unit.

    Source: "Hide & Seek" [arXiv 2505.05409] for the metric; without damping and momentum the step is that of
        Riemannian preconditioned LoRA [Zhang and Pilanci, arXiv 2402.02347] and ScaledGD [Tong, Ma and Chi, JMLR 2021].
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        pairs: Iterable[Pair] = (),
        unit: Unit = "factor",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        masters: bool = False,
    ) -> None:
        inner = torch.optim.SGD(
            params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, foreach=foreach, fused=fused
        )
        super().__init__(inner, pairs, masters)
        self.unit = _known(unit)

    def move(self, moved: Moved) -> tuple[Tensor, Tensor]:
        a, b, state = moved.a, moved.b, moved.state
        if "added" not in state:
            _, frame, state["added"] = first_frames(a)
            state["own"] = times(frame, b).abs().amax((1, 2), keepdim=True).sign()
        c_a, c_b, q_b, unit = self._frames(moved)
        inverse_k, inverse_l = times(c_a.mH, c_a), times(c_b.mH, c_b)
        if moved.grad_b is None:  # where B has no rows, A's gradient is all rounding
            inverse_l = times(c_b.mH, times(across(q_b, q_b), c_b))
        both = moved.grad_a is not None and moved.grad_b is not None
        v_a, xi_a = _velocity(moved.grad_a, unit * inverse_l, a, moved.group_a, both, state, "velocity_a")
        v_b, xi_b = _velocity(moved.grad_b, unit * inverse_k, b, moved.group_b, both, state, "velocity_b")
        if v_a is not None and v_b is not None and moved.group_a["momentum"]:
            q_a = times(c_a, a)  # in the frames, as Gram matrices lose twice as many digits
            back_a, back_b = torch.linalg.inv(c_a).mH, torch.linalg.inv(c_b).mH
            x = (across(times(back_b, v_a), q_a) - across(q_b, times(back_a, v_b))) / 2
            v_a.sub_(times(times(c_b.mH, x), q_a))  # in place: the state keeps what is left
            v_b.add_(times(times(c_a.mH, x.mH), q_b))
        return _stepped(a, v_a, xi_a, moved.group_a), _stepped(b, v_b, xi_b, moved.group_b)

    def _frames(self, moved: Moved) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c_a and c_b, which make K and the damped L the identity, c_b B, and the unit (N, 1, 1)."""
        a, b, state = moved.a, moved.b, moved.state
        eye = torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
        c_a = orthonormalizing(across(a, a) + state["added"] * eye)
        q = times(c_a, a)  # once more: the first frame is off by rounding times the square of A's condition
        c_a = times(inverse_root(across(q, q) + state["added"] * across(c_a, c_a)), c_a)
        dual = torch.linalg.inv(c_a).mH
        q_b = times(dual, b)
        squares = q_b.abs().square().sum((1, 2), keepdim=True)
        unit = torch.ones_like(squares)
        if self.unit == "factor":
            unit = torch.where(state["own"] > 0, (squares / a.shape[1]).sqrt(), unit)
        floor = rounding(squares)
        if moved.grad_b is not None:
            pushed = times(c_a, moved.grad_b).abs().square().sum((1, 2), keepdim=True) / a.shape[1]
            floor = floor + (_largest_rate(moved.group_b) * unit) ** 2 * pushed
        root = orthonormalizing(across(q_b, q_b) + floor * eye)
        return c_a, times(root, dual), times(root, q_b), unit


class QuotientAdam(Paired):
    """Adam on the products of pairs, AdamW on everything else.

    Moments are elementwise, like Adam's, in the frame where the partner factor is orthonormal: g = C_B ∂A is a part of
    ∂G there, and does not see the gauge. The frame is carried along as the factor moves, turned as little as possible,
    so moments stay as they are. The step U is lifted back, ξ = C_Bᴴ U; what of it runs along the orbit, in the metric
    tr(L ξ_A ξ_Aᴴ) + tr(K ξ_B ξ_Bᴴ), is taken out, as it does nothing to G to first order.

    Weight decay is that of ‖BᴴA‖²/2, decoupled: G shrinks by 1 − lr · weight_decay, each factor by the root of it. The
    count of bias correction starts for each product with its first gradient that is not zero (LoRA's A has none before
    B has moved). Where one factor has full rank, and the same one for all heads, the path of G is free of the gauge.
    Where both have not, elements of the group fix the point and no step can be; a share 1e-4 of a factor's mean square
    is added to its Gram matrix. Parameters whose gradient is zero but for rounding (key biases) are stepped on that
    rounding, as by AdamW: the function does not see it, but factors do, and in float32 paths part sooner.

    Without pairs this is torch.optim.AdamW, bit for bit. State of a pair: two moments of the factors' size, two r × r
    frames.

    Args:
        params: as for AdamW; all parameters, those of pairs included.
        pairs: see `gaugekit.pairs`.
        unit: "factor" or "product", see above.
        lr, betas, eps, weight_decay, maximize, foreach, fused: as AdamW's; the last two concern other parameters only.
        masters: see `Paired`.

    Raises:
        ValueError: as AdamW and `Paired`, and for an unknown unit.

    Source: moments where the partner is orthonormal from LoRA-RITE [Yen et al., arXiv 2410.20625]; the metric from
        "Hide & Seek" [arXiv 2505.05409].
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        pairs: Iterable[Pair] = (),
        unit: Unit = "factor",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        masters: bool = False,
    ) -> None:
        inner = torch.optim.AdamW(params, lr, betas, eps, weight_decay, maximize=maximize, foreach=foreach, fused=fused)
        super().__init__(inner, pairs, masters)
        self.unit = _known(unit)

    def move(self, moved: Moved) -> tuple[Tensor, Tensor]:
        a, b, state = moved.a, moved.b, moved.state
        if "frame_a" not in state:
            state["frame_a"], state["frame_b"], state["added"] = first_frames(a)
            state["own"] = times(state["frame_b"], b).abs().amax((1, 2), keepdim=True).sign()
        own = state["own"] if self.unit == "factor" else None
        reach = _largest_rate(moved.group_b) * sqrt(b.shape[-1]) if moved.grad_b is not None else 0.0
        at = advance(state["frame_a"], state["frame_b"], a, b, state["added"], reach, own)
        state["frame_a"], state["frame_b"] = at.c_a, at.c_b
        u_a = _direction(moved.grad_a, at.c_b, at.unit, moved.group_a, state, "a")
        u_b = _direction(moved.grad_b, at.c_a, at.unit, moved.group_b, state, "b")
        if u_a is not None and u_b is not None:
            u_a, u_b = horizontal(at, u_a, u_b)
        elif u_a is not None:
            q = times(at.root_b, at.q_b)
            u_a = times(across(q, q), u_a)  # where B has no rows, rounding is all that moments have seen
        share = 1.0 if u_a is None or u_b is None else 0.5
        if u_a is not None:
            a = plus(a, at.c_b.mH, u_a, keep=_kept(moved.group_a) ** share, sign=-1)
        if u_b is not None:
            b = plus(b, at.c_a.mH, u_b, keep=_kept(moved.group_b) ** share, sign=-1)
        return a, b


def _largest_rate(group: ParamGroup) -> float:
    """The learning rate, or that which a scheduler goes up to: the damping of A should not change in warm-up, and must
    not vanish where that begins at zero."""
    return float(max(group["lr"], group.get("initial_lr", 0.0), group.get("max_lr", 0.0)))


def _known(unit: Unit) -> Unit:
    if unit not in ("factor", "product"):
        raise ValueError(f'unit must be "factor" or "product", got {unit!r}')
    return unit


def _velocity(
    gradient: Tensor | None,
    metric: Tensor,
    factor: Tensor,
    group: ParamGroup,
    both: bool,
    state: dict[str, Tensor],
    key: str,
) -> tuple[Tensor | None, Tensor | None]:
    """(velocity with this gradient taken in, the raised gradient), both tangents (N, r, m); `metric` is its inverse."""
    if gradient is None:
        return None, None
    xi = times(metric, -gradient if group["maximize"] else gradient)
    if group["weight_decay"]:
        xi = xi.add(factor, alpha=group["weight_decay"] * (0.5 if both else 1.0))
    if not group["momentum"]:
        return xi, xi
    if key in state:
        state[key] = group["momentum"] * state[key] + (1 - group["dampening"]) * xi
    else:
        state[key] = xi.clone()
    return state[key], xi


def _stepped(factor: Tensor, velocity: Tensor | None, xi: Tensor | None, group: ParamGroup) -> Tensor:
    if velocity is None or xi is None:
        return factor
    return factor - float(group["lr"]) * (xi + group["momentum"] * velocity if group["nesterov"] else velocity)


def _kept(group: ParamGroup) -> float:
    """What decoupled decay of ‖BᴴA‖²/2 leaves of G, nothing at worst."""
    return max(0.0, 1 - float(group["lr"]) * group["weight_decay"])


def _direction(
    gradient: Tensor | None, frame: Tensor, unit: Tensor, group: ParamGroup, state: dict[str, Tensor], side: str
) -> Tensor | None:
    """lr · unit times Adam's direction in the frame, U (N, r, m), after the moments in `state` have taken the gradient
    in."""
    if gradient is None:
        return None
    g = times(frame, gradient)
    if g.is_complex():
        g = torch.view_as_real(g)
    if group["maximize"]:
        g = -g
    beta1, beta2 = group["betas"]
    first, second, count = (f"{name}_{side}" for name in ("exp_avg", "exp_avg_sq", "step"))
    if first not in state:
        state[first], state[second] = torch.zeros_like(g), torch.zeros_like(g)
        state[count] = g.new_zeros(len(g), *[1] * (g.ndim - 1))
    started = state[count] > 0
    if not bool(started.all()):
        started = started | (g != 0).flatten(1).any(-1).view_as(started)
    state[count] = state[count] + started
    steps = state[count].clamp_min(1.0).double()  # in float32, 1 − beta2 alone has lost digits
    m = state[first].lerp_(g, 1 - beta1)
    v = state[second].mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = (1 - beta2**steps).sqrt()
    scale = (float(group["lr"]) * root / (1 - beta1**steps)).to(v.dtype) * unit.view_as(steps)
    u = v.sqrt().add_((group["eps"] * root).to(v.dtype))
    u = torch.div(m, u, out=u).mul_(scale)
    return torch.view_as_complex(u) if gradient.is_complex() else u


def horizontal(at: Lifted, u_a: Tensor, u_b: Tensor) -> tuple[Tensor, Tensor]:
    """Steps in the frames without their part along the orbit, (X Q_A, −Xᴴ Q_B) with 2X = U_A Q_Aᴴ − Q_B U_Bᴴ: the
    closed form of the mixed metric, in frames where both factors are orthonormal."""
    x = (times(across(u_a, at.q_a), at.root_a.mH) - times(at.root_b, across(at.q_b, u_b))) / 2
    return plus(u_a, times(x, at.root_a), at.q_a, sign=-1), plus(u_b, times(x.mH, at.root_b), at.q_b)
