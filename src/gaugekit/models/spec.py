"""What a transformer is made of and where each weight lies, as plain frozen data.

Shapes: d stream width, h query heads, g key/value heads, k head dimension, f hidden units, V vocabulary.
Every weight that touches a residual stream is seen with the stream axis last: readers (W_Q, W_K, W_V, up, gate,
router, head) as (..., d), writers (embeddings, W_O, down) as (..., d) too. A norm's weight and bias are (d,).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from gaugekit.models.view import View


@dataclass(frozen=True)
class Linear:
    """y = W x + b. As a reader W is (rows..., d) and b (rows...); as a writer W is (columns..., d) and b (d,)."""

    weight: View
    bias: View | None = None


@dataclass(frozen=True)
class Norm:
    """LayerNorm ("layer": mean removed) or RMSNorm ("rms") over the last axis, with weight γ and bias β."""

    kind: Literal["layer", "rms"]
    weight: View
    bias: View | None
    eps: float
    where: str


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: dimension `pairs[i]` of a head turn by position × `frequencies[i]`; the rest stand still."""

    pairs: tuple[tuple[int, int], ...]
    frequencies: tuple[float, ...]
    scheme: str

    def blocks(self, head_dim: int) -> tuple[tuple[tuple[tuple[int, int], ...], ...], tuple[int, ...]]:
        """Pairs grouped by equal non-zero frequency, and the dimensions that never turn."""
        groups: list[tuple[float, list[tuple[int, int]]]] = []
        still = sorted(set(range(head_dim)) - {i for pair in self.pairs for i in pair})
        for pair, frequency in zip(self.pairs, self.frequencies, strict=True):
            if frequency == 0.0:
                still.extend(pair)
                continue
            # Frequencies are computed in float32 by every implementation: nearer than that is equal.
            twin = next((g for f, g in groups if abs(f - frequency) <= 1e-6 * abs(frequency)), None)
            if twin is None:
                groups.append((frequency, [pair]))
            else:
                twin.append(pair)
        return tuple(tuple(pairs) for _, pairs in groups), tuple(sorted(still))


@dataclass(frozen=True)
class QKNorm:
    """RMSNorm on queries and keys before the rotary turn: weights (heads or 1, k).

    `over` says what one norm averages over: each head alone, or the whole projection (OLMo-2).
    """

    q: View
    k: View
    eps: float
    over: Literal["head", "projection"]


@dataclass(frozen=True)
class Attention:
    """q (h, k, d), k and v (g, k, d_source) with biases (heads, k); o (h, k, d) with bias (d,).

    Query head i reads key/value head i // (h / g). `softcap`: scores pass through a tanh. `distances`: scores
    carry a per-head term that depends on the distance (ALiBi). `memory`: keys and values read that stream.
    """

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    rotary: Rotary | None = None
    qk_norm: QKNorm | None = None
    softcap: bool = False
    distances: bool = False
    memory: str | None = None

    @property
    def heads(self) -> int:
        return self.q.weight.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k.weight.shape[0]

    @property
    def head_dim(self) -> int:
        return self.q.weight.shape[1]


@dataclass(frozen=True)
class MLP:
    """up (f, d), down (f, d), optional gate (f, d): down(act(up x)), or down(act(gate x) ⊙ up x)."""

    up: Linear
    down: Linear
    activation: str
    gate: Linear | None = None


@dataclass(frozen=True)
class MoE:
    """A softmax router (E, d) over experts; the top k run, with their probabilities as weights."""

    router: Linear
    experts: tuple[MLP, ...]


@dataclass(frozen=True)
class Branch:
    """x + scale ⊙ norm_out(body(norm_in(x))), then norm_sum of the sum. Absent norms are identities."""

    body: Attention | MLP | MoE
    norm_in: Norm | None = None
    norm_out: Norm | None = None
    scale: View | None = None
    norm_sum: Norm | None = None


@dataclass(frozen=True)
class Block:
    """One layer: branches in sequence, or in parallel (all read the same x)."""

    branches: tuple[Branch, ...]
    parallel: bool = False


@dataclass(frozen=True)
class Table:
    """Rows that are written to the stream as they are: token, position and type embeddings, a class token, a
    convolution seen as (inputs, d), or its bias seen as (1, d).

    `dead_rows` are never read (padding, positions before the first). `linear` is false where the rows reach the
    stream through a nonlinearity (Whisper's convolutions).
    """

    name: str
    rows: View
    dead_rows: tuple[int, ...] = ()
    linear: bool = True


@dataclass(frozen=True)
class Head:
    """The unembedding (V, d). `tied`: the same tensor as the token table. `softcap`: logits pass through a tanh."""

    linear: Linear
    tied: bool
    softcap: bool = False


@dataclass(frozen=True)
class Stream:
    """A residual stream from its tables to its last norm and head.

    `sums` names pairs of tables of which every token takes one row each and adds them: the tables can trade a
    constant. `embed_norm` acts on the sum of the tables.
    """

    name: str
    tables: tuple[Table, ...]
    blocks: tuple[Block, ...]
    final_norm: Norm | None
    sums: tuple[tuple[str, str], ...] = ()
    embed_norm: Norm | None = None
    head: Head | None = None

    @property
    def width(self) -> int:
        return self.tables[0].rows.shape[-1]


@dataclass(frozen=True)
class Dead:
    """Parameters that no observable of this spec depends on, with the reason."""

    view: View
    reason: str


@dataclass(frozen=True)
class Spec:
    """A whole model. `streams` in the order they run; the last one carries the observable.

    `tensors`: every parameter tensor on disk with its shape, each once. `copies`: (copy, original) names of tied
    tensors that the checkpoint stores twice; the copy is not a parameter.
    """

    family: str
    streams: tuple[Stream, ...]
    tensors: dict[str, tuple[int, ...]]
    dead: tuple[Dead, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()

    def norms(self) -> Iterator[Norm]:
        """Every norm on the streams, each once, in order."""
        seen: dict[Norm, None] = {}
        for stream in self.streams:
            branches = [branch for block in stream.blocks for branch in block.branches]
            found = [stream.embed_norm]
            found += [norm for b in branches for norm in (b.norm_in, b.norm_out, b.norm_sum)]
            seen.update(dict.fromkeys(norm for norm in (*found, stream.final_norm) if norm is not None))
        yield from seen

    @property
    def main(self) -> Stream:
        return self.streams[-1]

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for shape in self.tensors.values())

    def attentions(self) -> Iterator[tuple[str, int, Attention, Branch]]:
        """Every attention with its stream's name and its layer."""
        for stream in self.streams:
            for layer, block in enumerate(stream.blocks):
                for branch in block.branches:
                    if isinstance(branch.body, Attention):
                        yield stream.name, layer, branch.body, branch
