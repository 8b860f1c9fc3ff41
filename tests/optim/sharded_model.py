"""A small model of every kind of pair, whole or sharded, for test_sharded.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import relu, scaled_dot_product_attention

from gaugekit.optim.finding import find_pairs
from gaugekit.optim.pairs import Factor, Pair, Window

VOCABULARY, WIDTH = 11, 12


class Rotary(nn.Module):
    """Six query heads on three key/value heads of six dimensions, of which four turn, at two frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 6 * heads) for heads in (6, 3, 3))
        self.o = nn.Linear(36, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 6)).transpose(-2, -3) for layer in (self.q, self.k, self.v))
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
        seen = scaled_dot_product_attention(turned(q, angle), turned(k, angle), v, is_causal=True, enable_gqa=True)
        return self.o(seen.transpose(-2, -3).flatten(-2))

    def pairs(self, name: str) -> list[Pair]:
        def grouped(x: Tensor) -> Tensor:
            return x.unflatten(0, (3, 2, 6)).transpose(1, 2)

        def rows(x: Tensor) -> Tensor:
            return x.unflatten(0, (3, 6))

        queries = Factor((Window(self.q.weight, grouped), Window(self.q.bias, lambda x: grouped(x.unsqueeze(-1)))))
        keys = Factor((Window(self.k.weight, rows), Window(self.k.bias, lambda x: rows(x.unsqueeze(-1)))))
        values = Factor((Window(self.v.weight, rows), Window(self.v.bias, lambda x: rows(x.unsqueeze(-1)))))
        outputs = Factor((Window(self.o.weight, lambda x: grouped(x.T)),))
        return [
            Pair(f"{name}.qk", queries, keys, turning=(((0, 2),), ((1, 3),))),
            Pair(f"{name}.vo", values, outputs),
        ]


def turned(x: Tensor, angle: Tensor) -> Tensor:
    real, imaginary, still = x[..., :2], x[..., 2:4], x[..., 4:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos, still), -1)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, one of whose factors is zero at first."""

    def __init__(self, zero: str) -> None:
        super().__init__()
        self.base = nn.Linear(8, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(WIDTH, 2))
        nn.init.zeros_(getattr(self, zero))

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., :8]
        return self.base(x) + x @ self.a.T @ self.b.T

    def pairs(self, name: str) -> list[Pair]:
        b = Factor((Window(self.b, lambda x: x.T.unsqueeze(0)),))
        return [Pair(f"{name}.lora", Factor((Window(self.a, lambda x: x.unsqueeze(0)),)), b)]


class Units(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(relu(self.up(x)))

    def pairs(self, name: str) -> list[Pair]:
        up = (Window(self.up.weight, lambda x: x[:, None]), Window(self.up.bias, lambda x: x[:, None, None]))
        down = Factor((Window(self.down.weight, lambda x: x.T[:, None]),))
        return [Pair(f"{name}.units", Factor(up), down, positive=True)]


class Block(nn.Module):
    def __init__(self, zero: str, *others: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.plain = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.adapted = Adapted(zero)
        self.others = nn.ModuleList(others)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.plain(h, h, h, need_weights=False)[0] + self.adapted(h)
        for other in self.others:
            x = x + other(self.norm(x))
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = Block("b", Rotary(), Units()), Block("a")
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.embedding(tokens))))


def pairs_of(model: nn.Module) -> list[Pair]:
    own = [m.pairs(name) for name, m in model.named_modules() if isinstance(m, Rotary | Adapted | Units)]
    return [*find_pairs(model), *(pair for pairs in own for pair in pairs)]


def made(dtype: torch.dtype, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().to(dtype)


def shard(model: Model, mesh: Any) -> Model:
    for block in (model.first, model.second):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p) for name, p in model.named_parameters()}


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)
