"""Parts that several families share: projections split into heads, norms, activations, untied heads."""

from __future__ import annotations

from typing import Any, Literal

from gaugekit.models.source import Source
from gaugekit.models.spec import MLP, Attention, Head, Linear, Norm, Table
from gaugekit.models.view import View

# Degree of homogeneity: act(a x) = a^degree act(x) for a > 0. None: no such law.
ACTIVATIONS: dict[str, int | None] = {
    "gelu": None,
    "gelu_10": None,
    "gelu_accurate": None,
    "gelu_fast": None,
    "gelu_new": None,
    "gelu_python": None,
    "gelu_pytorch_tanh": None,
    "leaky_relu": 1,
    "mish": None,
    "quick_gelu": None,
    "relu": 1,
    "relu2": 2,
    "relu6": None,
    "sigmoid": None,
    "silu": None,
    "swish": None,
    "tanh": None,
}


def activation(t: Source, field: str = "hidden_act") -> str:
    """The activation named by a config field; an unknown one is refused, since its symmetries are unknown."""
    name = getattr(t.config, field)
    if name not in ACTIVATIONS:
        t.refuse(field, "its homogeneity is not known")
    return name


def split(linear: Linear, heads: int) -> Linear:
    """(heads · k, ...) as (heads, k, ...), for weight and bias."""

    def seen(view: View) -> View:
        return view.unflatten(0, (heads, view.shape[0] // heads))

    return Linear(seen(linear.weight), None if linear.bias is None else seen(linear.bias))


def rows(linear: Linear, start: int, length: int) -> Linear:
    """A stretch of the rows of a fused projection."""
    bias = None if linear.bias is None else linear.bias.narrow(0, start, length)
    return Linear(linear.weight.narrow(0, start, length), bias)


def attention(q: Linear, k: Linear, v: Linear, o: Linear, heads: int, kv_heads: int, **extra: Any) -> Attention:
    """Attention from projections (heads · k, d) and an output writer (heads · k, d)."""
    return Attention(
        split(q, heads),
        split(k, kv_heads),
        split(v, kv_heads),
        Linear(o.weight.unflatten(0, (heads, o.weight.shape[0] // heads)), o.bias),
        **extra,
    )


def fused_by_head(fused: Linear, o: Linear, heads: int, **extra: Any) -> Attention:
    """Attention from one projection whose rows run head by head, each head's q, k and v together."""
    head_dim = fused.weight.shape[0] // (3 * heads)

    def part(index: int) -> Linear:
        def seen(view: View) -> View:
            return view.unflatten(0, (heads, 3, head_dim)).select(1, index)

        return Linear(seen(fused.weight), None if fused.bias is None else seen(fused.bias))

    return Attention(part(0), part(1), part(2), Linear(o.weight.unflatten(0, (heads, head_dim)), o.bias), **extra)


def norm(
    t: Source, name: str, kind: Literal["layer", "rms"], width: int, eps: float, bias: bool, plus_one: bool = False
) -> Norm:
    """A norm on disk; `plus_one` where the file stores w and the model multiplies by 1 + w."""
    weight = t(f"{name}.weight", width)
    if plus_one and not (t.layout is not None and t.layout.norms_complete):
        weight = weight.plus(1.0)
    return Norm(kind, weight, t(f"{name}.bias", width) if bias else None, eps, name)


def gated_mlp(t: Source, name: str, width: int, hidden: int, act: str, bias: bool = False) -> MLP:
    """The gate_proj, up_proj, down_proj layout of the Llama lineage."""
    return MLP(
        up=t.linear(f"{name}.up_proj", hidden, width, bias),
        gate=t.linear(f"{name}.gate_proj", hidden, width, bias),
        down=t.writer(f"{name}.down_proj", width, hidden, bias),
        activation=act,
    )


def plain_mlp(t: Source, up: str, down: str, width: int, hidden: int, act: str, bias: bool = True) -> MLP:
    """Two Linears with an activation between them."""
    return MLP(t.linear(up, hidden, width, bias), t.writer(down, width, hidden, bias), act)


def language_head(
    t: Source, tokens: View, name: str = "lm_head", bias: bool = False, softcap: bool = False
) -> Head | None:
    """The unembedding: tied to the token table where the config says so, absent in a bare base model."""
    vocabulary, width = tokens.shape
    if t.config.tie_word_embeddings:
        t.tie(f"{name}.weight", tokens)
        return Head(Linear(tokens, t(f"{name}.bias", vocabulary) if bias else None), True, softcap)
    if not t.has(f"{name}.weight"):
        return None
    return Head(t.linear(name, vocabulary, width, bias), False, softcap)


def table(t: Source, name: str, rows: View, dead_rows: tuple[int, ...], reason: str) -> Table:
    """An embedding table of which some rows are never read."""
    for row in dead_rows:
        t.unused(rows.narrow(0, row, 1), reason)
    return Table(name, rows, dead_rows)
