"""A lab that runs, with a model or without."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import uvicorn
from cases import llama_like
from on_disk import letters, tokenizer

from gaugekit.lab.app import application
from gaugekit.lab.model import Reading, reports_of
from gaugekit.lab.reports import Reports
from gaugekit.lab.server import listen


@contextmanager
def running(reports: Reports) -> Iterator[str]:
    """The address of a lab in a thread of this process."""
    bound = listen(0)
    server = uvicorn.Server(uvicorn.Config(application(reports), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


@pytest.fixture(scope="session")
def lab() -> Iterator[str]:
    """Without a model."""
    with running(Reports()) as address:
        yield address


@pytest.fixture(scope="session")
def serving() -> Callable[[Reports], Any]:
    """`running`, for reports of one's own."""
    return running


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, four heads on two key/value heads, and a tokenizer of 13 letters."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    sizes = llama_like(vocab_size=13, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    tokenizer(13).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters(tmp_path_factory.mktemp("texts") / "text.txt", 13, 2000)


@pytest.fixture(scope="session")
def made(model: Path, text: Path) -> Reports:
    """All three, of the model beside itself."""
    reports = reports_of(str(model), reading=Reading(text, 512), other=str(model))
    reports.make_all()
    assert not reports.failed
    return reports
