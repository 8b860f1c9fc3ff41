"""Models inside installed packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

Inside = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def inside() -> Inside:
    """A file of an installed package, without importing it."""

    def find(package: str, pattern: str) -> Path:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"{package} is not installed: run `make models`")
        return next(Path(spec.submodule_search_locations[0]).glob(pattern))

    return find
