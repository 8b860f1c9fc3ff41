"""Sharpness along the gradient: values from dense Hessians and geodesics, and what does not depend on the gauge."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from drawn import F64, normal
from torch import Tensor, nn
from torch.distributed import HashStore, destroy_process_group, init_process_group  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gaugekit.optim.finding import find_pairs
from gaugekit.optim.horizontal import inner, raised, vertical_part
from gaugekit.optim.pairs import Factor, Pair, Window, scramble_
from gaugekit.optim.sharpness import sharpness

Loss = Callable[[], Tensor]
Case = tuple[Loss, list[Pair], list[nn.Parameter]]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def parameter(*shape: int, seed: int) -> nn.Parameter:
    return nn.Parameter(normal(*shape, seed=seed))


def whole(x: Tensor) -> Tensor:
    return x


def drawn_(module: nn.Module) -> None:
    for i, p in enumerate(module.parameters()):
        p.data = normal(*p.shape, seed=i).to(p.dtype) * (0.3 if p.ndim > 1 else 0.1)


# --- models -------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, dropout=dropout, batch_first=True, dtype=F64)
        self.head = nn.Linear(12, 4, dtype=F64)
        drawn_(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def attention_case(model: Attention | None = None) -> Case:
    model = model or Attention()

    def loss() -> Tensor:
        return attention_loss(model(X.to(model.head.weight.dtype)))

    return loss, find_pairs(model), list(model.head.parameters())


X = normal(3, 5, 12)


def attention_loss(y: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), torch.arange(15) % 4)


def rotary_case() -> Case:
    """Two heads of six rows: two pairs that turn, and two rows that stand still."""
    q, k = parameter(2, 6, 7, seed=1), parameter(2, 6, 7, seed=2)
    x, y, v = normal(3, 5, 7), torch.arange(15) % 4, normal(14, 4, seed=3)
    angle = torch.arange(5.0, dtype=F64)[:, None] * torch.tensor([1.0, 0.3], dtype=F64)

    def turned(z: Tensor) -> Tensor:  # (batch, head, token, row): rows (i, i + 2) turn by position
        real, imaginary, still = z.split(2, -1)
        turn = real * angle.cos() - imaginary * angle.sin(), real * angle.sin() + imaginary * angle.cos()
        return torch.cat([*turn, still], -1)

    def loss() -> Tensor:
        queries, keys = (turned(torch.einsum("btd,hrd->bhtr", x, w)) for w in (q, k))
        weights = (queries @ keys.mT / 6**0.5).softmax(-1)
        return F.cross_entropy((weights @ x.unsqueeze(1)).transpose(1, 2).flatten(2).flatten(0, 1) @ v, y)

    pair = Pair("qk", Factor((Window(q, whole),)), Factor((Window(k, whole),)), turning=(((0, 2),), ((1, 3),)))
    return loss, [pair], []


def lora_case(zero: bool) -> Case:
    a, b = parameter(3, 8, seed=1), parameter(3, 5, seed=2)
    bias = parameter(5, seed=3)
    if zero:
        b.data.zero_()
    x, y, w = normal(9, 8), torch.arange(9) % 5, normal(8, 5, seed=4)

    def loss() -> Tensor:
        return F.cross_entropy(x @ w + (x @ a.mT) @ b + bias, y)

    return loss, [Pair.of(a, b, "lora")], [bias]


CASES: dict[str, Callable[[], Case]] = {
    "attention": attention_case,
    "rotary": rotary_case,
    "lora": lambda: lora_case(False),
    "lora, B = 0": lambda: lora_case(True),
}


# --- invariance ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_others", [False, True])
@pytest.mark.parametrize("condition", [10.0, 100.0])
@pytest.mark.parametrize("name", CASES)
def test_what_is_called_invariant_is_so_and_the_ordinary_value_is_not(
    name: str, condition: float, with_others: bool
) -> None:
    loss, pairs, others = CASES[name]()
    others = others if with_others else []
    before, value = sharpness(loss, pairs, others), loss().item()
    scramble_(pairs, rng(2), condition)
    assert loss().item() == pytest.approx(value, abs=1e-12)
    after = sharpness(loss, pairs, others)
    for at in ("invariant", "straight"):
        assert getattr(after, at) == pytest.approx(getattr(before, at), rel=1e-9)
    assert abs(after.ordinary - before.ordinary) > 0.02 * abs(before.ordinary)


def test_the_geodesic_term_is_not_nothing() -> None:
    found = sharpness(*attention_case())
    assert abs(found.invariant - found.straight) > 1e-3 * abs(found.straight)


# --- values -------------------------------------------------------------------------------------------------


def acceleration(a: Tensor, b: Tensor, va: Tensor, vb: Tensor) -> tuple[Tensor, Tensor]:
    """γ̈ of the mixed metric: minus equation 12 of [HS], with G = Aᵀ and H = Bᵀ, or conjugates of them."""

    def of(a: Tensor, b: Tensor, va: Tensor, vb: Tensor) -> Tensor:
        return torch.linalg.solve(b @ b.mH, vb @ vb.mH @ a - (vb @ b.mH + b @ vb.mH) @ va)

    return of(a, b, va, vb), of(b, a, vb, va)


@pytest.mark.parametrize("kind", ["real", "complex"])
def test_values_are_those_of_a_dense_hessian(kind: str) -> None:
    """ordinary, straight and invariant from H, inverses and γ̈ written out; complex rows as pairs of real ones."""
    a, b, target = parameter(2, 2, 4, seed=1), parameter(2, 2, 3, seed=2), normal(2, 3, 4, seed=3)
    turning = (((0, 1),),) if kind == "complex" else ()
    pair = Pair("p", Factor((Window(a, whole),)), Factor((Window(b, whole),)), turning=turning)

    def rows(x: Tensor) -> Tensor:
        return torch.complex(x[:, :1], x[:, 1:]) if turning else x

    def flat(*values: Tensor) -> Tensor:
        values = tuple(torch.cat([v.real, v.imag], 1) if turning else v for v in values)
        return torch.cat([v.flatten() for v in values])

    def of(vector: Tensor) -> Tensor:
        x, y = (rows(v.unflatten(0, s.shape)) for v, s in zip(vector.split([16, 12]), (a, b), strict=True))
        g = y.mH @ x
        mixed = g.real + 0.5 * g.imag if turning else g
        return (mixed.sin() * target).sum() + 0.1 * g.abs().pow(3).sum()

    at = torch.cat([a.detach().flatten(), b.detach().flatten()])
    gradient, hessian = torch.func.grad(of)(at), torch.autograd.functional.hessian(of, at)
    factors = [rows(x.detach()) for x in (a, b)]
    slopes = [rows(g.unflatten(0, s.shape)) for g, s in zip(gradient.split([16, 12]), (a, b), strict=True)]
    xi = [torch.linalg.solve(p @ p.mH, g) for p, g in zip(reversed(factors), slopes, strict=True)]
    square = flat(*xi) @ gradient
    straight = flat(*xi) @ hessian @ flat(*xi) / square
    invariant = straight + gradient @ flat(*acceleration(*factors, *xi)) / square
    found = sharpness(lambda: of(torch.cat([a.flatten(), b.flatten()])), [pair])
    ordinary = gradient @ hessian @ gradient / gradient.square().sum()
    for name, value in {"ordinary": ordinary, "invariant": invariant, "straight": straight}.items():
        assert getattr(found, name) == pytest.approx(float(value), rel=1e-11), name
    assert abs(invariant - straight) > 1e-2 * abs(straight)


def test_invariant_sharpness_is_the_second_derivative_along_a_geodesic() -> None:
    """The geodesic is integrated: its speed stays, its velocity stays horizontal, and the loss on it bends as found."""
    a, b, target = parameter(1, 3, 6, seed=1), parameter(1, 3, 5, seed=2), normal(1, 5, 6, seed=3)

    def of(a: Tensor, b: Tensor) -> Tensor:
        return ((b.mT @ a - target) * 0.3).cos().sum()

    found = sharpness(lambda: of(a, b), [Pair.of(a, b)])
    loss = of(a, b)
    grad_a, grad_b = torch.autograd.grad(loss, (a, b))
    xi = raised(a.detach(), b.detach(), grad_a, grad_b, "mixed")
    length = float(inner(a.detach(), b.detach(), xi, xi, "mixed"))
    start = torch.cat([a.detach(), b.detach(), *(x / length**0.5 for x in xi)], -1)

    def slope(y: Tensor) -> Tensor:
        a, b, va, vb = y.split([6, 5, 6, 5], -1)
        return torch.cat([va, vb, *acceleration(a, b, va, vb)], -1)

    def moved(y: Tensor, t: float, steps: int = 64) -> Tensor:
        h = t / steps
        for _ in range(steps):
            k1 = slope(y)
            k2 = slope(y + h / 2 * k1)
            k3 = slope(y + h / 2 * k2)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + slope(y + h * k3))
        return y

    far = moved(start, 0.5)
    a1, b1, va, vb = far.split([6, 5, 6, 5], -1)
    assert (a1 - a).abs().max() > 0.03
    assert float(inner(a1, b1, (va, vb), (va, vb), "mixed")) == pytest.approx(1.0, abs=1e-9)
    along = vertical_part(a1, b1, va, vb, "gl", "mixed")
    assert float(inner(a1, b1, along, along, "mixed")) < 1e-18
    h = 1e-2

    def value(t: float) -> float:
        return float(of(*moved(start, t).split([6, 5, 6, 5], -1)[:2]))

    second = (-value(2 * h) + 16 * value(h) - 30 * loss.item() + 16 * value(-h) - value(-2 * h)) / (12 * h**2)
    assert found.invariant == pytest.approx(second, rel=1e-6)
    a0, b0, va, vb = start.split([6, 5, 6, 5], -1)
    line = [float(of(a0 + t * va, b0 + t * vb)) for t in (-h, 0.0, h)]
    assert found.straight == pytest.approx((line[0] - 2 * line[1] + line[2]) / h**2, rel=1e-3)
    assert abs(found.invariant - found.straight) > 0.02 * abs(found.straight)


@pytest.mark.parametrize("name", ["attention", "rotary", "lora"])
def test_invariant_sharpness_is_how_fast_the_gradient_grows(name: str) -> None:
    """½ d log⟨ξ, ξ⟩ along ξ: another way to the same number, by finite differences of first derivatives only."""
    loss, pairs, others = CASES[name]()
    parameters = list({id(p): p for pair in pairs for p in pair.parameters}.values()) + others
    start = [p.detach().clone() for p in parameters]
    found = sharpness(loss, pairs, others).invariant

    def square() -> tuple[float, list[Tensor]]:
        slopes = dict(zip(map(id, parameters), torch.autograd.grad(loss(), parameters), strict=True))
        total = sum(float(slopes[id(p)].square().sum()) for p in others)
        xi = {id(p): slopes[id(p)] if any(p is q for q in others) else torch.zeros_like(p) for p in parameters}
        for pair in pairs:
            lifted = [torch.zeros_like(side.read(lambda p: p.detach())) for side in (pair.a, pair.b)]
            gradients = pair.factors(lambda p: slopes[id(p)])
            for block, (a, b), (ga, gb) in zip(pair.blocks, pair.factors(), gradients, strict=True):
                up = raised(a, b, ga, gb, "mixed")
                total += sum(float((u.conj() * g).real.sum()) for u, g in zip(up, (ga, gb), strict=True))
                for into, value in zip(lifted, up, strict=True):
                    block.put(into, value)
            for side, value in zip((pair.a, pair.b), lifted, strict=True):
                side.write(value, lambda p: xi[id(p)])
        return total, [xi[id(p)] for p in parameters]

    direction, h = square()[1], 1e-4
    values = []
    for t in (h, -h):
        for p, s, d in zip(parameters, start, direction, strict=True):
            p.data = s + t * d
        values.append(square()[0])
    assert found == pytest.approx((math.log(values[0]) - math.log(values[1])) / (4 * h), rel=1e-5)


@pytest.mark.parametrize("u", [0.5, 1.0, 7.0])
def test_the_scalar_product_of_hide_and_seek(u: float) -> None:
    """On γ = (u√(1 + 2bt), v√(1 + 2bt)) [HS, 5.1] the product is linear in t and ⟨γ̇, γ̇⟩ = 2 b² (uv)², so
    ℓ = c (uv − y)² / 2 has invariant sharpness 2 c, wherever it is."""
    a, b = nn.Parameter(torch.tensor([[u]], dtype=F64)), nn.Parameter(torch.tensor([[2.0 / u]], dtype=F64))
    found = sharpness(lambda: 1.5 * (a * b - 0.3).square().sum(), [Pair.of(a, b)])
    assert found.invariant == pytest.approx(6.0, rel=1e-13)
    assert found.straight != pytest.approx(6.0, rel=1e-2)


def test_only_what_is_trained_and_in_a_pair_moves() -> None:
    """A frozen factor, and the entries of in_proj that belong to no pair: as if they were constants."""
    loss, pairs, _ = lora_case(False)
    (pair,) = pairs
    a, b = pair.parameters
    a.requires_grad_(False)
    found = sharpness(loss, pairs)
    gradient = torch.autograd.grad(loss(), b)[0]
    xi = torch.linalg.solve(a @ a.mT, gradient)

    def at(x: Tensor) -> Tensor:
        value, b.data = b.data, x
        bent = torch.autograd.grad(loss(), b)[0]
        b.data = value
        return bent

    h = 1e-5
    start = b.detach().clone()
    bend = (xi * (at(start + h * xi) - at(start - h * xi))).sum() / (2 * h)
    assert found.invariant == found.straight == pytest.approx(float(bend / (xi * gradient).sum()), rel=1e-7)

    model = Attention()
    loss, pairs, _ = attention_case(model)
    values = [pair for pair in pairs if pair.name.endswith("vo")]
    weight, bias, out = values[0].parameters

    def apart(*parts: Tensor) -> Tensor:  # of (W_V, b_V, W_O) alone
        named = {"in_proj_weight": torch.cat([weight[:24].detach(), parts[0]])}
        named |= {"in_proj_bias": torch.cat([bias[:24].detach(), parts[1]]), "out_proj.weight": parts[2]}
        named = {f"attention.{name}": value for name, value in named.items()}
        return attention_loss(torch.func.functional_call(model, named, (X,)))

    parts = tuple(p.detach().clone().requires_grad_() for p in (weight[24:], bias[24:], out))
    with sdpa_kernel(SDPBackend.MATH):
        gradients = torch.autograd.grad(apart(*parts), parts, create_graph=True)
        plain = [g.detach() for g in gradients]
        images = torch.autograd.grad(gradients, parts, plain)
    ordinary = sum((p * i).sum() for p, i in zip(plain, images, strict=True)) / sum(p.square().sum() for p in plain)
    assert sharpness(loss, values).ordinary == pytest.approx(float(ordinary), rel=1e-11)


def test_others_that_are_named_twice_count_once() -> None:
    """As tied weights are, when parameters are gathered module by module."""
    loss, pairs, (bias,) = lora_case(False)
    assert sharpness(loss, pairs, [bias, bias]) == sharpness(loss, pairs, [bias]) != sharpness(loss, pairs)
    assert sharpness(loss, pairs, [bias.requires_grad_(False)]) == sharpness(loss, pairs)  # nor do frozen ones count


def test_stationary_and_linear_losses() -> None:
    a, b = parameter(2, 4, seed=1), parameter(2, 3, seed=2)
    flat = sharpness(lambda: 0.0 * (b.mT @ a).sum(), [Pair.of(a, b)])
    assert all(math.isnan(v) for v in vars(flat).values())
    found = sharpness(lambda: a.sum(), [Pair.of(a, b)], [])
    assert found.ordinary == 0.0 == found.straight
    empty = Pair.of(parameter(0, 2, 4, seed=3), parameter(0, 2, 3, seed=4), "empty")
    loss = lambda: (b.mT @ a).sin().sum()  # noqa: E731
    assert sharpness(loss, [Pair.of(a, b), empty]) == sharpness(loss, [Pair.of(a, b)])


# --- what it leaves alone, and what it refuses --------------------------------------------------------------


def test_gradients_random_state_and_modes_stay() -> None:
    model = Attention(dropout=0.3)
    loss, pairs, others = attention_case(model)
    model.attention.out_proj.eval()
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    modes = [m.training for m in model.modules()]
    state, kept = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    first = sharpness(loss, pairs, others)
    assert torch.equal(torch.get_rng_state(), state)
    assert sharpness(loss, pairs, others) == first  # the same draws again
    assert [m.training for m in model.modules()] == modes and True in modes and False in modes
    assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())
    assert bool((parameters[0].grad == 1).all()) and all(p.grad is None for p in parameters[1:])
    with torch.no_grad():  # as in a hook of an optimizer's step
        assert sharpness(loss, pairs, others) == first
    torch.rand(1)
    assert sharpness(loss, pairs, others) != first


def test_fused_attention_has_no_second_derivative_but_here() -> None:
    w = parameter(2, 3, 3, seed=1)
    b = parameter(2, 3, 3, seed=2)
    x = normal(2, 1, 4, 3)

    def loss() -> Tensor:
        q = x @ (w.mT @ b).sum(0)
        return F.scaled_dot_product_attention(q, x, x).sin().sum()

    assert math.isfinite(sharpness(loss, [Pair.of(w, b)]).invariant)
    with pytest.raises(RuntimeError, match="derivative"):  # the kernel is chosen for this call only
        torch.autograd.grad(torch.autograd.grad(loss(), w, create_graph=True)[0].sum(), w)


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_lower_precision(dtype: torch.dtype, rel: float) -> None:
    exact = sharpness(*attention_case())
    found = sharpness(*attention_case(Attention().to(dtype)))
    for name, value in vars(exact).items():
        assert getattr(found, name) == pytest.approx(value, rel=rel), name


def test_what_is_refused() -> None:
    a, b = parameter(2, 4, seed=1), parameter(2, 3, seed=2)
    pairs = [Pair.of(a, b)]

    def loss() -> Tensor:
        return (b.mT @ a).sin().sum()

    with pytest.raises(ValueError, match="pair is among the others"):
        sharpness(loss, pairs, [a])
    with pytest.raises(ValueError, match="scalar tensor"):
        sharpness(lambda: a.sum(0), pairs)
    with pytest.raises(ValueError, match="scalar tensor"):
        sharpness(lambda: loss().detach(), pairs)
    with pytest.raises(ValueError, match="requires grad"):
        sharpness(loss, [])
    a.data[0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        sharpness(loss, pairs)


def test_sharded_parameters_are_refused() -> None:
    init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        a, b = (nn.Parameter(distribute_tensor(normal(2, 3), mesh, [Replicate()])) for _ in range(2))
        with pytest.raises(ValueError, match="sharded"):
            sharpness(lambda: (a * b).sum(), [Pair.of(a, b)])
    finally:
        destroy_process_group()
