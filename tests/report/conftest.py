"""Reports made by hand: no model is read here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from gaugekit.symmetry import Blocked
from gaugekit.verbs.inspect import DeadRow, HeadRow, InspectReport, LayerRow, NormRow, SymmetryRow


def head(
    layer: int,
    kv_head: int,
    circuit: Literal["qk", "vo"],
    stream: str = "decoder",
    attention: str = "self",
    **change: Any,
) -> HeadRow:
    row = HeadRow(
        stream=stream,
        layer=layer,
        attention=attention,
        kv_head=kv_head,
        circuit=circuit,
        rank=4,
        effective_rank=2.5 + layer,
        stable_rank=1.5 + kv_head,
        spectrum=(8.0, 4.0, 2.0, 1.0),
        balance=0.75,
        balance_relative=0.25,
        degenerate_blocks=(),
    )
    return replace(row, **change)


def heads(layers: int, kv_heads: int, **where: str) -> tuple[HeadRow, ...]:
    places = [(layer, kv_head) for layer in range(layers) for kv_head in range(kv_heads)]
    return tuple(head(*place, circuit, **where) for place in places for circuit in ("qk", "vo"))


def norm(where: str) -> NormRow:
    return NormRow(where, "rms", mean=1.0, std=0.5, smallest=-0.25, largest=2.0, zeros=3)


@pytest.fixture
def report() -> InspectReport:
    """A decoder with everything there is to show, a head of zeros and a degenerate block included."""
    layers = ("layer 0 attention", "layer 1 attention")
    nothing = {"rank": 0, "effective_rank": 0.0, "stable_rank": 0.0, "spectrum": (0.0,) * 4}
    zero = head(1, 1, "qk", **nothing, degenerate_blocks=((0, 4),))
    tied = head(0, 0, "vo", spectrum=(2.0, 1.0, 1.0, 0.5), degenerate_blocks=((1, 2),))
    changed = {(row.layer, row.kv_head, row.circuit): row for row in (zero, tied)}
    return InspectReport(
        model={
            "family": "llama",
            "path": "/models/tiny [bold]llama",
            "format": "safetensors",
            "layers": 2,
            "d_model": 1024,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 4,
            "vocabulary": 49152,
            "tied": False,
            "streams": [{"name": "decoder", "layers": 2, "d_model": 1024}],
        },
        observable="logprobs",
        parameters=134_515_008,
        by_symmetry=(
            SymmetryRow("value-output basis", "(GL(4)^2)^2", 454_000, "exact", layers),
            SymmetryRow("head constant", "R^1040", 1_040, "exact in logprobs", ("lm_head",)),
        ),
        by_layer=(
            LayerRow("layer 0", 227_000, {"value-output basis": 227_000}),
            LayerRow("layer 1", 227_000, {"value-output basis": 227_000}),
            LayerRow("", 1_040, {"head constant": 1_040}),
        ),
        dead=(DeadRow("model.embed_tokens.weight", "padding row", 1_024),),
        discrete=(SymmetryRow("unit order", "S_128^2", 0, "exact", ("layer 0 MLP", "layer 1 MLP")),),
        at_zero_eps=(SymmetryRow("norm input scale", "R+", 1, "exact at eps=0", ("stream",)),),
        blocked=(Blocked("key constant", "rotary positions turn every dimension of the keys", layers),),
        heads=tuple(changed.get((row.layer, row.kv_head, row.circuit), row) for row in heads(2, 2)),
        norms=(*(norm(f"model.layers.{layer}.input_layernorm") for layer in range(2)), norm("model.norm")),
    )


@pytest.fixture
def headers_only(report: InspectReport) -> InspectReport:
    return replace(report, heads=(), norms=())


@pytest.fixture
def two_streams(report: InspectReport) -> InspectReport:
    """As of an encoder-decoder: three kinds of attention."""
    rows = (
        *heads(3, 2, stream="encoder"),
        *heads(2, 2, stream="decoder"),
        *heads(2, 2, stream="decoder", attention="cross"),
    )
    streams = [{"name": "encoder", "layers": 3, "d_model": 1024}, {"name": "decoder", "layers": 2, "d_model": 1024}]
    return replace(report, heads=rows, model=report.model | {"streams": streams})


@pytest.fixture
def hostile(report: InspectReport) -> InspectReport:
    """Names that come from outside and mean harm, to a page and to a terminal."""
    name = "</script><script>alert(1)</script><img src='http://evil.test/x.png' onerror=alert(2)>\"\x1b[31m\n[bold]$x$"
    return replace(
        report,
        model=report.model | {"path": f"/models/{name}", "family": name},
        dead=(DeadRow(name, name, 1),),
        by_symmetry=(SymmetryRow(name, name, 5, "exact", (name, name)),),
        by_layer=(LayerRow(name, 5, {name: 5}),),
        blocked=(Blocked(name, name, (name,)),),
        norms=(norm(name),),
    )
