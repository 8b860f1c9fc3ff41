"""Columns of a row space that stand for all others: QR with column pivoting, batched."""

from __future__ import annotations

import torch
from torch import Tensor

from gaugekit.linalg.scaling import double

__all__ = ["column_pivots"]

TIE = 1e-9
"""Columns whose squares, of at most 1, differ by less are equally good pivots: the first of them is taken."""


@torch.no_grad()
def column_pivots(rows: Tensor) -> Tensor:
    """The columns that QR with column pivoting takes, in its order: each the longest, once the parts along those before
    it are gone.

    The choice is the same for U rows, U unitary, and so belongs to the row space: columns that tie do so in all its
    bases, and the first of them, to `TIE`, is taken whatever rounding says. Behind the rank all columns tie, and the
    lowest that are left are taken.

    Args:
        rows: (..., r, m), r <= m, any floating or complex dtype, finite. Rows are orthonormal or zero: until the rank
            is used up, some column then keeps a square of 1/m, which is why squares may be brought up to date by
            subtraction and one Gram–Schmidt step is enough. They are taken as they are: ties that rounding to 32 bits
            or fewer broke stay broken.

    Returns:
        (..., r) int64, different columns of each matrix, on the device of `rows`. The algebra is in float64.

    Raises:
        TypeError: the dtype is neither floating nor complex.
        ValueError: fewer than two dimensions, or more rows than columns.

    Source: Businger and Golub, "Linear least squares solutions by Householder transformations", Numer. Math. 7 (1965).
    """
    if not (rows.is_floating_point() or rows.is_complex()):
        raise TypeError(f"rows must be floating point or complex, got {rows.dtype}")
    if rows.ndim < 2 or rows.shape[-2] > rows.shape[-1]:
        raise ValueError(f"rows must be (..., r, m) with r <= m, got {tuple(rows.shape)}")
    *batch, r, _ = rows.shape
    rows = double(rows)
    left = rows.abs().square().sum(-2)
    basis = rows.new_zeros(*batch, r, 0)
    chosen = torch.empty(*batch, 0, dtype=torch.int64, device=rows.device)
    for _ in range(r):
        pivot = (left >= left.amax(-1, keepdim=True) - TIE).to(torch.int8).argmax(-1, keepdim=True)
        column = rows.gather(-1, pivot.unsqueeze(-2).expand(*batch, r, 1))
        column = column - basis @ (basis.mH @ column)
        column = column / torch.linalg.vector_norm(column, dim=-2, keepdim=True).clamp_min(TIE)
        left = (left - (column.mH @ rows).squeeze(-2).abs().square()).scatter(-1, pivot, -1.0)
        basis = torch.cat([basis, column], -1)
        chosen = torch.cat([chosen, pivot], -1)
    return chosen
