"""Pairs in torch's own attention, in bilinear scores and in PEFT's adapters: found where they are, and nowhere else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from cases import gpt_like, llama_like
from drawn import gap, normal
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gaugekit.nn.invariant import InvariantAttention
from gaugekit.nn.scores import Bilinear
from gaugekit.optim.finding import find_pairs
from gaugekit.optim.pairs import Pair, scramble_

# PEFT asks transformers by a name that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def drawn(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in float64 and evaluation, with random parameters, none of them zero."""
    model.double().eval()
    generator = rng(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        scale = 0.3 if parameter.ndim < 2 else (parameter.numel() / len(parameter)) ** -0.5
        parameter.copy_(scale * values + (1.0 if "norm" in name or "magnitude" in name else 0.0))
    return model


@torch.no_grad()
def assert_free(model: nn.Module, pairs: list[Pair], observe: Callable[[], Tensor]) -> None:
    """The group of the pairs moves parameters and not what is observed; one factor alone moves it."""
    before = observe()
    for pair in pairs:
        elements = pair.sample(rng(1))
        ones = [torch.eye(s.shape[-1], dtype=s.dtype).expand_as(s) for s in elements]
        for alone in (zip(elements, ones, strict=True), zip(ones, elements, strict=True)):
            state = copy.deepcopy(model.state_dict())
            pair.move_by_(list(alone))
            assert gap(observe(), before) > 1e-6, pair.name
            model.load_state_dict(state)
        assert gap(observe(), before) == 0
    old = {name: p.clone() for name, p in model.named_parameters()}
    scramble_(pairs, rng(2), condition=10)
    assert gap(observe(), before) < 1e-9
    touched = {id(p) for pair in pairs for p in pair.parameters}
    for name, p in model.named_parameters():  # PEFT adds to its base's weights and takes off again, to rounding
        assert (gap(p, old[name]) < 1e-12) == (id(p) not in touched)


def assert_windows(pairs: list[Pair]) -> None:
    """Every window shares its parameter's memory, and no entry belongs to two."""
    counts: dict[int, Tensor] = {}
    for pair in pairs:
        for window in (*pair.a.windows, *pair.b.windows):
            p = window.parameter.detach()
            assert window.view(p).untyped_storage().data_ptr() == p.untyped_storage().data_ptr()
            window.view(counts.setdefault(id(window.parameter), torch.zeros_like(p))).add_(1)
    assert all(count.max() == 1 for count in counts.values())


# --- nn.MultiheadAttention ------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "other widths of keys and values": {"kdim": 5, "vdim": 7},
    "other width of values, no bias": {"vdim": 7, "bias": False},
    "bias_k and bias_v": {"add_bias_kv": True},
    "bias_k and bias_v alone": {"add_bias_kv": True, "bias": False, "kdim": 5},
    "a zero key": {"add_zero_attn": True},
    "everything": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 5, "vdim": 7, "batch_first": True},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("heads", [1, 3])
def test_multihead_attention(options: dict[str, Any], heads: int) -> None:
    model = drawn(nn.MultiheadAttention(6, heads, **options))
    x, y, z = (
        normal(4, 2, 6),
        normal(4, 2, options.get("kdim", 6), seed=1),
        normal(4, 2, options.get("vdim", 6), seed=2),
    )

    def observe() -> Tensor:
        out, weights = model(x, y, z, average_attn_weights=False)
        return torch.cat([out.flatten(), weights.flatten()])

    pairs = find_pairs(model)
    assert [pair.name for pair in pairs] == ["vo", "qk"]
    bias, extra = options.get("bias", True), options.get("add_bias_kv", False)
    vo, qk = pairs
    assert vo.a.shape == (heads, 6 // heads, options.get("vdim", 6) + bias + extra)
    assert vo.b.shape == (heads, 6 // heads, 6)
    assert qk.a.shape == (heads, 6 // heads, 6 + bias)
    assert qk.b.shape == (heads, 6 // heads, options.get("kdim", 6) + bias + extra)
    assert_windows(pairs)
    assert_free(model, pairs, observe)


def test_attention_inside_a_transformer() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    model = drawn(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = normal(3, 4, 6)
    pairs = find_pairs(model)
    assert [p.name for p in pairs] == [f"layers.{i}.self_attn.{kind}" for i in range(2) for kind in ("vo", "qk")]
    assert [p.name for p in find_pairs(model, ["qk"])] == ["layers.0.self_attn.qk", "layers.1.self_attn.qk"]
    assert_free(model, pairs, lambda: model(x))


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Overridden(nn.MultiheadAttention):
    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(query.relu(), *args, **kwargs)


class Through(nn.Module):
    """What an adapter does to a layer: its weight is seen, and is not all there is."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias


def test_attention_that_is_not_the_plain_one_is_left_out() -> None:
    assert find_pairs(Overridden(6, 2)) == []
    for name in ("in_proj_weight", "in_proj_bias"):
        changed = nn.MultiheadAttention(6, 2)
        parametrize.register_parametrization(changed, name, Scaled())
        assert find_pairs(changed) == []
    changed = nn.MultiheadAttention(6, 2)
    parametrize.register_parametrization(changed.out_proj, "weight", Scaled())
    assert find_pairs(changed) == []
    changed = nn.MultiheadAttention(6, 2)
    changed.out_proj = Through(changed.out_proj)  # type: ignore[assignment]
    assert find_pairs(changed) == []


# --- gaugekit's own layers, and what has no pairs ---------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3)])
def test_bilinear_scores(shape: tuple[int, ...]) -> None:
    score = Bilinear(nn.Parameter(normal(*shape)), nn.Parameter(normal(*shape, seed=1)))
    x, y = normal(4, 2, 6, 5, seed=2), normal(4, 2, 7, 5, seed=3)

    def observe() -> Tensor:
        query, key, scale = score.factors(x, y, 1.0)
        return scale * query @ key.mT

    pairs = find_pairs(score)
    assert [pair.name for pair in pairs] == ["qk"]
    a, b = pairs[0].factors()[0]
    assert score.right is not None
    assert gap(b.mT @ a, (score.left @ score.right.mT).detach()) < 1e-14
    assert_windows(pairs)
    assert_free(score, pairs, observe)


def test_bilinear_scores_that_are_no_pair() -> None:
    left, right = nn.Parameter(normal(5, 3)), nn.Parameter(normal(5, 3))
    assert find_pairs(Bilinear(left, right, symmetric=True)) == []
    assert find_pairs(Bilinear(left, right.detach())) == []
    assert find_pairs(Bilinear(nn.Parameter(normal(5, 5)))) == []


def test_what_has_no_such_redundancy() -> None:
    assert find_pairs(InvariantAttention(8, 2)) == []
    assert find_pairs(nn.Sequential(nn.Linear(8, 3, bias=False), nn.Linear(3, 8))) == []  # is not guessed
    assert find_pairs(nn.Identity()) == []


# --- PEFT -------------------------------------------------------------------------------------------------------


def llama(**extra: Any) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_like(**extra)))
    return model.float()


def ids(vocabulary: int = 13) -> Tensor:
    return torch.stack([torch.randperm(vocabulary, generator=rng(i))[:6] for i in range(4)])


def adapted(base: nn.Module, **options: Any) -> Any:
    options = {"r": 3, "target_modules": ["q_proj", "v_proj", "down_proj"]} | options
    return drawn(get_peft_model(base, LoraConfig(**options)))


ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rsLoRA": {"use_rslora": True, "lora_alpha": 16},
    "dropout": {"lora_dropout": 0.5},
    "DoRA": {"use_dora": True},
    "rank as wide as the layer": {"r": 8},
    "MiCA": {"init_lora_weights": "mica"},
    "embedding": {"target_modules": ["embed_tokens", "lm_head"]},
    "embedding with DoRA": {"target_modules": ["embed_tokens"], "use_dora": True},
    "embedding with MiCA": {"target_modules": ["embed_tokens"], "init_lora_weights": "mica"},
    "trained base biases": {"bias": "lora_only"},
    "one weight by name": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
}


@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_of_a_language_model(options: dict[str, Any]) -> None:
    model = adapted(llama(), **options)
    tokens = ids()
    pairs = find_pairs(model)
    rank = options.get("r", 3)
    assert pairs
    assert all(pair.name.endswith(".default.lora") for pair in pairs)
    assert all(pair.a.shape[:2] == (1, rank) for pair in pairs)
    assert len({pair.name for pair in pairs}) == len(pairs)
    held = {id(p) for pair in pairs for p in pair.parameters}
    factors = {id(p) for name, p in model.named_parameters() if "lora_" in name and "magnitude" not in name}
    assert held == factors  # DoRA's magnitudes are not in them
    assert_windows(pairs)
    assert_free(model, pairs, lambda: model(input_ids=tokens).logits)


def test_names_of_adapters() -> None:
    model = adapted(llama(num_hidden_layers=1), target_modules=["q_proj"])
    assert [p.name for p in find_pairs(model)] == ["base_model.model.model.layers.0.self_attn.q_proj.default.lora"]


def test_the_bias_of_lora_b_stands_behind_the_product() -> None:
    model = adapted(llama(attention_bias=True, mlp_bias=True), lora_bias=True)
    pairs = find_pairs(model)
    biases = [p for name, p in model.named_parameters() if name.endswith("lora_B.default.bias")]
    assert len(biases) == len(pairs) == 6
    assert not {id(p) for p in biases} & {id(p) for pair in pairs for p in pair.parameters}
    assert_free(model, pairs, lambda: model(input_ids=ids()).logits)


def test_activated_adapters() -> None:
    model = adapted(llama(), alora_invocation_tokens=[2, 3], task_type="CAUSAL_LM")
    tokens = torch.tensor([[5, 1, 2, 3, 4, 7], [2, 3, 1, 0, 5, 4]])
    pairs = find_pairs(model)
    assert len(pairs) == 6
    assert_free(model, pairs, lambda: model(input_ids=tokens).logits)


def test_compressed_activations_turn_along() -> None:
    """VeLoRA compresses what lora_A reads in the backward pass only: its gradients turn as those of plain LoRA do."""
    model = adapted(llama(num_hidden_layers=1), velora_config=peft.VeloraConfig(num_groups=2), r=2)
    model.train()
    pairs = find_pairs(model)
    assert len(pairs) == 3

    def gradients() -> list[tuple[Tensor, Tensor]]:
        model.zero_grad()
        torch.manual_seed(0)
        model(input_ids=ids(), labels=ids()).loss.backward()
        return [pair.factors(lambda p: p.grad)[0] for pair in pairs]

    gradients()  # the projection is made in the first pass
    before = gradients()
    elements = [pair.sample(rng(3)) for pair in pairs]
    for pair, element in zip(pairs, elements, strict=True):
        pair.move_(element)
    for (a, b), (old_a, old_b), (s,) in zip(gradients(), before, elements, strict=True):
        assert gap(s.mT @ a, old_a) < 1e-9 < gap(a, old_a)
        assert gap(torch.linalg.solve(s, b), old_b) < 1e-9 < gap(b, old_b)


def test_several_adapters() -> None:
    model = get_peft_model(llama(), LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    drawn(model)
    assert all(pair.name.endswith(".default.lora") for pair in find_pairs(model))  # the other one does not train yet
    model.base_model.set_adapter(["default", "other"])
    pairs = find_pairs(model)
    assert sorted({pair.name.split(".")[-2] for pair in pairs}) == ["default", "other"]
    assert len(pairs) == len({pair.name for pair in pairs}) == 8
    assert_free(model, pairs, lambda: model(input_ids=ids()).logits)


def test_transposed_layers() -> None:
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt_like(n_layer=1)))
    for dora in (False, True):
        model = adapted(copy.deepcopy(base), target_modules=["c_attn"], fan_in_fan_out=True, use_dora=dora)
        pairs = find_pairs(model)
        assert [pair.b.shape for pair in pairs] == [(1, 3, 24)]
        assert_free(model, pairs, lambda model=model: model(input_ids=ids()).logits)


def test_experts_in_one_tensor() -> None:
    torch.manual_seed(0)
    options = llama_like(num_local_experts=3, num_experts_per_tok=2, num_hidden_layers=1)
    config = transformers.MixtralConfig(**options)
    config._experts_implementation = "eager"
    base = transformers.MixtralForCausalLM(config)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = adapted(base, target_modules=[], target_parameters=parameters, r=2)
    pairs = find_pairs(model)
    assert sorted((pair.a.shape, pair.b.shape) for pair in pairs) == [((3, 2, 8), (3, 2, 18)), ((3, 2, 9), (3, 2, 8))]
    assert len({pair.name for pair in pairs}) == 2
    assert_windows(pairs)
    assert_free(model, pairs, lambda: model(input_ids=ids()).logits)


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    "2d": (nn.Conv2d(4, 6, (3, 2), padding=1), (2, 4, 5, 5)),
    "2d, one by one": (nn.Conv2d(4, 6, 1), (2, 4, 3, 3)),
    "3d": (nn.Conv3d(4, 6, 2), (2, 4, 3, 3, 3)),
    "2d in groups": (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 5)),
}


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups")
@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("dora", [False, True])
def test_convolutions(layer: Any, shape: tuple[int, ...], dora: bool) -> None:
    base = nn.Sequential(copy.deepcopy(layer), nn.Tanh())
    if dora and layer.groups > 1:
        model = adapted(base, target_modules=["0"], r=4, use_dora=True)
        with pytest.raises(ValueError, match=r"model\.0\.default\.lora is no plain product: DoRA takes norms"):
            find_pairs(model)
        return
    model = adapted(base, target_modules=["0"], r=4, use_dora=dora, lora_bias=not dora)
    pairs = find_pairs(model)
    groups = layer.groups
    assert [(p.a.shape[:2], p.b.shape) for p in pairs] == [((groups, 4 // groups), (groups, 4 // groups, 6 // groups))]
    x = normal(*shape)
    assert_windows(pairs)
    assert_free(model, pairs, lambda: model(x))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def test_adapters_of_multihead_attention() -> None:
    model = adapted(Attends(), target_modules=["attention"])
    pairs = find_pairs(model)
    assert [pair.name for pair in pairs] == [
        "base_model.model.attention.default.lora",
        "base_model.model.attention.base_layer.out_proj.default.lora",
    ]
    x = normal(4, 2, 6)
    assert_free(model, pairs, lambda: model(x))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    assert len(find_pairs(model)) == 2  # heads with adapters are no products of two factors


REFUSED: dict[str, dict[str, Any]] = {
    "KasaLinearVariant": {"kasa_config": peft.KasaConfig()},
    "MontecloraLinearVariant": {"monteclora_config": peft.MontecloraConfig()},
    "BdLoraLinearVariant": {"use_bdlora": peft.tuners.lora.BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2)},
}


@pytest.mark.parametrize("variant", REFUSED)
def test_variants_that_are_no_plain_product_are_refused_by_name(variant: str) -> None:
    model = adapted(llama(), target_modules=["q_proj"], r=2, **REFUSED[variant])
    with pytest.raises(ValueError, match=rf"q_proj\.default\.lora is no plain product of its factors, but a {variant}"):
        find_pairs(model)
    assert find_pairs(model, ["vo", "qk"]) == []
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert find_pairs(model) == []  # nothing there trains


def test_layers_that_are_no_plain_product_are_refused() -> None:
    torch.manual_seed(0)
    model = adapted(nn.Sequential(nn.Embedding(5, 4, max_norm=1.0)), target_modules=["0"])
    with pytest.raises(ValueError, match=r"0\.default\.lora is no plain product: max_norm"):
        find_pairs(model)
    model = adapted(llama(num_hidden_layers=1), target_modules=["q_proj"])
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    parametrize.register_parametrization(layer.lora_A["default"], "weight", Scaled())
    with pytest.raises(ValueError, match=r"q_proj\.default\.lora is no plain product: a bias or another parametriz"):
        find_pairs(model)
    layer.lora_A["default"] = nn.Sequential(nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"no plain product: its layers are Sequential and Linear"):
        find_pairs(model)


@pytest.mark.parametrize(
    "config",
    [
        peft.VeraConfig(target_modules=["q_proj", "o_proj"], r=2),
        peft.LoHaConfig(target_modules=["q_proj", "o_proj"], r=2),
        peft.LoKrConfig(target_modules=["q_proj", "o_proj"], r=2),
        peft.AdaLoraConfig(target_modules=["q_proj", "o_proj"], total_step=10),
        peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_tuners_have_no_such_pairs(config: Any) -> None:
    assert find_pairs(get_peft_model(llama(), config)) == []


# --- whatever is found ------------------------------------------------------------------------------------------


def test_frozen_parts() -> None:
    model = adapted(llama(num_hidden_layers=1), target_modules=["q_proj"])
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_A["default"].weight.requires_grad_(False)
    assert len(find_pairs(model)) == 1  # B trains
    layer.lora_B["default"].weight.requires_grad_(False)
    assert find_pairs(model) == []
    attention = nn.MultiheadAttention(6, 2).requires_grad_(False)
    assert find_pairs(attention) == []
    attention.out_proj.weight.requires_grad_(True)
    assert [pair.name for pair in find_pairs(attention)] == ["vo"]


def test_shared_parameters_are_refused_by_name() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(6, 2), nn.MultiheadAttention(6, 2)])
    model[1].out_proj.weight = model[0].out_proj.weight  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"0\.vo is no pair by itself: 0\.out_proj\.weight is shared with 1\.out_pro"):
        find_pairs(model)
    assert [pair.name for pair in find_pairs(model, ["qk"])] == ["0.qk", "1.qk"]


def test_a_layer_that_is_used_twice_is_one() -> None:
    layer = nn.MultiheadAttention(6, 2)
    assert [pair.name for pair in find_pairs(nn.ModuleList([layer, layer]))] == ["0.vo", "0.qk"]


def test_tied_adapters_are_refused_by_name() -> None:
    """PEFT ties the adapters of embedding and head as two parameters in one memory."""
    base = llama(tie_word_embeddings=True)
    model = get_peft_model(base, LoraConfig(r=3, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True))
    with pytest.raises(ValueError, match=r"lora is no pair by itself: \S+ is shared with \S+"):
        find_pairs(model)


def test_kinds_are_checked() -> None:
    with pytest.raises(ValueError, match=r"kinds must be a collection of vo, qk, lora, units, got \['ov'\]"):
        find_pairs(nn.Identity(), ["ov"])
    with pytest.raises(ValueError, match="got 'vo'"):
        find_pairs(nn.Identity(), "vo")


def test_a_copy_of_model_and_pairs_moves_the_copy_only() -> None:
    model = adapted(nn.Sequential(Attends(), nn.Linear(6, 6)), target_modules=["1"])
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    x = normal(4, 2, 6)
    for copied in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        twin, pairs = copied((model, find_pairs(model)))
        assert [pair.name for pair in pairs] == [pair.name for pair in find_pairs(model)]
        assert {id(p) for pair in pairs for p in pair.parameters} <= {id(p) for p in twin.parameters()}
        old = [p.clone() for p in model.parameters()]
        with torch.no_grad():
            before = twin(x)
            scramble_(pairs, rng())
            assert gap(twin(x), before) < 1e-9
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), old, strict=True))
        assert not all(torch.equal(p, q) for p, q in zip(twin.parameters(), old, strict=True))
