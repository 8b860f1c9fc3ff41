"""Directions in which the outputs of a norm do not vary: predicted from its weight, and measured."""

from __future__ import annotations

from collections.abc import Iterator

from gaugekit.report.findings import either_side, kernel_words
from gaugekit.report.plots import along
from gaugekit.report.plots.base import COLOURS, Figure, Key, dot, log_axis

LEAST = 1e-18  # eigenvalues below this are drawn here, and those below zero: they are rounding
SAME = 1e-16  # 1 − cosine is not known better than this

LAST, NEXT = dot("last predicted to be null", 0), dot("first predicted not to be", 1)
SINGLE, ALL = dot("the eigenvectors of as many smallest eigenvalues", 0), dot("all null eigenvectors", 2)


def eigenvalues(norms: along.Norms) -> Figure:
    null = Key("counted as null", COLOURS[-1], symbol="line")
    sides = [(None, None) if norm.kernel is None else either_side(norm.kernel) for norm in norms]
    traces = [
        along.level(norms, null, [None if norm.kernel is None else norm.kernel.threshold for norm in norms]),
        along.series(norms, NEXT, [after for _, after in sides], least=LEAST, mode="markers"),
        along.series(norms, LAST, [last for last, _ in sides], least=LEAST, mode="markers"),
    ]
    traces = [traces[0], *(trace for trace in traces[1:] if any(y is not None for y in trace["y"]))]
    drawn = {trace["name"] for trace in traces}
    return Figure(
        id="eigenvalues",
        title="Smallest eigenvalues",
        caption="Eigenvalues of the covariance of a norm's outputs, in units of their mean, on both sides of the "
        f"number that its weight predicts to be null; {_prediction(norms)} (Shirodkar & Narayanan, 2606.19491).",
        height=380,
        data=traces,
        layout=along.layout(norms, log_axis("eigenvalue / mean", (y for trace in traces for y in trace["y"]))),
        legend=(*(key for key in (LAST, NEXT) if key.name in drawn), null),
    )


def _prediction(norms: along.Norms) -> str:
    kinds = {norm.kind for norm in norms if norm.kernel is not None}
    words = {"layer": "a LayerNorm forgets one direction, γ⁻¹", "rms": "an RMSNorm forgets none"}
    return ", ".join(words[kind] for kind in ("layer", "rms") if kind in kinds)


def cosines(norms: along.Norms) -> Iterator[Figure]:
    """Where a direction was predicted; no figure where none was."""
    kernels = [norm.kernel for norm in norms]
    if all(kernel is None or kernel.cosine is None for kernel in kernels):
        return
    single = [None if kernel is None else _off(kernel.cosine) for kernel in kernels]
    # Where the null directions are as many as predicted, both say the same.
    more = [kernel is not None and kernel.null > kernel.predicted for kernel in kernels]
    all_null = [
        _off(kernel.cosine_null) if kernel and each else None for kernel, each in zip(kernels, more, strict=True)
    ]
    traces = [
        along.series(norms, SINGLE, single, least=SAME, mode="markers"),
        along.series(norms, ALL, all_null, least=SAME, mode="markers"),
    ]
    traces = traces if any(more) else traces[:1]
    for trace in traces:
        for text, norm in zip(trace["customdata"], norms, strict=True):
            text[0] += f" ({kernel_words(norm)})"
    not_unique = (
        " Where more are null than predicted, the eigenvectors depend on rounding, and only the cosine to all null "
        "ones counts."
    )
    yield Figure(
        id="cosines",
        title="Predicted direction and measured one",
        caption="How far from 1 the cosine of the predicted and the measured null direction is; near the bottom they "
        f"agree in all digits (Shirodkar & Narayanan, 2606.19491).{not_unique if any(more) else ''}",
        height=380,
        data=traces,
        layout=along.layout(norms, log_axis("1 − cosine", [1.0, *(y for trace in traces for y in trace["y"])])),
        legend=(SINGLE, ALL) if any(more) else (SINGLE,),
    )


def _off(cosine: float | None) -> float | None:
    return None if cosine is None else 1 - cosine
