"""Where factors lie in parameters, what acts on them, and which lists of pairs an optimizer refuses."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from drawn import gap, normal, off
from torch import Tensor, nn

from gaugekit.optim.pairs import Block, Factor, Pair, Window, balance_, scramble_
from gaugekit.optim.projected import Horizontal
from gaugekit.optim.quotient import QuotientAdam, QuotientSGD

F64 = torch.float64
TURNING = (((0, 2), (1, 3)), ((4, 5),))


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def parameter(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(normal(*shape, seed=seed))


def product(pair: Pair) -> list[Tensor]:
    """G of every block."""
    return [b.mH @ a for a, b in pair.factors()]


def biased() -> Pair:
    """Values [W_V b_V] and outputs W_O of two heads, as linear layers hold them."""
    w, bias, o = parameter(6, 5), parameter(6, seed=1), parameter(4, 6, seed=2)
    a = Factor(
        (
            Window(w, lambda x: x.unflatten(0, (2, 3))),
            Window(bias, lambda x: x.unflatten(0, (2, 3)).unsqueeze(-1)),
        )
    )
    return Pair("vo", a, Factor((Window(o, lambda x: x.t().unflatten(0, (2, 3))),)))


def turning() -> Pair:
    plain = Pair.of(parameter(3, 8, 5), parameter(3, 8, 6, seed=1))
    return Pair("qk", plain.a, plain.b, TURNING)


# --- reading and writing ----------------------------------------------------------------------------------------


def test_factors_are_copies_of_the_parts_and_are_written_back() -> None:
    pair = biased()
    w, bias, o = pair.parameters
    assert pair.a.shape == (2, 3, 6)
    assert pair.b.shape == (2, 3, 4)
    ((a, b),) = pair.factors()
    assert torch.equal(a[1], torch.cat([w[3:], bias[3:, None]], 1))
    assert torch.equal(b[1], o[:, 3:].t())
    a.zero_()
    assert bool(w.all())
    with torch.no_grad():
        pair.a.write(a, torch.Tensor.detach)
        pair.b.write(2 * b, torch.Tensor.detach)
    assert not bool(w.any()) and not bool(bias.any())
    assert torch.equal(o[:, 3:].t(), 2 * b[1])


def test_whole_factors_are_copies_too() -> None:
    p = parameter(2, 3, 4)
    Pair.of(p, parameter(2, 3, 5)).a.read(torch.Tensor.detach).zero_()
    assert bool(p.all())


def test_parts_without_a_tensor_read_as_zero_and_are_not_written() -> None:
    pair = biased()
    w, bias, _ = pair.parameters
    gradient = normal(6, seed=5)
    got = pair.a.read(lambda p: gradient if p is bias else None)
    assert torch.equal(got[..., -1], gradient.view(2, 3))
    assert not bool(got[..., :-1].any())
    before = w.detach().clone()
    with torch.no_grad():
        pair.a.write(torch.zeros_like(got), lambda p: p.detach() if p is bias else None)
    assert torch.equal(w, before)
    assert not bool(bias.any())


def test_columns_may_lie_along_several_axes() -> None:
    p = parameter(4, 6, 5)  # queries of two heads in each of two groups: (h, k, d) with h = g · s
    window = Window(p, lambda x: x.unflatten(0, (2, 2)).transpose(1, 2))
    assert window.shape == (2, 6, 10)
    factor = Factor((window,))
    got = factor.read(torch.Tensor.detach)
    assert torch.equal(got[1, 2], torch.cat([p[2, 2], p[3, 2]]))
    with torch.no_grad():
        factor.write(3 * got, torch.Tensor.detach)
    assert torch.equal(factor.read(torch.Tensor.detach), 3 * got)


# --- blocks -----------------------------------------------------------------------------------------------------


def test_blocks_by_multiplicity() -> None:
    pair = turning()
    single, double, still = pair.blocks
    assert single.pairs == (((4, 5),),)
    assert double.pairs == (((0, 2), (1, 3)),)
    assert still.rows == (6, 7)
    a = pair.a.read(torch.Tensor.detach)
    assert torch.equal(single.take(a), torch.complex(a[:, 4], a[:, 5]).unsqueeze(1))
    assert torch.equal(double.take(a), torch.complex(a[:, [0, 1]], a[:, [2, 3]]))
    assert torch.equal(still.take(a), a[:, 6:])
    again = torch.zeros_like(a)
    for block in pair.blocks:
        block.put(again, block.take(a))
    assert torch.equal(again, a)


def test_groups_of_like_multiplicity_are_one_batch() -> None:
    plain = Pair.of(parameter(3, 6, 5), parameter(3, 6, 4))
    pair = Pair("qk", plain.a, plain.b, (((0, 3),), ((1, 4),), ((2, 5),)))
    (block,) = pair.blocks
    x = normal(3, 6, 5)
    taken = block.take(x)
    assert taken.shape == (9, 1, 5)
    assert torch.equal(taken[4].real[0], x[1, 1])  # head 1, group 1
    into = torch.zeros_like(x)
    block.put(into, taken)
    assert torch.equal(into, x)


def test_all_rows() -> None:
    x = normal(2, 3, 4)
    assert Block().take(x) is x


# --- the group --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [biased, turning])
@pytest.mark.parametrize("condition", [1.0, 10.0, 1e3])
def test_scramble_keeps_the_product_and_moves_the_factors(make, condition: float) -> None:
    pair = make()
    before, old = product(pair), [p.detach().clone() for p in pair.parameters]
    scramble_([pair], rng(), condition)
    for g, h in zip(before, product(pair), strict=True):
        assert float((g - h).abs().max()) < 1e-14 * condition
    assert all(gap(p.detach(), q) > 0.1 for p, q in zip(pair.parameters, old, strict=True))


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e3])
def test_sampled_elements_have_the_condition(condition: float) -> None:
    pair = turning()
    elements = pair.sample(rng(), condition)
    assert [tuple(s.shape) for s in elements] == [(3, 1, 1), (3, 2, 2), (3, 2, 2)]
    assert [s.dtype for s in elements] == [torch.complex128, torch.complex128, F64]
    for s in elements[1:]:
        assert torch.allclose(torch.linalg.cond(s), torch.full((3,), condition, dtype=F64), rtol=1e-8)
    single = torch.cat([pair.sample(rng(seed), condition)[0].abs().flatten() for seed in range(50)])
    assert float(single.max()) <= condition**0.5 * (1 + 1e-12)
    assert float(single.min()) >= condition**-0.5 * (1 - 1e-12)
    if condition > 1:
        assert float(single.max() / single.min()) > condition**0.7


def test_elements_are_drawn_where_the_generator_is() -> None:
    """Not on the device that new tensors go to."""
    single = Pair.of(parameter(2, 1, 5), parameter(2, 1, 4))
    with torch.device("meta"):
        elements = [pair.sample(rng(), 100.0) for pair in (single, turning())]
    for x, y in zip(elements, (single.sample(rng(), 100.0), turning().sample(rng(), 100.0)), strict=True):
        assert all(torch.equal(s, t) for s, t in zip(x, y, strict=True))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_turning_rows_of_half_precision(half: torch.dtype) -> None:
    pair = turning()
    for p in pair.parameters:
        p.data = p.data.to(half)
    before = product(pair)
    assert [g.dtype for g in before] == [torch.complex64, torch.complex64, half]
    scramble_([pair], rng())
    assert all(p.dtype == half for p in pair.parameters)
    for g, h in zip(before, product(pair), strict=True):
        assert float((g - h).abs().max()) < 100 * torch.finfo(half).eps


def test_both_components_of_the_group_are_sampled() -> None:
    """geoopt#230, pymanopt#301: an orthogonal sampler that finds rotations only."""
    pair = Pair.of(parameter(3, 5), parameter(3, 4))
    signs = {float(torch.linalg.det(pair.sample(rng(seed))[0]).sign()) for seed in range(20)}
    assert signs == {-1.0, 1.0}
    one = Pair.of(parameter(1, 5), parameter(1, 4))
    assert {float(one.sample(rng(seed))[0].sign()) for seed in range(20)} == {-1.0, 1.0}


def test_positive_pairs_are_scaled_by_positive_numbers() -> None:
    plain = Pair.of(parameter(7, 1, 5), parameter(7, 1, 4))
    pair = Pair("units", plain.a, plain.b, positive=True)
    before = pair.a.read(torch.Tensor.detach)
    scramble_([pair], rng(), 100.0)
    ratio = pair.a.read(torch.Tensor.detach) / before
    assert bool((ratio > 0).all())
    assert float(ratio.max() / ratio.min()) > 2
    balance_([pair])
    assert bool((pair.a.read(torch.Tensor.detach) / before > 0).all())


@pytest.mark.parametrize("make", [biased, turning])
def test_balance_finds_the_shortest_factors(make) -> None:
    pair = make()
    before = product(pair)
    scramble_([pair], rng(), 100.0)
    balance_([pair])
    for (a, b), g in zip(pair.factors(), before, strict=True):
        assert float((b.mH @ a - g).abs().max()) < 1e-10
        assert float((a @ a.mH - b @ b.mH).abs().max()) < 1e-10
        length = 2 * torch.linalg.svdvals(g).sum(-1)  # of the nuclear norm
        assert torch.allclose(a.abs().square().sum((1, 2)) + b.abs().square().sum((1, 2)), length, rtol=1e-9)


def test_float32_is_moved_in_float64_and_rounded_once() -> None:
    pair = Pair.of(nn.Parameter(normal(3, 5).float()), nn.Parameter(normal(3, 4, seed=1).float()))
    wide = Pair.of(*(nn.Parameter(p.detach().double()) for p in pair.parameters))
    scramble_([pair], rng(), 100.0)
    scramble_([wide], rng(), 100.0)
    for p, q in zip(pair.parameters, wide.parameters, strict=True):
        assert p.dtype == torch.float32
        assert torch.equal(p, q.float())


def test_batch_of_one_and_empty_batches() -> None:
    """TransformerLens#226: leading dimensions of one."""
    a, b = normal(3, 5), normal(3, 4, seed=1)
    flat, one = (
        Pair.of(nn.Parameter(a.clone()), nn.Parameter(b.clone())),
        Pair.of(nn.Parameter(a[None]), nn.Parameter(b[None])),
    )
    for pair in (flat, one):
        scramble_([pair], rng(), 10.0)
    for p, q in zip(flat.parameters, one.parameters, strict=True):
        assert torch.equal(p, q[0])
    none = Pair.of(parameter(0, 3, 5), parameter(0, 3, 4))
    scramble_([none], rng())
    balance_([none])
    assert none.factors()[0][0].shape == (0, 3, 5)


def test_copies_and_pickles_lead_to_their_own_parameters() -> None:
    model = nn.ParameterList([parameter(3, 5), parameter(3, 4)])
    pair = Pair.of(model[0], model[1])
    assert pair.a.windows[0].shape == (1, 3, 5)
    for twin_model, twin in (copy.deepcopy((model, pair)), pickle.loads(pickle.dumps((model, pair)))):
        assert twin.parameters[0] is twin_model[0]
        scramble_([twin], rng())
        assert off(twin_model[0].detach(), model[0].detach()) > 0.1


# --- errors -----------------------------------------------------------------------------------------------------


def of(*shapes: tuple[int, ...]) -> Pair:
    return Pair.of(*(parameter(*shape) for shape in shapes))


def wrong_heads() -> Pair:
    return of((2, 3, 4), (3, 3, 4))


def wrong_rows() -> Pair:
    return Pair("qk", of((8, 5), (8, 5)).a, of((8, 5), (8, 5)).b, (((0, 8),),))


def twice() -> Pair:
    return Pair("qk", of((8, 5), (8, 5)).a, of((8, 5), (8, 5)).b, (((0, 1),), ((1, 2),)))


def wide_units() -> Pair:
    return Pair("units", of((8, 2, 5), (8, 2, 5)).a, of((8, 2, 5), (8, 2, 5)).b, positive=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (wrong_heads, r"factors of pair differ in \(heads, rank\): \[\(2, 3\), \(3, 3\)\]"),
        (wrong_rows, "turning of qk must name rows of 8, each once"),
        (twice, "turning of qk must name rows of 8, each once"),
        (wide_units, "positive scales act on units of rank 1, those of units have 2"),
        (lambda: of((5,), (5,)), r"factors of pair must be \(r, m\) or \(N, r, m\), got \(5,\)"),
        (lambda: of((3, 4), (2, 3, 4)), "factors of pair differ"),
        (lambda: of((0, 4), (0, 5)), "factors of pair have rank 0: there is nothing to train"),
    ],
)
def test_bad_pairs(make, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("optimizer", [QuotientAdam, QuotientSGD])
def test_lists_of_pairs_that_no_optimizer_takes(optimizer) -> None:
    a, b, c = parameter(4, 5), parameter(4, 6), parameter(4, 7)
    params = [a, b, c]

    def refused(message: str, *found: Pair) -> None:
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            optimizer(params, pairs=found)
        assert "\n" not in str(caught.value)

    optimizer(params, pairs=[Pair.of(a, b)])
    refused("two pairs are called p", Pair.of(a, b, "p"), Pair.of(c, parameter(4, 2), "p"))
    refused("pair q overlaps with another", Pair.of(a, b, "p"), Pair.of(a, c, "q"))
    refused("pair p overlaps with another", Pair.of(a, a, "p"))
    upper = Factor((Window(a, lambda x: x[:2].unsqueeze(0)),))
    refused("belongs to pair p in part only", Pair("p", upper, Pair.of(parameter(2, 3), parameter(2, 3)).b))
    copied = Factor((Window(a, lambda x: x.clone().unsqueeze(0)),))
    refused("belongs to pair p in part only", Pair("p", copied, Pair.of(b, c).a))
    refused("holds no parameter of pair p", Pair.of(parameter(4, 5), parameter(4, 6), "p"))
    refused("holds no parameter of pair p", Pair.of(a.data, b.detach(), "p"))  # other tensors, if of the same memory
    with pytest.raises(TypeError, match=r"pairs are objects of class Pair, got tuple: Pair\.of\(a, b\) makes one"):
        optimizer(params, pairs=[(a, b)])
    with pytest.raises(TypeError, match="got Parameter: "):
        Horizontal(torch.optim.SGD(params), [a, b])  # type: ignore[list-item]


def test_frozen_pairs_need_not_be_held() -> None:
    a, b, c = parameter(4, 5), parameter(4, 6), parameter(3)
    pair = Pair.of(a.requires_grad_(False), b.requires_grad_(False))
    c.grad = torch.ones_like(c)
    QuotientAdam([c], pairs=[pair]).step()
    assert torch.equal(a, parameter(4, 5)) and gap(c.detach(), parameter(3).detach()) > 1e-4


def test_views_that_copy_are_refused() -> None:
    p = parameter(6, 5)
    copies = Factor((Window(p, lambda x: x.t().reshape(2, 3, 5)),))
    with pytest.raises(ValueError, match=r"view of a parameter \(6, 5\) copies: it must share memory"):
        copies.read(torch.Tensor.detach)


def test_halves_of_one_parameter_make_a_cover() -> None:
    """Query, key and value in one parameter, as nn.MultiheadAttention holds them."""
    packed, other = parameter(6, 5), parameter(3, 4)
    parts = [Factor((Window(packed, lambda x, i=i: x[3 * i :][:3].unsqueeze(0)),)) for i in (0, 1)]
    QuotientAdam([packed], pairs=[Pair("qk", *parts)])
    with pytest.raises(ValueError, match="in part only"):
        QuotientAdam([packed, other], pairs=[Pair("qk", parts[0], Pair.of(other, other).a)])
