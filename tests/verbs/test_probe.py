"""The verb on checkpoints in which it is known what there is to see."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import gpt_like, vit_like
from memory import run
from tokenizers import Tokenizer, models, pre_tokenizers

from gaugekit.errors import CheckpointError, GaugekitError, UnsupportedArchitecture
from gaugekit.verbs.probe import ProbeReport, probe

WORDS = 40


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt", 1200)


def write_text(path: Path, words: int) -> Path:
    draw = torch.randint(0, WORDS, (words,), generator=torch.Generator().manual_seed(5)).tolist()
    path.write_text("\n".join(f"w{i}" for i in draw), encoding="utf-8")
    return path


def save(folder: Path, edit: Any = None, **config: Any) -> Path:
    """A GPT-2 with random norms and its tokenizer."""
    torch.manual_seed(0)
    given = gpt_like(vocab_size=WORDS, n_positions=32, n_embd=4, n_head=1, layer_norm_epsilon=1e-12) | config
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**given))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "ln_" in name and name.endswith("weight") else 0.0, 0.4)
    if edit is not None:
        with torch.no_grad():
            edit(model)
    model.save_pretrained(folder)
    bare = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    transformers.PreTrainedTokenizerFast(tokenizer_object=bare).save_pretrained(folder)
    return folder


def measure(folder: Path, text: Path, **options: Any) -> ProbeReport:
    return probe(folder, text, **{"length": 30, "rows": 4, "tokens": None} | options)


def test_report(tmp_path: Path, text: Path) -> None:
    report = measure(save(tmp_path / "m"), text)
    assert (report.family, report.stream, report.tokens, report.length) == ("gpt2", "decoder", 1200, 30)
    assert [(norm.layer, norm.place) for norm in report.norms] == [
        (0, "before attention"),
        (0, "before MLP"),
        (1, "before attention"),
        (1, "before MLP"),
        (None, "final"),
    ]
    assert report.norms[0].null_angle == pytest.approx(math.degrees(0.5))
    assert report.norms[0].null_share == 0.25
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["norms"][4]["where"] == "transformer.ln_f"


def test_scaling_makes_every_key_selectable(tmp_path: Path, text: Path) -> None:
    """Keys of a head as wide as the stream are an invertible image of points on a sphere. One common scale in place of
    each token's own is the only difference of the other arm."""
    report = measure(save(tmp_path / "m"), text)
    for head in report.heads:
        assert head.unselectable == (0.0,)
        assert head.unselectable_unscaled is not None
        assert head.unselectable_unscaled[0] > 0.2


def test_a_head_that_averages_has_the_entropy_of_one(tmp_path: Path, text: Path) -> None:
    def blind(model: Any) -> None:
        model.transformer.h[0].attn.c_attn.weight[:, :4] = 0
        model.transformer.h[0].attn.c_attn.bias[:4] = 0

    first, second = measure(save(tmp_path / "m", blind), text).heads
    assert first.entropy[0] == pytest.approx(first.uniform, rel=1e-6)
    assert first.uniform == pytest.approx(sum(math.log(t) for t in range(1, 31)) / 30)
    assert second.entropy[0] < 0.99 * second.uniform


@pytest.mark.parametrize("rows", [1, 4])
def test_what_is_seen_does_not_depend_on_what_is_attended_to(tmp_path: Path, text: Path, rows: int) -> None:
    """Sharp heads give most of what they see a weight that is 0 in float32."""

    def sharp(model: Any) -> None:
        for block in model.transformer.h:
            block.attn.c_attn.weight[:, :4] *= 100

    for head in measure(save(tmp_path / "m", sharp), text, rows=rows).heads:
        assert head.uniform == pytest.approx(sum(math.log(t) for t in range(1, 31)) / 30)
        assert head.entropy[0] < 0.2 * head.uniform


def test_a_sliding_window_is_all_that_is_seen(tmp_path: Path, text: Path) -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=6,
    )
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path / "m")
    for head in measure(tmp_path / "m", text, tokenizer=save(tmp_path / "words")).heads:
        assert head.uniform == pytest.approx(sum(math.log(min(t, 6)) for t in range(1, 31)) / 30)


def test_an_encoder_sees_all(tmp_path: Path, text: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "m")
    for head in measure(tmp_path / "m", text, tokenizer=save(tmp_path / "words")).heads:
        assert head.uniform == pytest.approx(math.log(30))


def test_kernels(tmp_path: Path, text: Path) -> None:
    """One direction is predicted; where weights are zero, the axes of these; nothing else is null."""

    def zero(model: Any) -> None:
        model.transformer.h[1].ln_1.weight[:2] = 0

    report = measure(save(tmp_path / "m", zero, n_embd=8), text)
    for norm in report.norms:
        axes = (norm.layer, norm.place) == (1, "before attention")
        assert norm.kernel is not None
        assert norm.kernel.predicted == norm.kernel.null == (2 if axes else 1)
        assert norm.kernel.cosine == pytest.approx(1, abs=1e-6)
        assert norm.kernel.variance is not None and norm.kernel.variance < 1e-10
        assert norm.kernel.smallest[norm.kernel.predicted] > 1e-4


def test_a_trained_norm_may_open_more_null_directions(tmp_path: Path, text: Path) -> None:
    """Then the predicted one is null still, but not the only one: the measured eigenvector need not be it."""

    def nearly(model: Any) -> None:
        model.transformer.h[0].ln_1.weight[:3] = 1e-7

    kernel = measure(save(tmp_path / "m", nearly, n_embd=8), text).norms[0].kernel
    assert kernel is not None
    assert (kernel.predicted, kernel.null) == (1, 3)
    assert kernel.cosine_null == pytest.approx(1, abs=1e-9)


def test_too_few_tokens_tell_nothing_of_a_kernel(tmp_path: Path, text: Path) -> None:
    report = measure(save(tmp_path / "m", n_embd=32), text, tokens=30, rows=1)
    assert report.tokens == 30
    assert all(norm.kernel is None for norm in report.norms)


def test_states_that_do_not_vary(tmp_path: Path, text: Path) -> None:
    """One token everywhere and no positions: constant states have no variance, no curve, and no NaN."""

    def constant(model: Any) -> None:
        model.transformer.wte.weight[:] = 1.0
        model.transformer.wpe.weight[:] = 0

    report = measure(save(tmp_path / "m", constant), text)
    first = report.norms[0]
    assert first.radius.largest < 1e-2  # only rounding is left of a constant vector
    assert first.kernel is None or first.kernel.null > 0
    assert first.along_ones_before in (None, 0.0)
    json.dumps(report.to_dict(), allow_nan=False)


def test_progress_and_limits(tmp_path: Path, text: Path) -> None:
    """Where it is known how much will be read, progress is told; nothing beyond it is."""
    seen: list[tuple[int | None, str, int]] = []

    def track(items: Any, total: int | None, what: str) -> Any:
        kept = list(items)
        seen.append((total, what, len(kept)))
        return kept

    folder = save(tmp_path / "m")
    assert measure(folder, text, tokens=360, track=track).tokens == 360
    assert measure(folder, text, tokens=1, track=track).tokens == 120
    assert measure(folder, text, tokens=None, track=track).tokens == 1200
    assert [each for each in seen if each[1] == "text"] == [(3, "text", 3), (1, "text", 1), (None, "text", 10)]
    assert (5, "kernels", 5) in seen


def test_half_precision_is_measured_as_it_is(tmp_path: Path, text: Path) -> None:
    folder = save(tmp_path / "m")
    wide, half = measure(folder, text), measure(folder, text, dtype="bfloat16")
    for a, b in zip(wide.norms, half.norms, strict=True):
        assert a.deviation < 1e-4 < b.deviation < 0.1
        assert b.radius.mean == pytest.approx(a.radius.mean, abs=0.02)


def test_the_number_of_rows_changes_nothing(tmp_path: Path, text: Path) -> None:
    folder = save(tmp_path / "m")
    one, many = measure(folder, text, rows=1, samples=3), measure(folder, text, rows=7, samples=3)
    assert one.samples == many.samples == 3
    for a, b in zip(one.norms, many.norms, strict=True):
        assert a.angle_before.mean == pytest.approx(b.angle_before.mean, rel=1e-5)
        assert a.gram_before.effective_rank == pytest.approx(b.gram_before.effective_rank, rel=1e-5)
        assert a.along_ones_after == pytest.approx(b.along_ones_after, rel=1e-4)
    assert [h.unselectable_unscaled for h in one.heads] == [h.unselectable_unscaled for h in many.heads]


def test_refused(tmp_path: Path, text: Path) -> None:
    folder = save(tmp_path / "m")
    with pytest.raises(CheckpointError, match="cannot be read as text"):
        measure(folder, tmp_path / "missing.txt")
    (tmp_path / "short.txt").write_text("w1", encoding="utf-8")
    with pytest.raises(CheckpointError, match="too short: it has 1 token"):
        measure(folder, tmp_path / "short.txt")
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        measure(folder, text, tokenizer=tmp_path)
    small = save(tmp_path / "small", vocab_size=9)
    with pytest.raises(CheckpointError, match="it belongs to another model"):
        measure(small, text, tokenizer=folder)
    images = transformers.ViTModel(transformers.ViTConfig(**vit_like()))
    images.save_pretrained(tmp_path / "vit")
    with pytest.raises(UnsupportedArchitecture, match="vit reads no text"):
        measure(tmp_path / "vit", text)


def test_states_that_overflow_are_refused(tmp_path: Path, text: Path) -> None:
    """In float32 too: there is a wider precision."""

    def large(model: Any) -> None:
        model.transformer.wte.weight[:] = 3e38
        model.transformer.wpe.weight[:] = 3e38

    folder = save(tmp_path / "m", large)
    with pytest.raises(GaugekitError, match=r"transformer.h.0.ln_1 are NaN or infinite: run .* in a wider precision"):
        measure(folder, text)
    assert measure(folder, text, dtype="float64").tokens == 1200


@pytest.mark.parametrize("option", ["length", "rows", "samples"])
def test_nothing_can_be_measured_on_nothing(tmp_path: Path, text: Path, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        measure(tmp_path, text, **{option: 0})


def test_more_tokens_than_can_be_counted_are_all(tmp_path: Path, text: Path) -> None:
    assert measure(save(tmp_path / "m"), text, tokens=10**25).tokens == 1200


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Kept states of the longer text would take some 150 MB."""
    folder = save(tmp_path / "m", n_embd=64, n_positions=256)
    peaks = []
    for name, words in (("short", 4096), ("long", 65_536)):
        script = "from gaugekit.verbs.probe import probe\nprint(probe(*sys.argv[1:], tokens=None).tokens, peak())\n"
        tokens, peak = run(script, str(folder), str(write_text(tmp_path / name, words)))
        assert tokens == words
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 40_000_000, peaks
