"""What is refused before a model is moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from cases import bert_like

from gaugekit.errors import CheckpointError
from gaugekit.verbs.align import align
from gaugekit.verbs.canonicalize import canonicalize
from gaugekit.verbs.scramble import scramble

MOVES: dict[str, Callable[..., Any]] = {
    "align": lambda model, out, **named: align(model, model, out, **named),
    "canonicalize": canonicalize,
    "scramble": lambda model, out, **named: scramble(model, out, seed=0, **named),
}


@pytest.mark.parametrize("move", MOVES)
def test_heads_that_read_coordinates_of_states(move: str, tmp_path: Path) -> None:
    """Nothing of theirs is moved, so coordinates that they read must stay."""
    config = transformers.BertConfig(**bert_like())
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "head")
    transformers.BertModel(config).save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match=r"head: classifier.bias belongs to a head for another task"):
        MOVES[move](tmp_path / "head", tmp_path / "out", observable="similarities")
    assert not (tmp_path / "out").exists()
    MOVES[move](tmp_path / "head", tmp_path / "out", observable="hidden")
    MOVES[move](tmp_path / "bare", tmp_path / "other", observable="similarities")
