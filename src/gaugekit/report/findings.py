"""What a probe found: its norms in words, and the few numbers that sum it up, which the terminal and the page share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from gaugekit.report.text import count, measure, plain, plural, share

if TYPE_CHECKING:
    from gaugekit.verbs.attending import HeadStates
    from gaugekit.verbs.probe import ProbeReport
    from gaugekit.verbs.states import Kernel, NormStates

ALIKE = 0.9999  # |cos| from which a measured direction is the predicted one: less than a degree apart


@dataclass(frozen=True)
class Finding:
    """A number and what it is of; `number` may hold two, "before → after"."""

    number: str
    words: str


def facts(report: ProbeReport) -> Iterator[tuple[str, str]]:
    """What was run, in a few lines of (what, value)."""
    windows = plural(report.tokens // report.length, "window")
    yield "path", plain(report.model)
    yield "family", f"{report.family} ({report.stream})"
    yield "text", plain(report.text)
    yield (
        "tokens",
        f"{count(report.tokens)} in {windows} of {count(report.length)}, {count(report.distinct)} different ones",
    )
    yield "samples", f"{plural(report.samples, 'window')} for Gram matrices and unselectable keys"
    yield "run in", f"{report.computed_in}, statistics in float64"
    if report.norms:
        worst = max(report.norms, key=lambda norm: norm.deviation)
        yield "outputs", f"γ ⊙ n̂ + β to {measure(worst.deviation)} of their root mean square ({place(worst)})"


def place(norm: NormStates) -> str:
    """Where a norm stands: "layer 3, before attention", "final"."""
    return norm.place if norm.layer is None else f"layer {norm.layer}, {norm.place}"


def null_band(norms: Iterable[NormStates]) -> str:
    """The angles to 1 of random vectors: "90° ± 2.92°", or a range where widths differ."""
    widths = sorted({norm.null_angle for norm in norms})
    return "90° ± " + "..".join(f"{angle:.3g}°" for angle in dict.fromkeys((widths[0], widths[-1])))


def multiple(norm: NormStates, part: float | None) -> float | None:
    """A share of variance as a multiple of that which random states have."""
    return None if part is None else part / norm.null_share


def kernel_words(norm: NormStates) -> str:
    """What the kernel of a norm turned out to be, in a few words."""
    kernel = norm.kernel
    if kernel is None:
        return "too few tokens to tell" if norm.tokens <= norm.width else "nothing varies"
    if kernel.null == kernel.predicted:
        return "unique" if kernel.predicted else "none"
    if kernel.null < kernel.predicted:
        return f"{count(kernel.predicted - kernel.null)} not null"
    if kernel.cosine_null is None:
        return f"{count(kernel.null)} not predicted"
    return f"not unique; to all null {cosine(kernel.cosine_null)}"


def rounded(report: ProbeReport) -> bool:
    """Whether the model ran in a precision so low that rounding hides which directions are null."""
    return report.computed_in in ("bfloat16", "float16")


def cosine(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def either_side(kernel: Kernel) -> tuple[float | None, float | None]:
    """The largest eigenvalue predicted to be null, and the smallest of the others."""
    last = kernel.smallest[kernel.predicted - 1] if kernel.predicted else None
    return last, kernel.smallest[kernel.predicted] if kernel.predicted < len(kernel.smallest) else None


def findings(report: ProbeReport) -> Iterator[Finding]:
    if report.norms:
        yield from _sphere(report.norms)
        yield _kernel(report.norms)
        yield from _shape(report.norms)
    if report.heads:
        yield from _attention(report.heads)


def _sphere(norms: tuple[NormStates, ...]) -> Iterator[Finding]:
    smallest = min(norm.radius.smallest for norm in norms)
    largest = max(norm.radius.largest for norm in norms)
    yield Finding(
        f"{smallest:.4f}",
        f"least radius of a normalized state, in units of √d (largest {largest:.4f}): only eps makes it less than 1",
    )
    before, after = (
        sum(abs(pick(norm) - 90) <= norm.null_angle for norm in norms)
        for pick in (lambda norm: norm.angle_before.mean, lambda norm: norm.angle_after.mean)
    )
    yield Finding(
        f"{before} → {after} of {len(norms)}",
        f"norms have a mean angle to 1 within {null_band(norms)}, where random vectors lie (before → after)",
    )
    shares = [
        _median(norms, lambda norm: multiple(norm, norm.along_ones_before)),
        _median(norms, lambda norm: multiple(norm, norm.along_ones_after)),
    ]
    yield Finding(
        _arrow(shares, times),
        "the variance along 1 that random states have (median over norms, before → after)",
    )


def _kernel(norms: tuple[NormStates, ...]) -> Finding:
    kernels = [norm.kernel for norm in norms if norm.kernel is not None]
    if not kernels:
        return Finding("–", f"null directions: {count(norms[0].tokens)} tokens are too few to tell")
    predicted = [kernel for kernel in kernels if kernel.predicted]
    if not predicted:
        return Finding(
            count(sum(kernel.null for kernel in kernels)),
            f"null directions of the outputs of {plural(len(kernels), 'norm')}, whose weights predict none",
        )
    alike = sum(kernel.cosine is not None and kernel.cosine >= ALIKE for kernel in predicted)
    more = sum(kernel.null > kernel.predicted for kernel in predicted)
    words = f"norms forget the direction that their weights predict, to a cosine of {ALIKE}"
    if more:
        words += f"; at {count(more)} more directions are null than predicted, so none stands out"
    return Finding(f"{alike} of {len(predicted)}", words)


def _shape(norms: tuple[NormStates, ...]) -> Iterator[Finding]:
    curves = [norm.curve for norm in norms if norm.curve is not None]
    if curves:
        tanh, linear, best = (
            median(pick(curve) for curve in curves)
            for pick in (lambda curve: curve.tanh, lambda curve: curve.linear, lambda curve: curve.best)
        )
        yield Finding(
            f"{tanh:.3f}",
            f"R² of a norm's outputs as c·tanh(a·x), {linear:.3f} as c·x, {best:.3f} as any function of the input "
            "(medians over norms)",
        )
    ranks = [median(norm.gram_before.effective_rank for norm in norms)]
    ranks.append(median(norm.gram_after.effective_rank for norm in norms))
    yield Finding(
        _arrow(ranks, lambda rank: f"{rank:.1f}"),
        "effective rank of the tokens of a window (median over norms, before → after normalizing)",
    )


def _attention(heads: tuple[HeadStates, ...]) -> Iterator[Finding]:
    shares = [part for row in heads for part in entropy_shares(row) if part is not None]
    if shares:
        yield Finding(
            share(fmean(shares)),
            f"of the entropy of uniform attention, mean over heads; from {share(min(shares))} to {share(max(shares))}",
        )
    stuck = fmean(part for row in heads for part in row.unselectable)
    unscaled = [part for row in heads for part in row.unselectable_unscaled or ()]
    if unscaled:
        yield Finding(
            f"{share(fmean(unscaled))} → {share(stuck)}",
            "of keys could not be selected by any query (unscaled → as the norm scales them)",
        )
    else:
        yield Finding(share(stuck), "of keys could not be selected by any query")


def entropy_shares(row: HeadStates) -> list[float | None]:
    """The entropy of each head, of that of uniform attention; None where there is nothing to choose."""
    return [entropy / row.uniform if row.uniform > 0 else None for entropy in row.entropy]


def any_unselectable(heads: Iterable[HeadStates]) -> bool:
    """Whether there is a key that no query can select, as norms scale them or not."""
    return any(part > 0 for row in heads for part in (*row.unselectable, *(row.unselectable_unscaled or ())))


def times(factor: float) -> str:
    """A multiple, in two digits: 0.037×, 4.8×, 214×, 3.1e-30×."""
    return f"{factor:.0f}×" if factor == 0 or factor >= 10 else f"{factor:.2g}×"


def _arrow(values: Iterable[float | None], written: Callable[[float], str]) -> str:
    return " → ".join("–" if value is None else written(value) for value in values)


def _median(norms: Iterable[NormStates], pick: Callable[[NormStates], float | None]) -> float | None:
    values = [value for value in map(pick, norms) if value is not None]
    return median(values) if values else None
