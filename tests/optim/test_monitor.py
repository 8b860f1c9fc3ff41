"""What is recorded of steps: shares along orbits, gradient norms, charges; and that watching changes nothing."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn import F64, normal
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from two import member, run_two

from gaugekit.optim.finding import find_pairs
from gaugekit.optim.horizontal import Metric, inner, raised, vertical_part
from gaugekit.optim.monitor import Motion, OrbitMonitor, OrbitRecord
from gaugekit.optim.pairs import Factor, Pair, Window, balance_, scramble_
from gaugekit.optim.quotient import QuotientAdam, QuotientSGD
from gaugekit.optim.sharpness import sharpness
from gaugekit.optim.wrapping import Wrapper

X, Y = normal(3, 5, 12), torch.arange(15) % 4


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True, dtype=F64)
        self.head = nn.Linear(12, 4, dtype=F64)
        for i, p in enumerate(self.parameters()):
            p.data = (normal(*p.shape, seed=i) * (0.3 if p.ndim > 1 else 0.1)).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def loss_of(model: nn.Module) -> Tensor:
    dtype = next(model.parameters()).dtype
    return F.cross_entropy(model(X.to(dtype)).flatten(0, 1), Y)


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def lora(zero: bool = False) -> Pair:
    a, b = nn.Parameter(normal(3, 8, seed=1)), nn.Parameter(normal(3, 5, seed=2))
    if zero:
        b.data.zero_()
    return Pair.of(a, b, "lora")


def whole(p: Tensor) -> Factor:
    return Factor((Window(p, lambda x: x),))


def rotary() -> Pair:
    """Two heads of six rows: pairs of one frequency each, and two rows that stand still."""
    q, k = nn.Parameter(normal(2, 6, 7, seed=1)), nn.Parameter(normal(2, 6, 9, seed=2))
    turning = (((0, 2),), ((1, 3),))
    return Pair("qk", whole(q), whole(k), turning=turning)


def units() -> Pair:
    a, b = nn.Parameter(normal(5, 1, 4, seed=1)), nn.Parameter(normal(5, 1, 3, seed=2))
    return Pair("units", whole(a), whole(b), positive=True)


MADE: dict[str, Callable[[], Pair]] = {
    "attention": lambda: find_pairs(Attention())[0],
    "rotary": rotary,
    "units": units,
    "lora": lora,
    "lora, B = 0": lambda: lora(zero=True),
}


def product_loss(pair: Pair) -> Tensor:
    """Of G = BᴴA alone, block by block; complex blocks as a rotary score sees them."""
    total = torch.zeros((), dtype=F64)
    for i, (a, b) in enumerate(pair.factors(lambda p: p)):
        g = b.mH @ a
        for part in (g.real, g.imag) if g.is_complex() else (g,):
            total = total + (part * normal(*part.shape, seed=3 + i)).sin().sum()
    return total


class Placing(Optimizer):
    """Its step puts parameters where it is told."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {})
        self.places: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p, place in zip(self.param_groups[0]["params"], self.places, strict=True):
            p.copy_(place)


# --- what is measured ---------------------------------------------------------------------------------------


def places_after(pair: Pair, size: float = 0.05) -> list[Tensor]:
    return [p.detach() + size * normal(*p.shape, seed=7 + i) for i, p in enumerate(pair.parameters)]


def recorded(pair: Pair, places: list[Tensor]) -> Motion:
    optimizer = Placing(pair.parameters)
    optimizer.places = places
    for p, g in zip(pair.parameters, torch.autograd.grad(product_loss(pair), pair.parameters), strict=True):
        p.grad = g
    with OrbitMonitor(optimizer, [pair]) as monitor:
        optimizer.step()
    (record,) = monitor.history
    assert record.pairs == {pair.name: record.total}
    return record.total


@pytest.mark.parametrize("name", ["attention", "rotary", "units", "lora"])
def test_numbers_are_those_of_the_definitions(name: str) -> None:
    pair = MADE[name]()
    before, places = pair.factors(), places_after(pair)
    kept = {id(p): x for p, x in zip(pair.parameters, places, strict=True)}
    gradients = torch.autograd.grad(product_loss(pair), pair.parameters)
    slopes = pair.factors(lambda p: dict(zip(map(id, pair.parameters), gradients, strict=True))[id(p)])
    found = recorded(pair, places)
    after = pair.factors(lambda p: kept[id(p)])
    shares: dict[Metric, float] = {"euclidean": found.vertical_share, "mixed": found.vertical_share_mixed}
    for metric, share in shares.items():
        sums = torch.zeros(2, dtype=F64)
        for (a, b), (a_new, b_new) in zip(before, after, strict=True):
            step = a_new - a, b_new - b
            along = vertical_part(a, b, *step, "gl", metric)
            sums += torch.stack([inner(a, b, v, v, metric).sum() for v in (along, step)])
        assert share == pytest.approx(float(sums[0] / sums[1]), rel=1e-10)
        assert 0.02 < share < 0.98
    ordinary = math.sqrt(sum(float(g.square().sum()) for g in gradients if g is not None))
    if name != "attention":  # where in_proj has parts of another pair
        assert found.gradient_norm == pytest.approx(ordinary, rel=1e-12)
    square, drifts, imbalances = 0.0, [], []
    for (a, b), (a_new, b_new), (grad_a, grad_b) in zip(before, after, slopes, strict=True):
        xi = raised(a, b, grad_a, grad_b, "mixed")
        square += float(inner(a, b, xi, xi, "mixed").sum())
        q, q_new = a @ a.mH - b @ b.mH, a_new @ a_new.mH - b_new @ b_new.mH
        size, size_new = (torch.linalg.matrix_norm(x @ x.mH + y @ y.mH) for x, y in ((a, b), (a_new, b_new)))
        drifts.append((torch.linalg.matrix_norm(q_new - q) / torch.maximum(size, size_new)).max())
        imbalances.append((torch.linalg.matrix_norm(q_new) / size_new).max())
    assert found.quotient_gradient_norm == pytest.approx(math.sqrt(square), rel=1e-10)
    assert found.charge_drift == pytest.approx(float(max(drifts)), rel=1e-10)
    assert found.imbalance == pytest.approx(float(max(imbalances)), rel=1e-10)


@pytest.mark.parametrize("condition", [10.0, 100.0])
@pytest.mark.parametrize("name", MADE)
def test_mixed_share_and_quotient_norm_do_not_see_the_gauge(name: str, condition: float) -> None:
    """The same step from an equivalent point, moved along with it; the Euclidean numbers differ."""
    one, other = MADE[name](), MADE[name]()
    elements = other.sample(rng(2), condition)
    places = places_after(one)
    start = [p.detach().clone() for p in other.parameters]
    for p, place in zip(other.parameters, places, strict=True):
        p.data.copy_(place)
    other.move_(elements)
    moved = [p.detach().clone() for p in other.parameters]
    for p, place in zip(other.parameters, start, strict=True):
        p.data.copy_(place)
    other.move_(elements)
    first, second = recorded(one, places), recorded(other, moved)
    for number in ("vertical_share_mixed", "quotient_gradient_norm"):
        assert getattr(second, number) == pytest.approx(getattr(first, number), rel=1e-8), number
    assert second.gradient_norm != pytest.approx(first.gradient_norm, rel=0.02)
    assert second.vertical_share != pytest.approx(first.vertical_share, rel=0.02)


def test_total_is_over_all_pairs() -> None:
    model = Attention()
    pairs = find_pairs(model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    with OrbitMonitor(optimizer, pairs) as monitor:
        train(model, optimizer, 2)
    record = monitor.history[1]
    parts = list(record.pairs.values())
    assert list(record.pairs) == [pair.name for pair in pairs] and len(parts) == 2
    assert record.total.gradient_norm == pytest.approx(math.hypot(*(m.gradient_norm for m in parts)), rel=1e-12)
    quotient = math.hypot(*(m.quotient_gradient_norm for m in parts))
    assert record.total.quotient_gradient_norm == pytest.approx(quotient, rel=1e-12)
    assert record.total.charge_drift == max(m.charge_drift for m in parts)
    assert record.total.imbalance == max(m.imbalance for m in parts)
    for share in ("vertical_share", "vertical_share_mixed"):
        low, high = sorted(getattr(m, share) for m in parts)
        assert low < getattr(record.total, share) < high


# --- optimizers ---------------------------------------------------------------------------------------------

Make = Callable[[nn.Module, list[Pair]], Optimizer]


def run(make: Make, steps: int = 5, condition: float = 10.0, dtype: torch.dtype = F64, every: int = 1) -> OrbitMonitor:
    model = Attention(dtype)
    pairs = find_pairs(model)
    scramble_(pairs, rng(1), condition)
    optimizer = make(model, pairs)
    with OrbitMonitor(optimizer, pairs, every) as monitor:
        train(model, optimizer, steps)
    return monitor


@pytest.mark.parametrize(("dtype", "rounding"), [(F64, 1e-20), (torch.float32, 1e-6)])
def test_gradient_descent_does_not_step_along_orbits_and_adam_does(dtype: torch.dtype, rounding: float) -> None:
    for record in run(lambda m, _: SGD(m.parameters(), lr=0.1), dtype=dtype).history:
        assert record.total.vertical_share < rounding
        assert record.total.vertical_share_mixed > 0.01  # the gradient is not horizontal in another metric
    for make in (
        lambda m, _: AdamW(m.parameters(), lr=0.01),
        lambda m, _: SGD(m.parameters(), lr=0.1, weight_decay=0.1),
    ):
        for record in run(make, dtype=dtype).history:
            assert record.total.vertical_share > 1e-3 and record.total.vertical_share_mixed > 1e-3


@pytest.mark.parametrize("kind", [QuotientSGD, QuotientAdam])
def test_quotient_optimizers_do_not_step_along_orbits(kind: Any) -> None:
    shares = []
    for lr in (1e-3, 1e-4):
        monitor = run(lambda m, pairs, lr=lr: kind(m.parameters(), lr=lr, pairs=pairs))
        shares.append(max(record.total.vertical_share_mixed for record in monitor.history))
        assert min(record.total.vertical_share for record in monitor.history) > 1e-3
    assert shares[0] < 1e-6
    assert shares[1] < 0.02 * shares[0]  # what is left is of higher order in the step


def test_path_of_a_quotient_optimizer_is_the_same_record() -> None:
    paths = [
        run(lambda m, pairs: QuotientSGD(m.parameters(), lr=0.05, momentum=0.9, pairs=pairs), 10, condition)
        for condition in (10.0, 100.0)
    ]
    for one, other in zip(*(path.history for path in paths), strict=True):
        assert one.total.quotient_gradient_norm == pytest.approx(other.total.quotient_gradient_norm, rel=1e-8)
        assert one.total.vertical_share_mixed == pytest.approx(other.total.vertical_share_mixed, rel=1e-5, abs=1e-14)
        assert one.total.gradient_norm != pytest.approx(other.total.gradient_norm, rel=0.02)


def test_charges_are_conserved_by_small_steps_of_gradient_descent_only() -> None:
    def drift(make: Make, steps: int) -> float:
        return run(make, steps).history[-1].total.charge_drift

    coarse, fine = (drift(lambda m, _, s=s: SGD(m.parameters(), lr=1.0 / s), s) for s in (20, 200))
    assert fine < 1e-3
    assert 5 < coarse / fine < 20  # of first order in the step, for the same time
    coarse, fine = (drift(lambda m, _, s=s: AdamW(m.parameters(), lr=0.1 / s), s) for s in (20, 200))
    assert fine > 1e-2 and 0.5 < coarse / fine < 2.0


def test_imbalance_of_balanced_pairs() -> None:
    model = Attention()
    pairs = find_pairs(model)
    optimizer = SGD(model.parameters(), lr=0.0)
    for balanced in (False, True):
        if balanced:
            balance_(pairs)
        with OrbitMonitor(optimizer, pairs) as monitor:
            train(model, optimizer, 1)
        assert (monitor.history[0].total.imbalance < 1e-12) == balanced


# --- a hook for any loop ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sgd", "wrapped", "twice", "quotient"])
def test_hooks_run_once_a_step_and_watching_changes_nothing(kind: str) -> None:
    makers: dict[str, Make] = {
        "sgd": lambda m, _: SGD(m.parameters(), lr=0.1, momentum=0.9),
        "wrapped": lambda m, _: Wrapper(AdamW(m.parameters(), lr=0.01)),
        "twice": lambda m, _: Wrapper(Wrapper(AdamW(m.parameters(), lr=0.01))),
        "quotient": lambda m, pairs: QuotientAdam(m.parameters(), lr=0.01, pairs=pairs),
    }
    weights = []
    for watched in (False, True):
        model = Attention()
        pairs = find_pairs(model)
        optimizer = makers[kind](model, pairs)
        monitor = OrbitMonitor(optimizer, pairs, loss=lambda m=model: loss_of(m)) if watched else None
        train(model, optimizer, 4)
        weights.append([p.detach().clone() for p in model.parameters()])
        if monitor is not None:
            assert [record.step for record in monitor.history] == [0, 1, 2, 3]
            assert all(record.total.vertical_share > 0 for record in monitor.history)
    assert all(torch.equal(p, q) for p, q in zip(*weights, strict=True))


def test_schedulers_and_closures() -> None:
    model = Attention()
    optimizer = AdamW(model.parameters(), lr=0.01)
    pairs = find_pairs(model)
    with warnings.catch_warnings(), OrbitMonitor(optimizer, pairs) as monitor:
        warnings.simplefilter("error")
        scheduler = LambdaLR(optimizer, lambda step: 1.0 if step < 2 else 0.0)
        norms = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            # All of attention but b_O, which is in no pair.
            inside = [p for name, p in model.attention.named_parameters() if name != "out_proj.bias"]
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in inside if p.grad is not None])))
            return loss

        for _ in range(4):
            optimizer.step(closure)
            scheduler.step()
    assert [record.step for record in monitor.history] == [0, 1, 2, 3]
    for record, norm in zip(monitor.history, norms, strict=True):
        assert record.total.gradient_norm == pytest.approx(norm, rel=1e-12)
    shares = [record.total.vertical_share for record in monitor.history]
    assert all(share > 0 for share in shares[:2]) and all(math.isnan(share) for share in shares[2:])  # no step


def test_every_third_step_and_a_number_to_go_on_from() -> None:
    model = Attention()
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = OrbitMonitor(optimizer, find_pairs(model), every=3)
    train(model, optimizer, 7)
    assert [record.step for record in monitor.history] == [0, 3, 6]
    again = OrbitMonitor(optimizer, find_pairs(model), every=3)
    again.step = 7
    train(model, optimizer, 3)
    assert [record.step for record in again.history] == [9]
    assert [record.step for record in monitor.history] == [0, 3, 6, 9]


def test_detached_and_copied_optimizers_are_not_watched() -> None:
    model = Attention()
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = OrbitMonitor(optimizer, find_pairs(model))

    def interrupted() -> None:
        with monitor as entered:
            assert entered is monitor
            train(model, optimizer, 1)
            copy.deepcopy(optimizer).step()
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert len(monitor.history) == 1
    train(model, optimizer, 1)
    monitor.detach()  # once more does no harm
    train(model, optimizer, 1)
    assert len(monitor.history) == 1
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_refused_steps_are_not_counted_and_nan_is_recorded() -> None:
    model = Attention()
    pairs = find_pairs(model)
    optimizer = QuotientSGD(model.parameters(), lr=0.1, pairs=pairs)
    with OrbitMonitor(optimizer, pairs, every=2) as monitor:
        loss_of(model).backward()
        weight = model.attention.in_proj_weight
        assert weight.grad is not None
        weight.grad[0, 0] = math.nan
        with pytest.raises(ValueError, match="NaN"):
            optimizer.step()
        assert monitor.step == 0
        monitor.step = 1  # what was kept for the refused step does not serve for another
        train(model, optimizer, 2)
    assert [record.step for record in monitor.history] == [2]
    plain, told = SGD(model.parameters(), lr=0.1), []
    with OrbitMonitor(
        plain, pairs, log=lambda values, step: told.append(values), loss=lambda: loss_of(model)
    ) as monitor:
        weight.grad[0, 0] = math.nan
        plain.step()
        plain.step()  # from NaN
    for record in monitor.history:
        assert math.isnan(record.total.vertical_share) and math.isnan(record.total.charge_drift)
        assert record.to_dict()["total"]["vertical_share"] is None
    assert monitor.history[0].sharpness is not None and monitor.history[1].to_dict()["sharpness"]["ordinary"] is None
    name = pairs[0].name  # of values: NaN was among the queries
    assert math.isfinite(monitor.history[0].pairs[name].vertical_share)
    assert all(math.isfinite(v) for values in told for v in values.values()) and f"orbits/{name}/imbalance" in told[0]


def test_what_does_not_move_or_has_no_gradient() -> None:
    pair = lora()
    a, b = pair.parameters
    a.requires_grad_(False)
    optimizer = SGD([b], lr=0.1)
    empty = Pair.of(nn.Parameter(normal(0, 2, 4)), nn.Parameter(normal(0, 2, 3)), "empty")
    with OrbitMonitor(optimizer, [pair, empty]) as monitor:
        optimizer.step()
        product_loss(pair).backward()
        optimizer.step()
    first, second = (record.pairs["lora"] for record in monitor.history)
    assert first.gradient_norm == 0.0 == first.quotient_gradient_norm and math.isnan(first.vertical_share)
    assert second.gradient_norm > 0 and 0 <= second.vertical_share < 1
    nothing = monitor.history[1].pairs["empty"]
    assert math.isnan(nothing.vertical_share) and nothing.charge_drift == 0.0 == nothing.imbalance
    assert monitor.history[1].total == second


def test_half_precision() -> None:
    for record in run(lambda m, _: AdamW(m.parameters(), lr=0.05), dtype=torch.bfloat16).history:
        assert all(math.isfinite(value) for value in vars(record.total).values())


def test_sharpness_is_that_before_the_step() -> None:
    model = Attention()
    pairs = find_pairs(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    expected = sharpness(lambda: loss_of(model), pairs)
    with OrbitMonitor(optimizer, pairs, every=2, loss=lambda: loss_of(model)) as monitor:
        train(model, optimizer, 3)
    assert monitor.history[0].sharpness == expected != monitor.history[1].sharpness
    assert monitor.history[0].metrics()["orbits/sharpness/invariant"] == expected.invariant


# --- files and loggers --------------------------------------------------------------------------------------


def test_lines_are_the_records(tmp_path: Path) -> None:
    path = tmp_path / "orbits.jsonl"
    path.write_text('{"earlier": 1}\n')
    model = Attention()
    pairs = find_pairs(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    with OrbitMonitor(optimizer, pairs, path=path, loss=lambda: loss_of(model)) as monitor:
        train(model, optimizer, 2)
        assert len(path.read_text().splitlines()) == 3  # written at once
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, 1)

    def refused(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    lines = [json.loads(line, parse_constant=refused) for line in path.read_text().splitlines()]
    assert lines[0] == {"earlier": 1}
    assert lines[1:] == [record.to_dict() for record in monitor.history]
    assert lines[1]["total"] == vars(monitor.history[0].total)
    assert lines[2]["sharpness"] == vars(monitor.history[1].sharpness)
    assert lines[3]["total"]["vertical_share"] is None and lines[3]["step"] == 2
    with pytest.raises(FileNotFoundError):
        OrbitMonitor(optimizer, pairs, path=tmp_path / "nowhere" / "orbits.jsonl")


def test_numbers_that_json_does_not_have_are_left_out() -> None:
    record = OrbitRecord(0, Motion(math.nan, math.inf, -math.inf, 1.0, 2.0, 3.0), {})
    assert list(record.to_dict()["total"].values()) == [None, None, None, 1.0, 2.0, 3.0]
    assert list(record.metrics().values()) == [1.0, 2.0, 3.0]


def test_loggers_of_runs_are_called_as_they_expect() -> None:
    class Run:
        """As wandb and trackio: log(data, step=None)."""

        def __init__(self) -> None:
            self.rows: list[tuple[int | None, dict[str, float]]] = []

        def log(self, data: dict[str, Any], step: int | None = None) -> None:
            self.rows.append((step, data))

    model, tracked = Attention(), Run()
    pairs = find_pairs(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    with OrbitMonitor(optimizer, pairs, every=2, log=tracked.log) as monitor:
        train(model, optimizer, 3)
    assert [step for step, _ in tracked.rows] == [0, 2]
    for (_, row), record in zip(tracked.rows, monitor.history, strict=True):
        assert row == record.metrics() and all(type(value) is float for value in row.values())
        assert row["orbits/vertical_share"] == record.total.vertical_share
        assert row[f"orbits/{pairs[1].name}/charge_drift"] == record.pairs[pairs[1].name].charge_drift
        assert len(row) == 6 * 3


def test_what_is_refused() -> None:
    pair = lora()
    optimizer = SGD(pair.parameters, lr=0.1)
    with pytest.raises(ValueError, match="needs pairs"):
        OrbitMonitor(optimizer, [])
    with pytest.raises(ValueError, match="own name"):
        OrbitMonitor(optimizer, [pair, lora()])
    with pytest.raises(ValueError, match="every must be"):
        OrbitMonitor(optimizer, [pair], every=0)
    assert not optimizer._optimizer_step_pre_hooks


# --- sharded ------------------------------------------------------------------------------------------------


def worker(rank: int, folder: Path) -> None:
    single, model = Attention(), Attention()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    histories = []
    for each in (single, model):
        pairs = find_pairs(each)
        optimizer = AdamW(each.parameters(), lr=0.01)
        path = folder / "orbits.jsonl" if each is model and rank == 0 else None
        with OrbitMonitor(optimizer, pairs, path=path) as monitor:
            train(each, optimizer, 3)
        histories.append(monitor.history)
    for one, other in zip(*histories, strict=True):
        for name, value in vars(one.total).items():
            assert getattr(other.total, name) == pytest.approx(value, rel=1e-9), name
    with pytest.raises(ValueError, match="sharded"):
        OrbitMonitor(optimizer, pairs, loss=lambda: loss_of(model))


def test_two_processes_record_what_one_does(tmp_path: Path) -> None:
    run_two(__file__, tmp_path)
    assert len((tmp_path / "orbits.jsonl").read_text().splitlines()) == 3


if __name__ == "__main__":
    member(worker)
