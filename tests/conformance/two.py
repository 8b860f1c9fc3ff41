"""Processes of one test file that talk by gloo: two of them run `member(worker)` where the file is the main program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist


def environment_of_members() -> dict[str, str]:
    """They import what this process can, this file too, and take one thread each."""
    paths = [*filter(None, sys.path), str(Path(__file__).parent)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run_two(file: str, folder: Path) -> None:
    """Start the file twice; it must end well in both."""
    environment = environment_of_members()
    workers = [
        subprocess.Popen(
            [sys.executable, file, str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in workers]
    finally:
        for process in workers:
            process.kill()
    assert all(process.returncode == 0 for process in workers), "\n".join(outputs)
    assert all((folder / f"done{rank}").exists() for rank in range(2))


def member(worker: Callable[[int, Path], None]) -> None:
    """What one of the two does: meet the other in a file of the folder, work, and wait for it."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    patience = timedelta(seconds=120)  # for the other one, if it has failed
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2, timeout=patience
    )
    worker(rank, folder)
    (folder / f"done{rank}").touch()
    leave()


def leave() -> NoReturn:
    """End this process, when all of them have come here and what they found is on disk.

    Python's own way out is not taken: it stops threads of the backend where they ask for the interpreter once more,
    and C++ answers that with "terminate called without an active exception", now and then.
    """
    dist.barrier()  # whoever leaves first breaks the connection under the other's last collective
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
