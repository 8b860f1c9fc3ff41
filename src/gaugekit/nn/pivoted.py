"""Matrices of rank r in coordinates that no change of basis between their factors can move.

Shapes: G = BᵀA (h, d, d) with A (g, r, d) and B (h, r, d); h matrices in g groups, each of which shares one A.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaugekit.linalg import apart, beside, column_pivots, product_svd

__all__ = ["PivotedProduct", "pivoted", "pivoted_rows", "pivots_first"]


class PivotedProduct(nn.Module):
    """Matrices G_i = B_iᵀ A, i = 1 ... h, in coordinates that no change of basis between A and B can move.

    r columns of A, the pivots, are the identity, so that B_iᵀ are the pivot columns of G_i itself, and the other
    columns of A say how all other columns of G_i are combined from these. The heads of one group share A.

    columns       (h, r, d)     parameter: G_i[:, pivots]ᵀ
    coefficients  (g, r, d − r) parameter: the other columns of A, in their order
    pivots        (g, r) int64  buffer, ascending

    That is 2dr − r² numbers a matrix where g = h, the dimension of the manifold of (d, d) matrices of rank r. At r = d
    all columns are pivots, A is the identity and the numbers are G's own d². Pivots stay as they are while training
    moves the parameters; `InvariantAttention.from_heads` of its `to_heads` chooses them anew.

    Source: the column interpolative decomposition (Cheng, Gimbutas, Martinsson and Rokhlin, "On the compression of low
        rank matrices", SIAM J. Sci. Comput. 26, 2005).
    """

    columns: nn.Parameter
    coefficients: nn.Parameter
    pivots: Tensor

    def __init__(self, width: int, heads: int, kv_heads: int, rank: int, device=None, dtype=None) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.empty(heads, rank, width, device=device, dtype=dtype))
        self.coefficients = nn.Parameter(torch.empty(kv_heads, rank, width - rank, device=device, dtype=dtype))
        self.register_buffer("pivots", torch.empty(kv_heads, rank, device=device, dtype=torch.int64))

    @property
    def complete(self) -> bool:
        """Whether A is the identity."""
        return self.coefficients.shape[-1] == 0

    def reader(self) -> Tensor:
        """A, (g, r, d)."""
        return pivoted_rows(self.coefficients, self.pivots)

    def read(self, x: Tensor) -> Tensor:
        """x Aᵀ for x (batch, n, d), as (batch, h, n, r); a view of x where A is the identity."""
        h, g = len(self.columns), len(self.pivots)
        if self.complete:
            return x.unsqueeze(1).expand(-1, h, -1, -1)
        rows = F.linear(x, self.reader().flatten(0, 1)).unflatten(-1, (g, -1)).transpose(1, 2)
        return rows.unsqueeze(2).expand(-1, -1, h // g, -1, -1).flatten(1, 2)

    def product(self) -> Tensor:
        """G, (h, d, d), formed."""
        return self.columns.mT @ self.reader().repeat_interleave(len(self.columns) // len(self.pivots), 0)

    @torch.no_grad()
    def set_(self, a: Tensor, b: Tensor) -> Tensor:
        """Become G_i = B_iᵀ A for a (g, k, d) and the b (h, k, d + more) of each group; the rest of the columns,
        (h, r, more), which are coordinates of vectors Aᵀb, is given back."""
        h, (g, r) = len(b), self.pivots.shape
        pivots, coefficients, columns = pivoted(a, beside(b, g), r)
        columns = apart(columns, h)
        self.pivots.copy_(pivots)
        self.coefficients.copy_(coefficients)
        self.columns.copy_(columns[..., : a.shape[-1]])
        return columns[..., a.shape[-1] :]


def pivoted(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """pivots (g, r), coefficients (g, r, d − r) and columns (g, r, n) of BᵀA as `PivotedProduct` has them, for float64
    a (g, k, d) and b (g, k, n) with k <= r or r = d."""
    (g, k, d), eps = a.shape, torch.finfo(a.dtype).eps
    if rank == d:
        return torch.arange(d, device=a.device).expand(g, d), a.new_empty(g, d, 0), a.mT @ b
    s, _, right = product_svd(a, b)
    floor = 16 * k * eps * a.norm(dim=(-2, -1)) * b.norm(dim=(-2, -1))
    live = F.pad(s > floor.unsqueeze(-1), (0, rank - s.shape[-1])).unsqueeze(-1)
    rows = F.pad(right, (0, 0, 0, rank - s.shape[-1])) * live
    chosen = column_pivots(rows)
    # The product has nothing to say about dead rows; unit vectors at the columns that fill up the pivots do.
    rows = torch.where(live, rows, F.one_hot(chosen, d).to(rows.dtype))
    order = pivots_first(chosen, d)
    ordered = rows.gather(-1, order.unsqueeze(1).expand(rows.shape))
    pivots = order[:, :rank]
    columns = a.gather(-1, pivots.unsqueeze(1).expand(g, k, rank)).mT @ b
    return pivots, torch.linalg.solve(ordered[..., :rank], ordered[..., rank:]), columns


def pivoted_rows(coefficients: Tensor, pivots: Tensor) -> Tensor:
    """A (g, r, d) whose columns at the pivots (g, r) are the identity and whose others, in their order, are the
    coefficients (g, r, d − r)."""
    g, r, others = coefficients.shape
    identity = torch.eye(r, dtype=coefficients.dtype, device=coefficients.device).expand(g, r, r)
    place = pivots_first(pivots, r + others).argsort(-1)
    return torch.cat([identity, coefficients], -1).gather(-1, place.unsqueeze(1).expand(g, r, r + others))


def pivots_first(pivots: Tensor, d: int) -> Tensor:
    """All d columns, (g, d): the pivots (g, r), then the others, both ascending."""
    others = torch.ones(len(pivots), d, dtype=torch.int8, device=pivots.device).scatter(-1, pivots, 0)
    return others.argsort(dim=-1, stable=True)
