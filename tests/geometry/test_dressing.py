"""The singular frame against what defines it: covariance of it, invariance of the states, finite right gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from equivariance import assert_equivariant, orthogonal
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from gaugekit.geometry.dressing import TIE, _block, ambiguity, dress
from gaugekit.linalg import degenerate_blocks, random_orthogonal

F64 = torch.float64
SHAPES = [(1, 1), (1, 4), (4, 1), (2, 2), (6, 3), (3, 6), (5, 5), (2, 1)]
RANKS = [(6, 4, 2), (3, 6, 2), (4, 4, 1), (5, 3, 0), (7, 7, 6)]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=F64)


def of_rank(n: int, d: int, rank: int) -> Tensor:
    return normal(n, rank, seed=3) @ normal(rank, d, seed=4)


def with_spectrum(n: int, d: int, s: list[float]) -> Tensor:
    left, right = random_orthogonal(n, rng(5))[:, : len(s)], random_orthogonal(d, rng(6))[: len(s)]
    return left @ torch.diag(torch.tensor(s, dtype=F64)) @ right


def some_states() -> list[Tensor]:
    return [normal(*shape) for shape in SHAPES] + [of_rank(*case) for case in RANKS]


# --- the singular frame -------------------------------------------------------------------------------------


@pytest.mark.parametrize("determinant", [1, -1])
@pytest.mark.parametrize("x", some_states(), ids=lambda x: "x".join(map(str, x.shape)))
def test_dressed_states_are_the_same_in_every_frame(x: Tensor, determinant: int) -> None:
    """n < d, k = n (pymanopt#34), rank-deficient; both components of O(d) (geoopt#230)."""
    dressed = dress(x)
    n, d = x.shape
    m, rank = min(n, d), int(torch.linalg.matrix_rank(x))
    assert dressed.states.shape == (n, m) and dressed.frame.shape == (m, d)
    torch.testing.assert_close(dressed.frame @ dressed.frame.mT, torch.eye(m, dtype=F64), rtol=0, atol=1e-13)
    torch.testing.assert_close(dressed.states @ dressed.frame, x, rtol=0, atol=1e-13)
    torch.testing.assert_close(dressed.states, x @ dressed.frame.mT, rtol=0, atol=1e-13)
    assert bool((dressed.states[:, rank:] == 0).all())
    g = orthogonal(d, determinant, rng(1))
    turned = dress(x @ g.mT)
    torch.testing.assert_close(turned.states, dressed.states, rtol=0, atol=1e-12)
    torch.testing.assert_close(turned.frame[:rank], dressed.frame[:rank] @ g.mT, rtol=0, atol=1e-12)


def test_a_bare_svd_does_not_have_that_property() -> None:
    x = normal(6, 3)
    turned = [x @ orthogonal(3, 1, rng(seed)).mT for seed in range(8)]
    bare = [y @ torch.linalg.svd(y).Vh.mT for y in turned]
    assert max(float((y - bare[0]).abs().max()) for y in bare) > 0.1
    assert max(float((dress(y).states - dress(x).states).abs().max()) for y in turned) < 1e-12


def test_states_and_frame_are_those_of_the_svd() -> None:
    x = normal(6, 3)
    left, s, right = torch.linalg.svd(x, full_matrices=False)
    dressed = dress(x)
    torch.testing.assert_close(dressed.states.abs(), (left * s).abs(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(dressed.frame.abs(), right.abs(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_gradients_turn_along(shape: tuple[int, int]) -> None:
    assert_equivariant(lambda x: dress(x).states, normal(*shape), invariant=True)
    assert_equivariant(lambda x: dress(x).frame, normal(*shape))


@pytest.mark.parametrize("case", RANKS[:3])
def test_gradients_turn_along_where_rank_is_deficient(case: tuple[int, int, int]) -> None:
    rank = case[-1]
    assert_equivariant(lambda x: dress(x).states, of_rank(*case), invariant=True)
    assert_equivariant(lambda x: dress(x).frame[:rank], of_rank(*case))


def test_sign_rule_is_on_the_token_side() -> None:
    """pytorch#194705: backends differ in signs, so the first entry of largest magnitude decides."""
    states = dress(normal(20, 6)).states
    assert bool((states.gather(0, states.abs().argmax(0, keepdim=True)) > 0).all())
    # Two opposite tokens share the largest magnitude: the first one decides, whatever rounding says.
    x = with_spectrum(4, 3, [3.0, 2.0, 1.0])
    x = torch.stack([x[0], -x[0], x[1], x[2], -x[1]]) * torch.tensor([3.0, 3.0, 1.0, 1.0, 1.0], dtype=F64)[:, None]
    for seed in range(8):
        first, second = dress(x @ orthogonal(3, 1 - 2 * (seed % 2), rng(seed)).mT).states[:2, 0]
        assert float(first) > 0 > float(second)
        assert float(first + second) == pytest.approx(0, abs=1e-13)


@pytest.mark.parametrize("batch", [(), (1,), (3,), (1, 1), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("shape", [(5, 3), (2, 4), (0, 3)])
def test_batches(batch: tuple[int, ...], shape: tuple[int, int]) -> None:
    """TransformerLens#226: leading dimensions of one."""
    x = normal(*batch, *shape).requires_grad_()
    m = min(shape)
    dressed = dress(x)
    assert dressed.states.shape == (*batch, shape[0], m) and dressed.frame.shape == (*batch, m, shape[1])
    (gradient,) = torch.autograd.grad(dressed.states.pow(3).sum() + dressed.frame.pow(3).sum(), x)
    for index in product(*map(range, batch)):
        y = x[index].detach().requires_grad_()
        single = dress(y)
        torch.testing.assert_close(dressed.states[index], single.states, rtol=0, atol=1e-13)
        torch.testing.assert_close(dressed.frame[index], single.frame, rtol=0, atol=1e-13)
        (alone,) = torch.autograd.grad(single.states.pow(3).sum() + single.frame.pow(3).sum(), y)
        torch.testing.assert_close(gradient[index], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)]
)
@pytest.mark.parametrize("shape", [(6, 3), (3, 6)])
def test_lower_precision(dtype: torch.dtype, tolerance: float, shape: tuple[int, int]) -> None:
    """pytorch#66707: half precision is the float32 path, rounded once."""
    x = normal(*shape).to(dtype)
    low, high = dress(x), dress(x.double())
    assert low.states.dtype == low.frame.dtype == dtype
    torch.testing.assert_close(
        low.states.double(), high.states, rtol=0, atol=tolerance * float(high.states.abs().max())
    )
    torch.testing.assert_close(low.frame.double(), high.frame, rtol=0, atol=tolerance)
    assert torch.equal(low.states, dress(x.float()).states.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_rank_is_seen_in_each_precision(dtype: torch.dtype) -> None:
    x = of_rank(50, 40, 7).to(dtype)
    states = dress(x).states
    assert bool((states[:, 7:] == 0).all()) and bool((states[:, :7] != 0).any(0).all())
    assert ambiguity(x).null == (7, 33)


@pytest.mark.parametrize("unit", [1e30, 1e-30])
def test_states_of_any_unit(unit: float) -> None:
    """pytorch PR#178123: entries of 1e30 in float32 keep a finite direction; gradients too."""
    x = normal(5, 3).float()
    plain = dress(x)
    y = (x * unit).requires_grad_()
    dressed = dress(y)
    torch.testing.assert_close(dressed.frame, plain.frame, rtol=0, atol=1e-5)
    torch.testing.assert_close(dressed.states / unit, plain.states, rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad((dressed.states * normal(5, 3, seed=1).float()).sum(), y)
    z = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad((dress(z).states * normal(5, 3, seed=1).float()).sum(), z)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


# --- its gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (5, 3), (3, 5), (4, 4), (2, 4, 3)])
def test_gradients_away_from_ties(shape: tuple[int, ...]) -> None:
    x = normal(*shape, seed=2).requires_grad_()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        dressed = dress(x)
        return dressed.states, dressed.frame

    assert gradcheck(function, x)
    assert gradgradcheck(function, x)


@pytest.mark.parametrize("case", RANKS[:3])
def test_gradients_of_what_a_deficient_rank_leaves_defined(case: tuple[int, int, int]) -> None:
    rank = case[-1]
    x = of_rank(*case).requires_grad_()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        dressed = dress(x)
        return dressed.states[:, :rank], dressed.frame[:rank]

    assert gradcheck(function, x)
    assert gradgradcheck(function, x)


TIED = {
    "identity": torch.eye(4, dtype=F64),
    "orthogonal": random_orthogonal(4, rng(7)),
    "zero": torch.zeros(4, 3, dtype=F64),
    "one zero token": torch.zeros(1, 3, dtype=F64),
    "repeated tokens": normal(1, 4).expand(5, 4).clone(),
    "two tokens, repeated": normal(2, 4)[[0, 1, 1, 0, 0]],
    "opposite tokens": torch.cat([torch.eye(3, dtype=F64), -torch.eye(3, dtype=F64)]),
    "tied and deficient": with_spectrum(6, 5, [2.0, 2.0, 1.0]),
    "tied and wide": with_spectrum(3, 7, [2.0, 2.0, 2.0]),
    "constant": torch.ones(3, 5, dtype=F64),
}


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("name", TIED)
def test_gradients_are_finite_at_ties(name: str, dtype: torch.dtype) -> None:
    """pytorch#116394, jax#2311: NaN derivatives at degeneracy. pytorch#184575: a finite policy at zero."""
    x = TIED[name].to(dtype).clone().requires_grad_()
    dressed = dress(x)
    loss = (dressed.states * normal(*dressed.states.shape, seed=8).to(dtype)).sum()
    loss = loss + (dressed.frame * normal(*dressed.frame.shape, seed=9).to(dtype)).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    for gradient in (first, second):
        assert bool(gradient.isfinite().all())
        assert float(gradient.detach().abs().max()) < 1e6
    if name in ("zero", "one zero token"):
        assert bool((first == 0).all())


def test_gradients_are_bounded_where_rounding_hides_a_gap() -> None:
    """Small values, apart as the SVD has them, whose squares float32 cannot tell apart."""
    left, right = random_orthogonal(6, rng(1))[:, :4], random_orthogonal(4, rng(2))
    for seed in range(400):
        share = torch.rand(2, generator=rng(seed), dtype=F64).tolist()
        small = 10 ** (-3 - 3 * share[0])
        s = torch.tensor([1.0, 0.5, small, small * (1 - 3 * TIE * share[1])], dtype=F64)
        x = (left @ torch.diag(s) @ right).float().requires_grad_()
        frame = dress(x).frame
        (gradient,) = torch.autograd.grad((frame * normal(4, 4, seed=seed).float()).sum(), x)
        assert float(gradient.abs().max()) * TIE * float(s[-1]) < 10, seed


def test_the_derivative_of_a_bare_svd_is_not_finite_there() -> None:
    x = torch.eye(4, dtype=F64).requires_grad_()
    (gradient,) = torch.autograd.grad((x @ torch.linalg.svd(x).Vh.mT * normal(4, 4)).sum(), x)
    assert not bool(gradient.isfinite().all())


def test_the_frame_is_held_still_inside_a_tie_and_moves_just_outside() -> None:
    weights = normal(6, 3, seed=1)

    def gradient(gap: float) -> tuple[Tensor, Tensor]:
        x = with_spectrum(6, 3, [2.0, 2.0 * (1 - gap), 0.5]).requires_grad_()
        dressed = dress(x)
        (grad,) = torch.autograd.grad((dressed.states * weights)[:, :2].sum(), x)
        held = weights[:, :2] @ dressed.frame[:2].detach()
        # What is left beside the held frame: both rows still turn towards the third, which lies apart.
        a = dressed.states.detach()
        return (grad - held) @ dressed.frame.detach()[:2].mT, a[:, :2]

    for gap in (0.0, 0.9 * TIE):
        rest, a = gradient(gap)
        coefficients = torch.linalg.lstsq(a, rest).solution
        assert float(coefficients.abs().max()) < 1e-10
    rest, a = gradient(1.1 * TIE)
    assert float(torch.linalg.lstsq(a, rest).solution.abs().max()) > 10


@pytest.mark.parametrize("gap", [2 * TIE, 1e-2])
def test_gradients_near_but_outside_a_tie_are_right(gap: float) -> None:
    x = with_spectrum(5, 3, [1.0, 1.0 - gap, 0.3]).requires_grad_()
    assert gradcheck(lambda x: dress(x).states, x, eps=1e-9, atol=1e-3, rtol=1e-3)


# --- what is left open --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "blocks", "null", "group"),
    [
        (with_spectrum(5, 3, [3.0, 2.0, 1.0]), (), None, "1"),
        (with_spectrum(5, 3, [3.0, 2.0, 2.0]), ((1, 2),), None, "O(2)"),
        (with_spectrum(5, 5, [3.0, 2.0, 2.0, 2.0]), ((1, 3), (4, 1)), (4, 1), "O(3) × O(1)"),
        (with_spectrum(6, 6, [2.0, 2.0]), ((0, 2), (2, 4)), (2, 4), "O(2) × O(4)"),
        (with_spectrum(3, 6, [2.0, 1.0]), ((2, 1),), (2, 1), "O(4)"),
        (with_spectrum(3, 6, [3.0, 2.0, 1.0]), (), None, "1"),
        (with_spectrum(4, 4, [1.0, 0.99995, 0.9999, 0.5]), ((0, 3),), None, "O(3)"),
        (with_spectrum(3, 3, [1.0, 1e-10, 1e-14]), ((2, 1),), (2, 1), "O(1)"),
        (torch.zeros(3, 2, dtype=F64), ((0, 2),), (0, 2), "O(2)"),
        (torch.zeros(0, 2, dtype=F64), (), None, "1"),
        (1e-300 * torch.eye(3, dtype=F64), ((0, 3),), None, "O(3)"),
    ],
)
def test_ambiguity(x: Tensor, blocks: tuple[tuple[int, int], ...], null: tuple[int, int] | None, group: str) -> None:
    report = ambiguity(x)
    assert (report.blocks, report.null, report.group) == (blocks, null, group)


def test_ambiguity_is_exactly_what_is_open() -> None:
    """In another frame, tied columns come back turned by an element of O(2), the same for frame; the others equal."""
    x = with_spectrum(6, 5, [3.0, 2.0, 2.0, 1.0])
    assert ambiguity(x).blocks == ((1, 2), (4, 1))
    before = dress(x)
    differences = []
    for seed in range(6):
        g = random_orthogonal(5, rng(seed))
        after = dress(x @ g.mT)
        turn = (before.frame @ g.mT @ after.frame.mT)[1:3, 1:3]
        torch.testing.assert_close(turn @ turn.mT, torch.eye(2, dtype=F64), rtol=0, atol=1e-12)
        torch.testing.assert_close(after.states[:, 1:3], before.states[:, 1:3] @ turn, rtol=0, atol=1e-12)
        torch.testing.assert_close(after.states[:, [0, 3]], before.states[:, [0, 3]], rtol=0, atol=1e-12)
        differences.append(float((after.states - before.states).abs().max()))
    assert max(differences) > 0.1


@pytest.mark.parametrize("seed", range(20))
def test_gradients_and_report_tie_the_same_values(seed: int) -> None:
    steps = torch.tensor([0.0, 0.5 * TIE, 0.99 * TIE, 1.01 * TIE, 0.1], dtype=F64)
    s = torch.cumprod(1 - steps[torch.randint(5, (9,), generator=rng(seed))], 0)
    s[7:] *= torch.randint(2, (1,), generator=rng(seed))
    numbers = _block(s).tolist()
    runs = [(numbers.index(b), numbers.count(b)) for b in sorted(set(numbers))]
    assert [run for run in runs if run[1] > 1] == degenerate_blocks(s, TIE)
