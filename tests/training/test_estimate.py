"""What a dry run says, against what a run takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gaugekit.errors import ConfigError, DataError
from gaugekit.training.config import Config
from gaugekit.training.data import prepare
from gaugekit.training.decoder import Decoder
from gaugekit.training.estimate import estimate
from gaugekit.training.optimizers import make
from gaugekit.training.reading import read
from gaugekit.training.steps import loss_sum, steps

TINY = ("model.width=16", "model.layers=2", "model.heads=2", "model.context=8", "run.batch=4", "model.vocab=256")
MODELS = {
    "plain": (),
    "llama": ("model.norm=rms", "model.positions=rotary", "model.kv_heads=1", "model.mlp=swiglu"),
    "tied": ("model.tied=true", "model.bias=true", "model.placement=peri"),
    "relational": ("model.attention=relational", "model.score=rbf"),
    "learned score": ("model.attention=relational", "model.score=learned"),
    "invariant": ("model.attention=invariant",),
    "sphere": ("model.residual=sphere", "model.norm=none"),
}
OPTIMIZERS = ("adamw", "sgd", "muon", "quotient_adam", "quotient_sgd", "horizontal_muon", "gated_adamw")


def tiny(*words: str) -> Config:
    return read(None, [*TINY, *words])


def size(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))


def taken(config: Config) -> dict[str, int]:
    """Bytes of a run after its first step, and of what its forward pass has kept."""
    torch.manual_seed(0)
    model = Decoder(config.model).to(torch.float64 if config.run.precision == "float64" else torch.float32)
    optimizer = make(model, config.optimizer)
    own = {x.untyped_storage().data_ptr() for x in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Any] = {}

    def keep(x: Tensor) -> Tensor:
        if (at := x.untyped_storage().data_ptr()) not in own:
            kept[at] = x.untyped_storage()
        return x

    tokens = torch.randint(0, 256, (config.run.batch, 8))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss_sum(model, tokens, tokens, config.run.precision)
    list(steps(model, optimizer, lambda step: (tokens, tokens), 0, 1, precision=config.run.precision))
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": size([*model.parameters(), *model.buffers()]),
        "gradients": size(p.grad for p in model.parameters()),
        "optimizer_state": size(x for entry in optimizer.state.values() for x in entry.values()),
        "activations": sum(storage.nbytes() for storage in kept.values()),
    }


@pytest.mark.parametrize("model", MODELS)
def test_models(model: str) -> None:
    config = tiny(*MODELS[model])
    found, real = estimate(config).to_dict(), taken(config)
    assert {key: found[key] for key in real} == real


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    config = tiny(f"optimizer.name={name}", "model.kv_heads=1")
    found, real = estimate(config), taken(config)
    assert found.optimizer_state == real["optimizer_state"] > 0
    assert found.memory == found.weights + found.gradients + found.optimizer_state + found.activations


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_precisions(precision: str) -> None:
    config = tiny(f"run.precision={precision}")
    found, real = estimate(config).to_dict(), taken(config)
    for key, value in real.items():
        assert found[key] == pytest.approx(value, rel=0.01)


def test_parts_need_less() -> None:
    whole, parts = estimate(tiny()), estimate(tiny("run.accumulation=2"))
    assert (whole.part, parts.part) == (4, 2)
    assert parts.activations == pytest.approx(whole.activations / 2, rel=0.01)
    assert parts.weights == whole.weights


def test_large_models_take_no_memory() -> None:
    """A model of 30 billion parameters, of which no number is there."""
    found = estimate(
        tiny("model.width=8192", "model.layers=38", "model.heads=64", "model.context=4096", "model.vocab=50000")
    )
    assert found.parameters == 2 * 50000 * 8192 + 4096 * 8192 + 38 * (12 * 8192**2 + 4 * 8192) + 2 * 8192
    assert found.parameters - found.parameters_without_tables == 50000 * 8192 + 4096 * 8192
    assert found.flops_per_token == 6 * found.parameters_without_tables
    assert found.memory > 16 * found.parameters


def test_tokens(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x" * 10_000)
    before = sorted(tmp_path.rglob("*"))
    more = (f"data.source={text}", "model.vocab=0", "run.steps=100")
    found = estimate(tiny(*more), tmp_path / "run")
    assert (found.vocab, found.vocab_known, found.tokens_per_step, found.tokens) == (256, True, 32, 3200)
    assert found.training_tokens == 9000 and found.epochs == pytest.approx(3200 / 9000)
    found = estimate(tiny(*more, "data.tokenizer=bpe", "data.vocab=300"), tmp_path / "run")
    assert (found.vocab, found.vocab_known, found.training_tokens, found.epochs) == (300, False, None, None)
    assert sorted(tmp_path.rglob("*")) == before

    config = tiny(*more, "data.tokenizer=bpe", "data.vocab=300")
    data = prepare(config.data, tmp_path / "run" / "data")
    found = estimate(config, tmp_path / "run")
    assert (found.vocab, found.vocab_known, found.training_tokens) == (data.vocab, True, len(data.train))
    assert estimate(tiny("data.source=pydoc")).training_tokens == pytest.approx(
        len(prepare(tiny().data, tmp_path / "pydoc").train), rel=0.01
    )


def test_what_a_run_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"none.txt: does not exist"):
        estimate(tiny("data.source=none.txt", "data.tokenizer=bpe"))
    with pytest.raises(ConfigError, match=r"optimizer.options.beta"):
        estimate(tiny("optimizer.options={beta: 1}"))
    with pytest.raises(ConfigError, match=r"model.norm_options"):
        estimate(tiny("model.norm_options={beta: 1}"))
    with pytest.raises(ConfigError, match=r"model.vocab=100 is less than the tokenizer's 256"):
        estimate(tiny("model.vocab=100"))
    with monkeypatch.context() as patch:
        patch.setattr("gaugekit.training.distributed.world", lambda: 2)
        assert (estimate(tiny()).part, estimate(tiny("run.accumulation=2")).part) == (2, 1)
        patch.setattr("gaugekit.training.distributed.world", lambda: 3)
        with pytest.raises(ConfigError, match=r"does not split over 3 processes"):
            estimate(tiny())
    with pytest.raises(ConfigError, match="steps on pairs"):
        estimate(tiny("optimizer.name=quotient_adam", "model.attention=invariant"))
