"""What a room of the lab is: parameters within bounds, and the numbers of a state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gaugekit.errors import GaugekitError

__all__ = ["BadState", "Choice", "Number", "Parameter", "Room", "State", "Vector", "plain_numbers"]

State = Mapping[str, Any]


class BadState(GaugekitError):
    """A state that a room does not have."""


class Parameter(ABC):
    """One of what a state is made of."""

    @abstractmethod
    def read(self, word: str) -> Any:
        """The value of a word in a URL. Raises `BadState`."""

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """As JSON, for the page."""


@dataclass(frozen=True)
class Number(Parameter):
    default: float
    low: float
    high: float

    def read(self, word: str) -> float:
        return _number(word, self.low, self.high)

    def document(self) -> dict[str, Any]:
        return {"kind": "number", "default": self.default, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Vector(Parameter):
    """As many numbers as the default has, with commas between them."""

    default: Sequence[float]
    low: float
    high: float

    def read(self, word: str) -> list[float]:
        words = word.split(",")
        if len(words) != len(self.default):
            raise BadState(f"has {len(words)} numbers instead of {len(self.default)}")
        return [_number(each, self.low, self.high) for each in words]

    def document(self) -> dict[str, Any]:
        return {"kind": "vector", "default": list(self.default), "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Choice(Parameter):
    default: str
    options: Sequence[str]

    def read(self, word: str) -> str:
        if word not in self.options:
            raise BadState(f"must be one of {', '.join(self.options)}")
        return word

    def document(self) -> dict[str, Any]:
        return {"kind": "choice", "default": self.default, "options": list(self.options)}


@dataclass(frozen=True)
class Room:
    """One screen of the lab.

    name        in the URL
    numbers     of a state: what stands beside the drawing; tensors, numbers, or lists of them
    given       fixed data that the page draws with
    """

    name: str
    parameters: Mapping[str, Parameter]
    numbers: Callable[[State], Mapping[str, Any]]
    given: Mapping[str, Any] = field(default_factory=dict)

    def read(self, words: Mapping[str, str]) -> dict[str, Any]:
        """The state of a URL's words; what they leave out stands at its default. Raises `BadState`."""
        unknown = sorted(words.keys() - self.parameters.keys())
        if unknown:
            raise BadState(f"{self.name} has no {unknown[0]!r}: it has {', '.join(self.parameters)}")
        state: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            try:
                state[name] = parameter.read(words[name]) if name in words else parameter.document()["default"]
            except BadState as error:
                raise BadState(f"{name} of {self.name} {error}") from error
        return state

    def answer(self, words: Mapping[str, str]) -> dict[str, Any]:
        """The numbers of a URL's state, as JSON has them."""
        return plain_numbers(self.numbers(self.read(words)))

    def document(self) -> dict[str, Any]:
        """What the page is built with."""
        parameters = {name: parameter.document() for name, parameter in self.parameters.items()}
        return {"parameters": parameters, "given": plain_numbers(self.given)}


def plain_numbers(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as lists of numbers."""
    return {name: _plain(value) for name, value in numbers.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return plain_numbers(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _number(word: str, low: float, high: float) -> float:
    try:
        value = float(word)
    except ValueError:
        raise BadState(f"must be a number, and {word[:40]!r} is none") from None
    if not math.isfinite(value) or not low <= value <= high:
        raise BadState(f"must lie from {low:g} to {high:g}")
    return value
