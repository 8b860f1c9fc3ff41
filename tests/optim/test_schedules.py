"""Learning rates over training: warm-up, and cosine, logarithmic, or no decay."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from gaugekit.nn.spheres import Sphere
from gaugekit.optim.hyperball import Hyperball
from gaugekit.optim.schedules import constant, cosine_decay, logarithmic_decay

SCHEDULES: dict[str, tuple[Callable[..., LambdaLR], dict[str, Any]]] = {
    "logarithmic": (logarithmic_decay, {"total_steps": 10}),
    "cosine": (cosine_decay, {"total_steps": 10}),
    "constant": (constant, {}),
}


def rates(
    steps: int, lr: float = 0.1, make: Callable[..., LambdaLR] = logarithmic_decay, **arguments: Any
) -> list[float]:
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=lr)
    scheduler = make(optimizer, **arguments)
    result = []
    for _ in range(steps):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return result


@pytest.mark.parametrize("final", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("rho", [1e-3, 0.1, 2.0, math.inf])
def test_formula_and_endpoints(rho: float, warmup: int, final: float) -> None:
    total, lr = 50, 0.1
    seen = rates(total + 5, lr, total_steps=total, warmup_steps=warmup, rho=rho, final=final)
    assert seen[warmup] == lr
    assert seen[total:] == [final * lr] * 5
    for t in range(warmup):
        assert seen[t] == pytest.approx(lr * (t + 1) / (warmup + 1), rel=1e-15)
        assert 0 < seen[t] < lr
    low = final * lr
    for t in range(warmup, total + 1):
        r = (t - warmup) / (total - warmup)
        share = r if math.isinf(rho) else math.log(1 + r / rho) / math.log(1 + 1 / rho)
        assert seen[t] == pytest.approx(low + (lr - low) * (1 - share), rel=1e-12, abs=1e-15)
    falls = [a - b for a, b in zip(seen[warmup:total], seen[warmup + 1 : total + 1], strict=True)]
    assert all(x > 0 for x in falls) if final < 1 else not any(falls)


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_cosine_and_endpoints(warmup: int, final: float) -> None:
    total, lr = 50, 0.1
    seen = rates(total + 5, lr, cosine_decay, total_steps=total, warmup_steps=warmup, final=final)
    assert seen[warmup] == lr
    assert seen[total:] == [final * lr] * 5
    assert seen[:warmup] == pytest.approx([lr * (t + 1) / (warmup + 1) for t in range(warmup)], rel=1e-15)
    low = final * lr
    for t in range(warmup, total + 1):
        cosine = math.cos(math.pi * (t - warmup) / (total - warmup))
        assert seen[t] == pytest.approx(low + (lr - low) * (1 + cosine) / 2, rel=1e-12, abs=1e-15)
    falls = [a - b for a, b in zip(seen[warmup:total], seen[warmup + 1 : total + 1], strict=True)]
    assert all(x > 0 for x in falls) if final < 1 else not any(falls)


def test_cosine_is_torch_s() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    theirs = CosineAnnealingLR(optimizer, 20, eta_min=0.02)
    for rate in rates(21, 0.1, cosine_decay, total_steps=20, final=0.2):
        assert theirs.get_last_lr()[0] == pytest.approx(rate, rel=1e-12)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_constant_after_warm_up(warmup: int) -> None:
    seen = rates(20, 0.1, constant, warmup_steps=warmup)
    assert seen[warmup:] == [0.1] * (20 - warmup)
    assert seen[:warmup] == rates(20, 0.1, cosine_decay, total_steps=20, warmup_steps=warmup)[:warmup]


def test_limits_of_rho() -> None:
    linear = rates(21, total_steps=20, rho=math.inf)
    assert rates(21, total_steps=20, rho=1e9) == pytest.approx(linear, abs=1e-9)
    assert rates(21, total_steps=20, rho=1e300) == pytest.approx(linear, abs=1e-15)
    assert linear == pytest.approx([0.1 * (1 - t / 20) for t in range(21)], abs=1e-16)
    middles = [rates(11, total_steps=20, rho=rho)[10] for rho in (1e-300, 1e-6, 0.1, 1.0, math.inf)]
    assert middles == sorted(middles)  # the smaller ρ, the sooner it falls
    assert middles[0] < 1e-3


def test_every_group_has_its_own_largest_rate() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": lr} for lr in (1.0, 0.01)]
    optimizer = AdamW(groups)
    scheduler = logarithmic_decay(optimizer, 4, rho=0.5, final=0.1)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
        high, low = (group["lr"] for group in optimizer.param_groups)
        assert high == pytest.approx(100 * low, rel=1e-12)
    assert scheduler.get_last_lr() == [0.1, 0.001]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
def test_resumed_and_copied(how: str, name: str) -> None:
    make, arguments = SCHEDULES[name]
    arguments = {**arguments, "warmup_steps": 3 if arguments else 6}
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    scheduler = make(optimizer, **arguments)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    if how == "state_dict":
        other = make(SGD([nn.Parameter(torch.zeros(2))], lr=0.1), **arguments)
        other.load_state_dict(scheduler.state_dict())
    else:
        other = copy.deepcopy(scheduler) if how == "deepcopy" else pickle.loads(pickle.dumps(scheduler))
    for _ in range(4):
        scheduler.optimizer.step()
        scheduler.step()
        other.optimizer.step()
        other.step()
        assert scheduler.get_last_lr() == other.get_last_lr()
    assert scheduler.get_last_lr()[0] < 0.05 if name != "constant" else scheduler.get_last_lr()[0] == 0.1


def test_on_a_wrapped_optimizer() -> None:
    p = nn.Parameter(torch.eye(3))
    optimizer = Hyperball(SGD([p], lr=1.0), [Sphere(p, 1, "w")])
    scheduler = logarithmic_decay(optimizer, 2)
    for _ in range(3):
        p.grad = torch.ones(3, 3)
        before = p.detach().clone()
        optimizer.step()
        scheduler.step()
    assert optimizer.inner.param_groups[0]["lr"] == 0.0
    torch.testing.assert_close(p.detach(), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total_steps": 0}, "total_steps must be at least 1, got 0"),
        ({"total_steps": 5, "warmup_steps": 5}, "from 0 to total_steps - 1 = 4, got 5"),
        ({"total_steps": 5, "warmup_steps": -1}, "got -1"),
        ({"total_steps": 5, "rho": 0.0}, "rho must be above 0"),
        ({"total_steps": 5, "rho": -1.0}, "rho must be above 0"),
        ({"total_steps": 5, "rho": 1e-320}, "rho must be above 0"),
        ({"total_steps": 5, "rho": math.nan}, "rho must be above 0"),
        ({"total_steps": 5, "final": 1.5}, "from 0 to 1, got 1.5"),
        ({"total_steps": 5, "final": math.nan}, "got nan"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match=message):
        logarithmic_decay(optimizer, **arguments)
    if "rho" not in arguments:
        with pytest.raises(ValueError, match=message):
            cosine_decay(optimizer, **arguments)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_warm_up_that_is_none() -> None:
    with pytest.raises(ValueError, match="warmup_steps must be at least 0, got -1"):
        constant(SGD([nn.Parameter(torch.zeros(2))], lr=0.1), -1)
