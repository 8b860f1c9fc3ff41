"""Who writes each residual stream, which norms read it, and which linear maps read each norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gaugekit.models.spec import MLP, Attention, Branch, Linear, MoE, Norm, Spec, Stream
from gaugekit.models.view import View
from gaugekit.symmetry.base import STATES, Observable
from gaugekit.symmetry.readers import Reader


def output(body: Attention | MLP | MoE) -> Iterator[Linear]:
    """The linear maps by which a branch writes."""
    if isinstance(body, Attention):
        yield body.o
    elif isinstance(body, MLP):
        yield body.down
    else:
        yield from (expert.down for expert in body.experts)


def output_bias(branch: Branch) -> View | None:
    """The bias (d,) added once to what a branch writes."""
    return None if isinstance(branch.body, MoE) else next(output(branch.body)).bias


def inputs(body: Attention | MLP | MoE) -> Iterator[Linear]:
    """The linear maps by which a branch reads its own stream."""
    if isinstance(body, Attention):
        yield from (body.q,) if body.memory else (body.q, body.k, body.v)
    elif isinstance(body, MLP):
        yield from (body.up,) if body.gate is None else (body.gate, body.up)
    else:
        yield body.router
        for expert in body.experts:
            yield from inputs(expert)


@dataclass
class Wiring:
    """One stream: every norm on it with its readers, in order, and what runs where."""

    stream: Stream
    place: str
    readers: dict[Norm, list[Reader]] = field(default_factory=dict)
    raw_readers: list[Reader] = field(default_factory=list)
    residual: dict[Norm, View | None] = field(default_factory=dict)  # post-norms: bias of the branch added next
    sources: dict[tuple[int, int], Norm | None] = field(default_factory=dict)  # (layer, branch) → norm it reads

    def read(self, linear: Linear, norm: Norm | None) -> None:
        reader = Reader(linear, norm)
        if norm is None:
            self.raw_readers.append(reader)
        else:
            self.readers.setdefault(norm, []).append(reader)

    def layer_of(self, norm: Norm) -> str:
        """The layer a norm stands in, as it is reported; "" for the first and last norm of the stream."""
        for layer, block in enumerate(self.stream.blocks):
            if any(norm in (b.norm_in, b.norm_out, b.norm_sum) for b in block.branches):
                return self.layer_name(layer)
        return ""

    def layer_name(self, layer: int) -> str:
        return f"{self.place}layer {layer}"

    @property
    def norms(self) -> list[Norm]:
        """Every norm on the stream, in order."""
        found = [] if self.stream.embed_norm is None else [self.stream.embed_norm]
        for block in self.stream.blocks:
            for branch in block.branches:
                found += [n for n in (branch.norm_in, branch.norm_out, branch.norm_sum) if n is not None]
        if self.stream.final_norm is not None:
            found.append(self.stream.final_norm)
        return list(dict.fromkeys(found))

    @property
    def mean_unseen(self) -> bool:
        """Whether only LayerNorms read the running sum, so that its mean is lost."""
        branches = [branch for block in self.stream.blocks for branch in block.branches]
        readers = [branch.norm_in for branch in branches] + [self.stream.final_norm]
        return all(norm is not None and norm.kind == "layer" for norm in readers)

    def loses_mean(self, branch: Branch) -> bool:
        """Whether the mean of what a branch writes is lost: by the norm behind it, or by all readers of the stream."""
        norm = branch.norm_out or branch.norm_sum
        return norm.kind == "layer" if norm is not None else self.mean_unseen


def wire(spec: Spec, observable: Observable) -> dict[str, Wiring]:
    """The wiring of every stream, by name. The head is a reader unless hidden states are observed."""
    wirings = {}
    for stream in spec.streams:
        place = "" if len(spec.streams) == 1 else f"{stream.name} "
        wirings[stream.name] = _wire(Wiring(stream, place), observable)
    for _, _, attention, _ in spec.attentions():
        if attention.memory is not None:
            memory = wirings[attention.memory]
            for linear in (attention.k, attention.v):
                memory.read(linear, memory.stream.final_norm)
    return wirings


def _wire(wiring: Wiring, observable: Observable) -> Wiring:
    stream = wiring.stream
    last = stream.embed_norm
    for layer, block in enumerate(stream.blocks):
        for number, branch in enumerate(block.branches):
            source = branch.norm_in if branch.norm_sum is None else last
            wiring.sources[layer, number] = source
            for linear in inputs(branch.body):
                wiring.read(linear, source)
            if branch.norm_sum is not None:
                if last is None or block.parallel or branch.scale is not None:
                    raise NotImplementedError("post-norm blocks are sequential, unscaled, and follow a norm")
                wiring.residual[last] = output_bias(branch)
                last = branch.norm_sum
    if stream.head is not None and observable not in STATES:
        wiring.read(stream.head.linear, stream.final_norm)
    return wiring
