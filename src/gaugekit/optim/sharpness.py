"""How sharply a loss bends along its gradient, in coordinates and without them.

Legend
------
A (N, r, m), B (N, r, n)   factors of G = BᴴA, real or complex;  A → S A, B → S⁻ᴴ B is the group
K, L (N, r, r)             A Aᴴ and B Bᴴ
∂A, ∂B                     gradients, together g;  H the Hessian of the loss ℓ
ξ = (L⁻¹∂A, K⁻¹∂B)         the gradient as a tangent of the mixed metric [HS], ⟨ξ, ξ⟩ = tr(L ξ_A ξ_Aᴴ) + tr(K ξ_B ξ_Bᴴ)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gaugekit.geometry.rows import wide
from gaugekit.linalg import double
from gaugekit.optim.horizontal import raised
from gaugekit.optim.pairs import Pair

__all__ = ["Sharpness", "sharpness"]

Direction = dict[int, Tensor]
"""From a parameter's id to its part of a vector."""


@dataclass(frozen=True)
class Sharpness:
    """Second derivatives of a loss along its gradient, over the direction's squared length; NaN where that is zero.

    Args:
        ordinary: gᵀ H g / gᵀ g, in the unit of the loss over the square of the parameters'. Differs between equivalent
            parameters, without bound.
        invariant: that along the geodesic which leaves with velocity ξ, over ⟨ξ, ξ⟩: in the unit of the loss over the
            square of G's. A property of the function.
        straight: ξᵀ H ξ / ⟨ξ, ξ⟩, along the straight line instead: as free of the gauge, since the group acts linearly,
            and what adaptive sharpness measures. `invariant` less the metric's curvature.
    """

    ordinary: float
    invariant: float
    straight: float


def sharpness(loss: Callable[[], Tensor], pairs: Iterable[Pair], others: Iterable[Tensor] = ()) -> Sharpness:
    """The sharpness of a loss along its gradient, ordinary and gauge-invariant.

    The geodesic γ of the metric has Ä = L⁻¹(ḂḂᴴA − (ḂBᴴ + BḂᴴ)Ȧ), B̈ = K⁻¹(ȦȦᴴB − (ȦAᴴ + AȦᴴ)Ḃ), so ℓ(γ(t)) has the
    second derivative ξᵀHξ + Dℓ[γ̈] at 0. As ξ is the gradient, the last term is −½ of the metric's own derivative along
    ξ, −Re tr(ξ_Aᴴ ξ_B Bᴴ ξ_A) − Re tr(ξ_Bᴴ ξ_A Aᴴ ξ_B), without an inverse; and the whole is half the derivative of
    log ⟨ξ, ξ⟩ along ξ.

    A factor without full rank has no metric, but ∂A is in the range of L and ∂B in that of K: the inverses are those on
    the ranges, as in `raised`. At LoRA's start, B = 0, only B moves: the result is invariant, but not the limit of
    small B. Where a factor has lost some of its rank only, the result is finite, but not invariant.

    Costs one evaluation with its gradient, and two products with the Hessian of about twice that each; memory as for
    training, and the graph of the gradient. Attention is computed by torch's "math" kernel, as fused ones have no
    second derivative. `.grad`, the random state and the modes of modules stay as they are; what `loss` itself changes
    (averages of a BatchNorm in training, say) does not.

    Args:
        loss: evaluates the loss, a scalar, on a fixed batch. Called once.
        pairs: along their factors the gradient is followed; entries of a parameter that no pair holds stand still, as
            do parameters that require no grad.
        others: further parameters, outside the pairs, with the plain metric |∂|².

    Raises:
        ValueError: nothing that requires grad, one of `others` in a pair as well, sharded parameters (their modules
            have no second derivative), a loss that is no scalar or has no gradient, NaN or inf in the factors.
        RuntimeError: torch's, where a part of the model has no second derivative.

    Source: geodesic sharpness of "Hide & Seek" [HS, arXiv 2505.05409], equations 4, 5, 10 and 12, there the largest
        rise of the loss in a geodesic ball; here its second order along the gradient.
    """
    pairs, others = tuple(pairs), tuple({id(p): p for p in others}.values())  # tied ones once
    parameters = _moving(pairs, others)
    devices = {p.device for p in parameters if p.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    random = torch.random.fork_rng([device.index for device in devices], device_type=kind)
    with random, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        value = loss()
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise ValueError("loss() must return a scalar tensor that depends on parameters, evaluated with gradients")
        gradients = torch.autograd.grad(value.sum(), parameters, create_graph=True, materialize_grads=True)
        found = {id(p): g.detach() for p, g in zip(parameters, gradients, strict=True)}
        way = _follow(pairs, others, found)
        plain, straight = (_bend(gradients, parameters, vector) for vector in (way.plain, way.xi))
    values = plain / way.plain_square, (straight + way.curve) / way.square, straight / way.square
    return Sharpness(*(float(x) for x in values))


@dataclass
class _Way:
    """g and ξ, by parameter; gᵀg, ⟨ξ, ξ⟩ and Dℓ[γ̈]."""

    plain: Direction
    xi: Direction
    plain_square: Tensor
    square: Tensor
    curve: Tensor


def _follow(pairs: Sequence[Pair], others: Sequence[Tensor], gradient: Direction) -> _Way:
    zero = torch.zeros((), dtype=torch.float64)
    plain, xi = ({key: torch.zeros_like(g) for key, g in gradient.items()} for _ in range(2))
    way = _Way(plain, xi, zero, zero, zero)
    for p in others:
        if id(p) in gradient:
            way.plain[id(p)] = way.xi[id(p)] = gradient[id(p)]
            way.square = way.square + _dot(gradient[id(p)], gradient[id(p)])
    for pair in pairs:
        sides = pair.a, pair.b
        slopes = [s.read(lambda p: wide(gradient.get(id(p), torch.zeros_like(p)))) for s in sides]
        lifted = [torch.zeros_like(slope) for slope in slopes]
        for block, (a, b) in zip(pair.blocks, pair.factors(lambda p: wide(p.detach())), strict=True):
            grad_a, grad_b = (block.take(slope) for slope in slopes)
            xi_a, xi_b = raised(a, b, grad_a, grad_b, "mixed")
            way.square = way.square + _dot(xi_a, grad_a) + _dot(xi_b, grad_b)
            way.curve = way.curve - _dot(xi_a, (xi_b @ b.mH) @ xi_a) - _dot(xi_b, (xi_a @ a.mH) @ xi_b)
            for into, value in zip(lifted, (xi_a, xi_b), strict=True):
                block.put(into, value)
        for side, slope, value in zip(sides, slopes, lifted, strict=True):
            side.write(slope, lambda p: way.plain.get(id(p)))
            side.write(value, lambda p: way.xi.get(id(p)))
    way.plain_square = sum((_dot(v, v) for v in way.plain.values()), zero)
    return way


def _bend(gradients: Sequence[Tensor], parameters: Sequence[Tensor], vector: Direction) -> Tensor:
    """vᵀ H v, from a graph of the gradients."""
    zero = torch.zeros((), dtype=torch.float64)
    linked = [(g, vector[id(p)]) for g, p in zip(gradients, parameters, strict=True) if g.requires_grad]
    if not linked:  # a linear loss
        return zero
    outputs, weights = zip(*linked, strict=True)
    images = torch.autograd.grad(outputs, parameters, weights, retain_graph=True, materialize_grads=True)
    return sum((_dot(vector[id(p)], image) for p, image in zip(parameters, images, strict=True)), zero)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Re tr(xᴴ y) over all of a batch, float64 on the CPU."""
    return (double(x.detach()).conj() * double(y.detach())).real.sum().cpu()


def _moving(pairs: Sequence[Pair], others: Sequence[Tensor]) -> list[Tensor]:
    """Every parameter that requires grad, once."""
    paired = {id(p): p for pair in pairs for p in pair.parameters}
    if any(id(p) in paired for p in others):
        raise ValueError("a parameter of a pair is among the others too: leave it out there, pairs bring theirs along")
    found = [p for p in (*paired.values(), *others) if p.requires_grad]
    if not found:
        raise ValueError("no parameter of the pairs, or of the others, requires grad: there is no direction to follow")
    if any(isinstance(p, DTensor) for p in found):
        raise ValueError("parameters are sharded: sharpness takes second derivatives of whole ones, on one process")
    return found
