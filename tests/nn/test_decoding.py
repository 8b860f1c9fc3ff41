"""Causal attention and the MLP of an ordinary block, and the sphere's branches without a gate or positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn import gap, normal
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from gaugekit.nn.decoding import MLP, CausalAttention
from gaugekit.nn.hypersphere import HypersphereAttention, HypersphereMLP
from gaugekit.nn.rotary import planes, rotary
from gaugekit.nn.spheres import normalize_, spheres

WIDTH = 12


def drawn(module: nn.Module) -> Any:
    module.double()
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=i) / math.sqrt(parameter.shape[-1]))
    normalize_(spheres(module))
    return module


def apart(a: Tensor, b: Tensor) -> float:
    return gap(a.detach(), b.detach())


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


@pytest.mark.parametrize("base", [None, 30.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, None), (6, 2), (3, 1)])
def test_attention_is_that_of_torch(heads: int, kv_heads: int | None, bias: bool, base: float | None) -> None:
    module = drawn(CausalAttention(WIDTH, heads, kv_heads, bias, base))
    x = normal(3, 7, WIDTH, seed=50)
    q, k, v = heads_of(module.query(x), heads), *(heads_of(m(x), kv_heads or heads) for m in (module.key, module.value))
    if base is not None:
        q, k = rotary(q, base), rotary(k, base)
    y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert apart(module(x), module.out(y.transpose(-2, -3).flatten(-2))) < 1e-12
    assert (module.key.bias is not None) == bias


def test_query_head_i_uses_key_head_i_over_the_share() -> None:
    """TransformerLens PR#1768: query heads beyond the key heads raised, or took the wrong one."""
    module = drawn(CausalAttention(56, 14, 2))
    x = normal(2, 5, 56, seed=50)
    before, k = module(x), 4
    for key_head in range(2):
        with torch.no_grad():
            moved = drawn(CausalAttention(56, 14, 2))
            moved.value.weight[key_head * k : (key_head + 1) * k] *= 2
            moved.out.weight[:, key_head * 7 * k : (key_head + 1) * 7 * k] /= 2
        assert apart(moved(x), before) < 1e-12


@pytest.mark.parametrize("shape", [(WIDTH,), (5, WIDTH), (1, 5, WIDTH), (2, 3, 5, WIDTH), (0, 5, WIDTH)])
def test_leading_axes(shape: tuple[int, ...]) -> None:
    attention, mlp = drawn(CausalAttention(WIDTH, 3, 1, rotary_base=10.0)), drawn(MLP(WIDTH, 5, "swiglu"))
    x = normal(*shape)
    assert mlp(x).shape == shape
    if len(shape) == 1:
        with pytest.raises(ValueError, match=r"input must be \(\.\.\., tokens, 12\), got \(12,\)"):
            attention(x)
        return
    y = attention(x)
    assert y.shape == shape
    rows = [attention(row) for row in x.flatten(0, -3)] if len(shape) > 2 else [attention(x)]
    assert all(apart(a, b) < 1e-12 for a, b in zip(y.reshape(-1, *shape[-2:]), rows, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    single = drawn(CausalAttention(WIDTH, 3, 1, rotary_base=10.0)).float()
    x = normal(2, 5, WIDTH).float()
    expected = single(x)
    with torch.autocast("cpu", dtype):
        y = single(x)
    assert y.dtype == dtype
    half = single.to(dtype)(x.to(dtype))
    assert half.dtype == dtype
    for found in (y, half):
        assert 0 < apart(found, expected) < 0.05


@pytest.mark.parametrize("bias", [False, True])
def test_mlps(bias: bool) -> None:
    x = normal(4, WIDTH, seed=50)
    for activation in ("gelu", "relu", "swiglu"):
        m = drawn(MLP(WIDTH, 7, activation, bias))
        u = m.up(x)
        if m.gate is not None:
            units = u * m.gate(x) * torch.sigmoid(m.gate(x))
        else:
            units = u * (u > 0) if activation == "relu" else u * (1 + torch.erf(u / math.sqrt(2))) / 2
        assert apart(m(x), units @ m.down.weight.T + (m.down.bias if bias else 0)) < 1e-12
        assert len(list(m.parameters())) == (3 if activation == "swiglu" else 2) * (2 if bias else 1)


def test_planes_turn_alone_or_together() -> None:
    assert planes(6, 10.0) == (((0, 3),), ((1, 4),), ((2, 5),))
    assert planes(6, 1.0) == (((0, 3), (1, 4), (2, 5)),)
    x = normal(4, 6)
    for base in (10.0, 1.0):
        turned = rotary(x, base)
        for group in planes(6, base):
            angles = []
            for i, j in group:
                a, b = torch.complex(x[:, i], x[:, j]), torch.complex(turned[:, i], turned[:, j])
                assert gap(a.abs(), b.abs()) < 1e-12
                angles.append((b / a).angle())
            assert all(gap(angle, angles[0]) < 1e-12 for angle in angles)


# --- on the sphere --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_units_on_the_sphere_without_a_gate(activation: Any) -> None:
    m = drawn(HypersphereMLP(WIDTH, 7, activation))
    assert {name for name, _ in m.named_parameters()} == {"up.weight", "down.weight", "s_u.weight"}
    x = normal(4, WIDTH, seed=50)
    u = math.sqrt(WIDTH) * m.s_u() * (x @ m.up.weight.T)
    units = F.relu(u) if activation == "relu" else F.gelu(u)
    assert apart(m(x), units @ m.down.weight.T) < 1e-12


def test_attention_on_the_sphere_without_positions() -> None:
    m = drawn(HypersphereAttention(WIDTH, 3, 1, rotary_base=None))
    x = normal(5, WIDTH, seed=50)
    q, k = (F.normalize(heads_of(read(x), h), dim=-1) for read, h in ((m.query, 3), (m.key, 1)))
    q, k = q * m.s_qk().unsqueeze(1), k * m.s_qk().unsqueeze(1)
    scores = 2 * q @ k.mT  # √k of heads of 4
    scores = scores.masked_fill(~torch.ones(5, 5).tril().bool(), -math.inf)
    y = (scores.softmax(-1) @ heads_of(m.value(x), 1)).transpose(-2, -3).flatten(-2)
    assert apart(m(x), y @ m.out.weight.T) < 1e-12
    order = torch.tensor([2, 0, 3, 1, 4])
    assert apart(m(x)[-1], m(x[order])[-1]) < 1e-12
    odd = HypersphereAttention(9, 3, rotary_base=None)  # no pairs of entries are needed
    assert odd(torch.ones(2, 9)).shape == (2, 9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CausalAttention(12, 5), "heads must divide width and kv_heads heads, got 12, 5, 5"),
        (lambda: CausalAttention(12, 4, 3), "heads must divide width and kv_heads heads, got 12, 4, 3"),
        (lambda: CausalAttention(12, 0), "got 12, 0, 0"),
        (lambda: CausalAttention(12, 4, rotary_base=10.0), "an even head dimension and a positive base, got 3, 10.0"),
        (lambda: CausalAttention(12, 3, rotary_base=-1.0), "a positive base, got 4, -1.0"),
        (lambda: CausalAttention(12, 3, rotary_base=math.inf), "a positive base, got 4, inf"),
        (lambda: CausalAttention(12, 3)(torch.ones(2, 11)), r"input must be \(\.\.\., tokens, 12\), got \(2, 11\)"),
        (lambda: MLP(12, 0), "sizes must be at least 1, got width 12, hidden 0"),
        (lambda: MLP(12, 3, "tanh"), "activation must be one of gelu, relu, swiglu, got 'tanh'"),  # type: ignore[arg-type]
        (lambda: HypersphereMLP(12, 3, "tanh"), "activation must be one of gelu, relu, swiglu"),  # type: ignore[arg-type]
    ],
)
def test_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
