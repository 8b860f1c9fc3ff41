"""Running a checkpoint through `transformers` in a stated precision, on inputs that fit it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gaugekit.checkpoint import Checkpoint
from gaugekit.errors import CheckpointError
from gaugekit.models import Spec, quiet
from gaugekit.models.spec import MoE
from gaugekit.symmetry import Observable
from gaugekit.symmetry.base import STATES
from gaugekit.verbs.texts import position_tables


class Float64(TorchFunctionMode):
    """Takes every cast to float32 as one to float64.

    Several `transformers` classes cast to float32 inside norms, softmaxes and rotary positions, whatever the model's
    dtype; under this mode a model in float64 really computes in float64.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            func = Tensor.double
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


@dataclass(frozen=True)
class Outputs:
    """What one model gave: the observable (rows, n), or inner products one below the other, and the states of every
    layer of its main stream (rows, d)."""

    observable: Tensor
    layers: tuple[Tensor, ...]


def load_model(checkpoint: Checkpoint, spec: Spec, dtype: torch.dtype) -> Any:
    """The `transformers` model of a checkpoint, in evaluation mode, attention written out."""
    import transformers

    if checkpoint.format == "config":
        raise CheckpointError(f"{checkpoint.path} has a config but no weights: there is nothing to run")
    if spec.family == "whisper":
        kind: Any = transformers.WhisperForConditionalGeneration
    elif spec.main.head is not None:
        kind = transformers.AutoModelForCausalLM
    else:
        kind = transformers.AutoModel
    where: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.path, "attn_implementation": "eager"}
    if checkpoint.format == "gguf":
        where |= {"pretrained_model_name_or_path": checkpoint.path.parent, "gguf_file": checkpoint.path.name}
    if any(isinstance(branch.body, MoE) for block in spec.main.blocks for branch in block.branches):
        where["experts_implementation"] = "eager"  # the grouped kernels know no float64
    # transformers shows the progress of GGUF whatever it is told.
    with quiet(), redirect_stderr(io.StringIO()):
        try:
            return kind.from_pretrained(**where, dtype=dtype, local_files_only=True).eval()
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            line = " ".join(str(error).split())
            raise CheckpointError(f"{checkpoint.path} cannot be loaded by transformers: {line}") from error


def random_batch(model: Any, spec: Spec, length: int, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Inputs drawn at random that fit the model: tokens, images, or sound and tokens."""
    c = model.config
    dtype = next(model.parameters()).dtype

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    if spec.family == "vit":
        size = (c.image_size, c.image_size) if isinstance(c.image_size, int) else tuple(c.image_size)
        return {"pixel_values": gaussian(rows, c.num_channels, *size)}
    limit = min(length, *(table.rows.shape[0] - len(table.dead_rows) for table in position_tables(spec)), 1 << 30)
    words = c.get_text_config()
    used = torch.tensor([i for i in range(words.vocab_size) if i != words.pad_token_id])
    ids = used[torch.randint(len(used), (rows, limit), generator=generator)]
    if spec.family == "whisper":
        sound = gaussian(rows, c.num_mel_bins, 2 * c.max_source_positions)
        return {"input_features": sound, "decoder_input_ids": ids}
    return {"input_ids": ids}


def module_of(modules: dict[str, nn.Module], where: str, prefix: str) -> nn.Module:
    """The module of that name on disk."""
    found = next((modules[name] for name in _names(where, prefix) if name in modules), None)
    if found is None:
        raise CheckpointError(f"{where} is no module of the model that transformers builds: its states cannot be read")
    return found


def parameters_of(model: nn.Module, tensors: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The name of each tensor's parameter, of those that are on disk. Raises `CheckpointError` where one is not held as
    it is stored: `transformers` puts experts together."""
    held = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    prefix, found = getattr(model, "base_model_prefix", ""), {}
    for name, shape in tensors.items():
        place = next((each for each in _names(name, prefix) if held.get(each) == shape), None)
        if place is not None:
            found[name] = place
    for name in tensors.keys() - found.keys():
        # Some are renamed when they are loaded: then it is the only one of that shape that is left.
        left = [each for each in held.keys() - set(found.values()) if held[each] == tensors[name]]
        if len(left) != 1:
            raise CheckpointError(
                f"{name} is no parameter of the model that transformers builds: it is held in another form"
            )
        found[name] = left[0]
    return {name: found[name] for name in tensors}


def _names(where: str, prefix: str) -> tuple[str, ...]:
    """What may be called so in memory: `transformers` leaves out a base model's own name, its prefix, where it is
    loaded alone."""
    return where, where.partition(".")[2], f"{prefix}.{where}"


def forward(model: Any, **inputs: Any) -> Any:
    """The model's output without gradients, in float64 throughout if the model is."""
    wide = next(model.parameters()).dtype == torch.float64
    with torch.no_grad(), Float64() if wide else nullcontext():
        return model(**inputs)


def run(model: Any, spec: Spec, batch: dict[str, Tensor], observable: Observable) -> Outputs:
    """The observable and the layers' states, in float64 if the model is."""
    out = forward(model, **batch, output_hidden_states=True)
    states = out.decoder_hidden_states if spec.family == "whisper" else out.hidden_states
    layers = tuple(state.reshape(-1, state.shape[-1]) for state in states)
    if observable in STATES:
        value = states[-1] if spec.main.head is not None else out.last_hidden_state
    else:
        value = out.logits
        if observable == "logprobs":
            value = torch.log_softmax(value if value.dtype == torch.float64 else value.float(), -1)
    value = value.reshape(-1, value.shape[-1])
    return Outputs((value @ value.mT).reshape(-1, 1) if observable == "similarities" else value, layers)
