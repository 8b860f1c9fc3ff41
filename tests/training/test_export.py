"""Exports of decoders: whatever they are made of, what `from_pretrained` gives computes the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from drawn import gap
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from two import environment_of_members

import gaugekit
from gaugekit.errors import CheckpointError, ConfigError, UnsupportedArchitecture
from gaugekit.training.config import ModelConfig
from gaugekit.training.decoder import Decoder
from gaugekit.training.export import export
from gaugekit.training.hf import GaugekitConfig, GaugekitForCausalLM
from gaugekit.training.tokenizers import byte_tokenizer
from gaugekit.verbs.running import Float64

OWN = "GaugekitForCausalLM"
SIZES: dict[str, Any] = {"vocab": 37, "context": 9, "width": 16, "layers": 2, "heads": 4, "hidden": 20}
ROTARY: dict[str, Any] = {"positions": "rotary", "rotary_base": 500.0}
GATED: dict[str, Any] = ROTARY | {"mlp": "swiglu"}
RELATIONAL: dict[str, Any] = {"attention": "relational"}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"bias": True}),
    "gpt2 tied": ("GPT2LMHeadModel", {"tied": True, "norm_options": {"eps": 0.1, "bias": False}}),
    "gpt2 relu": ("GPT2LMHeadModel", {"mlp": "relu", "norm_options": {"eps": 0.1}}),
    "gpt2 bare": ("GPT2LMHeadModel", {"norm_options": {"elementwise_affine": False}}),
    "opt": ("OPTForCausalLM", {"mlp": "relu"}),
    "opt tied": ("OPTForCausalLM", {"mlp": "relu", "bias": True, "tied": True}),
    "neox": ("GPTNeoXForCausalLM", ROTARY | {"bias": True, "norm_options": {"eps": 0.1}}),
    "neox relu": ("GPTNeoXForCausalLM", ROTARY | {"mlp": "relu", "kv_heads": 4}),
    "neox tied": ("GPTNeoXForCausalLM", ROTARY | {"tied": True}),
    "starcoder2": ("Starcoder2ForCausalLM", ROTARY | {"kv_heads": 2, "norm_options": {"eps": 0.1}}),
    "starcoder2 relu": ("Starcoder2ForCausalLM", ROTARY | {"kv_heads": 1, "mlp": "relu", "bias": True, "tied": True}),
    "stablelm": ("StableLmForCausalLM", GATED | {"kv_heads": 2, "norm_options": {"eps": 0.1}}),
    "stablelm tied": ("StableLmForCausalLM", GATED | {"tied": True}),
    "llama": ("LlamaForCausalLM", GATED | {"norm": "rms", "norm_options": {"eps": 0.1}}),
    "llama shared": ("LlamaForCausalLM", GATED | {"norm": "rms", "kv_heads": 2, "bias": True, "tied": True}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt post": ("OPTForCausalLM", {"placement": "post", "bias": True}),  # which `inspect` does not describe
    "gpt2 shared": (OWN, {"kv_heads": 2, "bias": True}),
    "gpt2 robust": (OWN, {"norm_options": {"robust": True}}),
    "gpt2 gated": (OWN, {"mlp": "swiglu"}),
    "stablelm biased": (OWN, GATED | {"bias": True}),
    "llama biased norm": (OWN, GATED | {"norm": "rms", "norm_options": {"bias": True}}),
    "llama peri": (OWN, GATED | {"norm": "rms", "placement": "peri", "tied": True}),
    "llama post": (OWN, GATED | {"norm": "rms", "placement": "post"}),
    "post other eps": (OWN, {"placement": "post", "norm_options": {"eps": 0.1}}),
    "dot": (OWN, RELATIONAL | {"values": "plain"}),
    "cosine": (OWN, RELATIONAL | {"score": "cosine", "frame": "full", "values": "plain", "placement": "sandwich"}),
    "rbf": (OWN, RELATIONAL | {"score": "rbf", "norm": "rms", "tied": True}),
    "bilinear": (OWN, RELATIONAL | {"score": "bilinear", "frame": "full"}),
    "learned": (OWN, RELATIONAL | {"score": "learned", "positions": "none", "norm": "none"}),
    "invariant": (OWN, {"attention": "invariant", "bias": True, "kv_heads": 2}),
    "sphere": (OWN, GATED | {"residual": "sphere", "norm": "none", "kv_heads": 2}),
    "sphere normed": (OWN, RELATIONAL | {"residual": "sphere", "norm": "layer", "placement": "peri"}),
    "scale": (OWN, {"norm": "scale", "placement": "sandwich"}),
    "dyt": (OWN, {"norm": "dyt", "placement": "peri"}),
    "derf": (OWN, {"norm": "derf", "norm_options": {"alpha": 0.7}}),
    "crms": (OWN, {"norm": "crms", "norm_options": {"bias": True}}),
    "prms": (OWN, ROTARY | {"norm": "prms", "norm_options": {"p": 0.4}}),
    "l2": (OWN, {"norm": "l2", "norm_options": {"radius": 3.0}}),
}
CASES = FAMILIES | OTHERS


def decoder(dtype: torch.dtype = torch.float64, **keys: Any) -> Decoder:
    """With every parameter drawn at random."""
    torch.manual_seed(3)  # pivots of invariant attention
    model = Decoder(ModelConfig(**SIZES | keys)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, part in model.named_parameters():
            start = 1.0 if "norm" in name and name.endswith(("weight", "alpha")) else 0.0
            part.copy_(start + 0.3 * torch.randn(part.shape, generator=generator, dtype=torch.float64))
    return model.to(dtype)


def tokens(rows: int = 2, length: int = 9) -> Tensor:
    return torch.randint(SIZES["vocab"], (rows, length), generator=torch.Generator().manual_seed(2))


def reloaded(folder: Path) -> Any:
    """In float64 all along where that is the model's dtype: several classes turn positions in float32."""
    with Float64():
        model = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval()


@torch.no_grad()
def logits(model: Any, x: Tensor) -> Tensor:
    if isinstance(model, Decoder):
        return model(x)
    if model.dtype != torch.float64:
        return model(input_ids=x).logits
    with Float64():
        return model(input_ids=x).logits


@pytest.mark.parametrize("case", CASES)
def test_what_is_reloaded_computes_the_same(case: str, tmp_path: Path) -> None:
    kind, keys = CASES[case]
    model, x = decoder(**keys), tokens()
    assert export(model, tmp_path / "out") == kind
    other = reloaded(tmp_path / "out")
    assert type(other).__name__ == kind
    assert {part.dtype for part in other.parameters()} == {torch.float64}
    found = logits(other, x)
    assert gap(found, logits(model, x)) < 1e-10

    # All of the decoder's parameters are seen by this, but key biases, to which softmax is blind.
    for name, part in model.named_parameters():
        if not name.endswith("key.bias"):
            kept = part.detach().clone()
            with torch.no_grad():
                part += 0.1 * torch.randn(part.shape, generator=torch.Generator().manual_seed(5))
            assert gap(found, logits(model, x)) > 1e-6, name
            with torch.no_grad():
                part.copy_(kept)


@pytest.mark.parametrize("case", ["gpt2", "opt", "neox", "starcoder2", "stablelm", "llama shared", "learned", "sphere"])
def test_float32_stays_float32(case: str, tmp_path: Path) -> None:
    kind, keys = CASES[case]
    model, x = decoder(torch.float32, **keys), tokens()
    assert export(model, tmp_path / "out") == kind
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {part.dtype for part in other.parameters()} == {torch.float32}
    assert gap(logits(other, x), logits(model, x)) < 1e-5


@pytest.mark.parametrize("case", ["llama", "dyt"])
def test_each_parameter_keeps_its_dtype_on_disk(case: str, tmp_path: Path) -> None:
    model = decoder(torch.bfloat16, **CASES[case][1])
    for name, part in model.named_modules():
        if "norm" in name:
            part.float()
    export(model, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
    assert {tensor.dtype for name, tensor in found.items() if "norm" in name} == {torch.float32}
    assert {tensor.dtype for name, tensor in found.items() if "norm" not in name} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in found.values()) == sum(part.numel() for part in model.parameters())


@pytest.mark.parametrize("case", FAMILIES)
def test_families_can_be_inspected(case: str, tmp_path: Path) -> None:
    _, keys = CASES[case]
    model = decoder(**keys)
    export(model, tmp_path / "out")
    report = gaugekit.inspect(tmp_path / "out")
    ours = sum(part.numel() for part in model.parameters())
    added = report.parameters - ours
    assert added >= 0
    assert ("more are of the class alone" in (tmp_path / "out" / "README.md").read_text()) == (added > 0)


def test_our_own_class_is_refused_by_name(tmp_path: Path) -> None:
    export(decoder(**RELATIONAL), tmp_path / "out")
    with pytest.raises(UnsupportedArchitecture, match="'gaugekit'"):
        gaugekit.inspect(tmp_path / "out")


@pytest.mark.parametrize("case", ["gpt2", "opt", "llama", "learned"])
def test_the_tokenizer_comes_along(case: str, tmp_path: Path) -> None:
    kind, keys = CASES[case]
    assert export(decoder(**{**keys, "vocab": 256}), tmp_path / "out", byte_tokenizer()) == kind
    text = "née 19.5 °C,\n\tλ  x"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == list(text.encode())


def test_files(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()  # an empty directory is as good as none
    export(decoder(**RELATIONAL), tmp_path / "out", byte_tokenizer())
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "modeling_gaugekit.py", "README.md"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\n") and "attention: relational" in card and "change nothing" not in card
    export(decoder(bias=False), tmp_path / "other")
    # Biases of zeros: 3 d of the qkv, d, d and f in each layer.
    added = SIZES["layers"] * (5 * SIZES["width"] + SIZES["hidden"])
    assert f"{added} more are of the class alone" in (tmp_path / "other" / "README.md").read_text()
    assert not (tmp_path / "other" / "modeling_gaugekit.py").exists()


def test_nothing_is_written_over_or_left_half_written(tmp_path: Path) -> None:
    class Broken:
        def save(self, folder: Path) -> None:
            raise OSError("no tokenizer today")

    with pytest.raises(CheckpointError, match="no tokenizer today"):
        export(decoder(), tmp_path / "out", Broken())
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError):
        export(decoder(), tmp_path / "no" / "parent")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    for taken in (tmp_path / "out", tmp_path / "out" / "mine"):
        with pytest.raises(CheckpointError, match=r"not empty|cannot be"):
            export(decoder(), taken)
    assert (tmp_path / "out" / "mine").read_text() == "mine"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_saved_again_by_transformers(tmp_path: Path) -> None:
    for case in ("rbf", "invariant", "sphere"):  # the first one tied
        model, x, at = decoder(**CASES[case][1]), tokens(), tmp_path / case
        export(model, at)
        before = torch.get_rng_state()
        first = reloaded(at)
        assert torch.equal(torch.get_rng_state(), before)
        assert (first.decoder.head.weight is first.decoder.embedding.weight) == model.config.tied
        first.save_pretrained(at / "again")
        assert {path.name for path in (at / "again").glob("*.py")} == {"modeling_gaugekit.py"}
        assert gap(logits(reloaded(at / "again"), x), logits(model, x)) < 1e-10
        assert reloaded(at / "again").config.composition == model.config


def test_without_importing_gaugekit(tmp_path: Path) -> None:
    model, x = decoder(torch.float32, **CASES["learned"][1]), tokens()
    export(model, tmp_path / "out")
    torch.save({"x": x, "logits": logits(model, x)}, tmp_path / "wanted.pt")
    program = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
assert not [name for name in sys.modules if name.startswith("gaugekit")]
here = Path(sys.argv[1])
wanted = torch.load(here / "wanted.pt")
for at in ("out", "again"):
    model = AutoModelForCausalLM.from_pretrained(here / at, trust_remote_code=True)
    with torch.no_grad():
        assert (model(wanted["x"]).logits - wanted["logits"]).abs().max() < 1e-5
    model.save_pretrained(here / "again")
    assert [path.name for path in (here / "again").glob("*.py")] == ["modeling_gaugekit.py"]
import importlib, gaugekit.training.hf
importlib.reload(gaugekit.training.hf)
AutoModelForCausalLM.from_pretrained(here / "out")
"""
    environment = environment_of_members() | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_new_model_is_drawn_as_the_decoder_is() -> None:
    for _, keys in (CASES["rbf"], CASES["sphere"], CASES["invariant"]):
        config = ModelConfig(**SIZES | keys)
        torch.manual_seed(0)
        wanted = Decoder(config).state_dict()
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(GaugekitConfig(**vars(config)))
        found = model.decoder.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("lost", ["decoder.blocks.0.mlp.up.weight", "decoder.norm.alpha"])
def test_a_file_that_lacks_a_weight_is_refused(lost: str, tmp_path: Path) -> None:
    export(decoder(norm="dyt"), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    state = load_file(file)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # as it is
    del state[lost]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=lost):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_config(tmp_path: Path) -> None:
    config = GaugekitConfig(**SIZES, tied=True, score="rbf", attention="relational")
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (37, 16, 2)
    assert (config.num_attention_heads, config.max_position_embeddings, config.tie_word_embeddings) == (4, 9, True)
    assert GaugekitConfig().composition == ModelConfig()
    assert config == GaugekitConfig(**SIZES, tied=True, score="rbf", attention="relational")
    assert config != GaugekitConfig(**SIZES, tied=True, score="dot", attention="relational")
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).composition == config.composition
    written = json.loads((tmp_path / "config.json").read_text())
    for wrong, message in (
        ({"layer": 3}, "did you mean layers"),
        ({"placement": "before"}, "must be one of pre"),
        ({"heads": 3}, "does not divide"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(written | wrong))
        with pytest.raises(ConfigError, match=message):
            AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="norm_options"):
        export(decoder(norm="dyt", norm_options={"dtype": torch.float64}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    config.width = "wide"
    with pytest.raises(ConfigError, match="whole number"):
        _ = config.composition


def ours(**keys: Any) -> Any:
    model = decoder(torch.float32, **keys)
    other = GaugekitForCausalLM(GaugekitConfig(**vars(model.config)))
    other.decoder.load_state_dict(model.state_dict())
    return other.eval()


@torch.no_grad()
def test_loss_is_of_the_next_tokens() -> None:
    model, x = ours(**RELATIONAL), tokens()
    labels = x.clone()
    labels[0, 3:] = -100
    wanted = F.cross_entropy(model.decoder(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    out = model(x, attention_mask=torch.ones_like(x), labels=labels)
    assert gap(out.loss, wanted) < 1e-6
    assert gap(out.loss, F.cross_entropy(model.decoder(x).flatten(0, 1), labels.flatten())) > 1e-3
    count = int((labels[:, 1:] != -100).sum())
    assert gap(model(x, labels=labels, num_items_in_batch=2 * count).loss, wanted / 2) < 1e-6
    assert model(x).loss is None
    assert torch.equal(model(x, return_dict=False)[0], out.logits)


def test_what_the_decoder_does_not_know_is_refused() -> None:
    model, x = ours(), tokens()
    mask = torch.ones_like(x)
    mask[1, 0] = 0
    with pytest.raises(ValueError, match="no padding"):
        model(x, attention_mask=mask)
    with pytest.raises(ValueError, match="no padding"):
        model(x, attention_mask=torch.ones(2, 1, 9, 9))
    with pytest.raises(ValueError, match="no padding"):
        model.generate(x, attention_mask=mask, max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="position_ids"):
        model(x, position_ids=torch.arange(9) + 1)
    with pytest.raises(ValueError, match="output_hidden_states"):
        model(x, output_hidden_states=True)
    with pytest.raises(ConfigError, match="more than the context"):
        model(tokens(length=10))


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"use_cache": True}, {"num_beams": 1}])
def test_generation_goes_on_past_the_context(options: dict[str, Any]) -> None:
    model = ours(**RELATIONAL)
    x = start = tokens(length=5)
    found = model.generate(start, max_new_tokens=12, do_sample=False, **options)
    for _ in range(12):
        x = torch.cat([x, model.decoder(x[:, -9:])[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, x)
    assert len(x[0].unique()) > 3  # no fixed point


def test_transformers_knows_the_class() -> None:
    assert AutoConfig.for_model("gaugekit").__class__ is GaugekitConfig
    assert transformers.AutoModelForCausalLM.from_config(GaugekitConfig(**SIZES)).__class__ is GaugekitForCausalLM
