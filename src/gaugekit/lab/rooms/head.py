"""Gauge of a head: the bases in which one small attention head is written, and what optimizers make of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gaugekit.lab.room import Choice, Number, Room, State
from gaugekit.lab.rooms.turning import turning
from gaugekit.models.spec import Attention, Linear
from gaugekit.models.view import View
from gaugekit.optim.pairs import Pair
from gaugekit.optim.quotient import QuotientSGD
from gaugekit.symmetry.heads import QueryKey, ValueOutput

__all__ = ["HEAD"]

WIDTH, RANK, TOKENS = 3, 2, 3
NAMES = ("q", "k", "v", "o")  # W_Q, W_K, W_V (RANK, WIDTH), and W_O in rows, (RANK, WIDTH) too
OPTIMIZERS = ("sgd", "adam", "quotient")
Weights = Mapping[str, Tensor]


@cache
def fixed() -> dict[str, Tensor]:
    """Weights, inputs x and targets (TOKENS, WIDTH), drawn once."""
    generator = torch.Generator().manual_seed(5)

    def drawn(rows: int, scale: float) -> Tensor:
        return (scale * torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)).mul(100).round() / 100

    return {name: drawn(RANK, 0.9) for name in NAMES} | {"x": drawn(TOKENS, 1.0), "target": drawn(TOKENS, 1.0)}


def moved(weights: Weights, s: Tensor) -> Weights:
    """Both circuits of the head moved by S (RANK, RANK): W_V → S W_V, W_O → W_O S⁻¹; W_Q → S W_Q, W_K → S⁻ᵀ W_K."""
    q, k, v, o = (Linear(View(name, (1, RANK, WIDTH))) for name in NAMES)
    attention = Attention(q, k, v, o)
    tensors = {name: weight.unsqueeze(0) for name, weight in weights.items()}
    for symmetry in (ValueOutput("head", attention), QueryKey("head", attention)):
        tensors |= symmetry.act(tensors, s.unsqueeze(0))
    return {name: tensor.squeeze(0) for name, tensor in tensors.items()}


def forward(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """(attention (n, n), output (n, d)), each token seeing those before it and itself."""
    scores = (x @ weights["q"].mT) @ (x @ weights["k"].mT).mT / math.sqrt(RANK)
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    attention = torch.softmax(scores.masked_fill(later, -math.inf), -1)
    return attention, attention @ (x @ weights["v"].mT) @ weights["o"]


def loss_of(weights: Weights, given: Weights) -> Tensor:
    return (forward(weights, given["x"])[1] - given["target"]).square().sum() / (2 * TOKENS)


def products(weights: Weights) -> tuple[Tensor, Tensor]:
    """G_QK = W_Qᵀ W_K and G_VO = W_O W_V, (d, d) each."""
    return weights["q"].mT @ weights["k"], weights["o"].mT @ weights["v"]


def stepped(weights: Weights, given: Weights, optimizer: str, lr: float) -> Weights:
    """The weights behind one step."""
    parameters = {name: torch.nn.Parameter(weights[name].clone()) for name in NAMES}
    every: Any = list(parameters.values())
    if optimizer == "quotient":
        pairs = [Pair.of(parameters["q"], parameters["k"], "qk"), Pair.of(parameters["v"], parameters["o"], "vo")]
        made: torch.optim.Optimizer = QuotientSGD(every, lr=lr, pairs=pairs)
    else:
        made = torch.optim.SGD(every, lr=lr) if optimizer == "sgd" else torch.optim.Adam(every, lr=lr)
    loss_of(parameters, given).backward()
    made.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def element(state: State) -> Tensor:
    """S = R(θ) ((s, h), (0, t)): S e₁ has direction θ and length s; `mirror` turns S e₂ round."""
    sign = -1.0 if state["mirror"] == "on" else 1.0
    upper = torch.tensor([[state["first"], sign * state["shear"]], [0.0, sign * state["second"]]], dtype=torch.float64)
    return turning(state["theta"]) @ upper


def numbers(state: State) -> dict[str, Any]:
    given = fixed()
    start = {name: given[name] for name in NAMES}
    s = element(state)
    here, before = moved(start, s), products(start)
    attention, output = forward(here, given["x"])
    g_qk, g_vo = products(here)
    found: dict[str, Any] = {"s": s, **here, "g_qk": g_qk, "g_vo": g_vo}
    found |= {"attention": attention, "output": output, "loss": loss_of(here, given)}
    for optimizer in OPTIMIZERS:
        behind, first = (stepped(each, given, optimizer, state["lr"]) for each in (here, start))
        away = [x - y for x, y in zip(products(behind), products(first), strict=True)]
        step = [x - y for x, y in zip(products(first), before, strict=True)]
        found[f"{optimizer}_first"] = loss_of(first, given)
        found[f"{optimizer}_here"] = loss_of(behind, given)
        found[f"{optimizer}_apart"] = torch.cat(away).norm() / torch.cat(step).norm()
    return found


HEAD = Room(
    "head",
    {
        "theta": Number(25.0, -180.0, 180.0),
        "first": Number(1.4, 0.25, 3.0),
        "shear": Number(0.5, -2.0, 2.0),
        "second": Number(0.8, 0.25, 3.0),
        "mirror": Choice("off", ("off", "on")),
        "lr": Number(0.1, 0.01, 0.5),
    },
    numbers,
    fixed(),
)
