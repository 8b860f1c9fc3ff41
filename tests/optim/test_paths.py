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


STARTS: dict[str, Callable[[], Start]] = {
    "attention": plain,
    "grouped, rotary": llama,
    "partly rotary": neox,
    "repeated frequencies": repeated,
    "adapter, B = 0": lambda: lora(True),
    "adapter": lambda: lora(False),
}


# --- optimizers -------------------------------------------------------------------------------------------------


def adam(params: Iterable[Any], found: list[Pair]) -> torch.optim.Optimizer:
    return QuotientAdam(params, lr=3e-3, weight_decay=0.1, pairs=found)


def sgd(params: Iterable[Any], found: list[Pair]) -> torch.optim.Optimizer:
    return QuotientSGD(params, lr=2e-2, momentum=0.9, nesterov=True, weight_decay=1e-2, pairs=found)


def plain_sgd(params: Iterable[Any], found: list[Pair]) -> torch.optim.Optimizer:
    return QuotientSGD(params, lr=5e-2, pairs=found)


def torch_adam(params: Iterable[Any], found: list[Pair]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1)


def torch_sgd(params: Iterable[Any], found: list[Pair]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=2e-2, momentum=0.9, nesterov=True, weight_decay=1e-2)


OURS = {"QuotientAdam": adam, "QuotientSGD": sgd, "QuotientSGD without momentum": plain_sgd}
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


@pytest.mark.parametrize(("name", "optimizer"), [*CASES, ("grouped, rotary", "QuotientSGD without momentum")])
def test_path_does_not_depend_on_coordinates(name: str, optimizer: str) -> None:
    """float64, from coordinates moved by elements of condition 10 and 100."""
    assert max(differences(name, optimizer, (10.0, 100.0))) < 1e-10


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("optimizer", OTHERS)
def test_torch_optimizers_take_other_paths(name: str, optimizer: str) -> None:
    """Negative control: the same data, lengths and starts."""
    if (name, optimizer) == ("repeated frequencies", "SGD"):
        pytest.skip("diverges from moved coordinates: infinitely far")
    assert min(differences(name, optimizer, (10.0,), 100)) > 1e-2


@pytest.mark.parametrize(
    ("name", "optimizer", "bound"),
    [
        ("grouped, rotary", "QuotientAdam", 1e-4),
        ("grouped, rotary", "QuotientSGD", 1e-4),
        ("adapter, B = 0", "QuotientAdam", 1e-4),
        ("adapter, B = 0", "QuotientSGD", 3e-4),
        # Gradients of key biases are zero in exact arithmetic, and Adam makes steps of their rounding.
        ("attention", "QuotientAdam", 1e-2),
    ],
)
def test_path_in_float32(name: str, optimizer: str, bound: float) -> None:
    assert max(differences(name, optimizer, (10.0, 100.0), dtype=torch.float32)) < bound
