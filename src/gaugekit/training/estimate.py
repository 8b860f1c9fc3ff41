"""What a run would take: parameters, tokens and memory, found without numbers and without writing anything.

The model, a pass of it and a step of the optimizer run as they do in training, on tensors that have shapes only. So
weights, gradients and the optimizer's state are exact. Activations are what a forward pass keeps for the backward one,
compiled or not as if it were not; what is needed for a moment only, and by torch itself, comes on top.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gaugekit.training import distributed, optimizers
from gaugekit.training.config import Config, DataConfig, ModelConfig
from gaugekit.training.decoder import Decoder
from gaugekit.training.runs import Run
from gaugekit.training.sources import texts
from gaugekit.training.steps import loss_sum

__all__ = ["Estimate", "estimate"]

BYTES = 256


@dataclass(frozen=True)
class Estimate:
    """Sizes are bytes of the whole run; activations are those of one process, which has `part` windows at a time."""

    config: dict[str, Any]
    vocab: int
    vocab_known: bool  # a tokenizer that is not trained yet may have fewer tokens
    parameters: int
    parameters_without_tables: int  # without embedding and positions, and a head that is the embedding
    steps: int
    tokens_per_step: int
    tokens: int
    training_tokens: int | None  # in the data; None: not known before they are encoded
    epochs: float | None
    weights: int
    gradients: int
    optimizer_state: int
    activations: int
    part: int
    flops_per_token: int  # 6 for each parameter outside tables: forward and backward, without scores of attention

    @property
    def memory(self) -> int:
        return self.weights + self.gradients + self.optimizer_state + self.activations

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "memory": self.memory}


def estimate(config: Config, out: Path | None = None) -> Estimate:
    """What a run of this config would take. Of `out`, token files that are there already are asked how many they are.

    Raises: ConfigError, DataError as the run itself would, but for what is seen only when all of the text is read.
    """
    config.check()
    known, tokens = _data(config.data, out)
    config.model.check_vocab(known)
    vocab = config.model.vocab or known or config.data.vocab
    model_config = replace(config.model, vocab=vocab)
    part = distributed.share(config.run)
    wide = 2 if config.run.precision == "float64" else 1  # found in float32
    shapes = FakeTensorMode()
    with shapes, _Any():
        model = Decoder(model_config)
        activations = _activations(model, part, model_config, config.run.precision)
    with _Any(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor", category=UserWarning)
        optimizer = optimizers.make(model, config.optimizer)
    with shapes, _Any():
        parameters = [p for p in model.parameters() if p.requires_grad]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        state = wide * _size(x for entry in optimizer.state.values() for x in entry.values() if isinstance(x, Tensor))
        buffers = _size(model.buffers())
    tables = [model.embedding, *([model.positions] if model.positions is not None else [])]
    total = sum(p.numel() for p in model.parameters())
    inside = total - sum(p.numel() for table in tables for p in table.parameters())
    per_step = config.run.batch * config.model.context
    return Estimate(
        config=config.to_dict(),
        vocab=vocab,
        vocab_known=bool(config.model.vocab or known),
        parameters=total,
        parameters_without_tables=inside,
        steps=config.run.steps,
        tokens_per_step=per_step,
        tokens=config.run.steps * per_step,
        training_tokens=tokens,
        epochs=None if not tokens else config.run.steps * per_step / tokens,
        weights=wide * _size(model.parameters()) + buffers,
        gradients=wide * _size(parameters),
        optimizer_state=state,
        activations=wide * activations,
        part=part,
        flops_per_token=6 * (inside + (model.embedding.weight.numel() if config.model.tied else 0)),
    )


class _Any(TorchDispatchMode):
    """Where the course of a computation depends on a number that is not there, it is taken to be 1, or true."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.bool:
            return args[0].flatten(0, args[1][0].ndim - 1)  # all that a mask may choose
        return func(*args, **(kwargs or {}))


def _activations(model: Decoder, windows: int, config: ModelConfig, precision: str) -> int:
    """Bytes that a forward pass keeps besides the weights."""
    own = {p.untyped_storage()._cdata for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Any] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # held, lest another one get its address
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        tokens = torch.zeros(windows, config.context, dtype=torch.long)
        loss_sum(model, tokens, tokens, precision)
    return sum(storage.nbytes() for storage in kept.values())


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _data(config: DataConfig, out: Path | None) -> tuple[int, int | None]:
    """The tokenizer's vocabulary, 0 where it is not trained yet, and the tokens for training."""
    folder = Path(config.cache).expanduser() if config.cache else Run(out).data if out else None
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8")) if folder else {}
        if (meta["source"], meta["tokenizer"]) == (config.source, config.tokenizer):
            return int(meta["vocab"]), int(meta["train"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    parts = texts(config)  # DataError where there is no text
    if config.tokenizer != "byte":
        return 0, None
    path = Path(config.source).expanduser()
    if config.source == "pydoc":
        size = sum(len(part.encode()) for part in parts)
    elif path.is_dir():
        return BYTES, None
    else:
        size = path.stat().st_size
    return BYTES, round((1 - config.held_out) * size)
