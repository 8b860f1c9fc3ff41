"""Muon and AdamW as one optimizer: each part is torch's own, and the whole is what an optimizer owes to torch."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import gap, normal
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR
from two import member, run_two

from gaugekit import Horizontal, pairs
from gaugekit.nn.decoding import CausalAttention
from gaugekit.nn.spheres import Reader, spheres
from gaugekit.optim.hyperball import Hyperball
from gaugekit.optim.muon import MuonAdamW
from gaugekit.optim.schedules import cosine_decay


def made(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5), nn.LayerNorm(5))


def parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    found = list(model.parameters())
    return [p for p in found if p.ndim == 2], [p for p in found if p.ndim != 2]


def both(model: nn.Module, **options: Any) -> MuonAdamW:
    return MuonAdamW(*parts(model), **{"lr": 0.02, "weight_decay": 0.1, **options})


def backward(model: nn.Module, step: int, rows: slice = slice(None)) -> None:
    model.zero_grad()
    model(normal(4, 6, seed=step)[rows].float()).sin().square().mean().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int] | range, after: Any = None) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        if after is not None:
            after.step()


def values(model: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(values(a), values(b), strict=True))


def test_each_part_is_torch_s_own() -> None:
    model, twin = made(), made()
    matrices, others = parts(twin)
    options: dict[str, Any] = {"momentum": 0.8, "nesterov": False, "ns_steps": 4}
    optimizer = both(model, betas=(0.8, 0.9), eps=1e-3, **options)
    apart = (
        Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", **options),
        AdamW(others, lr=0.02, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-3),
    )
    start = made()
    for step in range(5):
        train(model, optimizer, range(step, step + 1))
        backward(twin, step)
        for part in apart:
            part.step()
        assert same(model, twin)
    assert all(gap(x, y) > 1e-2 for x, y in zip(values(model), values(start), strict=True))


def test_a_step_has_the_size_of_adamw_s() -> None:
    """One learning rate for both: the root mean square of Muon's step is 0.2 lr, some 0.2 to 0.4 of Adam's."""
    for shape in ((16, 6), (6, 16), (12, 12)):
        matrix = nn.Parameter(torch.zeros(shape))
        optimizer = MuonAdamW([matrix], [], lr=0.01, weight_decay=0.0, ns_steps=20)
        matrix.grad = normal(*shape).float()
        optimizer.step()
        assert 0.1 < float(matrix.detach().square().mean().sqrt()) / 0.01 < 0.3


@pytest.mark.parametrize("left", ["matrices", "others"])
def test_one_of_both_may_be_empty(left: str) -> None:
    model, twin = nn.Linear(6, 5, bias=left == "others"), nn.Linear(6, 5, bias=left == "others")
    twin.load_state_dict(model.state_dict())
    whole = list(model.parameters())
    optimizer = MuonAdamW(whole, [], lr=0.1) if left == "matrices" else MuonAdamW([], whole, lr=0.1)
    assert len(optimizer.param_groups) == 1
    kind: Any = Muon if left == "matrices" else AdamW
    extra = {"adjust_lr_fn": "match_rms_adamw"} if left == "matrices" else {"weight_decay": 0.1}
    alone = kind(twin.parameters(), lr=0.1, **extra)
    train(model, optimizer, range(3))
    train(twin, alone, range(3))
    assert same(model, twin)


def by_state(model: nn.Module, optimizer: MuonAdamW) -> tuple[nn.Module, MuonAdamW]:
    twin = copy.deepcopy(model)
    resumed = both(twin, lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin, resumed


def by_checkpoint(model: nn.Module, optimizer: MuonAdamW) -> tuple[nn.Module, MuonAdamW]:
    """What torch.distributed.checkpoint keeps: state by the names of parameters."""
    state = get_optimizer_state_dict(model, optimizer)
    assert {"0.weight", "0.bias", "3.weight"} < set(state["state"])
    twin = copy.deepcopy(model)
    resumed = both(twin, lr=0.5)
    set_optimizer_state_dict(twin, resumed, copy.deepcopy(state))
    return twin, resumed


RESUMED: dict[str, Callable[[nn.Module, MuonAdamW], tuple[nn.Module, MuonAdamW]]] = {
    "state_dict": by_state,
    "checkpoint": by_checkpoint,
    "deepcopy": lambda model, optimizer: copy.deepcopy((model, optimizer)),
    "pickle": lambda model, optimizer: pickle.loads(pickle.dumps((model, optimizer))),
}


@pytest.mark.parametrize("how", RESUMED)
@pytest.mark.parametrize("before", [0, 3])
def test_resumed_is_unbroken(how: str, before: int) -> None:
    """geoopt#188, #226: a deep copy failed, and so did a state_dict."""
    model = made()
    optimizer = both(model)
    train(model, optimizer, range(before))
    twin, resumed = RESUMED[how](model, optimizer)
    old = values(model)
    train(twin, resumed, range(before, before + 3))
    assert all(torch.equal(x, y) for x, y in zip(values(model), old, strict=True))
    train(model, optimizer, range(before, before + 3))
    assert same(model, twin)
    forgetful = copy.deepcopy(model), made()
    train(forgetful[1], both(forgetful[1]), range(before, before + 3))
    assert before == 0 or not same(forgetful[1], model)


def test_schedules_and_groups() -> None:
    model, twin = made(), made()
    optimizer = both(model)
    schedule = cosine_decay(optimizer, 4)
    matrices, others = parts(twin)
    fixed = Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw"), AdamW(others, lr=0.02, weight_decay=0.1)
    plans = [LambdaLR(part, schedule.lr_lambdas[0]) for part in fixed]
    train(model, optimizer, range(4), schedule)
    for step in range(4):
        backward(twin, step)
        for part, plan in zip(fixed, plans, strict=True):
            part.step()
            plan.step()
    assert same(model, twin)
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = values(model)
    train(model, optimizer, range(2))
    assert all(torch.equal(x, y) for x, y in zip(values(model), before, strict=True))


def test_groups_that_come_later() -> None:
    first, matrix, vector = made(), nn.Parameter(normal(4, 3).float()), nn.Parameter(normal(4).float())
    optimizer = both(first, momentum=0.5)
    optimizer.add_param_group({"params": [matrix], "ns_steps": 5})
    optimizer.add_param_group({"params": [vector], "lr": 0.3})
    before = matrix.detach().clone(), vector.detach().clone()
    for p in (matrix, vector):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert "momentum_buffer" in optimizer.state[matrix] and "exp_avg" in optimizer.state[vector]
    assert optimizer.param_groups[-2]["momentum"] == 0.5
    assert gap(vector.detach(), before[1] * (1 - 0.3 * 0.1) - 0.3) < 1e-6
    assert gap(matrix.detach(), before[0]) > 1e-3


def test_a_closure_and_a_missing_gradient() -> None:
    model = made()
    optimizer = both(model)
    before = values(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model[0](torch.ones(6)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    moved = [not torch.equal(x, y) for x, y in zip(values(model), before, strict=True)]
    assert moved == [True, True, False, False, False, False]


def test_inside_wrappers() -> None:
    torch.manual_seed(0)
    on_sphere = nn.Sequential(Reader(6, 6), nn.Linear(6, 5))
    optimizer = Hyperball(
        MuonAdamW([{"params": [on_sphere[0].weight], "weight_decay": 0.0}], [*on_sphere[1].parameters()], lr=0.1),
        spheres(on_sphere),
    )
    train(on_sphere, optimizer, range(3))
    lengths = on_sphere[0].weight.detach().norm(dim=1)
    assert gap(lengths, torch.ones(6)) < 1e-6

    attention = CausalAttention(8, 2)
    found = pairs(attention)
    horizontal = Horizontal(MuonAdamW([*attention.parameters()], [], lr=0.05), found, rebalance=2)

    def unbalance() -> float:
        return max(gap(a @ a.mT, b @ b.mT) for pair in found for a, b in pair.factors())

    attention(normal(2, 5, 8).float()).square().mean().backward()
    horizontal.step()
    assert unbalance() > 1e-2
    horizontal.step()
    assert unbalance() < 1e-5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p, b: MuonAdamW([b], [p]), "Muon only supports 2D parameters"),
        (lambda p, b: MuonAdamW([p], [p]), "some parameters appear in more than one parameter group"),
        (lambda p, b: MuonAdamW([], []), "empty parameter list"),
        (lambda p, b: MuonAdamW([p], [b], lr=-1.0), "Learning rate should be >= 0"),
        (lambda p, b: MuonAdamW([p], [b], momentum=-1.0), "momentum should be >= 0"),
        (lambda p, b: MuonAdamW([p], [b], betas=(1.0, 0.9)), "Invalid beta parameter"),
    ],
)
def test_bad_arguments(make: Callable[[nn.Parameter, nn.Parameter], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2)))


# --- two processes ----------------------------------------------------------------------------------------------


def worker(rank: int, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    alone, sharded, broken = made(), made(), made()
    for model in (sharded, broken):
        fully_shard(model[2], mesh=mesh)  # a matrix of 5 rows, which two processes do not share evenly
        fully_shard(model, mesh=mesh)
    optimizer, together = both(alone), both(sharded)
    found: dict[str, Any] = {"gaps": []}
    start = values(alone)
    for step in range(6):
        if step == 3:  # an interruption: weights and state into a model that has neither
            broken.load_state_dict(sharded.state_dict())
            again = both(broken)
            set_optimizer_state_dict(broken, again, copy.deepcopy(get_optimizer_state_dict(sharded, together)))
        backward(alone, step)
        optimizer.step()
        backward(sharded, step, slice(rank, None, 2))
        together.step()
        if step >= 3:
            backward(broken, step, slice(rank, None, 2))
            again.step()
        found["gaps"].append(max(gap(x, y) for x, y in zip(values(alone), values(sharded), strict=True)))
    found["moved"] = min(gap(x, y) for x, y in zip(values(alone), start, strict=True))
    found["resumed"] = same(sharded, broken)
    # Had a process another gradient, it would show.
    backward(alone, 9)
    backward(sharded, 9, slice(rank, None, 2))
    if rank == 1:
        sharded[0].weight.grad.to_local().mul_(-1)
    optimizer.step()
    together.step()
    found["perturbed"] = max(gap(x, y) for x, y in zip(values(alone), values(sharded), strict=True))
    (folder / f"found{rank}.json").write_text(json.dumps(found))


def test_sharded_steps_are_those_of_one_process(tmp_path: Path) -> None:
    run_two(__file__, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"found{rank}.json").read_text())
        assert max(found["gaps"]) < 2e-4  # 1e-7 unless a gradient lies between two numbers of bfloat16
        assert found["moved"] > 1e-2
        assert found["resumed"]
        assert found["perturbed"] > 2e-3


if __name__ == "__main__":
    member(worker)
