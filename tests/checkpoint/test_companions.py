"""The files beside the weights: copied as they are, left behind, or changed in one place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gaugekit.checkpoint import open_checkpoint, plan, write
from gaugekit.checkpoint.companions import with_card

COPIED = [
    *("tokenizer.json", "tokenizer.model", "generation_config.json", "chat_template.jinja", "merges.txt", "vocab.json"),
    *("preprocessor_config.json", "README.md", "modeling_own.py", ".gitattributes", "1_Pooling/config.json"),
    *("assets/deep/picture.png", "empty.txt"),
]
LEFT_OUT = [
    *("model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"),
    *(
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "tf_model.h5",
        "tf_model.h5.index.json",
        "flax_model.msgpack",
    ),
    *("consolidated.00.pth", "model.pt", "x.ckpt", "model.gguf", "onnx/model.onnx", "onnx/model.onnx_data", "rust.ot"),
    *("original/Consolidated.PTH", "openvino/openvino_model.bin"),
]


def fill(directory: Path, names: list[str]) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if name == "empty.txt" else os.urandom(1000))


def make(directory: Path, **options: Any) -> Path:
    """The result; nothing changes but what `options` of `write` change."""
    if not (directory / "model.safetensors").exists():
        save_file({"w": torch.ones(3)}, directory / "model.safetensors")
    out = directory.parent / f"out{len(list(directory.parent.iterdir()))}"
    dtype = options.pop("dtype", None)
    write(plan(open_checkpoint(directory), out, [], dtype=dtype), [], **options)
    return out


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_all_but_weights_is_copied(directory: Path) -> None:
    fill(directory, COPIED + LEFT_OUT + [".git/objects/x", ".cache/huggingface/tokenizer.json.metadata"])
    save_file({"w": torch.ones(3)}, directory / "model.safetensors", metadata={"format": "pt"})
    made = plan(open_checkpoint(directory), directory.parent / "out", [])
    assert made.copied_files == tuple(sorted([*COPIED, "config.json"]))
    assert made.left_out == tuple(sorted([*LEFT_OUT, "model.safetensors", ".git/", ".cache/"]))
    write(made, [])
    source = files(directory)
    assert files(made.out) == {name: source[name] for name in [*COPIED, "config.json", "model.safetensors"]}


def test_further_modules_keep_their_weights(directory: Path) -> None:
    """Of sentence-transformers: a dense layer of its own, beside an exported copy of the model."""
    listed = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]
    (directory / "modules.json").write_text(json.dumps(listed))
    fill(
        directory,
        ["2_Dense/model.safetensors", "2_Dense/config.json", "onnx/model.onnx", "2_Densely/model.safetensors"],
    )
    found = files(make(directory))
    assert "2_Dense/model.safetensors" in found
    assert not {"onnx/model.onnx", "2_Densely/model.safetensors"} & found.keys()
    for broken in ("{", "{}", "[1]", '[{"path": 3}]'):
        (directory / "modules.json").write_text(broken)
        assert "2_Dense/model.safetensors" not in files(make(directory))


def test_a_hub_snapshot_becomes_real_files(tmp_path: Path) -> None:
    root = tmp_path / "models--org--name"
    blobs, snapshot = root / "blobs", root / "snapshots" / ("a" * 40)
    blobs.mkdir(parents=True)
    (snapshot / "1_Pooling").mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "1_Pooling" / "config.json").write_text('{"pool": 1}')
    save_file({"w": torch.ones(3), "v": torch.arange(3.0)}, snapshot / "model.safetensors")
    expected = files(snapshot)
    for number, path in enumerate([path for path in snapshot.rglob("*") if path.is_file()]):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))
    out = tmp_path / "out"
    write(plan(open_checkpoint(snapshot), out, ["w"]), [("w", torch.zeros(3))])
    found = files(out)
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert found.keys() == expected.keys()
    assert found["1_Pooling/config.json"] == b'{"pool": 1}'
    assert torch.equal(open_checkpoint(out).load("v"), torch.arange(3.0))
    assert torch.equal(open_checkpoint(snapshot).load("w"), torch.ones(3))


def test_linked_folders(directory: Path, refused: Callable[..., str]) -> None:
    elsewhere = directory.parent / "elsewhere"
    fill(elsewhere, ["file"])
    (directory / "one").symlink_to(elsewhere)
    (directory / "two").symlink_to(elsewhere)
    found = files(make(directory))
    assert found["one/file"] == found["two/file"]
    (elsewhere / "back").symlink_to(directory)
    refused(lambda: make(directory), "back", "link", "remove it")


def test_a_link_to_nothing(directory: Path, refused: Callable[..., str]) -> None:
    (directory / "vocab.txt").symlink_to(directory / "gone")
    refused(lambda: make(directory), str(directory / "vocab.txt"), "cannot be read")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_what_is_no_file_is_left_out(directory: Path) -> None:
    os.mkfifo(directory / "pipe")
    assert "pipe" not in {path.name for path in make(directory).iterdir()}


def test_some_keys_of_the_config_change(directory: Path) -> None:
    path = directory / "config.json"
    config = {"z": 1, "rms_norm_eps": 1e-05, "a": [1.0, None], "nested": {"b": True, "a": 1e30}, "name": "ü"}
    for text in (json.dumps(config, indent=2) + "\n", json.dumps(config, indent=2, ensure_ascii=False)):
        path.write_text(text, encoding="utf-8")
        found = (make(directory, config_changes={"z": 3, "new": {"x": 1}}) / "config.json").read_text(encoding="utf-8")
        assert found == text.replace('"z": 1', '"z": 3').replace(
            'ü"\n}', 'ü",\n  "new": {\n    "x": 1\n  }\n}'
        ).replace('fc"\n}', 'fc",\n  "new": {\n    "x": 1\n  }\n}')
    assert (make(directory) / "config.json").read_text(encoding="utf-8") == text


def test_the_dtype_of_the_config_changes_wherever_it_stands(directory: Path) -> None:
    config = {
        "dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16", "x": 1},
        "vision_config": {"x": 1},
        "audio_config": {"dtype": None},
        "quantization_config": {"dtype": "int4"},
        "rope": {"dtype": "float32"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    found = json.loads((make(directory, dtype="float16") / "config.json").read_text())
    assert found == config | {"dtype": "float16", "text_config": {"torch_dtype": "float16", "x": 1}}
    (directory / "config.json").write_text("{}")
    assert (make(directory, dtype="float16") / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("original", "expected"),
    [
        (b"", b"# Card\n"),
        (b"# Old\n", b"# Card\n\n# Old\n"),
        (b"---\nlicense: mit\n---\n# Old\r\n\xff", b"---\nlicense: mit\n---\n\n# Card\n\n# Old\r\n\xff\n"),
        (b"---\r\nlicense: mit\r\n---\r\n\r\nOld\n", b"---\r\nlicense: mit\r\n---\n\n# Card\n\nOld\n"),
        (b"---\n---\nOld\n", b"---\n---\n\n# Card\n\nOld\n"),
        (b"---\nlicense: mit\n---", b"---\nlicense: mit\n---\n\n# Card\n"),
        (b"---\nnever closed\n", b"# Card\n\n---\nnever closed\n"),
        (b"Old\n---\na: b\n---\n", b"# Card\n\nOld\n---\na: b\n---\n"),
    ],
)
def test_a_card_goes_below_the_front_matter(original: bytes, expected: bytes) -> None:
    assert with_card("\n# Card\n\n", original) == expected


def test_the_card_is_written(directory: Path) -> None:
    assert (make(directory, card="# New") / "README.md").read_bytes() == b"# New\n"
    (directory / "README.md").write_bytes(b"---\na: b\n---\nOld\n")
    assert (make(directory) / "README.md").read_bytes() == b"---\na: b\n---\nOld\n"
    out = make(directory, card="# New")
    assert (out / "README.md").read_bytes() == b"---\na: b\n---\n\n# New\n\nOld\n"
    assert (directory / "README.md").read_bytes() == b"---\na: b\n---\nOld\n"
