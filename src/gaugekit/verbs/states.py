"""What one norm of a running model does to the states that pass through it.

Shapes: d stream width, b windows of t tokens. x is the norm's input, n̂ the normalized state, y = γ ⊙ n̂ + β its output.
Sources: [S] the essay "Every Transformer Lives on a Sphere"; angles to 1: Gupta et al., 2409.12951; the kernel:
Shirodkar & Narayanan, 2606.19491; tanh-like curves: DyT, 2503.10622.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gaugekit.errors import GaugekitError
from gaugekit.geometry.ellipsoid import kernel
from gaugekit.geometry.normalization import layer_norm, rms_norm, uniform_direction
from gaugekit.geometry.sphere import angle
from gaugekit.models.spec import Attention, Branch, Norm, Stream
from gaugekit.verbs.moments import Covariance, Curve, Pairs, Scalars, Spectra, Spectrum, Spread, Variances

# Directions with less than this share of the mean variance count as null: rounding to float32 leaves some 1e-14, and
# what is rounded to a half precision has variance everywhere.
NULL = 1e-8


@dataclass(frozen=True)
class Kernel:
    """Directions along which a norm's output does not vary.

    Predicted from the weight alone: γ⁻¹ of a LayerNorm (or the axes where γ = 0), none of an RMSNorm without zeros.
    `variance` is the largest variance along these, `smallest` the smallest eigenvalues of the measured covariance, all
    as shares of its mean eigenvalue; `null` counts eigenvalues below `threshold`. `cosine` is that of the largest angle
    between the predicted directions and as many eigenvectors of the smallest eigenvalues: where more directions are
    null than predicted, these are not unique, and `cosine_null` is the same against all null ones.
    """

    predicted: int
    variance: float | None
    cosine: float | None
    cosine_null: float | None
    null: int
    threshold: float
    smallest: tuple[float, ...]


@dataclass(frozen=True)
class NormStates:
    """What was measured at one norm.

    `radius`: ‖n̂‖/√d, 1 but for eps. `zero_sum`: the largest |cos| of the angle between n̂ and 1, 0 behind a LayerNorm.
    `deviation`: the largest difference of the output from γ ⊙ n̂ + β, relative to its root mean square. Angles to 1 in
    degrees, before the norm (x), normalized (n̂) and after it (y); those of random vectors scatter about 90° by
    `null_angle`. `along_ones`: share of variance along 1 before and after, for random vectors `null_share` = 1/d.
    `kernel` is None where there were too few tokens to tell (no more than d). `curve`: n̂ over x, entry by entry.
    `gram_before`, `gram_after`: eigenvalues of the Gram matrices of a window's states x and n̂.
    """

    where: str
    layer: int | None
    place: str
    kind: str
    width: int
    tokens: int
    radius: Spread
    zero_sum: float
    deviation: float
    angle_before: Spread
    angle_normalized: Spread
    angle_after: Spread
    null_angle: float
    along_ones_before: float | None
    along_ones_after: float | None
    null_share: float
    kernel: Kernel | None
    curve: Curve | None
    gram_before: Spectrum
    gram_after: Spectrum


def norm_places(stream: Stream) -> Iterator[tuple[Norm, int | None, str]]:
    """Every norm on a stream, each once, with its layer and its place in words."""
    places: dict[Norm, tuple[int | None, str]] = {}
    if stream.embed_norm is not None:
        places[stream.embed_norm] = (None, "embedding")
    for layer, block in enumerate(stream.blocks):
        for branch in block.branches:
            body = _body(branch)
            for norm, word in ((branch.norm_in, "before"), (branch.norm_out, "after"), (branch.norm_sum, "sum with")):
                if norm is not None:
                    both = norm in places and places[norm] == (layer, "before attention")
                    places[norm] = (layer, "before both" if both else f"{word} {body}")
    if stream.final_norm is not None:
        places[stream.final_norm] = (None, "final")
    for norm, (layer, place) in places.items():
        yield norm, layer, place


def _body(branch: Branch) -> str:
    if not isinstance(branch.body, Attention):
        return "MLP"
    return "attention" if branch.body.memory is None else "cross-attention"


class NormWatch:
    """Collects what passes through one norm."""

    def __init__(
        self, norm: Norm, layer: int | None, place: str, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.norm, self.layer, self.place = norm, layer, place
        self._threshold = max(NULL, torch.finfo(dtype).eps ** 2)
        self._weight, self._bias = weight.double(), None if bias is None else bias.double()
        self._ones = uniform_direction(len(weight))
        self.tokens = 0
        self._zero_sum = self._deviation = 0.0
        self._radius, self._sum_before, self._sum_after = Scalars(), Scalars(), Scalars()
        self._angles = Scalars(), Scalars(), Scalars()
        self._before, self._after = Variances(), Covariance()
        self._pairs = Pairs()
        self._grams = Spectra(), Spectra()

    def normalized(self, x: Tensor) -> Tensor:
        """n̂ of states (..., d)."""
        return (layer_norm if self.norm.kind == "layer" else rms_norm)(x, eps=self.norm.eps)

    def add(self, x: Tensor, y: Tensor, grams: int) -> None:
        """Input and output of the norm (b, t, d), in any precision; the first `grams` windows give Gram matrices."""
        if not (x.isfinite().all() and y.isfinite().all()):
            raise GaugekitError(f"states at {self.norm.where} are NaN or infinite: run the model in a wider precision")
        x, y = x.detach().double(), y.detach().double()
        n = self.normalized(x)
        if grams:
            for spectra, states in zip(self._grams, (x, n), strict=True):
                spectra.add(states[:grams] @ states[:grams].mT)
        x, y, n = (states.flatten(0, -2) for states in (x, y, n))
        self.tokens += len(x)
        lengths = n.norm(dim=-1)
        self._radius.add(lengths / math.sqrt(n.shape[-1]))
        sums = (n @ self._ones).abs() / lengths.clamp_min(1e-300)
        self._zero_sum = max(self._zero_sum, float(sums.max()))
        expected = n * self._weight if self._bias is None else n * self._weight + self._bias
        off = (y - expected).abs().max() / expected.square().mean().sqrt().clamp_min(1e-300)
        self._deviation = max(self._deviation, float(off))
        for angles, states in zip(self._angles, (x, n, y), strict=True):
            angles.add(angle(states, self._ones).rad2deg())
        for along, states in ((self._sum_before, x), (self._sum_after, y)):
            along.add(states @ self._ones)
        self._before.add(x)
        self._after.add(y)
        self._pairs.add(x, n)

    def states(self) -> NormStates:
        """What was measured, after at least one `add` with `grams`."""
        d = len(self._weight)
        covariance, predicted = self._after.matrix(), kernel(self._weight, self.norm.kind)
        return NormStates(
            where=self.norm.where,
            layer=self.layer,
            place=self.place,
            kind=self.norm.kind,
            width=d,
            tokens=self.tokens,
            radius=self._radius.spread(),
            zero_sum=self._zero_sum,
            deviation=self._deviation,
            angle_before=self._angles[0].spread(),
            angle_normalized=self._angles[1].spread(),
            angle_after=self._angles[2].spread(),
            null_angle=math.degrees(1 / math.sqrt(d)),
            along_ones_before=_share(self._sum_before, self._before.variance().sum()),
            along_ones_after=_share(self._sum_after, covariance.trace()),
            null_share=1 / d,
            kernel=measured_kernel(covariance, predicted, self._threshold) if self.tokens > d else None,
            curve=self._pairs.curve(),
            gram_before=self._grams[0].spectrum(),
            gram_after=self._grams[1].spectrum(),
        )


def _share(along: Scalars, total: Tensor) -> float | None:
    return along.spread().std ** 2 / float(total) if total > 0 else None


def measured_kernel(covariance: Tensor, predicted: Tensor, threshold: float = NULL) -> Kernel | None:
    """A covariance (d, d) beside the directions (d, m) in which it should vanish; None if nothing varies."""
    mean = float(covariance.diagonal().mean())
    if not mean > 0:
        return None
    values, vectors = torch.linalg.eigh(covariance / mean)
    count, null = predicted.shape[-1], int((values < threshold).sum())
    smallest = tuple(values[: count + 4].tolist())
    if not count:
        return Kernel(0, None, None, None, null, threshold, smallest)
    along = predicted.mT @ covariance @ predicted / mean

    def cosine(directions: Tensor) -> float:
        return float(torch.linalg.svdvals(directions.mT @ predicted)[-1].clamp_max(1))

    return Kernel(
        count,
        float(torch.linalg.eigvalsh(along)[-1]),
        cosine(vectors[:, :count]),
        cosine(vectors[:, :null]) if null >= count else None,
        null,
        threshold,
        smallest,
    )
