"""Classes of ours that `from_pretrained` finds, by a small file beside the weights that `trust_remote_code=True` runs.

With gaugekit installed, that file is all that a saved model needs to bring: it imports the classes from here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["CODE", "Imported", "NotCopied", "auto_map", "code"]

CODE = "modeling_gaugekit"
"""The file beside the weights that says where the classes are, without its suffix."""


def auto_map(config: type[PreTrainedConfig], model: type[PreTrainedModel]) -> dict[str, str]:
    """The entry of config.json by which `transformers` looks into that file."""
    return {"AutoConfig": f"{CODE}.{config.__name__}", "AutoModelForCausalLM": f"{CODE}.{model.__name__}"}


def code(config: type[PreTrainedConfig], model: type[PreTrainedModel]) -> str:
    """The text of that file."""
    return f"from {model.__module__} import {config.__name__}, {model.__name__}  # noqa: F401\n"


class NotCopied:
    """Mixin of a config class: the package's own file is not saved with every model."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: it would make `transformers` save a copy."""


class Imported(NotCopied):
    """Mixin of a model class: what is saved brings the small file in place of a copy."""

    config: Any

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As in transformers, and `modeling_gaugekit.py` beside the weights."""
        kinds: Any = type(self.config), type(self)
        self.config.auto_map = auto_map(*kinds)
        super().save_pretrained(save_directory, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        Path(save_directory, f"{CODE}.py").write_text(code(*kinds), encoding="utf-8")
