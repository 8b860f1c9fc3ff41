"""`probe` on every family that reads text: norms and keys are those of the running model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import CASES, first_of_each
from on_disk import Save
from oracle import Case, Tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers.masking_utils import eager_mask

from gaugekit.checkpoint import open_checkpoint
from gaugekit.models import read_spec
from gaugekit.models.spec import Attention
from gaugekit.symmetry.wiring import wire
from gaugekit.verbs.attending import HeadWatch
from gaugekit.verbs.loading import load_finite
from gaugekit.verbs.probe import probe
from gaugekit.verbs.running import load_model, run

READERS = [case for case in CASES if case.inputs != "images"]
EACH = first_of_each(READERS)
# Their classes compute attention themselves: nothing to record.
UNRECORDED = {"bloom", "gpt_neo"}


@pytest.fixture
def words(tmp_path: Path) -> Callable[[int, int], tuple[Path, Path]]:
    """A text of random words and a tokenizer that knows a vocabulary of that size."""

    def write(vocabulary: int, length: int) -> tuple[Path, Path]:
        tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
        tokenizer.save(str(tmp_path / "words.json"))
        draw = torch.randint(2, vocabulary, (length,), generator=torch.Generator().manual_seed(3)).tolist()
        (tmp_path / "text.txt").write_text("\n".join(f"w{i}" for i in draw), encoding="utf-8")
        return tmp_path / "text.txt", tmp_path / "words.json"

    return write


@pytest.mark.parametrize("case", EACH, ids=str)
def test_norms(case: Case, save: Save, words: Callable[[int, int], tuple[Path, Path]]) -> None:
    """What is declared of every norm is what its module computes, and the predicted kernel is the measured one."""
    tiny = Tiny(case)
    path = save(tiny, "model")
    text, tokenizer = words(case.config["vocab_size"], 600)
    report = probe(path, text, tokenizer=tokenizer, length=5, rows=3, dtype="float64", tokens=None)
    length = min(5, report.length)
    assert report.tokens == 600 // length * length
    assert [norm.where for norm in report.norms if norm.layer is not None]
    d = tiny.spec.main.width
    for norm in report.norms:
        assert norm.tokens == report.tokens and norm.width == d
        assert norm.deviation < 1e-9, norm.where
        # eps pulls states of small variance inwards, the more so behind branches that write little.
        assert norm.radius.largest <= 1 + 1e-9
        assert norm.kernel is not None
        if norm.kind == "layer":
            assert norm.zero_sum < 1e-9
            assert norm.angle_normalized.smallest == pytest.approx(90, abs=1e-6)
            assert norm.kernel.predicted == 1
            assert norm.kernel.variance is not None and norm.kernel.variance < 1e-12
            assert norm.kernel.cosine_null == pytest.approx(1, abs=1e-9)
        else:
            assert norm.zero_sum > 0.1
            assert norm.kernel.predicted == 0 and norm.kernel.cosine is None
        assert norm.curve is not None and norm.curve.linear <= norm.curve.tanh + 1e-9 <= norm.curve.best + 2e-9
        assert sum(norm.gram_after.shares) == pytest.approx(1)
    layers = len(tiny.spec.main.blocks)
    assert [head.layer for head in report.heads] == list(range(layers))
    for head in report.heads:
        assert len(head.entropy) == next(iter(tiny.spec.attentions()))[2].heads or case.model_type == "whisper"
        assert all(0 <= entropy <= head.uniform + 1e-9 for entropy in head.entropy)
        assert (head.unselectable_unscaled is None) == (case.model_type == "")


@pytest.mark.parametrize("case", [case for case in READERS if case.model_type not in UNRECORDED], ids=str)
def test_keys(case: Case, save: Save) -> None:
    """Keys computed from a norm's input are those that the model attends to, positions and key norms included."""
    tiny = Tiny(case)
    path = save(tiny, "model")
    checkpoint = open_checkpoint(path)
    spec = read_spec(checkpoint)
    model = load_model(checkpoint, spec, torch.float64)
    recorded: list[Tensor] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **rest: Any) -> Any:
        if not getattr(module, "is_cross_attention", False) and key.shape[-2] == query.shape[-2]:
            recorded.append(key)
        repeated = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, *repeated)
        return out.transpose(1, 2), None

    transformers.AttentionInterface.register("recording", record)
    transformers.AttentionMaskInterface.register("recording", eager_mask)
    model.set_attn_implementation("recording")
    given: dict[str, Tensor] = {}
    wiring = wire(spec, "hidden")[spec.main.name]
    sources = {norm.where for norm in wiring.sources.values() if norm is not None}
    for name, module in model.named_modules():
        for where in sources:
            if name == where or where.endswith("." + name) or name.endswith("." + where):
                module.register_forward_hook(lambda _, x, y, where=where: given.update({where: x[0]}))
    batch = {name: values[:1] for name, values in tiny.batch.items()}
    run(model, spec, batch, case.observable)
    encoder = 0 if len(spec.streams) == 1 else len(spec.streams[0].blocks)
    own = iter(recorded[encoder:])
    hidden = None
    for layer, block in enumerate(spec.main.blocks):
        for number, branch in enumerate(block.branches):
            if not isinstance(branch.body, Attention) or branch.body.memory is not None:
                continue
            source = wiring.sources[layer, number]
            watch = HeadWatch(layer, branch.body, source, lambda view: view.read(load_finite(checkpoint, view.name)))
            if source is None:
                hidden = hidden or model(**batch, output_hidden_states=True).hidden_states
                states = hidden[layer]
            else:
                states = given[source.where]
            expected = next(own)[0]
            found = watch.keys(states[0])
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
            if watch.normed:
                assert not torch.allclose(watch.keys(states[0], scaled=False), expected, rtol=1e-2, atol=1e-2)
