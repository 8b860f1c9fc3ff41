"""The verb on checkpoints that `transformers` wrote, against what the model's own weights say."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import llama_like
from safetensors.torch import load_file, save_file

from gaugekit.checkpoint import Checkpoint
from gaugekit.errors import CheckpointError, UnsupportedObservable
from gaugekit.verbs.inspect import inspect


def build(folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_like(**config)))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        else:
            torch.nn.init.normal_(parameter)
    model.to(dtype).save_pretrained(folder)
    return model.double()


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return build(tmp_path)


def change(folder: Path, name: str, value: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: value}, path, metadata={"format": "pt"})


def test_totals(model: Any, tmp_path: Path) -> None:
    report = inspect(tmp_path)
    assert report.redundancy == 134
    assert report.parameters == sum(p.numel() for p in model.parameters())
    assert sum(row.dimension for row in report.by_layer) == 134
    assert [row.layer for row in report.by_layer] == ["layer 0", "layer 1", ""]
    assert report.by_layer[0].dimension == report.by_layer[1].dimension == 16 + 4 + 9 + 16
    assert report.model["kv_heads"] == 1
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["redundancy"]["total"] == 134


def test_spectra_are_those_of_the_products(model: Any, tmp_path: Path) -> None:
    """GQA: the query heads of a group, and their outputs, stand side by side."""
    rows = {(row.layer, row.circuit): row for row in inspect(tmp_path).heads}
    for layer, block in enumerate(model.model.layers):
        gamma = block.input_layernorm.weight.detach()
        attention = block.self_attn
        queries = attention.q_proj.weight.detach() * gamma
        keys = attention.k_proj.weight.detach() * gamma
        values = attention.v_proj.weight.detach() * gamma
        out = attention.o_proj.weight.detach()
        qk = torch.cat([keys.T @ queries[:4], keys.T @ queries[4:]], dim=1)
        vo = torch.cat([out[:, :4] @ values, out[:, 4:] @ values], dim=0)
        for circuit, product in (("qk", qk), ("vo", vo)):
            expected = torch.linalg.svdvals(product)[:4]
            row = rows[layer, circuit]
            assert row.rank == 4
            assert torch.allclose(torch.tensor(row.spectrum, dtype=torch.float64), expected, rtol=1e-10)
            p = expected / expected.sum()
            assert row.effective_rank == pytest.approx(float((-(p * p.log()).sum()).exp()))
            assert row.stable_rank == pytest.approx(float((expected**2).sum() / expected[0] ** 2))


def test_norms_are_reported_as_used(model: Any, tmp_path: Path) -> None:
    rows = {row.where: row for row in inspect(tmp_path).norms}
    assert len(rows) == 5
    weight = model.model.norm.weight.detach()
    row = rows["model.norm"]
    assert (row.kind, row.zeros) == ("rms", 0)
    assert row.mean == pytest.approx(float(weight.mean()))
    assert (row.smallest, row.largest) == (float(weight.min()), float(weight.max()))


def test_headers_only_loads_no_tensor(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Checkpoint, name: str) -> None:
        raise AssertionError(f"{name} was loaded")

    monkeypatch.setattr(Checkpoint, "load", refuse)
    monkeypatch.setattr(Checkpoint, "parts", refuse)
    report = inspect(tmp_path, spectra=False)
    assert (report.redundancy, report.heads, report.norms) == (134, (), ())


def test_only_one_attention_is_held_at_a_time(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerLens#252, mergekit#549: two copies of the model in memory."""
    load = Checkpoint.load
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def counted(self: Checkpoint, name: str) -> torch.Tensor:
        nonlocal most
        tensor = load(self, name)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(Checkpoint, "load", counted)
    inspect(tmp_path)
    assert len(alive) > 10
    assert most <= 5 + 1  # q, k, v, o and a norm, and the last one of the layer before


def test_observables(model: Any, tmp_path: Path) -> None:
    assert inspect(tmp_path, observable="logits", spectra=False).redundancy == 134 - 8
    hidden = inspect(tmp_path, observable="hidden", spectra=False)
    assert hidden.redundancy == 134 - 8 - 28 - 8
    assert hidden.dead_parameters == 13 * 8
    assert {row.symmetry for row in hidden.blocked} >= {"residual frame", "norm weight"}


def test_an_encoder_has_no_logits(tmp_path: Path) -> None:
    transformers.BertModel(
        transformers.BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=5)
    ).save_pretrained(tmp_path)
    assert inspect(tmp_path, spectra=False).observable == "hidden"
    with pytest.raises(UnsupportedObservable, match="use --observable hidden"):
        inspect(tmp_path, observable="logprobs")


def test_similarities_of_a_layer_norm_decoder_are_refused(tmp_path: Path) -> None:
    """Frame and weight of its last norm have a curve of symmetries: the Jacobian of the inner products lacks one rank
    more than all groups together explain."""
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=6, vocab_size=13)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedObservable, match="similarities of gpt2: frame and weight of the last LayerNorm"):
        inspect(tmp_path, observable="similarities")


def test_a_tie_that_the_weights_do_not_keep(tmp_path: Path) -> None:
    """transformers#45127, SpinQuant#13: embedding and head diverge while the config says tied."""
    build(tmp_path, tie_word_embeddings=True)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, "lm_head.weight", table.clone())
    assert inspect(tmp_path).redundancy == 90
    change(tmp_path, "lm_head.weight", table + 1e-3)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        inspect(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none(model: Any, tmp_path: Path, name: str, value: float) -> None:
    tensor = load_file(tmp_path / "model.safetensors")[name]
    tensor[1, 2] = value
    change(tmp_path, name, tensor)
    with pytest.raises(CheckpointError, match=f"tensor {name} holds NaN or infinite numbers"):
        inspect(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_numbers(model: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    change(tmp_path, "model.layers.0.self_attn.q_proj.weight", torch.ones(8, 8).to(dtype))
    with pytest.raises(CheckpointError, match=f"holds {str(dtype)[6:]} numbers: the checkpoint is quantised"):
        inspect(tmp_path)


def test_rounding_first(tmp_path: Path) -> None:
    build(tmp_path, torch.float64)
    exact, stored = inspect(tmp_path), inspect(tmp_path, dtype="bfloat16")
    a, b = (torch.tensor(r.heads[0].spectrum, dtype=torch.float64) for r in (exact, stored))
    assert 1e-5 < float(((a - b).abs() / a).max()) < 2e-2


def test_a_head_with_equal_singular_values_is_reported_degenerate(tmp_path: Path) -> None:
    build(tmp_path, torch.float64)
    tensors = load_file(tmp_path / "model.safetensors")
    at = "model.layers.0"
    gamma = tensors[f"{at}.input_layernorm.weight"]
    change(tmp_path, f"{at}.self_attn.v_proj.weight", torch.eye(8, dtype=torch.float64)[:4] / gamma)
    orthogonal = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0].contiguous()
    change(tmp_path, f"{at}.self_attn.o_proj.weight", orthogonal)
    head = next(row for row in inspect(tmp_path).heads if (row.layer, row.circuit) == (0, "vo"))
    assert head.degenerate_blocks == ((0, 4),)


def test_a_pruned_head_of_zeros(tmp_path: Path) -> None:
    build(tmp_path)
    change(tmp_path, "model.layers.0.self_attn.v_proj.weight", torch.zeros(4, 8))
    head = next(row for row in inspect(tmp_path).heads if (row.layer, row.circuit) == (0, "vo"))
    assert (head.rank, head.effective_rank, head.stable_rank) == (0, 0.0, 0.0)
    assert head.spectrum == (0.0, 0.0, 0.0, 0.0)
