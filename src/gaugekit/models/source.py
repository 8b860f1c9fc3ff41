"""What a family file reads from: the config and the names of the tensors, never their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from gaugekit.errors import CheckpointError, UnsupportedArchitecture
from gaugekit.models.spec import Dead, Linear
from gaugekit.models.view import View


@dataclass(frozen=True)
class Layout:
    """How a file format stores a family in another way than the family's own files do: other names, rotary rows
    interleaved, and norms of the 1 + w kind stored with the one added."""

    rename: Callable[[str], str]
    interleaved: bool
    norms_complete: bool


class Source:
    """Declares the tensors of one model; a missing tensor or a wrong shape is refused at once.

    `shapes` are the tensors on disk, or None when only a config is at hand: then every declared tensor is taken
    to exist. `aliases` are (prefix, other prefix) pairs under which the same tensor may be stored.
    """

    def __init__(
        self,
        family: str,
        config: Any,
        shapes: Mapping[str, tuple[int, ...]] | None,
        aliases: tuple[tuple[str, str], ...] = (),
        layout: Layout | None = None,
    ) -> None:
        self.family = family
        self.config = config
        self.tensors: dict[str, tuple[int, ...]] = {}
        self.dead: list[Dead] = []
        self.copies: list[tuple[str, str]] = []
        self._shapes = shapes
        self._aliases = aliases
        self.layout = layout

    def __call__(self, name: str, *shape: int) -> View:
        """The tensor `name` with the shape the family gives it."""
        found = self._find(name)
        if found is None:
            raise CheckpointError(f"tensor {name} of {self.family} is missing: the checkpoint is incomplete")
        if self._shapes is not None and self._shapes[found] != shape:
            raise CheckpointError(
                f"tensor {found} has shape {list(self._shapes[found])} where the config asks for {list(shape)}: "
                "config and weights do not belong together"
            )
        self.tensors[found] = shape
        return View(found, shape)

    def has(self, name: str, otherwise: bool = True) -> bool:
        """Whether the tensor is on disk; `otherwise` when only a config is at hand."""
        return otherwise if self._shapes is None else self._find(name) is not None

    def linear(self, name: str, out: int, width: int, bias: bool = True) -> Linear:
        """A torch Linear on disk, as a reader: weight (out, width), bias (out,)."""
        return Linear(self(f"{name}.weight", out, width), self(f"{name}.bias", out) if bias else None)

    def writer(self, name: str, width: int, columns: int, bias: bool = True) -> Linear:
        """A torch Linear on disk, as a writer: weight seen as (columns, width), bias (width,)."""
        weight = self(f"{name}.weight", width, columns).transpose(0, 1)
        return Linear(weight, self(f"{name}.bias", width) if bias else None)

    def unused(self, view: View, reason: str) -> None:
        """Parameters that no observable depends on."""
        self.dead.append(Dead(view, reason))

    def tie(self, name: str, original: View) -> None:
        """`name` is the same tensor as `original`; on disk it may be stored again or not at all."""
        found = self._find(name)
        if self._shapes is None or found is None or found == original.name:
            return
        if self._shapes[found] != original.disk_shape:
            raise CheckpointError(f"{found} and {original.name} are tied by the config but differ in shape")
        self.copies.append((found, original.name))

    def refuse(self, field: str, why: str) -> NoReturn:
        value = getattr(self.config, field, None)
        raise UnsupportedArchitecture(f"{self.family} with {field}={value!r} is not supported: {why}")

    def leftover(self, buffers: tuple[str, ...], outside: Mapping[str, str]) -> None:
        """Account for every tensor that was not declared: buffers are no parameters, tensors outside the model
        proper are dead, anything else is refused by name."""
        copies = {copy for copy, _ in self.copies}
        for name, shape in (self._shapes or {}).items():
            if name in self.tensors or name in copies or any(re.search(p, name) for p in buffers):
                continue
            reason = next((why for pattern, why in outside.items() if re.search(pattern, name)), None)
            if reason is None:
                raise UnsupportedArchitecture(
                    f"tensor {name} is not part of {self.family} as gaugekit knows it: "
                    "the model may be a variant; please report it"
                )
            self.tensors[name] = shape
            self.unused(View(name, shape), reason)

    def _find(self, name: str) -> str | None:
        names = [name] + [
            other + name.removeprefix(prefix) for prefix, other in self._aliases if name.startswith(prefix)
        ]
        if self.layout is not None:
            names = [self.layout.rename(each) for each in names]
        if self._shapes is None:
            return names[0]
        return next((each for each in names if each in self._shapes), None)
