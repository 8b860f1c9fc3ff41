"""Several processes of one run, as torchrun starts them: how they meet, wait for each other, share a model and end.

All of it works in one process without torch.distributed too, where there is nobody to wait for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous

from gaugekit.errors import ConfigError, TrainingError
from gaugekit.training.config import RunConfig
from gaugekit.training.decoder import Decoder

__all__ = ["Member", "device_of", "first", "in_turn", "join", "rank", "shard", "share", "wait", "weights", "world"]

T = TypeVar("T")

SPOKEN = "spoken"
GRACE = 5.0
"""Seconds that a process which has failed waits, to hear whether process 0 has failed too."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@dataclass(frozen=True, eq=False)
class Member:
    """One of the processes that torchrun has started."""

    rank: int
    store: Store

    def speaks(self) -> bool:
        """Whether this process, which has failed, should say why: one of them does, process 0 if it has failed at all.

        Where one process fails alone, the others fail of having lost it. torchrun ends all processes when one has
        ended, so a process that is not to speak waits here to be ended, lest the other be ended in mid-sentence.
        """
        try:
            if self.rank > 0:
                self.store.wait([SPOKEN], timedelta(seconds=GRACE))
        except (dist.DistError, RuntimeError):
            pass  # nobody has spoken in that time
        if self.store.add(SPOKEN, 1) == 1:
            return True
        time.sleep(GRACE)
        return False

    def leave(self) -> None:
        """Wait for the others: who leaves first breaks the connection under their last collective."""
        wait()
        dist.destroy_process_group()


def join() -> Member | None:
    """Meet the others of a run under torchrun; None where there are none. They talk by gloo, and on GPUs by NCCL."""
    if "RANK" not in os.environ:
        return None
    store, number, count = next(rendezvous("env://"))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=PrefixStore("group", store), rank=number, world_size=count)
    return Member(number, store)


def device_of(name: str) -> torch.device:
    """The device of this process: of "cuda", that of its number on its machine.

    Raises: TrainingError if torch cannot compute there.
    """
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        # To read a number back is more than to name a device: "meta" has no numbers.
        torch.zeros(1, device=device).tolist()
    except Exception as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise TrainingError(f"run.device={name}: not usable here ({line}); use run.device=cpu") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def share(config: RunConfig) -> int:
    """How many windows of a step a process has at a time. Raises `ConfigError` where the batch does not split so."""
    parts = world() * config.accumulation
    if config.batch % parts:
        raise ConfigError(
            f"run.batch={config.batch} does not split over {world()} processes and "
            f"run.accumulation={config.accumulation}: take a multiple of {parts}"
        )
    return config.batch // parts


def wait() -> None:
    """Until all processes are here."""
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # on the CPU, of which gloo takes care whatever else there is


def first(work: Callable[[], T]) -> T | None:
    """What process 0 finds; the others wait, and get None. An error of its is an error of all."""
    if not dist.is_initialized():
        return work()
    found, failure = None, None
    if rank() == 0:
        try:
            found = work()
        except Exception as error:
            failure = error
    said = [None if failure is None else f"{failure}"]
    dist.broadcast_object_list(said, 0, device=torch.device("cpu"))
    if failure is not None:
        raise failure
    if said[0] is not None:
        raise TrainingError(f"process 0: {said[0]}")
    return found


def in_turn(work: Callable[[], T]) -> T:
    """Process 0 first, then the others, which find what it has left on the disk."""
    found = first(work)
    return work() if rank() > 0 or found is None else found


def shard(model: Decoder, device: torch.device) -> None:
    """Spread parameters, gradients and the optimizer's state over all processes, in place, block by block (FSDP2).

    Parameters are new objects then: optimizers are made after it.
    """
    mesh = init_device_mesh(device.type, (world(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights on the CPU, in process 0; the others get nothing."""
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
