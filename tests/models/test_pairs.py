"""Pairs in living models of `transformers`: every family, against what its model computes and its symmetries count."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from cases import CASES, EQUAL, llama_like, rope
from drawn import gap
from oracle import Case, Tiny
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import gaugekit
from gaugekit.errors import UnsupportedArchitecture
from gaugekit.models import attention
from gaugekit.models.pairs import pairs
from gaugekit.optim.pairs import Pair, balance_, scramble_
from gaugekit.symmetry.heads import QueryKey, ValueOutput
from gaugekit.symmetry.units import ActivationScale, GatedUnitScale

ALL = ("vo", "qk", "lora", "units")

# PEFT asks transformers by a name that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def llama(note: str = "untied, one kv head") -> Tiny:
    tiny = Tiny(next(case for case in CASES if case.model_type == "llama" and case.note == note))
    tiny._load(tiny.theta)
    return tiny


@torch.no_grad()
def observed(tiny: Tiny) -> Tensor:
    return tiny._forward()


def dimension(pair: Pair) -> int:
    """Of the group that acts on the pair, over the real numbers."""
    sizes = [(a.shape[0], a.shape[1] ** 2 * (2 if a.is_complex() else 1)) for a, _ in pair.factors()]
    return sum(count * size for count, size in sizes)


def kind(pair: Pair) -> str:
    return pair.name.rpartition(".")[2]


# --- every family -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_family(case: Case) -> None:
    tiny = Tiny(case)
    tiny._load(tiny.theta)
    before = observed(tiny)
    found = pairs(tiny.model, ALL)
    assert len({pair.name for pair in found}) == len(found)
    counts: dict[int, Tensor] = {}
    for pair in found:
        for window in (*pair.a.windows, *pair.b.windows):
            p = window.parameter.detach()
            assert window.view(p).untyped_storage().data_ptr() == p.untyped_storage().data_ptr()
            window.view(counts.setdefault(id(window.parameter), torch.zeros_like(p))).add_(1)
    assert all(count.max() == 1 for count in counts.values())  # no entry belongs to two factors

    for pair in found:  # one factor alone
        elements = pair.sample(rng(1))
        ones = [torch.eye(s.shape[-1], dtype=s.dtype).expand_as(s) for s in elements]
        for alone in (zip(elements, ones, strict=True), zip(ones, elements, strict=True)):
            pair.move_by_(list(alone))
            assert gap(observed(tiny), before) > 1e-6, pair.name
            tiny._load(tiny.theta)

    scramble_(found, rng(2), condition=10)
    assert gap(observed(tiny), before) < 1e-9
    moved = [p for p in tiny.parameters if id(p) in counts]
    theta = dict(zip(map(id, tiny.parameters), tiny.theta.split([p.numel() for p in tiny.parameters]), strict=True))
    assert all(gap(p.detach().reshape(-1), theta[id(p)]) > 1e-6 for p in moved)
    balance_(found)
    assert gap(observed(tiny), before) < 1e-9
    for pair in found:
        for a, b in pair.factors():
            assert gap(torch.view_as_real(a @ a.mH) if a.is_complex() else a @ a.mT, real_gram(b)) < 1e-9


def real_gram(b: Tensor) -> Tensor:
    return torch.view_as_real(b @ b.mH) if b.is_complex() else b @ b.mT


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dimensions_are_those_of_the_symmetries(case: Case) -> None:
    """But for directions that act on nothing where a head is wider than what it reads: they are spared there."""
    tiny = Tiny(case)
    symmetries = tiny.symmetries.continuous
    found = pairs(tiny.model, ALL)
    for names, classes in ((("vo", "qk"), (ValueOutput, QueryKey)), (("units",), (GatedUnitScale, ActivationScale))):
        mine = [pair for pair in found if kind(pair) in names]
        theirs = [s for s in symmetries if isinstance(s, classes)]
        if names == ("units",):  # of gated ReLU units two scales act, of which the pairs hold one
            theirs = [s for s in theirs if not (isinstance(s, ActivationScale) and s.mlp.gate is not None)]
        spared = sum(s.attention.kv_heads * s.spare[0] * s.spare[1] for s in theirs if hasattr(s, "spare"))
        assert sum(map(dimension, mine)) == sum(s.dimension for s in theirs) + spared


def test_some_cases_spare_nothing() -> None:
    """So that the comparison above is of equal numbers somewhere."""
    plain = [s for s in llama().symmetries.continuous if isinstance(s, ValueOutput | QueryKey)]
    assert len(plain) == 4
    assert all(s.spare == (0, 0) for s in plain)


# --- rotary turns -----------------------------------------------------------------------------------------------


def longrope(*factors: float) -> dict[str, Any]:
    """Heads of four pairs, all of frequency one over their factor."""
    parameters = {"rope_type": "longrope", "rope_theta": 1.0, "original_max_position_embeddings": 8, "factor": 2.0}
    return {"head_dim": 8, "rope_parameters": parameters | {"long_factor": factors, "short_factor": factors}}


ZERO = {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("model_type", "config", "blocks"),
    [
        ("llama", {}, [(2, 1)]),
        ("llama", {"rope_parameters": EQUAL}, [(1, 2)]),
        ("llama", longrope(1.0, 1.0, 2.0, 2.0), [(2, 2)]),
        ("llama", longrope(1.0, 1.0, 1.0, 2.0), [(1, 1), (1, 3)]),
        ("phi3", {"num_key_value_heads": 2, **rope(0.5)}, [(2, 1), (2, 2)]),
        ("llama", {"head_dim": 8, "rope_parameters": ZERO}, [(2, 1), (1, 4)]),
    ],
    ids=["own", "equal", "two and two", "three and one", "partial", "zero frequencies"],
)
def test_rotary_blocks(model_type: str, config: dict[str, Any], blocks: list[tuple[int, int]]) -> None:
    """Complex blocks of one pair each, or of pairs that turn alike, and a real one of what stands still."""
    tiny = Tiny(Case(model_type, llama_like(num_hidden_layers=1) | config))
    tiny._load(tiny.theta)
    before = observed(tiny)
    (pair,) = pairs(tiny.model, ["qk"])
    assert [tuple(a.shape[:2]) for a, _ in pair.factors()] == blocks
    scramble_([pair], rng(), condition=10)
    assert gap(observed(tiny), before) < 1e-9
    scramble_([Pair(pair.name, pair.a, pair.b)], rng(), condition=10)  # all of GL(k), as if nothing turned
    assert gap(observed(tiny), before) > 1e-6


# --- what a model may be wrapped in, or hold ----------------------------------------------------------------------


def test_gaugekit_pairs_is_lazy() -> None:
    assert gaugekit.pairs is pairs
    code = "import sys, gaugekit.cli.main; assert 'torch' not in sys.modules; from gaugekit import pairs"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_modules_of_torch_are_found_beside() -> None:
    both = nn.ModuleDict({"text": llama().model, "other": nn.MultiheadAttention(4, 2)})
    names = [pair.name for pair in pairs(both)]
    assert names == [f"text.model.layers.{i}.self_attn.{kind}" for i in range(2) for kind in ("vo", "qk")] + [
        "other.vo",
        "other.qk",
    ]
    assert pairs(nn.Linear(3, 3)) == []


def test_two_models_in_one_module() -> None:
    both = nn.ModuleList([llama().model, llama().model])
    found = pairs(both)
    assert len(found) == len({pair.name for pair in found}) == 8


def test_wrapped_layers() -> None:
    tiny = llama()
    plain, before = pairs(tiny.model, ALL), observed(tiny)
    tiny.model.model.layers[0] = checkpoint_wrapper(tiny.model.model.layers[0])
    tiny.model.model.layers[1].mlp = torch.compile(tiny.model.model.layers[1].mlp, backend="eager")
    found = pairs(tiny.model, ALL)
    assert [pair.name for pair in found] == [pair.name for pair in plain]
    held = [{id(p) for p in pair.parameters} for pair in found]
    assert held == [{id(p) for p in pair.parameters} for pair in plain]
    scramble_(found, rng())
    assert gap(observed(tiny), before) < 1e-9


@pytest.mark.parametrize(
    "model",
    [
        transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**llama_like(), num_labels=3)),
        transformers.LlamaForTokenClassification(transformers.LlamaConfig(**llama_like(), num_labels=3)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_heads_of_other_tasks(model: Any) -> None:
    model = model.double().eval()
    tokens = torch.arange(6).expand(1, 6)
    found = pairs(model, ALL)
    assert len(found) == 6

    @torch.no_grad()
    def observe() -> Tensor:
        return torch.cat([x.flatten() for x in model(input_ids=tokens).to_tuple() if isinstance(x, Tensor)])

    before = observe()
    scramble_(found, rng())
    assert gap(observe(), before) < 1e-9


def test_the_text_part_of_a_model_with_images() -> None:
    text = llama_like(head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True)
    vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 9}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision | {"image_size": 8, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=10,
        boi_token_index=11,
        eoi_token_index=12,
    )
    for build, path in ((transformers.Gemma3ForConditionalGeneration, "model."), (transformers.Gemma3Model, "")):
        names = [pair.name for pair in pairs(build(config), ("vo", "units"))]
        layers = [f"{path}language_model.layers.{i}.{part}" for i in range(2) for part in ("self_attn.vo", "mlp.units")]
        assert names == [*layers, f"{path}vision_tower.head.attention.vo"]  # whose pooling is torch's own attention


def test_frozen_parts() -> None:
    model = llama().model
    model.requires_grad_(False)
    assert pairs(model, ALL) == []
    model.model.layers[1].self_attn.o_proj.weight.requires_grad_(True)
    assert [pair.name for pair in pairs(model, ALL)] == ["model.layers.1.self_attn.vo"]


def test_adapters_of_a_frozen_model() -> None:
    model = get_peft_model(llama().model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    assert {kind(pair) for pair in pairs(model, ALL)} == {"lora"}
    assert len(pairs(model)) == 4


def test_adapters_of_a_model_that_trains_too() -> None:
    """A head with an adapter is a sum of products, and left out; the others are found under their own names."""
    tiny = llama()
    model: Any = get_peft_model(tiny.model, LoraConfig(r=2, target_modules=r".*layers\.0\.self_attn\.q_proj"))
    model.double().eval().requires_grad_(True)
    for _, parameter in model.named_parameters():
        parameter.data.add_(0.1)
    at = "base_model.model.model.layers"
    assert [pair.name for pair in pairs(model)] == [
        f"{at}.0.self_attn.vo",
        f"{at}.1.self_attn.vo",
        f"{at}.1.self_attn.qk",
        f"{at}.0.self_attn.q_proj.default.lora",
    ]
    before = observed(tiny)
    scramble_(pairs(model), rng())
    assert gap(observed(tiny), before) < 1e-9


def test_trained_copies_and_other_tuners() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["o_proj", "lm_head"])
    model = get_peft_model(llama().model, config)
    assert {kind(pair) for pair in pairs(model)} == {"lora"}
    model.requires_grad_(True)
    assert {kind(pair) for pair in pairs(model)} == {"lora"}  # no head has all its own weights
    model = get_peft_model(llama().model, IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]))
    assert pairs(model, ALL) == []
    model.requires_grad_(True)
    assert {kind(pair) for pair in pairs(model, ALL)} == {"units"}


def test_attention_implementations() -> None:
    tiny = llama()
    for name in ("sdpa", "eager"):
        tiny.model.set_attn_implementation(name)
        assert {kind(pair) for pair in pairs(tiny.model)} == {"vo", "qk"}
    attention.register()
    tiny.model.set_attn_implementation("gaugekit_cosine")
    found, before = pairs(tiny.model), observed(tiny)
    assert {kind(pair) for pair in found} == {"vo"}
    scramble_(found, rng())
    assert gap(observed(tiny), before) < 1e-9
    tiny.model.config._attn_implementation = "my_own"
    with pytest.raises(UnsupportedArchitecture, match=r"attention implementation 'my_own' of LlamaForCausalLM is not"):
        pairs(tiny.model)


def t5() -> Any:
    sizes = {"d_model": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1, "d_ff": 8, "vocab_size": 11}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def test_unsupported_models_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"pairs of T5ForConditionalGeneration cannot .*'t5' is not supp"):
        pairs(t5())
    assert pairs(t5(), ["lora"]) == []
    assert pairs(t5().requires_grad_(False)) == []
    adapted = get_peft_model(t5(), LoraConfig(r=2, target_modules=["q", "v"]))
    assert len(pairs(adapted)) == 6
    model = llama().model
    model.config.value_residual = True
    with pytest.raises(UnsupportedArchitecture, match="value_residual=True"):
        pairs(model)


def test_models_that_were_rebuilt_are_refused_by_name() -> None:
    model = llama().model
    model.model.layers[0].self_attn.sink_norm = nn.LayerNorm(4)
    with pytest.raises(UnsupportedArchitecture, match=r"sink_norm\.weight is not part of llama"):
        pairs(model)
    model = llama().model
    model.model.layers[0].self_attn.v_proj = nn.Identity()
    with pytest.raises(UnsupportedArchitecture, match=r"LlamaForCausalLM is not llama .*v_proj.weight of llama is mis"):
        pairs(model)


def test_shared_layers_are_refused_by_name() -> None:
    model = llama().model
    model.model.layers[1].self_attn.v_proj.weight = model.model.layers[0].self_attn.v_proj.weight
    with pytest.raises((ValueError, UnsupportedArchitecture), match=r"layers\.\d\.self_attn\.v_proj\.weight"):
        pairs(model)


def test_kinds_are_checked() -> None:
    with pytest.raises(ValueError, match="kinds must be a collection of vo, qk, lora, units"):
        pairs(llama().model, ["ov"])


def test_a_copy_of_model_and_pairs_moves_the_copy_only() -> None:
    tiny = llama()
    before = observed(tiny)
    for copied in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        twin, found = copied((tiny.model, pairs(tiny.model, ALL)))
        assert {id(p) for pair in found for p in pair.parameters} <= {id(p) for p in twin.parameters()}
        scramble_(found, rng())
        assert torch.equal(observed(tiny), before)
        with torch.no_grad():
            logprobs = torch.log_softmax(twin(**tiny.batch).logits, -1).reshape(-1)
        assert gap(logprobs, before) < 1e-4  # the oracle's float64 norms aside
        pairs_of_twin = dict(zip([p.name for p in pairs(tiny.model, ALL)], found, strict=True))
        assert all(name == pair.name for name, pair in pairs_of_twin.items())
        assert not all(torch.equal(p, q) for p, q in zip(twin.parameters(), tiny.model.parameters(), strict=True))


def test_float32_stays_float32() -> None:
    tiny = llama()
    tiny.model.float()
    scramble_(pairs(tiny.model, ALL), rng())
    assert all(p.dtype == torch.float32 for p in tiny.model.parameters())
