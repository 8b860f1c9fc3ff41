"""What went wrong for others when they changed a model that should have kept its function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import llama_like, neox_like
from on_disk import Save
from oracle import Case, Tiny
from safetensors.torch import load_file

from gaugekit.errors import GaugekitError
from gaugekit.verbs.canonicalize import canonicalize
from gaugekit.verbs.inspect import inspect
from gaugekit.verbs.scramble import scramble
from gaugekit.verbs.verify import verify


def test_the_embedding_of_an_rmsnorm_model_keeps_its_mean(save: Save, tmp_path: Path) -> None:
    """QuaRot#7, TransformerCompression#129, SpinQuant#14, LightCompress#92: the mean was subtracted all the same."""
    tiny = Tiny(Case("llama", llama_like()), eps=1e-5)
    a = save(tiny, "a")
    canonicalize(a, tmp_path / "b", gauge="folded")
    before, after = (
        load_file(folder / "model.safetensors")["model.embed_tokens.weight"] for folder in (a, tmp_path / "b")
    )
    assert torch.equal(before, after)
    blocked = {row.symmetry: row.reason for row in inspect(a, spectra=False).blocked}
    assert blocked["writer mean"] == "the stream is not read by LayerNorms only"
    centred = tiny.tensors()["model.embed_tokens.weight"]
    theta = tiny.flat({"model.embed_tokens.weight": centred - centred.mean(-1, keepdim=True)}, tiny.theta)
    assert not verify(a, save(tiny, "c", theta)).equivalent


def test_a_softcap_makes_logits_observable(save: Save) -> None:
    """TransformerLens#693, PR#650: the unembedding of Gemma 2 was centred under a softcap."""
    config = llama_like(head_dim=4, num_hidden_layers=1)
    tiny = Tiny(Case("gemma2", config), eps=1e-5)
    a = save(tiny, "a")
    report = inspect(a, spectra=False)
    assert "head constant" not in {row.name for row in report.by_symmetry}
    assert ("head constant", "logits pass through a softcap") in {(b.symmetry, b.reason) for b in report.blocked}
    shifted = tiny.tensors()["lm_head.weight"] + 0.5
    assert not verify(a, save(tiny, "b", tiny.flat({"lm_head.weight": shifted}, tiny.theta))).equivalent


def test_logits_may_move_where_log_probabilities_do_not(save: Save, tmp_path: Path) -> None:
    """TransformerLens#223: logits differed by a constant, and nobody had said which of the two should not."""
    a = save(Tiny(Case("gpt_neox", neox_like(vocab_size=30)), eps=1e-5), "a")
    scramble(a, tmp_path / "b", seed=1, only=["shifts"])
    assert verify(a, tmp_path / "b", observable="logprobs").equivalent
    assert not verify(a, tmp_path / "b", observable="logits").equivalent
    scramble(a, tmp_path / "c", seed=1, only=["shifts"], observable="logits")
    assert verify(a, tmp_path / "c", observable="logits").equivalent


def test_post_norms_block_the_frame_by_name(save: Save, tmp_path: Path) -> None:
    """SpinQuant#22: the stream of Gemma 2 was turned although norms stand on the branches' outputs."""
    a = save(Tiny(Case("gemma2", llama_like(head_dim=4)), eps=1e-5), "a")
    with pytest.raises(GaugekitError, match="norms on the branches' outputs act on coordinates"):
        scramble(a, tmp_path / "b", seed=1, only=["frame"])
    assert not (tmp_path / "b").exists()


def test_a_tied_head_is_turned_once_or_not_at_all(save: Save, tmp_path: Path) -> None:
    """SpinQuant#13: a tied head was rotated twice. The tie blocks the frame; order and signs move the table once."""
    tiny = Tiny(Case("llama", llama_like(tie_word_embeddings=True)), eps=1e-5)
    a = save(tiny, "a")
    with pytest.raises(GaugekitError, match="the unembedding is tied to the token table"):
        scramble(a, tmp_path / "b", seed=1, only=["frame"])
    scramble(a, tmp_path / "c", seed=1, only=["order"])
    assert verify(a, tmp_path / "c").equivalent
    assert "lm_head.weight" not in load_file(tmp_path / "c" / "model.safetensors")


def test_half_precision_is_changed_in_double(save: Save, tmp_path: Path) -> None:
    """TransformerLens#104, #496, QuaRot#8: algebra in half precision drifted, or collapsed after a rotation. Here each
    weight is rounded once, so the result is as near as its dtype allows."""
    tiny = Tiny(Case("llama", llama_like()), eps=1e-5)
    a = save(tiny, "a", dtype=torch.bfloat16)
    stored = tiny.flat({n: t.double() for n, t in load_file(a / "model.safetensors").items()}, tiny.theta)
    wide = save(tiny, "wide", stored)
    scramble(a, tmp_path / "half", seed=1)
    scramble(wide, tmp_path / "double", seed=1)
    half, double = (load_file(tmp_path / name / "model.safetensors") for name in ("half", "double"))
    for name, value in half.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, double[name].to(torch.bfloat16)), name


def test_the_count_is_what_is_written(save: Save, tmp_path: Path) -> None:
    """TransformerCompression#165: parameter counts did not match the label."""
    a = save(Tiny(Case("llama", llama_like()), eps=1e-5), "a")
    canonicalize(a, tmp_path / "b")
    stored = sum(t.numel() for t in load_file(tmp_path / "b" / "model.safetensors").values())
    assert inspect(tmp_path / "b", spectra=False).parameters == stored
