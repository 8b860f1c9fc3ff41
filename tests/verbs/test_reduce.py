"""reduce: the cut is the best one of its rank, and the same for every disguise."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import CASES, TIED, gpt_like, llama_like, neo_like, neox_like, opt_like, rope, vit_like
from oracle import Case, Tiny
from safetensors.torch import load_file
from torch import Tensor
from worded import made, prose, written

from gaugekit.symmetry import circuits
from gaugekit.symmetry.constants import ValueConstant
from gaugekit.verbs.calibration import Moments, measure
from gaugekit.verbs.inspect import untracked
from gaugekit.verbs.reduce import reduce
from gaugekit.verbs.reducing import Cut, Kept, lost, queries_keys, spend, values
from gaugekit.verbs.rewriting import opened
from gaugekit.verbs.scramble import scramble
from gaugekit.verbs.texts import text_batches
from gaugekit.verbs.verify import verify

WEIGHTS = "model.safetensors"
QK_NORMED = {"qwen3", "qwen3_moe", "gemma3_text", "olmo2"}
MHA = {"num_key_value_heads": 2}
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}


# --- one function for every disguise ---------------------------------------------------------------------------


PLAIN = [
    *{case.model_type: case for case in reversed(CASES)}.values(),
    Case("opt", opt_like(num_hidden_layers=1, enable_bias=False), note="no biases"),
    Case("qwen2", llama_like(**MHA), note="two kv heads"),
    Case("stablelm", llama_like(**MHA, **rope(0.5), use_qkv_bias=True), note="qkv bias"),
    Case("llama", llama_like(rope_parameters={"rope_type": "default", "rope_theta": 1.0}), note="equal turns"),
]


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_every_disguise_is_cut_alike(case: Case, tmp_path: Path) -> None:
    _, a = made(case, tmp_path)
    scramble(a, tmp_path / "b", seed=1, observable=case.observable)
    for name in "ab":
        qk = None if case.model_type in QK_NORMED else 0.6
        report = reduce(tmp_path / name, tmp_path / f"r{name}", vo=0.6, qk=qk)
    assert verify(tmp_path / "ra", tmp_path / "rb", observable=case.observable).largest < 1e-9
    assert verify(a, tmp_path / "ra", observable=case.observable).largest > 1e-3
    assert report.vo_lost is not None and 0 < report.vo_lost < 1


WEIGHTED = [
    Case("gpt2", gpt_like(n_positions=16, vocab_size=20)),
    Case("llama", llama_like(**WIDE)),
    Case("qwen2", llama_like(**MHA), note="biases of values, none of outputs"),
    Case("stablelm", llama_like(**MHA, **rope(0.5)), note="norms with constants, no biases"),
    Case("gpt_neox", neox_like(vocab_size=30, **rope(0.5)), note="parallel"),
    Case("gpt_neox", neox_like(vocab_size=30, attention_bias=False, **rope(0.5)), note="the MLP's bias as sink"),
    Case("gpt_neo", neo_like(2)),
    Case("gemma2", llama_like(head_dim=4, **TIED), note="scores under a softcap"),
]


@pytest.mark.parametrize("case", WEIGHTED, ids=str)
def test_every_disguise_is_cut_alike_by_a_text(case: Case, tmp_path: Path) -> None:
    _, a = made(case, tmp_path, eps=1e-2)
    scramble(a, tmp_path / "b", seed=1)
    text = prose(tmp_path / "text.txt", case.config["vocab_size"], 400)
    for name in "ab":
        options: dict[str, Any] = {"text": text, "length": 6, "run_dtype": "float64"}
        report = reduce(
            tmp_path / name, tmp_path / f"r{name}", vo=0.6, qk=0.6, tokenizer=a / "tokenizer.json", **options
        )
    assert verify(tmp_path / "ra", tmp_path / "rb").largest < 1e-8
    reduce(a, tmp_path / "plain", vo=0.6, qk=0.6)
    assert verify(tmp_path / "ra", tmp_path / "plain").largest > 1e-3
    for layer in report.layers:
        assert layer.vo_weighted is not None and layer.vo_plain is not None
        assert layer.qk_weighted is not None and layer.qk_plain is not None


# --- the cut itself --------------------------------------------------------------------------------------------


def cuts(where: Path, text: Path | None, length: int = 6) -> tuple[list[Cut], list[Cut], tuple[Moments, ...]]:
    model = opened(where, None)
    every = list(circuits(model.spec, model.symmetries.observable))
    free = [s for s in model.symmetries.continuous if isinstance(s, ValueConstant)]
    found: Any = (None,) * len(every)
    if text is not None:
        rows = text_batches(model.checkpoint, model.spec, text, length, 4, None, where / "tokenizer.json")
        found = measure(model, every, rows, queries_keys=True, dtype=torch.float64, track=untracked)
    of_values = [values(each, free, model.load, moment) for each, moment in zip(every, found, strict=True)]
    of_keys = [queries_keys(each, model.load, moment) for each, moment in zip(every, found, strict=True)]
    return of_values, of_keys, found


def first(cut: Cut, rank: int) -> Kept:
    return [(torch.arange(space.energies.shape[-1]) < rank).expand(space.energies.shape) for space in cut.spaces]


@pytest.mark.parametrize("case", WEIGHTED, ids=str)
def test_never_worse_than_plain_on_the_text(case: Case, tmp_path: Path) -> None:
    _, a = made(case, tmp_path)
    text = prose(tmp_path / "text.txt", case.config["vocab_size"], 400)
    better = 0
    for ours, theirs in zip(cuts(a, text)[:2], cuts(a, None)[:2], strict=True):
        for cut, plain in zip(ours, theirs, strict=True):
            spaces = [replace(own, own=p.own, dual=p.dual) for own, p in zip(cut.spaces, plain.spaces, strict=True)]
            other = replace(cut, spaces=tuple(spaces))
            for rank in range(1, max(space.energies.shape[-1] for space in cut.spaces)):
                kept = first(cut, rank)
                (our_plain, weighted), (their_plain, unweighted) = cut.errors(kept), other.errors(kept)
                assert weighted is not None and unweighted is not None
                assert weighted <= unweighted + 1e-12
                assert their_plain <= our_plain + 1e-12
                better += weighted < unweighted - 1e-3
    assert better > 2


def test_the_error_is_that_of_what_heads_write(tmp_path: Path) -> None:
    """One head: what its output projection writes before and after differs by exactly what is told, and the mean of
    that difference is zero, since the output has a bias."""
    case = Case("gpt2", gpt_like(n_head=1, n_layer=1, n_positions=16, vocab_size=20))
    _, a = made(case, tmp_path)
    text = prose(tmp_path / "text.txt", 20, 600)
    report = reduce(a, tmp_path / "r", vo=0.4, text=text, length=12, run_dtype="float64")
    assert report.layers[0].vo == (3,)
    before, after = (wrote(tmp_path / name, text, "transformer.h.0.attn.c_proj") for name in ("a", "r"))
    # Only LayerNorms read what is written, so that its mean over features is nobody's.
    before, after = (x - x.mean(-1, keepdim=True) for x in (before, after))
    difference, spread = after - before, before - before.mean(0)
    told = report.layers[0].vo_weighted
    assert told is not None and told > 0.01
    assert float(difference.norm() / spread.norm()) == pytest.approx(told, rel=1e-6)
    assert float(difference.mean(0).norm()) < 1e-9 * float(before.norm())


def wrote(where: Path, text: Path, module: str, output: bool = True) -> Tensor:
    """What a module gives, or is given, on the text the way `text_batches` reads it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float64)
    found = []

    def hook(_: Any, given: tuple[Tensor, ...], out: Tensor) -> None:
        found.append((out if output else given[0]).detach().flatten(0, 1))

    model.get_submodule(module).register_forward_hook(hook)
    read = opened(where, None)
    for ids in text_batches(read.checkpoint, read.spec, text, 12, 4, None, where / "tokenizer.json"):
        model(ids)
    return torch.cat(found)


def test_scores_over_pairs(tmp_path: Path) -> None:
    """Queries and keys without positions: the error told is that of all pairs of a query and a key, but for what is
    the same for all keys of a query."""
    case = Case("gpt2", gpt_like(n_head=1, n_layer=1, n_positions=16, vocab_size=20))
    _, a = made(case, tmp_path)
    text = prose(tmp_path / "text.txt", 20, 600)
    report = reduce(a, tmp_path / "r", qk=0.4, text=text, length=12, run_dtype="float64")
    assert report.layers[0].qk == (3,)

    def scores(name: str) -> Tensor:
        q, k, _ = wrote(tmp_path / name, text, "transformer.h.0.attn.c_attn").chunk(3, -1)
        found = q @ k.mT
        return found - found.mean(-1, keepdim=True)

    before, after = scores("a"), scores("r")
    told = report.layers[0].qk_weighted
    assert told is not None and told > 0.01
    assert float((after - before).norm() / before.norm()) == pytest.approx(told, rel=1e-6)


def nearest(matrix: Tensor, rank: int) -> Tensor:
    u, s, vh = torch.linalg.svd(matrix)
    return (u[..., :rank] * s[..., None, :rank]) @ vh[..., :rank, :]


def dense(tensors: dict[str, Tensor], kind: str, heads: int, groups: int) -> Tensor:
    """W_O W_V of every group's heads one above the other (g, h/g · d, d), with what the norms do, by hand."""
    if kind == "gpt2":
        d = tensors["transformer.wte.weight"].shape[1]
        value, out = (
            tensors["transformer.h.0.attn.c_attn.weight"][:, 2 * d :].mT,
            tensors["transformer.h.0.attn.c_proj.weight"],
        )
        centre = torch.eye(d, dtype=torch.float64) - 1 / d
        value = value * tensors["transformer.h.0.ln_1.weight"] @ centre
    elif kind == "dinov2":
        at = "encoder.layer.0.attention"
        d = tensors[f"{at}.output.dense.weight"].shape[0]
        centre = torch.eye(d, dtype=torch.float64) - 1 / d
        value = tensors[f"{at}.attention.value.weight"] * tensors["encoder.layer.0.norm1.weight"] @ centre
        out = tensors[f"{at}.output.dense.weight"].mT * tensors["encoder.layer.0.layer_scale1.lambda1"] @ centre
    else:
        at = "model.layers.0"
        gamma = tensors[f"{at}.input_layernorm.weight"] + (kind == "gemma2")
        value, out = tensors[f"{at}.self_attn.v_proj.weight"] * gamma, tensors[f"{at}.self_attn.o_proj.weight"].mT
    value = value.unflatten(0, (groups, -1))
    # Head i reads value head i // (h / g).
    written = out.unflatten(0, (groups, heads // groups, -1))
    return torch.stack([torch.cat([head.mT @ value[j] for head in written[j]]) for j in range(groups)])


@pytest.mark.parametrize(
    ("case", "heads", "groups"),
    [
        (Case("llama", llama_like(num_hidden_layers=1, **WIDE)), 4, 2),
        (
            Case("mistral", llama_like(num_attention_heads=14, num_key_value_heads=2, head_dim=4, num_hidden_layers=1)),
            14,
            2,
        ),
        (Case("gemma2", llama_like(head_dim=4, num_hidden_layers=1, **TIED)), 2, 1),
        (Case("gpt2", gpt_like(n_layer=1)), 2, 2),
        (Case("dinov2", vit_like(mlp_ratio=1), "hidden", inputs="images"), 2, 2),
    ],
    ids=str,
)
def test_against_dense_decompositions(case: Case, heads: int, groups: int, tmp_path: Path) -> None:
    """TransformerLens PR#1768: with grouped heads the wrong value head was used (here fourteen on two).
    TransformerLens PR#1580: norm weights were folded along the wrong axis, unseen as long as they were one.
    TransformerLens#511, Liger#74: norms that are stored as w and mean 1 + w."""
    _, a = made(case, tmp_path)
    report = reduce(a, tmp_path / "r", vo=0.55)
    before, after = (
        dense({n: x.double() for n, x in load_file(tmp_path / name / WEIGHTS).items()}, case.model_type, heads, groups)
        for name in ("a", "r")
    )
    ranks = report.layers[0].vo
    assert ranks is not None and max(ranks) < before.shape[1]
    for one, other, rank in zip(before, after, ranks, strict=True):
        if case.model_type == "gpt2":  # where only LayerNorms read what is written, its mean is nobody's
            d = one.shape[1]
            one, other = (x.unflatten(0, (-1, d)) for x in (one, other))
            one, other = ((x - x.mean(1, keepdim=True)).flatten(0, 1) for x in (one, other))
        torch.testing.assert_close(other, nearest(one, rank), rtol=0, atol=1e-10)
        assert float((one - other).norm()) > 1e-3


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gpt_neox"])
def test_constants_are_kept_exactly(kind: str, tmp_path: Path) -> None:
    """Values that are all constant: nothing of the output is lost, whatever is cut."""
    config = {"gpt2": gpt_like(), "opt": opt_like(), "gpt_neox": neox_like(vocab_size=30, **rope(0.5))}[kind]
    tiny = Tiny(Case(kind, config), eps=1e-5)
    theta = tiny.theta.clone()
    for _, _, a, _ in tiny.spec.attentions():
        theta[a.v.weight.window(tiny.index[a.v.weight.name]).reshape(-1)] *= 1e-9
    a = written(tiny, tmp_path / "a", theta)
    reduce(a, tmp_path / "r", vo=0.25)
    assert verify(a, tmp_path / "r").largest < 1e-7
    text = prose(tmp_path / "text.txt", config["vocab_size"], 200)
    reduce(a, tmp_path / "w", vo=0.25, text=text, length=6, run_dtype="float64")
    assert verify(a, tmp_path / "w").largest < 1e-7


def test_only_whole_rotary_pairs_go(tmp_path: Path) -> None:
    tiny, a = made(Case("llama", llama_like(**WIDE)), tmp_path)
    report = reduce(a, tmp_path / "r", qk=0.5)
    tensors = load_file(tmp_path / "r" / WEIGHTS)
    for (_, _, attention, _), layer in zip(tiny.spec.attentions(), report.layers, strict=True):
        assert attention.rotary is not None and layer.qk is not None
        for linear, groups in ((attention.q, 2), (attention.k, 2)):
            heads = linear.weight.read(tensors[linear.weight.name])
            alive = (heads != 0).any(-1)
            for i, j in attention.rotary.pairs:
                assert torch.equal(alive[:, i], alive[:, j])
            kept = alive.sum(-1).reshape(groups, -1)
            assert kept.tolist() == [[each] * kept.shape[1] for each in layer.qk]


def test_the_budget_is_spent_on_what_loses_most(tmp_path: Path) -> None:
    """Against all ways to spend it."""
    _, a = made(Case("gpt2", gpt_like(n_layer=2)), tmp_path)
    of_values, *_ = cuts(a, None)
    for share in (0.26, 0.5, 0.75, 1.0):
        budget = int(share * 16)
        kept = spend(of_values, share, relative=True, together=False)
        ranks = [cut.dimensions(masks) for cut, masks in zip(of_values, kept, strict=True)]
        assert sum(map(sum, ranks)) == budget and min(map(min, ranks)) >= 1
        least = min(
            lost(of_values, [[(torch.arange(4) < torch.tensor(pair).unsqueeze(-1)).unsqueeze(1)] for pair in way])
            for way in product(product(range(1, 5), repeat=2), repeat=2)
            if sum(map(sum, way)) <= budget
        )
        assert lost(of_values, kept) == pytest.approx(least, abs=1e-12)
        together = spend(of_values, share, relative=True, together=True)
        assert lost(of_values, together) >= least - 1e-12
        for cut, masks in zip(of_values, together, strict=True):
            assert len(set(cut.dimensions(masks))) == 1
    few = spend(of_values, 0.01, relative=True, together=False)
    assert [cut.dimensions(masks) for cut, masks in zip(of_values, few, strict=True)] == [(1, 1), (1, 1)]
