"""Norms swapped inside real model classes, and what must not be swapped."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.utils import logging

from gaugekit.nn import norms
from gaugekit.nn.convert import KnownNorm, ScaledEmbedding, convert, initial_alpha, recognise
from gaugekit.verbs.running import Float64

F64 = torch.float64
V = 17
OURS = tuple(norms.NORMS.values())

LLAMA: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2: dict[str, Any] = {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "n_inner": 24}
BERT: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
WHISPER: dict[str, Any] = {
    "vocab_size": V,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_mel_bins": 4,
    "max_source_positions": 6,
    "max_target_positions": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5: dict[str, Any] = {"vocab_size": V, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
VIT: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}

# name: (model, config, options, how many norms, their kind, the offset of γ)
MODELS: dict[str, tuple[str, str, dict[str, Any], int, str, int]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, 5, "layer", 0),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA, 5, "rms", 0),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", LLAMA, 9, "rms", 0),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", LLAMA, 5, "rms", 1),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", LLAMA, 13, "rms", 1),
    "cohere": ("CohereForCausalLM", "CohereConfig", LLAMA, 3, "layer", 0),
    "bert": ("BertForMaskedLM", "BertConfig", BERT, 6, "layer", 0),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, 10, "layer", 0),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, 7, "rms", 0),
    "vit": ("ViTModel", "ViTConfig", VIT | {"image_size": 8, "patch_size": 4, "num_channels": 2}, 5, "layer", 0),
}


def build(name: str, seed: int = 0) -> Any:
    """A tiny model in float64 with every parameter random, norm weights away from 1."""
    kind, config, options, *_ = MODELS[name]
    logging.set_verbosity_error()
    model = getattr(transformers, kind)(getattr(transformers, config)(**options)).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            scale = 0.4 if p.ndim == 1 else 1 / math.sqrt(p.shape[-1])
            p.copy_(scale * torch.randn(p.shape, generator=generator, dtype=F64) + (0.3 if p.ndim == 1 else 0.0))
    return model


def outputs(model: Any, grad: bool = False) -> Tensor:
    """Logits or states, really in float64: `transformers` casts to float32 inside its norms."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, V, (2, 7), generator=generator)
    kind = type(model).__name__
    inputs: dict[str, Tensor] = {"input_ids": tokens}
    if kind.startswith("Whisper"):
        inputs = {"input_features": torch.randn(2, 4, 12, generator=generator, dtype=F64), "decoder_input_ids": tokens}
    elif kind.startswith("T5"):
        inputs |= {"decoder_input_ids": tokens.flip(-1)}
    elif kind.startswith("ViT"):
        inputs = {"pixel_values": torch.randn(2, 2, 8, 8, generator=generator, dtype=F64)}
    with torch.set_grad_enabled(grad), Float64():
        out = model(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def off(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def ours(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, OURS)]


# --- models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_to_the_same_kind_changes_nothing(name: str) -> None:
    """TransformerLens#511, Liger#74: Gemma's γ is 1 + w."""
    *_, count, kind, offset = MODELS[name]
    model = build(name)
    before, parameters = outputs(model), dict(model.named_parameters())
    assert convert(model, to=kind) is model
    assert len(ours(model)) == count
    assert off(outputs(model), before) < 1e-12
    kept = [key for key, p in model.named_parameters() if p is parameters[key]]
    assert len(parameters) - len(kept) == (count if offset else 0)
    assert list(dict(model.named_parameters())) == list(parameters)


@pytest.mark.parametrize("name", MODELS)
def test_to_another_kind_changes_the_function(name: str) -> None:
    *_, count, kind, _ = MODELS[name]
    model = build(name)
    before = outputs(model)
    convert(model, to="rms" if kind == "layer" else "layer")
    assert len(ours(model)) == count
    assert off(outputs(model), before) > 1e-3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("to", ["dyt", "scale", "none"])
def test_trains_saves_loads_and_copies(name: str, to: str, tmp_path: Path) -> None:
    model = convert(build(name), to=to)
    count = MODELS[name][3]
    assert len(ours(model)) == count
    model.train()
    outputs(model, grad=True).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = outputs(model)
    optimizer.step()
    model.eval()
    for norm in model.modules():
        if isinstance(norm, OURS):
            assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in norm.parameters())
    after = outputs(model)
    assert off(after, before) > 1e-12
    assert torch.equal(outputs(copy.deepcopy(model)), after)
    fresh = convert(build(name, seed=3), to=to)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(outputs(fresh), after)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(key.endswith(".alpha") for key in stored) == (count if to == "dyt" else 0)


def test_a_centred_stream_keeps_its_function_without_the_mean() -> None:
    """LayerNorm to RMSNorm with β kept: the same function where every writer is centred."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 5)).double()
    with torch.no_grad():
        net[1].bias.normal_()
        for p in (net[0].weight, net[0].bias):
            p -= p.mean(0, keepdim=True)
    x = torch.randn(7, 8, dtype=F64)
    before = net(x)
    rms = convert(net, to="rms")
    assert off(rms(x), before) < 1e-14
    assert off(convert(copy.deepcopy(net), to="rms", eps=0.1)(x), before) > 1e-3


def test_gamma_beta_and_eps_are_carried_over() -> None:
    model = build("gpt2")
    old = {name: m for name, m in copy.deepcopy(model).named_modules() if isinstance(m, nn.LayerNorm)}
    for to in ("rms", "prms", "layer", "dyt", "derf"):
        new = convert(copy.deepcopy(model), to=to)
        for name, m in old.items():
            swapped: Any = new.get_submodule(name)
            assert torch.equal(swapped.weight, m.weight) and torch.equal(swapped.bias, m.bias)
            assert swapped.weight.dtype == F64
            if to not in ("dyt", "derf"):
                assert swapped.eps == m.eps
            else:
                assert swapped.alpha.item() == 0.5 and swapped.alpha.dtype == F64
    gemma = build("gemma")
    weight = gemma.model.norm.weight.detach().clone()
    assert torch.equal(convert(gemma, to="dyt").model.norm.weight, 1 + weight)  # type: ignore[union-attr]


def test_options_go_to_the_new_norms() -> None:
    model: Any = convert(build("llama"), to="derf", alpha=0.3, shift=0.1)
    assert model.model.norm.alpha.item() == pytest.approx(0.3) and model.model.norm.shift.item() == pytest.approx(0.1)
    assert convert(build("llama"), to="prms", p=0.5).model.norm.p == 0.5  # type: ignore[union-attr]
    assert convert(build("llama"), to="rms", robust=True).model.norm.robust  # type: ignore[union-attr]


def test_flags_dtype_and_device_stay() -> None:
    for to in ("rms", "dyt", "scale"):
        model = nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6, elementwise_affine=False), nn.LayerNorm(6, bias=False))
        model.to(torch.bfloat16).eval()
        model[0].weight.requires_grad_(False)
        convert(model, to=to)
        assert not any(m.training for m in model)
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        if to != "scale":
            assert not model[0].weight.requires_grad and model[0].bias.requires_grad
            assert model[1].weight is None and model[2].bias is None
        assert model(torch.randn(3, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


# --- language models ----------------------------------------------------------------------------------------


def test_alpha_by_width_and_place() -> None:
    """[DyT], tables 11 and 12, and the nearest width between."""
    table = {1024: (1.0, 1.0), 2048: (1.0, 0.5), 4096: (0.8, 0.2), 5120: (0.6, 0.15), 8192: (0.2, 0.05)}
    for width, values in table.items():
        assert (initial_alpha(width, True), initial_alpha(width, False)) == values
    between = {64: 1.0, 768: 1.0, 1448: 1.0, 1449: 0.5, 2896: 0.5, 2897: 0.2, 3072: 0.2, 6656: 0.05, 16384: 0.05}
    assert {width: initial_alpha(width, False) for width in between} == between


@pytest.mark.parametrize("to", ["dyt", "derf"])
@pytest.mark.parametrize("tied", [True, False])
def test_language_model(to: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaugekit.nn.convert.ALPHAS", {16: (0.8, 0.2)})
    config = transformers.LlamaConfig(**LLAMA | {"tie_word_embeddings": tied})
    model: Any = transformers.LlamaForCausalLM(config).double()
    weight = model.model.embed_tokens.weight
    convert(model, to=to, language_model=True)
    places = {"input_layernorm": 0.8, "post_attention_layernorm": 0.2, "norm": 0.2}
    seen = Counter(name.rsplit(".", 1)[-1] for name in ours(model))
    assert seen == {"input_layernorm": 2, "post_attention_layernorm": 2, "norm": 1}
    for name in ours(model):
        m = model.get_submodule(name)
        assert m.alpha.item() == pytest.approx(places[name.rsplit(".", 1)[-1]]) and m.bias is None
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, ScaledEmbedding) and embedding.weight is weight
    assert (model.lm_head.weight is weight) == tied
    assert embedding.scale.item() == pytest.approx(4.0) and embedding.scale.requires_grad
    tokens = torch.arange(5)
    assert torch.equal(embedding(tokens), 4 * weight[tokens])
    outputs(model, grad=True).square().mean().backward()
    assert embedding.scale.grad is not None and embedding.scale.grad.abs() > 0
    fresh = convert(transformers.LlamaForCausalLM(config).double(), to=to, language_model=True)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(outputs(fresh), outputs(model))


def test_every_embedding_of_the_shared_weight_is_scaled() -> None:
    model: Any = build("t5")
    weight = model.shared.weight
    convert(model, to="dyt", language_model=True, attention=r"layer\.0\.layer_norm$")
    inputs = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is weight]
    assert inputs and all(isinstance(m, ScaledEmbedding) for m in inputs)
    assert len({id(m.scale) for m in inputs}) == 1
    assert any(type(m) is nn.Embedding for m in model.modules())  # relative positions


def test_places_by_a_function_and_embedding_by_name() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.a, self.b = nn.Embedding(V, 2048), nn.LayerNorm(2048), nn.LayerNorm(2048)

    model: Any = convert(Tiny(), "dyt", language_model=True, attention=lambda name: name == "a", embedding="words")
    assert (model.a.alpha.item(), model.b.alpha.item()) == (1.0, 0.5)
    assert isinstance(model.words, ScaledEmbedding)
    refuses(Tiny(), "dyt", "no get_input_embeddings", language_model=True, attention="a")
    refuses(Tiny(), "dyt", "no module 'tokens'", language_model=True, attention="a", embedding="tokens")
    refuses(Tiny(), "dyt", "is a LayerNorm, not a plain", language_model=True, attention="a", embedding="b")
    refuses(Tiny(), "dyt", "give `attention`", language_model=True, embedding="words")
    refuses(Tiny(), "rms", "language_model is of dyt and derf", language_model=True)


def test_an_embedding_that_already_scales_is_refused() -> None:
    refuses(build("gemma"), "dyt", "GemmaTextScaledWordEmbedding", language_model=True)


# --- ties ---------------------------------------------------------------------------------------------------


def test_a_norm_in_two_places_stays_one() -> None:
    shared = nn.LayerNorm(6)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.LayerNorm(6))})
    convert(model, to="rms")
    a, b = model["a"], model["b"]
    assert isinstance(a, norms.RMSNorm) and a is b[0] and isinstance(b[1], norms.RMSNorm)  # type: ignore[index]


def test_a_weight_in_two_norms_stays_one() -> None:
    for kind in (nn.LayerNorm, transformers.models.gemma.modeling_gemma.GemmaRMSNorm):
        model = nn.Sequential(kind(6), kind(6))
        model[1].weight = model[0].weight
        convert(model, to="dyt")
        assert model[1].weight is model[0].weight


def test_a_tie_that_would_break_is_refused() -> None:
    model = nn.Sequential(transformers.models.gemma.modeling_gemma.GemmaRMSNorm(6), nn.LayerNorm(6))
    model[1].weight = model[0].weight
    refuses(model, "dyt", "a tie that would break")


def test_an_optimizer_made_before_still_steps() -> None:
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model, to="dyt")
    before = model.model.norm.weight.detach().clone()
    outputs(model, grad=True).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.model.norm.weight, before)


# --- which ones, and which not ------------------------------------------------------------------------------


class HalfNorm(nn.Module):
    """Looks like a norm, and is none of the known ones: an L1 norm."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


class OutsideNorm(HalfNorm):
    """RMSNorm but for the place of eps, which shows on small rows only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class GatedNorm(HalfNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return F.rms_norm(x if gate is None else x * gate, self.weight.shape, self.weight, self.eps)


class ExtraNorm(HalfNorm):
    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ChannelsFirstNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class HiddenEpsNorm(HalfNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-2)


class UnweightedNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def hooked() -> nn.Module:
    module = nn.LayerNorm(6)
    module.register_forward_hook(lambda *_: None)
    return module


def parametrized() -> nn.Module:
    module = nn.LayerNorm(6)
    parametrize.register_parametrization(module, "weight", nn.Identity())
    return module


def refuses(model: nn.Module, to: str, match: str, **options: Any) -> None:
    """A one-line ValueError, and the model as it was."""
    modules, state = list(model.modules()), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match) as caught:
        convert(model, to, **options)
    assert "\n" not in str(caught.value)
    assert list(model.modules()) == modules
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items() if not value.is_meta)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: HalfNorm(6), "computes neither LayerNorm nor RMSNorm"),
        (lambda: OutsideNorm(6), "computes neither"),
        (lambda: HiddenEpsNorm(6), "computes neither"),
        (lambda: GatedNorm(6), "takes more than x"),
        (lambda: ExtraNorm(6), "parameters other than weight and bias"),
        (lambda: ChannelsFirstNorm(6), "does not run on"),
        (lambda: UnweightedNorm(), "no weight that tells its width"),
        (lambda: nn.LayerNorm((2, 3)), "its weight is not a vector"),
        (lambda: nn.LayerNorm((2, 3), elementwise_affine=False), "no weight that tells its width"),
        (lambda: nn.LayerNorm(6, device="meta"), "on the meta device"),
        (hooked, "has hooks"),
        (parametrized, "parameters other than weight and bias"),
    ],
)
def test_what_only_looks_like_a_norm_is_refused_by_name(make: Callable[[], nn.Module], reason: str) -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.Sequential(make()))
    name = type(model[1][0]).__name__  # type: ignore[index]
    refuses(model, "rms", rf"1\.0 \({name}\) cannot be converted: .*{reason}.*leave it out by `select`")
    convert(model, "rms", select=r"^0$")
    assert isinstance(model[0], norms.RMSNorm) and type(model[1][0]).__name__ == name


def test_hub_models_with_other_norms_are_refused() -> None:
    """Gated, weightless and per-head norms of `transformers`."""
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.mobilebert.modeling_mobilebert import NoNorm
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    for module in (NoNorm(6), Qwen3NextRMSNormGated(6), CohereLayerNorm((2, 6))):
        refuses(nn.Sequential(nn.LayerNorm(6), module), "dyt", type(module).__name__)


def test_norms_over_other_axes_are_left_alone() -> None:
    left = [nn.BatchNorm1d(6), nn.GroupNorm(2, 6), nn.InstanceNorm1d(6), nn.LocalResponseNorm(2)]
    model = nn.Sequential(nn.LayerNorm(6), *left)
    convert(model, "rms")
    assert list(model)[1:] == left and isinstance(model[0], norms.RMSNorm)
    refuses(nn.Sequential(*left), "rms", "no norm found in Sequential")


def test_select_takes_a_pattern_or_a_function() -> None:
    model = convert(build("llama"), "layer", select="input_layernorm$")
    assert sorted(ours(model)) == [f"model.layers.{i}.input_layernorm" for i in (0, 1)]
    model = convert(build("llama"), "layer", select=lambda name: name == "model.norm")
    assert ours(model) == ["model.norm"]
    refuses(build("llama"), "layer", "that `select` takes", select="ln_f")


def test_requests_that_make_no_sense() -> None:
    model = build("gpt2")
    refuses(model, "crms", "cannot convert to 'crms': choose one of layer, rms, prms, l2, scale, dyt, derf, none")
    refuses(model, "batch", "cannot convert to 'batch'")
    refuses(model, "dyt", "'eps'", eps=1e-6)
    refuses(model, "rms", "bias are kept", bias=False)
    refuses(model, "rms", "eps is a positive number", eps=0.0)


def test_a_norm_itself() -> None:
    new = convert(nn.LayerNorm(6, eps=0.1), "rms")
    assert isinstance(new, norms.RMSNorm) and new.eps == 0.1


def test_recognise() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

    assert recognise(nn.LayerNorm(6, eps=1e-3)) == KnownNorm("layer", 6, 1e-3, 0)
    assert recognise(nn.LayerNorm(6, elementwise_affine=False)) == KnownNorm("layer", 6, 1e-5, 0)
    assert recognise(nn.RMSNorm(6, eps=1e-2)) == KnownNorm("rms", 6, 1e-2, 0)
    assert recognise(GemmaRMSNorm(6)) == KnownNorm("rms", 6, 1e-6, 1)
    assert recognise(NemotronLayerNorm1P(6)) == KnownNorm("layer", 6, 1e-5, 1)
    assert recognise(norms.RMSNorm(6, bias=True)) == KnownNorm("rms", 6, 1e-6, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_torchs_eps_of_none_becomes_the_number_it_stands_for(dtype: torch.dtype) -> None:
    """pytorch#155527."""
    old = nn.RMSNorm(6, dtype=dtype)
    x = (1e-4 * torch.randn(3, 6, dtype=F64)).to(dtype)
    before = old(x)
    new = convert(old, "rms")
    assert new.eps == torch.finfo(F64 if dtype == F64 else torch.float32).eps
    assert off(new(x).double(), before.double()) <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("to", ["rms", "dyt", "none"])
def test_torchs_encoder_does_not_fall_back_on_its_own_layer_norm(to: str) -> None:
    """In evaluation its fused kernel reads the norms' parameters and never calls them."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    convert(model, to)
    assert len(ours(model)) == 4
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    slow = model.train()(x, src_key_padding_mask=padding)
    with torch.no_grad():
        fast = model.eval()(x, src_key_padding_mask=padding)
    assert off(fast[~padding], slow[~padding]) < 1e-5
