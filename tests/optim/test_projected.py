"""An optimizer without the part of its steps along orbits: what is taken out, and that nothing else is."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from drawn import F64, gap, normal
from torch import Tensor, nn

from gaugekit.linalg import balance_defect
from gaugekit.optim.finding import find_pairs
from gaugekit.optim.horizontal import inner, vertical_part
from gaugekit.optim.pairs import Pair, balance_, scramble_
from gaugekit.optim.projected import Horizontal


class Toy(nn.Module):
    """Two attention layers of a regression, with biases of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(12, 3, batch_first=True, dtype=F64) for _ in range(2))
        self.head = nn.Linear(12, 5, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return self.head(x)


def toy(condition: float = 10.0) -> tuple[Toy, list[Pair]]:
    torch.manual_seed(0)
    model = Toy()
    pairs = find_pairs(model)
    scramble_(pairs, torch.Generator().manual_seed(1), condition)
    return model, pairs


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    return F.mse_loss(model(normal(4, 6, 12, seed=seed)), normal(4, 6, 5, seed=seed + 100))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    optimizer.zero_grad()
    loss_of(model, seed).backward()
    optimizer.step()


def adam(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)


def vertical_share(before: list[tuple[Tensor, Tensor]], after: list[tuple[Tensor, Tensor]], metric: str) -> float:
    whole = along = 0.0
    for (a, b), (a_after, b_after) in zip(before, after, strict=True):
        moved = a_after - a, b_after - b
        part = vertical_part(a, b, *moved, metric=metric)
        whole += float(inner(a, b, moved, moved, metric).sum())
        along += float(inner(a, b, part, part, metric).sum())
    return along / whole


def factors(pairs: list[Pair]) -> list[tuple[Tensor, Tensor]]:
    return [ab for pair in pairs for ab in pair.factors()]


@pytest.mark.parametrize("metric", ["euclidean", "mixed", "invariant"])
def test_steps_have_no_part_along_orbits(metric: str) -> None:
    model, pairs = toy()
    plain, plain_pairs = copy.deepcopy((model, pairs))
    optimizers = [adam(plain), Horizontal(adam(model), pairs, metric)]
    for seed in range(3):
        shares = []
        for m, found, optimizer in ((plain, plain_pairs, optimizers[0]), (model, pairs, optimizers[1])):
            before = factors(found)
            step(m, optimizer, seed)
            shares.append(vertical_share(before, factors(found), metric))
        assert shares[0] > 1e-2
        assert shares[1] < 1e-20


@pytest.mark.parametrize("metric", ["euclidean", "mixed", "invariant"])
def test_products_move_as_they_would_to_first_order(metric: str) -> None:
    """What is left of the difference falls with the square of the step."""
    off = []
    for lr in (1e-3, 1e-4):
        model, pairs = toy()
        plain, plain_pairs = copy.deepcopy((model, pairs))
        start = [b.mH @ a for a, b in factors(pairs)]
        step(model, Horizontal(adam(model, lr), pairs, metric))
        step(plain, adam(plain, lr))
        ours, theirs = ([b.mH @ a for a, b in factors(found)] for found in (pairs, plain_pairs))
        moved = max(gap(x, y) for x, y in zip(theirs, start, strict=True))
        off.append(max(gap(x, y) for x, y in zip(ours, theirs, strict=True)))
        assert off[-1] < 0.5 * moved
    assert 50 < off[0] / off[1] < 200


def test_gradient_descent_is_left_alone() -> None:
    """Its steps are horizontal as they are; momentum makes them otherwise."""
    for momentum, same in ((0.0, True), (0.9, False)):
        model, pairs = toy()
        plain = copy.deepcopy(model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=momentum) for m in (plain, model)]
        optimizers[1] = Horizontal(optimizers[1], pairs)
        for seed in range(4):
            step(plain, optimizers[0], seed)
            step(model, optimizers[1], seed)
        off = max(gap(p.detach(), q.detach()) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
        assert off < 1e-12 if same else off > 1e-6


def test_factors_stay_balanced() -> None:
    model, pairs = toy()
    balance_(pairs)
    plain, plain_pairs = copy.deepcopy((model, pairs))
    optimizers = [adam(plain), Horizontal(adam(model), pairs)]
    for seed in range(30):
        step(plain, optimizers[0], seed)
        step(model, optimizers[1], seed)
    worst = [max(float(balance_defect(a, b)[1].max()) for a, b in factors(found)) for found in (plain_pairs, pairs)]
    assert worst[1] < worst[0] / 4


def test_rebalancing_keeps_the_function_and_carries_momentum() -> None:
    model, pairs = toy(100.0)
    optimizer = Horizontal(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), pairs, rebalance=3)
    kept = []
    for number in range(3):
        if number == 2:
            kept = [copy.deepcopy(model), copy.deepcopy(optimizer.inner.state_dict())]
        step(model, optimizer, number)
    assert max(float(balance_defect(a, b)[1].max()) for a, b in factors(pairs)) < 1e-12
    unmoved = kept[0]
    other_pairs = find_pairs(unmoved)
    inner_optimizer = torch.optim.SGD(unmoved.parameters(), lr=1e-3, momentum=0.9)
    inner_optimizer.load_state_dict(kept[1])
    step(unmoved, Horizontal(inner_optimizer, other_pairs), 2)
    assert gap(loss_of(model, 9).detach(), loss_of(unmoved, 9).detach()) < 1e-12
    # A momentum pairs with a tangent as a gradient does: tr(M_A Aᴴ) of every head is the same in all gauges.
    for pair, other in zip(pairs, other_pairs, strict=True):
        traces = []
        for p, state in ((pair, optimizer.state), (other, inner_optimizer.state)):
            momentum = p.a.read(lambda x, state=state: state[x]["momentum_buffer"])
            traces.append((momentum * p.a.read(torch.Tensor.detach)).sum((1, 2)))
        assert gap(*traces) < 1e-12 * float(traces[1].abs().max()) + 1e-15
        assert float(traces[1].abs().max()) > 1e-12


def test_rotary_rows_are_projected_as_complex_ones() -> None:
    a, b = (nn.Parameter(normal(2, 6, 7, seed=seed)) for seed in (1, 2))
    named = Pair.of(a, b)
    pair = Pair("rotary", named.a, named.b, turning=(((0, 3),), ((1, 4),)))
    before = pair.factors()
    a.grad, b.grad = normal(2, 6, 7, seed=3), normal(2, 6, 7, seed=4)
    Horizontal(torch.optim.AdamW([a, b], lr=1e-2), [pair]).step()
    assert before[0][0].is_complex() and not before[1][0].is_complex()
    assert vertical_share(before, pair.factors(), "euclidean") < 1e-20


def test_a_frozen_or_idle_parameter_leaves_its_pair_to_the_inner_optimizer() -> None:
    model, pairs = toy()
    model.layers[0].out_proj.weight.requires_grad_(False)  # of layer 0 "vo" only
    plain = copy.deepcopy(model)
    step(model, Horizontal(adam(model), pairs))
    step(plain, adam(plain))
    values = [m.layers[0].in_proj_weight.detach().chunk(3) for m in (model, plain)]
    assert torch.equal(values[0][2], values[1][2])
    assert gap(values[0][0], values[1][0]) > 1e-6


def test_bad_gradients_are_refused_before_anything_moves() -> None:
    model, pairs = toy()
    optimizer = Horizontal(adam(model), pairs)
    loss_of(model).backward()
    assert model.layers[1].in_proj_bias.grad is not None
    model.layers[1].in_proj_bias.grad[3] = float("nan")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"layers\.1\..* has NaN or inf"):
        optimizer.step()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    with pytest.raises(ValueError, match="overlaps"):
        Horizontal(adam(model), [*pairs, Pair("again", pairs[0].a, pairs[0].b)])
    with pytest.raises(ValueError, match="number of steps"):
        Horizontal(adam(model), pairs, rebalance=-1)
    with pytest.raises(ValueError, match="metric must be one of euclidean, mixed, invariant, got 'flat'"):
        Horizontal(adam(model), pairs, "flat")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="holds no parameter of pair"):
        Horizontal(adam(toy()[0]), pairs)


def test_pairs_that_are_held_in_part_are_left_to_the_inner_optimizer() -> None:
    model, pairs = toy()
    twin = copy.deepcopy(model)
    held, others = (
        [p for name, p in m.named_parameters() if not name.startswith("layers.0.out")] for m in (model, twin)
    )
    step(model, Horizontal(torch.optim.SGD(held, lr=0.1, momentum=0.9), pairs))
    step(twin, torch.optim.SGD(others, lr=0.1, momentum=0.9))
    values = [m.layers[0].in_proj_weight.detach().chunk(3)[2] for m in (model, twin)]
    assert torch.equal(*values)


def test_it_is_an_optimizer() -> None:
    """Schedulers, closures, state round trips, copies: a resumed run is the unbroken one."""
    model, pairs = toy()
    optimizer = Horizontal(adam(model), pairs, rebalance=3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    assert gap(optimizer.step(closure).detach(), loss_of(toy()[0]).detach()) < 1e-12
    scheduler.step()
    step(model, optimizer, 1)
    twin, twin_pairs, twin_optimizer = copy.deepcopy((model, pairs, optimizer))
    resumed = copy.deepcopy(model)
    again = Horizontal(adam(resumed), find_pairs(resumed), rebalance=3)
    again.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    for seed in (2, 3):
        for m, o in ((model, optimizer), (twin, twin_optimizer), (resumed, again)):
            step(m, o, seed)
    assert len(twin_pairs) == len(pairs)
    for ours, copied, loaded in zip(model.parameters(), twin.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, copied) and torch.equal(ours, loaded)


def test_muon_inside() -> None:
    a, b = (nn.Parameter(normal(4, n, seed=n)) for n in (9, 7))
    pair = Pair.of(a, b)
    before = pair.factors()
    a.grad, b.grad = normal(4, 9, seed=3), normal(4, 7, seed=4)
    Horizontal(torch.optim.Muon([a, b], lr=1e-2), [pair], "mixed").step()
    after = pair.factors()
    assert gap(before[0][0], after[0][0]) > 1e-4
    assert vertical_share(before, after, "mixed") < 1e-20
