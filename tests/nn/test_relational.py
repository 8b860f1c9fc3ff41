"""Relational attention against the formula written out on n × n matrices, and against changes of frame."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from equivariance import assert_equivariant, orthogonal
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from gaugekit.nn import blockwise, fused
from gaugekit.nn.relational import RelationalAttention, RelationalCache, relational_attention
from gaugekit.nn.scores import RBF, Bilinear, Cosine, LearnedScore, unit

B, H, N, M, K = 2, 2, 7, 9, 3


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    """Sizes that divide nothing, so that these few tokens make several tiles, some of them cut."""
    monkeypatch.setattr(blockwise, "TILE", (3, 2))
    monkeypatch.setattr(fused, "ROWS", 3)


def draw(*shape: int, seed: int = 0, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def learned(heads: int = H, seed: int = 0) -> LearnedScore:
    """Off its starting point, where units cancel."""
    score = LearnedScore(heads, units=4).double()
    score.units.data = draw(heads, 4, 4, seed=seed)
    return score


def matrix(k: int = K, seed: int = 50) -> nn.Parameter:
    return nn.Parameter(draw(H, k, k, seed=seed))


SCORES = {
    "dot": lambda k=K: "dot",
    "cosine": lambda k=K: "cosine",
    "rbf": lambda k=K: RBF(0.8),
    "rbf per head": lambda k=K: RBF(nn.Parameter(torch.tensor([0.7, 1.3], dtype=torch.float64))),
    "bilinear": lambda k=K: Bilinear(matrix(k)),
    "bilinear symmetric": lambda k=K: Bilinear(matrix(k), symmetric=True),
    "bilinear low rank": lambda k=K: Bilinear(nn.Parameter(draw(k, 2, seed=5)), nn.Parameter(draw(k, 2, seed=6))),
    "bilinear low rank symmetric": lambda k=K: Bilinear(matrix(k), matrix(k, 51), symmetric=True),
    "learned": lambda k=K: learned(),
}
each_score = pytest.mark.parametrize("name", SCORES)


def matrix_of(score: Bilinear) -> Tensor:
    a = score.left if score.right is None else score.left @ score.right.mT
    return (a + a.mT) / 2 if score.symmetric else a


def scores_written_out(name: str, score, x: Tensor, key: Tensor) -> Tensor:
    """f(G_ij, G_ii, G_jj), every term of it, (..., h, n, m)."""
    g, ii, jj = x @ key.mT, x.square().sum(-1)[..., :, None], key.square().sum(-1)[..., None, :]
    if name == "dot":
        return g
    if name == "cosine":
        return g / (ii * jj).sqrt()
    if isinstance(score, RBF):
        square = (x.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1)
        return -square / (2 * torch.as_tensor(score.sigma, dtype=x.dtype).square()[..., None, None])
    if isinstance(score, Bilinear):
        return x @ matrix_of(score) @ key.mT
    a, b, c, e = score.units.mT[..., None, None].unbind(1)  # (h, units, 1, 1)
    terms = torch.relu(a * g[..., None, :, :] + b * ii[..., None, :, :] + c * jj[..., None, :, :] + e)
    signs = torch.tensor([1.0, -1.0], dtype=x.dtype).repeat(terms.shape[-3] // 2)[:, None, None]
    return g + (signs * terms).sum(-3)


def written_out(name, score, x, key, value, temperature, causal=False, mask=None) -> Tensor:
    s = scores_written_out(name, score, x, key) / torch.as_tensor(temperature)[..., None, None]
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    if causal:
        n, m = s.shape[-2:]
        s = s.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(m - n + 1), -math.inf)
    blind = (s == -math.inf).all(-1, keepdim=True)
    return s.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ value


def masks(n: int, m: int) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(9)
    keys = torch.ones(B, 1, 1, m, dtype=torch.bool)
    keys[0, ..., -2:] = False
    entries = torch.rand(B, H, n, m, generator=generator) > 0.4
    entries[1, :, 2] = False  # a query that sees nothing
    numbers = torch.randn(n, m, generator=generator, dtype=torch.float64).masked_fill(entries[0, 0], -math.inf)
    return {"none": None, "keys": keys, "entries": entries, "numbers": numbers}


def parameters(score) -> list[Tensor]:
    return list(score.parameters()) if isinstance(score, nn.Module) else []


@each_score
@pytest.mark.parametrize("mask_name", masks(N, M))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("own_keys", [False, True])
def test_equals_the_formula(name, mask_name, causal, own_keys):
    score, mask = SCORES[name](), masks(N, M if own_keys else N)[mask_name]
    x = draw(B, H, N, K).requires_grad_()
    key, value = (draw(B, H, M, w, seed=s).requires_grad_() if own_keys else x for w, s in ((K, 1), (5, 2)))
    temperature = torch.tensor([0.7, 1.6], dtype=torch.float64, requires_grad=True)
    wanted = [*({x, key, value}), temperature, *parameters(score)]
    given = (key, value) if own_keys else ()
    y = relational_attention(x, *given, score=score, temperature=temperature, is_causal=causal, attn_mask=mask)
    z = written_out(name, score, x, key, value, temperature, causal, mask)
    torch.testing.assert_close(y, z, rtol=1e-11, atol=1e-11)
    weights = draw(*y.shape, seed=3)
    for ours, theirs in zip(
        torch.autograd.grad(y, wanted, weights), torch.autograd.grad(z, wanted, weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@each_score
@pytest.mark.parametrize("causal", [False, True])
def test_equivariance(name, causal):
    score = SCORES[name]()

    def attend(x: Tensor, score=score) -> Tensor:
        return relational_attention(x, score=score, temperature=1.7, is_causal=causal)

    turned_with = None
    if isinstance(score, Bilinear):

        def turned_with(u: Tensor):
            turned = copy.deepcopy(score)
            if turned.right is None:
                turned.left.data = u @ turned.left.data @ u.mT
            else:
                turned.left.data, turned.right.data = u @ turned.left.data, u @ turned.right.data
            return lambda x: attend(x, turned)

        with pytest.raises(AssertionError, match="off by"):  # A stays where it is
            assert_equivariant(attend, draw(B, H, N, K))
    assert_equivariant(attend, draw(B, H, N, K), function_at=turned_with)


@pytest.mark.parametrize("name", [name for name in SCORES if "bilinear" not in name])  # whose A has a frame of its own
def test_weights_are_unchanged(name):
    """Read off with the identity for values."""
    x, key, eye = draw(B, H, N, K), draw(B, H, M, K, seed=1), torch.eye(M, dtype=torch.float64).expand(B, H, M, M)
    weights = relational_attention(x, key, eye, score=SCORES[name]())
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, N, dtype=torch.float64))
    for determinant in (1, -1):
        u = orthogonal(K, determinant, torch.Generator().manual_seed(4))
        assert (relational_attention(x @ u.mT, key @ u.mT, eye, score=SCORES[name]()) - weights).abs().max() < 1e-10
    assert (relational_attention(x @ u.mT, key, eye, score=SCORES[name]()) - weights).abs().max() > 1e-3


def test_what_else_leaves_weights_unchanged():
    x, eye = draw(B, H, N, K), torch.eye(N, dtype=torch.float64).expand(B, H, N, N)
    shift, lengths = draw(B, H, 1, K, seed=1), draw(B, H, N, 1, seed=2).exp()
    for name, moved in (("rbf", x + shift), ("cosine", x * lengths)):
        before, after = (relational_attention(z, value=eye, score=name) for z in (x, moved))
        assert (before - after).abs().max() < 1e-10
        dot, moved_dot = (relational_attention(z, value=eye) for z in (x, moved))
        assert (dot - moved_dot).abs().max() > 1e-3


@each_score
@pytest.mark.parametrize(("causal", "mask_name"), [(False, "none"), (True, "keys"), (False, "entries")])
def test_derivatives(name, causal, mask_name):
    score, x = SCORES[name](2), draw(B, H, 4, 2).requires_grad_()
    mask, temperature = masks(4, 4)[mask_name], torch.tensor([0.7, 1.6], dtype=torch.float64, requires_grad=True)

    def attend(x, temperature, *_):
        return relational_attention(x, score=score, temperature=temperature, is_causal=causal, attn_mask=mask)

    inputs = (x, temperature, *parameters(score))
    assert gradcheck(attend, inputs)
    assert gradgradcheck(attend, inputs)


def test_derivatives_where_queries_keys_and_values_are_one_tensor():
    """Each of the three must get its own share of the second derivative."""
    x = draw(B, H, 5, K).requires_grad_()

    def attend(x):
        return fused.fused_attention(x, x, x, None, causal=True, scale=0.7)

    assert gradcheck(attend, x)
    assert gradgradcheck(attend, x)


def test_a_mask_of_numbers_gets_its_gradient():
    x, mask = draw(B, H, N, K), draw(H, N, N, seed=1).requires_grad_()
    assert gradcheck(lambda m: relational_attention(x, score="rbf", attn_mask=m, is_causal=True), mask)
    with pytest.raises(ValueError, match="attn_mask cannot get a gradient"):
        relational_attention(x, score=learned(), attn_mask=mask)


@pytest.mark.parametrize("name", ["dot", "rbf", "learned"])
@pytest.mark.parametrize("mask_name", ["none", "entries"])
def test_checkpointing_lets_go_of_states(name, mask_name):
    """What is computed anew in the backward pass is not kept until then, and gives the same gradient."""
    x, score, mask, kept = draw(B, H, N, K).requires_grad_(), SCORES[name](), masks(N, N)[mask_name], []

    def layer(x):
        states = [factor * x for factor in (1.0, 2.0, 3.0)]
        states.append(relational_attention(*states, score=score, is_causal=True, attn_mask=mask))
        kept.extend(StorageWeakRef(t.untyped_storage()) for t in states)
        return 1.5 * states[-1]

    y = checkpoint(layer, x, use_reentrant=False)
    assert len(kept) == 4 and all(storage.expired() for storage in kept)
    weights = draw(B, H, N, K, seed=1)
    (gradient,) = torch.autograd.grad((y * weights).sum(), x)
    y = layer(x)
    assert name != "dot" or not kept[4].expired()  # the queries, kept where nothing is checkpointed
    torch.testing.assert_close(gradient, torch.autograd.grad((y * weights).sum(), x)[0], rtol=0, atol=0)


def test_graphs_can_be_kept_and_are_freed():
    x = draw(B, H, N, K).requires_grad_()
    for score in ("dot", learned()):
        y = relational_attention(x, score=score).sum()
        first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
        assert torch.equal(first, second)
        y.backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()


@each_score
def test_any_leading_axes(name):
    """The head is axis −3, whatever stands before it."""
    score = SCORES[name]()
    x = draw(2, 3, H, N, K)
    for lead in ((2, 1), (3,), (1, 1), ()):
        mask = torch.rand(*lead, 1, 1, N, generator=torch.Generator().manual_seed(0)) > 0.3
        whole = relational_attention(x, score=score, attn_mask=mask)
        masks_ = mask.expand(2, 3, 1, 1, N)
        for i in range(2):
            for j in range(3):
                part = relational_attention(x[i, j], score=score, attn_mask=masks_[i, j])
                torch.testing.assert_close(part, whole[i, j], rtol=1e-11, atol=1e-11)
    assert relational_attention(x[:0], score=score).shape == (0, 3, H, N, K)
    empty = torch.zeros(0, H, N, K, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(relational_attention(empty, score=score, is_causal=True).sum(), empty)
    assert gradient.shape == empty.shape
    none = x[..., :0, :]
    assert relational_attention(none, x, score=score).shape == none.shape
    assert (relational_attention(x, none, score=score) == 0).all()


@pytest.mark.parametrize("name", ["dot", "cosine", "rbf", "learned"])
def test_one_head_without_an_axis(name):
    x, score = draw(N, K), SCORES[name]()
    torch.testing.assert_close(
        relational_attention(x, score=score, attn_mask=masks(N, N)["numbers"]),
        relational_attention(x[None, None], score=score, attn_mask=masks(N, N)["numbers"])[0, 0],
    )


@each_score
@pytest.mark.parametrize("k", [1, 2, 3])
def test_few_channels_and_one_token(name, k):
    score = SCORES[name](k)
    x = draw(B, H, N, k)
    torch.testing.assert_close(
        relational_attention(x, score=score), written_out(name, score, x, x, x, 1.0), rtol=1e-11, atol=1e-11
    )
    one = draw(B, H, 1, k, seed=1).requires_grad_()
    y = relational_attention(one, score=score, is_causal=True)
    torch.testing.assert_close(y, one)  # it sees itself alone
    assert torch.autograd.grad(y.sum(), one)[0].isfinite().all()


@each_score
def test_who_sees_nothing_gets_zeros(name):
    x, key, score = draw(B, H, N, K).requires_grad_(), draw(B, H, N, K, seed=1).requires_grad_(), SCORES[name]()
    mask = torch.ones(B, 1, N, N, dtype=torch.bool)
    mask[0, :, 1], mask[1, :, :, 2:] = False, False
    for causal in (False, True):
        for form in (mask, torch.zeros_like(mask, dtype=torch.float64).masked_fill(~mask, -math.inf)):
            y = relational_attention(x, key, score=score, attn_mask=form, is_causal=causal)
            assert (y[0, :, 1] == 0).all() and (y[0, :, 2] != 0).all()
            seeing, seen = torch.autograd.grad(y.square().sum(), (x, key))
            assert seeing.isfinite().all() and seen.isfinite().all()
            assert (seeing[0, :, 1] == 0).all() and (seeing[0, :, 2] != 0).any()
            assert (seen[1, :, 2:] == 0).all() and (seen[1, :, :2] != 0).any()


HALF = [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)]
"""Output against float64 on the same rounded inputs, as a share of the largest value. Weights are rounded to the dtype
inside the fused kernel and the output is once more."""


@each_score
@pytest.mark.parametrize(("dtype", "bound"), HALF)
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision(name, dtype, bound, causal):
    k, n = 16, 40
    score = SCORES[name](k)
    x = draw(B, H, n, k, dtype=dtype)
    wide = x.double()
    temperature = math.sqrt(k)
    if name == "cosine":
        temperature = 0.5  # unit vectors are rounded, by half a unit in the last place
    y = relational_attention(x, score=score, temperature=temperature, is_causal=causal)
    z = written_out(name, score, wide, wide, wide, temperature, causal)
    assert y.dtype == dtype
    slack = 4 if "bilinear" in name or "head" in name else 1  # x A, or a weight per head, is rounded too
    assert (y - z).abs().max() <= slack * bound * wide.abs().max()


@pytest.mark.parametrize(("dtype", "bound"), HALF)
@pytest.mark.parametrize("size", [10.0, 60.0])
def test_rbf_in_half_precision_keeps_its_squared_lengths(dtype, bound, size, monkeypatch):
    """Squared lengths up to 1e5, whose own rounding to half precision would be worth whole units of score."""
    x = draw(B, H, 40, 16, dtype=dtype) * 0.25 + draw(1, 1, 1, 16, seed=1, dtype=dtype) * size
    value, wide = draw(B, H, 40, 16, seed=2, dtype=dtype), x.double()
    truth = written_out("rbf", RBF(0.8), wide, wide, value.double(), 1.0)

    def off() -> float:
        return float((relational_attention(x, value=value, score=RBF(0.8)) - truth).abs().max() / value.abs().max())

    bound += 2 * torch.finfo(torch.float32).eps * float(wide.square().sum(-1).max()) / 0.8**2
    assert off() <= bound
    monkeypatch.setattr("gaugekit.nn.scores.HALF_STEPS", {})  # one column for the squared lengths
    assert off() > 10 * bound


@pytest.mark.parametrize(("dtype", "bound"), HALF)
def test_rbf_gradients_in_half_precision(dtype, bound):
    x = draw(B, H, 40, 16, dtype=dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    w = draw(B, H, 40, 16, seed=1)
    (ours,) = torch.autograd.grad(relational_attention(x, score="rbf", temperature=4.0), x, w.to(dtype))
    (theirs,) = torch.autograd.grad(written_out("rbf", RBF(1.0), wide, wide, wide, 4.0), wide, w)
    assert (ours - theirs).abs().max() <= 4 * bound * theirs.abs().max()


def test_rbf_of_large_states():
    """‖x‖² of 1e6: scores are off by eps ‖x‖‖k‖ / σ² in float32, weights by e to that."""
    sigma = 30.0
    x = draw(B, H, 40, 16) * 300
    wide = x.float().double()
    eye = torch.eye(40, dtype=torch.float64).expand(B, H, 40, 40)
    weights = relational_attention(x.float(), value=eye.float(), score=RBF(sigma))
    truth = written_out("rbf", RBF(sigma), wide, wide, eye, 1.0)
    bound = 8 * torch.finfo(torch.float32).eps * float(wide.square().sum(-1).max()) / sigma**2
    assert bound < 0.01
    assert (weights - truth).abs().max() <= bound


def test_cosine_of_zero_and_of_extreme_vectors():
    """pytorch#184575, #2421: no gradient of 1e12 or NaN at the zero vector. pytorch PR#178123: entries of 1e30."""
    x = draw(B, H, N, K, dtype=torch.float32)
    x[0, 0, 2] = 0
    x.requires_grad_()
    eye = torch.eye(N).expand(B, H, N, N)
    weights = relational_attention(x, value=eye, score="cosine")
    torch.testing.assert_close(weights[0, 0, 2], torch.full((N,), 1 / N))  # zero against all
    y = relational_attention(x, value=draw(B, H, N, K, seed=1, dtype=torch.float32), score="cosine")
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert (gradient[0, 0, 2] == 0).all() and gradient.isfinite().all() and (gradient[1] != 0).all()
    for size in (1e30, 1e-30):
        torch.testing.assert_close(relational_attention(x * size, value=eye, score="cosine"), weights)
    assert unit(torch.zeros(2, 0)).shape == (2, 0)


def test_temperatures_per_head():
    x = draw(B, H, N, K)
    both = relational_attention(x, temperature=torch.tensor([0.5, 2.0]))
    for head, temperature in enumerate((0.5, 2.0)):
        torch.testing.assert_close(both[:, head], relational_attention(x[:, [head]], temperature=temperature)[:, 0])
    torch.testing.assert_close(
        relational_attention(x, temperature=math.sqrt(K)),
        F.scaled_dot_product_attention(x, x, x),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("name", ["dot", "cosine", "rbf", "bilinear"])
def test_named_scores_are_one_fused_call(name, monkeypatch):
    x, calls = draw(B, H, 20, 16, dtype=torch.float32), []
    sdpa = F.scaled_dot_product_attention

    def watched(q, k, v, **keywords):
        calls.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        return sdpa(q, k, v, **keywords)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    score = SCORES[name](16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # refuses what its kernel cannot take
        relational_attention(x, score=score, is_causal=True)
    width = 24 if name == "rbf" else 16
    assert calls == [(width, width, width)]


def test_causality_with_a_mask_holds_no_square(monkeypatch):
    """A mask of keys and causality, of which no call gets more than ROWS queries."""
    sizes = []
    sdpa = F.scaled_dot_product_attention

    def watched(q, k, v, attn_mask, **keywords):
        sizes.append(attn_mask.numel())
        return sdpa(q, k, v, attn_mask=attn_mask, **keywords)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    x, mask = draw(B, H, 30, K), torch.rand(B, 1, 1, 30, generator=torch.Generator().manual_seed(0)) > 0.3
    relational_attention(x, attn_mask=mask, is_causal=True)
    assert len(sizes) == 10 and max(sizes) == B * 3 * 30


@pytest.mark.parametrize("name", ["dot", "cosine", "rbf", "learned"])
def test_autocast(name):
    """Everything in bfloat16, but the squared lengths and the arithmetic of an f."""
    x = (draw(B, H, N, K, dtype=torch.float32) * 8).requires_grad_()
    score = SCORES[name]()
    with torch.autocast("cpu", torch.bfloat16):
        y = relational_attention(x, score=score, temperature=8.0)
    assert y.dtype == torch.bfloat16
    low = x.detach().bfloat16()
    torch.testing.assert_close(y, relational_attention(low, score=score, temperature=8.0), rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(y.float().square().sum(), x)
    assert gradient.dtype == torch.float32 and gradient.isfinite().all() and (gradient != 0).any()


# Dynamo reads .grad of whatever lives across a graph break, and tells itself off for it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled():
    """Graph breaks are allowed, other results are not."""
    x = draw(B, H, N, K).requires_grad_()
    for score in ("rbf", learned()):
        attend = torch.compile(
            lambda x, score=score: relational_attention(x, score=score, is_causal=True), backend="eager"
        )
        y, z = attend(x), relational_attention(x, score=score, is_causal=True)
        torch.testing.assert_close(y, z)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(z.sum(), x))


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "match"),
    [
        ([draw(N, K).long()], {}, TypeError, "floating point"),
        ([draw(N, K), draw(N, K).float()], {}, TypeError, "one dtype"),
        ([draw(K)], {}, ValueError, "x must be"),
        ([draw(H, N, K), draw(N, K)], {}, ValueError, "key must be"),
        ([draw(N, K), draw(M, K + 1)], {}, ValueError, "channels"),
        ([draw(N, K), draw(M, K), draw(N, K)], {}, ValueError, "9 keys but 7 values"),
        ([draw(M, K), draw(N, K)], {"is_causal": True}, ValueError, "at least as many keys"),
        ([draw(N, K)], {"attn_mask": torch.ones(N, M, dtype=torch.bool)}, ValueError, "broadcast"),
        ([draw(N, K)], {"attn_mask": torch.ones(1, N, N, dtype=torch.bool)}, ValueError, "broadcast"),
        ([draw(N, K)], {"attn_mask": torch.ones(N, N, dtype=torch.int)}, TypeError, "attn_mask"),
        ([draw(N, K)], {"temperature": 0.0}, ValueError, "positive"),
        ([draw(H, N, K)], {"temperature": torch.ones(H + 1)}, ValueError, "one per head"),
        ([draw(N, K)], {"score": RBF(torch.ones(H))}, ValueError, "per head"),
        ([draw(N, K)], {"score": "euclid"}, ValueError, "dot, cosine, rbf"),
        ([draw(N, K)], {"score": "learned"}, ValueError, r"pass LearnedScore\(heads\)"),
        ([draw(N, K)], {"score": Bilinear(torch.eye(K + 1))}, ValueError, "A acts on 4 channels"),
    ],
)
def test_bad_input_is_refused(arguments, keywords, error, match):
    with pytest.raises(error, match=match):
        relational_attention(*arguments, **keywords)


def test_bad_scores_are_refused():
    for make, match in (
        (lambda: RBF(0.0), "sigma"),
        (lambda: Bilinear(torch.ones(3, 2)), r"pass L and R"),
        (lambda: Bilinear(torch.ones(3, 2), torch.ones(3, 1)), "L and R"),
        (lambda: LearnedScore(2, units=3), "even"),
        (lambda: LearnedScore(0), "at least one head"),
    ):
        with pytest.raises(ValueError, match=match):
            make()


# --- the module ---------------------------------------------------------------------------------------------


D = 6
MODULES = [
    (frame, values, score)
    for frame in ("full", "split")
    for values in ("plain", "linear")
    for score in ("dot", "cosine", "rbf", "bilinear", "learned")
]


def module(frame: str, values: str, score: str, seed: int = 0) -> RelationalAttention:
    torch.manual_seed(seed)
    layer = RelationalAttention(D, H, score=score, frame=frame, values=values).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def turned(layer: RelationalAttention, u: Tensor) -> RelationalAttention:
    """With the A of a bilinear score turned along."""
    layer = copy.deepcopy(layer)
    if isinstance(layer.score, Bilinear):
        layer.score.left.data = u @ layer.score.left.data @ u.mT
    return layer


@pytest.mark.parametrize("score", ["dot", "cosine", "rbf", "bilinear", "learned"])
def test_plain_values_in_the_full_frame_are_equivariant(score):
    layer = module("full", "plain", score)
    assert_equivariant(layer, draw(B, N, D), function_at=lambda u: turned(layer, u))
    other = module("full", "linear", score)
    with pytest.raises(AssertionError, match="off by"):
        assert_equivariant(other, draw(B, N, D), function_at=lambda u: turned(other, u))


@pytest.mark.parametrize("score", ["dot", "cosine", "rbf", "learned"])
def test_plain_values_in_split_frames_are_equivariant_block_by_block(score):
    layer, x = module("split", "plain", score), draw(B, N, D)
    generator = torch.Generator().manual_seed(0)
    u = torch.block_diag(*(orthogonal(D // H, determinant, generator) for determinant in (1, -1)))
    torch.testing.assert_close(layer(x @ u.mT), layer(x) @ u.mT, rtol=1e-10, atol=1e-10)
    whole = orthogonal(D, 1, generator)
    assert (layer(x @ whole.mT) - layer(x) @ whole.mT).abs().max() > 1e-3


@pytest.mark.parametrize("frame", ["full", "split"])
def test_linear_values_have_invariant_weights(frame):
    """Told from x by values that do not turn: W_V takes the turn back."""
    layer, x = module(frame, "linear", "rbf"), draw(B, N, D)
    generator = torch.Generator().manual_seed(0)
    k = D if frame == "full" else D // H
    u = torch.block_diag(*(orthogonal(k, -1, generator) for _ in range(D // k)))
    moved = copy.deepcopy(layer)
    moved.value.weight.data = layer.value.weight.data @ u.mT
    torch.testing.assert_close(moved(x @ u.mT), layer(x), rtol=1e-10, atol=1e-10)
    assert (layer(x @ u.mT) - layer(x)).abs().max() > 1e-3


@pytest.mark.parametrize(("frame", "values", "score"), MODULES)
def test_module_equals_its_formula(frame, values, score):
    layer, x = module(frame, values, score), draw(B, N, D)
    seen = x[:, None].expand(B, H, N, D) if frame == "full" else x.unflatten(-1, (H, -1)).transpose(1, 2)
    v = seen if values == "plain" else (x @ layer.value.weight.mT).unflatten(-1, (H, -1)).transpose(1, 2)
    heads = written_out(score, layer.score, seen, seen, v, layer.log_temperature.exp(), causal=True)
    if values == "plain" and frame == "full":
        y = (heads * layer.mix[:, None, None]).sum(1)
    else:
        y = heads.transpose(1, 2).flatten(2)
    if values == "linear":
        y = y @ layer.out.weight.mT
    torch.testing.assert_close(layer(x, is_causal=True), y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("frame", "values", "score"), MODULES)
def test_decoding_with_a_cache_equals_the_whole_pass(frame, values, score):
    layer, x = module(frame, values, score).requires_grad_(False), draw(B, N, D)
    whole = layer(x, is_causal=True)
    cache = RelationalCache()
    parts = [layer(part, is_causal=True, cache=cache) for part in x.split([4, 1, 2], 1)]  # a prompt, a token, two
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)
    assert cache.length == N
    states = B * N * D * 8
    assert cache.nbytes == (states if values == "plain" else 2 * states)  # a standard cache holds keys and values


def test_a_cache_and_a_mask():
    """Padding on the left, as in generation: the padded sequence's tokens come out as if it stood alone."""
    layer, x = module("full", "plain", "rbf"), draw(B, N, D)
    mask = torch.ones(B, 1, 1, N, dtype=torch.bool)
    mask[0, ..., :3] = False
    cache = RelationalCache()
    parts = [
        layer(x[:, i:j], is_causal=True, attn_mask=mask[..., :j], cache=cache) for i, j in ((0, 5), (5, 6), (6, N))
    ]
    y = torch.cat(parts, 1)
    torch.testing.assert_close(y[0, 3:], layer(x[:1, 3:], is_causal=True)[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(y[1], layer(x[1:], is_causal=True)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("frame", "values", "score"), MODULES)
def test_every_parameter_learns(frame, values, score):
    torch.manual_seed(1)
    layer = RelationalAttention(D, H, score=score, frame=frame, values=values)
    x = draw(B, N, D, dtype=torch.float32)
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and (parameter.grad != 0).any(), name
    if frame == "full":  # heads that start equal would stay equal
        assert layer.log_temperature[0] != layer.log_temperature[1]


def test_module_starts_and_round_trips():
    layer = RelationalAttention(8, 2, frame="split", values="linear")
    torch.testing.assert_close(layer.log_temperature.exp(), torch.full((2,), 2.0))
    torch.testing.assert_close(RelationalAttention(9, 1, score=Cosine()).log_temperature.exp(), torch.tensor([1 / 3]))
    torch.testing.assert_close(RelationalAttention(4, 3).log_temperature.exp(), torch.tensor([1.0, 2.0, 4.0]))
    given = RelationalAttention(4, 2, temperature=torch.tensor([0.5, 3.0]))
    torch.testing.assert_close(given.log_temperature.exp(), torch.tensor([0.5, 3.0]))
    for score in ("rbf", "bilinear", "learned"):
        one, two = (module("full", "plain", score, seed=seed) for seed in (1, 2))
        x = draw(B, N, D)
        assert not torch.allclose(one(x), two(x))
        two.load_state_dict(one.state_dict())
        assert torch.equal(one(x), two(x))
        assert torch.equal(copy.deepcopy(one)(x), one(x))


@pytest.mark.parametrize(
    ("arguments", "keywords", "match"),
    [
        ((6, 4), {"frame": "split"}, "4 heads do not divide"),
        ((6, 4), {"values": "linear"}, "4 heads do not divide"),
        ((6, 2), {"frame": "half"}, "frame"),
        ((6, 2), {"values": "none"}, "values"),
        ((6, 2), {"temperature": -1.0}, "positive"),
        ((6, 2), {"temperature": torch.ones(3)}, "2 heads"),
        ((6, 2), {"score": "euclid"}, "unknown score"),
    ],
)
def test_bad_modules_are_refused(arguments, keywords, match):
    with pytest.raises(ValueError, match=match):
        RelationalAttention(*arguments, **keywords)


def test_module_refuses_another_width():
    with pytest.raises(ValueError, match=r"tokens, 6"):
        RelationalAttention(6, 2)(torch.ones(1, 2, 5))
