"""The Jacobian oracle: a tiny model of the real `transformers` class, its observable as a function of all parameters.

Parameters live in one flat float64 vector. The correspondence between the tensors that `save_pretrained` writes and
that vector is found by writing a model whose every parameter is its own index: no layout is assumed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor

from gaugekit.checkpoint import open_checkpoint
from gaugekit.models import Spec, read_spec
from gaugekit.symmetry import Observable, Symmetries, derive
from gaugekit.symmetry.base import STATES
from gaugekit.verbs.running import Float64

EPS = 0.1  # eps near zero would add scale directions


@dataclass(frozen=True)
class Case:
    """One shape of one family."""

    model_type: str
    config: Mapping[str, Any]
    observable: Observable = "logprobs"
    total: int | None = None  # redundant plus dead dimensions, where they are known on paper
    note: str = ""
    inputs: str = "text"

    def __str__(self) -> str:
        return f"{self.model_type}-{self.note}" if self.note else self.model_type


@dataclass
class Tiny:
    """A case built, drawn at random, written to disk and read back."""

    case: Case
    seed: int = 0
    eps: float = EPS
    model: Any = field(init=False)
    spec: Spec = field(init=False)
    symmetries: Symmetries = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        config = transformers.AutoConfig.for_model(self.case.model_type, **self.case.config)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        self.model = build(self.case, config).double().eval()
        for module in self.model.modules():
            for name in ("eps", "variance_epsilon"):
                if hasattr(module, name):
                    setattr(module, name, self.eps)
        self.parameters = [p.requires_grad_() for p in self.model.parameters()]
        self.names = [name for name, _ in self.model.named_parameters()]
        sizes = [p.numel() for p in self.parameters]
        self.size = sum(sizes)
        self._load(torch.arange(self.size, dtype=torch.float64))
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            checkpoint = open_checkpoint(folder)
            self.spec = read_spec(checkpoint)
            self.index = {name: checkpoint.load(name).long() for name in self.spec.tensors}
        self.symmetries = derive(self.spec, self.case.observable)
        self.theta = self._draw()

    def tensors(self, theta: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors as they lie on disk."""
        theta = self.theta if theta is None else theta
        return {name: theta[index] for name, index in self.index.items()}

    def flat(self, changed: Mapping[str, Tensor], base: Tensor) -> Tensor:
        """`base` (parameters,) with the given disk tensors put in their places."""
        theta = base.clone()
        for name, value in changed.items():
            theta[self.index[name].reshape(-1)] = value.reshape(-1)
        return theta

    def observe(self, theta: Tensor) -> Tensor:
        """The observable, flat, at given parameters."""
        self._load(theta)
        with torch.no_grad():
            return self._forward()

    @cached_property
    def jacobian(self) -> Tensor:
        """d observable / d parameters, (outputs, parameters): all outputs, or as many random mixtures of them as
        keep the rank."""
        self._load(self.theta)
        out = self._forward()
        rows = min(out.numel(), self.size + 32)
        mix = torch.eye(rows, dtype=torch.float64)
        if rows < out.numel():
            mix = torch.randn(rows, out.numel(), dtype=torch.float64) / out.numel() ** 0.5
        # Some rows at a time: all at once would not stay in the processor's cache.
        return torch.cat([self._pull_back(out, part) for part in mix.split(128)])

    def _pull_back(self, out: Tensor, rows: Tensor) -> Tensor:
        grads = torch.autograd.grad(
            out, self.parameters, rows, is_grads_batched=True, allow_unused=True, retain_graph=True
        )
        return torch.cat(
            [
                torch.zeros(len(rows), p.numel(), dtype=torch.float64) if g is None else g.reshape(len(rows), -1)
                for p, g in zip(self.parameters, grads, strict=True)
            ],
            dim=1,
        )

    def _load(self, theta: Tensor) -> None:
        start = 0
        with torch.no_grad():
            for p in self.parameters:
                p.copy_(theta[start : start + p.numel()].reshape(p.shape))
                start += p.numel()

    def _draw(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        parts = []
        for name, p in zip(self.names, self.parameters, strict=True):
            values = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if p.dim() == 1:
                values = 0.3 * values + (0.0 if name.endswith("bias") else 1.0)
            elif "embed" not in name and "wte" not in name and "wpe" not in name:
                values = 1.5 * values / p.shape[-1] ** 0.5
            parts.append(values.reshape(-1))
        return torch.cat(parts)

    @cached_property
    def batch(self) -> dict[str, Tensor]:
        return INPUTS[self.case.inputs](self)

    def _forward(self) -> Tensor:
        with Float64():
            out = self.model(**self.batch)
            if self.case.observable in STATES:
                states = out.last_hidden_state.flatten(0, -2)
                return (states if self.case.observable == "hidden" else states @ states.mT).reshape(-1)
            logits = out.logits
            if self.case.observable == "logprobs":
                logits = torch.log_softmax(logits, -1)
            return logits.reshape(-1)


def build(case: Case, config: Any) -> Any:
    if case.model_type == "whisper":
        return transformers.WhisperForConditionalGeneration(config)
    return (transformers.AutoModel if case.observable in STATES else transformers.AutoModelForCausalLM).from_config(
        config
    )


def _tokens(tiny: Tiny, length: int, rows: int) -> Tensor:
    """Random tokens in which every token that is not padding occurs."""
    config = tiny.model.config
    used = torch.tensor([i for i in range(config.vocab_size) if i != config.pad_token_id])
    return used[torch.stack([torch.randperm(len(used)) for _ in range(rows)])[:, :length]]


def rows(tiny: Tiny, length: int) -> int:
    """Sequences enough that hidden states of width 8 carry several times as many numbers as there are parameters."""
    return 30 + tiny.size // (4 * length)


def text(tiny: Tiny) -> dict[str, Tensor]:
    return {"input_ids": _tokens(tiny, 6, rows(tiny, 6))}


def typed_text(tiny: Tiny) -> dict[str, Tensor]:
    ids = _tokens(tiny, 6, rows(tiny, 6))
    return {"input_ids": ids, "token_type_ids": torch.randint(0, tiny.model.config.type_vocab_size, ids.shape)}


def images(tiny: Tiny) -> dict[str, Tensor]:
    c = tiny.model.config
    return {"pixel_values": torch.randn(rows(tiny, 5), c.num_channels, c.image_size, c.image_size, dtype=torch.float64)}


def audio(tiny: Tiny) -> dict[str, Tensor]:
    c = tiny.model.config
    batch = rows(tiny, c.max_target_positions)
    features = torch.randn(batch, c.num_mel_bins, 2 * c.max_source_positions, dtype=torch.float64)
    return {"input_features": features, "decoder_input_ids": _tokens(tiny, c.max_target_positions, batch)}


INPUTS: dict[str, Callable[[Tiny], dict[str, Tensor]]] = {
    "text": text,
    "typed text": typed_text,
    "images": images,
    "audio": audio,
}
