"""The only file with rules: from a `Spec` and an observable to every symmetry, each dimension counted once.

A rule asks who writes a stream, which norms read it, and which linear maps read each norm. Where two symmetries
share a direction, one of them is built without it (`centred`, `sum_free`), so dimensions add up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gaugekit.errors import UnsupportedObservable
from gaugekit.models.parts import ACTIVATIONS
from gaugekit.models.spec import MLP, Attention, Block, Branch, Dead, MoE, Norm, Spec, Stream, Table
from gaugekit.models.view import View
from gaugekit.symmetry.base import STATES, Discrete, Observable, Symmetry, present
from gaugekit.symmetry.constants import KeyConstant, ValueConstant
from gaugekit.symmetry.heads import HeadOrder, QKNormScale, QueryKey, ValueOutput, still_dimensions
from gaugekit.symmetry.norms import LayerScale, NormConstant, NormInputScale, NormScale, ReaderKernel
from gaugekit.symmetry.readers import Reader
from gaugekit.symmetry.shifts import HeadConstant, ParallelBias, TableConstant
from gaugekit.symmetry.stream import Frame, StreamOrder, WriterMean
from gaugekit.symmetry.units import ActivationScale, ExpertOrder, GatedUnitScale, RouterConstant, UnitOrder
from gaugekit.symmetry.wiring import Wiring, output, output_bias, wire


@dataclass(frozen=True)
class Blocked:
    """A symmetry that the architecture would have but for something, and where."""

    symmetry: str
    reason: str
    where: tuple[str, ...]


@dataclass(frozen=True)
class Symmetries:
    """Everything that acts on a model without changing the observable.

    `at_zero_eps` would be exact if the norms' eps were zero, and is counted apart.
    """

    observable: Observable
    continuous: tuple[Symmetry, ...]
    discrete: tuple[Symmetry, ...]
    at_zero_eps: tuple[Symmetry, ...]
    blocked: tuple[Blocked, ...]
    dead: tuple[Dead, ...]

    @property
    def dimension(self) -> int:
        return sum(symmetry.dimension for symmetry in self.continuous)


def observables(spec: Spec) -> tuple[Observable, ...]:
    """What can be observed of this model, the default first."""
    return STATES if spec.main.head is None else ("logprobs", "logits", *STATES)


def derive(spec: Spec, observable: Observable | None = None) -> Symmetries:
    """All symmetries of a model, from shapes and structure alone (generic weights are assumed; V > d).

    Raises `UnsupportedObservable` where the model has no language-model head and one is asked for.
    """
    possible = observables(spec)
    observable = observable or possible[0]
    if observable not in possible:
        raise UnsupportedObservable(
            f"observable {observable} needs a language-model head, and this {spec.family} checkpoint has none: "
            f"use --observable {possible[0]}"
        )
    rules = _Rules(spec, observable)
    for stream in spec.streams:
        if stream.embed_norm is not None and not stream.sums and not rules.tied(stream):
            # Every row could then take up changes of that norm's weight and bias, but only inside a ball.
            raise UnsupportedObservable(
                f"observable {observable} of {spec.family}: a token table that is read only through a norm has "
                "symmetries that are no group of linear maps, and gaugekit does not count them"
            )
        rules.stream(stream)
    dead = list(spec.dead)
    if observable in STATES and spec.main.head is not None:
        head = spec.main.head
        views = present(None if head.tied else head.linear.weight, head.linear.bias)
        dead += [Dead(view, "unembedding, outside the hidden states") for view in views]
    return Symmetries(
        observable,
        tuple(s for s in rules.found if s.dimension > 0),
        tuple(rules.discrete),
        tuple(rules.at_zero_eps),
        tuple(Blocked(name, reason, tuple(where)) for (name, reason), where in rules.blocked.items()),
        tuple(dead),
    )


def spare(size: int, shown_left: int, shown_right: int) -> tuple[int, int]:
    """By how much `size` exceeds what the two factors beside a matrix of GL(size) can show."""
    return max(0, size - shown_left), max(0, size - shown_right)


class _Rules:
    def __init__(self, spec: Spec, observable: Observable) -> None:
        self.spec = spec
        self.observable = observable
        self.found: list[Symmetry] = []
        self.discrete: list[Symmetry] = []
        self.at_zero_eps: list[Symmetry] = []
        self.layer = ""
        self.blocked: dict[tuple[str, str], list[str]] = {}
        self.wirings = wire(spec, observable)

    def add(self, symmetry: Symmetry) -> None:
        """Note a symmetry in the layer that is being looked at."""
        if isinstance(symmetry, Discrete):
            kind = self.discrete
        elif symmetry.exactness == "exact at eps=0":
            kind = self.at_zero_eps
        else:
            kind = self.found
        kind.append(replace(symmetry, layer=self.layer))

    def block(self, symmetry: type[Symmetry], reason: str, where: str) -> None:
        self.blocked.setdefault((symmetry.name, reason), []).append(where)

    def tied(self, stream: Stream) -> bool:
        return self.observable not in STATES and stream.head is not None and stream.head.tied

    def _head_shift_free(self, stream: Stream) -> bool:
        return self.observable == "logprobs" and stream.head is not None and not stream.head.softcap

    # Rules

    def stream(self, stream: Stream) -> None:
        wiring = self.wirings[stream.name]
        for layer, block in enumerate(stream.blocks):
            at = self.layer = wiring.layer_name(layer)
            for number, branch in enumerate(block.branches):
                if isinstance(branch.body, Attention):
                    self._attention(wiring, block, branch, wiring.sources[layer, number], at)
                else:
                    self._units(branch.body, at)
                self._branch(wiring, branch, at)
            self._parallel(wiring, block, at)
        self._norms(wiring)
        self.layer = ""
        self._tables(wiring)
        self._head(wiring)
        self._frame(wiring)
        self._sum_scales(wiring)

    def _attention(self, wiring: Wiring, block: Block, branch: Branch, source: Norm | None, at: str) -> None:
        body = branch.body
        assert isinstance(body, Attention)
        where = f"{at} cross-attention" if body.memory else f"{at} attention"
        own = source
        if body.memory:
            source = self.wirings[body.memory].stream.final_norm
        query, key, value = Reader(body.q, own), Reader(body.k, source), Reader(body.v, source)
        key_constant, value_constant = self._constants(wiring, block, branch, key, value, where)
        out = body.heads // body.kv_heads * (body.o.weight.shape[-1] - wiring.loses_mean(branch))
        shown = value.show(value_constant is not None)
        loose = value_constant is not None and value_constant.sink is None and value_constant.dimension > 0
        self.add(ValueOutput(where, body, spare(body.head_dim, out, shown), value if loose else None))
        if body.qk_norm is None:
            still = len(still_dimensions(body.rotary, body.head_dim))
            many = body.heads // body.kv_heads * query.show(False)
            self.add(QueryKey(where, body, spare(still, key.show(key_constant is not None), many)))
            if body.rotary is not None:
                self.block(QueryKey, "rotary positions leave only what commutes with the turns, not GL(k)", where)
        else:
            self.add(QKNormScale(where, body))
            for linear, what in ((body.q, "queries"), (body.k, "keys")):
                count = linear.weight.shape[0] if body.qk_norm.over == "head" else 1
                grow = present(linear.weight, linear.bias)
                self.add(NormInputScale(f"{where} {what}", grow, count=count))
            self.block(QueryKey, "a norm on queries and keys leaves only reciprocal scales of its weights", where)
        if body.distances:
            self.block(HeadOrder, "heads have their own distance slopes", where)
        elif body.heads > 1:
            self.add(HeadOrder(where, body))

    def _constants(
        self, wiring: Wiring, block: Block, branch: Branch, key: Reader, value: Reader, where: str
    ) -> tuple[KeyConstant | None, ValueConstant | None]:
        """Note the constants of keys and values that are free, and return them."""
        body = branch.body
        assert isinstance(body, Attention)
        key_constant = value_constant = None
        still = still_dimensions(body.rotary, body.head_dim)
        if body.qk_norm is not None:
            self.block(KeyConstant, "keys are normed", where)
        elif body.softcap:
            self.block(KeyConstant, "scores pass through a softcap", where)
        elif not still:
            self.block(KeyConstant, "rotary positions turn every dimension of the keys", where)
        elif not key.shiftable:
            self.block(KeyConstant, "keys have no bias", where)
        else:
            key_constant = KeyConstant(where, body, key)
            self.add(key_constant)
        if value.shiftable:
            value_constant = self._value_constant(wiring, block, branch, value, where)
            self.add(value_constant)
        else:
            self.block(ValueConstant, "values have no bias", where)
        return key_constant, value_constant

    def _value_constant(self, wiring: Wiring, block: Block, branch: Branch, value: Reader, where: str) -> ValueConstant:
        body = branch.body
        assert isinstance(body, Attention)
        sink, scales = body.o.bias, (None, None)
        if sink is None and block.parallel and branch.norm_out is None:
            for other in block.branches:
                if other is not branch and other.norm_out is None and output_bias(other) is not None:
                    sink, scales = output_bias(other), (branch.scale, other.scale)
        if sink is None:
            self.block(ValueConstant, "the output projection has no bias", where)
        return ValueConstant(where, body, value, sink, wiring.loses_mean(branch), scales)

    def _units(self, body: MLP | MoE, at: str) -> None:
        if isinstance(body, MoE):
            self.add(RouterConstant(f"{at} router", body))
            self.add(ExpertOrder(f"{at} experts", body))
            for number, expert in enumerate(body.experts):
                self._mlp(expert, f"{at} expert {number}")
        else:
            self._mlp(body, f"{at} MLP")

    def _mlp(self, mlp: MLP, where: str) -> None:
        if mlp.gate is not None:
            self.add(GatedUnitScale(where, mlp))
        if ACTIVATIONS[mlp.activation] is not None:
            self.add(ActivationScale(where, mlp))
        elif mlp.gate is None:
            self.block(ActivationScale, f"{mlp.activation} is not homogeneous", where)
        self.add(UnitOrder(where, mlp))

    def _branch(self, wiring: Wiring, branch: Branch, at: str) -> None:
        """What a branch writes: LayerScale, and the mean that the next LayerNorms lose."""
        kind = "attention" if isinstance(branch.body, Attention) else "MLP"
        where = f"{at} cross-attention" if isinstance(branch.body, Attention) and branch.body.memory else f"{at} {kind}"
        if branch.scale is not None and branch.norm_out is None:
            for linear in output(branch.body):
                self.add(LayerScale(where, branch.scale, linear))
        if wiring.loses_mean(branch):
            scale = None if branch.norm_out is not None else branch.scale
            for linear in output(branch.body):
                self.add(WriterMean(f"{where} output", linear.weight, scale=scale))
                if linear.bias is not None:
                    self.add(WriterMean(f"{where} output bias", linear.bias.unsqueeze(0), scale=scale))
        else:
            self.block(WriterMean, "the stream is not read by LayerNorms only", where)
        if branch.norm_out is not None:
            grow = tuple(view for linear in output(branch.body) for view in present(linear.weight, linear.bias))
            self.add(NormInputScale(f"{where} output", grow))
        if branch.norm_out is not None and branch.norm_out.bias is not None and wiring.mean_unseen:
            rows = branch.norm_out.bias.unsqueeze(0)
            self.add(WriterMean(branch.norm_out.where, rows, scale=branch.scale))

    def _parallel(self, wiring: Wiring, block: Block, at: str) -> None:
        if not block.parallel:
            return
        biased = [b for b in block.branches if b.norm_out is None and output_bias(b) is not None]
        for other in biased[1:]:
            first, second = output_bias(biased[0]), output_bias(other)
            assert first is not None and second is not None
            scales = (biased[0].scale, other.scale)
            self.add(ParallelBias(f"{at} output biases", first, second, wiring.mean_unseen, scales))

    def _norms(self, wiring: Wiring) -> None:
        stream = wiring.stream
        observed = self._observed_norm(wiring)
        if observed is not None:
            self.block(NormScale, "the norm's output is the observable", observed.where)
        for norm, readers in wiring.readers.items():
            head = stream.head if norm == stream.final_norm and self.observable not in STATES else None
            tied = head is not None and head.tied
            where = norm.where
            self.layer = wiring.layer_of(norm)
            if norm in wiring.residual:
                self.block(NormScale, "the norm's output also runs on along the residual", where)
            elif tied:
                self.block(NormScale, "the norm is read by the tied head", where)
            else:
                self.add(NormScale(where, norm, tuple(readers)))
            self._norm_constant(wiring, norm, readers, tied)
            if norm.kind == "layer":
                for reader in readers:
                    self._kernel(wiring, norm, reader, head is not None and reader.linear == head.linear)

    def _observed_norm(self, wiring: Wiring) -> Norm | None:
        """The norm whose output is the observable, or runs out of the stream unread."""
        if wiring.stream is not self.spec.main or self.observable not in STATES:
            return None
        return wiring.norms[-1] if wiring.norms else None

    def _norm_constant(self, wiring: Wiring, norm: Norm, readers: list[Reader], tied: bool) -> None:
        if norm.bias is None:
            return
        sink = None
        if norm in wiring.residual:
            sink = wiring.residual[norm]
            if sink is None:
                self.block(NormConstant, "the branch added to the norm's output has no bias", norm.where)
                return
        if not all(reader.shiftable for reader in readers):
            self.block(NormConstant, "a reader of the norm has no bias", norm.where)
        elif tied and readers[-1].linear.bias is None:
            self.block(NormConstant, "the norm is read by the tied head", norm.where)
        else:
            self.add(NormConstant(norm.where, norm, tuple(readers), sink))

    def _kernel(self, wiring: Wiring, norm: Norm, reader: Reader, is_head: bool) -> None:
        where = reader.linear.weight.name
        if is_head and self.tied(wiring.stream):
            self.block(ReaderKernel, "the unembedding is tied to the token table", where)
        elif reader.linear.bias is None and norm.bias is not None:
            self.block(ReaderKernel, "the reader has no bias, and its norm has one", where)
        else:
            router = any(
                isinstance(branch.body, MoE) and branch.body.router == reader.linear
                for block in wiring.stream.blocks
                for branch in block.branches
            )
            sum_free = router or (is_head and self._head_shift_free(wiring.stream))
            self.add(ReaderKernel(where, norm, reader, sum_free))

    def _tables(self, wiring: Wiring) -> None:
        stream = wiring.stream
        place = wiring.place
        if stream.embed_norm is not None and stream.embed_norm.bias is not None and wiring.mean_unseen:
            self.add(WriterMean(stream.embed_norm.where, stream.embed_norm.bias.unsqueeze(0)))
        unseen = self._tables_mean_unseen(wiring)
        free: set[str] = set()
        for table in stream.tables:
            where = f"{place}{table.name}"
            if not unseen:
                self.block(WriterMean, "the stream is not read by LayerNorms only", where)
            elif self._is_tied_table(stream, table):
                self.block(WriterMean, "the token table is also the unembedding", where)
            elif not table.linear:
                self.block(WriterMean, "the rows reach the stream through a nonlinearity", where)
            else:
                free.add(table.name)
                self.add(WriterMean(where, table.rows, table.dead_rows))
        self._table_constants(wiring, free)

    def _tables_mean_unseen(self, wiring: Wiring) -> bool:
        norm = wiring.stream.embed_norm
        return norm.kind == "layer" if norm is not None else wiring.mean_unseen

    def _is_tied_table(self, stream: Stream, table: Table) -> bool:
        return self.tied(stream) and stream.head is not None and table.rows == stream.head.linear.weight

    def _table_constants(self, wiring: Wiring, free: set[str]) -> None:
        """Trades along `sums`. A direction that only moves the means of free tables is theirs already."""
        stream = wiring.stream
        tables = {table.name: table for table in stream.tables}
        names = list(tables)
        barred = {
            name
            for name, table in tables.items()
            if self._is_tied_table(stream, table) and not self._head_shift_free(stream)
        }
        trades = list(stream.sums)
        for name in barred:
            partners = [b if a == name else a for a, b in trades if name in (a, b)]
            trades = [pair for pair in trades if name not in pair]
            trades += [(partners[0], other) for other in partners[1:]]
            if partners:
                self.block(TableConstant, "logits are observed through the tied token table", f"{wiring.place}{name}")
        seen = torch.zeros(0, len(names))
        for first, second in trades:
            row = torch.zeros(1, len(names))
            row[0, names.index(first)], row[0, names.index(second)] = 1.0, -1.0
            row[0, [i for i, name in enumerate(names) if name in free]] = 0.0
            stacked = torch.cat([seen, row])
            centred = (
                bool(torch.linalg.matrix_rank(stacked) == torch.linalg.matrix_rank(seen))
                if len(seen)
                else bool((row == 0).all())
            )
            seen = stacked
            through_head = any(self._is_tied_table(stream, tables[name]) for name in (first, second))
            where = f"{wiring.place}{first} and {second}"
            if second in barred or self._is_tied_table(stream, tables[second]):
                first, second = second, first
            rows, others = tables[first].rows, tables[second].rows
            dead, mean_free = tables[second].dead_rows, second in free
            self.add(TableConstant(where, rows, others, centred, through_head, dead, mean_free))

    def _head(self, wiring: Wiring) -> None:
        head = wiring.stream.head
        if head is None or self.observable in STATES:
            return
        where = head.linear.weight.name
        if self.observable == "logits":
            self.block(HeadConstant, "the observable is logits", where)
        elif head.softcap:
            self.block(HeadConstant, "logits pass through a softcap", where)
        else:
            if not head.tied:
                self.add(HeadConstant(where, head.linear.weight, head.linear.bias))
                return
            self.block(HeadConstant, "the unembedding is tied to the token table", where)
            self.add(HeadConstant(where, None, head.linear.bias))
            # A trade of the token table with another one moves the mean already.
            if self._tables_mean_unseen(wiring) and not wiring.stream.sums:
                self.add(HeadConstant(where, head.linear.weight, None, mean_only=True))

    def _frame(self, wiring: Wiring) -> None:
        stream = wiring.stream
        where = f"{wiring.place}stream"
        branches = [branch for block in stream.blocks for branch in block.branches]
        observed = stream is self.spec.main and self.observable == "hidden"
        weighed = self.observable == "similarities" and self._observed_norm(wiring) is not None
        reasons = {
            "the observable is read in the stream's coordinates": observed,
            "the weight of the last norm acts on coordinates": weighed,
            "the unembedding is tied to the token table": self.tied(stream),
            "norms on the branches' outputs act on coordinates": any(b.norm_out is not None for b in branches),
            "norms after the sums act on coordinates": any(b.norm_sum is not None for b in branches),
            "a norm on the embedding acts on coordinates": stream.embed_norm is not None,
            "rows reach the stream through a nonlinearity": not all(table.linear for table in stream.tables),
        }
        blocking = [reason for reason, holds in reasons.items() if holds]
        if weighed and len(blocking) == 1 and wiring.norms[-1].kind == "layer":
            # P (Uᵀ Γ'² U − Γ²) P = 0 has one unknown more than equations: a curve of frames and last norm weights.
            raise UnsupportedObservable(
                f"observable similarities of {self.spec.family}: frame and weight of the last LayerNorm have a "
                "symmetry that is no group of linear maps, and gaugekit does not count it: use --observable hidden"
            )
        for reason in blocking:
            self.block(Frame, reason, where)
        writers: list[tuple[View, View | None]] = [(table.rows, None) for table in stream.tables]
        for branch in branches:
            for linear in output(branch.body):
                writers += [(view, branch.scale) for view in present(linear.weight, linear.bias)]
        readers = [*wiring.raw_readers, *(reader for each in wiring.readers.values() for reader in each)]
        layer_norms = any(norm.kind == "layer" for norm in wiring.norms)
        if not blocking:
            norms = tuple(norm for norm in wiring.norms if norm in wiring.readers)
            self.add(Frame(where, tuple(writers), tuple(readers), norms, layer_norms))
        elif observed:
            self.block(StreamOrder, "the observable is read in the stream's coordinates", where)
        else:
            odd = [view for view, _ in writers] + [reader.linear.weight for reader in readers]
            odd += [norm.bias for norm in wiring.norms if norm.bias is not None]
            even = [norm.weight for norm in wiring.norms] + [b.scale for b in branches if b.scale is not None]
            linear = all(table.linear for table in stream.tables)
            signs = "none" if not linear else "one" if layer_norms else "each"
            self.add(StreamOrder(where, tuple(dict.fromkeys(odd)), tuple(dict.fromkeys(even)), signs))

    def _sum_scales(self, wiring: Wiring) -> None:
        """A scale of each sum: norms undo it but for their eps, and maps that read the sum itself take it back."""
        stream = wiring.stream
        branches = [branch for block in stream.blocks for branch in block.branches]
        tables = tuple(table.rows for table in stream.tables)
        shrink: tuple[View, ...] = ()
        if self.tied(stream) and stream.final_norm is not None:
            shrink = present(stream.final_norm.weight, stream.final_norm.bias)
        if not all(table.linear for table in stream.tables):
            return
        if stream.embed_norm is not None:
            self.add(NormInputScale(f"{wiring.place}embedding", tables, shrink))
            tables, shrink = present(stream.embed_norm.weight, stream.embed_norm.bias), ()
        if any(branch.norm_sum is not None for branch in branches):
            last = stream.embed_norm
            for layer, block in enumerate(stream.blocks):
                self.layer = wiring.layer_name(layer)
                for branch in block.branches:
                    if last is None or branch.norm_sum is None:
                        raise NotImplementedError("post-norm blocks follow a norm")
                    grow = present(last.weight, last.bias, *branch_output(branch))
                    readers = tuple(reader.linear.weight for reader in wiring.readers[last])
                    self.add(NormInputScale(f"{branch.norm_sum.where} input", grow, readers))
                    last = branch.norm_sum
            self.layer = ""
        elif stream.final_norm is not None:
            grow = (*tables, *(view for branch in branches for view in branch_output(branch)))
            shrink += tuple(reader.linear.weight for reader in wiring.raw_readers)
            self.add(NormInputScale(f"{wiring.place}stream", grow, shrink))


def branch_output(branch: Branch) -> tuple[View, ...]:
    """What scales a branch's contribution to the stream when multiplied."""
    if branch.norm_out is not None:
        return present(branch.norm_out.weight, branch.norm_out.bias)
    return tuple(view for linear in output(branch.body) for view in present(linear.weight, linear.bias))
