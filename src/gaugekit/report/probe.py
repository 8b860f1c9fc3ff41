"""What probe reports, for the terminal: a few facts, and a row for every norm and every layer of heads."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from gaugekit.report.findings import cosine, either_side, facts, kernel_words, multiple, null_band, place, rounded
from gaugekit.report.tables import add_row, header, heading, new_table
from gaugekit.report.text import count, measure, path_name, plural

if TYPE_CHECKING:
    from gaugekit.verbs.attending import HeadStates
    from gaugekit.verbs.moments import Spread
    from gaugekit.verbs.probe import ProbeReport
    from gaugekit.verbs.states import NormStates

SPHERE = (
    "x: before the norm, n̂: normalized, y: after it. radius: of n̂ in units of √d, mean (and least). cos: largest |cos| "
    "of the angle between n̂ and 1. angle: to 1 in degrees, mean ± deviation; near 90 alone says nothing. var: variance "
    "along 1, as a multiple of the share 1/d that random states have."
)
KERNEL = (
    "cosine: of the predicted directions and the eigenvectors of the smallest eigenvalues of the outputs' covariance. "
    "variance: along the predicted directions; last: the largest eigenvalue predicted to be null; next: the one after "
    "it; all in units of the mean eigenvalue. null: eigenvalues below {}, which rounding "
    "explains, of how many predicted."
)
NOT_UNIQUE = (
    "Where more directions are null than predicted, no eigenvector among them stands out: there the cosine depends on "
    "rounding, and that to all null ones counts."
)
WHY = (
    "More are null where weights are very small and, before the first attention, where a text has fewer different "
    "tokens than there are dimensions."
)
ROUNDED = "{} rounds outputs, which leaves some variance in every direction: float32 shows what is null."
TOO_FEW = "the covariance of {} tokens in {} dimensions has null directions of its own: more tokens are needed"
CURVE = (
    "R²: how much of n̂ is a function of x alone, entry by entry: c·x, c·tanh(a·x), or the best there is. rank: "
    "effective rank of a window's tokens, before (x) and after normalizing (n̂)."
)
HEADS = (
    "entropy: of attention in nats, mean over heads and least..most; uniform: that of attention to all that is seen. "
    "unselectable: percent of keys that no query can select, mean and most of a head; unscaled: the same if norms "
    "divided all tokens of a window by one number."
)


def render(report: ProbeReport) -> RenderableType:
    """The whole report. Print it on any rich console."""
    return Group(*_parts(report))


def _parts(report: ProbeReport) -> Iterator[RenderableType]:
    yield from header(path_name(report.model), facts(report))
    if report.norms:
        yield from _sphere(report.norms)
        yield from _kernel(report)
        yield from _curve(report)
    if report.heads:
        yield from _heads(report.heads)


def _sphere(norms: tuple[NormStates, ...]) -> Iterator[RenderableType]:
    yield heading("Sphere", f"random vectors: angle to 1 of {null_band(norms)}, variance 1")
    table = new_table("layer>", "place", "radius>", "cos>", "angle x>", "angle y>", "var x>", "var y>")
    for norm in norms:
        angles = (f"{angle.mean:.1f} ± {angle.std:.1f}" for angle in (norm.angle_before, norm.angle_after))
        shares = (multiple(norm, part) for part in (norm.along_ones_before, norm.along_ones_after))
        add_row(table, *_where(norm), _radius(norm.radius), measure(norm.zero_sum), *angles, *map(measure, shares))
    yield table
    yield Text(SPHERE, style="dim")


def _radius(radius: Spread) -> str:
    mean, least = f"{radius.mean:.3f}", f"{radius.smallest:.3f}"
    return mean if mean == least else f"{mean} ({least})"


def _kernel(report: ProbeReport) -> Iterator[RenderableType]:
    norms = report.norms
    few = [norm for norm in norms if norm.kernel is None and norm.tokens <= norm.width]
    kernels = [(norm, norm.kernel) for norm in norms if norm.kernel is not None]
    predicted = [(norm, kernel) for norm, kernel in kernels if kernel.predicted]
    yield heading("Kernel", "the directions in which a norm's output does not vary")
    if predicted:
        table = new_table("layer>", "place", "cosine>", "variance>", "last>", "next>", "null>", "kernel")
        for norm, kernel in predicted:
            values = map(measure, (kernel.variance, *either_side(kernel)))
            null = f"{count(kernel.null)} of {count(kernel.predicted)}"
            add_row(table, *_where(norm), cosine(kernel.cosine), *values, null, kernel_words(norm))
        yield table
        yield Text(KERNEL.format(measure(predicted[0][1].threshold)), style="dim")
        if any(kernel.null > kernel.predicted for _, kernel in predicted):
            yield Text(NOT_UNIQUE)
    without = [(norm, kernel) for norm, kernel in kernels if not kernel.predicted]
    if without:
        null = sum(kernel.null for _, kernel in without)
        among = plural(len(without), "norm")
        yield Text(f"An RMSNorm forgets no direction: none predicted for {among}, {count(null)} found.")
        for norm, kernel in without:
            if kernel.null:
                yield Text(f"  {place(norm)}: {plural(kernel.null, 'direction')} null")
    if any(kernel.null > kernel.predicted for _, kernel in kernels):
        yield Text(WHY, style="dim")
    if kernels and rounded(report):
        yield Text(ROUNDED.format(report.computed_in))
    if few:
        yield Text(f"{plural(len(few), 'norm')}: {TOO_FEW.format(count(few[0].tokens), count(few[0].width))}.")
    still = sum(norm.kernel is None and norm.tokens > norm.width for norm in norms)
    if still:
        yield Text(f"{plural(still, 'norm')}: nothing varies.")


def _curve(report: ProbeReport) -> Iterator[RenderableType]:
    limit = min(report.length, min(norm.width for norm in report.norms))
    yield heading("Curve and rank", f"ranks of at most {count(limit)}")
    table = new_table("layer>", "place", "R² linear>", "R² tanh>", "R² best>", "rank before>", "rank after>")
    for norm in report.norms:
        curve = norm.curve
        fits = ("", "", "") if curve is None else (f"{r:.3f}" for r in (curve.linear, curve.tanh, curve.best))
        ranks = (f"{gram.effective_rank:.1f}" for gram in (norm.gram_before, norm.gram_after))
        add_row(table, *_where(norm), *fits, *ranks)
    yield table
    yield Text(CURVE, style="dim")


def _heads(heads: tuple[HeadStates, ...]) -> Iterator[RenderableType]:
    yield heading("Heads", "self-attention")
    table = new_table("layer>", "entropy>", "range>", "uniform>", "unselectable %>", "most>", "unscaled %>", "most>")
    for row in heads:
        entropies = (fmean(row.entropy), min(row.entropy), max(row.entropy), row.uniform)
        mean, least, most, uniform = (f"{each:.2f}" for each in entropies)
        stuck = (*_percents(row.unselectable), *_percents(row.unselectable_unscaled))
        add_row(table, str(row.layer), mean, f"{least}..{most}", uniform, *stuck)
    yield table
    yield Text(HEADS, style="dim")


def _percents(shares: tuple[float, ...] | None) -> tuple[str, str]:
    """Mean and largest."""
    return (f"{100 * fmean(shares):.2f}", f"{100 * max(shares):.2f}") if shares else ("", "")


def _where(norm: NormStates) -> tuple[str, str]:
    return "" if norm.layer is None else str(norm.layer), norm.place.replace("-", " ")
