"""QuotientSGD and QuotientAdam: their equations, step by step, and what any torch.optim.Optimizer does."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pymanopt
import pytest
import torch
from drawn import gap, normal
from peft.optimizers.riemannian import _RiemannianPreconditioner
from torch import Tensor, nn

from gaugekit.optim import paired
from gaugekit.optim.pairs import Factor, Pair, Window, scramble_
from gaugekit.optim.quotient import QuotientAdam, QuotientSGD

F64 = torch.float64
BOTH = [QuotientAdam, QuotientSGD]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Toy(nn.Module):
    """Two products and a layer beside them."""

    def __init__(self, dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.a = nn.Parameter(0.5 * normal(2, 3, 5, seed=1).to(dtype))
        self.b = nn.Parameter(0.5 * normal(2, 3, 6, seed=2).to(dtype))
        self.c = nn.Parameter(0.5 * normal(4, 6, seed=3).to(dtype))
        self.d = nn.Parameter(0.5 * normal(4, 5, seed=4).to(dtype))
        self.layer = nn.Linear(5, 5, dtype=dtype)
        with torch.no_grad():
            self.layer.weight.copy_(0.5 * normal(5, 5, seed=5))
            self.layer.bias.copy_(0.1 * normal(5, seed=6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        h = torch.tanh((x @ (self.b.mT @ self.a).mT).sum(0))
        return h @ (self.d.mT @ self.c).mT

    @property
    def pairs(self) -> list[Pair]:
        return [Pair.of(self.a, self.b, "one"), Pair.of(self.c, self.d, "two")]


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    dtype = next(model.parameters()).dtype
    x, y = normal(7, 5, seed=10 + step % 4).to(dtype), normal(7, 5, seed=20 + step % 4).to(dtype)
    return (model(x) - y).square().mean()


def walk(model: nn.Module, optimizer: Any, steps: int = 5, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def same(x: nn.Module, y: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(x.parameters(), y.parameters(), strict=True))


def momentum(optimizer: Any) -> dict[str, Any]:
    return {"momentum": 0.9, "nesterov": True} if optimizer is QuotientSGD else {}


def snapshot(optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy(optimizer.state_dict())


def equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor):
        return x.dtype == y.dtype and torch.equal(x, y)
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(equal(x[key], y[key]) for key in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(equal, x, y))
    return x == y


# --- without pairs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_adam_without_pairs_is_adamw(kind: dict[str, bool], maximize: bool, dtype: torch.dtype) -> None:
    models = [Toy(dtype) for _ in range(2)]
    for model, make in zip(models, (QuotientAdam, torch.optim.AdamW), strict=True):
        groups = [
            {"params": [model.a, model.b], "weight_decay": 0.3},
            {"params": [model.c, model.d, *model.layer.parameters()], "lr": 2e-3, "betas": (0.8, 0.9)},
        ]
        walk(model, make(groups, lr=1e-2, eps=1e-7, weight_decay=0.1, maximize=maximize, **kind), 6)
    assert same(*models)
    assert not same(models[0], Toy(dtype))


@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.9, "nesterov": True}])
@pytest.mark.parametrize("maximize", [False, True])
def test_sgd_without_pairs_is_sgd(kind: dict[str, bool], options: dict[str, Any], maximize: bool) -> None:
    models = [Toy() for _ in range(2)]
    for model, make in zip(models, (QuotientSGD, torch.optim.SGD), strict=True):
        walk(model, make(model.parameters(), lr=1e-2, weight_decay=0.1, maximize=maximize, **kind, **options), 6)
    assert same(*models)


@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize(("ours", "theirs"), [(QuotientAdam, torch.optim.AdamW), (QuotientSGD, torch.optim.SGD)])
def test_parameters_outside_pairs_move_as_without(ours: Any, theirs: Any, kind: dict[str, bool]) -> None:
    """Given equal gradients, bit for bit; those in pairs move otherwise."""
    options = {"lr": 1e-2, "weight_decay": 0.1, **({"momentum": 0.9} if ours is QuotientSGD else {}), **kind}
    x, y = Toy(), Toy()
    first, second = ours(x.parameters(), pairs=x.pairs, **options), theirs(y.parameters(), **options)
    for step in range(5):
        for p, q in zip(x.parameters(), y.parameters(), strict=True):
            p.grad = normal(*p.shape, seed=step)
            q.grad = p.grad.clone()
        kept = [p.grad for p in x.parameters()]
        first.step()
        second.step()
        assert all(p.grad is g for p, g in zip(x.parameters(), kept, strict=True))
    assert same(x.layer, y.layer)
    for name in "abcd":
        assert gap(getattr(x, name).detach(), getattr(y, name).detach()) > 1e-3


# --- the step of QuotientSGD ------------------------------------------------------------------------------------


def quadratic(a: Tensor, b: Tensor, seed: int = 9) -> Tensor:
    """A loss of G alone, with a gradient of full rank."""
    g = b.mT @ a
    return (torch.sin(g) * normal(*g.shape, seed=seed)).sum() + 0.3 * g.square().sum()


def gradient_of_product(a: Tensor, b: Tensor) -> Tensor:
    g = (b.mT @ a).detach().requires_grad_()
    loss = (torch.sin(g) * normal(*g.shape, seed=9)).sum() + 0.3 * g.square().sum()
    (found,) = torch.autograd.grad(loss, g)
    return found


def stepped(make: Callable[..., Any], a: Tensor, b: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    p, q = nn.Parameter(a.clone()), nn.Parameter(b.clone())
    optimizer = make([p, q], pairs=[Pair.of(p, q)], **{"unit": "product", **options})
    quadratic(p, q).backward()
    optimizer.step()
    return p.detach(), q.detach()


@pytest.mark.parametrize("lr", [1e-5, 0.1, 3.0])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 5, 7), (4, 4, 4), (3, 5, 3)])
@pytest.mark.parametrize("unit", ["product", "factor"])
def test_sgd_step_is_the_gradient_in_the_damped_metric(lr: float, shape: tuple[int, int, int], unit: str) -> None:
    r, m, n = shape
    a, b = normal(2, r, m), normal(2, r, n, seed=1)
    new_a, new_b = stepped(QuotientSGD, a, b, lr=lr, unit=unit)
    d = gradient_of_product(a, b)
    k, gram_b = a @ a.mT, b @ b.mT
    grad_a, grad_b = b @ d, a @ d.mT
    size = torch.ones(2, dtype=F64)
    if unit == "factor":  # the root of the mean square of singular values
        size = ((b.mT @ a).square().sum((1, 2)) / r).sqrt()
    square = (lr * size) ** 2 * (grad_b.mT @ torch.linalg.solve(k, grad_b)).diagonal(dim1=-2, dim2=-1).sum(-1) / r
    damped = gram_b + square[:, None, None] * torch.linalg.inv(k)
    size = size[:, None, None]
    assert gap((a - new_a) / lr, size * torch.linalg.solve(damped, grad_a)) < 1e-8
    assert gap((b - new_b) / lr, size * torch.linalg.solve(k, grad_b)) < 1e-8


def test_sgd_moves_the_product_by_the_projected_gradient() -> None:
    a, b = normal(2, 3, 5), normal(2, 3, 7, seed=1)
    d = gradient_of_product(a, b)
    p_a = torch.linalg.pinv(a) @ a
    p_b = torch.linalg.pinv(b) @ b
    want = p_b @ d + d @ p_a
    errors = []
    for lr in (2e-5, 1e-5):
        new_a, new_b = stepped(QuotientSGD, a, b, lr=lr)
        errors.append(gap((b.mT @ a - new_b.mT @ new_a) / lr, want))
    assert errors[0] < 1e-3
    assert 1.9 < errors[0] / errors[1] < 2.1  # of first order in lr
    plain_a, plain_b = stepped_plainly(a, b, 1e-5)
    assert gap((b.mT @ a - plain_b.mT @ plain_a) / 1e-5, want) > 0.5  # SGD's own is another one


def stepped_plainly(a: Tensor, b: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    d = gradient_of_product(a, b)
    return a - lr * b @ d, b - lr * a @ d.mT


def test_sgd_step_is_that_of_riemannian_preconditioning_in_peft() -> None:
    """Where they coincide: full rank, no momentum, damping gone in both."""
    lr = 1e-6
    for reg, bound in ((0.0, 1e-8), (1e-2, None)):
        a, b = nn.Parameter(normal(3, 8)), nn.Parameter(normal(6, 3, seed=1))
        p, q = nn.Parameter(a.detach().clone()), nn.Parameter(b.detach().clone())
        for x, y in ((a, b), (p, q)):
            quadratic(x[None], y.t()[None]).backward()
        old = a.detach().clone()
        _RiemannianPreconditioner([(a, b)], reg=reg).step()
        torch.optim.SGD([a, b], lr=lr).step()
        outputs = Factor((Window(q, lambda x: x.t().unsqueeze(0)),))
        QuotientSGD([p, q], lr=lr, unit="product", pairs=[Pair("lora", Pair.of(p, p).a, outputs)]).step()
        apart = max(gap(a.detach() / lr, p.detach() / lr), gap(b.detach() / lr, q.detach() / lr))
        assert gap(a.detach() / lr, old / lr) > 0.1
        assert apart > 1e-4 if bound is None else apart < bound


def test_sgd_step_is_a_retraction_of_the_tangent_on_the_manifold_of_fixed_rank() -> None:
    a, b = normal(1, 3, 5), normal(1, 3, 7, seed=1)
    g, d = (b.mT @ a)[0].numpy(), gradient_of_product(a, b)[0].numpy()
    manifold = pymanopt.manifolds.FixedRankEmbedded(7, 5, 3)
    u, s, vt = np.linalg.svd(g, full_matrices=False)
    point = (u[:, :3], s[:3], vt[:3])
    tangent = u[:, :3] @ u[:, :3].T @ d + d @ vt[:3].T @ vt[:3]
    vector = manifold.projection(point, tangent)
    up, m, vp = vector
    again = point[0] @ m @ point[2] + up @ point[2] + point[0] @ vp.T
    assert np.allclose(again, tangent, atol=1e-12)  # it is a tangent
    errors = []
    for lr in (2e-3, 1e-3):
        new_a, new_b = stepped(QuotientSGD, a, b, lr=lr)
        v = manifold.retraction(point, type(vector)(*(-lr * x for x in vector)))
        errors.append(float(np.abs((new_b.mT @ new_a)[0].numpy() - v[0] @ np.diag(v[1]) @ v[2]).max()))
    assert errors[1] < 1e-3
    assert 3.6 < errors[0] / errors[1] < 4.4  # of second order in lr


# --- QuotientAdam, written out on the product -------------------------------------------------------------------


def polar(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


class Transcription:
    """QuotientAdam for one G of rank r, without factors: orthonormal rows Q_A, Q_B, Adam's moments of Q_B ∂G and
    Q_A ∂Gᵀ, and W = C_B C_Aᵀ, the inverse of Q_B G Q_Aᵀ turned."""

    def __init__(self, g: Tensor, r: int, lr: float, wd: float, unit: str) -> None:
        self.g, self.lr, self.wd, self.unit, self.t, self.size = g, lr, wd, unit, 0, 1.0
        basis = torch.linalg.svd(g, full_matrices=False).Vh[:r]
        columns = g.shape[1]
        probe = torch.randn(columns, r, generator=torch.Generator().manual_seed(columns), dtype=F64)
        self.q_a = polar(basis @ probe).mT @ basis
        self.q_b = self.q_a @ g.mT
        self.w = torch.eye(r, dtype=F64)
        self.m = [torch.zeros(r, columns, dtype=F64), torch.zeros(r, g.shape[0], dtype=F64)]
        self.v = [torch.zeros_like(x) for x in self.m]
        self.align()

    def align(self) -> None:
        w, v = torch.linalg.eigh(self.q_a @ self.q_a.mT)
        root = v @ torch.diag(w.rsqrt()) @ v.mT
        self.q_a, self.w = root @ self.q_a, self.w @ root
        if self.unit == "factor":
            self.size = math.sqrt(float(self.g.norm()) / math.sqrt(len(self.w)))
        floor = self.lr * math.sqrt(self.g.shape[0]) * self.size
        w, v = torch.linalg.eigh(self.q_b @ self.q_b.mT + floor**2 * self.w @ self.w.mT)
        root = v @ torch.diag(w.rsqrt()) @ v.mT
        self.q_b, self.w = root @ self.q_b, root @ self.w

    def step(self, d: Tensor) -> None:
        self.t += 1
        u = []
        for i, g in enumerate((self.q_b @ d, self.q_a @ d.mT)):
            self.m[i] = 0.9 * self.m[i] + 0.1 * g
            self.v[i] = 0.999 * self.v[i] + 0.001 * g * g
            m, v = self.m[i] / (1 - 0.9**self.t), self.v[i] / (1 - 0.999**self.t)
            u.append(self.lr * self.size * m / (v.sqrt() + 1e-8))
        x = (u[0] @ self.q_a.mT - self.q_b @ u[1].mT) / 2
        u_a, u_b = u[0] - x @ self.q_a, u[1] + x.mT @ self.q_b
        keep = math.sqrt(1 - self.lr * self.wd)
        flat = self.q_b.mT @ u_a + u_b.mT @ self.q_a
        self.g = keep**2 * self.g - keep * flat + u_b.mT @ self.w.mT @ u_a
        self.q_a, self.q_b = keep * self.q_a - self.w.mT @ u_a, keep * self.q_b - self.w @ u_b
        self.align()


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 5, 7), (3, 6, 3)])
@pytest.mark.parametrize("lr", [1e-3, 1e-4])
@pytest.mark.parametrize("unit", ["product", "factor"])
def test_adam_is_its_transcription_on_the_product(shape: tuple[int, int, int], lr: float, unit: str) -> None:
    r, m, n = shape
    a, b = nn.Parameter(normal(3, r, m)), nn.Parameter(normal(3, r, n, seed=1))
    pair = Pair.of(a, b)
    slow = [Transcription(g, r, lr, 0.1, unit) for g in (b.mT @ a).detach()]
    start = (b.mT @ a).detach()
    scramble_([pair], rng(), 30.0)
    optimizer = QuotientAdam([a, b], lr=lr, weight_decay=0.1, pairs=[pair], unit=unit)
    for _ in range(60):
        optimizer.zero_grad()
        quadratic(a, b).backward()
        optimizer.step()
        for each, d in zip(slow, gradients_at([x.g for x in slow]), strict=True):
            each.step(d)
    got, want = (b.mT @ a).detach(), torch.stack([x.g for x in slow])
    assert gap(got, start) > 20 * lr
    assert gap(got, want) < 1e-6 * (lr / 1e-3) ** 4 + 1e-10  # roots near the identity are right to fourth order
    frames = optimizer.state[a]["pair[0].frame_a"] @ a.detach()  # at the step before
    assert gap(frames, torch.stack([x.q_a for x in slow])) < 0.2


def gradients_at(products: list[Tensor]) -> Tensor:
    g = torch.stack(products).requires_grad_()
    loss = (torch.sin(g) * normal(*g.shape, seed=9)).sum() + 0.3 * g.square().sum()
    return torch.autograd.grad(loss, g)[0]


@pytest.mark.parametrize("make", BOTH)
def test_steps_are_horizontal(make: Any) -> None:
    """L ξ_A Aᴴ = B ξ_Bᴴ K, which is what the mixed metric asks of a step that has no part along the orbit."""

    def defect(optimizer: Any, a: nn.Parameter, b: nn.Parameter) -> float:
        for step in range(4):
            old_a, old_b = a.detach().clone(), b.detach().clone()
            optimizer.zero_grad()
            quadratic(a, b, seed=step).backward()
            optimizer.step()
        xi_a, xi_b = a.detach() - old_a, b.detach() - old_b
        left = old_b @ old_b.mT @ xi_a @ old_a.mT
        right = old_b @ xi_b.mT @ old_a @ old_a.mT
        return float((left - right).norm() / left.norm())

    def start() -> tuple[nn.Parameter, nn.Parameter]:
        return nn.Parameter(normal(2, 3, 5)), nn.Parameter(normal(2, 3, 7, seed=1))

    a, b = start()
    options = {"weight_decay": 0.0, **momentum(make)}
    options.pop("nesterov", None)
    assert defect(make([a, b], lr=1e-6, pairs=[Pair.of(a, b)], **options), a, b) < 1e-5
    a, b = start()
    assert defect(torch.optim.AdamW([a, b], lr=1e-6, weight_decay=0.0), a, b) > 0.1


@pytest.mark.parametrize("frozen", ["", "a", "b"])
def test_weight_decay_is_that_of_the_product(frozen: str) -> None:
    a, b = nn.Parameter(normal(2, 3, 5)), nn.Parameter(normal(2, 3, 7, seed=1))
    g = (b.mT @ a).detach()
    for name, p in (("a", a), ("b", b)):
        p.requires_grad_(name != frozen)
        p.grad = None if name == frozen else torch.zeros_like(p)
    QuotientAdam([a, b], lr=0.1, weight_decay=0.5, pairs=[Pair.of(a, b)]).step()
    assert gap((b.mT @ a).detach(), 0.95 * g) < 1e-14
    g = (b.mT @ a).detach()
    QuotientSGD([a, b], lr=1e-4, weight_decay=0.5, pairs=[Pair.of(a, b)]).step()
    assert gap((b.mT @ a).detach(), (1 - 5e-5) * g) < (1e-14 if frozen else 1e-8)
    if frozen:
        assert torch.equal(a if frozen == "a" else b, normal(2, 3, 5) if frozen == "a" else normal(2, 3, 7, seed=1))


def test_weight_decay_takes_all_at_most() -> None:
    a, b = nn.Parameter(normal(2, 3, 5)), nn.Parameter(normal(2, 3, 7, seed=1))
    a.grad, b.grad = torch.zeros_like(a), torch.zeros_like(b)
    QuotientAdam([a, b], lr=30.0, weight_decay=0.1, pairs=[Pair.of(a, b)]).step()
    assert not bool(a.any()) and not bool(b.any())


@pytest.mark.parametrize("make", BOTH)
def test_maximize_is_the_step_along_minus_the_gradient(make: Any) -> None:
    a, b = normal(2, 3, 5), normal(2, 3, 7, seed=1)
    found = []
    for maximize, sign in ((True, 1.0), (False, -1.0)):
        p, q = nn.Parameter(a.clone()), nn.Parameter(b.clone())
        optimizer = make([p, q], lr=0.1, maximize=maximize, weight_decay=0.1, pairs=[Pair.of(p, q)])
        for _ in range(3):
            optimizer.zero_grad()
            (sign * quadratic(p, q)).backward()
            optimizer.step()
        found.append((p.detach(), q.detach()))
    assert gap(found[0][0], found[1][0]) < 1e-14
    assert gap(found[0][0], a) > 0.01


# --- groups and schedules ---------------------------------------------------------------------------------------


def test_factors_may_have_learning_rates_of_their_own() -> None:
    """LoRA+: B faster than A."""
    a, b = normal(2, 3, 5), normal(2, 3, 7, seed=1)
    moved = {}
    for rate in (1e-6, 4e-6):
        p, q = nn.Parameter(a.clone()), nn.Parameter(b.clone())
        groups = [{"params": [p]}, {"params": [q], "lr": rate}]
        optimizer = QuotientSGD(groups, lr=1e-6, unit="product", pairs=[Pair.of(p, q)])
        quadratic(p, q).backward()
        optimizer.step()
        moved[rate] = p.detach() - a, q.detach() - b
    assert gap(moved[4e-6][0], moved[1e-6][0]) < 1e-13
    assert gap(moved[4e-6][1], 4 * moved[1e-6][1]) < 1e-13


def biased() -> tuple[nn.Parameter, nn.Parameter, nn.Parameter, Pair]:
    w, bias, o = (nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(((3, 5), (3,), (3, 7))))
    a = Factor((Window(w, lambda x: x.unsqueeze(0)), Window(bias, lambda x: x[None, :, None])))
    return w, bias, o, Pair("vo", a, Pair.of(o, o).b)


@pytest.mark.parametrize("make", BOTH)
def test_biases_without_weight_decay_and_other_rates(make: Any) -> None:
    """Weight decay of the first parameter holds for the factor, as it is one of the product."""
    w, bias, o, pair = biased()
    before = torch.cat([w.detach(), bias.detach()[:, None]], 1).clone()
    groups = [{"params": [w, o]}, {"params": [bias], "weight_decay": 0.0}]
    for p in (w, bias, o):
        p.grad = torch.zeros_like(p)
    make(groups, lr=0.1, weight_decay=0.5, pairs=[pair]).step()
    after = torch.cat([w.detach(), bias.detach()[:, None]], 1)
    ratio = after / before
    assert float(ratio.max() - ratio.min()) < 1e-14
    assert float(ratio.max()) < 0.99

    groups[1]["lr"] = 0.2
    optimizer = make(groups, lr=0.1, pairs=[pair])
    state = snapshot(optimizer)
    with pytest.raises(ValueError, match="parameters of one factor of vo have different lr: put them in like groups"):
        optimizer.step()
    assert torch.equal(torch.cat([w.detach(), bias.detach()[:, None]], 1), after)
    assert equal(snapshot(optimizer), state)


@pytest.mark.parametrize("make", BOTH)
def test_what_the_optimizer_does_not_hold_is_as_if_frozen(make: Any) -> None:
    """Be there a gradient or not."""
    found = []
    for gradient in (True, False):
        w, bias, o, pair = biased()
        optimizer = make([w, o], lr=0.1, pairs=[pair], **momentum(make))
        for step in range(3):
            w.grad, o.grad = normal(3, 5, seed=step), normal(3, 7, seed=step)
            bias.grad = normal(3, seed=step) if gradient else None
            optimizer.step()
        assert torch.equal(bias, biased()[1]) and bias not in optimizer.state
        found.append(w.detach())
    assert torch.equal(*found)
    assert gap(found[0], biased()[0].detach()) > 1e-2


@pytest.mark.parametrize("make", BOTH)
def test_schedulers(make: Any) -> None:
    """Every warning is an error here, that of a scheduler that finds no step before its own among them."""
    model, twin = Toy(), Toy()
    optimizer = make(model.parameters(), lr=1e-2, pairs=model.pairs)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8, cycle_momentum=False)
    rates = []
    for step in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        walk(model, optimizer, 1, step)
        schedule.step()
    by_hand = make(twin.parameters(), lr=1.0, pairs=twin.pairs)
    by_hand.param_groups[0]["max_lr"] = 1e-2  # the damping is that of the largest rate
    for step, rate in enumerate(rates):
        by_hand.param_groups[0]["lr"] = rate
        walk(twin, by_hand, 1, step)
    assert same(model, twin)


@pytest.mark.parametrize("make", BOTH)
def test_tensor_learning_rates(make: Any) -> None:
    x, y = Toy(), Toy()
    for model, lr in ((x, torch.tensor(1e-2, dtype=F64)), (y, 1e-2)):
        walk(model, make(model.parameters(), lr=lr, foreach=False, pairs=model.pairs), 3)
    assert all(gap(p.detach(), q.detach()) < 1e-15 for p, q in zip(x.parameters(), y.parameters(), strict=True))


@pytest.mark.parametrize("make", BOTH)
def test_rate_zero_moves_nothing(make: Any) -> None:
    model = Toy()
    optimizer = make(model.parameters(), lr=0.0, pairs=model.pairs)
    walk(model, optimizer, 3)
    assert all(gap(p.detach(), q.detach()) < 1e-15 for p, q in zip(model.parameters(), Toy().parameters(), strict=True))


# --- state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_resumed_run_is_the_unbroken_one(make: Any, dtype: torch.dtype) -> None:
    """geoopt#226: a state that cannot be loaded."""
    whole, broken = Toy(dtype), Toy(dtype)
    options = {"lr": 1e-2, "weight_decay": 0.1, **momentum(make)}
    walk(whole, make(whole.parameters(), pairs=whole.pairs, **options), 8)
    optimizer = make(broken.parameters(), pairs=broken.pairs, **options)
    walk(broken, optimizer, 4)
    file = io.BytesIO()
    torch.save((broken.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    fresh = Toy(dtype)
    fresh.load_state_dict(weights)
    optimizer = make(fresh.parameters(), pairs=fresh.pairs, lr=7.0)
    optimizer.load_state_dict(state)
    walk(fresh, optimizer, 4, 4)
    assert same(whole, fresh)
    forgetful = make(broken.parameters(), pairs=broken.pairs, **options)
    walk(broken, forgetful, 4, 4)
    assert same(whole, broken) == (make is QuotientSGD and not options.get("momentum"))


@pytest.mark.parametrize("make", BOTH)
def test_swapped_factors_resume(make: Any) -> None:
    """A = 0: the roles of A and B are exchanged, which must be known after loading."""

    def start() -> Toy:
        model = Toy()
        with torch.no_grad():
            model.a.zero_()
        return model

    whole, broken, options = start(), start(), {"lr": 1e-2, **momentum(make)}
    walk(whole, make(whole.parameters(), pairs=whole.pairs, **options), 8)
    optimizer = make(broken.parameters(), pairs=broken.pairs, **options)
    walk(broken, optimizer, 4)
    again = make(broken.parameters(), pairs=broken.pairs, **options)
    again.load_state_dict(snapshot(optimizer))
    walk(broken, again, 4, 4)
    assert same(whole, broken)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("idle", ["a", "b"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_pairs_with_an_idle_factor_resume(make: Any, idle: str, frozen: bool, masters: bool) -> None:
    """State may lie with a parameter that has no gradient: torch's Adam loads no entry without a "step"."""

    def start() -> Toy:
        model = Toy(torch.bfloat16 if masters else F64)
        model.get_parameter(idle).requires_grad_(not frozen)
        return model

    def go(model: Toy, optimizer: Any, first: int) -> None:
        for step in range(first, first + 3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            model.get_parameter(idle).grad = None
            optimizer.step()

    options = {"lr": 1e-2, "masters": masters, **momentum(make)}
    whole, broken = start(), start()
    optimizer = make(whole.parameters(), pairs=whole.pairs, **options)
    go(whole, optimizer, 0)
    go(whole, optimizer, 3)
    optimizer = make(broken.parameters(), pairs=broken.pairs, **options)
    go(broken, optimizer, 0)
    again = make(broken.parameters(), pairs=broken.pairs, **options)
    again.load_state_dict(snapshot(optimizer))
    broken, again = copy.deepcopy((broken, again))
    go(broken, again, 3)
    assert same(whole, broken)
    assert frozen <= (not again.state.get(broken.get_parameter(idle)))  # state, masters too, is of what trains
    walk(broken, again, 1)
    for parameter in (broken.a, broken.b) if not frozen else ():
        counts = {"a": 7.0, "b": 7.0, idle: 1.0}
        assert float(again.state[parameter]["step"]) == counts["a" if parameter is broken.a else "b"]


@pytest.mark.parametrize("make", BOTH)
def test_batches_that_change_from_step_to_step(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that come and go, states loaded and copied in between: the path is that of pairs moved one by one."""
    found = []
    for size, broken in ((1, False), (2**20, False), (2**20, True), (40, True)):
        monkeypatch.setattr(paired, "BATCH", size)
        model, draw = Adapters(), rng(3)
        model.pairs = [Pair(p.name, p.a, p.b, (((0, 2),),)) for p in model.pairs]
        optimizer = make(model.parameters(), lr=1e-2, pairs=model.pairs, **momentum(make))
        for step in range(12):
            optimizer.zero_grad()
            model().backward()
            for p, idle in zip(model.parameters(), (torch.rand(18, generator=draw) < 0.3).tolist(), strict=True):
                p.grad = None if idle else p.grad
            if broken and step % 4 == 1:
                optimizer.load_state_dict(snapshot(optimizer))
            if broken and step % 4 == 3:
                gradients = [p.grad for p in model.parameters()]
                model, optimizer = copy.deepcopy((model, optimizer))
                for p, gradient in zip(model.parameters(), gradients, strict=True):
                    p.grad = gradient
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    for other in found[1:]:
        assert max(map(gap, found[0], other)) < 1e-9
    assert gap(found[0][0], normal(3, 6)) > 1e-3


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("laid", ["transposed", "part of a buffer", "stretched gradient"])
def test_memory_of_parameters_and_gradients_may_lie_otherwise(make: Any, laid: str) -> None:
    a, b, gradient = normal(2, 3, 5), normal(2, 3, 7, seed=1), normal(1, 1, 5, seed=2).expand(2, 3, 5)
    buffer = torch.zeros(40, dtype=F64)
    p, q, other = nn.Parameter(a.clone()), nn.Parameter(b.clone()), a.clone()
    if laid == "transposed":
        other = a.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    elif laid == "part of a buffer":
        buffer[7:37] = a.flatten()
        other = buffer[7:37].view(2, 3, 5)
    x, y = nn.Parameter(other), nn.Parameter(b.clone())
    first, second = (make([s, t], lr=0.1, pairs=[Pair.of(s, t)], **momentum(make)) for s, t in ((p, q), (x, y)))
    for _ in range(3):
        p.grad, x.grad = gradient.contiguous(), gradient if laid == "stretched gradient" else gradient.contiguous()
        q.grad, y.grad = torch.ones_like(q), torch.ones_like(y)
        first.step()
        second.step()
    assert gap(p.detach(), x.detach()) < 1e-15 and gap(q.detach(), y.detach()) < 1e-15
    assert gap(p.detach(), a) > 1e-2
    if laid == "part of a buffer":
        assert torch.equal(buffer[7:37].view(2, 3, 5), p) and not bool(buffer[:7].any() or buffer[37:].any())


@pytest.mark.parametrize("make", BOTH)
def test_state_is_plain_tensors(make: Any) -> None:
    model = Toy()
    optimizer = make(model.parameters(), lr=1e-2, pairs=model.pairs, **momentum(make))
    walk(model, optimizer, 2)
    for state in optimizer.state.values():
        for value in state.values():
            assert type(value) in (Tensor, bool)
            assert not isinstance(value, Tensor) or not value.requires_grad


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_alike(make: Any, copied: Callable[[Any], Any]) -> None:
    """geoopt#188: deepcopy fails."""
    model = Toy()
    optimizer = make(model.parameters(), lr=1e-2, pairs=model.pairs, **momentum(make))
    walk(model, optimizer, 3)
    twin, twin_optimizer = copied((model, optimizer))
    frozen = copy.deepcopy(model.state_dict())
    walk(twin, twin_optimizer, 3, 3)
    assert all(torch.equal(p, frozen[name]) for name, p in model.state_dict().items())  # none of it is shared
    walk(model, optimizer, 3, 3)
    assert same(model, twin)
    assert not equal(frozen, dict(model.state_dict()))


@pytest.mark.parametrize("make", BOTH)
def test_copy_of_the_optimizer_alone_leaves_the_model_alone(make: Any) -> None:
    model = Toy()
    optimizer = make(model.parameters(), lr=1e-2, pairs=model.pairs, **momentum(make))
    walk(model, optimizer, 2)
    before, alone = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer)
    held = [p for group in alone.param_groups for p in group["params"]]
    assert {id(p) for pair in alone.pairs for p in pair.parameters} <= {id(p) for p in held}
    for p in held:
        p.grad = torch.ones_like(p)
    alone.step()
    assert equal(dict(before), dict(model.state_dict()))
    assert not torch.equal(held[0], model.a)


@pytest.mark.parametrize("make", BOTH)
def test_groups_added_later(make: Any) -> None:
    model, twin = Toy(), Toy()
    optimizer = make([model.a, model.b], lr=1e-2, pairs=[model.pairs[0]])
    optimizer.add_param_group({"params": [model.c, model.d, *model.layer.parameters()], "lr": 2e-2})
    walk(model, optimizer, 3)
    groups = [[twin.a, twin.b], [twin.c, twin.d, *twin.layer.parameters()]]
    at_once = make([{"params": groups[0]}, {"params": groups[1], "lr": 2e-2}], lr=1e-2, pairs=[Pair.of(twin.a, twin.b)])
    walk(twin, at_once, 3)
    assert same(model, twin)


@pytest.mark.parametrize("make", BOTH)
def test_zero_grad_and_repr(make: Any) -> None:
    model = Toy()
    optimizer = make(model.parameters(), lr=1e-2, pairs=model.pairs)
    loss_of(model).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not bool(p.grad.any()) for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert make.__name__ in repr(optimizer) and "lr: 0.01" in repr(optimizer)


# --- gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", BOTH)
def test_closures(make: Any) -> None:
    x, y = Toy(), Toy()
    walk(y, make(y.parameters(), lr=1e-2, pairs=y.pairs), 3)
    optimizer, calls = make(x.parameters(), lr=1e-2, pairs=x.pairs), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, len(calls))
        loss.backward()
        calls.append(loss)
        return loss

    with torch.no_grad():
        assert all(optimizer.step(closure) is calls[-1] for _ in range(3))
    assert len(calls) == 3
    assert same(x, y)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
def test_gradients_that_are_not_finite_are_refused(make: Any, bad: float, masters: bool, fresh: bool) -> None:
    model = Toy(torch.bfloat16 if masters else F64)
    optimizer = make(model.parameters(), lr=1e-2, pairs=model.pairs, masters=masters, **momentum(make))
    if not fresh:
        walk(model, optimizer, 2)
    loss_of(model).backward()
    assert model.d.grad is not None
    model.d.grad[1, 2] = bad
    weights, state = copy.deepcopy(model.state_dict()), snapshot(optimizer)
    with pytest.raises(ValueError, match="the gradient of two has NaN or inf entries: no step was taken") as caught:
        optimizer.step()
    assert "\n" not in str(caught.value)
    assert equal(dict(weights), dict(model.state_dict()))
    assert equal(state, snapshot(optimizer))
    walk(model, optimizer, 1)
    assert not equal(dict(weights), dict(model.state_dict()))
    with pytest.raises(ValueError, match="gradient of two"):
        optimizer.step(lambda: model.d.grad.fill_(bad))


@pytest.mark.parametrize("make", BOTH)
def test_large_finite_gradients_are_taken(make: Any) -> None:
    """Their sum is infinite in float16, they are not."""
    a, b = (nn.Parameter(normal(3, n, seed=n).half()) for n in (5, 7))
    optimizer = make([a, b], lr=1e-9, pairs=[Pair.of(a, b)])
    a.grad, b.grad = torch.full_like(a, 6e4), torch.full_like(b, 6e4)
    assert not bool(a.grad.sum().isfinite())
    optimizer.step()
    assert bool(a.isfinite().all())


@pytest.mark.parametrize("make", BOTH)
def test_sparse_gradients_are_refused(make: Any) -> None:
    table, b = nn.Embedding(6, 3, sparse=True, dtype=F64), nn.Parameter(normal(3, 5))
    pair = Pair("table", Factor((Window(table.weight, lambda x: x.t().unsqueeze(0)),)), Pair.of(b, b).b)
    optimizer = make([table.weight, b], pairs=[pair])
    (table(torch.tensor([1, 2])) @ b).sum().backward()
    before = b.detach().clone()
    with pytest.raises(ValueError, match="gradient of table is sparse: make its layer with sparse=False"):
        optimizer.step()
    assert torch.equal(b, before)


@pytest.mark.parametrize("beta2", [0.999, 0.99999])
def test_bias_correction_is_as_good_in_float32(beta2: float) -> None:
    found = []
    for dtype in (F64, torch.float32):
        a, b = normal(2, 3, 5).to(dtype), normal(2, 3, 7, seed=1).to(dtype)
        new, _ = stepped(QuotientAdam, a, b, lr=0.1, betas=(0.9, beta2), weight_decay=0.0)
        found.append(new.double() - a.double())
    assert gap(*found) < 1e-6


@pytest.mark.parametrize("make", BOTH)
def test_accumulated_gradients(make: Any) -> None:
    x, y = Toy(), Toy()
    for model, parts in ((x, 1), (y, 4)):
        optimizer = make(model.parameters(), lr=1e-2, pairs=model.pairs)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(parts):
                (sum(loss_of(model, i) for i in range(4)) / parts).backward()  # type: ignore[union-attr]
            optimizer.step()
    assert all(gap(p.detach(), q.detach()) < 1e-9 for p, q in zip(x.parameters(), y.parameters(), strict=True))


@pytest.mark.parametrize("make", BOTH)
def test_gradient_scaler(make: Any) -> None:
    """Steps with an overflow are left out by the scaler, before the optimizer could refuse them."""
    x, y = Toy(torch.float32), Toy(torch.float32)
    walk(y, make(y.parameters(), lr=1e-2, pairs=y.pairs), 3)
    optimizer = make(x.parameters(), lr=1e-2, pairs=x.pairs)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
    for step, overflow in ((0, False), (1, True), (1, False), (2, False)):
        optimizer.zero_grad()
        scaler.scale(loss_of(x, step)).backward()
        if overflow:
            x.a.grad.fill_(math.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**19
    assert all(gap(p.detach(), q.detach()) < 1e-6 for p, q in zip(x.parameters(), y.parameters(), strict=True))


@pytest.mark.parametrize("make", BOTH)
def test_parameters_without_gradients_rest(make: Any) -> None:
    model = Toy()
    optimizer = make(model.parameters(), lr=1e-2, pairs=model.pairs, **momentum(make))
    optimizer.step()  # none at all
    assert same(model, Toy())
    for step, left_out in enumerate([["a"], [], ["b"], ["c", "d"], ["layer.weight"]] * 2):
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for name in left_out:
            model.get_parameter(name).grad = None
        optimizer.step()
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]) == (name in left_out), name


@pytest.mark.parametrize("make", BOTH)
def test_zero_gradients_are_no_news(make: Any) -> None:
    """A step of zeros moves nothing before the first other gradient, nor does it count."""
    x, y = Toy(), Toy()
    first, second = (make(m.parameters(), lr=1e-2, weight_decay=0.0, pairs=m.pairs) for m in (x, y))
    for _ in range(5):
        for p in (x.a, x.b, x.c, x.d):
            p.grad = torch.zeros_like(p)
        first.step()
    for name in "abcd":
        assert torch.equal(getattr(x, name), getattr(y, name))
    walk(x, first, 4)
    walk(y, second, 4)
    assert all(gap(p.detach(), q.detach()) < 1e-13 for p, q in zip(x.parameters(), y.parameters(), strict=True))


def test_clock_of_each_product_starts_with_its_own_gradient() -> None:
    a, b = nn.Parameter(normal(2, 3, 5)), nn.Parameter(normal(2, 3, 7, seed=1))
    optimizer = QuotientAdam([a, b], lr=1e-2, pairs=[Pair.of(a, b)])
    for step in range(4):
        optimizer.zero_grad()
        quadratic(a[int(step < 2) :], b[int(step < 2) :]).backward()  # head 1 at first, then both
        optimizer.step()
    assert optimizer.state[a]["pair[0].step_a"].flatten().tolist() == [2.0, 4.0]
    assert optimizer.state[a]["pair[0].step_b"].flatten().tolist() == [2.0, 4.0]


# --- half precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_masters_follow_the_path_of_float32(make: Any, half: torch.dtype) -> None:
    """With the gradients of the rounded parameters, bit for bit."""
    model, wide, shown = Toy(half), Toy(torch.float32), Toy(half)
    wide.load_state_dict(model.state_dict())
    options = {"lr": 1e-3, "weight_decay": 0.1, **momentum(make)}
    optimizer = make(model.parameters(), pairs=model.pairs, masters=True, **options)
    reference = make(wide.parameters(), pairs=wide.pairs, **options)
    for step in range(20):
        walk(model, optimizer, 1, step)
        shown.load_state_dict(wide.state_dict())
        shown.zero_grad()
        loss_of(shown, step).backward()
        for p, q in zip(wide.parameters(), shown.parameters(), strict=True):
            assert q.grad is not None
            p.grad = q.grad.float()
        reference.step()
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        assert p.dtype == half
        assert torch.equal(optimizer.state[p]["master"], q)
        assert torch.equal(p, q.to(half))


@pytest.mark.parametrize("make", BOTH)
def test_halves_without_masters_lose_small_steps(make: Any) -> None:
    """Rates far below a half's rounding; masters add up what single steps cannot."""

    def trained(dtype: torch.dtype, masters: bool) -> Toy:
        model = Toy(dtype)
        model.load_state_dict(Toy(torch.bfloat16).state_dict())
        optimizer = make(model.parameters(), lr=3e-5, pairs=model.pairs, masters=masters)
        for _ in range(200):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        return model

    exact = trained(torch.float32, False).a.detach()
    assert torch.equal(trained(torch.bfloat16, True).a, exact.bfloat16())
    assert gap(trained(torch.bfloat16, False).a.detach(), exact) > 2 * gap(exact.bfloat16(), exact)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("masters", [False, True])
def test_half_precision_resumes_with_float32_state(make: Any, masters: bool) -> None:
    whole, broken = Toy(torch.bfloat16), Toy(torch.bfloat16)
    options = {"lr": 1e-3, "masters": masters, **momentum(make)}
    walk(whole, make(whole.parameters(), pairs=whole.pairs, **options), 12)
    optimizer = make(broken.parameters(), pairs=broken.pairs, **options)
    walk(broken, optimizer, 6)
    again = make(broken.parameters(), pairs=broken.pairs, **options)
    again.load_state_dict(snapshot(optimizer))
    for name, value in again.state[broken.a].items():
        assert not isinstance(value, Tensor) or value.dtype == torch.float32, name
    walk(broken, again, 6, 6)
    assert same(whole, broken)


def test_hooks_of_loading_are_heard_in_half_precision() -> None:
    model = Toy(torch.bfloat16)
    optimizer = QuotientAdam(model.parameters(), pairs=model.pairs, masters=True)
    walk(model, optimizer, 1)
    moment = optimizer.state[model.a]["one[0].exp_avg_a"].clone()

    def doubled(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        state = copy.deepcopy(state)
        state["state"][0]["one[0].exp_avg_a"] *= 2
        return state

    optimizer.register_load_state_dict_pre_hook(doubled)
    for factor in (2, 4):
        optimizer.load_state_dict(optimizer.state_dict())
        assert torch.equal(optimizer.state[model.a]["one[0].exp_avg_a"], factor * moment)


# --- batches ----------------------------------------------------------------------------------------------------


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ParameterList([normal(3, 6, seed=i) for i in range(9)])
        self.b = nn.ParameterList([(i % 2) * normal(3, 5, seed=50 + i) for i in range(9)])
        self.pairs = [Pair.of(a, b, f"{i}") for i, (a, b) in enumerate(zip(self.a, self.b, strict=True))]

    def forward(self) -> Tensor:
        parts = [quadratic(a[None], b[None], seed=i) for i, (a, b) in enumerate(zip(self.a, self.b, strict=True))]
        return torch.stack(parts).sum()


@pytest.mark.parametrize("make", BOTH)
def test_batches_do_not_matter(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small adapters together, or one by one."""
    found = []
    for size in (2**20, 40, 1):
        monkeypatch.setattr(paired, "BATCH", size)
        model = Adapters()
        optimizer = make(model.parameters(), lr=1e-2, pairs=model.pairs, **momentum(make))
        for _ in range(10):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    for other in found[1:]:
        assert max(map(gap, found[0], other)) < 1e-9
    assert gap(found[0][0], normal(3, 6)) > 1e-3


@pytest.mark.parametrize("make", BOTH)
def test_only_pairs_that_move_alike_are_moved_together(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same shapes, but other rates, rows that turn, a zero on the other side, a frozen factor, another dtype: not in
    one batch."""
    found, sizes = [], []
    whole = make._step_batch
    monkeypatch.setattr(make, "_step_batch", lambda self, batch: (sizes.append(len(batch)), whole(self, batch)))
    for size in (1, 2**20):
        monkeypatch.setattr(paired, "BATCH", size)
        factors = [[nn.Parameter(normal(3, 6, seed=10 * i + j)) for i in range(14)] for j in (0, 1)]
        with torch.no_grad():
            for i in (0, 1):
                factors[0][i].zero_()
        for i in (12, 13):
            for side in factors:
                side[i].data = side[i].data.float()
        for i in (2, 3):
            factors[0][i].requires_grad_(False)
        for i in (4, 5):
            factors[1][i].requires_grad_(False)
        pairs = [Pair.of(a, b, f"{i}") for i, (a, b) in enumerate(zip(*factors, strict=True))]
        pairs[6:8] = [Pair(p.name, p.a, p.b, (((0, 2),),)) for p in pairs[6:8]]
        held = [
            [p for pair in some for p in pair.parameters] for some in (pairs[:8] + pairs[10:], pairs[8:9], pairs[9:10])
        ]
        groups = [{"params": params, "lr": rate} for params, rate in zip(held, (1e-2, 2e-2, 1e-2), strict=True)]
        optimizer = make(groups, pairs=pairs, **momentum(make))
        sizes.clear()
        for step in range(5):
            optimizer.zero_grad()
            for i, p in enumerate(p for params in held for p in params):
                p.grad = normal(3, 6, seed=100 * step + i).to(p.dtype) if p.requires_grad else None
            optimizer.step()
        found.append([p.detach() for params in held for p in params])
    assert sorted(sizes) == 10 * [1] + 30 * [2]
    for p, q in zip(*found, strict=True):
        assert p.dtype == q.dtype and float((p - q).abs().max()) < (1e-12 if p.dtype == F64 else 1e-6)


@pytest.mark.parametrize("make", BOTH)
def test_state_stays_where_it_lies(make: Any) -> None:
    """Frozen later, or first of the pair only later: moments and frames go on."""
    model, twin = Toy(), Toy()
    optimizers = [make(m.parameters(), lr=1e-2, pairs=m.pairs, **momentum(make)) for m in (model, twin)]
    for m, optimizer in zip((model, twin), optimizers, strict=True):
        walk(m, optimizer, 3)
        m.a.requires_grad_(m is twin)  # a gradient that is None either way
        for step in (3, 4):
            optimizer.zero_grad()
            loss_of(m, step).backward()
            m.a.grad = None
            optimizer.step()
    assert same(model, twin)
    held = [
        [p for p in m.parameters() if any("one[0]." in k for k in o.state[p])]
        for m, o in zip((model, twin), optimizers, strict=True)
    ]
    assert held[0] == [model.a] and held[1] == [twin.a]


@pytest.mark.parametrize("make", BOTH)
def test_pairs_are_given_in_any_order(make: Any) -> None:
    """LoRA-RITE's port takes parameters to alternate between A and B; here their order says nothing."""
    x, y = Toy(), Toy()
    walk(x, make(x.parameters(), lr=1e-2, pairs=x.pairs), 4)
    walk(y, make(reversed(list(y.parameters())), lr=1e-2, pairs=reversed(y.pairs)), 4)
    assert all(gap(p.detach(), q.detach()) < 1e-13 for p, q in zip(x.parameters(), y.parameters(), strict=True))


@pytest.mark.parametrize("make", BOTH)
def test_unknown_unit(make: Any) -> None:
    model = Toy()
    with pytest.raises(ValueError, match='unit must be "factor" or "product", got \'rows\''):
        make(model.parameters(), pairs=model.pairs, unit="rows")
