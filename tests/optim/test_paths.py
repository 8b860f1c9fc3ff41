"""Paths of training from two coordinates of one function: the same with quotient optimizers, apart with others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from pydoc_data import topics
from typing import Any

import peft
import pytest
import torch
import transformers
from drawn import normal
from torch import Tensor, nn

from gaugekit import pairs
from gaugekit.optim.pairs import Pair, scramble_
from gaugekit.optim.quotient import QuotientAdam, QuotientSGD

F64 = torch.float64
STEPS = 200
WIDTH, LENGTH, BATCH, LETTERS = 16, 16, 2, 64

Start = tuple[nn.Module, list[Pair], Callable[[nn.Module, int], Tensor]]
Make = Callable[[Iterable[Any], list[Pair]], torch.optim.Optimizer]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def text() -> Tensor:
    """Real text, as letters modulo 64."""
    source = "".join(topics.topics[name] for name in sorted(topics.topics)[:4])
    return torch.tensor([ord(letter) % LETTERS for letter in source])


def batch(step: int) -> Tensor:
    length = BATCH * LENGTH
    return text()[step * length % 4000 :][: length + BATCH].view(BATCH, LENGTH + 1)


def language_loss(model: Any, step: int) -> Tensor:
    tokens = batch(step)
    logits = model(tokens[:, :-1])
    logits = logits if isinstance(logits, Tensor) else logits.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# --- models -----------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Embedding, one layer of nn.MultiheadAttention, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(WIDTH, LETTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=F64))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        x = self.norm(h)
        return self.head(h + self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0])


def plain() -> Start:
    torch.manual_seed(1)
    model = Plain().double()
    with torch.no_grad():  # the constructor leaves biases at zero
        for name, parameter in model.attention.named_parameters():
            if "bias" in name:
                parameter.copy_(0.1 * normal(*parameter.shape))
    return model, pairs(model), language_loss


def wide_norms(model: nn.Module) -> nn.Module:
    """RMSNorms of transformers compute in float32 whatever they are given; torch's do not."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, nn.RMSNorm(WIDTH, eps=1e-6, dtype=F64))
    return model


def tiny_llama() -> nn.Module:
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=LETTERS,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        attention_bias=True,
        initializer_range=0.2,
        attn_implementation="sdpa",
    )
    return wide_norms(transformers.LlamaForCausalLM(config).double())


def llama() -> Start:
    model = tiny_llama()
    found = pairs(model)
    assert {p.a.shape[0] for p in found} == {2}  # groups of two heads
    assert any(p.turning for p in found)
    return model, found, language_loss


def neox() -> Start:
    torch.manual_seed(3)
    config = transformers.GPTNeoXConfig(
        vocab_size=LETTERS,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        rotary_pct=0.5,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
        attn_implementation="sdpa",
    )
    model = transformers.GPTNeoXForCausalLM(config).double()
    found = pairs(model)
    turning = next(p for p in found if p.turning)
    assert len(turning.blocks) == 2  # half of the rows turn
    return model, found, language_loss


def lora(b_zero: bool) -> Start:
    torch.manual_seed(4)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=b_zero)
    with warnings.catch_warnings():  # peft asks for what transformers has renamed
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(tiny_llama(), config).double()  # type: ignore[arg-type]
    return model, pairs(model), language_loss


class Turning(nn.Module):
    """Scores of queries and keys that turn with position, two pairs of rows at one frequency, one at another, two
    rows at none."""

    turning = (((0, 2), (1, 3)), ((4, 5),))
    frequencies = (0.7, 0.3)

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(0.4 * normal(3, 8, 6, seed=1))
        self.k = nn.Parameter(0.4 * normal(3, 8, 5, seed=2))

    def turned(self, x: Tensor) -> Tensor:
        out = x.clone()
        position = torch.arange(x.shape[-1], dtype=x.dtype)
        for group, frequency in zip(self.turning, self.frequencies, strict=True):
            c, s = (frequency * position).cos(), (frequency * position).sin()
            for i, j in group:
                out[:, i], out[:, j] = c * x[:, i] - s * x[:, j], s * x[:, i] + c * x[:, j]
        return out

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.turned(self.q @ x).mT @ self.turned(self.k @ y)


def repeated() -> Start:
    model = Turning()
    factors = [Pair.of(model.q, model.k).a, Pair.of(model.q, model.k).b]
    pair = Pair("qk", *factors, turning=Turning.turning)
    assert [tuple(a.shape[1:]) for a, _ in pair.factors()] == [(1, 6), (2, 6), (2, 6)]

    def loss(model: nn.Module, step: int) -> Tensor:
        x, y = normal(6, 9, seed=step % 7), normal(5, 9, seed=50 + step % 7)
        target = torch.sin(3 * normal(3, 9, 9, seed=100 + step % 7))
        return (model(x.to(model.q), y.to(model.q)) - target.to(model.q)).square().mean()

    return model, [pair], loss


def frozen_biases() -> Start:
    model, found, loss = plain()
    model.get_parameter("attention.in_proj_bias").requires_grad_(False)
    return model, found, loss


class Units(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(normal(9, 1, 6, seed=1)), nn.Parameter(0.5 * normal(9, 1, 5, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        return self.down[:, 0].t() @ torch.relu(self.up[:, 0] @ x)


def units() -> Start:
    model = Units()
    plain = Pair.of(model.up, model.down)

    def loss(model: nn.Module, step: int) -> Tensor:
        x, y = normal(6, 12, seed=step % 7), normal(5, 12, seed=50 + step % 7)
        return (model(x) - y).square().mean()

    return model, [Pair("units", plain.a, plain.b, positive=True)], loss


STARTS: dict[str, Callable[[], Start]] = {
    "attention": plain,
    "attention, frozen biases": frozen_biases,
    "units": units,
    "grouped, rotary": llama,
    "partly rotary": neox,
    "repeated frequencies": repeated,
    "adapter, B = 0": lambda: lora(True),
    "adapter": lambda: lora(False),
}


# --- optimizers -------------------------------------------------------------------------------------------------


def adam(params: Iterable[Any], found: list[Pair]) -> torch.optim.Optimizer:
    return QuotientAdam(params, lr=3e-3, weight_decay=0.1, pairs=found, unit="product")


def sgd(params: Iterable[Any], found: list[Pair]) -> torch.optim.Optimizer:
    return QuotientSGD(params, 2e-2, momentum=0.9, nesterov=True, weight_decay=1e-2, pairs=found, unit="product")


def plain_sgd(params: Iterable[Any], found: list[Pair]) -> torch.optim.Optimizer:
    return QuotientSGD(params, lr=5e-2, pairs=found, unit="product")


def adam_of_factors(params: Iterable[Any], found: list[Pair]) -> torch.optim.Optimizer:
    return QuotientAdam(params, lr=3e-3, weight_decay=0.1, pairs=found)


def sgd_of_factors(params: Iterable[Any], found: list[Pair]) -> torch.optim.Optimizer:
    return QuotientSGD(params, 2e-2, momentum=0.9, nesterov=True, weight_decay=1e-2, pairs=found)


def torch_adam(params: Iterable[Any], found: list[Pair]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1)


def torch_sgd(params: Iterable[Any], found: list[Pair]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=2e-2, momentum=0.9, nesterov=True, weight_decay=1e-2)


OURS = {
    "QuotientAdam": adam,
    "QuotientSGD": sgd,
    "QuotientSGD without momentum": plain_sgd,
    "QuotientAdam, unit factor": adam_of_factors,
    "QuotientSGD, unit factor": sgd_of_factors,
}
OTHERS = {"AdamW": torch_adam, "SGD": torch_sgd}


def path(start: Start, make: Make, condition: float | None = None, steps: int = STEPS, dtype: Any = F64) -> Tensor:
    """Losses along a path from a start, moved to other coordinates before; a warm-up from lr 0 and a decay."""
    model, found, loss_of = copy.deepcopy(start)
    if condition is not None:
        scramble_(found, rng(7), condition)
    model.to(dtype)
    optimizer = make([p for p in model.parameters() if p.requires_grad], found)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 10, 1.0) * (1 - step / (2 * steps)))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        rate.step()
        losses.append(loss.detach())
    return torch.stack(losses).double()


def apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max())


@cache
def straight(name: str, optimizer: str, steps: int, dtype: Any) -> tuple[Start, Tensor]:
    start = STARTS[name]()
    return start, path(start, {**OURS, **OTHERS}[optimizer], steps=steps, dtype=dtype)


def differences(name: str, optimizer: str, conditions: Iterable[float], steps: int = STEPS, dtype: Any = F64) -> list:
    """Largest difference along the path, for each condition."""
    start, first = straight(name, optimizer, steps, dtype)
    make = {**OURS, **OTHERS}[optimizer]
    found = [apart(first, path(start, make, condition, steps, dtype)) for condition in conditions]
    print(f"{name}, {optimizer}, {dtype}: losses {first[0]:.3f} to {first[-1]:.3f}, differences {found}")
    assert float(first[-1]) < 0.9 * float(first[0])  # it learns
    return found


CASES = [(name, optimizer) for name in STARTS for optimizer in ("QuotientAdam", "QuotientSGD")]
CASES += [
    (name, f"{optimizer}, unit factor")
    for name in ("attention", "grouped, rotary", "repeated frequencies", "adapter, B = 0")
    for optimizer in ("QuotientAdam", "QuotientSGD")
]


@pytest.mark.parametrize(("name", "optimizer"), [*CASES, ("grouped, rotary", "QuotientSGD without momentum")])
def test_path_does_not_depend_on_coordinates(name: str, optimizer: str) -> None:
    """float64, from coordinates moved by elements of condition 10 and 100."""
    assert max(differences(name, optimizer, (10.0, 100.0))) < 1e-10


# SGD diverges from moved coordinates of the scores with repeated frequencies: infinitely far.
@pytest.mark.parametrize(
    ("name", "optimizer"), [(n, o) for n in STARTS for o in OTHERS if (n, o) != ("repeated frequencies", "SGD")]
)
def test_torch_optimizers_take_other_paths(name: str, optimizer: str) -> None:
    """Negative control: the same data, lengths and starts."""
    assert min(differences(name, optimizer, (10.0,), 100)) > 1e-2


@pytest.mark.parametrize(
    ("name", "optimizer", "bound"),
    [
        ("grouped, rotary", "QuotientAdam", 1e-4),
        ("grouped, rotary", "QuotientSGD", 1e-4),
        ("adapter, B = 0", "QuotientAdam", 1e-4),
        ("adapter, B = 0", "QuotientSGD", 3e-4),
        # Gradients of key biases are zero in exact arithmetic, and Adam makes steps of their rounding. Without: 5e-6.
        ("attention", "QuotientAdam", 1e-2),
    ],
)
def test_path_in_float32(name: str, optimizer: str, bound: float) -> None:
    assert max(differences(name, optimizer, (10.0, 100.0), dtype=torch.float32)) < bound


# --- one pair by itself: frozen parts, missing gradients, factors without full rank -----------------------------


def poor(x: Tensor, heads: slice = slice(None)) -> Tensor:
    """Without full rank: the last row is a mixture of two others."""
    x = x.clone()
    x[heads, -1] = 0.7 * x[heads, 0] - 0.4 * x[heads, 1]
    return x


A, B = 0.6 * normal(3, 3, 5), 0.6 * normal(3, 3, 7, seed=1)
FULL = {
    "full rank": (A, B),
    "rank 1": (A[:, :1], B[:, :1]),
    "one head": (A[:1], B[:1]),
    "B = 0": (A, 0 * B),
    "A = 0": (0 * A, B),
}
SQUARE = (torch.eye(5, dtype=F64) + 0.1 * normal(3, 5, 5), torch.eye(5, dtype=F64) + 0.1 * normal(3, 5, 5, seed=1))
POOR = {
    "B without full rank": (A, poor(B)),
    "A without full rank": (poor(A), B),
    "one head of A without full rank": (poor(A, slice(0, 1)), B),
    "rank above the columns of A": (normal(3, 6, 5), normal(3, 6, 7, seed=1)),
}
LOST = {
    "neither of full rank": (poor(A), poor(B)),
    "rank above all columns": (normal(3, 8, 5), normal(3, 8, 7, seed=1)),
    "both zero": (0 * A, 0 * B),
}


def alone(
    factors: tuple[Tensor, Tensor],
    optimizer: str,
    condition: float | None = None,
    *,
    frozen: str = "",
    missing: bool = False,
    warm: bool = True,
    dtype: Any = F64,
    scale: float = 1.0,
    lr: float | None = None,
    steps: int = 100,
) -> Tensor:
    """Losses along a path of one pair: regression on tanh(Gx)."""
    a, b = (nn.Parameter(x.clone()) for x in factors)
    pair = Pair.of(a, b)
    if condition is not None:
        scramble_([pair], rng(7), condition)
    for p, name in ((a, "a"), (b, "b")):
        p.data = p.data.to(dtype)
        p.requires_grad_(name != frozen)
    made = {**OURS, **OTHERS}[optimizer]([a, b], [pair])
    made.param_groups[0]["lr"] = made.param_groups[0]["lr"] if lr is None else lr
    rate = torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(step / 10, 1.0) if warm else 1.0)
    losses = []
    for step in range(steps):
        made.zero_grad()
        x, y = normal(a.shape[-1], 6, seed=100 + step % 5), normal(len(a), b.shape[-1], 6, seed=200 + step % 5)
        loss = (torch.tanh(b.mT @ (a @ x.to(dtype))) - y.to(dtype)).square().mean()
        (scale * loss).backward()
        if missing and step % 3 == 0:
            (a if step % 2 else b).grad = None
        made.step()
        rate.step()
        losses.append(loss.detach())
    assert bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())
    return torch.stack(losses).double()


def spread(factors: tuple[Tensor, Tensor], optimizer: str, **options: Any) -> float:
    first = alone(factors, optimizer, **options)
    return max(apart(first, alone(factors, optimizer, condition, **options)) for condition in (10.0, 100.0))


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("optimizer", ["QuotientAdam", "QuotientSGD"])
@pytest.mark.parametrize("options", [{}, {"frozen": "a"}, {"frozen": "b"}, {"missing": True}], ids=str)
def test_path_of_one_pair(name: str, optimizer: str, options: dict[str, Any]) -> None:
    """Also with one factor frozen, which moves with the gauge all the same, and with gradients that come and go."""
    assert spread(FULL[name], optimizer, **options) < 1e-10
    assert optimizer != "QuotientAdam" or spread(FULL[name], f"{optimizer}, unit factor", **options) < 1e-10
    still = options.get("frozen") == {"B = 0": "b", "A = 0": "a"}.get(name, "none")
    losses = alone(FULL[name], optimizer, **options)
    assert (float(losses[-5:].mean()) < 0.97 * float(losses[:5].mean())) != still


@pytest.mark.parametrize("optimizer", ["QuotientAdam", "QuotientSGD"])
def test_path_of_square_factors(optimizer: str) -> None:
    """pymanopt#34: r = m = n."""
    assert spread(SQUARE, optimizer, lr=1e-3, steps=60) < 1e-10


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("options", [{}, {"frozen": "b"}], ids=str)
def test_path_of_one_pair_under_adamw(name: str, options: dict[str, Any]) -> None:
    """Negative control. A gradient that is always zero moves nothing."""
    still = (name, options.get("frozen")) == ("B = 0", "b")
    assert (spread(FULL[name], "AdamW", **options) > 1e-3) != still


@pytest.mark.parametrize("name", POOR)
@pytest.mark.parametrize(
    ("optimizer", "bound"), [("QuotientAdam", 1e-9), ("QuotientSGD", 1e-7), ("QuotientSGD without momentum", 1e-8)]
)
def test_path_where_one_factor_has_full_rank(name: str, optimizer: str, bound: float) -> None:
    assert spread(POOR[name], optimizer, warm=False) < bound
    if optimizer == "QuotientAdam":
        assert spread(POOR[name], "AdamW", warm=False) > 1e-3


@pytest.mark.parametrize("name", POOR)
@pytest.mark.parametrize("frozen", ["a", "b"])
@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("QuotientAdam", F64), ("QuotientAdam", torch.float32), ("QuotientSGD", F64)]
)
def test_frozen_factors_without_full_rank(name: str, frozen: str, optimizer: str, dtype: torch.dtype) -> None:
    """The trained factor has directions that the product does not show: their gradients are rounding, and Adam would
    make steps of it."""
    got = spread(POOR[name], optimizer, frozen=frozen, dtype=dtype)
    assert got < (1e-6 if dtype == F64 else 2e-2)


def test_path_does_depend_where_neither_factor_has_full_rank() -> None:
    """As documented: elements of the group fix such a point, so no step is free of the gauge."""
    assert spread(LOST["neither of full rank"], "QuotientAdam") > 1e-5


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("optimizer", ["QuotientAdam", "QuotientSGD", "QuotientSGD without momentum"])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_factors_of_which_none_has_full_rank_are_trained_all_the_same(
    name: str, optimizer: str, dtype: torch.dtype
) -> None:
    losses = alone(LOST[name], optimizer, dtype=dtype)
    if name == "both zero":  # a saddle, for every optimizer
        assert apart(losses, alone(LOST[name], "AdamW", dtype=dtype)) == 0
    else:
        assert float(losses[-5:].mean()) < 0.99 * float(losses[:5].mean())


@pytest.mark.parametrize(
    ("optimizer", "dtype", "decades"),
    [
        ("QuotientAdam", F64, 6),
        ("QuotientAdam", torch.float32, 6),
        ("QuotientSGD", F64, 6),
        ("QuotientSGD", torch.float32, 3),
    ],
)
@pytest.mark.parametrize("which", [0, 1])
def test_singular_values_over_decades(optimizer: str, dtype: torch.dtype, decades: int, which: int) -> None:
    factors = [A, B]
    u, s, vh = torch.linalg.svd(factors[which], full_matrices=False)
    factors[which] = (u * torch.logspace(0, -decades, s.shape[-1], dtype=F64)) @ vh
    losses = alone((factors[0], factors[1]), optimizer, dtype=dtype, warm=False, steps=200)
    assert float(losses[-5:].mean()) < 0.8 * float(losses[:5].mean())


@pytest.mark.parametrize("optimizer", ["QuotientAdam", "QuotientSGD"])
def test_gradients_that_are_almost_nothing(optimizer: str) -> None:
    """1e-30 of a gradient: next to nothing moves, and nothing breaks."""
    losses = alone((A, B), optimizer, scale=1e-30, steps=20)
    assert apart(losses[:5], losses[5:10]) < 0.02  # of weight decay alone
    alone((A, 0 * B), optimizer, scale=1e-30, steps=20)


@pytest.mark.parametrize("optimizer", ["QuotientAdam", "QuotientSGD"])
@pytest.mark.parametrize("factors", [(A, B), (A, 0 * B)], ids=["full", "zero"])
def test_huge_rates_stay_finite(optimizer: str, factors: tuple[Tensor, Tensor]) -> None:
    alone(factors, optimizer, lr=50.0 if optimizer == "QuotientAdam" else 5.0, steps=10, warm=False)


# --- adapters from B = 0 ----------------------------------------------------------------------------------------


def adapter(optimizer: str, lr: float, warm_up: int, dtype: torch.dtype, low: bool, ill: bool) -> tuple[float, float]:
    """Mean of the last 20 losses of 300, and the largest of all: a layer learns a change of another one."""
    a, b = nn.Parameter((0.2 * normal(4, 24)).to(dtype)), nn.Parameter(torch.zeros(4, 20, dtype=dtype))
    base = (0.2 * normal(20, 24, seed=5)).to(dtype)
    change = normal(20, 1, seed=8) @ normal(1, 24, seed=9) if low else normal(20, 24, seed=8)
    scale = torch.logspace(0, -3 if ill else 0, 24, dtype=dtype)[:, None]
    kind = {"AdamW": torch.optim.AdamW, "QuotientAdam": QuotientAdam, "QuotientSGD": QuotientSGD}[optimizer]
    options = {"pairs": [Pair.of(a, b)], "unit": "product"} if optimizer.startswith("Quotient") else {}
    made = kind([a, b], lr=lr, **options)  # type: ignore[arg-type]
    rate = torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(step / warm_up, 1.0) if warm_up else 1.0)
    losses = []
    for step in range(300):
        x = scale * normal(24, 1 if low else 8, seed=100 + step).to(dtype)
        made.zero_grad()
        want = torch.tanh((base + 0.06 * change.to(dtype)) @ x)
        loss = (torch.tanh(base @ x + b.mT @ (a @ x)) - want).square().mean()
        loss.backward()
        made.step()
        rate.step()
        losses.append(float(loss.detach()))
    return sum(losses[-20:]) / 20, max(losses)


@pytest.mark.parametrize(("warm_up", "dtype"), [(30, torch.float32), (300, F64)])
@pytest.mark.parametrize("low", [False, True], ids=["", "gradients of rank 1"])
@pytest.mark.parametrize("ill", [False, True], ids=["", "ill-conditioned"])
def test_adapters_do_not_explode(warm_up: int, low: bool, ill: bool, dtype: torch.dtype) -> None:
    last, worst = adapter("AdamW", 3e-3, warm_up, dtype, low, ill)
    for optimizer, lr in (("QuotientAdam", 3e-3), ("QuotientSGD", 0.3)):
        got, top = adapter(optimizer, lr, warm_up, dtype, low, ill)
        assert got < 2 * last, optimizer
        assert top < 1.5 * worst, optimizer
