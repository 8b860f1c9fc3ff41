"""Optimizers and schedules as a config asks for them: who decays, lives on a sphere, has pairs, or is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from drawn import gap
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Muon, Optimizer

from gaugekit import Horizontal, QuotientAdam, QuotientSGD, pairs
from gaugekit.errors import ConfigError
from gaugekit.nn.spheres import spheres
from gaugekit.optim.gated import GatedAdamW
from gaugekit.optim.hyperball import Hyperball
from gaugekit.optim.muon import MuonAdamW
from gaugekit.optim.pairs import scramble_
from gaugekit.training.config import ModelConfig, OptimizerConfig, ScheduleConfig
from gaugekit.training.config import Optimizer as Name
from gaugekit.training.decoder import Decoder
from gaugekit.training.optimizers import OPTIONS, make, schedule

VOCAB = 7
NAMES = get_args(Name)
OF_PAIRS = [name for name in NAMES if name.startswith(("quotient", "horizontal"))]
KINDS: dict[str, Callable[[Any], bool]] = {
    "adamw": lambda o: type(o) is AdamW,
    "sgd": lambda o: type(o) is SGD,
    "muon": lambda o: type(o) is MuonAdamW,
    "quotient_adam": lambda o: type(o) is QuotientAdam,
    "quotient_sgd": lambda o: type(o) is QuotientSGD,
    "horizontal_adamw": lambda o: type(o) is Horizontal and type(o.inner) is AdamW,
    "horizontal_muon": lambda o: type(o) is Horizontal and type(o.inner) is MuonAdamW,
    "gated_adamw": lambda o: type(o) is GatedAdamW,
}
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "standard": {"bias": True},
    "rotary": {"positions": "rotary", "kv_heads": 1, "mlp": "swiglu", "norm": "rms"},
    "relational": {"attention": "relational", "score": "learned"},
    "bilinear": {"attention": "relational", "score": "bilinear", "norm": "scale"},
    "invariant": {"attention": "invariant", "bias": True, "norm": "dyt"},
    "sphere": {"residual": "sphere", "norm": "none", "mlp": "swiglu"},
    "relational on the sphere": {"residual": "sphere", "attention": "relational"},
}


def decoder(name: str = "standard", **options: Any) -> Decoder:
    torch.manual_seed(0)
    sizes = {"vocab": VOCAB, "context": 6, "width": 8, "layers": 1, "heads": 2, "init_std": 0.3}
    model = Decoder(ModelConfig(**{**sizes, **COMPOSITIONS[name], **options})).double()
    with torch.no_grad():  # nothing is zero
        for parameter in model.parameters():
            if not parameter.any():
                parameter.fill_(0.3)
    return model


def config(name: Any, **keys: Any) -> OptimizerConfig:
    return OptimizerConfig(name, **{"lr": 0.01, **keys})


def backward(model: nn.Module, step: int = 0) -> Tensor:
    tokens = torch.randint(VOCAB, (3, 7), generator=torch.Generator().manual_seed(step % 3))
    model.zero_grad()
    loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Optimizer, start: int, stop: int, after: Any = None) -> float:
    loss = torch.zeros(())
    for step in range(start, stop):
        loss = backward(model, step)
        optimizer.step()
        if after is not None:
            after.step()
    return float(loss)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


# --- what is made ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_name_trains(name: str) -> None:
    model = decoder()
    optimizer = make(model, config(name, weight_decay=0.01))
    assert KINDS[name](optimizer)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    before = [p.detach().clone() for p in model.parameters()]
    first = float(backward(model))
    train(model, optimizer, 0, 30)
    assert float(backward(model)) < first - 0.05
    for (path, p), old in zip(model.named_parameters(), before, strict=True):
        assert gap(p.detach(), old) > 1e-6 or "key.bias" in path, path


TWINS: dict[str, Callable[[Decoder], Optimizer]] = {
    "adamw": lambda m: AdamW(m.parameters(), 0.01, (0.7, 0.8), 1e-3, 0.0, amsgrad=True),
    "sgd": lambda m: SGD(m.parameters(), 0.01, 0.6, nesterov=True),
    "gated_adamw": lambda m: GatedAdamW(m.parameters(), 0.01, (0.7, 0.8), 1e-3, 0.0, gate=0.5),
    "quotient_adam": lambda m: QuotientAdam(
        m.parameters(), 0.01, (0.7, 0.8), 1e-3, 0.0, pairs=pairs(m), unit="product"
    ),
    "quotient_sgd": lambda m: QuotientSGD(m.parameters(), 0.01, 0.6, 0.2, pairs=pairs(m, ["vo"])),
    "horizontal_adamw": lambda m: Horizontal(
        AdamW(m.parameters(), 0.01, (0.7, 0.8), 1e-3, 0.0), pairs(m), "invariant", 2
    ),
}
GIVEN: dict[str, dict[str, Any]] = {
    "adamw": {"amsgrad": True},
    "sgd": {"nesterov": True},
    "gated_adamw": {"gate": 0.5},
    "quotient_adam": {"unit": "product"},
    "quotient_sgd": {"kinds": ["vo"], "dampening": 0.2},
    "horizontal_adamw": {"metric": "invariant", "rebalance": 2},
}


@pytest.mark.parametrize("name", TWINS)
def test_keys_and_options_are_passed_on(name: str) -> None:
    model, twin = decoder(), decoder()
    asked = config(name, betas=(0.7, 0.8), eps=1e-3, momentum=0.6, options=GIVEN[name])
    train(model, make(model, asked), 0, 4)
    train(twin, TWINS[name](twin), 0, 4)
    assert all(gap(p.detach(), q.detach()) < 1e-12 for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    for change in ({"options": {}}, {"momentum": 0.5, "betas": (0.7, 0.9)}):
        other = decoder()
        train(other, make(other, OptimizerConfig(**{**vars(asked), **change})), 0, 4)
        assert not same(model, other)


def test_muon_takes_matrices_inside() -> None:
    for name, inside in (
        ("standard", ["query", "key", "value", "out", "up", "down"]),
        ("rotary", ["query", "key", "value", "out", "up", "gate", "down"]),
        ("relational", ["value", "out", "up", "down"]),
        ("invariant", ["up", "down"]),
        ("sphere", ["query", "key", "value", "out", "up", "gate", "down"]),
    ):
        model = decoder(name)
        optimizer = make(model, config("muon", momentum=0.7, options={"ns_steps": 3, "nesterov": False}))
        muon = [group for group in optimizer.param_groups if "ns_steps" in group]
        held = {id(p) for group in muon for p in group["params"]}
        found = [path.split(".")[-2] for path, p in model.named_parameters() if id(p) in held]
        assert sorted(found) == sorted(inside), name
        assert {(g["momentum"], g["nesterov"], g["ns_steps"], g["adjust_lr_fn"]) for g in muon} == {
            (0.7, False, 3, "match_rms_adamw")
        }
        assert {g["betas"] for g in optimizer.param_groups if "betas" in g} == {(0.9, 0.95)}


def test_muon_is_muon() -> None:
    model, twin = decoder(), decoder()
    optimizer = make(model, config("horizontal_muon", options={"kinds": ["qk"]}))
    assert isinstance(optimizer, Horizontal)
    assert [pair.name for pair in optimizer.pairs] == ["blocks.0.attention.qk"]
    train(model, make(model, config("muon")), 0, 3)
    inside = [p for path, p in twin.named_parameters() if path.startswith("blocks") and p.ndim == 2]
    held = {id(p) for p in inside}
    apart = (
        Muon(inside, 0.01, 0.0, 0.9, adjust_lr_fn="match_rms_adamw"),
        AdamW([p for p in twin.parameters() if id(p) not in held], 0.01, (0.9, 0.95), 1e-8, 0.0),
    )
    for step in range(3):
        backward(twin, step)
        for part in apart:
            part.step()
    assert same(model, twin)


def test_frozen_parameters_are_left_out() -> None:
    model = decoder()
    model.embedding.requires_grad_(False)
    before = model.embedding.weight.detach().clone()
    for name in NAMES:
        optimizer = make(model, config(name, weight_decay=0.1))
        assert all(p is not model.embedding.weight for group in optimizer.param_groups for p in group["params"])
        train(model, optimizer, 0, 2)
    assert torch.equal(model.embedding.weight, before)


def test_a_tied_head_is_an_embedding() -> None:
    model = decoder(tied=True)
    optimizer = make(model, config("muon"))
    assert isinstance(optimizer, MuonAdamW)
    embedding = next(g for g in optimizer.param_groups if any(p is model.embedding.weight for p in g["params"]))
    assert "ns_steps" not in embedding
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))


# --- weight decay ---------------------------------------------------------------------------------------------


def decaying(path: str, composition: str) -> bool:
    """Written out: what is a matrix by its name."""
    last = path.split(".")[-1]
    if composition == "sphere" or (composition.endswith("sphere") and not path.startswith("blocks")):
        return path.startswith("positions")
    if composition.endswith("sphere") and ".mlp." in path:
        return False
    if last in ("columns", "coefficients", "left"):
        return True
    module = path.split(".")[-2]
    matrices = ("embedding", "positions", "head", "query", "key", "value", "out", "up", "gate", "down")
    return last == "weight" and module in matrices


@pytest.mark.parametrize(
    ("name", "composition"),
    [
        *((name, composition) for name in ("adamw", "gated_adamw", "muon") for composition in COMPOSITIONS),
        *(
            (name, composition)
            for name in ("quotient_adam", "horizontal_adamw")
            for composition in COMPOSITIONS
            if composition not in ("invariant", "sphere")  # which have no pairs
        ),
    ],
)
def test_matrices_alone_decay(name: str, composition: str) -> None:
    """With gradients of zero nothing but weight decay moves a parameter: 2-D scales of heads stay, too."""
    model = decoder(composition)
    optimizer = make(model, config(name, lr=0.1, weight_decay=0.5))
    before = {path: p.detach().clone() for path, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    paired = {id(p) for pair in pairs(model) for p in pair.parameters} if name in OF_PAIRS else set()
    some = False
    for path, p in model.named_parameters():
        kept = 0.95 if decaying(path, composition) else 1.0
        if id(p) in paired:
            if name.startswith("horizontal"):
                continue  # decay has a part along orbits
            kept = 0.95**0.5  # that of the product, biases among its columns, and so a factor by the root of it
        assert gap(p.detach(), kept * before[path]) < 1e-12, path
        some |= kept < 1
    assert some


# --- spheres --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_PAIRS])
@pytest.mark.parametrize("options", [{}, {"mode": "tangent", "max_angle": 0.1, "method": "exp"}], ids=str)
def test_weights_stay_on_their_spheres(name: str, options: dict[str, Any]) -> None:
    model = decoder("sphere")
    optimizer = make(model, config(name, weight_decay=0.1, options=options))
    assert isinstance(optimizer, Hyperball)
    assert KINDS[name](optimizer.inner)
    assert (optimizer.mode, optimizer.max_angle) == (options.get("mode", "project"), options.get("max_angle"))
    first = float(backward(model))
    train(model, optimizer, 0, 20)
    assert float(backward(model)) < first
    for sphere in spheres(model):
        length = sphere.parameter.detach().norm(dim=sphere.dim)
        assert gap(length, torch.ones_like(length)) < 1e-12, sphere.name


@pytest.mark.parametrize("name", OF_PAIRS)
def test_pairs_beside_spheres(name: str) -> None:
    """Values and outputs of relational attention are no unit vectors, and their products are all the model sees."""
    model = decoder("relational on the sphere")
    on_spheres = {id(sphere.parameter) for sphere in spheres(model)}
    optimizer: Any = make(model, config(name, options={"mode": "tangent"}))
    assert isinstance(optimizer, Hyperball)
    assert KINDS[name](optimizer.inner)
    assert [pair.name for pair in optimizer.inner.pairs] == ["blocks.0.attention.1.attention.vo"]
    assert not on_spheres & {id(p) for pair in optimizer.inner.pairs for p in pair.parameters}
    train(model, optimizer, 0, 10)
    for sphere in spheres(model):
        length = sphere.parameter.detach().norm(dim=sphere.dim)
        assert gap(length, torch.ones_like(length)) < 1e-12, sphere.name


def test_paths_beside_spheres_do_not_depend_on_the_gauge() -> None:
    ends = {}
    for name in ("quotient_adam", "adamw"):
        models = decoder("relational on the sphere"), decoder("relational on the sphere")
        scramble_(pairs(models[1]), torch.Generator().manual_seed(1))
        for model in models:
            train(model, make(model, config(name)), 0, 30)
        tokens = torch.arange(6).unsqueeze(0)
        with torch.no_grad():
            ends[name] = gap(models[0](tokens), models[1](tokens))
    assert ends["quotient_adam"] < 1e-9
    assert ends["adamw"] > 1e-3


@pytest.mark.parametrize("name", OF_PAIRS)
def test_models_without_pairs_are_refused(name: str) -> None:
    plain = decoder("relational", values="plain")
    for model in (decoder("sphere"), decoder("invariant"), plain):
        with pytest.raises(ConfigError, match=rf"optimizer\.name={name} steps on pairs .* this model has none"):
            make(model, config(name))
    with pytest.raises(ConfigError, match="this model has none"):
        make(decoder(), config(name, options={"kinds": ["units"]}))  # of GELU


# --- checkpoints, copies, schedules -----------------------------------------------------------------------------


def by_state(model: nn.Module, optimizer: Optimizer, asked: OptimizerConfig) -> tuple[nn.Module, Optimizer]:
    twin = copy.deepcopy(model)
    resumed = make(twin, asked)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin, resumed


def by_checkpoint(model: nn.Module, optimizer: Optimizer, asked: OptimizerConfig) -> tuple[nn.Module, Optimizer]:
    """As torch.distributed.checkpoint does: state is made first, by a step, then weights and state are loaded."""
    twin = copy.deepcopy(model)
    resumed = make(twin, asked)
    get_state_dict(twin, resumed)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    set_state_dict(twin, resumed, model_state_dict=weights, optim_state_dict=state)
    return twin, resumed


RESUMED: dict[str, Callable[[nn.Module, Optimizer, OptimizerConfig], tuple[nn.Module, Optimizer]]] = {
    "state_dict": by_state,
    "checkpoint": by_checkpoint,
    "deepcopy": lambda model, optimizer, _: copy.deepcopy((model, optimizer)),
    "pickle": lambda model, optimizer, _: pickle.loads(pickle.dumps((model, optimizer))),
}


@pytest.mark.parametrize("how", RESUMED)
@pytest.mark.parametrize(
    ("name", "composition"), [*((name, "rotary") for name in NAMES), ("muon", "sphere"), ("adamw", "sphere")]
)
def test_resumed_is_unbroken(name: str, composition: str, how: str) -> None:
    options = {"rebalance": 2} if name.startswith("horizontal") else {}
    asked = config(name, weight_decay=0.1, options=options)
    model = decoder(composition)
    optimizer = make(model, asked)
    train(model, optimizer, 0, 3)
    twin, resumed = RESUMED[how](model, optimizer, asked)
    train(model, optimizer, 3, 6)
    train(twin, resumed, 3, 6)
    assert same(model, twin)


@pytest.mark.parametrize("name", NAMES)
def test_schedules_reach_every_parameter(name: str) -> None:
    model = decoder()
    optimizer = make(model, config(name, lr=0.1, weight_decay=0.1))
    after = schedule(optimizer, ScheduleConfig(warmup=1, final=0.0), 4)
    assert {group["lr"] for group in optimizer.param_groups} == {0.05}
    train(model, optimizer, 0, 4, after)
    before = copy.deepcopy(model)
    train(model, optimizer, 4, 6, after)
    for p, old in zip(model.parameters(), before.parameters(), strict=True):
        assert gap(p.detach(), old.detach()) < 1e-12  # pairs are read and written back


def test_schedules() -> None:
    def rates(**keys: Any) -> list[float]:
        optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        after, seen = schedule(optimizer, ScheduleConfig(**keys), 10), []
        for _ in range(12):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            after.step()
        return seen

    cosine, logarithmic, constant = (
        rates(name=name, warmup=2, final=0.2) for name in ("cosine", "logarithmic", "constant")
    )
    assert cosine[2] == logarithmic[2] == constant[2] == 1.0
    assert cosine[0] == logarithmic[0] == constant[0] == pytest.approx(1 / 3)
    assert cosine[10:] == logarithmic[10:] == [0.2, 0.2]
    assert cosine[6] == pytest.approx(0.6)
    assert constant[2:] == [1.0] * 10
    assert rates(name="logarithmic", rho=1e-3)[1] < rates(name="logarithmic", rho=1.0)[1] < 1
    for keys, message in (
        ({"warmup": 10}, "warmup_steps must be from 0"),
        ({"final": 2.0}, "final is a share"),
        ({"name": "logarithmic", "rho": 0.0}, "rho must be above 0"),
        ({"name": "constant", "warmup": -1}, "warmup_steps must be at least 0"),
    ):
        with pytest.raises(ConfigError, match=f"^schedule: {message}"):
            rates(**keys)


# --- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("adamw", {"options": {"amsgrd": True}}, r"options\.amsgrd: adamw has no such option, it takes amsgrad, for"),
        ("sgd", {"options": {"amsgrad": True}}, r"options\.amsgrad: sgd has no such option, it takes dampening, nest"),
        ("muon", {"options": {"lr": 0.1}}, r"options\.lr: muon has no such option, it takes nesterov, ns_steps$"),
        ("quotient_adam", {"options": {"units": "x"}}, r"options\.units: .* it takes kinds, unit, masters"),
        ("horizontal_muon", {"options": {"kind": []}}, r"it takes kinds, metric, rebalance, nesterov, ns_steps"),
        ("adamw", {"options": {"mode": "tangent"}}, r"options\.mode: this model has no weights on spheres"),
        ("muon", {"options": {"ns_steps": "five"}}, r"options\.ns_steps: must be a whole number, got 'five'"),
        ("sgd", {"options": {"nesterov": 1}}, r"options\.nesterov: must be true or false, got 1"),
        ("gated_adamw", {"options": {"gate": "wide"}}, r"options\.gate: must be a number, got 'wide'"),
        ("quotient_sgd", {"options": {"unit": "meter"}}, r"options\.unit: must be one of factor, product, got 'meter'"),
        ("horizontal_adamw", {"options": {"metric": "x"}}, r"options\.metric: must be one of euclidean"),
        ("horizontal_adamw", {"options": {"rebalance": -1}}, "optimizer: rebalance is a number of steps"),
        ("quotient_adam", {"options": {"kinds": "vo"}}, r"options\.kinds: must be a list, got 'vo'"),
        ("quotient_adam", {"options": {"kinds": ["ov"]}}, "optimizer: kinds must be a collection of vo, qk"),
        ("sgd", {"momentum": 0.0, "options": {"nesterov": True}}, "optimizer: Nesterov momentum requires a momentum"),
        ("adamw", {"betas": (1.0, 0.9)}, "optimizer: Invalid beta parameter"),
        ("gated_adamw", {"eps": 0.0}, "optimizer: eps must be finite and above 0"),
        ("adamw", {"weight_decay": -0.1}, "optimizer: Invalid weight_decay value"),
    ],
)
def test_bad_options(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make(decoder(), config(name, **keys))
    assert "\n" not in str(caught.value)


def test_bad_options_of_spheres() -> None:
    model = decoder("sphere")
    before = copy.deepcopy(model)
    for options, message in (
        ({"mode": "flat"}, r"options\.mode: must be one of project, tangent, got 'flat'"),
        ({"max_angle": 0.1}, 'optimizer: max_angle limits steps along the sphere: it needs mode="tangent"'),
        ({"mode": "tangent", "max_angle": 4}, "optimizer: max_angle is in radians"),
        ({"modes": "tangent"}, r"options\.modes: adamw has no such option, it takes .*fused, mode, max_angle, method"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(model, config("adamw", options=options))
    assert same(model, before)


def test_every_name_has_its_options() -> None:
    assert set(OPTIONS) == set(NAMES)
