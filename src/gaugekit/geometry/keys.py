"""Which keys attention can ask for: the query that asks for none in particular, and keys that no query can pick [B].

Legend: n keys of a sequence, k head dimension, d model width, γ and β weight and bias of the LayerNorm before the keys.

Everything is computed in float64 and carries no gradient: these are measurements.

Source: [B] Brody, Alon and Yahav, "On the expressivity role of LayerNorm in transformers' attention", arXiv 2305.02582.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog, nnls
from torch import Tensor

from gaugekit.geometry.ellipsoid import kernel_direction

__all__ = ["Selectability", "uniform_query", "uniform_query_of_head", "unselectable"]

WINS = 1e-12
"""A key wins a query if its score leads by more than this share of |query| times the radius of the keys."""

REFLECTIONS = 20
"""Batched steps that are tried before keys are examined one by one."""

HULL = 1e-9
"""A key this near to the hull of the others, in radii of the keys, counts as in it unless a query shows otherwise."""


Points = NDArray[np.float64]


# --- the query that picks no key ----------------------------------------------------------------------------


def uniform_query(weight: Tensor) -> Tensor:
    """The query in the model's width that gives every key y = γ ⊙ n + β the same score, so that attention is uniform.

    LayerNorm's n sums to zero, so the score of q = γ⁻¹ / |γ⁻¹| is q·β whatever the token; exact for every eps.

    Args:
        weight: γ, (d,), any floating dtype, without zeros.

    Returns:
        (d,), a unit vector in the dtype of γ.

    Raises:
        as `ellipsoid.kernel_direction`, which it is.

    Source: [B, 3.1], with the weight taken into account.
    """
    return kernel_direction(weight)


@torch.no_grad()
def uniform_query_of_head(w_k: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """How nearly each head can put the uniform query: keys W_K y see a query q as W_Kᵀ q, which lies in the row space.

    Args:
        w_k: W_K, (..., k, d), any floating dtype.
        weight: γ of the LayerNorm before it, (d,), without zeros.

    Returns:
        (query, cosine). query (..., k) float64: the q for which W_Kᵀ q is nearest to the unit vector along γ⁻¹, the
        shortest such q; in the inverse unit of W_K. cosine (...) float64, from 0 to 1: between W_Kᵀ q and γ⁻¹. At 1
        the head can attend uniformly by its content alone; a random head reaches about √(k/d). A key bias changes
        nothing. With rotary positions this is the query as seen from the key's own position.

    Raises:
        TypeError: a dtype is not floating point.
        ValueError: shapes that do not fit, NaN or inf entries, or a zero in γ.
    """
    if not w_k.is_floating_point():
        raise TypeError(f"W_K must be real floating point, got {w_k.dtype}")
    if w_k.ndim < 2 or weight.shape != w_k.shape[-1:]:
        raise ValueError(f"W_K (..., k, d) and γ (d,) do not fit: {tuple(w_k.shape)} and {tuple(weight.shape)}")
    if not bool(w_k.isfinite().all()):
        raise ValueError("W_K has NaN or inf entries")
    direction = uniform_query(weight.to(torch.float64))
    left, s, right = torch.linalg.svd(w_k.to(torch.float64), full_matrices=False)
    live = s > max(w_k.shape[-2:]) * torch.finfo(s.dtype).eps * s[..., :1]
    shares = torch.where(live, right @ direction, 0.0)
    query = left @ (shares / torch.where(live, s, 1.0)).unsqueeze(-1)
    return query.squeeze(-1), torch.linalg.vector_norm(shares, dim=-1).clamp_max(1.0)


# --- keys that no query can pick ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Selectability:
    """Which keys can win.

    Attributes:
        mask: (..., n) bool, True where no query can give the key the highest score.
        margins: (..., n) float64 or None: by how much it can win, in the unit of the keys: max over |q|_∞ <= 1 of
            min over j of q·(k_i − k_j); 0 where it cannot, inf for a lone key.
    """

    mask: Tensor
    margins: Tensor | None = None

    @property
    def share(self) -> float:
        """Share of unselectable keys, NaN if there are none at all."""
        return float(self.mask.to(torch.float64).mean())


@torch.no_grad()
def unselectable(keys: Tensor, *, margins: bool = False) -> Selectability:
    """Keys that can never receive the highest attention of their sequence, whatever the query.

    Key i is selectable if some q has q·k_i > q·k_j for every j ≠ i; that is, if it lies outside the convex hull of
    the others. Of two equal keys neither can win, so both are unselectable; to ask about distinct keys, pass each
    once. Keys on a sphere, such as those that RMSNorm or LayerNorm without weights puts out, are all selectable if
    distinct. So is their image under W_K if W_K is injective, though not in general if k < d.

    Every answer has a certificate. Selectable: a query for which the key leads by more than `WINS` = 1e-12 of |q|
    times the radius of the keys about their mean. Most are found by a few batched products. For each of the rest,
    nonnegative least squares finds the point of the others' hull nearest to it, and so either such a query or, at a
    distance of at most `HULL` = 1e-9 radii, the convex combination that shows that there is none. What that leaves
    open, if anything, a linear program decides. So a key less than some 1e-9 radii above the hull may count as
    unselectable; on a sphere, one with all round it neighbours nearer than some 1e-6 radii. The given numbers are taken
    as exact: rounding that parts equal keys makes them selectable. Answers do not depend on the unit.

    Args:
        keys: (..., n, k), any floating dtype.
        margins: also solve a linear program for each selectable key. It takes some milliseconds for n of a few
            hundred, where the mask alone takes tens of microseconds a key; accurate to about 1e-9 radii.

    Returns:
        `Selectability`, on the device of `keys`.

    Raises:
        TypeError: the dtype is not floating point.
        ValueError: fewer than two dimensions, k = 0, or NaN or inf entries.

    Source: [B, 3.2]; the linear program is solved by HiGHS (scipy), the least squares by Lawson and Hanson's method.
    """
    if not keys.is_floating_point():
        raise TypeError(f"keys must be real floating point, got {keys.dtype}")
    if keys.ndim < 2 or keys.shape[-1] == 0:
        raise ValueError(f"keys must be (..., n, k) with k >= 1, got shape {tuple(keys.shape)}")
    if not bool(keys.isfinite().all()):
        raise ValueError("keys have NaN or inf entries")
    *batch, n, k = keys.shape
    heads = keys.reshape(math.prod(batch), n, k)
    mask = torch.zeros((len(heads), n), dtype=torch.bool)
    sizes = torch.zeros((len(heads), n), dtype=torch.float64)
    for head, item in enumerate(heads if n else ()):
        # A key that occurs twice cannot win; for the others it counts once.
        distinct, which, count = item.to(torch.float64).unique(dim=0, return_inverse=True, return_counts=True)
        which, once = which.cpu(), (count == 1).cpu()
        unit, radius = _centred(distinct)
        can = once.clone()
        can[once] = _can_win(unit, once.nonzero().flatten())
        mask[head] = ~can[which]
        if margins:
            sizes[head] = _margins(unit.cpu().numpy(), radius, can)[which]
    mask, sizes = (x.reshape(*batch, n).to(keys.device) for x in (mask, sizes))
    return Selectability(mask, sizes if margins else None)


def _centred(keys: Tensor) -> tuple[Tensor, float]:
    """Keys about their mean in units of their radius, (n, k), and the radius; zeros and 0 if there is but one."""
    offset = keys - keys[:1]
    top = float(offset.abs().amax())
    if top == 0:
        return offset, 0.0
    offset = offset / top
    offset = offset - offset.mean(0)
    radius = float(torch.linalg.vector_norm(offset, dim=-1).amax())
    return offset / radius, radius * top


def _can_win(keys: Tensor, own: Tensor) -> Tensor:
    """Whether each of the keys numbered `own` (c,) is selectable among distinct, centred keys (n, k): (c,) bool."""
    can = torch.ones(len(own), dtype=torch.bool)
    if len(keys) == 1:
        return can
    # Along their principal axes the keys have as many coordinates as they need, and are made round by a division.
    left, s, _ = torch.linalg.svd(keys, full_matrices=False)
    rank = int((s > max(keys.shape) * torch.finfo(s.dtype).eps * s[0]).sum())
    left, s = left[:, :rank], s[:rank]
    own = own.to(keys.device)
    todo = torch.arange(len(own), device=keys.device)
    for examine in (_from_the_centre, _by_reflection):
        todo = todo[~examine(left, s, own[todo])]
    points = (left * s).cpu().numpy()
    for c, i in zip(todo.tolist(), own[todo].tolist(), strict=True):
        can[c] = _outside(points, i)
    return can


def _from_the_centre(left: Tensor, s: Tensor, own: Tensor) -> Tensor:
    """Which of the keys `own` lead for the query that points to them from the centre of the best fitting sphere.

    On a sphere this is all of them, each leading by half its squared distance from the next.
    """
    keys = left * s
    centre = (left.mT @ keys.square().sum(1)) / (2 * s)  # |k|² = 2 c·k + constant in least squares, as Σ k = 0
    queries = keys[own] - centre
    lead, _ = _leads(queries @ keys.mT, own)
    return lead > WINS * torch.linalg.vector_norm(queries, dim=1)


def _by_reflection(left: Tensor, s: Tensor, own: Tensor) -> Tensor:
    """Which of the keys `own` come to lead when their queries are reflected, time and again, off the worst rival.

    A query that scores a rival higher lies on the wrong side of the plane where both score alike; reflecting it there
    brings it nearer to every query that suits the key (Agmon; Motzkin and Schoenberg, Can. J. Math. 6, 1954). Done in
    coordinates in which the keys' covariance is round, which changes nothing but the number of steps.
    """
    round_ = left * s[0]
    can = torch.zeros(len(own), dtype=torch.bool, device=left.device)
    todo = torch.arange(len(own), device=left.device)
    queries = round_[own]
    for _ in range(REFLECTIONS):
        lead, rival = _leads(queries @ round_.mT, own[todo])
        found = lead > WINS * torch.linalg.vector_norm(queries * (s[0] / s), dim=1)
        can[todo[found]] = True
        todo, queries, lead, rival = todo[~found], queries[~found], lead[~found], rival[~found]
        away = round_[own[todo]] - round_[rival]
        distance = torch.linalg.vector_norm(away, dim=1).clamp_min(1e-150)
        # A little beyond the mirror image, or a query on the plane itself would never leave it.
        step = 2 * (-lead).clamp_min(0.0) / distance + 1e-3 * torch.linalg.vector_norm(queries, dim=1)
        queries = queries + (step / distance).unsqueeze(1) * away
    return can


def _leads(scores: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """By how much key own[c] leads in row c of scores (c, n), negative if it does not, and its best rival: (c,)."""
    mine = scores.gather(1, own.unsqueeze(1))
    best, rival = scores.scatter(1, own.unsqueeze(1), -math.inf).max(1)
    return mine.squeeze(1) - best, rival


def _outside(keys: Points, i: int) -> bool:
    """Whether key i of (n, k) lies outside the hull of the others, by nonnegative least squares."""
    steps = np.delete(keys, i, 0) - keys[i]
    lengths = np.linalg.norm(steps, axis=1)
    if not lengths.all():
        return False
    # Σ a_j (k_j − k_i) = 0 and Σ a_j = 1 in least squares; columns of like length converge sooner.
    equations = np.vstack([steps.T, np.ones(len(steps))]) / lengths
    target = np.zeros(len(equations))
    target[-1] = 1.0
    try:
        shares = nnls(equations, target)[0] / lengths
    except RuntimeError:  # its number of iterations is bounded
        return _wins(keys, i, _program(keys, i))
    query = -(shares @ steps)  # from the nearest point of the hull to the key, times the sum of shares
    if _wins(keys, i, query):
        return True
    return bool(np.linalg.norm(query) > HULL * shares.sum()) and _wins(keys, i, _program(keys, i))


def _program(keys: Points, i: int) -> Points:
    """The query, |q|_∞ <= 1, for which key i of (n, k) leads most, (k,)."""
    n, k = keys.shape
    steps = np.delete(keys, i, 0) - keys[i]
    result = linprog(
        np.append(np.zeros(k), -1.0),
        A_ub=np.column_stack([steps, np.ones(n - 1)]),  # q·(k_j − k_i) + t <= 0
        b_ub=np.zeros(n - 1),
        bounds=[(-1, 1)] * k + [(0, None)],
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if result.x is None:
        raise RuntimeError(f"HiGHS could not solve the linear program of key {i}: {result.message}")
    return np.clip(result.x[:k], -1.0, 1.0)


def _lead(keys: Points, i: int, query: Points) -> float:
    """By how much key i leads for the query; negative if it does not."""
    scores = keys @ query
    return float(scores[i] - np.delete(scores, i).max())


def _wins(keys: Points, i: int, query: Points) -> bool:
    return _lead(keys, i, query) > WINS * float(np.linalg.norm(query))


def _margins(keys: Points, radius: float, can: Tensor) -> Tensor:
    """The largest lead for |q|_∞ <= 1 of every key that can win, 0 for the others: (n,), in the unit of the radius."""
    margins = torch.zeros(len(keys), dtype=torch.float64)
    for i in can.nonzero().flatten().tolist():
        # A lead below the program's accuracy may come out negative.
        margins[i] = radius * max(0.0, _lead(keys, i, _program(keys, i))) if len(keys) > 1 else math.inf
    return margins
