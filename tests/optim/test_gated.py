"""GatedAdamW against torch's AdamW, at a = 1, and against its formula elsewhere."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from drawn import F64, normal
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from gaugekit.optim.gated import GatedAdamW

GATES = [0.0, 0.25, 0.5, 1.0, 2.0, 7.5]


def weights(dtype: torch.dtype = F64, seed: int = 0) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*s, seed=seed + i).to(dtype)) for i, s in enumerate([(3, 4), (5,), (), (0, 2)])]


def push(parameters: list[nn.Parameter], step: int, size: float = 1.0) -> None:
    for i, p in enumerate(parameters):
        p.grad = (size * normal(*p.shape, seed=100 * step + i + 50)).to(p.dtype)


def same(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def by_hand(p: Tensor, gradients: list[Tensor], lr: float, eps: float, decay: float, a: float) -> Tensor:
    """m̂ / √v̂ · σ(a log(√v̂ / ε)), in float64, as it is written; 0 at v̂ = 0."""
    m = v = torch.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        r = (v / (1 - 0.99**t)).sqrt()
        step = m / (1 - 0.9**t) / r * torch.sigmoid(a * (r / eps).log())
        p = p - lr * decay * p - lr * torch.where(v == 0, 0.0, step)
    return p


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("extra", [{}, {"weight_decay": 0.3}, {"maximize": True}, {"eps": 0.1, "betas": (0.5, 0.7)}])
def test_gate_one_is_adamw(extra: dict[str, Any], foreach: bool | None, dtype: torch.dtype) -> None:
    ours, theirs, other = weights(dtype), weights(dtype), weights(dtype)
    optimizers = [
        GatedAdamW(ours, lr=0.1, foreach=foreach, **extra),
        AdamW(theirs, lr=0.1, **extra),
        GatedAdamW(other, lr=0.1, gate=0.5, **extra),
    ]
    for step in range(20):
        for parameters, optimizer in zip((ours, theirs, other), optimizers, strict=True):
            push(parameters, step, size=10.0 ** (step % 5 - 2))
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=20 * torch.finfo(dtype).eps)
    if extra.get("eps"):  # the gate shows where gradients are of the size of ε
        assert not torch.allclose(ours[0], other[0], rtol=0.01, atol=0.01)
    states = (optimizers[0].state, optimizers[1].state)
    for p, q in zip(ours, theirs, strict=True):
        assert states[0][p].keys() == states[1][q].keys()
        torch.testing.assert_close(states[0][p], states[1][q], rtol=1e-6, atol=0)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("eps", [1e-8, 1e-2, 3.0])
@pytest.mark.parametrize("gate", GATES)
def test_the_formula(gate: float, eps: float, foreach: bool | None) -> None:
    parameters = weights()
    start = [p.detach().clone() for p in parameters]
    optimizer = GatedAdamW(parameters, 0.1, (0.9, 0.99), eps, 0.2, gate, foreach=foreach)
    seen: list[list[Tensor]] = [[] for _ in parameters]
    for step in range(8):
        push(parameters, step, size=10.0 ** (2 - step))
        for p, gradients in zip(parameters, seen, strict=True):
            assert p.grad is not None
            p.grad.view(-1)[:1] = 0.0  # never any gradient here
            gradients.append(p.grad.clone())
        optimizer.step()
    for p, first, gradients in zip(parameters, start, seen, strict=True):
        expected = by_hand(first, gradients, 0.1, eps, 0.2, gate)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-14)


def test_how_far_the_gate_is_open() -> None:
    """Figures of the documentation: of a step at 100 ε, and at ε/100."""
    for gate, held, passed in ((1.0, 1 / 101, 1 / 101), (0.5, 1 / 11, 1 / 11)):
        for size, share in ((100.0, 1 - held), (0.01, passed)):
            p = nn.Parameter(torch.zeros(1, dtype=F64))
            p.grad = torch.full((1,), size * 1e-3, dtype=F64)
            GatedAdamW([p], lr=1.0, eps=1e-3, gate=gate).step()
            assert float(-p.detach()) == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", [*GATES, 60.0])
def test_zero_gradients_take_no_step(gate: float, dtype: torch.dtype) -> None:
    p = nn.Parameter(normal(3, 4).to(dtype))
    before = p.detach().clone()
    optimizer = GatedAdamW([p], lr=1.0, gate=gate, weight_decay=0.0)
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p, before)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert bool(p.isfinite().all())
    assert bool((p != before).all())


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("gate", [*GATES, 60.0])
def test_gradients_of_all_sizes(gate: float, dtype: torch.dtype) -> None:
    """Steps are finite and at most of Adam's size, larger gradients never make smaller ones, and float32 agrees with
    float64 wherever the square of the gradient is a number in float32."""
    size = torch.logspace(-30, 30, 61, dtype=F64)
    ends = []
    for kind in (dtype, F64):
        p = nn.Parameter(torch.zeros(61, dtype=kind))
        p.grad = size.to(kind)
        optimizer = GatedAdamW([p], lr=1.0, gate=gate)
        optimizer.step()
        ends.append(-p.detach().double())
        p.grad = torch.zeros_like(p)
        optimizer.step()
        assert bool(p.isfinite().all())
    step, exact = ends
    assert bool(((step >= 0) & (step <= 1 + 1e-6)).all())
    assert bool((exact.diff() >= -1e-12).all())
    fits = torch.ones(61, dtype=torch.bool) if dtype == F64 else (size > 1e-17) & (size < 1e18)
    torch.testing.assert_close(step[fits], exact[fits], rtol=2e-4 if dtype == torch.float32 else 1e-12, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gate", [0.5, 1.0])
def test_half_precision_steps_are_computed_in_float32(gate: float, dtype: torch.dtype) -> None:
    """bfloat16 and float16 gradients of which the squares vanish: AdamW's own step is NaN there in float16."""
    p = nn.Parameter(normal(50).to(dtype))
    wide = nn.Parameter(p.detach().float())
    optimizers = [GatedAdamW([x], lr=0.1, gate=gate) for x in (p, wide)]
    for step in range(5):
        g = normal(50, seed=step + 1).to(dtype)
        p.grad, wide.grad = g, g.float()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(p.detach().float(), wide.detach(), rtol=0, atol=30 * torch.finfo(dtype).eps)
    p.grad = torch.full_like(p, 1e-5)
    optimizers[0].step()
    assert bool(p.isfinite().all())


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}])
def test_a_checkpoint_of_adamw_loads_and_goes_on(options: dict[str, Any]) -> None:
    ours, theirs = weights(seed=7), weights()
    adamw = AdamW(theirs, lr=0.1, weight_decay=0.3, **options)
    for step in range(4):
        push(theirs, step)
        adamw.step()
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q)
    optimizer = GatedAdamW(ours, lr=9.0)
    optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))  # loaded tensors are not copied by torch
    assert optimizer.param_groups[0]["lr"] == 0.1
    for step in range(4, 8):
        for parameters, o in ((ours, optimizer), (theirs, adamw)):
            push(parameters, step)
            o.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14)
    adamw.load_state_dict(optimizer.state_dict())  # and back


def test_gates_of_groups_outlive_a_checkpoint_of_adamw() -> None:
    a, b = weights()[:2]
    groups = [{"params": [a], "gate": 0.5}, {"params": [b]}]
    optimizer = GatedAdamW(groups, gate=0.25)
    optimizer.load_state_dict(AdamW([{"params": [a]}, {"params": [b]}]).state_dict())
    assert [group["gate"] for group in optimizer.param_groups] == [0.5, 0.25]
    other = GatedAdamW([{"params": [a]}, {"params": [b]}])
    other.load_state_dict(optimizer.state_dict())
    assert [group["gate"] for group in other.param_groups] == [0.5, 0.25]


@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
def test_resumed_and_copied_runs_are_the_unbroken_one(how: str) -> None:
    parameters = weights(torch.float32)
    optimizer = GatedAdamW(parameters, lr=0.1, gate=0.5)
    for step in range(3):
        push(parameters, step)
        optimizer.step()
    if how == "state_dict":
        copies = [nn.Parameter(p.detach().clone()) for p in parameters]
        other = GatedAdamW(copies, lr=5.0, gate=2.0)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        pair = (parameters, optimizer)
        copies, other = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    before = [nn.Parameter(p.detach().clone()) for p in parameters]
    for step in range(3, 6):
        push(copies, step)
        other.step()
    assert same(parameters, before)
    for step in range(3, 6):
        push(parameters, step)
        optimizer.step()
    assert same(parameters, copies)
    assert not same(parameters, before)


def test_groups_missing_gradients_and_late_ones() -> None:
    """Each parameter has its own count of steps, whatever its group and the others have done."""
    ours, theirs = weights(), weights()
    optimizers = []
    for kind, (a, b, c, d) in ((GatedAdamW, ours), (AdamW, theirs)):
        optimizer = kind([{"params": [a, b]}, {"params": [c], "lr": 0.5, "weight_decay": 0.0}], lr=0.1)
        optimizer.add_param_group({"params": [d], "betas": (0.5, 0.6)})
        optimizers.append(optimizer)
    for step in range(6):
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            push(parameters, step)
            if step < 3:
                parameters[1].grad = None
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14)
    assert [int(optimizers[0].state[p]["step"]) for p in ours[:2]] == [6, 3]


def test_closures_and_schedulers() -> None:
    p = nn.Parameter(normal(3))
    optimizer = GatedAdamW([p], lr=torch.tensor(1.0), gate=0.5, weight_decay=0.0)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        calls.append(loss.detach())
        return loss

    with torch.no_grad():
        assert torch.equal(optimizer.step(closure).detach(), calls[0])
    assert len(calls) == 1
    scheduler.step()
    before = p.detach().clone()
    optimizer.step(closure)
    assert torch.equal(p, before)
    assert calls[1] < calls[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr must be finite and at least 0, got -1.0"),
        ({"lr": math.nan}, "lr must be finite"),
        ({"betas": (1.0, 0.9)}, "betas must be two numbers in"),
        ({"betas": (0.9, -0.1)}, "betas must be two numbers in"),
        ({"betas": (0.9,)}, "betas must be two numbers in"),
        ({"eps": 0.0}, "eps must be finite and above 0"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"gate": -0.5}, "gate must be finite and at least 0, got -0.5"),
        ({"gate": math.inf}, "gate must be"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    p = nn.Parameter(normal(3))
    with pytest.raises(ValueError, match=message):
        GatedAdamW([p], **arguments)
    with pytest.raises(ValueError, match=message):
        GatedAdamW([p]).add_param_group({"params": [nn.Parameter(normal(3))], **arguments})


def test_checkpoints_and_tensors_that_do_not_fit() -> None:
    p = nn.Parameter(normal(3))
    optimizer = GatedAdamW([p])
    with pytest.raises(ValueError, match="no amsgrad"):
        optimizer.load_state_dict(AdamW([p], amsgrad=True).state_dict())
    with pytest.raises(ValueError, match="of AdamW, not of Adam"):
        optimizer.load_state_dict(torch.optim.Adam([p]).state_dict())
    z = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    z.grad = torch.ones_like(z)
    with pytest.raises(TypeError, match="real parameters"):
        GatedAdamW([z]).step()
    p.grad = torch.ones(3, dtype=F64).to_sparse()
    with pytest.raises(TypeError, match="dense gradients"):
        optimizer.step()
