"""A training run from its config to an exported model, which goes on where it was when it is called again.

After step k, in this order: its record in the log, the held-out loss, a checkpoint. So a checkpoint of k steps has all
records up to k before it, and a run that goes on from it cuts off the later ones and writes them again. Weights and log
are then those of the unbroken run, but for times: bit for bit on the same number of processes, as far as the device's
kernels do the same twice (those of the CPU do), and else to rounding.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gaugekit.checkpoint.staging import reported
from gaugekit.errors import ConfigError, TrainingError
from gaugekit.optim.sharding import whole
from gaugekit.training import checkpoints, distributed, optimizers, trackers
from gaugekit.training.config import Config
from gaugekit.training.data import TokenData, Windows, evaluation, prepare
from gaugekit.training.decoder import Decoder
from gaugekit.training.export import export
from gaugekit.training.runs import Log, Run, write
from gaugekit.training.steps import Step, evaluate, steps
from gaugekit.verbs.inspect import Track, untracked

__all__ = ["TrainReport", "train"]

Watch = Callable[[Step], None]
Record = dict[str, Any]


@dataclass(frozen=True)
class TrainReport:
    """What came out of a run. Losses are means in nats a token: of the last batch, and of the held-out windows."""

    out: str
    steps: int
    tokens: int  # read in training
    parameters: int
    loss: float
    held_out: float
    tokens_per_second: float  # in training, evaluations and checkpoints apart: the median of the log, without step 1
    processes: int
    resumed: int  # steps that an earlier call had taken
    checkpoint: str  # the newest
    model: str  # the exported one
    architecture: str  # its class
    already_finished: bool = False  # by an earlier call, whose report this is

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def train(
    config: Config,
    out: Path,
    *,
    track: Track[Any] = untracked,
    watch: Watch = lambda step: None,  # noqa: ARG005
) -> TrainReport:
    """Train as `config` says, in the folder `out` (see `gaugekit.training.runs`), from its newest checkpoint if it has
    one. Under `torch.distributed` all processes call it, with a folder that all of them see, and share the model.

    Args:
        track: shows how far the data are.
        watch: is told of every step, in process 0.

    The state of torch's random numbers is left as it was.

    Raises:
        ConfigError: values that do not go together, a package that is missing, a folder with a run of another config.
        DataError: as `gaugekit.training.data.prepare`; a text shorter than the context.
        TrainingError: a loss, gradient or weight that is not finite, or memory that is not enough, with the last good
            checkpoint; a checkpoint that is damaged or cannot be written; a log that has lost its records; another
            process that trains in the folder.
        CheckpointError: a folder that cannot be written.
    """
    config.check()
    trackers.check(config)
    distributed.share(config.run)
    run = Run(out.expanduser().resolve())
    config = run.agreed(config)
    if run.finished(config):
        return _report(run, config, already_finished=True)
    device = distributed.device_of(config.run.device)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device.index] if device.type == "cuda" else []))
        with _only_if_it_starts(run):
            data = distributed.in_turn(lambda: _data(config, run, track))
            config = replace(config, model=replace(config.model, vocab=config.model.vocab or data.vocab))
            with _enough_memory():
                state, parameters = _start(config, data, device)
        log, resumed = _resume(config, run, state, stack)
        try:
            with _enough_memory():
                _train(config, run, data, state, resumed, log, watch)
        except TrainingError as error:
            last = checkpoints.newest(run.checkpoints)
            kept = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
            raise TrainingError(f"{error}; {kept}") from error
        weights = distributed.weights(state.model)
        known = {"parameters": parameters, "processes": distributed.world(), "resumed": resumed}
        distributed.first(lambda: _finish(config, run, data, weights, known))
    return _report(run, config)


@contextmanager
def _only_if_it_starts(run: Run) -> Iterator[None]:
    """A folder that was not there, nor its token files, are not left behind by a run that cannot start."""
    missing = [path for path in (run.data, run.path, *run.path.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        if run.data in missing and distributed.rank() == 0:
            shutil.rmtree(run.data, ignore_errors=True)
            for path in missing:
                if path.exists() and not any(path.iterdir()):
                    path.rmdir()
        raise


@contextmanager
def _enough_memory() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On the CPU torch has no class for it.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise TrainingError(
            "there is not enough memory: raise run.accumulation, or lower run.batch, model.context or model.width; "
            "--dry-run says what they take"
        ) from error


def _data(config: Config, run: Run, track: Track[Any]) -> TokenData:
    data = prepare(config.data, Path(config.data.cache) if config.data.cache else run.data, track)
    data.check(config.model.context)
    config.model.check_vocab(data.vocab)
    return data


def _start(config: Config, data: TokenData, device: torch.device) -> tuple[checkpoints.State, int]:
    """A run before its first step, and how many parameters it has."""
    torch.manual_seed(config.run.seed)
    model = Decoder(config.model).to(device, _dtype(config))  # drawn on the CPU, so the same on every device
    parameters = sum(p.numel() for p in model.parameters())
    if config.run.compile:
        _check_compiler(device)
        # Hooks of `fully_shard` stand between blocks.
        for part in model.blocks if distributed.world() > 1 else [model]:
            part.compile()
    if distributed.world() > 1:
        distributed.shard(model, device)
    optimizer = optimizers.make(model, config.optimizer)
    scheduler = optimizers.schedule(optimizer, config.schedule, config.run.steps)
    return checkpoints.State(model, optimizer, scheduler, data.fingerprint), parameters


def _check_compiler(device: torch.device) -> None:
    names = ("g++", "clang++", "cl")
    if device.type == "cpu" and not os.environ.get("CXX") and not any(map(shutil.which, names)):
        raise ConfigError("run.compile=true needs a C++ compiler, g++ or clang++: install one, or leave it out")


def _resume(config: Config, run: Run, state: checkpoints.State, stack: ExitStack) -> tuple[Log | None, int]:
    """The log, in process 0, and how many steps have been taken."""

    def opened() -> Log:
        newest = checkpoints.newest(run.checkpoints)
        with reported(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(Log(run.log, checkpoints.steps_of(newest) if newest else 0))
        # What processes that were killed have left half-written.
        checkpoints.clean(run.checkpoints)
        for partial in run.path.glob(f".{run.model.name}.*"):
            shutil.rmtree(partial, ignore_errors=True)
        run.write_config(config)
        return log

    log = distributed.first(opened)
    newest = checkpoints.newest(run.checkpoints)
    return log, checkpoints.load(newest, state) if newest else 0


def _train(
    config: Config, run: Run, data: TokenData, state: checkpoints.State, start: int, log: Log | None, watch: Watch
) -> None:
    c, n, model = config.run, config.model.context, state.model
    own = distributed.share(c)
    held_out = evaluation(data.held_out, n, own, c.evaluation_batches * c.batch // own)
    windows = Windows(data.train, n, c.batch, c.seed)

    def due(taken: int, every: int) -> bool:
        return taken == c.steps or (every > 0 and taken % every == 0)

    with trackers.tracker(config, run.path.name, distributed.rank() == 0) as tell:

        def record(**values: float) -> None:
            if log is not None:
                log.write(values)
            tell(values)

        seconds, tokens = 0.0, 0
        for step in steps(
            model,
            state.optimizer,
            windows,
            start,
            c.steps,
            scheduler=state.scheduler,
            accumulation=c.accumulation,
            clip=config.optimizer.clip,
            precision=c.precision,
        ):
            taken, seconds, tokens = step.index + 1, seconds + step.seconds, tokens + step.tokens
            if taken == 1 or due(taken, c.log_every):
                record(
                    step=taken,
                    loss=step.loss,
                    rate=step.rate,
                    gradient=step.gradient,
                    tokens=taken * step.tokens,
                    seconds=seconds,
                    tokens_per_second=tokens / seconds,
                )
                seconds, tokens = 0.0, 0
            if log is not None:
                watch(step)
            if due(taken, c.evaluate_every):
                loss = evaluate(model, held_out, c.precision)
                if not math.isfinite(loss):
                    raise TrainingError(f"the held-out loss is {loss} after step {taken}: lower optimizer.lr")
                record(step=taken, held_out=loss)
            if due(taken, c.save_every):
                _check_weights(state, taken)
                if log is not None:
                    log.sync()
                checkpoints.save(run.checkpoints, taken, state, c.keep)


def _check_weights(state: checkpoints.State, taken: int) -> None:
    """A checkpoint that is kept in place of an older one should be worth it."""
    size = float(whole(torch.nn.utils.get_total_norm([p.detach() for p in state.model.parameters()])))
    if not math.isfinite(size):
        raise TrainingError(f"the norm of the weights is {size} after step {taken}: lower optimizer.lr")


def _finish(config: Config, run: Run, data: TokenData, weights: dict[str, torch.Tensor], known: Record) -> None:
    """Export the model, and write the report."""
    records = list(run.records())
    trained = [record for record in records if "loss" in record]
    tested = [record for record in records if "held_out" in record]
    if any(not found or found[-1]["step"] != config.run.steps for found in (trained, tested)):
        raise TrainingError(f"{run.log}: has lost records; delete the newest checkpoint to make them again")
    model = Decoder(config.model).to(_dtype(config))
    model.load_state_dict(weights)
    shutil.rmtree(run.model, ignore_errors=True)  # of fewer steps, if it is there
    architecture = export(model, run.model, data.tokenizer)
    report = TrainReport(
        out=str(run.path),
        steps=config.run.steps,
        tokens=trained[-1]["tokens"],
        loss=trained[-1]["loss"],
        held_out=tested[-1]["held_out"],
        tokens_per_second=median(record["tokens_per_second"] for record in trained[1:] or trained),
        checkpoint=str(checkpoints.newest(run.checkpoints)),
        model=str(run.model),
        architecture=architecture,
        **known,
    )
    write(run.report, report.to_dict())


def _dtype(config: Config) -> torch.dtype:
    return torch.float64 if config.run.precision == "float64" else torch.float32


def _report(run: Run, config: Config, already_finished: bool = False) -> TrainReport:
    found = run.finished(config)
    if found is None:
        raise TrainingError(f"{run.report}: has gone")
    return TrainReport(**{**found, "already_finished": already_finished})
