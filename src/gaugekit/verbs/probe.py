"""`probe`: what the norms and heads of a model do to the states of a text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gaugekit.checkpoint import Checkpoint, open_checkpoint
from gaugekit.models import Spec, read_spec
from gaugekit.models.spec import Attention, Norm
from gaugekit.models.view import View
from gaugekit.symmetry.wiring import wire
from gaugekit.verbs.attending import HeadStates, HeadWatch
from gaugekit.verbs.inspect import Track, untracked
from gaugekit.verbs.loading import load_finite
from gaugekit.verbs.running import forward, load_model, module_of
from gaugekit.verbs.states import NormStates, NormWatch, norm_places
from gaugekit.verbs.texts import windows

Precision = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class ProbeReport:
    """What a text's states look like at every norm and head of the stream that reads it.

    `tokens`, of `distinct` kinds, were run in windows of `length`; Gram spectra and unselectable keys were taken on the
    first `samples` of them.
    """

    model: str
    family: str
    stream: str
    text: str
    tokens: int
    distinct: int
    length: int
    samples: int
    computed_in: str
    norms: tuple[NormStates, ...]
    heads: tuple[HeadStates, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `gaugekit probe --json`."""
        return asdict(self)


def probe(
    reference: str | PathLike[str],
    text: str | PathLike[str],
    *,
    tokenizer: str | PathLike[str] | None = None,
    length: int = 256,
    rows: int = 4,
    tokens: int | None = 32_768,
    samples: int = 4,
    dtype: Precision = "float32",
    device: str = "cpu",
    revision: str | None = None,
    track: Track[Any] = untracked,
) -> ProbeReport:
    """Run a text through a model and measure the states at every norm and head [S; Brody et al.; Gupta et al.;
    Shirodkar & Narayanan; DyT].

    The text is cut into windows of `length` tokens, `rows` of which run at a time, until `tokens` or a few more have
    been read (None: all of it). Statistics are float64 and streamed: memory grows with the model (d² numbers a norm)
    and the window, not with the text. `samples` windows also give Gram spectra (t³ each) and unselectable keys (least
    squares for each key that no cheap query shows to be selectable). `tokenizer` is another directory, tokenizer.json
    or GGUF than the checkpoint's own. Of a model with several streams the one that reads text is probed; Whisper's
    decoder hears silence (an input of zeros).

    Raises `CheckpointError` or `UnsupportedArchitecture`, `GaugekitError` for states that are not finite, and
    `ValueError` for a `length`, `rows` or `samples` below 1.
    """
    for name, value in (("length", length), ("rows", rows), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    checkpoint = open_checkpoint(reference, revision)
    spec = read_spec(checkpoint)
    words = windows(checkpoint, spec, Path(text), length, rows, None if tokenizer is None else Path(tokenizer))
    first = next(words)  # a text that cannot be read is refused before the model is loaded
    model = load_model(checkpoint, spec, getattr(torch, dtype)).to(device)
    watches = _Watches(checkpoint, spec, model, samples)
    feed = _feed(spec, model)
    seen, kinds = 0, torch.zeros(0, dtype=torch.long)
    total = None if tokens is None else min(max(1, -(-tokens // first.numel())), sys.maxsize)
    for batch in track(islice(chain([first], words), total), total, "text"):
        watches.run(feed(batch.to(device)), batch.shape)
        seen += batch.numel()
        kinds = torch.cat([kinds, batch.reshape(-1)]).unique()
    norms = list(watches.norms.values())
    return ProbeReport(
        str(reference),
        spec.family,
        spec.main.name,
        str(text),
        seen,
        len(kinds),
        first.shape[-1],
        watches.sampled,
        dtype,
        tuple(watch.states() for watch in track(norms, len(norms), "kernels")),
        tuple(watch.states() for watch in watches.heads),
    )


def _feed(spec: Spec, model: Any) -> Callable[[Tensor], dict[str, Any]]:
    """From token ids to the model's inputs."""
    if spec.family != "whisper":
        return lambda ids: {"input_ids": ids}
    c = model.config
    weight = next(model.parameters())
    silence = weight.new_zeros(1, c.num_mel_bins, 2 * c.max_source_positions)
    memory = forward(model.get_encoder(), input_features=silence).last_hidden_state
    return lambda ids: {"decoder_input_ids": ids, "encoder_outputs": (memory.expand(len(ids), -1, -1),)}


class _Watches:
    """The watches on a model's norms and heads. One batch's states pass through memory, one norm at a time."""

    def __init__(self, checkpoint: Checkpoint, spec: Spec, model: nn.Module, samples: int) -> None:
        self._model, self._samples = model, samples
        self.sampled = 0
        self._shape: tuple[int, ...] = ()

        def load(view: View) -> Tensor:
            return view.read(load_finite(checkpoint, view.name)).double()

        wiring = wire(spec, "hidden")[spec.main.name]
        dtype = next(model.parameters()).dtype
        self.norms: dict[Norm, NormWatch] = {}
        for norm, layer, place in norm_places(spec.main):
            bias = None if norm.bias is None else load(norm.bias)
            self.norms[norm] = NormWatch(norm, layer, place, load(norm.weight), bias, dtype)
        self.heads = [
            HeadWatch(layer, branch.body, wiring.sources[layer, number], load)
            for layer, block in enumerate(spec.main.blocks)
            for number, branch in enumerate(block.branches)
            if isinstance(branch.body, Attention) and branch.body.memory is None
        ]
        # What reads the stream as it is, reads what its layer is given: no family has a branch before such attention.
        self._raw = [head for head in self.heads if head.source is None]
        modules = dict(model.named_modules())
        prefix = getattr(model, "base_model_prefix", "")
        for norm, watch in self.norms.items():
            module_of(modules, norm.where, prefix).register_forward_hook(self._watching(norm, watch))

    @property
    def _left(self) -> int:
        """How many of the coming windows are samples."""
        return self._samples - self.sampled

    def _watching(self, norm: Norm, watch: NormWatch) -> Callable[..., None]:
        readers = [head for head in self.heads if head.source == norm]

        def hook(_: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
            # Some classes flatten their windows on the way.
            states, normed = (x.detach().cpu().reshape(*self._shape, -1) for x in (given[0], output))
            watch.add(states, normed, self._left)
            for head in readers:
                for window in states[: self._left]:
                    head.search(window)

        return hook

    def run(self, inputs: dict[str, Any], shape: tuple[int, ...]) -> None:
        """One batch of (rows, length) tokens through the model."""
        self._shape = shape
        out = forward(self._model, **inputs, output_attentions=True, output_hidden_states=bool(self._raw))
        weights = out.decoder_attentions if "encoder_outputs" in inputs else out.attentions
        for head, each in zip(self.heads, weights, strict=True):
            head.attend(each.cpu())
        for head in self._raw:
            for window in out.hidden_states[head.layer][: self._left]:
                head.search(window.cpu())
        self.sampled += min(self._left, len(weights[0]))
