"""Models of transformers on relational scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    WhisperConfig,
    WhisperModel,
)

from gaugekit.models.attention import register
from gaugekit.nn.scores import LearnedScore

VOCABULARY = 31


@pytest.fixture(scope="module", autouse=True)
def registered():
    names = register()
    assert names == ("gaugekit_dot", "gaugekit_cosine", "gaugekit_rbf")
    assert register() == names  # once more is no harm
    return names


def randomized(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


def llama() -> nn.Module:
    """Four query heads on two key/value heads."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    return randomized(LlamaForCausalLM(config))


def bert(**fields) -> nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        **fields,
    )
    return randomized(BertModel(config))


def tokens(length: int = 9, batch: int = 3) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))


def padded(left: bool) -> Tensor:
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, slice(0, 4) if left else slice(5, None)] = 0
    mask[1, slice(0, 1) if left else slice(8, None)] = 0
    return mask


@torch.no_grad()
def states(model: nn.Module, implementation: str, **inputs) -> Tensor:
    model.set_attn_implementation(implementation)
    return model(**inputs)[0]


@pytest.mark.parametrize("make", [llama, bert])
@pytest.mark.parametrize("mask", ["none", "left", "right"])
def test_dot_is_what_the_model_does(make, mask):
    model, inputs = make(), {"input_ids": tokens()}
    seen = torch.ones(3, 9, dtype=torch.bool)
    if mask != "none":
        inputs["attention_mask"] = padded(mask == "left")
        seen = inputs["attention_mask"].bool()
    ours, sdpa = (states(model, name, **inputs)[seen] for name in ("gaugekit_dot", "sdpa"))
    torch.testing.assert_close(ours, sdpa, rtol=1e-11, atol=1e-11)
    if (
        mask != "left"
    ):  # whose blind queries are NaN in eager float64, for it masks by a number that float32 cannot hold
        eager = states(model, "eager", **inputs)[seen]
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)  # llama's softmax is float32 there


@pytest.mark.parametrize("make", [llama, bert])
@pytest.mark.parametrize("name", ["gaugekit_rbf", "gaugekit_cosine"])
def test_other_scores_are_others_and_respect_masks(make, name):
    """A padded sequence's tokens come out as if it stood alone, the causal one from its own beginning."""
    model, ids = make(), tokens()
    assert (states(model, name, input_ids=ids) - states(model, "sdpa", input_ids=ids)).abs().max() > 1e-2
    alone = states(model, name, input_ids=ids[:1, :5])
    batch = states(model, name, input_ids=ids, attention_mask=padded(False))
    torch.testing.assert_close(batch[:1, :5], alone, rtol=1e-10, atol=1e-10)
    if make is llama:
        positions = (padded(True).cumsum(-1) - 1).clamp_min(0)
        late = states(model, name, input_ids=ids, attention_mask=padded(True), position_ids=positions)
        torch.testing.assert_close(late[0, 4:], states(model, name, input_ids=ids[:1, 4:])[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["gaugekit_dot", "gaugekit_rbf", "gaugekit_cosine"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache_equals_generation_without(name, cache):
    model, ids, mask = llama(), tokens(), padded(True)
    model.set_attn_implementation(name)
    keywords = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    plain = model.generate(ids, use_cache=False, **keywords)
    cached = model.generate(ids, cache_implementation=None if cache == "dynamic" else "static", **keywords)
    assert plain.shape == (3, 15)
    assert torch.equal(plain, cached)
    model.set_attn_implementation("sdpa")
    assert torch.equal(plain, model.generate(ids, **keywords)) == (name == "gaugekit_dot")


def whisper() -> nn.Module:
    layers = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    widths = {"d_model": 16, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "num_mel_bins": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": 12, "max_target_positions": 20, "vocab_size": VOCABULARY}
    return randomized(WhisperModel(WhisperConfig(**layers, **widths, **ends, **lengths)))


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["dot", "rbf", "cosine"])
def test_cross_attention_sees_everything_at_every_step(name):
    """12 frames for 9 tokens: neither causal nor cut, at once as one token at a time."""
    model, ids = whisper(), tokens()
    sound = torch.randn(3, 4, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    at_once = states(model, f"gaugekit_{name}", input_features=sound, decoder_input_ids=ids)
    encoded, cache, steps = model.encoder(sound), None, []
    for i in range(ids.shape[1]):
        out = model(encoder_outputs=encoded, decoder_input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.last_hidden_state)
    torch.testing.assert_close(torch.cat(steps, 1), at_once, rtol=1e-10, atol=1e-10)
    late = torch.cat([sound[..., :-2], sound[..., -2:] + 1], -1)  # the last frame reaches the first token
    moved = states(model, f"gaugekit_{name}", input_features=late, decoder_input_ids=ids)
    assert (moved - at_once)[:, 0].abs().max() > 1e-4
    sdpa = states(model, "sdpa", input_features=sound, decoder_input_ids=ids)
    assert ((at_once - sdpa).abs().max() < 1e-10) == (name == "dot")


def test_training_goes_through():
    """Gradients as of sdpa."""
    model, ids = llama(), tokens()
    gradients = []
    for name in ("gaugekit_dot", "sdpa"):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(input_ids=ids, labels=ids, attention_mask=padded(False)).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for n, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][n], rtol=1e-8, atol=1e-10)


def call(name: str, scaling: float | None, heads: int = 4, groups: int = 2, **keywords):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, 5, 6), (2, groups, 7, 6), (2, groups, 7, 3))
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    module = nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    out, weights = AttentionInterface()[name](module, q, k, v, None, scaling=scaling, **keywords)
    assert weights is None
    k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    return out.transpose(1, 2), q, k, v


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_temperatures_follow_the_scaling(scaling):
    c = 1 / math.sqrt(6) if scaling is None else scaling
    out, q, k, v = call("gaugekit_rbf", scaling)
    torch.testing.assert_close(out, (-c / 2 * torch.cdist(q, k) ** 2).softmax(-1) @ v)
    out, q, k, v = call("gaugekit_cosine", scaling)
    cosine = torch.nn.functional.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
    torch.testing.assert_close(out, (c * 6 * cosine).softmax(-1) @ v)


def test_keys_beyond_the_queries_are_an_empty_cache():
    """What a static cache gives at first, without a mask: 7 places for 5 tokens."""
    out, q, k, v = call("gaugekit_dot", None, is_causal=True)
    torch.testing.assert_close(
        out, torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5], is_causal=True)
    )


def test_a_score_of_your_own():
    score = LearnedScore(4).double()
    name, other = register(mine=score, twice=lambda g, ii, jj, head: 2 * g)
    try:
        model, ids = llama(), tokens()
        torch.testing.assert_close(
            states(model, name, input_ids=ids), states(model, "sdpa", input_ids=ids), rtol=1e-9, atol=1e-9
        )
        score.units.data.add_(0.1 * torch.randn(score.units.shape, generator=torch.Generator().manual_seed(0)))
        assert (states(model, name, input_ids=ids) - states(model, "sdpa", input_ids=ids)).abs().max() > 1e-3
        out, q, k, v = call(other, 0.3)
        torch.testing.assert_close(out, (0.6 * q @ k.mT).softmax(-1) @ v)
        assert register(mine=score) == (name,)
        with pytest.raises(ValueError, match="registered already"):
            register(mine="rbf")
    finally:
        for registered_name in (name, other):
            AttentionInterface._global_mapping.pop(registered_name)
    with pytest.raises(ValueError, match="unknown score"):
        register(mine="euclid")


def test_what_cannot_be_done_is_refused_by_name():
    model = bert().train()
    model.set_attn_implementation("gaugekit_rbf")
    with pytest.raises(ValueError, match="no dropout"):
        model(input_ids=tokens())
    model = bert(attention_probs_dropout_prob=0.0).train()
    model.set_attn_implementation("gaugekit_rbf")
    assert model(input_ids=tokens())[0].isfinite().all()
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "head_dim": 4,
        "vocab_size": VOCABULARY,
    }
    gemma = Gemma2ForCausalLM(Gemma2Config(num_attention_heads=4, num_key_value_heads=2, **sizes))
    gemma.set_attn_implementation("gaugekit_rbf")
    with pytest.raises(ValueError, match="no softcap"):
        gemma(input_ids=tokens())
    for name in ("s_aux", "position_bias"):
        with pytest.raises(ValueError, match=name):
            call("gaugekit_dot", None, **{name: torch.zeros(1)})
    with pytest.raises(ValueError, match="output_attentions"):
        call("gaugekit_dot", None, output_attentions=True)
    call("gaugekit_dot", None, output_attentions=False, softcap=None, sliding_window=3)  # the mask has the window
