"""Attention in invariants against standard heads: written out, of torch, and of real model classes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from equivariance import assert_equivariant
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, GPTBigCodeConfig, GPTBigCodeForCausalLM

from gaugekit.linalg import random_invertible
from gaugekit.nn.invariant import Heads, InvariantAttention

F64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed), dtype=F64)


def random_heads(h: int, g: int, k: int, d: int, seed: int = 0, bias: bool = True) -> Heads:
    generator = rng(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    weights = [draw(h, k, d), draw(g, k, d), draw(g, k, d), draw(h, k, d)]
    return Heads(*weights, *([draw(h, k), draw(g, k), draw(g, k), draw(d)] if bias else []))


def written_out(heads: Heads, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Head by head with the n×n matrix; x (..., n, d), mask bool, True where a query may look."""
    h, k, _ = heads.w_q.shape
    out = torch.zeros_like(x)
    for i in range(h):
        j = i // (h // len(heads.w_k))
        q, key, value = (
            x @ w[n].mT + (0.0 if b is None else b[n])
            for w, b, n in ((heads.w_q, heads.b_q, i), (heads.w_k, heads.b_k, j), (heads.w_v, heads.b_v, j))
        )
        scores = q @ key.mT / math.sqrt(k)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        out = out + scores.softmax(-1) @ value @ heads.w_o[i]
    return out if heads.b_o is None else out + heads.b_o


def moved(heads: Heads, seed: int = 0) -> Heads:
    """Another basis of every head: GL(k) on queries and keys, and on values and outputs, biases too."""
    (h, k, _), g = heads.w_q.shape, len(heads.w_k)
    s, t = (random_invertible(k, rng(seed + i), batch=(g,)) for i in range(2))
    s, t = 1.7 * s, 0.6 * t  # for k = 1, where it is a sign otherwise
    dual_s, dual_t = (torch.linalg.inv(x).mT for x in (s, t))
    s, dual_t = (x.repeat_interleave(h // g, 0) for x in (s, dual_t))

    def turn(matrix: Tensor, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else (matrix @ bias.unsqueeze(-1)).squeeze(-1)

    return Heads(
        s @ heads.w_q,
        dual_s @ heads.w_k,
        t @ heads.w_v,
        dual_t @ heads.w_o,
        turn(s, heads.b_q),
        turn(dual_s, heads.b_k),
        turn(t, heads.b_v),
        heads.b_o,
    )


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.state_dict())


def furthest(one: nn.Module, other: nn.Module) -> float:
    assert tensors(one).keys() == tensors(other).keys()
    return max(
        float((a.double() - b.double()).abs().max())
        for a, b in zip(tensors(one).values(), tensors(other).values(), strict=True)
        if a.numel()
    )


# --- the same function as standard heads --------------------------------------------------------------------

SIZES = [
    (4, 4, 3, 12),
    (4, 2, 3, 12),
    (4, 1, 3, 12),
    (2, 2, 1, 5),
    (3, 3, 5, 5),
    (2, 1, 4, 9),
    (1, 1, 1, 1),
    (2, 1, 7, 4),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_heads_written_out(sizes: tuple[int, int, int, int], bias: bool) -> None:
    """All forms: rank min(k, d), d, and one between; k = 1, k = d and k > d; h = g, h > g = 1 and between."""
    h, g, k, d = sizes
    heads = random_heads(h, g, k, d, bias=bias)
    x = normal(2, 6, d, seed=1)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    least = min(k, d)
    for rank in {least, (least + d) // 2, d, None}:
        module = InvariantAttention.from_heads(heads, rank)
        assert module.rank == (least if rank is None else rank)
        assert (module.query_bias is not None) == bias
        torch.testing.assert_close(module(x), written_out(heads, x), rtol=0, atol=1e-11)
        torch.testing.assert_close(module(x, is_causal=True), written_out(heads, x, causal), rtol=0, atol=1e-11)
    assert (written_out(heads, x) - written_out(heads, x, causal)).abs().max() > 1e-2


@pytest.mark.parametrize("rank", [None, 12])
@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention_of_torch(rank: int | None, bias: bool) -> None:
    module = nn.MultiheadAttention(12, 3, bias=bias, batch_first=True, dtype=F64)
    for i, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, generator=rng(i))
    x = normal(2, 7, 12, seed=9)
    ours = InvariantAttention.from_multihead(module.eval(), rank)
    assert not ours.training
    back = ours.to_multihead()
    assert not back.training
    hidden = torch.zeros(2, 7, dtype=torch.bool)  # True where a key may not be looked at, as torch has it there
    hidden[0, 5:] = hidden[1, 2:4] = True
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    seen = ~hidden[:, None, None, :]
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"attn_mask": future}, {"is_causal": True}),
        ({"key_padding_mask": hidden}, {"attn_mask": seen}),
        ({"attn_mask": future, "key_padding_mask": hidden}, {"attn_mask": seen & ~future}),
        ({"attn_mask": future, "key_padding_mask": hidden}, {"attn_mask": seen, "is_causal": True}),
        ({"attn_mask": -normal(7, 7).abs()}, {"attn_mask": -normal(7, 7).abs()}),
    ]
    outputs = []
    for theirs, options in cases:
        expected = module(x, x, x, need_weights=False, **theirs)[0]
        outputs.append(expected)
        torch.testing.assert_close(ours(x, **options), expected, rtol=0, atol=1e-11)
        again = back(x, x, x, need_weights=False, **theirs)[0]
        torch.testing.assert_close(again, expected, rtol=0, atol=1e-11)
    assert all((outputs[0] - other).abs().max() > 1e-2 for other in outputs[1:])


def test_query_without_keys_gets_the_output_bias() -> None:
    module = InvariantAttention.from_heads(random_heads(2, 2, 3, 6))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    y = module(normal(2, 4, 6), attn_mask=mask)
    assert module.output_bias is not None
    torch.testing.assert_close(y[:, 1], module.output_bias.expand(2, 6))
    assert bool(y.isfinite().all())
    assert (y[:, 0] - module.output_bias).abs().max() > 1e-3


@pytest.mark.parametrize("rank", [None, 6])
@pytest.mark.parametrize("shape", [(4,), (1, 4), (3, 4), (2, 3, 4), (1, 2, 1, 4), (0, 4), (2, 0), (2, 0, 4), (0,)])
def test_batch_shapes(rank: int | None, shape: tuple[int, ...]) -> None:
    module = InvariantAttention.from_heads(random_heads(4, 2, 2, 6), rank)
    x = normal(*shape, 6)
    y = module(x, is_causal=True)
    assert y.shape == x.shape
    if x.numel():
        n = shape[-1]
        each = torch.stack([module(one, is_causal=True) for one in x.reshape(-1, n, 6)]).reshape(x.shape)
        torch.testing.assert_close(y, each, rtol=0, atol=1e-12)
        # One mask for all, one for each head, one for each batch: all broadcast.
        past = torch.ones(n, n, dtype=torch.bool).tril()
        for mask in (past, past.expand(4, n, n), past.expand(*shape[:-1], 1, n, n)):
            torch.testing.assert_close(module(x, attn_mask=mask), y, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "shape", [(4, 4), (4, 1, 4), (3, 1, 1, 4), (3, 1, 4, 4), (2, 1, 4, 4, 4), (2, 3, 1, 4, 1), (2, 3, 4, 4, 4)]
)
def test_masks_broadcast(shape: tuple[int, ...]) -> None:
    """Against a mask written out for each batch item, head and query; bool and added numbers."""
    module = InvariantAttention.from_heads(random_heads(4, 2, 2, 6))
    x = normal(2, 3, 4, 6)
    numbers = normal(*shape, seed=2)
    for mask in (numbers, numbers > -0.5):
        y = module(x, attn_mask=mask)
        full = mask.expand(2, 3, 4, 4, 4)
        each = [[module(x[i, j], attn_mask=full[i, j]) for j in range(3)] for i in range(2)]
        torch.testing.assert_close(y, torch.stack([torch.stack(row) for row in each]), rtol=0, atol=1e-12)
        assert (y - module(x)).abs().max() > 1e-3 or (shape[-1] == 1 and mask is numbers)


# --- real models ------------------------------------------------------------------------------------------


def randomized(model: nn.Module) -> nn.Module:
    for i, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, std=0.4, generator=rng(i))
    return model.double().eval()


class Replaced(nn.Module):
    """Stands where an attention module of transformers stood."""

    def __init__(self, attention: InvariantAttention, is_causal: bool) -> None:
        super().__init__()
        self.attention, self.is_causal = attention, is_causal

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        # What is passed to a causal model is the causal mask once more.
        mask = None if self.is_causal else attention_mask
        return self.attention(hidden_states, attn_mask=mask, is_causal=self.is_causal), None


def gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 31, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}
    return randomized(GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)))


def bigcode() -> nn.Module:
    """Learned positions and one key/value head for all queries."""
    sizes: dict[str, Any] = {"vocab_size": 31, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}
    options: dict[str, Any] = {"attention_softmax_in_fp32": False, "scale_attention_softmax_in_fp32": False}
    return randomized(GPTBigCodeForCausalLM(GPTBigCodeConfig(**sizes, **options, multi_query=True)))


def bert() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    return randomized(BertModel(BertConfig(vocab_size=31, intermediate_size=20, max_position_embeddings=16, **sizes)))


def view_gpt2(layer: Any) -> dict[str, Tensor]:
    a = layer.attn
    weights = a.c_attn.weight.data.mT.chunk(3)  # Conv1D keeps (in, out)
    biases = a.c_attn.bias.data.chunk(3)
    views = {f"w_{n}": w.unflatten(0, (3, 8)) for n, w in zip("qkv", weights, strict=True)}
    views |= {f"b_{n}": b.unflatten(0, (3, 8)) for n, b in zip("qkv", biases, strict=True)}
    return views | {"w_o": a.c_proj.weight.data.unflatten(0, (3, 8)), "b_o": a.c_proj.bias.data}


def view_bigcode(layer: Any) -> dict[str, Tensor]:
    a = layer.attn
    views = {}
    for letter, full in (("w", a.c_attn.weight.data), ("b", a.c_attn.bias.data)):
        q, k, v = full.split([24, 8, 8])
        views |= {f"{letter}_q": q.unflatten(0, (3, 8)), f"{letter}_k": k[None], f"{letter}_v": v[None]}
    return views | {"w_o": a.c_proj.weight.data.mT.unflatten(0, (3, 8)), "b_o": a.c_proj.bias.data}


def view_bert(layer: Any) -> dict[str, Tensor]:
    a, views = layer.attention.self, {}
    for n, linear in (("q", a.query), ("k", a.key), ("v", a.value)):
        views |= {f"w_{n}": linear.weight.data.unflatten(0, (3, 8)), f"b_{n}": linear.bias.data.unflatten(0, (3, 8))}
    dense = layer.attention.output.dense
    return views | {"w_o": dense.weight.data.mT.unflatten(0, (3, 8)), "b_o": dense.bias.data}


def replace_decoder(layer: Any, attention: InvariantAttention) -> None:
    layer.attn = Replaced(attention, is_causal=True)


def replace_bert(layer: Any, attention: InvariantAttention) -> None:
    layer.attention.self, layer.attention.output.dense = Replaced(attention, is_causal=False), nn.Identity()


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[..., Any], Callable[..., None]]] = {
    "gpt2": (gpt2, lambda m: m.transformer.h, view_gpt2, replace_decoder),
    "gpt_bigcode": (bigcode, lambda m: m.transformer.h, view_bigcode, replace_decoder),
    "bert": (bert, lambda m: m.encoder.layer, view_bert, replace_bert),
}


@pytest.mark.parametrize("rank", [None, 24])
@pytest.mark.parametrize("family", FAMILIES)
def test_real_model_to_invariants_and_back(family: str, rank: int | None) -> None:
    """Heads of a real model, random weights and biases: with our module in their place, and with heads made from it."""
    make, layers_of, view, put = FAMILIES[family]
    model = make()
    ids = torch.randint(31, (2, 9), generator=rng())
    keep: dict[str, Any] = {}
    if family == "bert":
        keep["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
        keep["attention_mask"][1, 6:] = 0
    with torch.no_grad():
        expected = model(ids, **keep)[0]
        replaced, rewritten, broken = (copy.deepcopy(model) for _ in range(3))
        for layer in layers_of(replaced):
            put(layer, InvariantAttention.from_heads(Heads(**view(layer)), rank))
        for layer in layers_of(rewritten):
            views = view(layer)
            heads = InvariantAttention.from_heads(Heads(**views), rank).to_heads()
            assert (heads.w_q - views["w_q"]).abs().max() > 1e-3  # other numbers
            for name, target in views.items():
                target.copy_(getattr(heads, name))
        for layer in layers_of(broken):
            view(layer)["w_q"].mul_(1.001)
        scale = expected.abs().max()
        assert scale > 0.1
        assert (replaced(ids, **keep)[0] - expected).abs().max() <= 1e-10 * scale
        assert (rewritten(ids, **keep)[0] - expected).abs().max() <= 1e-10 * scale
        assert (broken(ids, **keep)[0] - expected).abs().max() > 1e-7 * scale


# --- no redundancy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [s for s in SIZES if s[2] <= s[3]])
@pytest.mark.parametrize("full", [True, False])
def test_bases_of_heads_leave_no_trace(sizes: tuple[int, int, int, int], full: bool) -> None:
    h, g, k, d = sizes
    heads = random_heads(h, g, k, d)
    rank = d if full else k
    module = InvariantAttention.from_heads(heads, rank)
    if full:
        assert heads.b_q is not None
        assert module.query_bias is not None
        per_query = h // g
        g_qk = heads.w_q.mT @ heads.w_k.repeat_interleave(per_query, 0)
        torch.testing.assert_close(module.qk.product(), g_qk, rtol=0, atol=1e-12)
        g_vo = heads.w_o.mT @ heads.w_v.repeat_interleave(per_query, 0)
        torch.testing.assert_close(module.vo.product(), g_vo, rtol=0, atol=1e-12)
        c = torch.einsum("hkd,hk->hd", heads.w_k.repeat_interleave(per_query, 0), heads.b_q)
        torch.testing.assert_close(module.query_bias, c, rtol=0, atol=1e-12)
    for seed in range(4):
        other = moved(heads, seed)
        assert (other.w_q - heads.w_q).abs().max() > 1e-3
        again = InvariantAttention.from_heads(other, rank)
        assert torch.equal(again.qk.pivots, module.qk.pivots)
        assert torch.equal(again.vo.pivots, module.vo.pivots)
        assert furthest(again, module) <= 1e-12 * 1e3 ** (not full)  # a reader's condition number enters
    # Softmax is blind to the keys' bias, and the values' bias can be the output's.
    assert heads.b_v is not None
    assert heads.b_o is not None
    assert heads.b_k is not None
    folded = torch.einsum("hkd,hk->d", heads.w_o, heads.b_v.repeat_interleave(h // g, 0))
    for other in (
        replace(heads, b_k=heads.b_k + normal(g, k, seed=5)),
        replace(heads, b_v=torch.zeros_like(heads.b_v), b_o=heads.b_o + folded),
    ):
        assert furthest(InvariantAttention.from_heads(other, rank), module) <= 1e-12
    # Controls: moves that are not symmetries.
    s = random_invertible(k, rng(3)) * 1.1
    for other in (
        replace(heads, w_q=s @ heads.w_q, w_k=s @ heads.w_k),
        replace(heads, w_v=s @ heads.w_v),
        replace(heads, b_q=heads.b_q + 0.1 if heads.b_q is not None else None),
        replace(heads, b_v=heads.b_v + 0.1),
    ):
        assert furthest(InvariantAttention.from_heads(other, rank), module) > 1e-3


def jacobian_rank(function: Callable[..., Tensor], parameters: dict[str, Tensor]) -> tuple[int, int]:
    """How many parameters there are, and how many directions of them the outputs show."""
    values = tuple(parameters.values())
    jacobian = torch.autograd.functional.jacobian(lambda *v: function(dict(zip(parameters, v, strict=True))), values)
    matrix = torch.cat([j.flatten(1) for j in jacobian], -1)
    s = torch.linalg.svdvals(matrix)
    return matrix.shape[1], int((s > 1e-10 * s[0]).sum())


@pytest.mark.parametrize("rank", [2, 3, 6])
def test_every_parameter_shows_and_those_of_heads_do_not(rank: int) -> None:
    """Parameters − rank of the Jacobian of the outputs: 0 here; for heads 2k² a group, and their biases b_K, b_V."""
    h, g, k, d = 4, 2, 2, 6
    heads = random_heads(h, g, k, d)
    x = normal(8, 12, d, seed=1)
    with sdpa_kernel(SDPBackend.MATH):
        module = InvariantAttention.from_heads(heads, rank)
        for parameter in module.parameters():  # off the place where the products have rank k
            parameter.data += 0.1 * normal(*parameter.shape, seed=3)
        ours = {n: p.detach() for n, p in module.named_parameters() if p.numel()}
        stored, shown = jacobian_rank(lambda p: functional_call(module, p, (x,)).flatten(), ours)
    assert stored == sum(v for n, v in module.parameter_counts.items() if n != "indices")
    assert stored == shown
    if rank == k:
        fields: dict[str, Tensor] = dict(vars(heads))
        stored, shown = jacobian_rank(lambda p: written_out(Heads(**p), x).flatten(), fields)
        assert stored - shown == g * (2 * k**2 + 2 * k)
        assert shown == sum(p.numel() for p in ours.values())


@pytest.mark.parametrize(
    ("h", "g", "k", "d", "rank"), [(4, 4, 3, 12, 3), (4, 4, 3, 12, 12), (4, 2, 3, 12, 5), (2, 2, 5, 5, 5)]
)
def test_what_is_counted_is_what_is_stored(h: int, g: int, k: int, d: int, rank: int) -> None:
    """TransformerCompression#165: the reported size was not that of what was written."""
    module = InvariantAttention(d, h, k, rank, g)
    matrix = h * d * rank + g * (d * rank - rank**2)
    if h == g:
        assert matrix == h * (2 * d * rank - rank**2)
    counts = module.parameter_counts
    assert counts == {"qk": matrix, "vo": matrix, "biases": h * rank + d, "indices": 2 * g * rank}
    assert sum(counts.values()) == sum(t.numel() for t in module.state_dict().values())
    standard = 2 * (h + g) * k * d
    if rank == k:
        assert standard - 2 * matrix == g * 2 * k**2
    assert InvariantAttention(d, h, k, rank, g, bias=False).parameter_counts["biases"] == 0


# --- back to heads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("full", [True, False])
def test_round_trip_is_balanced(sizes: tuple[int, int, int, int], full: bool) -> None:
    h, g, k, d = sizes
    heads = random_heads(h, g, k, d)
    module = InvariantAttention.from_heads(heads, d if full else None)
    back = module.to_heads()
    assert back.w_q.shape == heads.w_q.shape
    assert back.w_k.shape == heads.w_k.shape
    x = normal(2, 6, d, seed=1)
    torch.testing.assert_close(written_out(back, x), written_out(heads, x), rtol=0, atol=1e-10)
    assert back.b_q is not None
    queries = torch.cat([back.w_q, back.b_q.unsqueeze(-1)], -1).unflatten(0, (g, -1))
    for one, many in ((back.w_k, queries), (back.w_v, back.w_o.unflatten(0, (g, -1)))):
        gram = torch.einsum("gikd,gijd->gkj", many, many)
        torch.testing.assert_close(one @ one.mT, gram, rtol=0, atol=1e-10)
    assert InvariantAttention.from_heads(random_heads(h, g, k, d, bias=False)).to_heads().b_o is None


def test_full_form_after_a_step_refuses_to_be_cut() -> None:
    torch.manual_seed(0)
    module = InvariantAttention(12, 3, rank=12, dtype=F64)
    module.to_heads()
    x = normal(4, 9, 12)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    (module(x) - normal(4, 9, 12, seed=1)).square().sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"G_QK of key/value head \d has rank above 4.*larger head_dim"):
        module.to_heads()
    broken = InvariantAttention.from_heads(random_heads(2, 2, 2, 6), 6)
    broken.vo.columns.data[1] += 1e-6 * normal(6, 6)
    with pytest.raises(ValueError, match=r"G_VO of key/value head 1 has rank above 2, a share of \d\.\de-0[67] "):
        broken.to_heads()
    # What was asked for instead: heads wide enough, with their own scale. One direction more where c needs it.
    wide = module.to_heads(head_dim=12)
    torch.testing.assert_close(written_out(wide, x), module(x), rtol=0, atol=1e-10)
    # And what was allowed: a cut that is as small as was said.
    cut = InvariantAttention.from_heads(module.to_heads(tolerance=1.0))
    assert 1e-8 < (cut(x) - module(x)).abs().max() < 1.0


def test_query_bias_out_of_reach_of_the_keys() -> None:
    """c = W_Kᵀb_Q needs c among the rows of W_K: with rank k in G already, one dimension more."""
    heads = random_heads(2, 2, 3, 8)
    module = InvariantAttention.from_heads(heads, 8)
    assert module.query_bias is not None
    module.query_bias.data += 0.1 * normal(2, 8)
    with pytest.raises(ValueError, match="G_QK"):
        module.to_heads()
    x = normal(2, 5, 8)
    torch.testing.assert_close(written_out(module.to_heads(head_dim=4), x), module(x), rtol=0, atol=1e-11)
    # Where the product leaves a dimension free, c may have it.
    weak = replace(heads, w_k=torch.cat([heads.w_k[:, :2], torch.zeros(2, 1, 8, dtype=F64)], 1))
    module = InvariantAttention.from_heads(weak, 8)
    assert module.query_bias is not None
    module.query_bias.data += 0.1 * normal(2, 8)
    torch.testing.assert_close(written_out(module.to_heads(), x), module(x), rtol=0, atol=1e-11)


def test_shared_heads_that_came_apart() -> None:
    module = InvariantAttention.from_heads(random_heads(4, 2, 3, 8), 8)
    assert len(module.to_heads().w_k) == 2
    other = InvariantAttention.from_heads(random_heads(4, 4, 3, 8, seed=5), 8)
    for one, another in ((module.qk, other.qk), (module.vo, other.vo)):
        one.columns.data.copy_(another.columns)
    assert module.query_bias is not None
    assert other.query_bias is not None
    module.query_bias.data.copy_(other.query_bias)
    with pytest.raises(ValueError, match=r"rank above 3.*more kv_heads"):
        module.to_heads()
    x = normal(2, 5, 8)
    back = module.to_heads(kv_heads=4)
    assert len(back.w_k) == 4
    torch.testing.assert_close(written_out(back, x), module(x), rtol=0, atol=1e-11)
    shared = InvariantAttention.from_heads(random_heads(4, 2, 3, 8))
    torch.testing.assert_close(written_out(shared.to_heads(kv_heads=4), x), shared(x), rtol=0, atol=1e-11)
    for wrong in (1, 3, 0, 8):
        with pytest.raises(ValueError, match="kv_heads must be a multiple of 2"):
            shared.to_heads(kv_heads=wrong)


def test_single_precision_rounding_is_not_rank() -> None:
    """The full form of float32 heads has full rank by rounding, within the tolerance; twice the eps is beyond it."""
    wide = random_heads(3, 3, 8, 96)
    heads = Heads(**{name: t.float() for name, t in vars(wide).items()})
    module = InvariantAttention.from_heads(heads, 96)
    assert module.qk.columns.dtype == torch.float32
    back = module.to_heads()
    assert back.w_q.dtype == torch.float32
    x = normal(1, 5, 96).float() / 30
    torch.testing.assert_close(InvariantAttention.from_heads(back)(x), module(x), rtol=1e-4, atol=1e-4)
    module.double()
    with pytest.raises(ValueError, match="rank above 8"):
        module.to_heads()
    module.to_heads(tolerance=1e-6)


# --- pivots ------------------------------------------------------------------------------------------------


def test_ties_between_columns_are_settled_alike_in_all_bases() -> None:
    """Columns of G that come twice, up to sign: the first of the two is the pivot, whatever rounding says."""
    heads = random_heads(2, 2, 3, 4)
    twice = [torch.cat([w, w * torch.tensor([1.0, -1.0, 1.0, -1.0])], -1) for w in (heads.w_q, heads.w_k, heads.w_v)]
    heads = Heads(*twice, torch.cat([heads.w_o, heads.w_o], -1))
    module = InvariantAttention.from_heads(heads)
    assert bool((module.qk.pivots < 4).all())
    for seed in range(5):
        assert furthest(InvariantAttention.from_heads(moved(heads, seed)), module) < 1e-10


@pytest.mark.parametrize("rank", [3, 5, 8])
def test_heads_of_less_than_full_rank(rank: int) -> None:
    heads = random_heads(2, 2, 3, 8)
    w_k, w_o = heads.w_k.clone(), heads.w_o.clone()
    w_k[0, 2] = w_k[0, 0] - w_k[0, 1]  # rank 2
    w_o[1] = 0.0  # G_VO = 0
    heads = replace(heads, w_k=w_k, w_o=w_o)
    x = normal(2, 6, 8)
    module = InvariantAttention.from_heads(heads, rank)
    torch.testing.assert_close(module(x), written_out(heads, x), rtol=0, atol=1e-11)
    torch.testing.assert_close(written_out(module.to_heads(), x), written_out(heads, x), rtol=0, atol=1e-11)
    # The same products from other factors, not only from the same heads in another basis.
    other = replace(moved(heads), w_v=torch.cat([moved(heads).w_v[:1], normal(1, 3, 8, seed=4)]))
    assert heads.b_v is not None
    again = InvariantAttention.from_heads(other, rank)
    assert furthest(again, module) < 1e-10
    if rank == 3:
        assert module.vo.pivots[1].tolist() == [0, 1, 2]


def test_low_rank_and_full_are_one_function() -> None:
    heads = random_heads(3, 3, 4, 12)
    low, full = (InvariantAttention.from_heads(heads, rank) for rank in (4, 12))
    for one, other in ((low.qk, full.qk), (low.vo, full.vo)):
        torch.testing.assert_close(one.product(), other.product(), rtol=0, atol=1e-11)
        pivots = one.pivots[0]
        torch.testing.assert_close(one.reader()[0][:, pivots], torch.eye(4, dtype=F64), rtol=0, atol=0)
        torch.testing.assert_close(one.columns[0], other.product()[0][:, pivots].mT, rtol=0, atol=1e-11)
    x = normal(2, 6, 12)
    torch.testing.assert_close(low(x), full(x), rtol=0, atol=1e-11)


# --- differentiation, equivariance, memory ------------------------------------------------------------------


@pytest.mark.parametrize(("g", "rank"), [(2, 2), (1, 2), (2, 3), (2, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients(g: int, rank: int, causal: bool) -> None:
    module = InvariantAttention.from_heads(random_heads(2, g, 2, 4), rank)
    names = [n for n, p in module.named_parameters() if p.numel()]
    inputs = [normal(1, 3, 4).requires_grad_(), *(dict(module.named_parameters())[n] for n in names)]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(module, dict(zip(names, values, strict=True)), (x,), {"is_causal": causal})

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("rank", [4, 8])
def test_training_reduces_a_loss_and_moves_every_parameter(rank: int) -> None:
    torch.manual_seed(0)
    module = InvariantAttention(8, 2, rank=rank)
    before = copy.deepcopy(module)
    x, target = torch.randn(8, 6, 8), torch.randn(8, 6, 8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = F.mse_loss(module(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.95 * losses[0]
    for name, value in module.named_parameters():
        assert not value.numel() or bool((value != before.get_parameter(name)).any())
    assert torch.equal(module.qk.pivots, before.qk.pivots)


@pytest.mark.parametrize("rank", [None, 8])
def test_turned_with_the_stream(rank: int | None) -> None:
    """X → X Uᵀ with readers and writers turned along; b_O turns, and b_Q, which is inside the head, does not."""
    heads = random_heads(2, 2, 3, 8)
    module = InvariantAttention.from_heads(heads, rank)

    def turned(u: Tensor) -> InvariantAttention:
        weights = {f"w_{n}": getattr(heads, f"w_{n}") @ u.mT for n in "qkvo"}
        assert heads.b_o is not None
        return InvariantAttention.from_heads(replace(heads, **weights, b_o=u @ heads.b_o), rank)

    assert_equivariant(module, normal(2, 5, 8), function_at=turned)
    with pytest.raises(AssertionError, match="off by"):
        assert_equivariant(module, normal(2, 5, 8))


class Largest(TorchDispatchMode):
    """Bytes of the largest storage that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(("g", "rank"), [(4, None), (2, None), (4, 8)])
def test_no_buffer_of_n_by_n(g: int, rank: int | None) -> None:
    module = InvariantAttention(8, 4, rank=rank, kv_heads=g)
    n = 1024
    x = torch.randn(1, n, 8, requires_grad=True)
    padding = torch.ones(1, 1, 1, n, dtype=torch.bool)
    padding[..., -5:] = False
    for options in ({}, {"is_causal": True}, {"attn_mask": padding}):
        with Largest() as largest:
            module(x, **options).sum().backward()
        assert largest.bytes <= 4 * 4 * 8 * n * 2
    with sdpa_kernel(SDPBackend.MATH), Largest() as largest:
        module(x)
    assert largest.bytes >= 4 * n * n


# --- initialisation ------------------------------------------------------------------------------------------


def spectra(modules: list[InvariantAttention]) -> tuple[Tensor, Tensor]:
    """Singular values of G_QK and G_VO, each (modules · h, d)."""
    qk, vo = (torch.cat([getattr(m, name).product().detach() for m in modules]) for name in ("qk", "vo"))
    return torch.linalg.svdvals(qk), torch.linalg.svdvals(vo)


def same(one: Tensor, other: Tensor) -> float:
    """p of the two-sample Kolmogorov–Smirnov test."""
    return float(scipy.stats.ks_2samp(one.flatten().numpy(), other.flatten().numpy()).pvalue)


@pytest.mark.parametrize("rank", [None, 24])
@pytest.mark.parametrize("std", [None, 0.02])
def test_new_modules_are_distributed_as_new_heads(rank: int | None, std: float | None) -> None:
    """Entries, largest and least nonzero singular values of 180 heads by 180 of nn.MultiheadAttention, or GPT-2's."""
    torch.manual_seed(0)
    d, h, k, draws = 24, 3, 8, 60
    ours = [InvariantAttention(d, h, rank=rank, std=std, dtype=F64) for _ in range(draws)]
    theirs = []
    for _ in range(draws):
        standard = nn.MultiheadAttention(d, h, dtype=F64)
        if std is not None:
            for weight in (standard.in_proj_weight, standard.out_proj.weight):
                nn.init.normal_(weight, std=std)
        # Written here, not converted by the code that is under test.
        w_q, w_k, w_v = (w.unflatten(0, (h, k)) for w in standard.in_proj_weight.detach().chunk(3))
        w_o = standard.out_proj.weight.detach().mT.unflatten(0, (h, k))
        theirs.append(torch.stack([w_q.mT @ w_k, w_o.mT @ w_v]))
        assert not standard.in_proj_bias.any()
        assert not standard.out_proj.bias.any()
    for m in ours:
        assert m.query_bias is not None
        assert m.output_bias is not None
        assert not m.query_bias.any()
        assert not m.output_bias.any()
    for i, name in enumerate(("qk", "vo")):
        g = torch.cat([getattr(m, name).product().detach() for m in ours])
        reference = torch.cat([t[i] for t in theirs])
        s, s_reference = torch.linalg.svdvals(g), torch.linalg.svdvals(reference)
        assert float(s[:, k:].max()) < 1e-12
        assert abs(float(g.std() / reference.std()) - 1) < 0.03
        # Entries of one G depend on each other; one of each is enough.
        assert same(g[:, 0, 0], reference[:, 0, 0]) > 1e-3
        assert same(g[:, 5, 5], reference[:, 5, 5]) > 1e-3
        assert same(s[:, 0], s_reference[:, 0]) > 1e-3
        assert same(s[:, k - 1], s_reference[:, k - 1]) > 1e-3
        torch.testing.assert_close(s[:, :k].mean(0), s_reference[:, :k].mean(0), rtol=0.08, atol=0)
        # Control: iid numbers of the same variance are another distribution, even where only the largest is looked at.
        iid = torch.randn(g.shape, dtype=F64) * reference.std()
        assert same(torch.linalg.svdvals(iid)[:, 0], s_reference[:, 0]) < 1e-6


def test_seeded() -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(InvariantAttention(12, 3))
    assert furthest(drawn[0], drawn[1]) == 0.0
    assert furthest(drawn[0], InvariantAttention(12, 3)) > 1e-3


# --- as a module --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 12])
def test_state_dict_deepcopy_and_deferred_construction(rank: int | None) -> None:
    module = InvariantAttention.from_heads(random_heads(3, 3, 4, 12), rank)
    x = normal(2, 5, 12)
    twin = copy.deepcopy(module)
    fresh = InvariantAttention(12, 3, rank=rank, dtype=F64)
    assert (fresh(x) - module(x)).abs().max() > 1e-3
    fresh.load_state_dict(module.state_dict())  # pivots come along
    for other in (twin, fresh):
        torch.testing.assert_close(other(x), module(x), rtol=0, atol=0)
    twin.qk.columns.data.add_(1.0)
    assert (twin(x) - module(x)).abs().max() > 1e-3
    with torch.device("meta"):
        later = InvariantAttention(12, 3, rank=rank, dtype=F64)
    later.to_empty(device="cpu").reset_parameters()
    assert bool(later(x).isfinite().all())
    assert all(p.requires_grad for p in module.parameters())
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, is_causal=True), module(x, is_causal=True), rtol=0, atol=1e-13)


@pytest.mark.parametrize("rank", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(rank: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact = InvariantAttention(16, 2, rank=rank, dtype=F64)
    x = normal(2, 9, 16)
    module = copy.deepcopy(exact).to(dtype)
    y = module(x.to(dtype))
    assert y.dtype == dtype
    assert (y.double() - exact(x)).abs().max() < 40 * torch.finfo(dtype).eps
    drawn = InvariantAttention(16, 2, rank=rank, dtype=dtype)
    assert drawn(x.to(dtype)).dtype == dtype
    assert drawn.to_heads(tolerance=0.1).w_q.dtype == dtype


@pytest.mark.parametrize("rank", [None, 16])
def test_autocast(rank: int | None) -> None:
    """Also where x itself is read, which no linear map has cast; backward twice, the second time recomputed."""
    torch.manual_seed(0)
    module = InvariantAttention(16, 2, rank=rank)
    x = normal(2, 9, 16).float().requires_grad_()
    mask = normal(9, 9).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, mask, is_causal=True)
    assert y.dtype == torch.bfloat16
    expected = module(x, mask, is_causal=True)
    assert (y - expected).abs().max() < 40 * torch.finfo(torch.bfloat16).eps * expected.abs().max()
    (exact,) = torch.autograd.grad(expected.square().sum(), x)
    for again in (False, True):
        (gradient,) = torch.autograd.grad(y.float().square().sum(), x, retain_graph=True, create_graph=again)
        assert gradient.dtype == torch.float32
        assert (gradient - exact).abs().max() < 40 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 12, "heads": 5}, "5 heads do not divide width 12: give head_dim"),
        ({"width": 12, "heads": 4, "kv_heads": 3}, "kv_heads divide heads"),
        ({"width": 12, "heads": 0}, "at least 1"),
        ({"width": 12, "heads": 3, "head_dim": 0}, "at least 1"),
        ({"width": 12, "heads": 3, "rank": 3}, "rank must be from 4"),
        ({"width": 12, "heads": 3, "rank": 13}, "to width 12, got 13"),
    ],
)
def test_sizes_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InvariantAttention(**arguments)


def test_inputs_that_do_not_fit() -> None:
    module = InvariantAttention(12, 3)
    x = torch.randn(2, 5, 12)
    with pytest.raises(ValueError, match=r"x must be \(\.\.\., n, 12\), got \(2, 5, 11\)"):
        module(x[..., :11])
    with pytest.raises(ValueError, match="x must be"):
        module(x[0, 0])
    for shape in ((5,), (5, 4), (3, 3, 5, 5), (2, 2, 3, 5, 5)):
        with pytest.raises(ValueError, match="attn_mask of shape"):
            module(x, attn_mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match="head_dim must be at least 1"):
        module.to_heads(head_dim=0)
    with pytest.raises(ValueError, match="heads of 12 / 3, not 5"):
        InvariantAttention(12, 3, 5).to_multihead()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"w_q": torch.ones(4, 3)}, ValueError, r"w_q and w_k are \(heads, k, d\)"),
        ({"w_k": normal(3, 2, 6), "w_v": normal(3, 2, 6)}, ValueError, "3 key/value heads do not divide 4"),
        ({"w_v": normal(4, 2, 6)}, ValueError, r"w_v must have shape \(2, 2, 6\)"),
        ({"b_q": normal(2, 2)}, ValueError, r"b_q must have shape \(4, 2\)"),
        ({"b_o": normal(6, 1)}, ValueError, "b_o must have shape"),
        ({"w_o": normal(4, 2, 6).float()}, TypeError, "w_o must have the real floating dtype"),
        ({"b_o": torch.ones(6, dtype=torch.int64)}, TypeError, "b_o must have the real floating dtype"),
    ],
)
def test_heads_that_do_not_fit(changes: dict[str, Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replace(random_heads(4, 2, 2, 6), **changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kdim": 4}, "kdim"),
        ({"add_bias_kv": True}, "bias_kv"),
        ({"add_zero_attn": True}, "zero"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_multihead_attention_that_cannot_be_written(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InvariantAttention.from_multihead(nn.MultiheadAttention(12, 3, **options))
