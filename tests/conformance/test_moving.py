"""scramble, canonicalize, verify and compare on checkpoints of every family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cases import CASES, first_of_each, gpt_like, llama_like, neox_like
from on_disk import Save
from oracle import Case, Tiny
from safetensors.torch import load_file

from gaugekit.errors import CheckpointError, GaugekitError
from gaugekit.verbs.canonicalize import canonicalize
from gaugekit.verbs.compare import compare
from gaugekit.verbs.fingerprint import fingerprint, read_fingerprint
from gaugekit.verbs.scramble import PARTS, scramble
from gaugekit.verbs.verify import verify

EACH = first_of_each(CASES)


def apart(a: Path, b: Path, tiny: Tiny) -> float:
    """Largest difference of any living tensor."""
    first, second = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    dead = {item.view.name for item in tiny.symmetries.dead}
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first if name not in dead)


@pytest.mark.parametrize("case", EACH, ids=str)
def test_a_disguise_is_seen_through(case: Case, save: Save, tmp_path: Path) -> None:
    tiny = Tiny(case, eps=1e-5)
    a = save(tiny, "a")
    scramble(a, tmp_path / "b", seed=1, observable=case.observable)
    assert apart(a, tmp_path / "b", tiny) > 0.1
    outcome = verify(a, tmp_path / "b", observable=case.observable)
    assert outcome.equivalent
    assert outcome.largest < 1e-9
    assert outcome.layer is None
    for name in "ab":
        canonicalize(tmp_path / name, tmp_path / f"c{name}", observable=case.observable)
    assert apart(tmp_path / "ca", tmp_path / "cb", tiny) < 1e-8
    assert verify(a, tmp_path / "ca", observable=case.observable).largest < 1e-9
    canonicalize(tmp_path / "ca", tmp_path / "cca", observable=case.observable)
    assert apart(tmp_path / "ca", tmp_path / "cca", tiny) < 1e-9
    assert compare(a, tmp_path / "b", observable=case.observable).verdict == "same"


@pytest.mark.parametrize("case", EACH, ids=str)
def test_relatives_and_strangers(case: Case, save: Save, tmp_path: Path) -> None:
    tiny, other = Tiny(case, eps=1e-5), Tiny(case, seed=5, eps=1e-5)
    a, d = save(tiny, "a"), save(other, "d")
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(tiny.size, generator=generator, dtype=torch.float64)
    distances = []
    for size in (0.01, 0.03):
        b = save(tiny, f"noise {size}", tiny.theta * (1 + size * noise))
        scramble(b, tmp_path / f"scrambled {size}", seed=2, observable=case.observable)
        report = compare(a, tmp_path / f"scrambled {size}", observable=case.observable)
        assert report.verdict == "related", report.reason
        assert report.distance is not None
        distances.append(report.distance)
    assert 0.005 < distances[0] < distances[1] < 0.2
    assert compare(a, d, observable=case.observable).verdict == "unrelated"
    assert compare(a, d, observable=case.observable, fast=True).verdict == "unrelated"


@pytest.mark.parametrize("part", PARTS)
def test_one_part_at_a_time(part: str, save: Save, tmp_path: Path) -> None:
    """What a part does not touch stays byte for byte."""
    tiny = Tiny(Case("gpt_neox", neox_like(vocab_size=30)), eps=1e-5)
    a = save(tiny, "a")
    if part == "units":
        with pytest.raises(GaugekitError, match="nothing to move: activation scale: gelu is not homogeneous"):
            scramble(a, tmp_path / "b", seed=1, only=["units"])
        assert not (tmp_path / "b").exists()
        return
    report = scramble(a, tmp_path / "b", seed=1, only=[part])  # type: ignore[list-item]
    assert verify(a, tmp_path / "b").equivalent
    acting = {s.name for s in (*tiny.symmetries.continuous, *tiny.symmetries.discrete) if s.part == part}
    assert set(report.moved) == acting
    first, second = (load_file(folder / "model.safetensors") for folder in (a, tmp_path / "b"))
    changed = {name for name in first if not torch.equal(first[name], second[name])}
    assert len(changed) <= report.tensors < len(first) or part in ("shifts", "frame", "norms", "order")
    assert changed


def test_seeds_and_conditions(save: Save, tmp_path: Path) -> None:
    tiny = Tiny(Case("llama", llama_like()), eps=1e-5)
    a = save(tiny, "a")
    scramble(a, tmp_path / "one", seed=1)
    scramble(a, tmp_path / "again", seed=1)
    scramble(a, tmp_path / "two", seed=2)
    scramble(a, tmp_path / "wild", seed=1, condition=1e4)
    assert apart(tmp_path / "one", tmp_path / "again", tiny) == 0.0
    assert apart(tmp_path / "one", tmp_path / "two", tiny) > 0.1
    assert verify(a, tmp_path / "wild").largest < 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_disguises_at_condition_100(dtype: torch.dtype, save: Save, tmp_path: Path) -> None:
    """TransformerLens#104, #496, QuaRot#8: half precision drifts. Here the verdict takes rounding into account."""
    tiny = Tiny(Case("llama", llama_like()), eps=1e-5)
    a = save(tiny, "a", dtype=dtype)
    scramble(a, tmp_path / "b", seed=4, condition=100.0)
    assert load_file(tmp_path / "b" / "model.safetensors")["lm_head.weight"].dtype == dtype
    outcome = verify(a, tmp_path / "b")
    assert outcome.rounding / 3 < outcome.largest < 3 * outcome.rounding
    report = compare(a, tmp_path / "b")
    assert report.verdict == "same"
    assert report.rounding is not None
    assert report.distance is not None
    assert report.rounding / 3 < report.distance < 3 * report.rounding


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (llama_like(), llama_like(num_hidden_layers=1), "numbers of layers"),
        (llama_like(), llama_like(vocab_size=17), "vocabularies"),
        (llama_like(), llama_like(tie_word_embeddings=True), "ties"),
        (llama_like(), llama_like(num_key_value_heads=2), "heads"),
        (
            llama_like(),
            llama_like(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            "rotary positions",
        ),
    ],
)
def test_what_cannot_be_compared(first: dict, second: dict, reason: str, save: Save) -> None:
    """mergekit#325: two models with different rope bases merged."""
    a, b = (save(Tiny(Case("llama", config)), str(i)) for i, config in enumerate((first, second)))
    report = compare(a, b)
    assert report.verdict == "incomparable"
    assert f"different {reason}" in report.reason


def test_the_first_layer_that_differs_is_named(save: Save) -> None:
    tiny = Tiny(Case("gpt2", gpt_like(n_layer=3)), eps=1e-5)
    a = save(tiny, "a")
    theta = tiny.theta.clone()
    theta[tiny.index["transformer.h.1.mlp.c_fc.weight"].reshape(-1)] *= 1.01
    outcome = verify(a, save(tiny, "b", theta))
    assert not outcome.equivalent
    assert outcome.layer == 2  # states after the second block; 0 is the embedding
    assert outcome.layers[0] < 1e-12
    assert outcome.layers[1] < 1e-12


def test_a_zero_norm_weight_is_skipped_by_name(save: Save, tmp_path: Path) -> None:
    """γ⁻¹ does not exist: that symmetry is skipped and named, and the function is kept."""
    tiny = Tiny(Case("gpt_neox", neox_like(vocab_size=30)), eps=1e-5)
    theta = tiny.theta.clone()
    name = "gpt_neox.layers.0.input_layernorm.weight"
    theta[tiny.index[name][3]] = 0.0
    a = save(tiny, "a", theta)
    scrambled = scramble(a, tmp_path / "b", seed=1)
    canonical = canonicalize(a, tmp_path / "c")
    for report, out in ((scrambled, "b"), (canonical, "c")):
        assert {s.symmetry for s in report.skipped} >= {"residual frame", "reader kernel"}
        assert all(f"{name} has a zero entry" in s.reason for s in report.skipped)
        assert verify(a, tmp_path / out).equivalent


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_pruned_head_of_zeros(model_type: str, save: Save, tmp_path: Path) -> None:
    config = llama_like(num_key_value_heads=2) if model_type == "llama" else gpt_like()
    tiny = Tiny(Case(model_type, config), eps=1e-5)
    theta = tiny.theta.clone()
    attention = next(a for _, _, a, _ in tiny.spec.attentions())
    for view in (attention.v.weight, attention.q.weight):
        theta[view.window(tiny.index[view.name])[0].reshape(-1)] = 0.0
    a = save(tiny, "a", theta)
    scramble(a, tmp_path / "b", seed=1)
    assert verify(a, tmp_path / "b").equivalent
    for name in "ab":
        canonicalize(tmp_path / name, tmp_path / f"c{name}")
        assert verify(a, tmp_path / f"c{name}").equivalent
    assert apart(tmp_path / "ca", tmp_path / "cb", tiny) < 1e-8


def test_folding_leaves_norms_without_weights(save: Save, tmp_path: Path) -> None:
    """After it a LayerNorm is an RMSNorm: weights 1, biases 0, and nothing written has a mean."""
    tiny = Tiny(Case("gpt_neox", neox_like(vocab_size=30, use_parallel_residual=False)), eps=1e-5)
    a = save(tiny, "a")
    canonicalize(a, tmp_path / "b", gauge="folded")
    assert verify(a, tmp_path / "b").largest < 1e-9
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    for name, value in tensors.items():
        if "norm" in name and "final" not in name:
            assert torch.allclose(value, torch.full_like(value, float(name.endswith("weight"))))
    for name in ("gpt_neox.embed_in.weight", "gpt_neox.layers.1.mlp.dense_4h_to_h.bias"):
        assert tensors[name].mean(-1).abs().max() < 1e-12
    assert tensors["gpt_neox.layers.1.mlp.dense_4h_to_h.weight"].mean(0).abs().max() < 1e-12


@pytest.mark.parametrize("case", EACH, ids=str)
def test_pivoted_heads_store_an_identity(case: Case, save: Save, tmp_path: Path) -> None:
    tiny = Tiny(case, eps=1e-5)
    a = save(tiny, "a")
    scramble(a, tmp_path / "b", seed=1, observable=case.observable)
    for name in "ab":
        report = canonicalize(tmp_path / name, tmp_path / f"c{name}", gauge="pivoted", observable=case.observable)
        assert verify(a, tmp_path / f"c{name}", observable=case.observable).largest < 1e-8
    assert apart(tmp_path / "ca", tmp_path / "cb", tiny) < 1e-7
    tensors = load_file(tmp_path / "ca" / "model.safetensors")
    for _, _, attention, _ in tiny.spec.attentions():
        values = attention.v.weight.read(tensors[attention.v.weight.name])
        for head in values:
            ones = ((head == 1).sum(0) == 1) & ((head == 0).sum(0) == head.shape[0] - 1)
            assert int(ones.sum()) >= head.shape[0]
    assert report.need_not_be_stored >= sum(a.kv_heads * a.head_dim**2 for _, _, a, _ in tiny.spec.attentions())


@pytest.mark.parametrize("parallel", [True, False])
def test_layer_norms_become_rms_norms(parallel: bool, save: Save, tmp_path: Path) -> None:
    tiny = Tiny(Case("gpt_neox", neox_like(vocab_size=30, use_parallel_residual=parallel)), eps=1e-2)
    report = canonicalize(save(tiny, "a"), tmp_path / "b", gauge="folded")
    assert report.rms
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    before = tiny.observe(tiny.theta)

    def rms(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> torch.Tensor:
        (x,) = inputs
        return x * (x.pow(2).mean(-1, keepdim=True) + module.eps).rsqrt() * module.weight + module.bias

    norms = [module for module in tiny.model.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert report.layer_norms == len(norms) == 5
    for module in norms:
        module.register_forward_hook(rms)
    assert float((tiny.observe(tiny.theta) - before).abs().max()) > 1e-3, "on the source an RMSNorm is something else"
    assert float((tiny.observe(tiny.flat(tensors, tiny.theta)) - before).abs().max()) < 1e-9


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt2", "the table transformer.wte.weight is also the unembedding and cannot be centred"),
        ("bert", "norms after the sums read outputs of other norms"),
        ("bloom", "the norm on the embedding writes a mean"),
        ("whisper", "reaches the stream through a nonlinearity"),
    ],
)
def test_why_layer_norms_stay(model_type: str, reason: str, save: Save, tmp_path: Path) -> None:
    case = next(case for case in EACH if case.model_type == model_type)
    report = canonicalize(save(Tiny(case), "a"), tmp_path / "b", gauge="folded", observable=case.observable)
    assert not report.rms
    assert any(reason in each for each in report.not_rms), report.not_rms


def test_heads_only(save: Save, tmp_path: Path) -> None:
    tiny = Tiny(Case("llama", llama_like()), eps=1e-5)
    a = save(tiny, "a")
    scramble(a, tmp_path / "b", seed=3, only=["vo", "qk"])
    for name in "ab":
        report = canonicalize(tmp_path / name, tmp_path / f"c{name}", level="heads")
        assert report.tensors == 2 * 4
    assert apart(tmp_path / "ca", tmp_path / "cb", tiny) < 1e-8


def test_a_dry_run_writes_nothing(save: Save, tmp_path: Path) -> None:
    a = save(Tiny(Case("llama", llama_like())), "a")
    report = canonicalize(a, tmp_path / "b", dry_run=True)
    assert not report.written
    assert report.bytes > 0
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("case", EACH, ids=str)
def test_a_fingerprint_stands_for_its_model(case: Case, save: Save, tmp_path: Path) -> None:
    tiny, other = Tiny(case, eps=1e-5), Tiny(case, seed=5, eps=1e-5)
    a, d = save(tiny, "a"), save(other, "d")
    scramble(a, tmp_path / "b", seed=1, observable=case.observable, condition=100.0)
    path = tmp_path / "print.json"
    path.write_text(json.dumps(fingerprint(a, observable=case.observable).to_dict()))
    assert path.stat().st_size < 100_000
    assert read_fingerprint(path) == fingerprint(a, observable=case.observable)
    assert compare(path, tmp_path / "b", observable=case.observable).verdict == "same"
    assert compare(d, path, observable=case.observable).verdict == "unrelated"


def test_a_fingerprint_that_is_none(tmp_path: Path, save: Save) -> None:
    a = save(Tiny(Case("llama", llama_like())), "a")
    path = tmp_path / "print.json"
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="make one with `gaugekit fingerprint MODEL`"):
        compare(path, a)


def test_where_a_norm_has_no_bias_to_take_a_constant(save: Save, tmp_path: Path) -> None:
    """As GPT-NeoX is initialised: what reads a LayerNorm without a bias takes constants by γ⁻¹·β, then zero."""
    tiny = Tiny(Case("gpt_neox", neox_like(vocab_size=30, attention_bias=False)), eps=1e-5)
    theta = tiny.theta.clone()
    for name, index in tiny.index.items():
        if name.endswith(("layernorm.bias", "layer_norm.bias")):
            theta[index.reshape(-1)] = 0.0
    a = save(tiny, "a", theta)
    report = scramble(a, tmp_path / "b", seed=1)
    assert any("is zero, and what reads it has none of its own" in each.reason for each in report.skipped)
    assert apart(a, tmp_path / "b", tiny) > 0.1
    assert verify(a, tmp_path / "b").largest < 1e-9
