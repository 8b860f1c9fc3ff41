"""`verify`: whether two checkpoints compute the same, by running both."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gaugekit.checkpoint import Checkpoint, open_checkpoint
from gaugekit.errors import GaugekitError
from gaugekit.models import Spec, read_spec
from gaugekit.symmetry import Observable, derive
from gaugekit.symmetry.base import STATES
from gaugekit.symmetry.wiring import wire
from gaugekit.verbs.running import Outputs, load_model, random_batch, run
from gaugekit.verbs.texts import text_batches

# Half a unit in the last place, relative: how far a stored weight may be from what it stands for.
HALF_ULP = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Differences within this many times what rounding explains count as rounding, and so do these at any rate.
ROUNDING_ROOM = 4.0
FLOOR = 1e-8
SMALL = 2_000_000_000  # parameters up to which the default is float64


@dataclass(frozen=True)
class VerifyReport:
    """How far two models' outputs are apart.

    `scale` is what hidden states and logits are measured by; 1 for log-probabilities. `rounding`: by how much the
    outputs of the two move when their weights are rounded once more, at random, as their stored dtype rounds them: what
    a copy that is equal but for rounding should differ by. `layer`: where they differ, the first layer whose states do
    (0: the embedding), judged by Gram matrices of the centred states, which symmetries do not move.
    """

    first: str
    second: str
    observable: Observable
    computed_in: str
    stored_in: str
    tokens: int
    largest: float
    scale: float
    mean_kl: float | None
    top1: float | None
    rounding: float
    tolerance: float
    equivalent: bool
    layer: int | None
    layers: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    first: str | PathLike[str],
    second: str | PathLike[str],
    *,
    text: str | PathLike[str] | None = None,
    observable: Observable | None = None,
    dtype: Literal["auto", "float64", "float32"] = "auto",
    tolerance: float | None = None,
    length: int = 64,
    rows: int = 4,
    seed: int = 0,
) -> VerifyReport:
    """Run both models on random inputs, and on `text` too, one model in memory at a time.

    They are equivalent if the largest difference of the observable is within `tolerance`: by default four times what
    rounding of the stored weights explains, which is measured, and at least 1e-8. Raises `GaugekitError` if the two
    cannot be compared.
    """
    a, b = open_checkpoint(first), open_checkpoint(second)
    spec_a, spec_b = read_spec(a), read_spec(b)
    _comparable(a, spec_a, b, spec_b)
    observable = derive(spec_a, observable).observable
    if dtype == "auto":
        dtype = "float64" if spec_a.parameters <= SMALL else "float32"
    stored = coarsest(a, b)
    model = load_model(a, spec_a, getattr(torch, dtype))
    batches = [random_batch(model, spec_a, length, rows, torch.Generator().manual_seed(seed))]
    if text is not None:
        batches.append({**batches[0], "input_ids": text_batches(a, spec_a, Path(text), length, rows, 1)[0]})
    ours, again = both(model, spec_a, batches, observable, HALF_ULP[coarsest(a)])
    x = torch.cat([out.observable for out in ours])
    roundings = [(x - again).abs().max()]
    del model
    model = load_model(b, spec_b, getattr(torch, dtype))
    theirs, again = both(model, spec_b, batches, observable, HALF_ULP[coarsest(b)])
    y = torch.cat([out.observable for out in theirs])
    roundings.append((y - again).abs().max())
    del model
    difference = (x - y).abs()
    scale = 1.0 if observable == "logprobs" else max(float(x.std()), 1e-300)
    largest = float(difference.max()) / scale
    if not torch.isfinite(difference).all():
        culprit = second if torch.isfinite(x).all() else first
        raise GaugekitError(f"{culprit} gives NaN or infinite outputs: there is nothing to compare")
    rounding = float(max(roundings)) / scale
    limit = max(FLOOR, ROUNDING_ROOM * rounding) if tolerance is None else tolerance
    # Behind the last norm of a decoder the states carry its weight, which a symmetry moves.
    layers = len(ours[0].layers) - (spec_a.main.final_norm is not None)
    if len(spec_a.main.blocks) != len(spec_b.main.blocks):
        layers = 0  # there is no telling which layer of one answers to which of the other
    mean_unseen = wire(spec_a, observable)[spec_a.main.name].mean_unseen

    def states(outputs: list[Outputs], layer: int) -> Tensor:
        return torch.cat([out.layers[layer] for out in outputs])

    apart = tuple(float(relative_gram(states(ours, i), states(theirs, i), mean_unseen)) for i in range(layers))
    equivalent = largest <= limit
    probabilities = observable == "logprobs"
    return VerifyReport(
        first=str(a.path),
        second=str(b.path),
        observable=observable,
        computed_in=dtype,
        stored_in=stored,
        tokens=sum(len(out.layers[0]) for out in ours),
        largest=largest,
        scale=scale,
        mean_kl=float((x.exp() * (x - y)).sum(-1).mean()) if probabilities else None,
        top1=float((x.argmax(-1) == y.argmax(-1)).double().mean()) if observable not in STATES else None,
        rounding=rounding,
        tolerance=limit,
        equivalent=equivalent,
        layer=None if equivalent else next((i for i, d in enumerate(apart) if d > limit), None),
        layers=apart,
    )


def record_drift(out: str | PathLike[str], outcome: VerifyReport) -> None:
    """Write into the card of a result how far it was measured to be from its source."""
    card = Path(out) / "README.md"
    line = (
        f"Measured by `gaugekit verify`: the {outcome.observable} of the two differ by at most {outcome.largest:.1e}, "
        f"where rounding of {outcome.stored_in} weights explains {outcome.rounding:.1e}.\n"
    )
    # As bytes: what stands below is the source's own, in whatever encoding and with whatever ends of lines.
    ours, end, rest = card.read_bytes().partition(f"observable {outcome.observable}.\n".encode())
    beside = card.with_name(".README.md.partial")
    beside.write_bytes(ours + end + line.encode() + rest)
    beside.replace(card)


def both(
    model: Any, spec: Spec, batches: list[dict[str, Tensor]], observable: Observable, half_ulp: float
) -> tuple[list[Outputs], Tensor]:
    """What a model gives, and its observable once more after every weight has been rounded again at random. The model
    is spoilt after this."""
    plain = [run(model, spec, batch, observable) for batch in batches]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            step = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype).mul_(2).sub_(1)
            parameter.mul_(step.mul_(half_ulp).add_(1))
    return plain, torch.cat([run(model, spec, batch, observable).observable for batch in batches])


def relative_gram(x: Tensor, y: Tensor, mean_unseen: bool) -> Tensor:
    """‖XXᵀ − YYᵀ‖ / ‖XXᵀ‖ of states (n, d) centred over tokens, and over features where LayerNorms do not see their
    mean: blind to the frame and to constants."""

    def centred(states: Tensor) -> Tensor:
        if mean_unseen:
            states = states - states.mean(-1, keepdim=True)
        states = states - states.mean(0, keepdim=True)
        return states @ states.mT

    gram = centred(x)
    return (gram - centred(y)).norm() / gram.norm().clamp_min(1e-300)


def coarsest(*checkpoints: Checkpoint) -> str:
    """The coarsest float dtype in which any tensor is stored; quantised GGUF counts as what it is dequantised to."""
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    stored = {
        "float32" if checkpoint.format == "gguf" else names.get(header.dtype, "float32")
        for checkpoint in checkpoints
        for header in checkpoint.headers.values()
    }
    return max(stored, key=list(HALF_ULP).index)


def _comparable(a: Checkpoint, spec_a: Spec, b: Checkpoint, spec_b: Spec) -> None:
    if spec_a.family != spec_b.family:
        raise GaugekitError(f"{a.path} is {spec_a.family} and {b.path} is {spec_b.family}: they take different inputs")
    rows_a, rows_b = (
        [table.rows.shape[0] for table in spec.main.tables if table.name == "tokens"] for spec in (spec_a, spec_b)
    )
    if spec_a.main.width != spec_b.main.width and spec_a.main.head is None:
        raise GaugekitError(f"{a.path} and {b.path} have hidden states of different widths")
    if rows_a != rows_b:
        raise GaugekitError(f"{a.path} and {b.path} have vocabularies of different sizes: they take different inputs")
