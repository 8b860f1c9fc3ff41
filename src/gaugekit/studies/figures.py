"""What the figures of the studies share: size, colours, and curves with their seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gaugekit.studies.study import ArmResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "band", "curve", "panels"]

COLOURS = ("#1f4e79", "#c0504d", "#4f8f4f", "#8064a2", "#d08a2e", "#3b9bb3", "#777777", "#b5698b")


def panels(columns: int, rows: int = 1, width: float = 3.4, height: float = 2.8, **options: Any) -> tuple[Figure, Any]:
    """A figure of `rows` × `columns` axes, an array (rows, columns) of them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained", **options
    )
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
    return figure, axes


def curve(axis: Axes, arm: ArmResult, colour: str, key: str = "curve", label: str | None = None) -> None:
    """The `band` of an arm's [x, y] points over seeds; runs that broke off are counted, not drawn."""
    name = arm.arm.name if label is None else label
    broken = len(arm.runs) - len(arm.whole)
    name += f" ({broken} of {len(arm.runs)} broke off)" if broken else ""
    band(axis, [run[key] for run in arm.whole], colour, name)


def band(axis: Axes, curves: Sequence[Sequence[Sequence[float]]], colour: str, label: str) -> None:
    """The mean of curves, each of [x, y] points at the same x, and the range in which they lie."""
    if not curves:
        axis.plot([], [], color=colour, label=label)
        return
    x = [point[0] for point in curves[0]]
    columns = [[each[i][1] for each in curves] for i in range(len(x))]
    axis.plot(x, [sum(c) / len(c) for c in columns], color=colour, linewidth=1.3, label=label)
    axis.fill_between(x, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.18, linewidth=0)
