"""What reduce writes: counts, caches, classes that load it, what is refused, and that nothing is left of that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import gpt_like, llama_like, neox_like, rope, vit_like
from oracle import Case, Tiny
from safetensors.torch import load_file
from torch import Tensor
from worded import logits, made, prose, tokens, written

from gaugekit.errors import CheckpointError, GaugekitError, UnsupportedArchitecture
from gaugekit.models.reduced import REDUCED
from gaugekit.symmetry import circuits
from gaugekit.symmetry.constants import ValueConstant
from gaugekit.verbs.reduce import ReduceReport, reduce
from gaugekit.verbs.reducing import spend, values
from gaugekit.verbs.rewriting import opened
from gaugekit.verbs.texts import text_batches
from gaugekit.verbs.verify import verify

WEIGHTS = "model.safetensors"
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}

SMALLER: dict[str, dict[str, Any]] = {
    "llama": llama_like(attention_bias=True, **WIDE, vocab_size=20),
    "mistral": llama_like(**WIDE, sliding_window=4, vocab_size=20),
    "qwen2": llama_like(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, vocab_size=20),
    "qwen3": llama_like(**WIDE, vocab_size=20),
    "gpt2": gpt_like(n_positions=32, vocab_size=20),
}


@pytest.mark.parametrize("kind", SMALLER)
def test_smaller_is_the_same_cut_with_one_rank_a_layer(kind: str, tmp_path: Path) -> None:
    """TransformerCompression#73, #188, #185: the result is not loadable with from_pretrained."""
    tiny, a = made(Case(kind, SMALLER[kind]), tmp_path)
    report = reduce(a, tmp_path / "r", vo=0.6, form="smaller")
    assert report.vo_lost is not None and report.vo_lost_by_head is not None
    assert report.vo_lost >= report.vo_lost_by_head > 0
    ids = tokens(20, 3, 12)
    found = logits(tmp_path / "r", ids)
    # By hand: zeros in the original's shapes.
    model = opened(a, None)
    free = [s for s in model.symmetries.continuous if isinstance(s, ValueConstant)]
    of_values = [values(each, free, model.load, None) for each in circuits(model.spec, model.symmetries.observable)]
    kept = spend(of_values, 0.6, relative=True, together=True)
    tensors = {name: tensor.double() for name, tensor in load_file(a / WEIGHTS).items()}
    for cut, masks in zip(of_values, kept, strict=True):
        for step in cut.steps(masks):
            tensors |= step.symmetry.act(tensors, step.element)
    theta = tiny.flat({name: tensors[name] for name in tiny.index}, tiny.theta)
    torch.testing.assert_close(found, logits(written(tiny, tmp_path / "zeros", theta), ids), rtol=0, atol=1e-5)
    assert float((found - logits(a, ids)).abs().max()) > 1e-2
    check_counts(report, a, tmp_path / "r")
    assert report.kv_bytes is not None
    assert report.kv_bytes[1] == cache_bytes(tmp_path / "r", ids) < report.kv_bytes[0] == cache_bytes(a, ids)


def check_counts(report: ReduceReport, source: Path, result: Path) -> None:
    """TransformerCompression#165: parameter counts do not match the label. Here what is loaded is counted."""
    sizes = [
        sum(p.numel() for p in transformers.AutoModelForCausalLM.from_pretrained(where).parameters())
        for where in (source, result)
    ]
    assert list(report.parameters) == sizes
    assert sum(file.stat().st_size for file in result.glob("*.safetensors")) < report.bytes


def cache_bytes(where: Path, ids: Tensor) -> int:
    """Of one token, in float64 as the weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float64)
    out = model(ids[:, :3], use_cache=True)
    layers = (out.past_key_values if "past_key_values" in out else out.cache).layers
    return sum(x.nbytes for layer in layers for x in (layer.keys, layer.values)) // ids[:, :3].numel()


@pytest.mark.parametrize("kind", SMALLER)
def test_lossless(kind: str, tmp_path: Path) -> None:
    tiny = Tiny(Case(kind, SMALLER[kind]), eps=1e-5)
    theta = tiny.theta.clone()
    _, _, last, _ = list(tiny.spec.attentions())[-1]
    rows = last.v.weight.window(tiny.index[last.v.weight.name])
    theta[rows[:, -1]] = theta[rows[:, 0]] - 2 * theta[rows[:, 1]]  # a dimension less in every head of the last layer
    if last.v.bias is not None:
        biases = last.v.bias.window(tiny.index[last.v.bias.name])
        theta[biases[:, -1]] = theta[biases[:, 0]] - 2 * theta[biases[:, 1]]
    a = written(tiny, tmp_path / "a", theta)
    report = reduce(a, tmp_path / "r", lossless=True)
    ids = tokens(20, 3, 12)
    torch.testing.assert_close(logits(tmp_path / "r", ids), logits(a, ids), rtol=0, atol=1e-5)
    k, g, d = last.head_dim, last.kv_heads, last.v.weight.shape[-1]
    assert [layer.vo for layer in report.layers] == [(k,) * g] * (len(report.layers) - 1) + [(k - 1,) * g]
    whole = len(report.layers) - 1
    fewer = g * d + last.heads * d + (g if last.v.bias is not None else 0)
    assert report.parameters[0] - report.parameters[1] == g * (whole * k**2 + (k - 1) ** 2) + fewer
    check_counts(report, a, tmp_path / "r")
    again = reduce(a, tmp_path / "r", lossless=True, overwrite=True)
    assert again == report


def test_lossless_keeps_a_layer_whose_values_cannot_be_pivoted(tmp_path: Path) -> None:
    """Values that are constant in a direction in which no input moves them have no columns for the identity."""
    tiny = Tiny(Case("qwen2", SMALLER["qwen2"]), eps=1e-5)
    theta = tiny.theta.clone()
    _, _, one, _ = next(tiny.spec.attentions())
    theta[one.v.weight.window(tiny.index[one.v.weight.name])[:, -1].reshape(-1)] = 0.0
    a = written(tiny, tmp_path / "a", theta)
    reduce(a, tmp_path / "r", lossless=True)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "r")
    assert config.pivoted_values == [False, True]
    ids = tokens(20, 3, 12)
    torch.testing.assert_close(logits(tmp_path / "r", ids), logits(a, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["v", "o"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_lossless_with_an_attention_that_writes_nothing(kind: str, side: str, tmp_path: Path) -> None:
    """Layers that are added to a model begin with outputs of zero; one dimension stays, and the result loads."""
    tiny = Tiny(Case(kind, SMALLER[kind]), eps=1e-5)
    theta = tiny.theta.clone()
    _, _, one, _ = next(tiny.spec.attentions())
    for view in (getattr(one, side).weight, getattr(one, side).bias if side == "v" else None):
        if view is not None:
            theta[view.window(tiny.index[view.name]).reshape(-1)] = 0.0
    a = written(tiny, tmp_path / "a", theta)
    report = reduce(a, tmp_path / "r", lossless=True)
    assert report.layers[0].vo == (1,) * one.kv_heads
    config = transformers.AutoConfig.from_pretrained(tmp_path / "r")
    assert config.value_dims == [1, one.head_dim] and config.pivoted_values == [False, True]
    ids = tokens(20, 3, 12)
    torch.testing.assert_close(logits(tmp_path / "r", ids), logits(a, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_keeping_all_changes_nothing(kind: str, tmp_path: Path) -> None:
    _, a = made(Case(kind, SMALLER[kind]), tmp_path)
    text = prose(tmp_path / "text.txt", 20, 200)
    for form in ("same", "smaller"):
        report = reduce(a, tmp_path / form, vo=1.0, qk=1.0, text=text, form=form, length=10)
        ids = tokens(20, 3, 12)
        torch.testing.assert_close(logits(tmp_path / form, ids), logits(a, ids), rtol=0, atol=1e-5)
        assert report.vo_lost == 0
        assert report.parameters[0] == report.parameters[1]


def test_the_same_shapes_load_anywhere(tmp_path: Path) -> None:
    _, a = made(Case("llama", SMALLER["llama"]), tmp_path)
    report = reduce(a, tmp_path / "r", vo=0.5, dtype="bfloat16")
    assert not list((tmp_path / "r").glob("*.py"))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "r")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert report.parameters[0] == report.parameters[1]
    assert report.kv_bytes is not None and report.kv_bytes[0] == 4 * report.kv_bytes[1]  # float64 before
    ranks = report.layers[0].vo
    assert ranks is not None
    heads = loaded.model.layers[0].self_attn.v_proj.weight.unflatten(0, (2, -1))
    assert ((heads != 0).any(-1).sum(-1)).tolist() == list(ranks)
    assert all(bool((head[rank:] == 0).all()) for head, rank in zip(heads, ranks, strict=True))


def test_held_out_text(tmp_path: Path) -> None:
    _, a = made(Case("gpt2", SMALLER["gpt2"]), tmp_path)
    text, other = prose(tmp_path / "text.txt", 20, 300), prose(tmp_path / "other.txt", 20, 300, seed=1)
    report = reduce(a, tmp_path / "r", vo=0.5, text=text, eval_text=other, form="smaller", length=20, tokens=200)
    assert (report.text_tokens, report.eval_tokens) == (160, 160)
    assert report.before is not None and report.after is not None
    model = opened(a, None)
    rows = torch.cat(text_batches(model.checkpoint, model.spec, other, 20, 4, 200))
    for where, reading in ((a, report.before), (tmp_path / "r", report.after)):
        chances = torch.log_softmax(logits(where, rows), -1)[:, :-1]
        nats = -chances.gather(-1, rows[:, 1:].unsqueeze(-1)).mean()
        assert reading.nats == pytest.approx(float(nats), abs=1e-4)
        assert reading.perplexity == pytest.approx(float(nats.exp()), rel=1e-3)
        assert min(reading.reading, reading.writing) > 0


def test_held_out_text_of_a_model_without_fused_attention(tmp_path: Path) -> None:
    """Scores under a softcap."""
    _, a = made(Case("gemma2", llama_like(**WIDE, vocab_size=20)), tmp_path)
    text = prose(tmp_path / "text.txt", 20, 100)
    report = reduce(a, tmp_path / "r", vo=1.0, eval_text=text, length=10)
    assert report.before is not None and report.after is not None
    assert report.after.nats == pytest.approx(report.before.nats, abs=1e-5)


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "nothing to reduce"),
        ({"vo": 0.0}, "--vo 0: it is the share that is kept"),
        ({"vo": 1.1}, "--vo 1.1"),
        ({"qk": -0.5}, "--qk -0.5"),
        ({"vo": float("nan")}, "--vo nan"),
        ({"lossless": True, "vo": 0.5}, "leave out --vo"),
        ({"lossless": True, "text": "none"}, "leave out --vo, --qk and --text"),
        ({"lossless": True, "form": "same"}, "leave out --form same"),
        ({"qk": 0.5, "form": "smaller"}, "give --vo"),
        ({"vo": 0.5, "dry_run": True, "eval_text": "none"}, "--dry-run writes nothing"),
        ({"vo": 0.5, "text": "none.txt"}, "none.txt"),
        ({"vo": 0.5, "eval_text": "none.txt"}, "none.txt"),
        ({"vo": 0.5, "text": "text", "tokenizer": "nowhere"}, "nowhere does not exist"),
        ({"vo": 0.5, "dtype": "int8"}, "'int8' is no dtype"),
        ({"vo": 0.5, "text": "short"}, "has 3 tokens, and heads have 6 dimensions: give a longer one"),
        ({"vo": 0.5, "text": "text", "out": "a"}, "is the source itself"),
    ],
)
def test_refused_before_any_work(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    _, a = made(Case("llama", SMALLER["llama"]), tmp_path)
    prose(tmp_path / "text", 20, 100)
    prose(tmp_path / "short", 20, 3)
    paths = {name: tmp_path / options[name] for name in ("text", "eval_text", "tokenizer") if name in options}
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(GaugekitError) as caught:
        reduce(a, tmp_path / options.pop("out", "r"), **options | paths)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("case", "options", "words"),
    [
        (Case("qwen3", SMALLER["qwen3"]), {"qk": 0.5}, "norms queries and keys"),
        (Case("gpt_neox", neox_like(vocab_size=30)), {"vo": 0.5, "form": "smaller"}, "gpt_neox has no class"),
        (Case("gpt_neox", neox_like(vocab_size=30)), {"lossless": True}, "use --form same"),
        (Case("llama", SMALLER["llama"], "hidden"), {"lossless": True}, "a: has no language-model head.*--form same$"),
        (Case("vit", vit_like(), "hidden"), {"vo": 0.5, "eval_text": "text"}, "predicts nothing"),
        (Case("vit", vit_like(), "hidden"), {"vo": 0.5, "text": "text"}, "^vit reads no text: give a model of text$"),
    ],
    ids=str,
)
def test_families_that_cannot(case: Case, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    tiny = Tiny(case)
    tiny.model.save_pretrained(tmp_path / "a")
    prose(tmp_path / "text", 13, 50)
    paths = {name: tmp_path / options[name] for name in ("text", "eval_text") if name in options}
    with pytest.raises(UnsupportedArchitecture, match=words):
        reduce(tmp_path / "a", tmp_path / "r", **options | paths)
    assert not (tmp_path / "r").exists()


def test_a_text_of_another_model(tmp_path: Path) -> None:
    _, a = made(Case("llama", SMALLER["llama"]), tmp_path)
    wide = Case("llama", SMALLER["llama"] | {"vocab_size": 40})
    _, b = made(wide, tmp_path, "b")
    text = prose(tmp_path / "text", 40, 100)
    with pytest.raises(CheckpointError, match=r"b: its tokenizer gives token [23][0-9], and the model has 20 of them"):
        reduce(a, tmp_path / "r", vo=0.5, text=text, tokenizer=b)


def test_a_zero_norm_weight_keeps_constants_where_they_are(tmp_path: Path) -> None:
    """Without a value bias their constant comes through the norm, whose inverse does not exist."""
    case = Case("gpt_neox", neox_like(vocab_size=30, attention_bias=False, **rope(0.5)))
    tiny = Tiny(case, eps=1e-5)
    theta = tiny.theta.clone()
    name = "gpt_neox.layers.0.input_layernorm.weight"
    theta[tiny.index[name][3]] = 0.0
    a = written(tiny, tmp_path / "a", theta)
    report = reduce(a, tmp_path / "r", vo=0.6)
    assert [s.where for s in report.skipped] == ["layer 0 attention"]
    assert f"{name} has a zero entry" in report.skipped[0].reason
    assert verify(a, tmp_path / "r").largest > 1e-3


def test_a_dry_run_measures_and_writes_nothing(tmp_path: Path) -> None:
    _, a = made(Case("llama", SMALLER["llama"]), tmp_path)
    text = prose(tmp_path / "text", 20, 200)
    dry = reduce(a, tmp_path / "r", vo=0.5, text=text, form="smaller", length=10, dry_run=True)
    assert not dry.written and not (tmp_path / "r").exists()
    assert replace(dry, written=True) == reduce(a, tmp_path / "r", vo=0.5, text=text, form="smaller", length=10)
    assert set(REDUCED) == set(SMALLER)
