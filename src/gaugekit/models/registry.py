"""Families by model type, and the way from a checkpoint to its `Spec`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from gaugekit.checkpoint import Checkpoint
from gaugekit.errors import CheckpointError, UnsupportedArchitecture
from gaugekit.models import families
from gaugekit.models.gguf import from_gguf
from gaugekit.models.quiet import quiet
from gaugekit.models.source import Layout, Source
from gaugekit.models.spec import Spec, Stream

# Config fields that never change the function of a model in evaluation.
HARMLESS = re.compile(
    r"_.*|.*drop(out)?.*|.*pdrop|.*token_ids?|architectures|attn_implementation|auto_map|bad_words_ids"
    r"|begin_suppress_tokens|chunk_size_feed_forward|classifier_.*|diversity_penalty|do_sample|dtype"
    r"|early_stopping|encoder_stride|exponential_decay_length_penalty|finetuning_task|forced_.*"
    r"|gradient_checkpointing|id2label|init_std|initializer_(factor|range)|is_encoder_decoder|label2id"
    r"|(length|repetition)_penalty|(max|min)_length|model_type|no_repeat_ngram_size|encoder_no_repeat_ngram_size"
    r"|num_beam_groups|num_beams|num_labels|num_return_sequences|output_.*|prefix|pretraining_tp|problem_type"
    r"|remove_invalid_values|return_dict(_in_generate)?|router_aux_loss_coef|sep_token_id|suppress_tokens"
    r"|task_specific_params|temperature|tf_legacy_loss|tie_encoder_decoder|tokenizer_class|top_[kp]"
    r"|torch_dtype|torchscript|transformers(\.js|_js)?_(version|config)|typical_p|unsloth_.*|use_bfloat16|use_cache"
)
BUFFERS = (r"rotary_emb\.inv_freq$", r"(embeddings|embed)\.position_ids$", r"attn\.(attention\.)?(masked_)?bias$")


@dataclass(frozen=True)
class Family:
    """One architecture family. `build(source)` declares every tensor and returns the streams.

    `fields`: the config fields that `build` has taken into account; any other field that is not harmless is
    refused. `aliases`: prefixes under which the same tensors may be stored. `buffers`: patterns of tensors that
    are no parameters. `outside`: patterns of tensors outside the model proper, with the reason they are dead.
    `wrappers`: model types that hold such a model under `text_config`, beside parts for other kinds of input.
    `living`: (pattern, name on disk) where a module in memory calls its parameters otherwise than its files do.
    """

    name: str
    model_types: tuple[str, ...]
    build: Callable[[Source], tuple[Stream, ...]]
    fields: frozenset[str]
    aliases: tuple[tuple[str, str], ...] = ()
    buffers: tuple[str, ...] = BUFFERS
    outside: tuple[tuple[str, str], ...] = ()
    wrappers: tuple[str, ...] = ()
    living: tuple[tuple[str, str], ...] = ()


def words(fields: str) -> frozenset[str]:
    """Config fields, written one after the other."""
    return frozenset(fields.split())


_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Add a family; a model type registered twice is an error of the programmer."""
    for model_type in (*family.model_types, *family.wrappers):
        if model_type in _FAMILIES:
            raise ValueError(f"model type {model_type} is registered twice")
        _FAMILIES[model_type] = family
    return family


def registered() -> dict[str, Family]:
    """All families by model type."""
    if not _FAMILIES:
        for module in iter_modules(families.__path__):
            register(import_module(f"{families.__name__}.{module.name}").FAMILY)
    return dict(_FAMILIES)


def read_spec(checkpoint: Checkpoint) -> Spec:
    """The `Spec` of a checkpoint, from its config and headers alone: no tensor is loaded.

    Raises `UnsupportedArchitecture` for a model type, config field or tensor that no family describes, and
    `CheckpointError` for a tensor that is missing or has another shape than the config gives.
    """
    shapes = {name: header.shape for name, header in checkpoint.headers.items()} or None
    where = f"{checkpoint.path}/config.json"
    if checkpoint.format == "gguf":
        raw, layout = from_gguf(checkpoint)
        return describe(raw, shapes, where, layout)
    return describe(checkpoint.config, shapes, where)


def family_of(raw: Mapping[str, Any], where: str) -> Family:
    """The family of a raw config; `where` says in errors whose config it is."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{where} names no model_type: add it, or use another checkpoint")
    family = registered().get(model_type)
    if family is None:
        known = ", ".join(sorted(registered()))
        raise UnsupportedArchitecture(f"model type {model_type!r} is not supported; supported are {known}")
    return family


def describe(
    raw: dict[str, Any],
    shapes: Mapping[str, tuple[int, ...]] | None,
    where: str,
    layout: Layout | None = None,
    beside: str | None = None,
) -> Spec:
    """The `Spec` of a raw config and of tensors by their names on disk, or of all that the config asks for.

    `beside`: a pattern of tensors beside the model proper, a task's head for instance; they are dead, as those of
    `Family.outside` are. Raises as `read_spec` does.
    """
    family = family_of(raw, where)
    if raw["model_type"] in family.wrappers:
        raw = _text_part(raw, where)
    source = Source(family.name, parse_config(family, raw), shapes, family.aliases, layout)
    streams = family.build(source)
    outside = dict(family.outside) | ({} if beside is None else {beside: "beside the model proper"})
    source.leftover(family.buffers, outside)
    return Spec(family.name, streams, source.tensors, tuple(source.dead), tuple(source.copies))


def _text_part(raw: dict[str, Any], where: str) -> dict[str, Any]:
    inner = raw.get("text_config")
    if not isinstance(inner, dict) or "model_type" not in inner:
        raise CheckpointError(f"{where} has no text_config with a model_type: it is incomplete")
    # The wrapper's own word on ties is the one that its class follows.
    return inner | {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}


def parse_config(family: Family, raw: dict[str, Any]) -> Any:
    """The `transformers` config object of a raw config, with its defaults filled in and every field accounted for."""
    for field, value in raw.items():
        if field not in family.fields and not HARMLESS.fullmatch(field) and value not in (None, False, {}, []):
            raise UnsupportedArchitecture(
                f"config field {field}={value!r} of {family.name} is not known: it may change the function, "
                "so the symmetries cannot be derived"
            )
    from huggingface_hub.errors import StrictDataclassError  # these two are slow to import,
    from transformers import AutoConfig  # and needed by no other part of this package

    kwargs = {key: value for key, value in raw.items() if key != "model_type"}
    try:
        with quiet():
            return AutoConfig.for_model(raw["model_type"], **kwargs)
    except (TypeError, ValueError, KeyError, ZeroDivisionError, AttributeError, StrictDataclassError) as error:
        line = " ".join(str(error).split())
        raise CheckpointError(f"config of {family.name} cannot be read: {line}") from error
