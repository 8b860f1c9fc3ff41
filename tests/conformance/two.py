"""Two processes of one test file that talk by gloo: the file runs `member(worker)` when it is the main program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def run_two(file: str, folder: Path) -> None:
    """Start the file twice; it must end well in both."""
    paths = [*filter(None, sys.path), str(Path(__file__).parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
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
    dist.barrier()  # whoever leaves first breaks the connection under the other's last collective
    dist.destroy_process_group()
    (folder / f"done{rank}").touch()
