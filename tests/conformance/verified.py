"""A verification, made by hand: two models that give the same."""

from __future__ import annotations

from gaugekit.verbs.verify import VerifyReport

SAME_OUTPUT = VerifyReport(
    first="/models/tiny",
    second="/models/tiny-s",
    observable="logprobs",
    computed_in="float64",
    stored_in="float32",
    tokens=256,
    largest=7.7e-06,
    scale=1.0,
    mean_kl=1.2e-13,
    top1=1.0,
    rounding=5e-04,
    tolerance=2e-3,
    equivalent=True,
    layer=None,
    layers=(0.0, 1e-7, 2e-7),
)
