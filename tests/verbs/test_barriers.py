"""Losses on the way between two models: what is measured, and that nothing is left of the models on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from gaugekit.errors import CheckpointError, GaugekitError, UnsupportedArchitecture
from gaugekit.verbs import barriers
from gaugekit.verbs import merge as verb
from gaugekit.verbs.barriers import barrier, departure, listener
from gaugekit.verbs.merge import MergeReport, merge
from gaugekit.verbs.rewriting import opened
from gaugekit.verbs.scramble import scramble

LETTERS = "abcdefghijklmnop "
Build = Callable[..., Path]


def tokenizer() -> Any:
    bare = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token=" "))
    bare.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bare)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A tiny model with a tokenizer of letters."""

    def make(name: str, seed: int, kind: str = "gpt2", **extra: Any) -> Path:
        torch.manual_seed(seed)
        sizes: dict[str, Any] = {"vocab_size": len(LETTERS), "initializer_range": 0.4} | extra
        if kind == "bert":
            sizes |= {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
            model = transformers.BertModel(transformers.BertConfig(**sizes, max_position_embeddings=24))
        else:
            sizes |= {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, "bos_token_id": 0, "eos_token_id": 0}
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        model.double().save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture
def text(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(3)
    letters = torch.randint(0, len(LETTERS), (2000,), generator=generator).tolist()
    path = tmp_path / "text.txt"
    path.write_text("".join(LETTERS[i] for i in letters))
    return path


def merged(folder: Path, recipe: str, text: Path | None, **options: Any) -> MergeReport:
    (folder / "recipe.yaml").write_text(recipe)
    return merge(folder / "recipe.yaml", folder / "out", text=text, **options)


LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n"
SLERP = "merge_method: slerp\nbase_model: a\nmodels: [{model: b}]\nparameters: {t: 0.5}\n"


def test_a_barrier_is_above_the_straight_line() -> None:
    assert barrier([1.0, 2.0, 3.0]) == 0.0
    assert barrier([1.0, 3.5, 3.0]) == pytest.approx(1.5)
    assert barrier([3.0, 1.0, 1.0]) == 0.0  # below the line all the way
    assert barrier([1.0, float("nan"), 1.0]) == float("inf")


def plain_loss(tensors: Any, config: Path, text: Path, length: int) -> float:
    """By `transformers` alone."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained(config)).double().eval()
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    ids = torch.tensor([LETTERS.index(c) for c in text.read_text()])
    ids = ids[: len(ids) // length * length].reshape(-1, length)
    with torch.no_grad():
        return float(model(ids, labels=ids).loss)


@pytest.mark.parametrize("recipe", [LINEAR, SLERP])
def test_losses_are_those_of_the_models_on_the_way(recipe: str, build: Build, text: Path, tmp_path: Path) -> None:
    a, b = build("a", 0), build("b", 1)
    report = merged(tmp_path, recipe, text, points=5)
    w = report.ways
    assert w is not None and report.ends is None and w.aligned is not None
    assert (w.measure, w.t, w.tokens) == ("loss", (0.0, 0.25, 0.5, 0.75, 1.0), 2000 // 24 * 23)
    first, second = (load_file(folder / "model.safetensors") for folder in (a, b))
    for t, loss in zip(w.t, w.naive, strict=True):
        if recipe == SLERP and 0 < t < 1:
            continue
        mixed = {name: (1 - t) * x + t * second[name] for name, x in first.items()}
        assert loss == pytest.approx(plain_loss(mixed, a, text, 24), abs=1e-5)
    # Moved along its orbit a model computes what it did.
    assert w.aligned[0] == w.naive[0]
    assert w.aligned[-1] == pytest.approx(w.naive[-1], abs=1e-5)
    assert w.barrier_naive == barrier(w.naive) and w.barrier_aligned == barrier(w.aligned)
    assert abs(w.naive[2] - w.naive[0]) > 0.1
    # The merge is the middle of the way.
    middle = plain_loss(load_file(tmp_path / "out" / "model.safetensors"), a, text, 24)
    assert w.aligned[2] == pytest.approx(middle, abs=1e-5)
    assert (
        f"barrier between the models as they are is {w.barrier_naive:.4f}" in (tmp_path / "out/README.md").read_text()
    )


def spoken(model: Path, path: Path) -> Path:
    """A text that the model itself has drawn, which it predicts better than another does."""
    torch.manual_seed(0)
    speaker = transformers.GPT2LMHeadModel.from_pretrained(model).eval()
    ids = torch.randint(0, len(LETTERS), (40, 1))
    with torch.no_grad():
        while ids.shape[1] < 24:
            ids = torch.cat([ids, speaker(ids).logits[:, -1].softmax(-1).multinomial(1)], 1)
    path.write_text("".join(LETTERS[i] for i in ids.flatten().tolist()))
    return path


@pytest.mark.parametrize("recipe", [LINEAR, SLERP])
def test_a_disguise_has_no_barrier_once_it_is_aligned(recipe: str, build: Build, tmp_path: Path) -> None:
    a = build("a", 0)
    scramble(a, tmp_path / "b", seed=1)
    w = merged(tmp_path, recipe, spoken(a, tmp_path / "spoken.txt"), points=3).ways
    assert w is not None and w.barrier_aligned is not None
    assert abs(w.barrier_aligned) < 1e-5 < 0.1 < w.barrier_naive


def test_as_they_are_there_is_one_way(build: Build, text: Path, tmp_path: Path) -> None:
    build("a", 0), build("b", 1)
    w = merged(tmp_path, LINEAR + "align: none\n", text, points=3).ways
    assert w is not None
    assert (w.aligned, w.barrier_aligned) == (None, None)
    assert len(w.naive) == 3


def test_several_models(build: Build, text: Path, tmp_path: Path) -> None:
    for seed, name in enumerate("abc"):
        build(name, seed)
    recipe = "merge_method: ties\nbase_model: a\nmodels: [{model: b}, {model: c}]\nparameters: {weight: 0.5}\n"
    report = merged(tmp_path, recipe, text)
    e = report.ends
    assert e is not None and report.ways is None and e.aligned is not None
    for name, loss in zip("abc", e.models, strict=True):
        tensors = load_file(tmp_path / name / "model.safetensors")
        assert loss == pytest.approx(plain_loss(tensors, tmp_path / "a", text, 24), abs=1e-5)
    result = load_file(tmp_path / "out" / "model.safetensors")
    assert e.aligned == pytest.approx(plain_loss(result, tmp_path / "a", text, 24), abs=1e-5)
    assert abs(e.aligned - e.naive) > 1e-3


def test_encoders_depart(build: Build, text: Path, tmp_path: Path) -> None:
    """They have no loss: what is measured is how far last states are from those of both ends, in its turn."""
    a = build("a", 0, "bert")
    build("b", 1, "bert")
    scramble(a, tmp_path / "c", seed=2)
    w = merged(tmp_path, LINEAR, text, points=5).ways
    assert w is not None and w.aligned is not None
    assert w.measure == "departure"
    for losses in (w.naive, w.aligned):
        assert max(losses[0], losses[-1]) < 1e-5
        assert min(losses[1:-1]) > 0.01
    w = merged(tmp_path, LINEAR.replace("model: b", "model: c"), text, points=3, overwrite=True).ways
    assert w is not None and w.barrier_aligned is not None
    assert w.barrier_aligned < 1e-5 < 0.05 < w.barrier_naive


def test_departure_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    first, last = (torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    turned = first @ torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))[0]
    assert departure(0.0, first, first, last, False) == 0.0
    assert departure(1.0, last, first, last, False) == 0.0
    assert departure(0.0, turned, first, last, False) < 1e-12  # states turned together are the same states
    x, y = (z - z.mean(0) for z in (first, last))
    far = float((x @ x.T - y @ y.T).norm() / (x @ x.T).norm())
    assert departure(0.25, last, first, last, False) == pytest.approx(0.75 * far)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_models_on_the_way_are_removed(
    error: type[BaseException], build: Build, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("a", 0), build("b", 1)
    before = {path.name for path in tmp_path.iterdir()} | {"recipe.yaml"}
    seen: list[int] = []

    def spoilt(self: Any, folder: Path) -> float:
        seen.append(len(list(tmp_path.glob(".out.way-*/*"))))
        if len(seen) == 3:
            raise error
        return 1.0

    monkeypatch.setattr(barriers.Listener, "loss", spoilt)
    with pytest.raises(error):
        merged(tmp_path, LINEAR, text)
    assert seen == [0, 1, 1]  # the first model where it lies, then one at a time
    assert {path.name for path in tmp_path.iterdir()} == before


def test_only_the_start_of_a_long_text_is_read(build: Build, text: Path) -> None:
    text.write_text(text.read_text() * 10)
    assert listener(opened(build("a", 0), None), text).tokens == 4096 // 96 * 4 * 23
    assert listener(opened(build("b", 0, "bert"), None), text).tokens == 1024 // 96 * 4 * 24


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "text.txt").write_text("a"), "is too short"),
        (lambda folder: (folder / "text.txt").unlink(), "cannot be read as text"),
        (lambda folder: (folder / "a" / "tokenizer_config.json").write_text("{"), "has no tokenizer"),
    ],
)
def test_what_cannot_be_read_is_refused_first(
    change: Callable[[Path], Any], words: str, build: Build, text: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    build("a", 0), build("b", 1)
    change(tmp_path)
    monkeypatch.setattr(verb, "digest", lambda _: pytest.fail("work was done"))
    with pytest.raises(CheckpointError, match=words):
        merged(tmp_path, LINEAR, text)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_another_model(build: Build, text: Path, tmp_path: Path) -> None:
    a = build("a", 0, vocab_size=5)
    with pytest.raises(CheckpointError, match=r"a: its tokenizer gives token 16, and the model has 5 of them"):
        listener(opened(a, None), text)


def test_what_has_no_loss(build: Build, text: Path, tmp_path: Path) -> None:
    for seed, name in enumerate("abc"):
        build(name, seed, "bert")
    recipe = "merge_method: ties\nbase_model: a\nmodels: [{model: b}, {model: c}]\nparameters: {weight: 0.5}\n"
    with pytest.raises(GaugekitError, match="has no head, and so no loss on a text"):
        merged(tmp_path, recipe, text)
    with pytest.raises(GaugekitError, match="2 points show no way"):
        merged(tmp_path, LINEAR, text, points=2)
    vit = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=9, image_size=4, patch_size=2
    )
    transformers.ViTModel(vit).save_pretrained(tmp_path / "v")
    with pytest.raises(UnsupportedArchitecture, match=r"^vit reads no text: give a model of text$"):
        listener(opened(tmp_path / "v", None), text)
    assert json.loads((tmp_path / "v" / "config.json").read_text())["model_type"] == "vit"
