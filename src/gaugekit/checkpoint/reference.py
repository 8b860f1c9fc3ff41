"""From what the user typed to a path on disk: a path as it is, or a hub id found in the local cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from gaugekit.errors import CheckpointError

_FILE_SUFFIXES = (".gguf", ".json", ".safetensors", ".bin")

# The only weight files a directory is opened through; any other name would be silently ignored there.
_WEIGHT_FILE = re.compile(r"(model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin)")


def resolve(reference: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Path of the directory, `.gguf` file or `config.json` that `reference` stands for.

    Links are kept as they are: the files of a hub snapshot are links to blobs without a suffix.
    Raises `CheckpointError` when there is no such thing on this machine.
    """
    text = os.fspath(reference)
    if not text:
        raise CheckpointError("the checkpoint reference is empty; give a directory, a .gguf file or a hub id")
    try:
        path = Path(text).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # longer than any path, or no such user's home
        raise CheckpointError(f"{text}: cannot be opened ({error}); check the path") from error
    if exists:
        if revision is not None:
            raise CheckpointError(
                f"{path}: is a local path, but revision {revision!r} applies to hub ids only; leave it out"
            )
        return _existing(path)
    if not isinstance(reference, str) or _looks_like_a_path(text):
        raise CheckpointError(f"{path}: no such file or directory; check the path")
    return _in_hub_cache(text, revision)


def _looks_like_a_path(text: str) -> bool:
    # A revision may hold slashes ("refs/pr/3"), so only what stands before the @ is counted.
    before_revision = text.partition("@")[0]
    return text.startswith(("/", ".", "~")) or before_revision.count("/") > 1 or text.endswith(_FILE_SUFFIXES)


def _existing(path: Path) -> Path:
    if path.is_dir():
        return _directory(path)
    if path.suffix == ".gguf" or path.name == "config.json":
        return path
    if path.suffix not in (".safetensors", ".bin"):
        raise CheckpointError(f"{path}: not a checkpoint; give a directory, a .gguf file or a config.json")
    if not (path.parent / "config.json").exists():
        raise CheckpointError(f"{path}: there is no config.json beside it; put the model's config.json there")
    if not _WEIGHT_FILE.fullmatch(path.name):
        raise CheckpointError(
            f"{path}: a weight file is opened through its directory, and only under the names "
            "model.safetensors or pytorch_model.bin (or their shards); rename it"
        )
    return path.parent


def _directory(path: Path) -> Path:
    """The directory itself, or the one GGUF file in it when it has no config.json."""
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    if not names:
        raise CheckpointError(f"{path}: this directory is empty; give one with a config.json or a .gguf file")
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "config.json" in names or not ggufs:
        return path
    if len(ggufs) > 1:
        raise CheckpointError(f"{path}: holds several GGUF files; give the path of one: {', '.join(ggufs)}")
    return path / ggufs[0]


def _in_hub_cache(text: str, revision: str | None) -> Path:
    repo_id, _, suffix = text.partition("@")
    if suffix and revision not in (None, suffix):
        raise CheckpointError(f"{text!r} already names a revision, and {revision!r} is another; give one")
    revision = suffix or revision
    try:
        return _directory(Path(snapshot_download(repo_id, revision=revision, local_files_only=True)))
    except HFValidationError as error:
        raise CheckpointError(
            f"{text!r} is neither an existing path nor a well-formed hub id; give a path, or org/name"
        ) from error
    except LocalEntryNotFoundError as error:
        # The hub library refuses a snapshot that lacks any file of the repository, even a README. Whether
        # the files that matter are there is for the reader to say, and it names the one that is missing.
        partial = getattr(error, "snapshot_path", None)
        if partial is not None:
            return _directory(Path(partial))
        option = f" --revision {revision}" if revision else ""
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"{repo_id!r}{at} is neither a path nor in the local Hugging Face cache; "
            f"fetch it with: hf download {repo_id}{option}"
        ) from error
