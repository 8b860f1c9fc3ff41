"""Pairs in gaugekit's own layers: all that a layer does not see of its parameters, and nothing that it sees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from drawn import gap, normal
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrize

from gaugekit import QuotientAdam, pairs
from gaugekit.nn.decoding import MLP, CausalAttention
from gaugekit.nn.hypersphere import HypersphereAttention, HypersphereMLP
from gaugekit.nn.invariant import InvariantAttention
from gaugekit.nn.relational import RelationalAttention
from gaugekit.nn.rotary import rotary
from gaugekit.nn.spheres import Reader
from gaugekit.optim.finding import find_pairs
from gaugekit.optim.pairs import Factor, Pair, Window, scramble_
from gaugekit.training.config import ModelConfig
from gaugekit.training.decoder import Decoder

WIDTH, TOKENS = 8, 5

ATTENTIONS: dict[str, Callable[[], nn.Module]] = {
    f"{heads}/{kv_heads} heads, rotary {base}, bias {bias}": (
        lambda heads=heads, kv_heads=kv_heads, base=base, bias=bias: CausalAttention(WIDTH, heads, kv_heads, bias, base)
    )
    for heads, kv_heads in ((2, 2), (2, 1), (4, 2), (1, 1))
    for base in (None, 100.0, 1.0)
    for bias in (False, True)
}
RELATIONAL: dict[str, Callable[[], nn.Module]] = {
    f"{score}, {frame}": lambda score=score, frame=frame: RelationalAttention(
        WIDTH, 2, score=score, frame=frame, values="linear"
    )
    for score in ("dot", "cosine", "rbf", "bilinear", "learned")
    for frame in ("full", "split")
}
MLPS: dict[str, Callable[[], nn.Module]] = {
    f"{kind}, bias {bias}": lambda kind=kind, bias=bias: MLP(WIDTH, 6, kind, bias)
    for kind in ("swiglu", "relu")
    for bias in (False, True)
}
KINDS = ("vo", "qk", "units")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    module = make().double()
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(0.5 * normal(*parameter.shape, seed=i))
    return module


def seen(module: nn.Module, count: int = 3) -> Tensor:
    causal = {"is_causal": True} if isinstance(module, RelationalAttention) else {}
    with torch.no_grad():
        return module(normal(count, TOKENS, WIDTH, seed=99), **causal)


def moved(module: nn.Module, moves: Callable[[nn.Module], None]) -> float:
    """How far the output goes where the parameters are moved; they are put back."""
    state, before = copy.deepcopy(module.state_dict()), seen(module)
    moves(module)
    found = gap(seen(module), before)
    module.load_state_dict(state)
    return found


def dimension(pair: Pair) -> int:
    """Of the group, over the real numbers."""
    return sum(x.numel() * (2 if x.is_complex() else 1) for x in pair.sample(rng()))


def corank(module: nn.Module, parameters: Iterable[Tensor]) -> int:
    """How many directions of these parameters the outputs do not see, with a clear gap between them and the others."""
    parameters = list(parameters)
    causal = {"is_causal": True} if isinstance(module, RelationalAttention) else {}
    outputs = module(normal(8, TOKENS, WIDTH, seed=98), **causal).flatten()
    rows = [torch.autograd.grad(y, parameters, retain_graph=True) for y in outputs]
    s = torch.linalg.svdvals(torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]))
    count = sum(p.numel() for p in parameters)
    assert len(s) == count
    rank = int((s > 1e-9 * s[0]).sum())
    assert rank == count or s[rank] < 1e-4 * s[rank - 1]
    return count - rank


@pytest.mark.parametrize("make", [*ATTENTIONS.values(), *RELATIONAL.values(), *MLPS.values()])
def test_the_group_leaves_the_output_and_one_factor_alone_does_not(make: Callable[[], nn.Module]) -> None:
    module = drawn(make)
    found = find_pairs(module, KINDS)
    assert found
    for pair in found:
        elements = pair.sample(rng(1))
        ones = [torch.eye(s.shape[-1], dtype=s.dtype).expand_as(s) for s in elements]
        assert moved(module, lambda _, p=pair, e=elements: p.move_(e)) < 1e-9
        for alone in (zip(elements, ones, strict=True), zip(ones, elements, strict=True)):
            assert moved(module, lambda _, p=pair, m=list(alone): p.move_by_(m)) > 1e-3
    assert moved(module, lambda _: scramble_(found, rng(2), condition=100)) < 1e-9
    touched = {id(p) for pair in found for p in pair.parameters}
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    scramble_(found, rng(3))
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name]) == (id(p) not in touched), name


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name.startswith(("2/1", "4/2"))])
def test_attention_sees_all_else(name: str) -> None:
    """The kernel of the Jacobian is what the pairs give, and what biases do: those of values go through attention into
    that of the output, those of keys are a constant for each query, unless they turn."""
    module: Any = drawn(ATTENTIONS[name])
    found = find_pairs(module)
    assert [pair.name for pair in found] == ["vo", "qk"]
    k, g = module.head_dim, module.kv_heads
    turns = {None: k * k, 100.0: k, 1.0: k * k // 2}[module.rotary_base]
    assert [dimension(pair) for pair in found] == [g * k * k, g * turns]
    biases = 0 if module.out.bias is None else g * k * (2 if module.rotary_base is None else 1)
    assert corank(module, module.parameters()) == g * (k * k + turns) + biases


@pytest.mark.parametrize("name", ["dot, full", "rbf, split", "learned, split"])
def test_relational_attention_sees_all_else(name: str) -> None:
    module = drawn(RELATIONAL[name])
    found = find_pairs(module)
    assert [pair.name for pair in found] == ["vo"]
    assert dimension(found[0]) == 2 * (WIDTH // 2) ** 2
    assert corank(module, found[0].parameters) == dimension(found[0])


@pytest.mark.parametrize("make", MLPS.values(), ids=MLPS)
def test_mlp_sees_all_else(make: Callable[[], nn.Module]) -> None:
    module = drawn(make)
    assert find_pairs(module) == []  # units are not found unless asked for
    found = find_pairs(module, ["units"])
    assert [pair.name for pair in found] == ["units"]
    assert corank(module, module.parameters()) == dimension(found[0]) == 6


@pytest.mark.parametrize("bias", [False, True])
def test_gelu_units_are_no_pairs(bias: bool) -> None:
    module: Any = drawn(lambda: MLP(WIDTH, 6, "gelu", bias))
    assert find_pairs(module, KINDS) == []
    assert corank(module, module.parameters()) == 0


# --- what is not in the group ---------------------------------------------------------------------------------


def with_(pair: Pair, **changes: Any) -> Pair:
    kept = {name: getattr(pair, name) for name in ("name", "a", "b", "turning", "positive")}
    return Pair(**(kept | changes))


def test_rotary_turns_allow_what_commutes_with_them_only() -> None:
    module = drawn(lambda: CausalAttention(WIDTH, 2, rotary_base=100.0))
    qk = find_pairs(module, ["qk"])[0]
    full, neighbours = with_(qk, turning=()), with_(qk, turning=(((0, 1),), ((2, 3),)))
    alike = with_(qk, turning=(((0, 2), (1, 3)),))
    for wrong in (full, neighbours, alike):
        assert moved(module, lambda _, p=wrong: scramble_([p], rng())) > 1e-3
    assert moved(module, lambda _: scramble_([qk], rng())) < 1e-9


def test_query_heads_of_a_group_move_together() -> None:
    module: Any = drawn(lambda: CausalAttention(WIDTH, 4, 2))
    k = module.head_dim
    for many, few in ((module.query.weight, module.key.weight), (module.out.weight.T, module.value.weight)):
        first = Pair.of(few.detach()[:k], many.detach()[:k])
        assert moved(module, lambda _, p=first: p.move_(p.sample(rng()))) > 1e-3


def test_heads_are_not_taken_for_others() -> None:
    """Query head i uses key/value head i // (h/g)."""
    module: Any = drawn(lambda: CausalAttention(WIDTH, 4, 2))
    k = module.head_dim
    for pair in find_pairs(module):
        moves = pair.sample(rng())
        moves[0][1] = torch.eye(k, dtype=torch.float64)  # the second key/value head rests
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        pair.move_(moves)
        changed = {name: (p.detach() != before[name]) for name, p in module.named_parameters()}
        names = ("query", "key") if pair.name == "qk" else ("out", "value")
        many = changed[f"{names[0]}.weight"]
        many = many if pair.name == "qk" else many.T
        assert many[: 2 * k].all() and not many[2 * k :].any()
        few = changed[f"{names[1]}.weight"]
        assert few[:k].all() and not few[k:].any()


def test_activations_allow_their_scales_only() -> None:
    for activation, negative in (("relu", False), ("swiglu", True)):
        module: Any = drawn(lambda kind=activation: MLP(WIDTH, 6, kind, True))
        pair = find_pairs(module, ["units"])[0]
        assert pair.positive == (activation == "relu")
        turned = [-s for s in pair.sample(rng())]
        assert (moved(module, lambda _, p=pair, t=turned: p.move_(t)) < 1e-9) == negative
        if module.gate is not None:
            gates = with_(pair, a=Factor((Window(module.gate.weight, lambda x: x.unsqueeze(1)),)))
            assert moved(module, lambda _, p=gates: scramble_([p], rng())) > 1e-3
    gelu: Any = drawn(lambda: MLP(WIDTH, 6, "gelu"))
    wrong = Pair(
        "units",
        Factor((Window(gelu.up.weight, lambda x: x.unsqueeze(1)),)),
        Factor((Window(gelu.down.weight, lambda x: x.t().unsqueeze(1)),)),
    )
    assert moved(gelu, lambda _: scramble_([wrong], rng())) > 1e-3


def test_planes_are_those_that_turn() -> None:
    for base in (50.0, 1.0):
        module: Any = drawn(lambda base=base: CausalAttention(WIDTH, 1, rotary_base=base))
        x = normal(4, WIDTH, seed=3)
        turned = rotary(x, base)
        (group, *others) = find_pairs(module, ["qk"])[0].turning
        assert len(others) == (0 if base == 1 else WIDTH // 2 - 1)
        for plane in (plane for planes in (group, *others) for plane in planes):
            rows = torch.tensor(plane)
            lengths = x[:, rows].norm(dim=-1), turned[:, rows].norm(dim=-1)
            assert gap(*lengths) < 1e-14


# --- what has none --------------------------------------------------------------------------------------------


class Louder(CausalAttention):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.value(x).relu())


class LouderMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Clipped(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).clamp(-1, 1)


def test_layers_without_pairs() -> None:
    for module in (
        Louder(WIDTH, 2),
        LouderMLP(WIDTH, 6, "relu"),
        RelationalAttention(WIDTH, 2),
        InvariantAttention(WIDTH, 2),
        HypersphereAttention(WIDTH, 2),
        HypersphereMLP(WIDTH, 6),
        HypersphereMLP(WIDTH, 6, "relu"),
    ):
        assert find_pairs(module, KINDS) == []


@pytest.mark.parametrize(
    ("name", "left"), [("query", ["vo"]), ("key", ["vo"]), ("value", ["qk"]), ("out", ["qk"])], ids=lambda x: str(x)
)
def test_a_changed_layer_leaves_its_pair_out(name: str, left: list[str]) -> None:
    for make in (lambda: Clipped(WIDTH, WIDTH), lambda: Reader(WIDTH, WIDTH)):
        changed: Any = CausalAttention(WIDTH, 2)
        setattr(changed, name, make())
        assert [pair.name for pair in find_pairs(changed)] == left
    changed = CausalAttention(WIDTH, 2)
    parametrize.register_parametrization(getattr(changed, name), "weight", Scaled())
    assert [pair.name for pair in find_pairs(changed)] == left


@pytest.mark.parametrize("name", ["up", "down"])
def test_a_changed_layer_leaves_units_out(name: str) -> None:
    changed: Any = MLP(WIDTH, WIDTH, "relu")
    setattr(changed, name, Clipped(WIDTH, WIDTH))
    assert find_pairs(changed, ["units"]) == []


def test_frozen_and_shared_layers() -> None:
    frozen: Any = CausalAttention(WIDTH, 2).requires_grad_(False)
    assert find_pairs(frozen) == []
    frozen.out.requires_grad_(True)
    assert [pair.name for pair in find_pairs(frozen)] == ["vo"]
    shared: Any = CausalAttention(WIDTH, 2)
    shared.key.weight = shared.query.weight
    with pytest.raises(ValueError, match=r"qk is no pair by itself: query\.weight is shared with key\.weight"):
        find_pairs(shared)


# --- a whole decoder ------------------------------------------------------------------------------------------

VOCAB = 13
SMALL = {"vocab": VOCAB, "context": 8, "width": 16, "layers": 2, "heads": 4, "init_std": 0.2}
DECODERS: dict[str, tuple[dict[str, Any], int]] = {
    "learned positions": ({}, 4),
    "rotary, grouped, biases": ({"positions": "rotary", "kv_heads": 2, "norm": "rms", "bias": True}, 4),
    "swiglu units": ({"positions": "none", "mlp": "swiglu", "hidden": 12}, 6),
    "relational": ({"attention": "relational", "score": "rbf", "mlp": "relu"}, 4),
    "relational on the sphere": ({"attention": "relational", "residual": "sphere"}, 2),
}


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(ModelConfig(**{**SMALL, **options})).double()


def path(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Tensor:
    """Logits after training."""
    for step in range(steps):
        tokens = torch.randint(VOCAB, (2, 9), generator=rng(step % 5))
        optimizer.zero_grad()
        cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    with torch.no_grad():
        return model(torch.randint(VOCAB, (2, 8), generator=rng(77)))


@pytest.mark.parametrize("name", DECODERS)
def test_pairs_of_a_decoder(name: str) -> None:
    options, count = DECODERS[name]
    model = decoder(**options)
    found = pairs(model, KINDS)
    assert len(found) == count == len({pair.name for pair in found})
    tokens = torch.randint(VOCAB, (2, 8), generator=rng())
    with torch.no_grad():
        before = model(tokens)
        scramble_(found, rng(1), condition=100)
        assert gap(model(tokens), before) < 1e-9
        first = next(p for p in found if p.name.endswith(".vo"))
        first.move_by_([(s, s) for s in first.sample(rng(2))])
        assert gap(model(tokens), before) > 1e-4


@pytest.mark.parametrize("name", ["learned positions", "rotary, grouped, biases", "swiglu units"])
def test_paths_of_a_decoder_do_not_depend_on_the_gauge(name: str) -> None:
    model = decoder(**DECODERS[name][0])
    twin = copy.deepcopy(model)
    scramble_(pairs(twin, KINDS), rng(1), condition=10)

    def apart(make: Callable[[nn.Module], torch.optim.Optimizer]) -> float:
        models = copy.deepcopy(model), copy.deepcopy(twin)
        ends = [path(m, make(m), 50) for m in models]
        start = path(model, torch.optim.SGD(model.parameters()), 0)
        assert gap(ends[0], start) > 0.5
        return gap(*ends)

    def quotient(m: nn.Module) -> torch.optim.Optimizer:
        return QuotientAdam(m.parameters(), lr=0.01, pairs=pairs(m, KINDS))

    assert apart(quotient) < 1e-9
    assert apart(lambda m: torch.optim.AdamW(m.parameters(), lr=0.01)) > 1e-2
