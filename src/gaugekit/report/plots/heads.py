"""Heads: how many directions they use, their spectra, and how they are balanced."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from gaugekit.report.heads import CIRCUITS, NAMES, HeadSet
from gaugekit.report.plots.base import SCALE, TICKS, Figure, colorbar, dot, head_axes, map_height, packed, thinned

if TYPE_CHECKING:
    from gaugekit.verbs.inspect import HeadRow

FLOOR = -8.0  # log10 of the smallest s/s_1 that is told apart; below it there is little but rounding


def ranks(heads: HeadSet, number: int) -> list[Figure]:
    """Effective rank by layer and head: a map for QK and one for VO, on one scale."""
    values = [row.effective_rank for row in heads.rows]
    possible = max(len(row.spectrum) for row in heads.rows)
    figures = []
    for circuit in CIRCUITS:
        rows = heads.circuit(circuit)
        grid, layers, columns = _grid(rows)
        cells = [[row and [row.rank, len(row.spectrum), round(row.stable_rank, 2)] for row in line] for line in grid]
        trace = {
            "type": "heatmap",
            "z": [[row and round(row.effective_rank, 3) for row in line] for line in grid],
            "x": columns,
            "y": layers,
            "customdata": cells,
            "zmin": min(values),
            "zmax": max(max(values), min(values) + 1e-3),
            "colorscale": SCALE,
            "xgap": 1,
            "ygap": 1,
            "colorbar": colorbar("effective rank"),
            "hovertemplate": "layer %{y}, head %{x}<br>effective rank %{z:.2f} of %{customdata[1]}"
            "<br>stable rank %{customdata[2]:.2f}<br>numerical rank %{customdata[0]}<extra></extra>",
        }
        figures.append(
            Figure(
                id=f"ranks-{number}-{circuit}",
                title=f"Effective rank, {NAMES[circuit]}",
                caption=f"How many of its {possible} directions each head really uses: bright cells many, dark few.",
                height=map_height(len(layers)),
                data=[trace],
                layout=head_axes("key/value head"),
            )
        )
    return figures


def spectra(heads: HeadSet, number: int) -> list[Figure]:
    """Singular values, one row a head: a map for QK and one for VO, on one scale."""
    scaled = {circuit: _log_spectra(heads.circuit(circuit)) for circuit in CIRCUITS}
    lows = [float(np.nanmin(log)) for log, _ in scaled.values() if np.isfinite(log).any()]
    lowest = max(min(lows, default=-1.0), FLOOR)
    figures = []
    for circuit in CIRCUITS:
        rows = heads.circuit(circuit)
        log, values = scaled[circuit]
        gaps = " Empty cells are zeros." if np.isnan(log).any() else ""
        names = [f"{row.layer}.{row.kv_head}" for row in rows]
        starts = [(next(each), layer) for layer, each in groupby(names, lambda name: name.split(".")[0])]
        starts = thinned(starts)
        trace = {
            "type": "heatmap",
            "z": packed(log),
            "x": list(range(1, log.shape[1] + 1)),
            "y": names,
            "customdata": packed(values),
            "zmin": lowest,
            "zmax": 0,
            "colorscale": SCALE,
            "colorbar": colorbar("log10 s<sub>i</sub>/s<sub>1</sub>"),
            "hovertemplate": "layer.head %{y}<br>s<sub>%{x}</sub> = %{customdata:.4g}"
            "<br>log10 s<sub>i</sub>/s<sub>1</sub> = %{z:.2f}<extra></extra>",
        }
        axes = head_axes("singular value")
        axes["yaxis"] |= {"tickvals": [name for name, _ in starts], "ticktext": [layer for _, layer in starts]}
        axes["xaxis"] = {"title": {"text": "singular value, largest first"}, "type": "linear"}
        figures.append(
            Figure(
                id=f"spectra-{number}-{circuit}",
                title=f"Spectra, {NAMES[circuit]}",
                caption="Each row is one head, its singular values from the largest to the smallest, in powers of ten "
                f"below the largest; a row that darkens early has low rank.{gaps}",
                height=100 + min(max(6 * len(rows), 160), 720),
                data=[trace],
                layout=axes,
            )
        )
    return figures


def balance(heads: HeadSet, number: int) -> Figure:
    traces = []
    keys = [dot(NAMES[circuit], index) for index, circuit in enumerate(CIRCUITS)]
    for circuit, key in zip(CIRCUITS, keys, strict=True):
        rows = heads.circuit(circuit)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": key.name,
                "x": [str(row.layer) for row in rows],
                "y": [round(row.balance_relative, 5) for row in rows],
                "customdata": [[row.kv_head, row.balance] for row in rows],
                "marker": {"color": key.colour, "symbol": key.symbol, "size": 7, "opacity": 0.9},
                "hovertemplate": f"{circuit.upper()}, layer %{{x}}, head %{{customdata[0]}}"
                "<br>relative defect %{y:.3f}<br>absolute %{customdata[1]:.4g}<extra></extra>",
            }
        )
    return Figure(
        id=f"balance-{number}",
        title="Balance",
        caption="How unevenly each head's strength is shared between its two factors, from 0 (evenly) to 1 (all in "
        "one); this can be changed at will without changing the head, so it tells how the file happens to be written.",
        height=320,
        data=traces,
        layout={
            "scattermode": "group",
            "scattergap": 0.6,
            "xaxis": {"title": {"text": "layer"}, "type": "category", "tickangle": 0, "nticks": TICKS},
            "yaxis": {"title": {"text": "relative balance defect"}, "range": [-0.03, 1.05], "zeroline": False},
        },
        legend=tuple(keys),
    )


def _grid(rows: Sequence[HeadRow]) -> tuple[list[list[HeadRow | None]], list[str], list[str]]:
    """Rows by layer and columns by head, None where a layer has fewer heads; and what both axes read."""
    layers = sorted({row.layer for row in rows})
    heads = sorted({row.kv_head for row in rows})
    at = {(row.layer, row.kv_head): row for row in rows}
    grid = [[at.get((layer, head)) for head in heads] for layer in layers]
    return grid, [str(layer) for layer in layers], [str(head) for head in heads]


def _log_spectra(rows: Sequence[HeadRow]) -> tuple[np.ndarray, np.ndarray]:
    """log10 of s / s_1 and s, (head, singular value); NaN, a gap in the map, for a zero and beyond a short spectrum."""
    values = np.full((len(rows), max((len(row.spectrum) for row in rows), default=0)), np.nan)
    for line, row in zip(values, rows, strict=True):
        line[: len(row.spectrum)] = row.spectrum
    positive = np.where(values > 0, values, np.nan)
    return np.log10(positive) - np.log10(positive[:, :1]), values
