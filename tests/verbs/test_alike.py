"""Whether two checkpoints are one architecture: by configs, headers and vocabularies, never by weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import WIDE, bert_like, gpt_like, llama_like, neox_like, rope
from on_disk import saved, tokenizer
from oracle import Case, Tiny

from gaugekit.checkpoint import Checkpoint
from gaugekit.errors import GaugekitError
from gaugekit.models.spec import Attention, Spec, Table
from gaugekit.verbs.alike import added, different, different_specs, matched, require_alike, shared, vocabulary
from gaugekit.verbs.rewriting import opened

QWEN3 = Case("qwen3", llama_like(**WIDE))
NEOX = Case("gpt_neox", neox_like(vocab_size=30, **rope(0.5)))
BERT = Case("bert", bert_like(), "hidden")


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> torch.Tensor:
        raise AssertionError("weights were read")

    monkeypatch.setattr("gaugekit.verbs.rewriting.load_finite", load)


def same(spec: Spec) -> dict[str, str]:
    return {name: name for name in spec.tensors}


def with_attention(spec: Spec, change: Callable[[Attention], Attention]) -> Spec:
    """With another attention in its last layer."""
    stream = spec.main
    *before, block = stream.blocks
    branches = tuple(replace(b, body=change(b.body)) if isinstance(b.body, Attention) else b for b in block.branches)
    return replace(spec, streams=(replace(stream, blocks=(*before, replace(block, branches=branches))),))


def turned_faster(a: Attention) -> Attention:
    assert a.rotary is not None
    return replace(a, rotary=replace(a.rotary, frequencies=tuple(2 * f for f in a.rotary.frequencies)))


def shifted_norm(a: Attention) -> Attention:
    assert a.qk_norm is not None
    return replace(a, qk_norm=replace(a.qk_norm, q=a.qk_norm.q.plus(1.0)))


def rougher_norm(a: Attention) -> Attention:
    assert a.qk_norm is not None
    return replace(a, qk_norm=replace(a.qk_norm, eps=0.5))


def over_all(a: Attention) -> Attention:
    assert a.qk_norm is not None
    return replace(a, qk_norm=replace(a.qk_norm, over="projection"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (turned_faster, "different frequencies: "),
        (lambda a: replace(a, rotary=None), "different rotary: Rotary and None"),
        (lambda a: replace(a, softcap=True), "different softcap: False and True"),
        (lambda a: replace(a, distances=True), "different distances: False and True"),
        (lambda a: replace(a, qk_norm=None), "different qk_norm: QKNorm and None"),
        (lambda a: replace(a, v=a.k), "different layouts of .*v_proj.weight and .*k_proj.weight"),
        (lambda a: replace(a, k=replace(a.k, weight=a.k.weight.permute(0, 1, 2))), "different layouts of "),
        (shifted_norm, "different layouts of .*q_norm.weight and .*q_norm.weight"),
        (over_all, "different over: 'head' and 'projection'"),
    ],
)
def test_any_difference_in_attention(change: Callable[[Attention], Attention], reason: str) -> None:
    spec = Tiny(QWEN3).spec
    other = with_attention(spec, change)
    assert re.match(reason, different_specs(spec, other, same(spec)) or "alike")
    assert different_specs(spec, spec, same(spec)) is None
    assert different_specs(other, other, same(spec)) is None


def test_any_difference_elsewhere() -> None:
    spec = Tiny(NEOX).spec
    stream, block = spec.main, spec.main.blocks[0]
    norm, table = stream.final_norm, stream.tables[0]
    assert norm is not None and block.parallel and stream.head is not None
    for other, reason in (
        (replace(stream, final_norm=replace(norm, kind="rms")), "different kind: 'layer' and 'rms'"),
        (replace(stream, final_norm=replace(norm, bias=None)), "different bias: View and None"),
        (replace(stream, blocks=stream.blocks[:1]), "different numbers of blocks: 2 and 1"),
        (
            replace(stream, blocks=(replace(block, parallel=False), stream.blocks[1])),
            "different parallel: True and False",
        ),
        (replace(stream, tables=(Table("tokens", table.rows, (0,)),)), "different numbers of dead_rows: 0 and 1"),
        (replace(stream, head=replace(stream.head, tied=True)), "different tied: False and True"),
        (replace(stream, head=replace(stream.head, softcap=True)), "different softcap: False and True"),
        (replace(stream, embed_norm=norm), "different embed_norm: None and Norm"),
    ):
        assert different((stream,), (other,), same(spec), "streams") == reason
    shapes = spec.tensors | {"gpt_neox.embed_in.weight": (30, 9)}
    assert different_specs(spec, replace(spec, tensors=shapes), same(spec)) == (
        "different shapes of gpt_neox.embed_in.weight: [30, 8] and [30, 9]"
    )


def test_eps_of_norms_may_differ() -> None:
    spec = Tiny(QWEN3).spec
    assert spec.main.final_norm is not None
    other = with_attention(spec, rougher_norm)
    other = replace(other, streams=(replace(other.main, final_norm=replace(spec.main.final_norm, eps=0.5)),))
    assert other != spec
    assert different_specs(spec, other, same(spec)) is None


def bert(kind: str, folder: Path, **extra: Any) -> Path:
    config = transformers.BertConfig(**(bert_like() | extra))
    getattr(transformers, kind)(config).save_pretrained(folder)
    return folder


def alike(first: Path, second: Path) -> dict[str, str]:
    return require_alike(opened(first, "hidden"), opened(second, "hidden"))


@pytest.mark.parametrize("kind", ["BertModel", "BertForSequenceClassification"])
def test_names_before_and_after_the_base_models_own(kind: str, tmp_path: Path) -> None:
    a, b = bert("BertForSequenceClassification", tmp_path / "a"), bert(kind, tmp_path / "b")
    names = alike(a, b)
    prefix = "" if kind == "BertModel" else "bert."
    query = "encoder.layer.0.attention.self.query.weight"
    assert names[f"bert.{query}"] == prefix + query
    assert names["bert.pooler.dense.weight"] == f"{prefix}pooler.dense.weight"
    assert ("classifier.weight" in names) == (kind != "BertModel")
    assert {second: first for first, second in names.items()} == alike(b, a)


@pytest.mark.parametrize(
    ("kind", "extra", "kept"),
    [
        ("BertForSequenceClassification", {}, True),
        ("BertForSequenceClassification", {"num_labels": 5}, False),
        ("BertForQuestionAnswering", {}, False),  # qa_outputs.weight has the classifier's shape
        ("BertForMaskedLM", {}, False),
    ],
)
def test_heads_for_other_tasks_are_left_out(kind: str, extra: dict[str, Any], kept: bool, tmp_path: Path) -> None:
    a, b = bert("BertForSequenceClassification", tmp_path / "a"), bert(kind, tmp_path / "b", **extra)
    names = alike(a, b)
    assert names.get("classifier.weight") == ("classifier.weight" if kept else None)
    assert ("bert.pooler.dense.weight" in names) == (kind == "BertForSequenceClassification")
    spec = opened(a, "hidden").spec
    rest = shared(spec, names)
    assert set(rest.tensors) == set(names) and rest.streams == spec.streams
    assert {each.view.name for each in spec.dead} - {each.view.name for each in rest.dead} == set(spec.tensors) - set(
        names
    )


def test_order_and_names_of_the_model_proper(tmp_path: Path) -> None:
    tiny = Tiny(Case("gpt2", gpt_like()))
    spec = tiny.spec
    bare = {name.removeprefix("transformer."): shape for name, shape in spec.tensors.items()}
    names = matched(spec, replace(spec, tensors=bare))
    assert names == {name: name.removeprefix("transformer.") for name in spec.tensors}
    fewer = dict(list(bare.items())[:-1])
    assert different_specs(spec, replace(spec, tensors=fewer), names) == (
        f"different tensors: the model proper has {len(bare)} and {len(fewer)}"
    )


def word_level(words: dict[str, Any]) -> str:
    return json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": words}})


WORDS = {"a": 0, "b": 1, "\u2028": 2, "\x85c": 3}
FILES = {
    "tokenizer.json": word_level(WORDS),
    "vocab.json": json.dumps(WORDS),
    "vocab.txt": "a\nb\n\u2028\n\x85c\n",
    "unigram": json.dumps({"model": {"type": "Unigram", "vocab": [[word, -1.5] for word in WORDS]}}),
}


def written(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / ("tokenizer.json" if name == "unigram" else name)).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_vocabulary_is_read(name: str, tmp_path: Path) -> None:
    assert vocabulary(written(tmp_path, name, FILES[name])) == WORDS


def test_which_file_is_read(tmp_path: Path) -> None:
    assert vocabulary(tmp_path) == {}
    # Each goes before those that are there already.
    for name, text in {"vocab.txt": "x\n", "vocab.json": '{"y": 0}', "tokenizer.json": word_level({"z": 0})}.items():
        found = vocabulary(written(tmp_path, name, text))
        assert len(found) == 1 and next(iter(found)) in text
    assert vocabulary(tmp_path / "vocab.txt") == {}  # a GGUF file has its own


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "7",
        json.dumps({"model": None}),
        json.dumps({"model": {}}),
        json.dumps({"model": {"vocab": 3}}),
        json.dumps({"model": {"vocab": [1, 2]}}),
        word_level({"a": None}),
        word_level({"a": "first"}),
    ],
)
def test_a_vocabulary_that_is_none(text: str, tmp_path: Path) -> None:
    with pytest.raises(GaugekitError, match=r"tokenizer.json: is no vocabulary that can be read \(.*\)$"):
        vocabulary(written(tmp_path, "tokenizer.json", text))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"a": 0, "b": 1}, None),
        ({"b": 1, "a": 0}, None),
        ({"a": 0, "c": 1}, "token 'b' is 1 and unknown"),
        ({"a": 1, "b": 0}, "token 'a' is 0 and 1"),
        ({"a": 0, "b": 1, "c": 2}, "token 'c' is unknown and 2"),
        ({"a": 0}, "token 'b' is 1 and unknown"),
        (None, None),
    ],
)
def test_tokens(words: dict[str, int] | None, reason: str | None, tmp_path: Path) -> None:
    """mergekit#489: another vocabulary is refused before any work, also where it has as many tokens."""
    tiny = Tiny(Case("llama", llama_like()))
    a, b = saved(tiny, tmp_path / "a"), saved(tiny, tmp_path / "b")
    written(a, "tokenizer.json", word_level({"a": 0, "b": 1}))
    if words is not None:
        written(b, "vocab.json", json.dumps(words))
    if reason is None:
        assert require_alike(opened(a, None), opened(b, None)) == same(tiny.spec)
        return
    with pytest.raises(GaugekitError) as raised:
        require_alike(opened(a, None), opened(b, None))
    assert str(raised.value) == f"{a} and {b} cannot be aligned: different vocabularies: {reason}"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"<x>": 2, "<y>": 3}, None),
        ({"<x>": 2}, None),
        ({"<z>": 4}, None),
        ({}, None),
        ({"<y>": 2, "<z>": 3}, "token 2 is '<x>' and '<y>'"),
        ({"<x>": 3}, "token '<x>' is 2 and 3"),
        ({"<x>": 2, "<z>": 3}, "token 3 is '<y>' and '<z>'"),
    ],
)
@pytest.mark.parametrize("name", ["tokenizer.json", "added_tokens.json"])
def test_tokens_that_were_added(words: dict[str, int], reason: str | None, name: str, tmp_path: Path) -> None:
    """mergekit#489, of fine-tunes that gave spare rows of one vocabulary to tokens of their own."""

    def entries(tokens: dict[str, int]) -> str:
        listed = [{"id": number, "content": token} for token, number in tokens.items()]
        return json.dumps(json.loads(word_level({"a": 0, "b": 1})) | {"added_tokens": listed})

    tiny = Tiny(Case("llama", llama_like()))
    a, b = saved(tiny, tmp_path / "a"), saved(tiny, tmp_path / "b")
    written(a, "tokenizer.json", entries({"<x>": 2, "<y>": 3}))
    written(b, name, entries(words) if name == "tokenizer.json" else json.dumps(words))
    if reason is None:
        assert require_alike(opened(a, None), opened(b, None)) == same(tiny.spec)
        return
    with pytest.raises(GaugekitError) as raised:
        require_alike(opened(a, None), opened(b, None))
    assert str(raised.value) == f"{a} and {b} cannot be aligned: different vocabularies: {reason}"


@pytest.mark.parametrize("text", ["[]", '{"added_tokens": [3]}', '{"added_tokens": [{"id": "x", "content": "y"}]}'])
def test_added_tokens_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    with pytest.raises(GaugekitError, match=r"tokenizer.json: lists no tokens that can be read \(.*\)$"):
        added(written(tmp_path, "tokenizer.json", text))


def test_a_real_tokenizers_vocabulary(tmp_path: Path) -> None:
    tokenizer(5).save_pretrained(tmp_path)
    assert vocabulary(tmp_path) == {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}


def test_weights_would_have_been_noticed(tmp_path: Path) -> None:
    """Of the fixture above."""
    model = opened(saved(Tiny(Case("llama", llama_like())), tmp_path / "a"), None)
    with pytest.raises(AssertionError, match="weights were read"):
        model.load("lm_head.weight")
    assert isinstance(model.checkpoint, Checkpoint)
