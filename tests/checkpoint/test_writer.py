"""Writing: which tensors change, which stay byte for byte, how files are laid out, and what is refused."""

from __future__ import annotations

import json
import re
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gaugekit.checkpoint import Checkpoint, open_checkpoint, plan, reader, write, writer


def content(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor as the files have it, read without the library under test."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        assert length % 8 == 0
        end = 0
        for name, item in header.items():
            first, last = item["data_offsets"]
            assert first == end
            end = last
            found[name] = (item["dtype"], tuple(item["shape"]), data[8 + length + first : 8 + length + last])
        assert len(data) == 8 + length + end
    return found


def raw(checkpoint: Checkpoint, name: str) -> bytes:
    return b"".join(part.numpy().tobytes() for part in checkpoint.raw(name))


def make(directory: Path, given: dict[str, torch.Tensor], name: str = "out", **options: Any) -> Path:
    made = plan(open_checkpoint(directory), directory.parent / name, given, **options)
    write(made, given.items())
    if made.dtype is None:  # Otherwise config.json has changed.
        assert sum(file.stat().st_size for file in made.out.rglob("*") if file.is_file()) == made.total_bytes
    assert {file.name: file.nbytes for file in made.files} == {
        path.name: path.stat().st_size for path in made.out.glob("*.safetensors")
    }
    return made.out


def test_changed_tensors_are_new_and_all_others_the_same_bytes(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_RAW_PART", 7)
    monkeypatch.setattr(writer, "PART", 5)
    source = open_checkpoint(mixed)
    generator = torch.Generator().manual_seed(1)
    new = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    out = make(mixed, {"b": new, "a": new.T.contiguous().T, "scalar": torch.tensor(2.5)})
    found = content(out)
    assert found.keys() == source.headers.keys()
    for name, (dtype, shape, data) in found.items():
        assert (dtype, shape) == (source.headers[name].dtype, source.headers[name].shape)
        assert (data == raw(source, name)) == (name not in ("a", "b", "scalar"))
    loaded = load_file(out / "model.safetensors")
    assert torch.equal(loaded["a"], new.bfloat16())
    assert torch.equal(loaded["b"], new.float())
    assert loaded["scalar"] == 2.5
    ours = open_checkpoint(out)
    assert ours.headers == source.headers
    assert torch.equal(ours.load("a"), new.bfloat16())
    assert (out / "config.json").read_bytes() == (mixed / "config.json").read_bytes()


def test_nothing_changed_is_the_file_that_the_library_writes(directory: Path) -> None:
    tensors = {name: torch.full((3, 2), float(number)) for number, name in enumerate(("y", "x", "z.ü"))}
    path = directory / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    assert (make(directory, {}) / "model.safetensors").read_bytes() == path.read_bytes()


def test_a_dtype_torch_lacks_is_copied(directory: Path) -> None:
    header = {"w": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]}}
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"sixty4")
    assert content(make(directory, {})) == {"w": ("F6_E2M3", (8,), b"sixty4")}


def test_data_of_every_dtype_is_aligned(mixed: Path) -> None:
    data = (make(mixed, {}) / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    for name in ("double", "ids", "wave", "a", "b", "half", "scalar"):
        size = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
        assert header[name]["data_offsets"][0] % (size // max(1, int(np.prod(header[name]["shape"])))) == 0


def test_a_tensor_of_integers_may_change(mixed: Path) -> None:
    out = make(mixed, {"ids": torch.arange(5).flip(0), "mask": torch.tensor([False, False, True])})
    assert open_checkpoint(out).load("ids").tolist() == [4, 3, 2, 1, 0]
    assert open_checkpoint(out).load("mask").tolist() == [False, False, True]


def test_bin_sources_become_safetensors(directory: Path) -> None:
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    shared = values.half()
    state = {"a": values, "turned": values.T, "part": values[1:3, 2:], "one": shared, "two": shared}
    torch.save(state, directory / "pytorch_model.bin")
    out = make(directory, {"a": values.double() + 1})
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    loaded = load_file(out / "model.safetensors")
    assert torch.equal(loaded.pop("a"), (values.double() + 1).float())
    assert all(torch.equal(loaded[name], state[name]) and loaded[name].dtype == state[name].dtype for name in loaded)
    assert loaded.keys() == state.keys() - {"a"}


def test_a_dtype_for_all_floats(directory: Path) -> None:
    values = torch.tensor([1.0, 1 / 3, 7e4])
    tensors = {"a": values, "b": values.bfloat16(), "ids": torch.arange(3), "wave": values.to(torch.complex64)}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text('{"torch_dtype": "bfloat16"}\n')
    out = make(directory, {"b": values.double()}, "wide", dtype="float32")
    loaded = load_file(out / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {
        "a": torch.float32,
        "b": torch.float32,
        "ids": torch.int64,
        "wave": torch.complex64,
    }
    assert torch.equal(loaded["b"], values)
    assert (out / "config.json").read_text() == '{\n  "torch_dtype": "float32"\n}\n'
    out = make(directory, {}, "narrow", dtype="bfloat16")
    assert torch.equal(open_checkpoint(out).load("a"), values.bfloat16())


def test_a_value_too_large_for_its_dtype(mixed: Path, refused: Callable[..., str]) -> None:
    source = open_checkpoint(mixed)
    made = plan(source, mixed.parent / "out", ["half"])
    large = torch.tensor([0.0, 65519.0, 65520.0, -1e300], dtype=torch.float64)
    refused(lambda: write(made, [("half", large)]), "'half'", "65520", "F16", "wider dtype")
    assert not made.out.exists()
    large[2:] = torch.tensor([float("inf"), float("nan")])
    write(made, [("half", large)])
    assert torch.equal(open_checkpoint(made.out).load("half")[:3], torch.tensor([0.0, 65504.0, float("inf")]).half())
    save_file({"w": torch.tensor([1e39], dtype=torch.float64)}, mixed / "model.safetensors")
    made = plan(open_checkpoint(mixed), mixed.parent / "narrow", [], dtype="float32")
    refused(lambda: write(made, []), "'w'", "1e+39", "F32")


def test_tensors_may_be_dropped(mixed: Path) -> None:
    out = make(mixed, {}, drop=["a", "ids"])
    assert open_checkpoint(out).headers.keys() == open_checkpoint(mixed).headers.keys() - {"a", "ids"}


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (10**9, ["model.safetensors"]),
        ("1GB", ["model.safetensors"]),
        (250, [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]),
        ("0.25KB", [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]),
        (300, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
        (99, [f"model-0000{i}-of-00005.safetensors" for i in (1, 2, 3, 4, 5)]),
    ],
)
def test_shards(directory: Path, size: int | str, expected: list[str]) -> None:
    tensors = {f"w{number}": torch.full((25,), float(number)) for number in range(5)}
    save_file(tensors, directory / "model.safetensors")
    out = make(directory, {"w3": torch.zeros(25)}, max_shard_size=size)
    assert sorted(path.name for path in out.glob("*.safetensors")) == expected
    found = {path.name: load_file(path) for path in out.glob("*.safetensors")}
    index = out / "model.safetensors.index.json"
    assert index.exists() == (len(expected) > 1)
    if index.exists():
        listed = json.loads(index.read_text())
        assert listed["metadata"] == {"total_size": 500}
        assert listed["weight_map"] == {name: file for file, part in found.items() for name in part}
    opened = open_checkpoint(out)
    for name, tensor in tensors.items():
        assert torch.equal(opened.load(name), torch.zeros(25) if name == "w3" else tensor)


def test_a_sharded_source_need_not_stay_so(directory: Path) -> None:
    tensors = {f"w{number}": torch.full((25,), float(number)) for number in range(5)}
    save_file(tensors, directory / "model.safetensors")
    shards = make(directory, {}, "shards", max_shard_size=100)
    out = make(shards, {}, "one")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert content(out) == content(shards)


@pytest.mark.parametrize("size", ["5", "five GB", "5GiB", "", "infGB", 0, -1])
def test_a_size_that_is_none(mixed: Path, size: int | str, refused: Callable[..., str]) -> None:
    refused(lambda: plan(open_checkpoint(mixed), mixed.parent / "out", [], max_shard_size=size), str(size), "5GB")


def test_planning_writes_nothing(mixed: Path) -> None:
    made = plan(open_checkpoint(mixed), mixed.parent / "out", ["a"], max_shard_size=100)
    assert [path.name for path in mixed.parent.iterdir()] == [mixed.name]
    assert made.out == mixed.parent / "out"
    assert made.copied_files == ("config.json",)
    assert made.left_out == ("model.safetensors",)
    assert made.changed == {"a"}
    assert sum(len(file.tensors) for file in made.files) == len(made.headers) == 12
    assert len(repr(made)) < 500


def test_tensors_are_let_go_one_by_one(directory: Path) -> None:
    names = [f"w{number}" for number in range(4)]
    save_file({name: torch.zeros(3, 5) for name in names}, directory / "model.safetensors")
    seen = []

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for name in reversed(names):
            tensor = torch.ones(3, 5, dtype=torch.float64)
            reference = weakref.ref(tensor)
            yield name, tensor
            del tensor
            assert reference() is None
            seen.append(name)

    def hoarding(items: Iterable[Any], total: int, what: str) -> Iterator[Any]:
        kept = []
        for item in items:
            kept.append(item)
            yield item
        assert len(kept) == total

    write(plan(open_checkpoint(directory), directory.parent / "out", names), given(), track=hoarding)
    assert seen == names[::-1]


def test_unchanged_tensors_are_copied_in_stretches(directory: Path) -> None:
    save_file({"w": torch.arange(1 << 23, dtype=torch.float32)}, directory / "model.safetensors")
    sizes = [part.numel() for part in open_checkpoint(directory).raw("w")]
    assert sizes == [1 << 24, 1 << 24]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "'a', 'b' were to be changed, but have not been given"),
        (["a"], "'b' were to be changed"),
        (["a", "a"], "'a' is given twice"),
        (["a", "b", "a"], "'a' is given twice"),
        (["a", "half"], "'half' was not to be changed"),
        (["a", "b", "nonsense"], "'nonsense' was not to be changed"),
    ],
)
def test_each_changed_tensor_comes_once(mixed: Path, given: list[str], message: str) -> None:
    made = plan(open_checkpoint(mixed), mixed.parent / "out", {"a", "b"})
    with pytest.raises(ValueError, match=re.escape(message)):
        write(made, [(name, torch.zeros(6, 4)) for name in given])
    assert [path.name for path in mixed.parent.iterdir()] == [mixed.name]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("a", torch.zeros(4, 6), "shape (6, 4), not (4, 6)"),
        ("scalar", torch.zeros(1), "shape (), not (1,)"),
        ("a", torch.zeros(6, 4, dtype=torch.int64), "BF16"),
        ("ids", torch.zeros(5), "I64"),
        ("f8", torch.zeros(6, 4), "F8_E4M3"),
    ],
)
def test_a_tensor_that_does_not_fit(mixed: Path, name: str, tensor: torch.Tensor, message: str) -> None:
    made = plan(open_checkpoint(mixed), mixed.parent / "out", [name])
    with pytest.raises(ValueError, match=re.escape(message)):
        write(made, [(name, tensor)])
    assert not made.out.exists()


def test_names_that_the_source_lacks(mixed: Path) -> None:
    source, out = open_checkpoint(mixed), mixed.parent / "out"
    for arguments, message in (
        ({"changed": ["nonsense"]}, "'nonsense'"),
        ({"changed": [], "drop": ["nonsense"]}, "'nonsense'"),
        ({"changed": ["a"], "drop": ["a"]}, "'a' are to be changed and dropped"),
        ({"changed": [], "drop": list(source.headers)}, "all tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(source, out, **arguments)


def test_sources_that_cannot_be_written_from(directory: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    refused(lambda: plan(open_checkpoint(directory), tmp_path / "out", []), str(directory), "no tensors")
    path = tmp_path / "model.gguf"
    file = gguf.GGUFWriter(path, "llama")
    file.add_tensor("w", np.zeros((2, 3), dtype=np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    checkpoint = open_checkpoint(path)
    for attempt in (lambda: plan(checkpoint, tmp_path / "out", []), lambda: checkpoint.raw("w")):
        refused(attempt, str(path), "GGUF files are read only; convert with transformers first")


def test_dtypes_that_cannot_be_written(mixed: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    source = open_checkpoint(mixed)
    refused(lambda: plan(source, tmp_path / "out", [], dtype="int8"), "'int8'", "bfloat16")
    refused(lambda: plan(source, tmp_path / "out", [], dtype="float32"), "'f8'", "quantised")
    (mixed / "model.safetensors").unlink()
    torch.save({"w": torch.zeros(2, dtype=torch.complex128)}, mixed / "pytorch_model.bin")
    refused(lambda: plan(open_checkpoint(mixed), tmp_path / "out", []), "'w'", "complex128")


def test_a_source_cut_meanwhile(mixed: Path, refused: Callable[..., str]) -> None:
    made = plan(open_checkpoint(mixed), mixed.parent / "out", [])
    (mixed / "model.safetensors").write_bytes(b"")
    refused(lambda: write(made, []), "model.safetensors", "ends inside tensor")
    assert [path.name for path in mixed.parent.iterdir()] == [mixed.name]


def test_shapes_may_change_and_tensors_be_added(mixed: Path) -> None:
    source = open_checkpoint(mixed)
    generator = torch.Generator().manual_seed(2)
    narrow = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    rest, places = torch.randn(2, 3, 1, generator=generator), torch.arange(6).reshape(2, 3)
    shapes: dict[str, tuple[int, ...]] = {"a": (6, 2), "scalar": (0, 3)}
    added: dict[str, tuple[tuple[int, ...], str]] = {"rest": ((2, 3, 1), "BF16"), "places": ((2, 3), "I64")}
    given = {"a": narrow, "scalar": torch.empty(0, 3), "places": places, "rest": rest}
    made = plan(source, mixed.parent / "out", ["a", "scalar"], drop=["wave"], shapes=shapes, added=added)
    assert made.changed == given.keys()
    write(made, given.items())
    found = content(made.out)
    assert found.keys() == (source.headers.keys() | added.keys()) - {"wave"}
    assert made.total_size == sum(len(data) for _, _, data in found.values())
    assert made.total_bytes == sum(file.stat().st_size for file in made.out.iterdir())
    for name, (dtype, shape, data) in found.items():
        if name not in given:
            assert (dtype, shape, data) == (*_header(source, name), raw(source, name))
    assert found["a"][:2] == ("BF16", (6, 2))
    loaded = load_file(made.out / "model.safetensors")
    assert torch.equal(loaded["a"], narrow.bfloat16())
    assert torch.equal(loaded["rest"], rest.bfloat16())
    assert torch.equal(loaded["places"], places)
    assert loaded["scalar"].shape == (0, 3)


def _header(source: Checkpoint, name: str) -> tuple[str, tuple[int, ...]]:
    return source.headers[name].dtype, source.headers[name].shape


def test_a_dtype_is_that_of_added_floats_too(mixed: Path) -> None:
    added: dict[str, tuple[tuple[int, ...], str]] = {"rest": ((2,), "F32"), "places": ((2,), "I64")}
    without = ["f8", "extremes", "double"]
    made = plan(open_checkpoint(mixed), mixed.parent / "out", (), dtype="float16", drop=without, added=added)
    write(made, [("rest", torch.tensor([1.5, 2.5], dtype=torch.float64)), ("places", torch.tensor([3, 4]))])
    loaded = load_file(made.out / "model.safetensors")
    assert (loaded["rest"].dtype, loaded["places"].dtype) == (torch.float16, torch.int64)
    assert loaded["rest"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    "options",
    [
        {"shapes": {"b": (2,)}},
        {"shapes": {"none": (2,)}},
        {"added": {"b": ((2,), "F32")}},
        {"added": {"a": ((2,), "F32")}},
    ],
)
def test_only_changed_tensors_get_a_shape_and_only_new_names_are_added(mixed: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not changed, and cannot be reshaped or added"):
        plan(open_checkpoint(mixed), mixed.parent / "out", ["a"], **options)


def test_a_reshaped_tensor_has_its_new_shape(mixed: Path) -> None:
    made = plan(open_checkpoint(mixed), mixed.parent / "out", ["a"], shapes={"a": (6, 2)})
    with pytest.raises(ValueError, match=re.escape("'a' must have shape (6, 2), not (6, 4)")):
        write(made, [("a", torch.zeros(6, 4))])
    assert not made.out.exists()


def test_files_of_text_come_with_the_weights(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(open_checkpoint(mixed), mixed.parent / "out", ["b"])
    with pytest.raises(ValueError, match="have not been given"):
        write(made, [], texts={"modeling.py": "import this\n"})
    assert not made.out.exists()
    write(made, [("b", torch.zeros(6, 4))], texts={"modeling.py": "# ü\n"})
    assert (made.out / "modeling.py").read_text(encoding="utf-8") == "# ü\n"
