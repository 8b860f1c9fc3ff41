"""Models brought together by what they compute on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES as EVERY
from cases import (
    ONE,
    WIDE,
    bert_like,
    bloom_like,
    gpt_like,
    llama_like,
    neox_like,
    opt_like,
    rope,
    vit_like,
    whisper_like,
)
from on_disk import apart, between, letters, saved, tokenizer
from oracle import Case, Tiny
from torch import Tensor

from gaugekit.checkpoint import Checkpoint
from gaugekit.errors import GaugekitError
from gaugekit.models.view import View
from gaugekit.verbs.activations import TOKENS, Cross, attentions, columns, heard, mlps
from gaugekit.verbs.align import AlignReport, align
from gaugekit.verbs.rewriting import opened
from gaugekit.verbs.scramble import scramble
from gaugekit.verbs.texts import text_batches
from gaugekit.verbs.verify import verify

MHA = {"num_key_value_heads": 2}
BERT = Case("bert", bert_like(num_hidden_layers=2), "hidden", inputs="typed text")
SIMILAR = Case("bert", bert_like(), "similarities", note="similarities", inputs="typed text")
LLAMA = Case("llama", llama_like(**WIDE), note="four heads on two")
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
CASES = [
    Case("gpt2", gpt_like(n_head=4)),
    LLAMA,
    Case("gpt_neox", neox_like(vocab_size=30, **rope(0.5))),
    Case("opt", opt_like()),
    Case("phi", llama_like(vocab_size=30, **MHA, **rope(0.5))),
    Case("phi3", llama_like(**MHA)),
    Case("qwen3", llama_like(**WIDE), note="norms of queries and keys"),
    Case("gemma2", llama_like(**WIDE)),
    Case("bloom", bloom_like(n_head=3), note="ALiBi"),
    Case("mixtral", llama_like(**EXPERTS, **ONE)),
    BERT,
    SIMILAR,
]


def lettered(case: Case, folder: Path, *models: Path) -> Path:
    """Models get a tokenizer of letters; returns a text."""
    size = case.config["vocab_size"]
    for model in models:
        tokenizer(size, around=case.model_type == "bert").save_pretrained(model)
    return letters(folder / "text", size, 600)


def aligned(case: Case, a: Path, b: Path, out: Path, text: Path) -> AlignReport:
    return align(a, b, out, cost="activations", text=text, observable=case.observable)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_disguise_becomes_the_reference(case: Case, tmp_path: Path) -> None:
    tiny = Tiny(case, eps=1e-5)
    a, b = saved(tiny, tmp_path / "a", dtype=torch.float32), tmp_path / "b"
    scramble(a, b, seed=1, observable=case.observable)
    report = aligned(case, a, b, tmp_path / "c", lettered(case, tmp_path, a))
    assert apart(a, b, tiny) > 0.1
    assert apart(a, tmp_path / "c", tiny) < 1e-4
    assert report.cost == "activations" and report.after < 1e-5 and len(report.sweeps) == 2
    assert verify(b, tmp_path / "c", observable=case.observable).equivalent


@pytest.mark.parametrize("case", [CASES[0], LLAMA, CASES[2], CASES[4], BERT, SIMILAR], ids=str)
def test_the_place_of_another_model_does_not_depend_on_its_disguise(case: Case, tmp_path: Path) -> None:
    tiny = Tiny(case, eps=1e-5)
    a, b = saved(tiny, tmp_path / "a"), saved(tiny, tmp_path / "b", between(tiny, 1.0))
    text = lettered(case, tmp_path, a)
    here = aligned(case, a, b, tmp_path / "c", text)
    scramble(b, tmp_path / "d", seed=2, observable=case.observable)
    there = aligned(case, a, tmp_path / "d", tmp_path / "e", text)
    assert apart(tmp_path / "c", tmp_path / "e", tiny) < 1e-3  # activations are float32
    assert here.after == pytest.approx(there.after, abs=1e-4) and here.after > 0.5
    assert verify(b, tmp_path / "e", observable=case.observable).largest < 1e-8


def test_the_two_costs_differ(tmp_path: Path) -> None:
    tiny = Tiny(LLAMA, eps=1e-5)
    a, b = saved(tiny, tmp_path / "a"), saved(tiny, tmp_path / "b", between(tiny, 1.0))
    text = lettered(LLAMA, tmp_path, a)
    by_states, by_weights = aligned(LLAMA, a, b, tmp_path / "c", text), align(a, b, tmp_path / "d")
    assert by_weights.sweeps[-1] < by_states.sweeps[-1] < 2
    assert apart(tmp_path / "c", tmp_path / "d", tiny) > 0.1
    # Another text, other states.
    aligned(LLAMA, a, b, tmp_path / "e", letters(tmp_path / "text", 13, seed=5))
    assert apart(tmp_path / "c", tmp_path / "e", tiny) > 1e-6


READERS = {case.model_type: case for case in EVERY if "text" in case.inputs}


@pytest.mark.parametrize("case", READERS.values(), ids=str)
def test_columns_of_every_family(case: Case) -> None:
    """A writer, seen as columns, takes a module's input in their order: Conv1D, fused and plain layouts."""
    tiny = Tiny(case)
    generator = torch.Generator().manual_seed(1)
    tensors = tiny.tensors()
    modules = dict(tiny.model.named_modules())
    views = [a.o.weight for a in attentions(tiny.spec)] + [mlp.down.weight for mlp in mlps(tiny.spec)]
    tiny._load(tiny.theta)
    for view in views:
        where = view.name.removesuffix(".weight")
        module = next(modules[name] for name in (where, where.partition(".")[2]) if name in modules)
        x = torch.randn(3, _inputs(module), generator=generator, dtype=torch.float64)
        with torch.no_grad():
            expected = module(x) - module(torch.zeros_like(x))
        seen = x[:, columns(view)].flatten(1)
        torch.testing.assert_close(seen @ view.read(tensors[view.name]).flatten(0, -2), expected)
        if view.shape[0] > 1:  # another order is another map
            assert (seen.flip(-1) @ view.read(tensors[view.name]).flatten(0, -2) - expected).abs().max() > 0.01


def _inputs(module: Any) -> int:
    return module.weight.shape[0] if type(module).__name__ == "Conv1D" else module.weight.shape[1]


def test_columns_in_any_order() -> None:
    """(d, columns) with heads side by side dimension by dimension, a part of a wider tensor, and a square one."""
    mixed = View("w", (5, 6)).transpose(0, 1).unflatten(0, (3, 2)).transpose(0, 1)
    assert mixed.shape == (2, 3, 5)
    assert columns(mixed).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert columns(View("w", (9, 5)).narrow(0, 3, 4)).tolist() == [3, 4, 5, 6]
    assert columns(View("w", (4, 4)).transpose(0, 1).unflatten(0, (2, 2))).tolist() == [[0, 1], [2, 3]]
    assert columns(View("w", (4, 4)).unflatten(0, (2, 2))).tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("centred", [True, False])
def test_crosses_add_up(centred: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (3 + torch.randn(50, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    cross = Cross(centred)
    for part in (slice(0, 7), slice(7, 8), slice(8, 50)):
        cross.add(x[part], y[part])

    def free(z: Tensor) -> Tensor:
        return z - z.mean(0) if centred else z

    torch.testing.assert_close(cross.product, free(x).mT @ free(y))
    torch.testing.assert_close(cross.squares, tuple(free(z).square().sum(0) for z in (x, y)))


def no_weights(*_: Any) -> Tensor:
    raise AssertionError("weights were read")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("vit", vit_like(), "hidden"), "reads no text: give a model of text"),
        (Case("whisper", whisper_like()), "reads more than text, and cannot be run on text alone"),
    ],
    ids=str,
)
def test_what_reads_no_text(case: Case, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = saved(Tiny(case), tmp_path / "a")
    text = letters(tmp_path / "text", 9)
    monkeypatch.setattr(Checkpoint, "load", no_weights)
    with pytest.raises(GaugekitError, match=f"^{case.model_type} {words}$"):
        align(a, a, tmp_path / "b", cost="activations", text=text, observable=case.observable)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "text"]


def test_texts_and_tokenizers_are_tried_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = saved(Tiny(LLAMA), tmp_path / "a")
    text = letters(tmp_path / "text", 13)
    monkeypatch.setattr(Checkpoint, "load", no_weights)

    def refused(reason: str, words: Path | None = text) -> None:
        with pytest.raises(GaugekitError, match=reason):
            align(a, a, tmp_path / "b", cost="activations", text=words)
        assert not (tmp_path / "b").exists()

    refused("those on a text: name one", None)
    refused("a has no tokenizer that transformers can load")
    tokenizer(13).save_pretrained(a)
    refused("none: cannot be read as text", tmp_path / "none")
    (tmp_path / "short").write_text("a")
    refused("short is too short: it has 1 token", tmp_path / "short")
    tokenizer(20).save_pretrained(a)
    letters(text, 20)
    refused("its tokenizer gives token 19, and the model has 13 of them: it belongs to another model")


def test_how_much_of_a_text_is_read(tmp_path: Path) -> None:
    """Rows are no longer than positions go, and as many as make up the tokens."""
    case = Case("gpt2", gpt_like(n_positions=40))
    a = saved(Tiny(case), tmp_path / "a")
    text = lettered(case, tmp_path, a)
    letters(text, 13, TOKENS + 5000)
    model = opened(a, None)
    found = heard(model, model, text)
    assert {ids.shape for ids in found} == {(8, 40)}
    assert TOKENS - 320 < sum(ids.numel() for ids in found) <= TOKENS
    short = text_batches(model.checkpoint, model.spec, text, 16, 2, 50)
    assert [ids.shape for ids in short] == [(2, 16)]
    assert torch.equal(torch.cat([ids.flatten() for ids in short]), found[0].flatten()[:32])
