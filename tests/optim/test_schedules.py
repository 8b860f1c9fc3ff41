"""The logarithmic decay of learning rates."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from gaugekit.nn.spheres import Sphere
from gaugekit.optim.hyperball import Hyperball
from gaugekit.optim.schedules import logarithmic_decay


def rates(steps: int, lr: float = 0.1, **arguments: Any) -> list[float]:
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=lr)
    scheduler = logarithmic_decay(optimizer, **arguments)
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


@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
def test_resumed_and_copied(how: str) -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    scheduler = logarithmic_decay(optimizer, 10, 3)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    if how == "state_dict":
        other = logarithmic_decay(SGD([nn.Parameter(torch.zeros(2))], lr=0.1), 10, 3)
        other.load_state_dict(scheduler.state_dict())
    else:
        other = copy.deepcopy(scheduler) if how == "deepcopy" else pickle.loads(pickle.dumps(scheduler))
    for _ in range(4):
        scheduler.optimizer.step()
        scheduler.step()
        other.optimizer.step()
        other.step()
        assert scheduler.get_last_lr() == other.get_last_lr()
    assert scheduler.get_last_lr()[0] < 0.05


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
    assert optimizer.param_groups[0]["lr"] == 0.1
