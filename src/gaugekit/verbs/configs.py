"""What of two configs must agree where weights of one go into the other: all that changes what a model computes."""

from __future__ import annotations

from typing import Any

from gaugekit.errors import GaugekitError
from gaugekit.models.gguf import from_gguf
from gaugekit.models.registry import HARMLESS, family_of, parse_config
from gaugekit.verbs.rewriting import Opened

__all__ = ["require_same_function"]

# How far positions go limits texts, and changes no output where rotary frequencies are not scaled by it. Tables of
# positions have shapes, which are compared elsewhere.
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")


def require_same_function(ours: Opened, theirs: Opened) -> None:
    """Raise `GaugekitError`, by the field's name, where configs of one architecture ask for different functions: eps of
    norms, softcaps, scales, windows, activations. Defaults are filled in; bookkeeping is passed over.
    """
    first, second = (_function(model) for model in (ours, theirs))
    for field in sorted(first.keys() | second.keys()):
        if first.get(field) != second.get(field):
            raise GaugekitError(
                f"{ours.checkpoint.path} and {theirs.checkpoint.path} cannot be merged: their configs differ in "
                f"{field}: {first.get(field)!r} and {second.get(field)!r}, so equal weights compute different things"
            )


def _function(model: Opened) -> dict[str, Any]:
    checkpoint = model.checkpoint
    where = f"{checkpoint.path}/config.json"
    raw = from_gguf(checkpoint)[0] if checkpoint.format == "gguf" else checkpoint.config
    family = family_of(raw, where)
    raw = raw["text_config"] if raw["model_type"] in family.wrappers else raw
    scaled = any(
        a.rotary is not None and "rope_type=default" not in a.rotary.scheme for _, _, a, _ in model.spec.attentions()
    )
    config = parse_config(family, raw).to_dict()
    free = () if scaled else LENGTHS
    # As when a config is read: a field of another release that is off says nothing.
    off = {field for field, value in config.items() if field not in family.fields and value in (None, False, {}, [])}
    return {
        field: value
        for field, value in config.items()
        if field not in free and field not in off and not HARMLESS.fullmatch(field)
    }
