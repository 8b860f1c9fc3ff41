"""Gram matrices of a window's states: how many directions its tokens use, before and after normalizing."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from gaugekit.report.findings import place
from gaugekit.report.plots import along
from gaugekit.report.plots.base import SCALE, Figure, colorbar, packed
from gaugekit.report.plots.sphere import BEFORE, NORMALIZED

if TYPE_CHECKING:
    from gaugekit.verbs.moments import Spectrum

FLOOR = -8.0  # log10 of the smallest share that is told apart


def ranks(norms: along.Norms) -> Figure:
    traces = [
        along.series(norms, key, [gram.effective_rank for gram in grams])
        for key, grams in ((BEFORE, [n.gram_before for n in norms]), (NORMALIZED, [n.gram_after for n in norms]))
    ]
    highest = max(gram.rank for norm in norms for gram in (norm.gram_before, norm.gram_after))
    return Figure(
        id="gram-ranks",
        title="Effective rank of the tokens",
        caption=f"How many directions the states of a window really use, of at most {highest:.0f}: the exponential of "
        "the entropy of their Gram matrix's eigenvalues. It is low where a few large states or a common part outweigh "
        "the rest (the essay “Every Transformer Lives on a Sphere”).",
        height=380,
        data=traces,
        layout=along.layout(norms, {"title": {"text": "effective rank"}, "rangemode": "tozero"}),
        legend=(BEFORE, NORMALIZED),
    )


def spectra(norms: along.Norms) -> Iterator[Figure]:
    """A map for x and one for n̂, on one scale."""
    sides = {
        "before": ("before the norm (x)", [norm.gram_before for norm in norms]),
        "after": ("normalized (n̂)", [norm.gram_after for norm in norms]),
    }
    logs = {side: _logarithms(grams) for side, (_, grams) in sides.items()}
    lowest = max(min(float(np.nanmin(log, initial=0.0)) for log in logs.values()), FLOOR)
    axis = along.layout(norms, {})["xaxis"]
    for side, (words, _) in sides.items():
        log = logs[side]
        names = [escape(place(norm)) for norm in norms]
        yield Figure(
            id=f"gram-spectra-{side}",
            title=f"Spectrum of the tokens {words}",
            caption="Each row is one norm, the eigenvalues of the Gram matrix from the largest to the smallest shown, "
            "as shares of their sum in powers of ten: a row that darkens early has few directions.",
            height=100 + min(max(8 * len(norms), 160), 720),
            data=[
                {
                    "type": "heatmap",
                    "z": packed(log),
                    "x": list(range(1, log.shape[1] + 1)),
                    "y": list(range(len(norms))),
                    "text": [[name] * log.shape[1] for name in names],
                    "zmin": lowest,
                    "zmax": 0,
                    "colorscale": SCALE,
                    "colorbar": colorbar("log10 share"),
                    "hovertemplate": "<b>%{text}</b><br>eigenvalue %{x}: 10<sup>%{z:.2f}</sup> of the sum"
                    "<extra></extra>",
                }
            ],
            layout={
                "xaxis": {"title": {"text": "eigenvalue, largest first"}, "showgrid": False},
                "yaxis": axis | {"title": {"text": "layer"}, "range": [len(norms) - 0.5, -0.5]},
            },
        )


def _logarithms(grams: list[Spectrum]) -> np.ndarray:
    """log10 of the shares, (norm, eigenvalue); NaN, a gap in the map, for those that are zero everywhere or missing."""
    shares = np.array([gram.shares for gram in grams])
    kept = max(int((shares > 0).any(0).sum()), 1)
    return np.log10(np.where(shares > 0, shares, np.nan))[:, :kept]
