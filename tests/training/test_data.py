"""Text becomes tokens: exactly, once, whole or not at all. A step's batch is a function of the step."""

from __future__ import annotations

import json
import pydoc_data.topics
import random
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from two import environment_of_members

from gaugekit.errors import ConfigError, DataError
from gaugekit.training import sources
from gaugekit.training.config import DataConfig
from gaugekit.training.data import TokenData, Windows, evaluation, prepare
from gaugekit.training.sources import PIECE, pieces, texts
from gaugekit.training.tokenizers import Tokenizer, byte_tokenizer, train_bpe

WORDS = [
    "the",
    "cat's",
    "déjà",
    "vu",
    "漢字",
    "🎉",
    "don't",
    "42",
    "...",
    "e\u0301",
    "naïve",
    "x=y",
    "<s>",
    "\x00",
    "ß",
]
BETWEEN = [" ", " ", " ", "  ", "\n", "\n\n", "\r\n", "\t", "   \n ", "\u00a0", ""]


def drawn_text(characters: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    text = ""
    while len(text) < characters:
        text += draw.choice(WORDS) + draw.choice(BETWEEN)
    return text[:characters]


def write(path: Path, text: str) -> DataConfig:
    path.write_bytes(text.encode())
    return DataConfig(source=str(path))


def whole(data: TokenData) -> str:
    return data.tokenizer.decode([*data.train.tolist(), *data.held_out.tolist()])


def stamp(folder: Path) -> dict[str, tuple[int, int]]:
    return {each.name: (each.stat().st_ino, each.stat().st_mtime_ns) for each in folder.iterdir()}


# Tokenizers


TRAINED = train_bpe([drawn_text(4000)], 320)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tokenizer], Any]:
    """The tokenizer as `transformers` loads it, beside configs of models that have tokenizers of their own."""
    made = {}
    for name, tokenizer in {"byte": byte_tokenizer(), "bpe": TRAINED}.items():
        for model_type in ("", "gpt2", "llama"):
            folder = tmp_path_factory.mktemp(name)
            tokenizer.save(folder)
            if model_type:
                (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
            made.setdefault(name, []).append(transformers.AutoTokenizer.from_pretrained(folder))
    return lambda tokenizer: made["byte" if tokenizer.bytewise else "bpe"]


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), TRAINED], ids=["byte", "bpe"])
@given(text=st.text() | st.lists(st.sampled_from(WORDS + BETWEEN)).map("".join))
@settings(deadline=None)
def test_any_text_comes_back_exactly(loaded: Callable[[Tokenizer], Any], tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= each < tokenizer.vocab for each in ids)
    assert np.concatenate([*tokenizer.arrays([text]), np.array([])]).tolist() == ids
    for theirs in loaded(tokenizer):
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text


def test_ids_of_bytes_are_their_values(loaded: Callable[[Tokenizer], Any]) -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.vocab == 256
    everything = "".join(map(chr, range(0x800))) + "\ud7ff\U0010ffff"
    assert tokenizer.encode(everything) == list(everything.encode())
    for theirs in loaded(tokenizer):
        assert theirs(everything)["input_ids"] == list(everything.encode())
        assert len(theirs) == 256
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_bpe_is_the_same_in_every_process(tmp_path: Path) -> None:
    config = replace(write(tmp_path / "text", drawn_text(3 * PIECE)), tokenizer="bpe", vocab=600)
    prepare(config, tmp_path / "here")
    there = tmp_path / "there"
    script = (
        "import pathlib; from gaugekit.training import config, data;"
        f"made = config.DataConfig(source={config.source!r}, tokenizer='bpe', vocab=600);"
        f"data.prepare(made, pathlib.Path({str(there)!r}))"
    )
    environment = environment_of_members() | {"TOKENIZERS_PARALLELISM": "false"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    for here in (tmp_path / "here").iterdir():
        assert here.read_bytes() == (there / here.name).read_bytes()


def test_bpe_learns_from_the_training_share_only(tmp_path: Path) -> None:
    text = drawn_text(5000)
    made = []
    for number, changed in enumerate((text, text[:4500] + "zyx " * 125, "zyx " * 125 + text[500:])):
        config = replace(write(tmp_path / "text", changed), tokenizer="bpe", vocab=400)
        prepare(config, tmp_path / str(number))
        made.append((tmp_path / str(number) / "tokenizer.json").read_bytes())
    assert made[0] == made[1] != made[2]


def test_bpe_has_the_asked_vocabulary_or_what_the_text_gives(tmp_path: Path) -> None:
    config = replace(write(tmp_path / "text", drawn_text(5000)), tokenizer="bpe")
    assert prepare(replace(config, vocab=300), tmp_path / "data").vocab == 300
    few = prepare(replace(config, vocab=60_000), tmp_path / "data")
    assert 300 < few.vocab < 1000 and few.vocab > few.train.max()


# Token files


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
@pytest.mark.parametrize("length", [PIECE, 60])
def test_tokens_are_those_of_the_text_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any, length: int
) -> None:
    monkeypatch.setattr(sources, "PIECE", length)
    text = drawn_text(3 * PIECE + 123)
    config = replace(write(tmp_path / "text", text), tokenizer=tokenizer, vocab=500, held_out=0.25)
    data = prepare(config, tmp_path / "data")
    middle = len(text) - round(len(text) / 4)
    assert data.train.tolist() == data.tokenizer.encode(text[:middle])
    assert data.held_out.tolist() == data.tokenizer.encode(text[middle:])
    # Any cut would do for bytes; for words it would not, so that the test can fail.
    blunt = [i for at in range(0, middle, 777) for i in data.tokenizer.encode(text[at : min(at + 777, middle)])]
    assert (blunt == data.train.tolist()) == (tokenizer == "byte")

    on_disk = np.frombuffer((tmp_path / "data" / "train.bin").read_bytes(), dtype="<u2")
    assert on_disk.tolist() == data.train.tolist()
    assert not data.train.flags.writeable
    meta = json.loads((tmp_path / "data" / "meta.json").read_text())
    assert meta == {
        "format": 1,
        "source": config.source,
        "tokenizer": tokenizer,
        "vocab": data.vocab,
        "dtype": "uint16",
        "characters": len(text),
        "train": len(data.train),
        "held_out": len(data.held_out),
        "fingerprint": data.fingerprint,
    }


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    draw = random.Random(0)
    words = " ".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=9)) for _ in range(20_000))
    config = replace(write(tmp_path / "text", f"{words} {words}"), tokenizer="bpe", vocab=66_000, held_out=0.001)
    data = prepare(config, tmp_path / "data")
    assert data.vocab == 66_000 and data.train.dtype == np.dtype("<u4") and data.train.max() >= 1 << 16
    assert whole(data) == f"{words} {words}"


@given(
    parts=st.lists(st.text(st.sampled_from("a \n\t漢'"), max_size=3 * PIECE), max_size=4),
    ends=st.tuples(st.integers(0, 4 * PIECE), st.integers(0, 4 * PIECE)),
)
@settings(deadline=None, max_examples=50)
def test_pieces_are_the_text(parts: list[str], ends: tuple[int, int]) -> None:
    start, stop = sorted(ends)
    found = list(pieces(parts, start, stop))
    assert "".join(found) == "".join(parts)[start:stop]
    assert all(1 <= len(piece) <= PIECE for piece in found)
    assert found == list(pieces(["".join(parts)], start, stop))  # how the text came does not matter


def test_a_word_longer_than_a_piece_is_cut() -> None:
    text = "a " + "b" * (3 * PIECE) + " c"
    assert [len(piece) for piece in pieces([text], 0, len(text))] == [1, PIECE, PIECE, PIECE, 3]


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    peaks = []
    for times in (10, 40):
        config = write(tmp_path / "text", drawn_text(100_000) * times)
        tracemalloc.start()
        try:
            data = prepare(config, tmp_path / "data")
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert len(data.train) + len(data.held_out) == Path(config.source).stat().st_size > times * 100_000
    assert max(peaks) < 1.1 * min(peaks) and max(peaks) < 2_000_000


def test_files_are_kept_while_text_and_config_stay(tmp_path: Path) -> None:
    config, folder = write(tmp_path / "text", drawn_text(3000)), tmp_path / "deep" / "data"
    first = prepare(config, folder)
    before = stamp(folder)
    moved = write(tmp_path / "the same text", drawn_text(3000))
    for same in (config, moved, replace(config, vocab=999, column="body", cache="elsewhere")):
        again = prepare(same, folder)
        assert again.fingerprint == first.fingerprint and whole(again) == drawn_text(3000)
        assert stamp(folder) == before
    assert [each.name for each in folder.parent.iterdir()] == ["data"]


@pytest.mark.parametrize("change", ["text", "tokenizer", "vocab", "held_out"])
def test_files_are_made_again_for_another_text_or_config(tmp_path: Path, change: str) -> None:
    text = drawn_text(3000)
    config = replace(write(tmp_path / "text", text), tokenizer="byte" if change == "tokenizer" else "bpe", vocab=300)
    first = prepare(config, tmp_path / "data")
    before = (first.train.tolist(), first.held_out.tolist())
    match change:
        case "text":
            text = text[:100] + "X" + text[101:]  # as long as before
            write(tmp_path / "text", text)
        case "tokenizer":
            config = replace(config, tokenizer="bpe")
        case "vocab":
            config = replace(config, vocab=301)
        case _:
            config = replace(config, held_out=0.2)
    second = prepare(config, tmp_path / "data")
    assert second.fingerprint != first.fingerprint and whole(second) == text
    assert (second.train.tolist(), second.held_out.tolist()) != before
    assert (first.train.tolist(), first.held_out.tolist()) == before  # who has the old files open still reads them


@pytest.mark.parametrize("name", ["train.bin", "held_out.bin", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "shorter", "longer", "empty"])
def test_damaged_files_are_made_again(tmp_path: Path, name: str, damage: str) -> None:
    config = write(tmp_path / "text", drawn_text(3000))
    prepare(config, tmp_path / "data")
    path = tmp_path / "data" / name
    right = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"shorter": right[:-2], "longer": right + b"xx", "empty": b""}[damage])
    assert whole(prepare(config, tmp_path / "data")) == drawn_text(3000)
    assert path.read_bytes() == right


def test_a_tokenizer_of_another_vocabulary_is_made_again(tmp_path: Path) -> None:
    config = write(tmp_path / "text", drawn_text(3000))
    prepare(config, tmp_path / "data")
    TRAINED.save(tmp_path / "data")
    assert prepare(config, tmp_path / "data").tokenizer.vocab == 256


def test_an_interrupted_run_leaves_the_files_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(tmp_path / "text", drawn_text(3000))
    prepare(config, tmp_path / "data")
    before = stamp(tmp_path / "data")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    write(tmp_path / "text", drawn_text(3000, seed=1))
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, tmp_path / "data")
    assert stamp(tmp_path / "data") == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["data", "text"]
    assert whole(prepare(config, tmp_path / "data")) == drawn_text(3000, seed=1)


def test_a_killed_run_leaves_no_files_in_the_folder(tmp_path: Path) -> None:
    config = write(tmp_path / "text", drawn_text(3000))
    script = (
        "import os, signal, pathlib; from gaugekit.training import data, config;"
        "data.Tokenizer.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL);"
        f"data.prepare(config.DataConfig(source={config.source!r}), pathlib.Path({str(tmp_path / 'data')!r}))"
    )
    killed = subprocess.run([sys.executable, "-c", script], env=environment_of_members(), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "data").exists()
    assert whole(prepare(config, tmp_path / "data")) == drawn_text(3000)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    config, folder = write(tmp_path / "text", drawn_text(3000)), tmp_path / "data"
    folder.mkdir()
    whole(prepare(config, folder))  # an empty one is taken
    (folder / "thesis.txt").write_text("all of it")
    whole(prepare(config, folder))  # and one whose files fit
    with pytest.raises(
        DataError, match=r"data: holds thesis\.txt, which is no token file; name an empty or a new folder"
    ):
        prepare(replace(config, held_out=0.5), folder)
    assert (folder / "thesis.txt").read_text() == "all of it"
    with pytest.raises(DataError, match="text: is no directory; name another folder"):
        prepare(config, tmp_path / "text")


def test_long_loops_are_tracked(tmp_path: Path) -> None:
    config = replace(write(tmp_path / "text", drawn_text(2 * PIECE)), tokenizer="bpe", vocab=300)
    told: dict[str, tuple[int | None, int]] = {}

    def track(items: Any, total: int | None, what: str) -> Any:
        items = list(items)
        told[what] = (total, len(items))
        return items

    prepare(config, tmp_path / "data", track)
    assert set(told) == {"reading", "learning", "encoding train", "encoding held_out"}
    assert told["learning"] == told["encoding train"] == (2, 2) and told["encoding held_out"] == (1, 1)


# Sources


def test_pydoc_is_all_topics_in_order(tmp_path: Path) -> None:
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    assert "".join(texts(DataConfig())) == text
    assert whole(prepare(DataConfig(), tmp_path / "data")) == text


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    text = "a\r\nb\rc\x00" + "é漢🎉" * 30_000  # letters lie across the ends of what is read at a time
    assert "".join(texts(write(tmp_path / "text", text))) == text
    assert "".join(texts(write(tmp_path / "text", "\ufeff" + text + "\ufeff"))) == text + "\ufeff"


def bad_utf8(path: Path) -> str:
    path.write_bytes("é".encode() * 40_000 + b"\xff and more")
    return "text: is not UTF-8 at byte 80000 (invalid start byte); convert it first"


def cut_utf8(path: Path) -> str:
    path.write_bytes("aé".encode()[:-1])
    return "text: is not UTF-8 at byte 1 (unexpected end of data); convert it first"


def utf16(path: Path) -> str:
    path.write_bytes("hello".encode("utf-16"))
    return "text: is not UTF-8 at byte 0 (invalid start byte); convert it first"


def missing(path: Path) -> str:
    return "text: does not exist; data.source is pydoc, a text file, or a data set that `datasets` saved"


def device(path: Path) -> str:
    path.symlink_to("/dev/null")
    return "text: is no regular file; data.source is pydoc, a text file, or a data set that `datasets` saved"


def empty(path: Path) -> str:
    path.touch()
    return "text: is empty"


def mark_only(path: Path) -> str:
    path.write_bytes(b"\xef\xbb\xbf")
    return "text: is empty"


def no_data_set(path: Path) -> str:
    path.mkdir()
    return (
        "text: is a directory, but no data set that `datasets` saved; name a text file, or one made with save_to_disk"
    )


def one_letter(path: Path) -> str:
    path.write_text("a")
    return "text: its train share has fewer than 2 tokens: take a longer text"


def short_end(path: Path) -> str:
    path.write_text("a" * 12)
    return "text: its held_out share has fewer than 2 tokens: take a longer text"


@pytest.mark.parametrize(
    "make",
    [bad_utf8, cut_utf8, utf16, missing, device, empty, mark_only, no_data_set, one_letter, short_end],
)
@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_bad_sources_get_one_line(tmp_path: Path, make: Callable[[Path], str], tokenizer: Any) -> None:
    path = tmp_path / "text"
    message = make(path)
    with pytest.raises(DataError) as caught:
        prepare(DataConfig(source=str(path), tokenizer=tokenizer), tmp_path / "data")
    assert str(caught.value) == f"{tmp_path}/{message}"
    assert [each.name for each in tmp_path.iterdir()] == (["text"] if make is not missing else [])


def test_bpe_needs_room_for_a_merge(tmp_path: Path) -> None:
    config = replace(write(tmp_path / "text", drawn_text(3000)), tokenizer="bpe")
    assert prepare(replace(config, vocab=257), tmp_path / "data").vocab == 257
    with pytest.raises(ConfigError, match=r"data\.vocab must be at least 257 for bpe, 256 bytes and a merge, got 256"):
        prepare(replace(config, vocab=256), tmp_path / "data")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"^pydoc: needs the package pydoc_data\.topics, .*; name a text file$"):
        prepare(DataConfig(), tmp_path / "data")
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "state.json").touch()
    with pytest.raises(DataError, match=r"needs the package datasets, .*: pip install 'gaugekit\[datasets\]'$"):
        prepare(DataConfig(source=str(tmp_path)), tmp_path / "data")


# Data sets


@pytest.fixture(scope="module")
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="reading data sets is an extra: pip install 'gaugekit[datasets]'")


ROWS = {"text": ["one\n", "", "zwei", None, "três"], "body": ["a", "b", "c", "d", "e"], "length": [1, 2, 3, 4, 5]}
JOINED = "one\n\n\nzwei\n\ntrês"


def test_documents_are_joined_by_a_blank_line(tmp_path: Path, datasets: Any) -> None:
    made = datasets.Dataset.from_dict(ROWS)
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(test=made.select([0]), train=made).save_to_disk(tmp_path / "train")
    datasets.DatasetDict(only=made).save_to_disk(tmp_path / "only")
    made.with_format("arrow", columns=["length"]).save_to_disk(tmp_path / "formatted")
    for name in ("one", "train", "only", "formatted"):
        config = DataConfig(source=str(tmp_path / name), held_out=0.3)
        assert "".join(texts(config)) == JOINED
        assert whole(prepare(config, tmp_path / "data")) == JOINED
        assert "".join(texts(replace(config, column="body"))) == "a\n\nb\n\nc\n\nd\n\ne"


def test_a_data_set_is_known_by_its_rows_and_column(tmp_path: Path, datasets: Any) -> None:
    config = DataConfig(source=str(tmp_path / "set"), held_out=0.3)
    datasets.Dataset.from_dict(ROWS).save_to_disk(config.source)
    prepare(config, tmp_path / "data")
    before = stamp(tmp_path / "data")
    prepare(config, tmp_path / "data")
    assert stamp(tmp_path / "data") == before
    assert whole(prepare(replace(config, column="body"), tmp_path / "data")) == "a\n\nb\n\nc\n\nd\n\ne"
    shutil.rmtree(config.source)
    datasets.Dataset.from_dict(ROWS | {"text": list("vwxyz")}).save_to_disk(config.source)
    assert whole(prepare(config, tmp_path / "data")) == "v\n\nw\n\nx\n\ny\n\nz"


def test_bad_data_sets_get_one_line(tmp_path: Path, datasets: Any) -> None:
    made, path = datasets.Dataset.from_dict(ROWS), tmp_path / "set"
    made.save_to_disk(path)
    datasets.DatasetDict(a=made, b=made).save_to_disk(tmp_path / "two")
    datasets.Dataset.from_dict({"text": ["", None]}).save_to_disk(tmp_path / "none")
    for source, column, message in (
        ("set", "txt", "set: has no column txt; data.column may be text, body, length"),
        ("set", "length", "set: column length is no text, but int64; name another data.column"),
        ("two", "text", "two: has no split train, but a, b; save the one you mean"),
        ("none", "text", "none: is empty"),
    ):
        with pytest.raises(DataError) as caught:
            prepare(DataConfig(source=str(tmp_path / source), column=column), tmp_path / "data")
        assert str(caught.value) == f"{tmp_path}/{message}"
    next(path.glob("*.arrow")).write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"set: cannot be loaded as a data set \(.+\)$"):
        prepare(DataConfig(source=str(path)), tmp_path / "data")
    assert not (tmp_path / "data").exists()


# Batches


COUNT = np.arange(1000, dtype=np.uint16)


def test_windows_are_stretches_of_the_tokens_and_targets_one_later() -> None:
    inputs, targets = Windows(COUNT, context=7, batch=5, seed=0)(3)
    assert inputs.shape == targets.shape == (5, 7)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(7))
    assert torch.equal(targets, inputs + 1)
    high = np.full(20, 65_535, dtype=np.uint16)
    assert Windows(high, 4, 2, 0)(0)[0].unique().tolist() == [65_535]


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    windows = Windows(COUNT, context=4, batch=8, seed=5)
    run = [windows(step)[0] for step in range(20)]
    for step in (13, 2, 19):  # in any order, by another object
        assert torch.equal(Windows(COUNT, context=4, batch=8, seed=5)(step)[0], run[step])
    assert not any(torch.equal(run[i], run[j]) for i in range(20) for j in range(i))
    assert not any(torch.equal(Windows(COUNT, 4, 8, 6)(step)[0], run[step]) for step in range(20))
    state = np.random.get_state()[1].tolist()
    torch_state = torch.get_rng_state()
    windows(3)
    assert np.random.get_state()[1].tolist() == state
    assert torch.equal(torch.get_rng_state(), torch_state)


PINNED = {
    (0, 0): [311, 806, 814, 46],
    (0, 1): [939, 766, 557, 555],
    (1, 0): [87, 161, 849, 874],
    (7, 123456): [512, 206, 436, 534],
}


def test_the_draw_stays_the_same_in_later_releases() -> None:
    """A run that is resumed with another numpy goes on with the same batches."""
    starts = [Windows(COUNT, context=10, batch=4, seed=seed)(step)[0][:, 0].tolist() for seed, step in PINNED]
    assert starts == list(PINNED.values())


def test_windows_start_everywhere() -> None:
    tokens = np.arange(14)
    starts = Windows(tokens, context=4, batch=5000, seed=0)(0)[0][:, 0]
    counts = torch.bincount(starts, minlength=10)
    assert counts.shape == (10,)  # the last window's last target is the last token
    assert counts.min() > 400 and counts.max() < 600


def test_evaluation_takes_even_windows_that_do_not_overlap() -> None:
    found = evaluation(COUNT, context=7, batch=4, batches=5)
    assert len(found) == 5
    assert all(inputs.shape == targets.shape == (4, 7) and inputs.dtype == torch.int64 for inputs, targets in found)
    assert all(torch.equal(targets, inputs + 1) for inputs, targets in found)
    starts = torch.cat([inputs[:, 0] for inputs, _ in found])
    assert starts[0] == 0 and found[-1][1][-1, -1] == 999
    steps = starts.diff()
    assert steps.min() >= 7 and steps.max() - steps.min() <= 1
    for (a, b), (c, d) in zip(found, evaluation(COUNT, 7, 4, 5), strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)


@pytest.mark.parametrize("tokens", [141, 140])
def test_evaluation_windows_overlap_only_where_tokens_are_few(tokens: int) -> None:
    found = evaluation(COUNT[:tokens], context=7, batch=4, batches=5)
    steps = torch.cat([inputs[:, 0] for inputs, _ in found]).diff()
    assert bool(steps.min() >= 7) == (tokens > 4 * 5 * 7)
    assert [inputs.shape for inputs, _ in found] == [(4, 7)] * 5


def test_one_window_is_enough_and_less_is_refused(tmp_path: Path) -> None:
    config = replace(write(tmp_path / "text", "abcdefgh" * 3), held_out=1 / 3)
    data = prepare(config, tmp_path / "data")
    assert (len(data.train), len(data.held_out)) == (16, 8)
    data.check(7)
    assert Windows(data.train, 15, 2, 0)(0)[1][1].tolist() == list(b"bcdefghabcdefgh")
    assert evaluation(data.held_out, 7, 2, 1)[0][0].tolist() == [list(b"abcdefg")] * 2
    need = "and a window of {} needs {}: take a longer text or a smaller model.context"
    for context, call, message in (
        (8, lambda: data.check(8), f"{config.source}: the held-out share has 8 tokens, "),
        (16, lambda: data.check(16), f"{config.source}: the training share has 16 tokens, "),
        (16, lambda: Windows(data.train, 16, 2, 0), "the text has 16 tokens, "),
        (8, lambda: evaluation(data.held_out, 8, 2, 1), "the text has 8 tokens, "),
    ):
        with pytest.raises(DataError) as caught:
            call()
        assert str(caught.value) == message + need.format(context, context + 1)
