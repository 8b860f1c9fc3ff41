"""`reduce`: heads of lower rank, in the frame in which least is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gaugekit.checkpoint import open_checkpoint
from gaugekit.checkpoint.writer import write
from gaugekit.errors import GaugekitError, UnsupportedArchitecture
from gaugekit.symmetry import Circuits, circuits, orbit
from gaugekit.symmetry.constants import ValueConstant
from gaugekit.symmetry.orbit import Step
from gaugekit.verbs.calibration import Moments, measure
from gaugekit.verbs.evaluating import Reading, read_both
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.narrowing import Narrow, Narrowing, pivot, reduced_class
from gaugekit.verbs.probe import Precision
from gaugekit.verbs.reducing import Cut, Kept, above_rounding, lost, queries_keys, spend, values
from gaugekit.verbs.rewriting import Opened, Skipped, digest, moved, opened, prepare, without_zeros
from gaugekit.verbs.savings import LayerReduction, kv_bytes, layer_reductions, parameters
from gaugekit.verbs.texts import text_batches

__all__ = ["Form", "ReduceReport", "reduce"]

Form = Literal["same", "smaller"]

ROWS = 4  # windows that run at a time


@dataclass(frozen=True)
class ReduceReport:
    """What was kept, what was lost by it, and what it saves.

    vo, qk              the shares that were asked for
    vo_lost             share of their energy that values and outputs lose, mean over layers
    vo_lost_by_head     the same if heads of a layer need not keep equally many: what exceeds it is due to "smaller"
    parameters          before and after: numbers in the weight files
    kv_bytes            before and after: keys and values of a token in the cache, in the dtype of the weights; None for
                        models that have no such cache
    before, after       how both read `eval_text`, if there is one
    skipped             constants of values that cannot be gathered in an output bias, and why
    """

    source: str
    out: str
    form: Form
    vo: float | None
    qk: float | None
    lossless: bool
    text: str | None
    text_tokens: int
    layers: tuple[LayerReduction, ...]
    vo_lost: float | None
    vo_lost_by_head: float | None
    parameters: tuple[int, int]
    kv_bytes: tuple[int, int] | None
    eval_text: str | None
    eval_tokens: int
    before: Reading | None
    after: Reading | None
    skipped: tuple[Skipped, ...]
    tensors: int
    bytes: int
    written: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def reduce(
    reference: str | PathLike[str],
    out: str | PathLike[str],
    *,
    vo: float | None = None,
    qk: float | None = None,
    lossless: bool = False,
    text: str | PathLike[str] | None = None,
    form: Form | None = None,
    eval_text: str | PathLike[str] | None = None,
    tokenizer: str | PathLike[str] | None = None,
    length: int = 512,
    tokens: int | None = 32_768,
    run_dtype: Precision = "float32",
    device: str = "cpu",
    max_shard_size: int | str = "5GB",
    dtype: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    track: Track[Any] = untracked,
) -> ReduceReport:
    """Write `reference` to `out` with the circuits of its heads cut to lower rank; `gaugekit.verbs.reducing` says in
    which sense the cut is best. All disguises of a model under its symmetries become one function.

    Args:
        vo, qk: shares of all dimensions of values and outputs, and of queries and keys, that the model keeps, in
            (0, 1]. Over the whole model those are kept that would lose most, and at least one a head. In values and
            outputs what would be lost counts as a share of all that the heads of the layer write: layers write on very
            different scales, and a small one's part is not worth less for that. In queries and keys it counts as
            squares of scores, which a softmax takes as they are.
        lossless: keep all that is above rounding, and do not store the columns of values that are the identity in the
            pivoted gauge: r² numbers less for every value head of rank r.
        text: calibration text: an error counts as it shows on its first `tokens` tokens (None: on all), read in windows
            of `length`. Without it all inputs count alike.
        form: "same": all shapes stay, what is cut is zero, and the result loads anywhere. "smaller": values and their
            cache are narrower, each layer with a rank of its own, and `gaugekit.models.reduced` has the class.
            `lossless` is always "smaller", the default of all else is "same".
        eval_text: held-out text, read as `text` is by both models, which are then in memory together.
        tokenizer: another directory, tokenizer.json or GGUF than the checkpoint's own.
        run_dtype, device: in and on which texts are run. Algebra is in float64.

    Constants (biases, and the constants of norms) are kept exactly where the output has a bias to hold them; elsewhere
    they are cut as one more input that is always one.

    A layer is in memory at a time; with a text the model too, and 4 k² numbers a head. Raises `GaugekitError`; nothing
    is left half-written.
    """
    form = form or ("smaller" if lossless else "same")
    _require_sense(vo, qk, lossless, form, text is not None, dry_run and eval_text is not None)
    model = opened(reference, None, revision)
    every = list(circuits(model.spec, model.symmetries.observable))
    writing: dict[str, Any] = {"max_shard_size": max_shard_size, "dtype": dtype, "overwrite": overwrite}
    prepare(model, (), out, **writing)  # what cannot be written is refused before anything is computed
    _require_possible(model, every, qk is not None, form, eval_text is not None)
    read = None if tokenizer is None else Path(tokenizer)
    rows, held_out = (
        () if file is None else text_batches(model.checkpoint, model.spec, Path(file), length, ROWS, tokens, read)
        for file in (text, eval_text)
    )
    running: dict[str, Any] = {"dtype": getattr(torch, run_dtype), "device": device, "track": track}
    moments: Sequence[Moments | None] = [None] * len(every)
    if rows:
        moments = measure(model, every, rows, queries_keys=qk is not None, **running)

    constants = [s for s in model.symmetries.continuous if isinstance(s, ValueConstant)]
    free, skipped = without_zeros(model, constants, lambda symmetry: symmetry.divisors)
    of_values: list[Cut] = []
    of_keys: list[Cut] = []
    for each, moment in track(list(zip(every, moments, strict=True)), len(every), "heads"):
        if vo is not None or lossless:
            of_values.append(values(each, free, model.load, moment))
        if qk is not None:
            of_keys.append(queries_keys(each, model.load, moment))
    together = form == "smaller"
    kept: list[Kept] = []
    if of_values:
        kept = _above_rounding(of_values) if vo is None else spend(of_values, vo, relative=True, together=together)
    kept_keys = [] if qk is None else spend(of_keys, qk, relative=False, together=False)
    cuts = [*zip(of_values, kept, strict=True), *zip(of_keys, kept_keys, strict=True)]
    steps = [step for cut, masks in cuts for step in cut.steps(masks)]
    narrowing, ranks = None, None
    if together:
        ranks = [max(cut.dimensions(masks)) for cut, masks in zip(of_values, kept, strict=True)]
        narrowing, more = _narrowing(model, every, ranks, lossless, steps)
        steps += more
        writing |= {"drop": narrowing.drop, "shapes": narrowing.shapes, "added": narrowing.added}
    path = orbit.Path(steps)
    layout = prepare(model, path.touches - writing.get("drop", set()), out, **writing)

    first = second = None
    if not dry_run:
        tensors = moved(model, path, track)
        card = _card(model, layout.out.name, vo, qk, text is not None, form)
        if narrowing is None:
            write(layout, tensors, card=card)
        else:
            new, texts = narrowing.config, narrowing.texts
            write(layout, narrowing.narrowed(tensors), card=card, config_changes=new, texts=texts)
        if held_out:
            first, second = read_both(model.checkpoint, open_checkpoint(layout.out), model.spec, held_out, **running)
    by_head = kept if vo is None else spend(of_values, vo, relative=True, together=False)
    cache = kv_bytes(model.spec, every, model.checkpoint.headers), kv_bytes(model.spec, every, layout.headers, ranks)
    return ReduceReport(
        source=str(model.checkpoint.path),
        out=str(layout.out),
        form=form,
        vo=vo,
        qk=qk,
        lossless=lossless,
        text=None if text is None else str(text),
        text_tokens=sum(ids.numel() for ids in rows),
        layers=tuple(layer_reductions(model.spec, every, (of_values, kept), (of_keys, kept_keys))),
        vo_lost=lost(of_values, kept) if of_values else None,
        vo_lost_by_head=lost(of_values, by_head) if of_values else None,
        parameters=(parameters(model.spec, model.checkpoint.headers), parameters(model.spec, layout.headers)),
        kv_bytes=None if cache[0] is None or cache[1] is None else (cache[0], cache[1]),
        eval_text=None if eval_text is None else str(eval_text),
        eval_tokens=sum(ids.numel() for ids in held_out),
        before=first,
        after=second,
        skipped=skipped,
        tensors=len(layout.changed),
        bytes=layout.total_bytes,
        written=not dry_run,
    )


def _require_sense(
    vo: float | None, qk: float | None, lossless: bool, form: Form, weighted: bool, dry_evaluation: bool
) -> None:
    for name, share in (("vo", vo), ("qk", qk)):
        if share is not None and not 0 < share <= 1:
            raise GaugekitError(f"--{name} {share:g}: it is the share that is kept, above 0 and at most 1")
    if vo is None and qk is None and not lossless:
        raise GaugekitError("nothing to reduce: give --vo or --qk, the share that is kept, or --lossless")
    if lossless and not (vo is None and qk is None and not weighted):
        raise GaugekitError("--lossless keeps all that is not zero: leave out --vo, --qk and --text")
    if lossless and form == "same":
        raise GaugekitError("in the same shapes nothing can be left out without loss: leave out --form same")
    if form == "smaller" and vo is None and not lossless:
        raise GaugekitError("--form smaller narrows values: give --vo, the share of them that is kept")
    if dry_evaluation:
        raise GaugekitError("--eval-text reads what was written, and --dry-run writes nothing: leave out one of them")


def _require_possible(model: Opened, every: Sequence[Circuits], qk: bool, form: Form, evaluated: bool) -> None:
    family = model.spec.family
    if qk and any(each.attention.qk_norm is not None for each in every):
        raise UnsupportedArchitecture(f"{family} norms queries and keys, so that none can go alone: leave out --qk")
    if form == "smaller":
        reduced_class(model)
    if evaluated and model.spec.main.head is None:
        raise UnsupportedArchitecture(f"{family} without a language-model head predicts nothing: leave out --eval-text")


def _above_rounding(cuts: Sequence[Cut]) -> list[Kept]:
    """For every head of a layer as many dimensions as one of them has; one where none has any, since a value head
    without dimensions cannot be loaded."""

    def most(mask: Tensor) -> Tensor:
        stays = mask.any(0)
        stays[..., 0] |= ~stays.any()
        return stays.expand(mask.shape)

    return [tuple(most(mask) for mask in masks) for masks in above_rounding(cuts)]


def _narrowing(
    model: Opened, every: Sequence[Circuits], ranks: Sequence[int], pivoted: bool, steps: Sequence[Step]
) -> tuple[Narrowing, list[Step]]:
    """What changes its shape, and the last steps of values that are stored without their identity."""
    layers, more, path = [], [], orbit.Path(steps)
    for each, rank in zip(every, ranks, strict=True):
        a, found = each.attention, None
        if pivoted:
            names = tuple(dict.fromkeys((a.v.weight.name, a.o.weight.name)))
            found = pivot(a, rank, path.move(names, model.load))
        if found is not None:
            more.append(found[0])
        layers.append(Narrow(a, rank, None if found is None else found[1]))
    return Narrowing(model, layers), more


def _card(model: Opened, name: str, vo: float | None, qk: float | None, weighted: bool, form: Form) -> str:
    shares = [f" --{option} {share:g}" for option, share in (("vo", vo), ("qk", qk)) if share is not None]
    options = ("".join(shares) or " --lossless") + (" --text ..." if weighted else "")
    card = (
        f"# {name}\n\n`{model.checkpoint.path.name}` (SHA-256 of its tensors {digest(model.checkpoint)}) with heads of "
        f"lower rank: `gaugekit reduce{options} --form {form}`.\n"
    )
    if form == "smaller":
        card += (
            "\n```python\nimport gaugekit.models.reduced  # or trust_remote_code=True below\n"
            "from transformers import AutoModelForCausalLM\n\n"
            'model = AutoModelForCausalLM.from_pretrained("this folder")\n```\n'
        )
    return card
