"""What merge makes of a few models, what it writes besides weights, and what it refuses before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import CASES, gpt_like, llama_like, neox_like, opt_like
from merging import LINEAR, RECIPES, WEIGHTS, apart, merged, tensors
from on_disk import Save
from oracle import Case, Tiny
from safetensors.torch import load_file, save_file

from gaugekit.errors import CheckpointError, GaugekitError
from gaugekit.verbs.scramble import scramble


def edited_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_as_they_are_it_is_the_plain_formula(save: Save, tmp_path: Path) -> None:
    case = Case("llama", llama_like())
    a, b = (save(Tiny(case, seed=seed), name) for seed, name in enumerate("ab"))
    merged(tmp_path, LINEAR + "align: none\n")
    first, second, result = tensors(a), tensors(b), tensors(tmp_path / "out")
    for name, value in result.items():
        torch.testing.assert_close(value, (0.3 * first[name] + 0.9 * second[name]) / 1.2, rtol=0, atol=1e-14)


def test_several_disguises(save: Save, tmp_path: Path) -> None:
    a = save(Tiny(Case("gpt_neox", neox_like(vocab_size=30)), eps=1e-5), "a")
    for seed, name in enumerate("bcd"):
        scramble(a, tmp_path / name, seed=seed)
    for method in ("task_arithmetic", "ties", "dare_linear", "dare_ties"):
        recipe = RECIPES[method].replace("{model: b}", "{model: b}, {model: c}, {model: d}")
        assert len(merged(tmp_path, recipe, method).sources) == 4
        assert apart(a, tmp_path / method) < 1e-6


@pytest.mark.parametrize("method", ["slerp", "ties", "dare_ties"])
def test_rows_that_nothing_reads_do_not_weigh_on_others(method: str, save: Save, tmp_path: Path) -> None:
    """OPT's positions begin with two rows that are never read, whose means no symmetry moves along."""
    tiny = Tiny(Case("opt", opt_like(num_hidden_layers=1, tie_word_embeddings=False)), eps=1e-5)
    a = save(tiny, "a")
    scramble(a, tmp_path / "b", seed=0)
    merged(tmp_path, RECIPES[method])
    assert apart(a, tmp_path / "out") < 1e-9


def test_a_stranger_is_merged_where_it_has_been_moved(save: Save, tmp_path: Path) -> None:
    """The merge of A and B does not depend on where on its orbit B lies, and is neither of the two."""
    case = Case("llama", llama_like())
    a, b = (save(Tiny(case, seed=seed), name) for seed, name in enumerate("ab"))
    merged(tmp_path, LINEAR, "one")
    scramble(b, tmp_path / "c", seed=5)
    merged(tmp_path, LINEAR.replace("model: b", "model: c"), "two")
    assert apart(tmp_path / "one", tmp_path / "two") < 1e-6
    assert min(apart(a, tmp_path / "one"), apart(b, tmp_path / "one")) > 0.1


@pytest.mark.parametrize("stored", ["once", "twice"])
def test_a_tied_head_stays_tied(stored: str, save: Save, tmp_path: Path) -> None:
    """mergekit#350: KeyError on lm_head.weight of a tied model. Also where a file holds the copy."""
    case = Case("llama", llama_like(tie_word_embeddings=True))
    a, b = (save(Tiny(case, seed=seed), name) for seed, name in enumerate("ab"))
    assert "lm_head.weight" not in tensors(a)
    if stored == "twice":
        for folder in (a, b):
            found = tensors(folder)
            found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
            save_file(found, folder / WEIGHTS, metadata={"format": "pt"})
    merged(tmp_path, LINEAR)
    result = tensors(tmp_path / "out")
    assert ("lm_head.weight" in result) == (stored == "twice")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    if stored == "twice":
        assert torch.equal(result["lm_head.weight"], result["model.embed_tokens.weight"])


def test_files_of_the_reference_come_along(save: Save, tmp_path: Path) -> None:
    """mergekit#469, #428: merged tokenizers broken. They are copied byte for byte."""
    case = Case("llama", llama_like())
    a, b = (save(Tiny(case, seed=seed), name) for seed, name in enumerate("ab"))
    vocabulary = json.dumps({"model": {"type": "BPE", "vocab": {chr(97 + i): i for i in range(13)}, "merges": []}})
    for folder, extra in ((a, "ours"), (b, "theirs")):
        (folder / "tokenizer.json").write_text(vocabulary)
        (folder / "tokenizer_config.json").write_text(f'{{"note":   "{extra}"}}')
        (folder / "chat_template.jinja").write_text(extra)
        (folder / "README.md").write_text(f"---\nlicense: mit\n---\n# {extra}\n")
    merged(tmp_path, LINEAR)
    out = tmp_path / "out"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        assert (out / name).read_bytes() == (a / name).read_bytes()
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n\n# out\n")
    assert "merge_method: linear" in card and "`b` (SHA-256 of its tensors " in card and ", weight 0.9" in card


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (llama_like(), llama_like(num_hidden_layers=1), "numbers of layers"),
        (llama_like(), llama_like(vocab_size=17), "vocabularies"),
        (llama_like(), llama_like(tie_word_embeddings=True), "ties"),
        (
            llama_like(),
            llama_like(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            "rotary positions",
        ),
    ],
)
def test_what_cannot_be_merged(first: dict, second: dict, reason: str, save: Save, tmp_path: Path) -> None:
    """mergekit#325: two models with different rope bases merged; mergekit#489: a vocabulary mismatch found after hours.
    Both are seen in configs and headers: weights are not needed to refuse, and nothing is written."""
    a, b = (save(Tiny(Case("llama", config)), name) for name, config in (("a", first), ("b", second)))
    for folder in (a, b):
        _blank(folder / WEIGHTS)
    for align in ("", "align: none\n"):
        with pytest.raises(GaugekitError, match=f"different {reason}"):
            merged(tmp_path, LINEAR + align)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "recipe.yaml"}


def _blank(weights: Path) -> None:
    """Spoil the data and keep the header: whoever reads a tensor finds NaN."""
    found = load_file(weights)
    save_file({name: torch.full_like(x, torch.nan) for name, x in found.items()}, weights, metadata={"format": "pt"})


def test_damaged_weights_leave_nothing(save: Save, tmp_path: Path) -> None:
    a, _ = (save(Tiny(Case("llama", llama_like())), name) for name in "ab")
    _blank(a / WEIGHTS)
    with pytest.raises(CheckpointError, match="holds NaN"):
        merged(tmp_path, LINEAR + "align: none\n")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "recipe.yaml"}


GEMMA2 = next(case.config for case in CASES if case.model_type == "gemma2")


@pytest.mark.parametrize(
    ("model_type", "config", "field", "value", "words"),
    [
        ("llama", llama_like(), "rms_norm_eps", 1e-5, "differ in rms_norm_eps: 1e-06 and 1e-05"),
        ("llama", llama_like(), "hidden_act", "gelu", "different activations"),
        ("gpt_neox", neox_like(vocab_size=30), "layer_norm_eps", 0.5, "differ in layer_norm_eps"),
        ("gpt2", gpt_like(), "scale_attn_by_inverse_layer_idx", True, "differ in scale_attn_by_inverse_layer_idx"),
        ("gemma2", GEMMA2, "final_logit_softcapping", 20.0, "differ in final_logit_softcapping: 30.0 and 20.0"),
        ("gemma2", GEMMA2, "query_pre_attn_scalar", 20, "differ in query_pre_attn_scalar"),
        ("mistral", llama_like(), "sliding_window", 3, "differ in sliding_window"),
    ],
)
def test_equal_weights_may_compute_different_things(
    model_type: str, config: dict, field: str, value: Any, words: str, save: Save, tmp_path: Path
) -> None:
    """What only a config says."""
    tiny = Tiny(Case(model_type, config))
    save(tiny, "a")
    edited_config(save(tiny, "b"), **{field: value})
    with pytest.raises(GaugekitError, match=words):
        merged(tmp_path, LINEAR)
    assert not (tmp_path / "out").exists()


def test_bookkeeping_may_differ(save: Save, tmp_path: Path) -> None:
    tiny = Tiny(Case("llama", llama_like()), eps=1e-5)
    a = save(tiny, "a")
    edited_config(save(tiny, "b"), attention_dropout=0.1, max_position_embeddings=99, use_cache=False, eos_token_id=3)
    merged(tmp_path, LINEAR)
    assert apart(a, tmp_path / "out") < 1e-6


def test_a_field_that_is_off_may_be_missing(save: Save, tmp_path: Path) -> None:
    """Qwen2.5's configs have such ones, and fine-tunes that another release of transformers has saved do not."""
    tiny = Tiny(Case("qwen2", llama_like()), eps=1e-5)
    a = save(tiny, "a")
    edited_config(save(tiny, "b"), use_mrope=False, quantization_config={}, some_list=[])
    merged(tmp_path, LINEAR)
    assert apart(a, tmp_path / "out") < 1e-6


def test_what_out_must_not_be(save: Save, tmp_path: Path) -> None:
    """No model that goes into a merge is overwritten, the reference or another."""
    tiny = Tiny(Case("llama", llama_like()))
    a, b = save(tiny, "a"), save(tiny, "b")
    for out in ("a", "b", "b/inside", "."):
        with pytest.raises(CheckpointError, match="which goes into the merge; choose another directory"):
            merged(tmp_path, LINEAR, out, overwrite=True)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        merged(tmp_path, LINEAR)
    shutil.rmtree(tmp_path / "out")
    assert apart(a, b) == 0


def test_dtypes_and_shards(save: Save, tmp_path: Path) -> None:
    case = Case("llama", llama_like())
    for seed, name in enumerate("ab"):
        save(Tiny(case, seed=seed), name, dtype=torch.float32)
    dry = merged(tmp_path, LINEAR + "dtype: bfloat16\n", "sharded", max_shard_size="1kB", dry_run=True)
    assert not dry.written and not (tmp_path / "sharded").exists()
    assert {source.digest for source in dry.sources} == {None}
    report = merged(tmp_path, LINEAR + "dtype: bfloat16\n", "sharded", max_shard_size="1kB")
    assert (report.bytes, report.tensors) == (dry.bytes, dry.tensors)
    parts = [load_file(path) for path in (tmp_path / "sharded").glob("*.safetensors")]
    assert len(parts) > 1
    assert {x.dtype for part in parts for x in part.values()} == {torch.bfloat16}
    merged(tmp_path, LINEAR + "dtype: bfloat16\n", "wide", dtype="float64")
    assert {x.dtype for x in tensors(tmp_path / "wide").values()} == {torch.float64}
    merged(tmp_path, LINEAR, "same")
    assert {x.dtype for x in tensors(tmp_path / "same").values()} == {torch.float32}
    # Rounded once, at the end.
    wide, narrow = tensors(tmp_path / "wide"), {name: x for part in parts for name, x in part.items()}
    assert all(torch.equal(narrow[name], value.bfloat16()) for name, value in wide.items())


def test_weights_beyond_all_numbers(save: Save, tmp_path: Path) -> None:
    """An infinity that only arithmetic made is not written, whatever the dtype of the files."""
    case = Case("llama", llama_like())
    for seed, name in enumerate("ab"):
        save(Tiny(case, seed=seed), name)
    recipe = RECIPES["task_arithmetic"].replace("0.7", "1e300, lambda: 1e300") + "align: none\n"
    with pytest.raises(GaugekitError, match=r"recipe.yaml: the weights are too large, .* is infinite$"):
        merged(tmp_path, recipe)
    assert not (tmp_path / "out").exists()


def test_drops_do_not_depend_on_files(save: Save, tmp_path: Path) -> None:
    case = Case("llama", llama_like())
    for seed, name in enumerate("ab"):
        save(Tiny(case, seed=seed), name)
    recipe = RECIPES["dare_ties"]
    merged(tmp_path, recipe, "one")
    merged(tmp_path, recipe, "two", max_shard_size="1kB")
    merged(tmp_path, recipe + "seed: 1\n", "other")
    parts = {name: x for path in (tmp_path / "two").glob("*.safetensors") for name, x in load_file(path).items()}
    assert all(torch.equal(x, parts[name]) for name, x in tensors(tmp_path / "one").items())
    assert apart(tmp_path / "one", tmp_path / "other") > 0.1
