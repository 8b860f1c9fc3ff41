"""The decoder as a class of `transformers`, for those of its compositions that have none there.

Importing this file registers it, so that `AutoModelForCausalLM.from_pretrained` knows model type "gaugekit". A saved
model also brings a small file that imports this one, which `trust_remote_code=True` runs: with gaugekit installed,
nothing else needs to be imported.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils.generic import can_return_tuple

from gaugekit.errors import CheckpointError, ConfigError
from gaugekit.models.registry import HARMLESS
from gaugekit.models.remote import Imported, NotCopied, auto_map
from gaugekit.training.config import ModelConfig
from gaugekit.training.decoder import Decoder
from gaugekit.training.reading import from_dict

__all__ = ["GaugekitConfig", "GaugekitForCausalLM"]

_NAMES = tuple(field.name for field in fields(ModelConfig))
_PASSED = {"name_or_path", "experts_implementation"}  # by `from_pretrained` to every config
_KNOWN = {"num_items_in_batch", "use_cache"}  # the first for the loss; the other is passed unasked


class GaugekitConfig(NotCopied, PreTrainedConfig):
    """The fields of `ModelConfig`, under their names and under those that `transformers` uses for them.

    Raises: ConfigError for a key that is neither one of these nor one of `transformers` that changes no function, for
    values that do not go together, and for `norm_options` that JSON cannot hold.
    """

    model_type = "gaugekit"
    attribute_map = {  # noqa: RUF012, as in all of transformers
        "vocab_size": "vocab",
        "max_position_embeddings": "context",
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "tie_word_embeddings": "tied",
    }

    def __init__(self, **keys: Any) -> None:
        theirs = {
            name: keys[name] for name in keys if name not in _NAMES and (name in _PASSED or HARMLESS.fullmatch(name))
        }
        own = from_dict(ModelConfig, {name: keys[name] for name in keys if name not in theirs}, "config.json")
        own.check()
        try:
            json.dumps(own.norm_options)
        except TypeError as error:
            raise ConfigError(f"model.norm_options: config.json cannot hold them ({error})") from error
        super().__init__(**theirs)
        for name in _NAMES:
            setattr(self, name, getattr(own, name))
        self.auto_map = auto_map(GaugekitConfig, GaugekitForCausalLM)

    # A dataclass below this one would compare the fields of transformers only.
    __eq__ = PreTrainedConfig.__eq__

    @property
    def composition(self) -> ModelConfig:
        """What `Decoder` is made of. Raises `ConfigError` for a value that has been set wrong since."""
        return from_dict(ModelConfig, {name: getattr(self, name) for name in _NAMES}, "config")


class GaugekitForCausalLM(Imported, PreTrainedModel, GenerationMixin):
    """A `Decoder` behind the interface of `transformers`: logits (b, n, V) of input_ids (b, n), n up to the context.

    There is no padding and no cache. `generate` draws each token from the last `context` ones, as in training, where a
    window may begin anywhere in a text; so it may go on for longer than that.

    Raises: ValueError for an attention mask that hides tokens, or an argument that the decoder does not know;
    ConfigError for more tokens than the context; CheckpointError from `from_pretrained` for a file that lacks weights.
    """

    config_class = GaugekitConfig
    main_input_name = "input_ids"
    _tied_weights_keys = {"decoder.head.weight": "decoder.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: GaugekitConfig) -> None:
        super().__init__(config)
        self._drawn = False
        self.decoder = Decoder(config.composition)
        self.generation_config.use_cache = False
        self.post_init()
        self._drawn = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Logits, and with labels (b, n) the mean loss of each next token in nats; label −100 counts for nothing."""
        for name, value in kwargs.items():
            if name not in _KNOWN and value is not None and value is not False:
                raise ValueError(f"the decoder has no {name}: leave it out")
        if attention_mask is not None and (attention_mask.ndim != 2 or not bool(attention_mask.all())):
            raise ValueError(
                "the decoder has no padding, and attention_mask hides tokens: give rows of one length, all of them seen"
            )
        logits = self.decoder(input_ids)
        loss = None
        if labels is not None:
            items = kwargs.get("num_items_in_batch")
            loss = self.loss_function(logits, labels, self.decoder.config.vocab, num_items_in_batch=items)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]: called by keyword
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        last = slice(-self.decoder.config.context, None)
        seen = None if attention_mask is None else attention_mask[..., last]
        return {"input_ids": input_ids[:, last], "attention_mask": seen}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing for a new model, which the decoder has drawn; transformers also asks for what a file did not have."""
        tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        lacking = [name for name, tensor in tensors.items() if not getattr(tensor, "_is_hf_initialized", False)]
        if self._drawn and lacking:
            where = next((name for name, part in self.named_modules() if part is module), type(module).__name__)
            raise CheckpointError(
                f"{self.config.name_or_path or 'checkpoint'}: has no {where}.{lacking[0]} of the shape that its config "
                "asks for: it is damaged, or of another model"
            )

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.head


AutoConfig.register(GaugekitConfig.model_type, GaugekitConfig, exist_ok=True)
AutoModelForCausalLM.register(GaugekitConfig, GaugekitForCausalLM, exist_ok=True)
