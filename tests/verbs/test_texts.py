"""Text in rows of tokens, read piece by piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from gaugekit.errors import CheckpointError
from gaugekit.verbs import texts
from gaugekit.verbs.texts import batches


@pytest.fixture
def tokenizer() -> Any:
    """Every character is a token."""
    bare = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="?"))
    bare.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bare)


@pytest.fixture
def framed(tokenizer: Any) -> Any:
    """As BERT: a token before and one behind."""
    bare = tokenizer.backend_tokenizer
    bare.post_processor = processors.TemplateProcessing(single="( $A )", special_tokens=[("(", 40), (")", 41)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bare)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def characters(rows: torch.Tensor) -> list[str]:
    return ["".join(map(chr, row)) for row in rows.tolist()]


def test_rows(tokenizer: Any, tmp_path: Path) -> None:
    text = write(tmp_path / "a", "abcdefghijk")
    assert [characters(b) for b in batches(tokenizer, text, 3, 2)] == [["abc", "def"], ["ghi"]]


def test_pieces_leave_no_trace(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "".join(chr(97 + i % 26) + ("\n" if i % 7 == 0 else "") for i in range(200))
    text = write(tmp_path / "a", words)
    whole = list(batches(tokenizer, text, 5, 3))
    monkeypatch.setattr(texts, "PIECE", 11)
    pieces = list(batches(tokenizer, text, 5, 3))
    assert all(torch.equal(x, y) for x, y in zip(whole, pieces, strict=True))
    assert "".join(line for b in whole for line in characters(b)) == words[: len(words) // 5 * 5]


def test_where_a_text_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a newline, else before a space, which many tokenizers join to the word behind it; else anywhere."""
    monkeypatch.setattr(texts, "PIECE", 8)
    cuts = {
        "ab\ncd efgh\nij": ["ab\n", "cd efgh\n", "ij"],
        "one two three": ["one two", " three"],
        "abcdefghijkl": ["abcdefgh", "ijkl"],
        " bcdefghijkl": [" bcdefgh", "ijkl"],
        "": [],
    }
    for words, pieces in cuts.items():
        found = list(texts._pieces(write(tmp_path / "a", words)))
        assert "".join(found) == words
        assert found == pieces


def test_a_byte_order_mark_is_no_text(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfabc")
    assert [characters(b) for b in batches(tokenizer, tmp_path / "a", 3, 2)] == [["abc"]]


def test_special_tokens_stand_around_every_row(framed: Any, tmp_path: Path) -> None:
    text = write(tmp_path / "a", "abcdef")
    assert [characters(b) for b in batches(framed, text, 5, 2)] == [["(abc)", "(def)"]]


def test_a_short_text_is_one_short_row(framed: Any, tmp_path: Path) -> None:
    assert [characters(b) for b in batches(framed, write(tmp_path / "a", "ab"), 9, 2)] == [["(ab)"]]


def test_refused(framed: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="too short: it has 1 token"):
        next(batches(framed, write(tmp_path / "a", "a"), 9, 2))
    with pytest.raises(CheckpointError, match="no room"):
        next(batches(framed, write(tmp_path / "a", "abc"), 2, 2))
    with pytest.raises(CheckpointError, match="cannot be read"):
        next(batches(framed, tmp_path / "missing", 9, 2))
    (tmp_path / "a").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(CheckpointError, match="cannot be read"):
        next(batches(framed, tmp_path / "a", 9, 2))
