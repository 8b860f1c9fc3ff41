"""Models inside installed packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

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


@pytest.fixture(scope="session")
def convert() -> ModuleType:
    """tests/real/convert.py, which lies beside this file and is in no package."""
    spec = importlib.util.spec_from_file_location("convert", Path(__file__).with_name("convert.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def rxnfp(inside: Inside, convert: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of reactions and two fine-tunes of it."""
    out = tmp_path_factory.mktemp("rxnfp")
    for name in ("bert_pretrained", "bert_ft", "bert_ft_10k_25s"):
        convert.bert(inside("rxnfp", f"models/transformers/{name}"), out / name)
    return out
