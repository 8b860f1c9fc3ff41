"""From checkpoints to specs: what is missing, unknown or nested is noticed by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import CASES, llama_like
from oracle import Case, Tiny
from safetensors.torch import load_file, save_file

from gaugekit.checkpoint import open_checkpoint
from gaugekit.errors import CheckpointError, UnsupportedArchitecture
from gaugekit.models import read_spec, registered
from gaugekit.models.registry import HARMLESS, Family, register
from gaugekit.symmetry import derive


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tiny = Tiny(Case("llama", llama_like()))
    tiny.model.save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, drop: str | None = None, **changes: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(path).items()} | changes
    if drop is not None:
        del tensors[drop]
    save_file(tensors, path, metadata={"format": "pt"})


def test_every_family_has_three_shapes() -> None:
    counts = {name: sum(case.model_type == name for case in CASES) for name in registered()}
    wrappers = {name for family in registered().values() for name in family.wrappers}
    assert all(count >= 3 for name, count in counts.items() if name not in wrappers), counts


@pytest.mark.parametrize("model_type", sorted(registered()))
def test_every_config_field_is_accounted_for(model_type: str) -> None:
    """A field that a new release of transformers adds makes this fail until somebody has looked at it."""
    family = registered()[model_type]
    if model_type in family.wrappers:
        return
    fields = transformers.AutoConfig.for_model(model_type).to_dict()
    unknown = [field for field in fields if field not in family.fields and not HARMLESS.fullmatch(field)]
    assert unknown == []


def test_a_family_registered_twice_is_an_error() -> None:
    family = registered()["llama"]
    with pytest.raises(ValueError, match="llama is registered twice"):
        register(Family("again", ("llama",), family.build, family.fields))


def test_unknown_model_type_is_refused_by_name(llama: Path) -> None:
    edit_config(llama, model_type="zebra")
    with pytest.raises(UnsupportedArchitecture, match=r"model type 'zebra' is not supported; supported are bert, "):
        read_spec(open_checkpoint(llama))


def test_config_without_model_type(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    del config["model_type"]
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="names no model_type"):
        read_spec(open_checkpoint(llama))


@pytest.mark.parametrize(
    ("model_type", "config", "named"),
    [
        ("llama", {"value_residual": True}, "value_residual=True"),
        ("llama", {"hidden_act": "swoosh"}, "hidden_act='swoosh'"),
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "rope_type 'spiral'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm=True"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
        ("opt", {"word_embed_proj_dim": 4}, "word_embed_proj_dim=4"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ("bert", {"is_decoder": True}, "is_decoder=True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    ],
)
def test_a_field_that_changes_the_function_is_refused_by_name(
    tmp_path: Path, model_type: str, config: dict[str, Any], named: str
) -> None:
    base = next(case.config for case in CASES if case.model_type == model_type)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **base, **config}))
    with pytest.raises(UnsupportedArchitecture) as caught:
        read_spec(open_checkpoint(tmp_path))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_named(llama: Path) -> None:
    edit_weights(llama, drop="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight of llama is missing"):
        read_spec(open_checkpoint(llama))


def test_a_norm_in_a_new_place_is_refused(llama: Path) -> None:
    edit_weights(llama, **{"model.layers.0.self_attn.sink_norm.weight": torch.ones(8)})
    with pytest.raises(UnsupportedArchitecture, match=r"sink_norm\.weight is not part of llama"):
        read_spec(open_checkpoint(llama))


def test_buffers_of_old_checkpoints_are_no_parameters(llama: Path) -> None:
    before = read_spec(open_checkpoint(llama)).parameters
    edit_weights(llama, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    assert read_spec(open_checkpoint(llama)).parameters == before


def test_config_and_weights_that_do_not_belong_together(llama: Path) -> None:
    edit_config(llama, intermediate_size=10)
    with pytest.raises(CheckpointError, match=r"has shape \[9, 8\] where the config asks for \[10, 8\]"):
        read_spec(open_checkpoint(llama))


def test_a_config_that_contradicts_itself_is_one_line(llama: Path) -> None:
    edit_config(llama, num_attention_heads=3)
    with pytest.raises(CheckpointError, match=r"config of llama cannot be read: [^\n]*not a multiple") as caught:
        read_spec(open_checkpoint(llama))
    assert "\n" not in str(caught.value)


def test_the_head_of_a_tied_model_may_be_absent_or_a_copy(tmp_path: Path) -> None:
    """mergekit#350: KeyError on lm_head.weight of a tied model."""
    tiny = Tiny(Case("llama", llama_like(tie_word_embeddings=True)))
    tiny.model.save_pretrained(tmp_path)
    spec = read_spec(open_checkpoint(tmp_path))
    assert spec.copies == ()
    edit_weights(tmp_path, **{"lm_head.weight": load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]})
    again = read_spec(open_checkpoint(tmp_path))
    assert again.copies == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert again.parameters == spec.parameters


def test_a_base_model_without_prefix_and_head(tmp_path: Path) -> None:
    """Checkpoints of bare base models drop the prefix; without a head their hidden states are observed."""
    config = transformers.LlamaConfig(**llama_like())
    transformers.LlamaModel(config).save_pretrained(tmp_path)
    spec = read_spec(open_checkpoint(tmp_path))
    assert "embed_tokens.weight" in spec.tensors
    assert derive(spec).observable == "hidden"


def test_nested_configs_are_read(tmp_path: Path) -> None:
    """llm-compressor#2005: head_dim sits in text_config."""
    text = llama_like(head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True)
    vision = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 9,
        "image_size": 8,
        "patch_size": 4,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=10,
        boi_token_index=11,
        eoi_token_index=12,
    )
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    spec = read_spec(open_checkpoint(tmp_path))
    assert next(a for _, _, a, _ in spec.attentions()).head_dim == 16
    assert {dead.reason for dead in spec.dead} == {"image part, outside a text observable"}
    assert spec.parameters == sum(
        parameter.numel() for parameter in transformers.Gemma3ForConditionalGeneration(config).parameters()
    )


def test_head_dim_apart_from_width_over_heads() -> None:
    """SpinQuant (code): head_dim assumed to be hidden / heads."""
    tiny = Tiny(Case("llama", llama_like(head_dim=6)))
    attention = next(a for _, _, a, _ in tiny.spec.attentions())
    assert (attention.head_dim, attention.q.weight.shape) == (6, (2, 6, 8))


def test_seventy_billion_parameters_from_a_config_alone(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(open_checkpoint(tmp_path))
    assert spec.parameters == 70_553_706_496
    heads = 80 * 8 * (128**2 + 128)
    assert derive(spec).dimension == heads + 80 * 28672 + 161 * 8192 + 8192 + 8192 * 8191 // 2


def test_gpt2_at_its_real_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    spec = read_spec(open_checkpoint(tmp_path))
    assert spec.parameters == 124_439_808
    assert derive(spec).dimension == 1_347_352
