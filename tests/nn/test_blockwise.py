"""Attention by any f, in tiles and through FlexAttention, against the same f on whole matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from gaugekit.nn import blockwise
from gaugekit.nn.blockwise import blockwise_attention
from gaugekit.nn.flexible import flexible_attention
from gaugekit.nn.relational import RelationalAttention, relational_attention
from gaugekit.nn.scores import LearnedScore


def draw(*shape: int, seed: int = 0, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def learned(heads: int, units: int = 4, dtype=torch.float64) -> LearnedScore:
    """Off its starting point, where units cancel."""
    score = LearnedScore(heads, units).to(dtype)
    score.units.data = draw(heads, units, 4, dtype=dtype) * 0.5
    return score


class Smooth(nn.Module):
    """A user's own: twice differentiable with something to see, parameters of its own shapes, one of them unused."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(draw(heads, seed=1))
        self.bend = nn.Parameter(draw(1, seed=2))
        self.idle = nn.Parameter(draw(3, seed=3))

    def forward(self, g_ij, g_ii, g_jj, head):
        return self.gain[head] * torch.tanh(g_ij * self.bend[0]) + (0.1 * g_ii * g_jj).sin()


FUNCTIONS = {
    "learned": lambda: learned(3),
    "smooth": lambda: Smooth(3),
    "dot": lambda: lambda g, ii, jj, head: g,
    "by the head": lambda: lambda g, ii, jj, head: g * (head + 1) - jj * ii.sqrt(),
    "keys only": lambda: lambda g, ii, jj, head: jj.sqrt(),
    "constant": lambda: lambda g, ii, jj, head: torch.zeros_like(g),
}


def whole(score, q: Tensor, k: Tensor, v: Tensor, inverse: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    heads = []
    for h in range(q.shape[1]):
        ii, jj = q[:, h].square().sum(-1)[:, :, None], k[:, h].square().sum(-1)[:, None]
        heads.append(score(q[:, h] @ k[:, h].mT, ii, jj, h).expand(-1, q.shape[2], k.shape[2]))
    s = torch.stack(heads, 1) * inverse[:, None, None]
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    if causal:
        n, m = s.shape[-2:]
        s = s.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(m - n + 1), -math.inf)
    blind = (s == -math.inf).all(-1, keepdim=True)
    return s.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ v


@pytest.mark.parametrize("tile", [(1, 1), (3, 2), (2, 5), (4, 3), (100, 100)])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("causal", "masked"), [(False, None), (True, None), (True, "keys"), (False, "numbers")])
def test_equals_the_whole(tile, name, causal, masked, monkeypatch):
    """Sizes that a tile divides, that it does not, smaller than it; several items of the batch in one."""
    monkeypatch.setattr(blockwise, "TILE", tile)
    score = FUNCTIONS[name]()
    q, k, v = (draw(5, 3, n, w, seed=s).requires_grad_() for n, w, s in ((4, 3, 0), (7, 3, 1), (7, 2, 2)))
    inverse = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    mask = None
    if masked == "keys":
        mask = torch.rand(5, 1, 1, 7, generator=torch.Generator().manual_seed(0)) > 0.5
        mask[2] = False
    elif masked == "numbers":
        mask = draw(1, 3, 4, 7).masked_fill(draw(1, 3, 4, 7, seed=1) > 1, -math.inf)
    y, z = (
        attend(q, k, v, inverse)
        for attend in (
            lambda q, k, v, i: blockwise_attention(q, k, v, score, i, mask, causal=causal),
            lambda q, k, v, i: whole(score, q, k, v, i, mask, causal),
        )
    )
    torch.testing.assert_close(y, z, rtol=1e-11, atol=1e-12)
    wanted = [q, k, v, inverse, *(score.parameters() if isinstance(score, nn.Module) else ())]
    weights = draw(*y.shape, seed=4)
    ours = torch.autograd.grad(y, wanted, weights)
    theirs = torch.autograd.grad(z, wanted, weights, materialize_grads=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["learned", "smooth", "constant"])
def test_derivatives(name, monkeypatch):
    monkeypatch.setattr(blockwise, "TILE", (3, 2))
    score = FUNCTIONS[name]()
    q, k, v = (draw(1, 3, n, 2, seed=s).requires_grad_() for n, s in ((4, 0), (5, 1), (5, 2)))
    inverse = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 1, 4, 5, dtype=torch.bool)
    mask[:, :, 1] = False

    def attend(q, k, v, inverse, *_):
        return blockwise_attention(q, k, v, score, inverse, mask, causal=True)

    inputs = (q, k, v, inverse, *(score.parameters() if isinstance(score, nn.Module) else ()))
    assert gradcheck(attend, inputs)
    assert gradgradcheck(attend, inputs)


def test_what_needs_no_gradient_gets_none():
    """Frozen scores, and states that are data."""
    score = learned(2).requires_grad_(False)
    x = draw(1, 2, 6, 3).requires_grad_()
    inverse = torch.ones(2, dtype=torch.float64)
    for create_graph in (False, True):
        y = blockwise_attention(x, x, x, score, inverse, None, causal=False)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=create_graph)
        (expected,) = torch.autograd.grad(whole(score, x, x, x, inverse, None, False).square().sum(), x)
        torch.testing.assert_close(gradient, expected)
    score.requires_grad_(True)
    x = x.detach()
    y = blockwise_attention(x, x, x, score, inverse, None, causal=False)
    (gradient,) = torch.autograd.grad(y.square().sum(), score.units)
    (expected,) = torch.autograd.grad(whole(score, x, x, x, inverse, None, False).square().sum(), score.units)
    torch.testing.assert_close(gradient, expected)


def test_parameters_put_in_from_outside_get_their_gradient():
    """The backward pass evaluates f with the parameters of the forward pass, not with what the module holds by then."""
    layer = RelationalAttention(6, 2, score="learned").double()
    x, units = draw(1, 5, 6), draw(2, 8, 4).requires_grad_()
    y = functional_call(layer, {"score.units": units}, (x,))
    (gradient,) = torch.autograd.grad(y.square().sum(), units)
    layer.score.units.data = units.detach().clone()
    layer(x).square().sum().backward()
    torch.testing.assert_close(gradient, layer.score.units.grad)


def test_gradients_that_would_be_lost_are_refused():
    x, gain = draw(1, 1, 4, 3), torch.ones((), dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match=r"make it an nn\.Module"):
        relational_attention(x, score=lambda g, ii, jj, head: g * gain)
    with torch.no_grad():
        relational_attention(x, score=lambda g, ii, jj, head: g * gain.detach())
    module = Smooth(1).double()
    assert relational_attention(x, score=module).requires_grad  # parameters are fine, tensors beside them are not
    for hold in (nn.Module.register_buffer, setattr):
        held = Held()
        hold(held, "gain", gain)
        with pytest.raises(ValueError, match=r"nn\.Module with parameters"):
            relational_attention(x, score=held)


class Held(nn.Module):
    """A score with a tensor that is no parameter."""

    gain: Tensor

    def forward(self, g, ii, jj, head):
        return g * self.gain


class Sizes(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize("causal", [False, True])
def test_no_square_matrix_in_either_direction(causal, monkeypatch):
    monkeypatch.setattr(blockwise, "TILE", (16, 8))
    n, heads, k = 96, 2, 4
    score, x = learned(heads), draw(1, heads, n, k).requires_grad_()
    mask = torch.rand(1, 1, 1, n, generator=torch.Generator().manual_seed(0)) > 0.3
    with Sizes() as sizes:
        relational_attention(x, score=score, is_causal=causal, attn_mask=mask).sum().backward()
    assert 16 * 8 <= sizes.largest <= max(heads * n * k, 16 * 8)  # states, or a tile
    with Sizes() as sizes:
        whole(score, x, x, x, torch.ones(heads, dtype=torch.float64), mask, causal).sum().backward()
    assert sizes.largest >= n * n


def test_hidden_tiles_are_not_computed(monkeypatch):
    monkeypatch.setattr(blockwise, "TILE", (4, 4))
    entries = []

    def score(g, ii, jj, head):
        entries.append(g.numel())
        return g

    x = draw(1, 1, 16, 3).requires_grad_()
    relational_attention(x, score=score, is_causal=True).sum().backward()
    assert sum(entries) == 1 + 2 * 10 * 16  # the look at f itself; 10 of 16 tiles, there and back


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_inside(dtype):
    score = learned(2, dtype=torch.float32)
    x = draw(1, 2, 40, 16, dtype=dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y = relational_attention(x, score=score, temperature=4.0)
    z = whole(score.double(), wide, wide, wide, torch.full((2,), 0.25, dtype=torch.float64), None, False)
    assert y.dtype == dtype
    step = torch.finfo(dtype).eps
    assert (y - z).abs().max() <= 0.51 * step * z.abs().max()  # the last rounding alone
    weights = draw(*y.shape, seed=1, dtype=dtype)
    (ours,), (theirs,) = torch.autograd.grad(y, x, weights), torch.autograd.grad(z, wide, weights.double())
    assert (ours - theirs).abs().max() <= 4 * step * theirs.abs().max()  # of out, of its gradient, of three shares in x


def test_float32_against_float64():
    score = learned(2, 8, torch.float32)
    x = draw(1, 2, 200, 16, dtype=torch.float32).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y = relational_attention(x, score=score, temperature=4.0)
    gradients = torch.autograd.grad(y.square().sum(), (x, score.units))
    inverse = torch.full((2,), 0.25, dtype=torch.float64)
    z = whole(score.double(), wide, wide, wide, inverse, None, False)
    exact = torch.autograd.grad(z.square().sum(), (wide, score.units))
    assert (y - z).abs().max() <= 1e-5 * z.abs().max()
    for ours, theirs in zip(gradients, exact, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sharp_scores(dtype):
    """Weights below the normal numbers are zero, and scores of 1e5 overflow nothing."""
    x = draw(1, 1, 50, 4, dtype=dtype)
    for size in (1e2, 1e5):
        y = relational_attention(x, score=lambda g, ii, jj, head, size=size: g * size)
        z = torch.nn.functional.scaled_dot_product_attention(x.double(), x.double(), x.double(), scale=size)
        torch.testing.assert_close(y.double(), z, rtol=0, atol=size * 100 * torch.finfo(dtype).eps)
    weights = relational_attention(x, value=torch.eye(50, dtype=dtype)[None, None], score=lambda g, *_: g * 1e3)
    assert (weights == 0).any() and weights[weights > 0].min() >= torch.finfo(dtype).tiny


# --- LearnedScore -------------------------------------------------------------------------------------------


def test_learned_score_starts_as_the_dot_product_and_leaves_it():
    score, x = LearnedScore(2), draw(1, 2, 9, 16, dtype=torch.float32)
    g, ii, jj = x[:, 0] @ x[:, 0].mT, x[:, 0].square().sum(-1)[..., None], x[:, 0].square().sum(-1)[:, None]
    assert torch.equal(score(g, ii, jj, 0), g)
    assert (score.units[..., 0] > 0).any(1).all() and (score.units[..., 0] < 0).any(1).all()  # rising and falling ones
    y = relational_attention(x, score=score, temperature=4.0)
    torch.testing.assert_close(y, relational_attention(x, temperature=4.0))
    y.square().sum().backward()
    gradient = score.units.grad
    assert gradient is not None and (gradient != 0).any(-1).all()
    torch.testing.assert_close(gradient[:, ::2], -gradient[:, 1::2])  # so the two of a pair part


def test_learned_score_of_a_tile_is_that_of_its_numbers():
    """The tile's own forward and backward pass against one relu after another, which FlexAttention sees."""
    score = learned(2, 6)
    g, ii, jj = (draw(*shape, seed=s).requires_grad_() for shape, s in (((2, 4, 3), 0), ((2, 4, 1), 1), ((2, 1, 3), 2)))
    inputs = (g, ii, jj, score.units)
    tile, numbers = score(g, ii, jj, 1), score(g, ii, jj, torch.tensor(1))
    torch.testing.assert_close(tile, numbers)
    weights = draw(2, 4, 3, seed=3)
    for ours, theirs in zip(
        torch.autograd.grad(tile, inputs, weights), torch.autograd.grad(numbers, inputs, weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs)

    def evaluate(g, ii, jj, units):
        return functional_call(score, {"units": units}, (g, ii, jj, 1)).square()

    assert gradcheck(evaluate, inputs)
    assert gradgradcheck(evaluate, inputs)


# --- FlexAttention ------------------------------------------------------------------------------------------


MASKS = {
    "none": lambda: None,
    "keys": lambda: torch.rand(2, 1, 1, 9, generator=torch.Generator().manual_seed(0)) > 0.3,
    "entries": lambda: torch.rand(1, 3, 5, 9, generator=torch.Generator().manual_seed(0)) > 0.3,
    "numbers": lambda: draw(1, 1, 5, 9, dtype=torch.float32),
}


def reference(test):
    """FlexAttention's own formula says that it is not compiled, and Dynamo, which reads f, looks at every .grad."""
    for message in (
        "flex_attention called without torch.compile",
        "The .grad attribute of a Tensor that is not a leaf",
    ):
        test = pytest.mark.filterwarnings(f"ignore:{message}")(test)
    return test


@reference
@pytest.mark.parametrize("name", ["learned", "smooth", "by the head"])
@pytest.mark.parametrize(("masked", "causal"), [("none", False), ("keys", True), ("entries", False), ("numbers", True)])
def test_flex_attention_is_given_the_same_scores(name, masked, causal, monkeypatch):
    """Its reference implementation, whose backward pass it denies to CPU tensors and yet has."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    score = FUNCTIONS[name]()
    score = score.float() if isinstance(score, nn.Module) else score
    q, k, v = (draw(2, 3, n, w, seed=s, dtype=torch.float32) for n, w, s in ((5, 4, 0), (9, 4, 1), (9, 8, 2)))
    inverse, mask = torch.tensor([0.5, 1.0, 2.0]), MASKS[masked]()
    wanted = [t.requires_grad_() for t in (q, k, v, inverse)]
    if isinstance(score, nn.Module):
        wanted += [p for n, p in score.named_parameters() if n != "idle"]
    y = flexible_attention(q, k, v, score, inverse, mask, causal=causal, compiled=False)
    z = whole(score, q, k, v, inverse, mask, causal)
    torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
    weights = draw(*y.shape, seed=4, dtype=torch.float32)
    for ours, theirs in zip(
        torch.autograd.grad(y, wanted, weights), torch.autograd.grad(z, wanted, weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@reference
def test_flex_attention_gives_zeros_to_who_sees_nothing():
    x = draw(1, 2, 5, 4, dtype=torch.float32)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    mask[:, :, 2] = False
    with torch.no_grad():
        y = flexible_attention(
            x, x, x, learned(2, dtype=torch.float32), torch.ones(2), mask, causal=False, compiled=False
        )
    assert (y[:, :, 2] == 0).all() and (y[:, :, 1] != 0).all()
