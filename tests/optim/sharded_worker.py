"""What test_sharded.py runs under torchrun, or in one process: a model trained sharded and whole, and checkpoints.

    python sharded_worker.py OUT COMMAND [FOLDER]      or      torchrun --nproc-per-node=2 sharded_worker.py ...

Every process writes what it found to OUT-rank.json; what must hold is said in the test.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_model import VOCABULARY, Model, apart, full, made, pairs_of, shard, values
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from two import leave

from gaugekit.optim.paired import Paired
from gaugekit.optim.projected import Horizontal
from gaugekit.optim.quotient import QuotientAdam, QuotientSGD

Make = Callable[..., Paired]

# Gradients of key biases are rounding errors, which Adam makes a step of; a larger eps leaves them what they are.
OPTIMIZERS: dict[str, Make] = {
    "adam": partial(QuotientAdam, lr=0.01, eps=1e-4, weight_decay=0.1),
    "sgd": partial(QuotientSGD, lr=0.2, momentum=0.9, weight_decay=0.01),
    "plain sgd": partial(QuotientSGD, lr=0.2),
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
STARTS = {
    ("adam", "float64"): "empty",
    ("adam", "float32"): "other values",
    ("adam", "bfloat16"): "other values",
    ("sgd", "float64"): "empty",
    ("plain sgd", "float64"): "other values",
}  # what is in a model before a checkpoint is loaded
STEPS, RESUMED = 3, 2
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def optimizer_of(model: nn.Module, name: str) -> Paired:
    trained = [p for p in model.parameters() if p.requires_grad]
    return OPTIMIZERS[name](trained, pairs=pairs_of(model), masters=trained[0].dtype == torch.bfloat16)


def backward(model: nn.Module, step: int, rank: int = 0, world: int = 1) -> None:
    """The gradient of a mean over four sequences, of which a process has every world-th."""
    model.zero_grad()
    tokens = torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(step))[rank::world]
    cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], rank: int = 0, world: int = 1
) -> None:
    for step in steps:
        backward(model, step, rank, world)
        optimizer.step()


# --- sharded against whole ------------------------------------------------------------------------------------


def compare(out: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    for name, dtype in itertools.product(("adam", "sgd"), ("float64", "float32")):
        found = out[f"{name} {dtype}"] = {}
        model, sharded = made(DTYPES[dtype]), shard(made(DTYPES[dtype]), mesh)
        start = values(model)
        alone, together = optimizer_of(model, name), optimizer_of(sharded, name)
        found["start"] = apart(start, values(sharded))
        train(model, alone, [0])
        train(sharded, together, [0], RANK, WORLD)
        found["one step"] = apart(values(model), values(sharded))
        found["moved"] = apart(start, values(model))
        train(model, alone, range(1, STEPS))
        train(sharded, together, range(1, STEPS), RANK, WORLD)
        found["all steps"] = apart(values(model), values(sharded))
        found["held"], found["of"] = held(together), held(alone)
        found["broken"] = broken(sharded, together)

        # Had a process another gradient, it would show.
        backward(model, STEPS)
        backward(sharded, STEPS, RANK, WORLD)
        if RANK == 1:
            gradient_here(sharded.first.plain.in_proj_weight).mul_(1.01)
        alone.step()
        together.step()
        found["perturbed"] = apart(values(model), values(sharded))


def held(optimizer: Paired) -> dict[str, int]:
    """How many numbers of state this process has for each pair."""
    numbers: dict[str, int] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and "." in key:
                pair = key.partition("[")[0]
                here = value.to_local() if isinstance(value, DTensor) else value
                numbers[pair] = numbers.get(pair, 0) + here.numel()
    return numbers


def gradient_here(parameter: Tensor) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()


def broken(model: Model, optimizer: Paired) -> list[Any]:
    """[error, motion] where one entry of a gradient is NaN in the second process."""
    backward(model, STEPS, RANK, WORLD)
    if RANK == 1:
        gradient_here(model.first.plain.out_proj.weight)[0, 0] = math.nan
    before, state = values(model), held(optimizer)
    try:
        optimizer.step()
    except ValueError as error:
        assert held(optimizer) == state
        return [str(error), apart(before, values(model))]
    return []


def meshes(out: dict[str, Any]) -> None:
    """One step on meshes of two axes, copies and shards."""
    for shape, name in itertools.product(((1, WORLD), (WORLD, 1)), ("adam", "sgd")):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
        model, sharded = made(torch.float64), shard(made(torch.float64), mesh)
        alone, together = optimizer_of(model, name), optimizer_of(sharded, name)
        train(model, alone, range(2))
        train(sharded, together, range(2), RANK, WORLD)
        out[f"{name} {shape}"] = apart(values(model), values(sharded)), held(together)


def masters(out: dict[str, Any]) -> None:
    """Half precision with masters. All processes have the same data, so gradients are the same to the last bit."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for name in ("adam", "sgd"):
        model, sharded = made(torch.bfloat16), shard(made(torch.bfloat16), mesh)
        start = values(model)
        alone, together = optimizer_of(model, name), optimizer_of(sharded, name)
        train(model, alone, range(STEPS))
        train(sharded, together, range(STEPS))
        kept = {n: full(alone.value(p)) for n, p in model.named_parameters()}
        gap = apart(kept, {n: full(together.value(p)) for n, p in sharded.named_parameters()})
        out[name] = apart(values(model), values(sharded)), gap, apart(start, values(model))


def mixed(out: dict[str, Any]) -> None:
    """Pairs of which one parameter is sharded and another is not, the first or the second; data as in `masters`."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for name, left in itertools.product(("adam", "sgd"), "qk"):
        model, sharded = made(torch.float64), made(torch.float64)
        fully_shard(sharded, mesh=mesh, ignored_params={sharded.first.others[0].get_parameter(f"{left}.weight")})
        alone, together = optimizer_of(model, name), optimizer_of(sharded, name)
        train(model, alone, range(STEPS))
        train(sharded, together, range(STEPS))
        out[f"{name} {left}"] = apart(values(model), values(sharded))


def horizontal(out: dict[str, Any]) -> None:
    """A plain optimizer without orbit motion, balanced now and then."""
    ends = []
    start = values(made(torch.float64))
    for world in (1, WORLD):
        model = made(torch.float64)
        if world > 1:
            shard(model, init_device_mesh("cpu", (WORLD,)))
        inner = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01, eps=1e-4)
        train(model, Horizontal(inner, pairs_of(model), rebalance=2), range(STEPS), RANK % world, world)
        ends.append(values(model))
    out["gap"], out["moved"] = apart(*ends), apart(start, ends[0])


def stale(out: dict[str, Any]) -> None:
    """Pairs that were found before the parameters were replaced."""
    model = made(torch.float64)
    pairs = pairs_of(model)
    shard(model, init_device_mesh("cpu", (WORLD,)))
    try:
        QuotientAdam(model.parameters(), pairs=pairs)
    except ValueError as error:
        out["error"] = str(error)
    frozen = [p for pair in pairs for p in pair.parameters]
    for parameter in frozen:
        parameter.requires_grad_(False)
    QuotientAdam(model.parameters(), pairs=pairs)  # to be trained later, perhaps


# --- checkpoints ----------------------------------------------------------------------------------------------


def placed(model: Model) -> Model:
    return shard(model, init_device_mesh("cpu", (WORLD,))) if dist.is_initialized() else model


def keys(state: Any) -> list[str]:
    found = [(name, key, x) for name, entry in state.items() for key, x in entry.items()]
    return sorted(f"{name} {key} {list(x.shape) if isinstance(x, Tensor) else x!r}" for name, key, x in found)


def save(out: dict[str, Any], folder: Path) -> None:
    """STEPS steps, a checkpoint, RESUMED more: whether state as it is at first has the keys that it has then."""
    for name, dtype in STARTS:
        model = placed(made(DTYPES[dtype]))
        optimizer, fresh = optimizer_of(model, name), optimizer_of(model, name)
        before = values(model)
        first = get_optimizer_state_dict(model, fresh)["state"]
        moved = apart(before, values(model))
        train(model, optimizer, range(STEPS), RANK, WORLD)
        model_state, state = get_state_dict(model, optimizer)
        out[f"{name} {dtype}"] = {"first": keys(first), "then": keys(state["state"]), "moved": moved}
        save_checkpoint({"model": model_state, "optimizer": state}, checkpoint_id=folder / f"{name}-{dtype}")
        train(model, optimizer, range(STEPS, STEPS + RESUMED), RANK, WORLD)
        end = values(model)
        if RANK == 0:
            torch.save(end, folder / f"{name}-{dtype}.pt")


def resume(out: dict[str, Any], folder: Path) -> None:
    """RESUMED steps from a checkpoint, in a model that holds something else before, or nothing but NaN."""
    for (name, dtype), start in STARTS.items():
        model = made(DTYPES[dtype], seed=1)
        if start == "empty":
            model = placed(model.to("meta")).to_empty(device="cpu")
            for parameter in model.parameters():
                nn.init.constant_(parameter.detach(), math.nan)
        else:
            model = placed(model)
        optimizer = optimizer_of(model, name)
        model_state, state = get_state_dict(model, optimizer)
        states = {"model": model_state, "optimizer": state}
        load_checkpoint(states, checkpoint_id=folder / f"{name}-{dtype}")
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        train(model, optimizer, range(STEPS, STEPS + RESUMED), RANK, WORLD)
        out[f"{name} {dtype}"] = apart(values(model), torch.load(folder / f"{name}-{dtype}.pt"))


def gathered(out: dict[str, Any]) -> None:
    """State gathered whole and spread again, without files."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for name in ("adam", "sgd"):
        model, again = (placed(made(torch.float64)) for _ in range(2))
        optimizer = optimizer_of(model, name)
        train(model, optimizer, range(STEPS), RANK, WORLD)
        train(again, optimizer_of(again, name), range(STEPS), RANK, WORLD)
        again.zero_grad()
        resumed = optimizer_of(again, name)
        state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=whole))  # "step" is the very tensor
        set_optimizer_state_dict(again, resumed, state if RANK == 0 else {}, options=spread)
        for m, o in ((model, optimizer), (again, resumed)):
            train(m, o, range(STEPS, STEPS + RESUMED), RANK, WORLD)
        out[name] = apart(values(model), values(again)), held(resumed) == held(optimizer)


def main() -> None:
    out, commands, folders = Path(sys.argv[1]), sys.argv[2].split(","), [Path(x) for x in sys.argv[3:]]
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    found: dict[str, Any] = {"world": WORLD}
    for command in commands:
        name, *at = command.split(":")
        found[command] = {}
        globals()[name](found[command], *(folders[int(i)] for i in at))
    out.with_name(f"{out.name}-{RANK}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        leave()


if __name__ == "__main__":
    main()
