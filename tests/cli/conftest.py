"""A tiny checkpoint as `transformers` saves it, and the command line called in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers

from gaugekit.cli.main import main


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> Result:
        code = main([str(each) for each in arguments])
        said = capsys.readouterr()
        return Result(code, said.out, said.err)

    return call


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("models") / "tiny"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(saved, tmp_path / "tiny")
