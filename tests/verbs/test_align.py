"""align on disk: what is found again, what is carried along, what is refused before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from cases import ONE, WIDE, bert_like, gpt_like, llama_like, neo_like, neox_like, rope, whisper_like
from on_disk import LETTERS, WEIGHTS, apart, between, edited, letters, reconfigured, saved, tokenizer
from oracle import Case, Tiny
from safetensors.torch import load_file, save_file

from gaugekit.checkpoint import Checkpoint
from gaugekit.errors import GaugekitError
from gaugekit.symmetry.orbit import pieces, shifted_by_kernel
from gaugekit.verbs.align import align
from gaugekit.verbs.reduce import reduce
from gaugekit.verbs.scramble import scramble
from gaugekit.verbs.verify import verify

MOE = {"num_experts_per_tok": 2}
WORDS = {"inputs": "typed text"}
CASES = [
    Case("llama", llama_like(**WIDE), note="four heads on two"),
    Case("llama", llama_like(tie_word_embeddings=True), note="tied"),
    Case("gpt2", gpt_like(n_head=4)),
    Case("gpt_neox", neox_like(vocab_size=30, **rope(0.5))),
    Case("bert", bert_like(num_hidden_layers=2), "hidden", **WORDS),
    Case("bert", bert_like(), "similarities", note="similarities", **WORDS),
    Case("mixtral", llama_like(num_local_experts=4, **MOE, **ONE)),
    Case("qwen3_moe", llama_like(num_experts=4, moe_intermediate_size=5, head_dim=4, **MOE, **ONE)),
    Case("whisper", whisper_like(encoder_layers=2)),
]
LLAMA, GPT2, NEOX = CASES[0], CASES[2], CASES[3]
UNTIED = Case("llama", llama_like())


def relatively_apart(a: Path, b: Path) -> float:
    """‖a − b‖ / ‖a‖ over all tensors."""
    first, second = load_file(a / WEIGHTS), load_file(b / WEIGHTS)
    apart = sum(float((x.double() - second[name].double()).square().sum()) for name, x in first.items())
    return (apart / sum(float(x.double().square().sum()) for x in first.values())) ** 0.5


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_disguise_becomes_the_reference(case: Case, tmp_path: Path) -> None:
    tiny = Tiny(case, eps=1e-5)
    a = saved(tiny, tmp_path / "a")
    scramble(a, tmp_path / "b", seed=1, observable=case.observable)
    report = align(a, tmp_path / "b", tmp_path / "c", observable=case.observable)
    assert apart(a, tmp_path / "b", tiny) > 0.1
    assert apart(a, tmp_path / "c", tiny) < 1e-9
    assert report.written and report.before > 0.5 and report.after < 1e-9
    assert report.sweeps[0] > 0.1 and report.sweeps[-1] < 1e-9
    assert verify(tmp_path / "b", tmp_path / "c", observable=case.observable).largest < 1e-9
    # Half of the weights lie in layers, every one of which has come near.
    assert {place.where for place in report.places if "layer" in place.where} >= {
        f"layer {layer}" if len(tiny.spec.streams) == 1 else f"{tiny.spec.main.name} layer {layer}"
        for layer in range(len(tiny.spec.main.blocks))
    }
    assert len(report.places) == sum(bool(names) for names in pieces(tiny.spec))
    assert max(place.after for place in report.places) < 1e-8


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_place_of_another_model_does_not_depend_on_its_disguise(case: Case, tmp_path: Path) -> None:
    tiny = Tiny(case, eps=1e-5)
    a, b = saved(tiny, tmp_path / "a"), saved(tiny, tmp_path / "b", between(tiny, 0.4))
    here = align(a, b, tmp_path / "c", observable=case.observable)
    scramble(b, tmp_path / "d", seed=2, observable=case.observable)
    there = align(a, tmp_path / "d", tmp_path / "e", observable=case.observable)
    assert apart(tmp_path / "c", tmp_path / "e", tiny) < 1e-6
    assert here.after == pytest.approx(there.after, abs=1e-9)
    assert here.sweeps[1:] == pytest.approx(there.sweeps[1:], abs=1e-9)  # before the search they differ
    # It is another model, there as here.
    assert there.after > 0.1 and apart(a, tmp_path / "e", tiny) > 0.1
    assert verify(b, tmp_path / "e", observable=case.observable).largest < 1e-9
    assert not verify(a, tmp_path / "e", observable=case.observable).equivalent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [LLAMA, GPT2, NEOX, CASES[4], CASES[6]], ids=str)
def test_rounded_storage(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    """TransformerLens#104, QuaRot#8: half precision drifts. Scrambled weights are rounded before they come here, and by
    condition 10 that grows: ten times what rounding each weight once would do."""
    tiny = Tiny(case, eps=1e-5)
    a, b = saved(tiny, tmp_path / "a", dtype=dtype), saved(tiny, tmp_path / "b", between(tiny, 0.1), dtype)
    rounding = 10 * torch.finfo(dtype).eps / 2
    scramble(a, tmp_path / "c", seed=3, observable=case.observable)
    report = align(a, tmp_path / "c", tmp_path / "d", observable=case.observable)
    assert rounding / 100 < report.after < rounding
    assert report.after == pytest.approx(
        relatively_apart(a, tmp_path / "d"), rel=0.3
    )  # but for dead weights, and dtype
    assert {x.dtype for x in load_file(tmp_path / "d" / WEIGHTS).values()} == {dtype}
    assert verify(tmp_path / "c", tmp_path / "d", observable=case.observable).equivalent
    for seed in (1, 2):
        scramble(b, tmp_path / f"b{seed}", seed=seed, observable=case.observable)
        align(a, tmp_path / f"b{seed}", tmp_path / f"moved{seed}", observable=case.observable)
    assert relatively_apart(tmp_path / "moved1", tmp_path / "moved2") < rounding


def test_only_aligned_models_have_a_mean(tmp_path: Path) -> None:
    tiny = Tiny(NEOX, eps=1e-5)
    a = saved(tiny, tmp_path / "a")
    scramble(a, tmp_path / "b", seed=1)
    align(a, tmp_path / "b", tmp_path / "c")
    losses = {}
    for name in "bc":
        first, second = load_file(a / WEIGHTS), load_file(tmp_path / name / WEIGHTS)
        mean = tiny.flat({each: (first[each] + second[each]) / 2 for each in tiny.index}, tiny.theta)
        losses[name] = float((tiny.observe(mean) - tiny.observe(tiny.theta)).abs().max())
    assert losses["b"] > 0.1
    assert losses["c"] < 1e-9


def test_permutations_alone(tmp_path: Path) -> None:
    tiny = Tiny(GPT2, eps=1e-5)
    a = saved(tiny, tmp_path / "a")
    scramble(a, tmp_path / "mixed", seed=1)
    report = align(a, tmp_path / "mixed", tmp_path / "c", allowed="permutations")
    assert report.allowed == "permutations" and report.after > 0.1
    assert verify(tmp_path / "mixed", tmp_path / "c").largest < 1e-9
    whole = align(a, tmp_path / "mixed", tmp_path / "d")
    assert whole.allowed == "all" and whole.after < 1e-9
    text = letters(tmp_path / "text", 13)
    for options in ({"cost": "activations", "text": text}, {"refine": 2, "text": text}):
        with pytest.raises(GaugekitError, match="permutations alone are found by weights, and not refined"):
            align(a, tmp_path / "mixed", tmp_path / "e", allowed="permutations", **options)


def base_names(folder: Path) -> Path:
    """As GPT2Model saves itself: without the base model's own name, its prefix."""
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return reconfigured(folder, architectures=["GPT2Model"])


@pytest.mark.parametrize("bare", ["a", "b"])
def test_names_with_and_without_the_base_models_prefix(bare: str, tmp_path: Path) -> None:
    """OUT has B's names, whatever A's are."""
    tiny = Tiny(GPT2, eps=1e-5)
    a = saved(tiny, tmp_path / "a")
    scramble(a, tmp_path / "b", seed=1)
    base_names(tmp_path / bare)
    assert align(a, tmp_path / "b", tmp_path / "c").after < 1e-9
    found, names = load_file(tmp_path / "c" / WEIGHTS), load_file(tmp_path / "b" / WEIGHTS).keys()
    assert found.keys() == names
    assert all(name.startswith("transformer.") == (bare == "a") for name in names)
    transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "c")
    assert verify(tmp_path / "b", tmp_path / "c").largest < 1e-9


def test_stored_copies_of_tied_tensors_stay_equal(tmp_path: Path) -> None:
    """mergekit#350, transformers#45127: embedding and head diverge while the config says that they are tied."""
    tiny = Tiny(CASES[1], eps=1e-5)
    a, b = saved(tiny, tmp_path / "a"), tmp_path / "b"
    scramble(saved(tiny, tmp_path / "other", between(tiny, 0.4)), b, seed=1)
    embedding = "model.embed_tokens.weight"
    edited(b, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    for first, second, out in ((a, b, "c"), (b, a, "d")):
        align(first, second, tmp_path / out)
        found = load_file(tmp_path / out / WEIGHTS)
        assert ("lm_head.weight" in found) == (second == b)
        assert torch.equal(found.get("lm_head.weight", found[embedding]), found[embedding])
        assert verify(second, tmp_path / out).largest < 1e-9
    assert not torch.equal(load_file(tmp_path / "c" / WEIGHTS)[embedding], load_file(b / WEIGHTS)[embedding])


def test_companions_are_the_moved_models_own(tmp_path: Path) -> None:
    """mergekit#469, #428: broken tokenizers. TransformerCompression#73, #185: results that cannot be loaded."""
    tiny = Tiny(UNTIED, eps=1e-5)
    a = saved(tiny, tmp_path / "a")
    tokenizer(13).save_pretrained(a)
    scramble(a, tmp_path / "b", seed=1)
    b = tmp_path / "b"
    (b / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (b / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": true}')
    (b / "tokenizer_config.json").write_text((b / "tokenizer_config.json").read_text() + " \n")
    out = tmp_path / "c"
    align(a, b, out, dtype="bfloat16", max_shard_size=500)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (b / name).read_bytes(), name
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3
    assert {x.dtype for file in files for x in load_file(file).values()} == {torch.bfloat16}
    card = (out / "README.md").read_text()
    assert "moved along its symmetry orbit to where `a`" in card and "--cost weights --allow all" in card
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs("abc").input_ids == [0, 1, 2]
    assert model.generation_config.temperature == 0.7
    source = transformers.AutoModelForCausalLM.from_pretrained(b).float()
    ids = torch.tensor([[0, 1, 2, 3]])
    assert (
        torch.log_softmax(model.float()(ids).logits, -1) - torch.log_softmax(source(ids).logits, -1)
    ).abs().max() < 0.5
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_dry_run_writes_nothing_and_finds_the_same(tmp_path: Path) -> None:
    tiny = Tiny(UNTIED, eps=1e-5)
    a, b = saved(tiny, tmp_path / "a"), saved(tiny, tmp_path / "b", between(tiny, 0.4))
    dry = align(a, b, tmp_path / "c", dry_run=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert replace(dry, written=True) == align(a, b, tmp_path / "c")
    # A card is not in the plan.
    size = sum(file.stat().st_size for file in (tmp_path / "c").iterdir() if file.name != "README.md")
    assert dry.bytes == size


def test_a_zero_norm_weight_is_left_by_name(tmp_path: Path) -> None:
    """γ⁻¹ does not exist: in either of the two that leaves the norm, and the frame, where they are."""
    tiny = Tiny(NEOX, eps=1e-5)
    name = "gpt_neox.layers.0.input_layernorm.weight"
    theta = tiny.theta.clone()
    theta[tiny.index[name][3]] = 0.0
    a, zero = saved(tiny, tmp_path / "a"), saved(tiny, tmp_path / "zero", theta)
    for number, (first, second) in enumerate(((a, zero), (zero, a), (zero, zero))):
        scramble(second, tmp_path / f"moved{number}", seed=1)
        report = align(first, tmp_path / f"moved{number}", tmp_path / f"out{number}")
        assert {"residual frame", "norm weight", "reader kernel"} <= {left.symmetry for left in report.left}
        assert all(left.reason == f"{name} of one of the two has zero entries" for left in report.left)
        assert verify(second, tmp_path / f"out{number}").largest < 1e-8
        assert report.after < report.before
    assert not align(a, a, tmp_path / "itself").left


@pytest.mark.parametrize("case", [NEOX, Case("gpt_neo", neo_like(2)), CASES[-1]], ids=str)
def test_a_norm_bias_of_zero_takes_no_constant(case: Case, tmp_path: Path) -> None:
    """In models that were never trained: readers without a bias cannot trade constants with γ⁻¹·β = 0, in either."""
    tiny = Tiny(case, eps=1e-5)
    constants = [s for s in tiny.symmetries.continuous if shifted_by_kernel(s)]
    norms = {norm for symmetry in constants for norm in shifted_by_kernel(symmetry)}
    theta, other = tiny.theta.clone(), between(tiny, 0.4)
    for parameters in (theta, other):
        for norm in norms:
            assert norm.bias is not None
            parameters[tiny.index[norm.bias.name].reshape(-1)] = 0.0
    a, b = saved(tiny, tmp_path / "a", theta), saved(tiny, tmp_path / "b", other)
    trained = saved(tiny, tmp_path / "trained")
    for number, (first, second) in enumerate(((a, a), (a, b), (a, trained), (trained, b))):
        scramble(second, tmp_path / f"moved{number}", seed=1, only=["vo", "qk", "units", "norms", "frame", "order"])
        report = align(first, tmp_path / f"moved{number}", tmp_path / f"out{number}")
        assert verify(second, tmp_path / f"out{number}").largest < 1e-8
        assert report.after < 1e-9 if first == second else 1e-3 < report.after < report.before
        left = [each for each in report.left if each.symmetry != "residual frame"]
        assert {each.symmetry for each in left} == {symmetry.name for symmetry in constants} and len(left) == len(
            constants
        )
        assert {each.reason for each in left} == {
            f"the bias of {norm.where} of one of the two is zero, and what reads it has none of its own"
            for norm in norms
        }
    assert not [left for left in align(trained, trained, tmp_path / "itself").left if left.symmetry != "residual frame"]


def lame(tiny: Tiny, folder: Path, lost: dict[str, int]) -> Path:
    """In the first key/value head of the first layer so many of the dimensions of a part repeat another one, or, where
    all are to be lost, are zero."""
    tensors = tiny.tensors()
    attention = next(a for _, _, a, _ in tiny.spec.attentions())
    for part, count in lost.items():
        linear, share = getattr(attention, part), 1 if part in "kv" else attention.heads // attention.kv_heads
        views = [linear.weight] if linear.bias is None or part == "o" else [linear.weight, linear.bias]
        for view in views:
            for head in view.read(tensors[view.name])[:share]:
                if count == len(head):
                    head.zero_()
                else:
                    head[len(head) - count :] = head[0]
    return saved(tiny, folder, tiny.flat(tensors, tiny.theta))


@pytest.mark.parametrize("case", [GPT2, LLAMA], ids=str)
@pytest.mark.parametrize("lost", [{"v": 1}, {"o": 1}, {"v": 1, "o": 1}, {"q": 1, "k": 1}, {"q": 4}, {"k": 4}], ids=str)
def test_a_head_of_low_rank(case: Case, lost: dict[str, int], tmp_path: Path) -> None:
    """Its factors have no inverse by which to balance them; it is found again all the same."""
    tiny = Tiny(case, eps=1e-5)
    a, b = saved(tiny, tmp_path / "a"), lame(tiny, tmp_path / "b", lost)
    for number, (first, second) in enumerate(((b, b), (a, b), (b, a))):
        scramble(second, tmp_path / f"moved{number}", seed=1)
        report = align(first, tmp_path / f"moved{number}", tmp_path / f"out{number}")
        assert verify(second, tmp_path / f"out{number}").largest < 1e-9
        assert not [left for left in report.left if "basis" in left.symmetry]
        assert report.after < 1e-9 if first == second else 1e-3 < report.after < 0.2 * report.before


@pytest.mark.parametrize("lost", [{"v": 4, "o": 4}, {"v": 1, "o": 2}], ids=str)
def test_a_head_that_is_left(lost: dict[str, int], tmp_path: Path) -> None:
    """No choice of a basis is better than another for what neither factor shows: they are turned, not balanced."""
    tiny = Tiny(Case("gpt2", gpt_like()), eps=1e-5)
    b = lame(tiny, tmp_path / "b", lost)
    scramble(b, tmp_path / "c", seed=1)
    report = align(b, tmp_path / "c", tmp_path / "d")
    assert verify(b, tmp_path / "d").largest < 1e-9
    (left,) = (left for left in report.left if "basis" in left.symmetry)
    assert (left.symmetry, left.where) == ("value-output basis", "layer 0 attention")
    assert left.reason == "the two models' factors lack dimensions: the head is only turned"
    assert report.after < report.before
    assert next(place for place in report.places if place.where == "layer 1").after < 1e-9


def test_different_eps_is_allowed(tmp_path: Path) -> None:
    tiny = Tiny(UNTIED, eps=1e-5)
    a = saved(tiny, tmp_path / "a")
    scramble(a, tmp_path / "b", seed=1)
    reconfigured(tmp_path / "b", rms_norm_eps=1e-3)
    assert align(a, tmp_path / "b", tmp_path / "c").after < 1e-9
    assert json.loads((tmp_path / "c" / "config.json").read_text())["rms_norm_eps"] == 1e-3


Change = Callable[[Path], Any]


def poison(folder: Path) -> None:
    edited(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[5].fill_(torch.nan))


def reworded(folder: Path) -> None:
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"]["vocab"] |= {"c": 3, "d": 2}
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Case("gpt2", gpt_like()), "different families: llama and gpt2"),
        (Case("llama", llama_like(num_hidden_layers=1)), r"different numbers of layers: \[2\] and \[1\]"),
        (Case("llama", llama_like(num_key_value_heads=2)), "different heads"),
        (Case("llama", llama_like(intermediate_size=10)), r"different hidden units: \[9\] and \[10\]"),
        (Case("llama", llama_like(vocab_size=17)), r"different vocabularies: \[13\] and \[17\]"),
        (Case("llama", llama_like(**rope(1.0))), "different rotary positions"),
        (Case("llama", llama_like(tie_word_embeddings=True)), "different ties: False and True"),
        (Case("llama", llama_like(hidden_act="relu")), r"different activations: \['silu'\] and \['relu'\]"),
        (Case("llama", llama_like(attention_bias=True)), "different tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_another_architecture(other: Case, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mergekit#325: other rope bases; #489: other vocabularies, found after hours. No weights are read here."""
    a, b = saved(Tiny(UNTIED), tmp_path / "a"), saved(Tiny(other), tmp_path / "b")
    monkeypatch.setattr(Checkpoint, "load", no_weights)
    for first, second in ((a, b), (b, a)):
        with pytest.raises(GaugekitError) as raised:
            align(first, second, tmp_path / "c")
        assert f"{first} and {second} cannot be aligned: different " in str(raised.value)
        if first == a:
            assert raised.match(reason)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def no_weights(*_: Any) -> torch.Tensor:
    raise AssertionError("weights were read")


def test_the_same_vocabulary_size_with_other_tokens(tmp_path: Path) -> None:
    a = saved(Tiny(UNTIED, eps=1e-5), tmp_path / "a")
    tokenizer(13).save_pretrained(a)
    scramble(a, tmp_path / "b", seed=1)
    reworded(tmp_path / "b")
    with pytest.raises(GaugekitError, match="different vocabularies: token 'c' is 2 and 3"):
        align(a, tmp_path / "b", tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_damaged_weights_of_either(tmp_path: Path) -> None:
    a = saved(Tiny(UNTIED, eps=1e-5), tmp_path / "a")
    scramble(a, tmp_path / "b", seed=1)
    scramble(a, tmp_path / "bad", seed=2)
    poison(tmp_path / "bad")
    for first, second in ((a, tmp_path / "bad"), (tmp_path / "bad", tmp_path / "b")):
        with pytest.raises(GaugekitError, match="holds NaN or infinite numbers"):
            align(first, second, tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "bad"]


def test_the_result_does_not_take_the_place_of_the_reference(tmp_path: Path) -> None:
    a = saved(Tiny(UNTIED, eps=1e-5), tmp_path / "folder" / "a")
    scramble(a, tmp_path / "b", seed=1)
    for out in (a, a / "inside"):
        with pytest.raises(GaugekitError, match="to which the other is moved; choose another directory"):
            align(a, tmp_path / "b", out, overwrite=True)
    (tmp_path / "link").symlink_to(a)
    with pytest.raises(GaugekitError, match="to which the other is moved"):
        align(tmp_path / "link", tmp_path / "b", a, overwrite=True)
    with pytest.raises(GaugekitError, match="is the source itself"):
        align(a, tmp_path / "b", tmp_path / "b", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "folder", "link"]
    # In the other's place as in any.
    assert align(a, tmp_path / "b", tmp_path / "c").after < 1e-9
    assert align(tmp_path / "c", a, tmp_path / "b", overwrite=True).after < 1e-9


def as_gguf(tiny: Tiny, path: Path) -> Path:
    """A qwen2 as llama.cpp names its tensors; all other families turn rows of queries and keys there."""
    config, writer = tiny.case.config, gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    for name, tensor in tiny.tensors().items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None
        writer.add_tensor(stored, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf(tmp_path: Path) -> None:
    """It can be the reference, under its own names; it is not written, and what it computes is not compared."""
    tiny = Tiny(Case("qwen2", llama_like(num_key_value_heads=2, vocab_size=20)), eps=1e-6)
    (tmp_path / "folder").mkdir()
    reference = as_gguf(tiny, tmp_path / "folder" / "a.gguf")
    a, b = saved(tiny, tmp_path / "a", dtype=torch.float32), tmp_path / "b"
    scramble(a, b, seed=1)
    assert align(reference, b, tmp_path / "c").after < 1e-6
    assert apart(a, tmp_path / "c", tiny) < 1e-5
    text = letters(tmp_path / "text", 13)
    for options, reason in (
        ({"cost": "activations", "text": text}, "a.gguf: what GGUF files compute is not compared; compare weights"),
        ({"refine": 2, "text": text}, "a.gguf: cannot be refined: transformers holds GGUF in another form"),
    ):
        with pytest.raises(GaugekitError, match=reason):
            align(reference, b, tmp_path / "d", **options)
    with pytest.raises(GaugekitError, match="GGUF files are read only; convert with transformers first"):
        align(b, reference, tmp_path / "d")
    with pytest.raises(GaugekitError, match="GGUF files are read only; convert with transformers first"):
        reduce(reference, tmp_path / "d", lossless=True)
    assert not (tmp_path / "d").exists()


def test_letters_are_tokens() -> None:
    """Of the helper that the other tests trust."""
    assert tokenizer(5)("abcde").input_ids == [0, 1, 2, 3, 4]
    assert tokenizer(11, around=True)("ab").input_ids == [2, 0, 1, 3]
    assert len(set(LETTERS)) == 52
