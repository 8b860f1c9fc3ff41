"""Rotary positions of a config: which dimensions of a head turn together, and how fast."""

from __future__ import annotations

from typing import Any

from gaugekit.errors import UnsupportedArchitecture
from gaugekit.models.spec import Rotary


def rotary(config: Any, head_dim: int, interleaved: bool = False, layer_type: str | None = None) -> Rotary:
    """The rotary positions of one attention, from `config.rope_parameters`.

    Pairs are (i, i + p) (half-split) or (2i, 2i + 1) (`interleaved`) for i < p; `layer_type` chooses among the
    parameters of models that turn some layers differently (Gemma 3).
    """
    parameters = dict(config.rope_parameters)
    if layer_type is not None and layer_type in parameters:
        parameters = dict(parameters[layer_type])
    else:
        layer_type = None
    kind = parameters.get("rope_type", "default")
    dims = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    pairs = (dims + 1) // 2  # an odd number of dimensions still turns in whole pairs
    if kind == "default":
        frequencies = [float(parameters["rope_theta"]) ** (-2 * i / dims) for i in range(pairs)]
    else:
        frequencies = _scaled_frequencies(config, kind, layer_type)
        pairs = len(frequencies)
    if 2 * pairs > head_dim:
        raise UnsupportedArchitecture(f"rotary positions of {2 * pairs} dimensions do not fit heads of {head_dim}")
    indices = [(2 * i, 2 * i + 1) if interleaved else (i, i + pairs) for i in range(pairs)]
    scheme = ", ".join(f"{key}={value}" for key, value in sorted(parameters.items()))
    return Rotary(tuple(indices), tuple(frequencies), scheme)


def _scaled_frequencies(config: Any, kind: str, layer_type: str | None) -> list[float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise UnsupportedArchitecture(f"rope_type {kind!r} is not known: the rotary symmetries cannot be derived")
    extra = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", **extra)
    return [float(f) for f in frequencies]
