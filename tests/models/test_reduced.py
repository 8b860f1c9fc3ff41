"""Classes with narrower values against the classes of `transformers` with the same weights and zeros for the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from gaugekit.errors import ConfigError
from gaugekit.models.attention import register
from gaugekit.models.reduced import REDUCED, PivotedValues

D, HEADS, GROUPS, WIDTH = 24, 6, 2, 4  # stream, query heads, key/value heads, head dimension
NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA = {
    "vocab_size": 37,
    "hidden_size": D,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": WIDTH,
    **NONE,
}
GPT2 = {"vocab_size": 37, "n_embd": D, "n_layer": 2, "n_head": HEADS, "n_positions": 40, **NONE}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"attention_bias": True},
    "mistral": LLAMA | {"sliding_window": 5},
    "qwen2": LLAMA | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": LLAMA,
    "gpt2": GPT2 | {"scale_attn_by_inverse_layer_idx": True},
}
DIMS = [3, 1]
EACH = pytest.mark.parametrize("kind", CONFIGS)


def drawn(model: Any, seed: int = 0) -> Any:
    """Random weights, float64, evaluation."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)
    return model


def reduced(kind: str, pivoted: bool = False, dims: list[int] = DIMS, **extra: Any) -> Any:
    config = REDUCED[kind].config(**CONFIGS[kind], value_dims=dims, pivoted_values=[pivoted] * 2, **extra)
    model = drawn(REDUCED[kind].model(config))
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, PivotedValues):
            for pivots in module.pivots:
                pivots.copy_(torch.randperm(D, generator=generator)[: len(pivots)].sort().values)
    return model


def widened(kind: str, model: Any) -> Any:
    """The class of `transformers` that must compute the same: values as wide as keys, what was cut is zero."""
    full = drawn(
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **CONFIGS[kind]))
    )
    state = full.state_dict()
    own = {name: value for name, value in model.state_dict().items() if ".values." not in name}
    state |= {name: value for name, value in own.items() if name in state and value.shape == state[name].shape}
    layers = model.transformer.h if kind == "gpt2" else model.model.layers
    for number, layer in enumerate(layers):
        attention = layer.attn if kind == "gpt2" else layer.self_attn
        groups = HEADS if kind == "gpt2" else GROUPS
        rank = DIMS[number]
        x = torch.eye(D, dtype=torch.float64)
        if kind == "gpt2":
            at = f"transformer.h.{number}.attn"
            read = attention.values if attention.pivoted else lambda y, a=attention: a.c_attn(y)[..., 2 * D :]
            weight, bias = read(x) - read(0 * x[0]), read(0 * x[0])
            fused = torch.zeros(D, 3 * D, dtype=torch.float64)
            fused[:, : 2 * D] = attention.c_attn.weight[:, : 2 * D]
            fused[:, 2 * D :] = spread(weight, groups, rank)
            state[f"{at}.c_attn.weight"] = fused
            state[f"{at}.c_attn.bias"] = torch.cat([attention.c_attn.bias[: 2 * D], spread(bias, groups, rank)])
            state[f"{at}.c_proj.weight"] = spread(attention.c_proj.weight.mT, HEADS, rank).mT
        else:
            at = f"model.layers.{number}.self_attn"
            read = attention.v_proj
            weight, bias = read(x) - read(0 * x[0]), read(0 * x[0])
            state[f"{at}.v_proj.weight"] = spread(weight, groups, rank).mT
            if attention.v_proj.bias is not None:
                state[f"{at}.v_proj.bias"] = spread(bias, groups, rank)
            state[f"{at}.o_proj.weight"] = spread(attention.o_proj.weight, HEADS, rank)
    full.load_state_dict(state)
    return full


def spread(x: Tensor, heads: int, rank: int) -> Tensor:
    """(..., heads · rank) → (..., heads · WIDTH) with zeros."""
    return torch.nn.functional.pad(x.unflatten(-1, (heads, rank)), (0, WIDTH - rank)).flatten(-2)


def tokens(seed: int, *shape: int) -> Tensor:
    return torch.randint(37, shape, generator=torch.Generator().manual_seed(seed))


@EACH
@pytest.mark.parametrize("implementation", ["eager", "sdpa", *register(dot="dot")])
@pytest.mark.parametrize("pivoted", [False, True])
def test_the_same_as_zeros_in_the_original_class(kind: str, implementation: str, pivoted: bool) -> None:
    model = reduced(kind, pivoted)
    full = widened(kind, model)
    for each in (model, full):
        each.set_attn_implementation(implementation)
    ids = tokens(1, 3, 12)
    ours, theirs = model(ids).logits, full(ids).logits
    assert float((ours - theirs).abs().max()) < 1e-5, "some of the classes compute in float32 here and there"
    assert float(ours.std()) > 0.05
    other = reduced(kind, pivoted)
    attention = (
        other.transformer.h[0].attn.c_proj if kind == "gpt2" else other.model.layers[0].self_attn.o_proj
    ).weight
    attention[..., -1] += 1
    assert float((other(ids).logits - ours).abs().max()) > 1e-3


@EACH
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_on_the_left_changes_nothing(kind: str, implementation: str) -> None:
    model = reduced(kind)
    model.set_attn_implementation(implementation)
    ids = tokens(2, 2, 9)
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids], 1)
    mask = torch.ones_like(padded)
    mask[:, :4] = 0
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    seen = model(padded, attention_mask=mask, position_ids=places).logits[:, 4:]
    torch.testing.assert_close(seen, model(ids).logits, rtol=0, atol=1e-5)
    unmasked = model(padded, position_ids=places).logits[:, 4:]
    assert float((unmasked - model(ids).logits).abs().max()) > 1e-3


@EACH
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generating_with_a_cache(kind: str, implementation: str, cache: str) -> None:
    model = reduced(kind, pivoted=implementation == "eager")
    model.set_attn_implementation(implementation)
    ids = tokens(3, 2, 7)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    plain = model.generate(ids, use_cache=False, **options)
    found = model.generate(
        ids, use_cache=True, cache_implementation=cache, disable_compile=True, return_dict_in_generate=True, **options
    )
    assert torch.equal(found.sequences, plain)
    kept = found.past_key_values if "past_key_values" in found else found.cache
    for layer, rank in zip(kept.layers, DIMS, strict=True):
        groups = HEADS if kind == "gpt2" else GROUPS
        assert layer.keys.shape[1::2] == (groups, WIDTH)
        assert layer.values.shape[1::2] == (groups, rank)
        assert layer.values.shape[2] == layer.keys.shape[2]


@EACH
@pytest.mark.parametrize("pivoted", [False, True])
def test_saved_and_loaded(kind: str, pivoted: bool, tmp_path: Path) -> None:
    """TransformerCompression#73, #188, #185: the result is not loadable with from_pretrained."""
    model = reduced(kind, pivoted)
    model.save_pretrained(tmp_path / "one")
    for number in range(2):
        loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / ("one", "two")[number], output_loading_info=True
        )
        assert type(loaded) is REDUCED[kind].model
        assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        state = model.state_dict()
        assert loaded.state_dict().keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
        loaded.save_pretrained(tmp_path / "two")
    assert (tmp_path / "two" / "modeling_gaugekit.py").read_text() == (
        f"from gaugekit.models.reduced import {REDUCED[kind].config.__name__}, {REDUCED[kind].model.__name__}"
        "  # noqa: F401\n"
    )
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.bfloat16)
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16}
    assert {b.dtype for name, b in other.named_buffers() if "pivots" in name} <= {torch.int64}


ALONE = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
assert not [name for name in sys.modules if name.startswith("gaugekit")]
for folder in sys.argv[1:]:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    print(type(config).__name__, type(model).__name__, type(model).__module__)
    model.save_pretrained(folder + "-again")
"""


def test_by_remote_code_where_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folders = [str(tmp_path / kind) for kind in ("llama", "gpt2")]
    for folder in folders:
        reduced(Path(folder).name).save_pretrained(folder)
    ran = subprocess.run([sys.executable, "-c", ALONE, *folders], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "ReducedLlamaConfig ReducedLlamaForCausalLM gaugekit.models.reduced",
        "ReducedGPT2Config ReducedGPT2LMHeadModel gaugekit.models.reduced",
    ]
    for folder in folders:
        assert sorted(path.name for path in Path(folder).iterdir() if path.suffix == ".py") == ["modeling_gaugekit.py"]
        assert sorted(path.name for path in Path(folder + "-again").glob("*.py")) == ["modeling_gaugekit.py"]


@EACH
def test_weights_of_attention_and_gradients(kind: str) -> None:
    model = reduced(kind, pivoted=True)
    model.set_attn_implementation("eager")
    ids = tokens(4, 2, 6)
    weights = model(ids, output_attentions=True).attentions
    assert [each.shape for each in weights] == [(2, HEADS, 6, 6)] * 2
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, HEADS, 6, dtype=torch.float64))
    model.requires_grad_(True).train()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@EACH
def test_a_new_model_is_drawn(kind: str) -> None:
    config = REDUCED[kind].config(**CONFIGS[kind], value_dims=DIMS, pivoted_values=[True, False])
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
    assert bool(model(tokens(5, 1, 4)).logits.isfinite().all())


@EACH
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"value_dims": None}, "value_dims of gaugekit_{} must be a whole number for each of the 2 layers, not None"),
        ({"value_dims": [3]}, "for each of the 2 layers"),
        ({"value_dims": [3, 2.5]}, "must be a whole number"),
        ({"value_dims": [3, True]}, "must be a whole number"),
        ({"value_dims": [3, 0]}, "must be from 1 to the head dimension 4"),
        ({"value_dims": [5, 1]}, "must be from 1 to the head dimension 4"),
        ({"pivoted_values": [True]}, "pivoted_values of gaugekit_{} must be true or false for each of the 2 layers"),
        ({"pivoted_values": [1, 0]}, "must be true or false"),
    ],
)
def test_what_the_config_cannot_say(kind: str, change: dict[str, Any], words: str) -> None:
    config = REDUCED[kind].config(**CONFIGS[kind] | {"value_dims": DIMS, "pivoted_values": [False, False]} | change)
    with pytest.raises(ConfigError) as caught:
        REDUCED[kind].model(config)
    assert words.format(kind) in str(caught.value) and "\n" not in str(caught.value)
