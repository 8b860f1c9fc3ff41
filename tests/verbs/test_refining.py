"""Turning one of two aligned models by gradient: the mean gets better, and no function changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES as EVERY
from cases import EQUAL, ONE, TIED, WIDE, bert_like, gpt_like, llama_like, neox_like, rope, vit_like, whisper_like
from on_disk import WEIGHTS, apart, between, letters, saved, tokenizer
from oracle import Case, Tiny
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from gaugekit.checkpoint import Checkpoint
from gaugekit.errors import GaugekitError
from gaugekit.symmetry.heads import QueryKey, ValueOutput
from gaugekit.symmetry.orbit import Step
from gaugekit.symmetry.stream import Frame
from gaugekit.verbs import refining
from gaugekit.verbs.align import AlignReport, align
from gaugekit.verbs.refining import LENGTH, ROWS, TENTH, Turns, exact, lessons
from gaugekit.verbs.rewriting import opened
from gaugekit.verbs.running import load_model, parameters_of
from gaugekit.verbs.verify import verify

NEOX = Case("gpt_neox", neox_like(vocab_size=30, **rope(0.5)), note="LayerNorm frame")
LLAMA = Case("llama", llama_like(**WIDE), note="four heads on two")
CASES = [
    NEOX,
    LLAMA,
    Case("llama", llama_like(**ONE, rope_parameters=EQUAL), note="equal turns"),
    Case("gpt2", gpt_like(), note="tied"),
    Case("qwen3", llama_like(**ONE, head_dim=4), note="norms of queries and keys"),
]
STEPS = 12


def pair(case: Case, folder: Path, share: float = 1.0) -> tuple[Tiny, Path, Path, Path]:
    """Two models and a text."""
    tiny = Tiny(case, eps=1e-5)
    a, b = saved(tiny, folder / "a"), saved(tiny, folder / "b", between(tiny, share))
    tokenizer(case.config["vocab_size"]).save_pretrained(a)
    return tiny, a, b, letters(folder / "text", case.config["vocab_size"], 3000)


def refined(a: Path, b: Path, out: Path, text: Path, steps: int = STEPS) -> tuple[AlignReport, float, float]:
    """With the two losses."""
    report = align(a, b, out, text=text, refine=steps)
    assert report.refined is not None
    return report, *report.refined


def judged_loss(tiny: Tiny, a: Path, moved: Path, text: Path) -> float:
    """Of the mean of two models on every tenth batch, by `transformers` alone."""
    first, second = load_file(a / WEIGHTS), load_file(moved / WEIGHTS)
    tiny._load(tiny.flat({name: (first[name] + second[name]) / 2 for name in tiny.index}, tiny.theta))
    length = min(LENGTH, getattr(tiny.model.config, "n_positions", LENGTH))
    ids = torch.tensor(tokenizer(tiny.model.config.vocab_size)(text.read_text()).input_ids)
    batches = ids[: len(ids) // length * length].reshape(-1, length).split(ROWS)[::TENTH]
    losses = []
    for batch in batches:
        with torch.no_grad():
            logits = tiny.model(batch).logits[:, :-1]
        losses.append(float(cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_mean_gets_better_and_the_function_stays(case: Case, tmp_path: Path) -> None:
    tiny, a, b, text = pair(case, tmp_path)
    plain = align(a, b, tmp_path / "plain")
    report, before, after = refined(a, b, tmp_path / "out", text)
    assert plain.refined is None
    assert verify(b, tmp_path / "out").largest < 1e-8
    assert apart(tmp_path / "plain", tmp_path / "out", tiny) > 1e-3
    assert after < before - 0.01
    # What is reported is what the files give: batches that were not learnt from, orthogonal steps, whole weights.
    assert before == pytest.approx(judged_loss(tiny, a, tmp_path / "plain", text), abs=1e-4)
    assert after == pytest.approx(judged_loss(tiny, a, tmp_path / "out", text), abs=1e-4)
    assert report.sweeps == plain.sweeps  # distances of the search, before that


def test_the_same_again(tmp_path: Path) -> None:
    _, a, b, text = pair(LLAMA, tmp_path)
    for out in "cd":
        refined(a, b, tmp_path / out, text, 3)
    assert (tmp_path / "c" / WEIGHTS).read_bytes() == (tmp_path / "d" / WEIGHTS).read_bytes()


def test_where_nothing_is_won_nothing_is_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, a, b, text = pair(LLAMA, tmp_path)
    align(a, b, tmp_path / "plain")
    plain = (tmp_path / "plain" / WEIGHTS).read_bytes()
    # Steps that are far too long, until they lead to something worse.
    for rate in (3.0, 30.0, 300.0):
        monkeypatch.setattr(refining, "RATE", rate)
        _, before, after = refined(a, b, tmp_path / f"rate {rate}", text, 1)
        assert after <= before
        if after == before:
            break
    else:
        pytest.fail("every step was a good one")
    assert (tmp_path / f"rate {rate}" / WEIGHTS).read_bytes() == plain


@pytest.mark.parametrize("case", CASES, ids=str)
def test_turns_are_elements_of_the_symmetry(case: Case) -> None:
    """The identity at first; wherever the parameters are, one that changes no function, and `exact` moves it by
    rounding alone. With blocks of pairs that turn alike, and with U 1 = 1."""
    tiny = Tiny(case)
    before = tiny.observe(tiny.theta)
    kinds = [s for s in tiny.symmetries.continuous if isinstance(s, Frame | ValueOutput | QueryKey)]
    assert {type(s) for s in kinds} >= {ValueOutput}
    torch.manual_seed(0)
    for symmetry in kinds:
        turns = Turns(symmetry)
        size = turns().shape[-1]
        torch.testing.assert_close(turns(), torch.eye(size).expand_as(turns()), rtol=0, atol=1e-6)
        with torch.no_grad():
            for parameter in turns.parameters():
                parameter.add_(torch.randn_like(parameter))
        element = turns().detach().double()
        step = exact(Step(symmetry, element))
        assert (step.element - element).abs().max() < 1e-5
        assert (element - torch.eye(size).double()).abs().max() > 0.1
        assert (step.element @ step.element.mT - torch.eye(size).double()).abs().max() < 1e-12
        moved = tiny.flat(symmetry.act(tiny.tensors(), step.element), tiny.theta)
        assert (moved - tiny.theta).abs().max() > 0.1
        assert (tiny.observe(moved) - before).abs().max() < 1e-9, symmetry.name
    if case in (NEOX, CASES[2]):
        assert any(isinstance(s, Frame) and s.fix_ones == (case == NEOX) for s in kinds)


DECODERS = {case.model_type: case for case in EVERY if case.inputs == "text" and case.observable == "logprobs"}
HELD = [case for name, case in DECODERS.items() if name not in ("mixtral", "qwen3_moe")]


@pytest.mark.parametrize("case", HELD, ids=str)
def test_every_tensor_has_its_parameter(case: Case, tmp_path: Path) -> None:
    """Also where transformers calls it something else than the file does."""
    tiny = Tiny(case)
    a = saved(tiny, tmp_path / "a")
    model = load_model(opened(a, None).checkpoint, tiny.spec, torch.float64)
    held = dict(model.named_parameters(remove_duplicate=False))
    places = parameters_of(model, tiny.spec.tensors)
    assert list(places) == list(tiny.spec.tensors) and len(set(places.values())) == len(places)
    for name, tensor in tiny.tensors().items():
        assert torch.equal(held[places[name]], tensor), name


def no_weights(*_: Any) -> Tensor:
    raise AssertionError("weights were read")


MOE = {"num_local_experts": 3, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("bert", bert_like(), "hidden"), "bert without a language-model head has no loss on a text to refine by"),
        (Case("vit", vit_like(), "hidden"), "vit without a language-model head has no loss"),
        (Case("whisper", whisper_like()), "whisper reads more than text, and cannot be run on text alone"),
        (Case("mixtral", llama_like(**MOE, **ONE)), "cannot be refined: transformers holds experts in another form"),
    ],
    ids=str,
)
def test_what_cannot_be_refined(case: Case, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told in a line before any work."""
    a = saved(Tiny(case), tmp_path / "a")
    tokenizer(9).save_pretrained(a)
    text = letters(tmp_path / "text", 9)
    monkeypatch.setattr(Checkpoint, "load", no_weights)
    with pytest.raises(GaugekitError, match=reason):
        align(a, a, tmp_path / "out", text=text, refine=2, observable=case.observable)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "text"]


def test_a_text_is_tried_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = saved(Tiny(Case("llama", llama_like(**TIED))), tmp_path / "a")
    tokenizer(13).save_pretrained(a)
    monkeypatch.setattr(Checkpoint, "load", no_weights)
    short = letters(tmp_path / "short", 13, LENGTH * ROWS)
    for text, reason in (
        (short, f"short is too short to refine by: it has no more than {ROWS} rows of {LENGTH} tokens"),
        (tmp_path / "none", "none: cannot be read as text"),
        (None, "those on a text: name one"),
    ):
        with pytest.raises(GaugekitError, match=reason):
            align(a, a, tmp_path / "out", text=text, refine=2)
    assert not (tmp_path / "out").exists()
    # One token more makes no row, one row more is a second batch.
    letters(short, 13, LENGTH * (ROWS + 1))
    found = lessons(opened(a, None), short)
    assert [ids.shape for ids in (*found.judged, *found.learnt)] == [(ROWS, LENGTH), (1, LENGTH)]


def test_what_judges_is_not_learnt_from(tmp_path: Path) -> None:
    a = saved(Tiny(Case("gpt2", gpt_like())), tmp_path / "a")
    tokenizer(13).save_pretrained(a)
    found = lessons(opened(a, None), letters(tmp_path / "text", 13, 6 * ROWS * 25))
    ids = torch.tensor(tokenizer(13)((tmp_path / "text").read_text()).input_ids).reshape(25, ROWS, 6)
    assert torch.equal(torch.stack(found.judged), ids[[0, 10, 20]])
    assert torch.equal(torch.stack(found.learnt), ids[[i for i in range(25) if i % 10]])
