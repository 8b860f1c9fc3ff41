"""JSON that every reader takes."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["finite", "strict_json"]


def strict_json(document: dict[str, Any]) -> str:
    """One line of ASCII. JSON has no infinity, to which weights near the limit of float64 can lead: null is for it."""
    try:
        return json.dumps(document, allow_nan=False)
    except ValueError:
        return json.dumps(finite(document), allow_nan=False)


def finite(value: Any) -> Any:
    """A document with null for every number that is not finite."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
