"""Runs a study: every arm at every learning rate of the grid, then at the best one for every seed.

Runs are kept as they come, in NAME.runs.jsonl beside the result, so that a study that was stopped goes on where it was.
A run is known by its arm, rate, seed, steps and options: more seeds, or a wider grid, leave the others as they are. The
file is to be deleted by hand when the code has changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gaugekit.errors import DataError, TrainingError
from gaugekit.studies.study import Arm, ArmResult, Budget, Measured, Result, Study

__all__ = ["run"]

Track = Callable[[Iterable[Any], int | None, str], Iterable[Any]]
Run = Callable[[Arm, float, int, Budget], Measured]


@dataclass(frozen=True)
class Job:
    """One run. Its `budget` has no grid and no seeds: it does not depend on them."""

    study: str
    arm: Arm
    rate: float
    seed: int
    budget: Budget

    @property
    def key(self) -> str:
        told = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Done:
    """What one run measured, and its seconds, all that it does to get there included."""

    measured: Measured
    seconds: float


def run(study: Study, *, quick: bool = False, out: Path, jobs: int = 1, track: Track) -> Result:
    """The result of a study.

    Args:
        quick: with the budget that takes seconds and says nothing.
        out: an existing folder; NAME.runs.jsonl there (NAME.quick.runs.jsonl) keeps the runs.
        jobs: processes that run at a time. 1: this process. Each run has one thread.
        track: (items, total, what) → items, to show progress.

    Raises: DataError where kept runs cannot be read.
    """
    budget = study.quick if quick else study.full
    each = replace(budget, rates=(), seeds=())
    kept = out / f"{study.name}{'.quick' if quick else ''}.runs.jsonl"
    done = read(kept)
    # Not forked: torch's threads do not survive it.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, stop_quietly) if jobs > 1 else nullcontext() as pool:
        # Those that choose the rates, where there is anything to choose.
        trials = [Job(study.name, arm, rate, budget.tuning, each) for arm in study.arms for rate in budget.rates]
        tried = perform(study.run, trials, done, kept, pool, track, f"{study.name}: learning rates")
        tuning: dict[str, dict[float, float]] = {arm.key: {} for arm in study.arms}
        for job, outcome in zip(trials, tried, strict=True):
            tuning[job.arm.key][job.rate] = metric(outcome.measured, study.metric)
        best = {key: least(metrics) for key, metrics in tuning.items()}
        final = [Job(study.name, arm, best[arm.key], seed, each) for arm in study.arms for seed in budget.seeds]
        reported = perform(study.run, final, done, kept, pool, track, f"{study.name}: seeds")
    arms = []
    for arm in study.arms:
        metrics, rate = tuning[arm.key], best[arm.key]
        runs = tuple(outcome.measured for job, outcome in zip(final, reported, strict=True) if job.arm is arm)
        edge = len(metrics) > 1 and rate in (min(metrics), max(metrics))
        told = {f"{rate:g}": value for rate, value in metrics.items()}
        arms.append(ArmResult(arm, told, rate if metrics else None, edge, runs))
    seconds = math.fsum(outcome.seconds for outcome in [*tried, *reported])
    return Result(study.name, quick, budget, tuple(arms), machine(jobs, seconds))


def least(metrics: dict[float, float]) -> float:
    """The rate of the least metric; 0 where there is none."""
    return min(metrics, key=lambda rate: metrics[rate]) if metrics else 0.0


def metric(measured: Measured, key: str) -> float:
    value = math.inf if "failed" in measured else float(measured[key])
    return value if math.isfinite(value) else math.inf


def perform(
    measure: Run,
    wanted: list[Job],
    done: dict[str, Done],
    kept: Path,
    pool: ProcessPoolExecutor | None,
    track: Track,
    what: str,
) -> list[Done]:
    """What came of each, in the order of `wanted`; runs that are not kept yet are made, and kept."""
    missing = [job for job in wanted if job.key not in done]
    if missing:
        for job, outcome in track(made(measure, missing, pool), len(missing), what):
            done[job.key] = outcome
            record = {"key": job.key, "arm": job.arm.key, "rate": job.rate, "seed": job.seed, **asdict(outcome)}
            with open(kept, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    return [done[job.key] for job in wanted]


def made(measure: Run, wanted: list[Job], pool: ProcessPoolExecutor | None) -> Iterator[tuple[Job, Done]]:
    """Each as soon as it is done."""
    if pool is None:
        for job in wanted:
            yield job, one(measure, job)
        return
    futures: dict[Future[Done], Job] = {pool.submit(one, measure, job): job for job in wanted}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def stop_quietly() -> None:
    """Ctrl-C reaches all processes of a terminal: those that compute end at once, and leave the word to the first."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def one(measure: Run, job: Job) -> Done:
    """A run whose loss or gradient is not finite has broken off, which is a result."""
    began, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # sums depend on the number of threads, and so would what comes out
    try:
        # As it will be read back: fresh runs and kept ones are alike.
        measured = json.loads(json.dumps(measure(job.arm, job.rate, job.seed, job.budget)))
    except TrainingError as error:
        measured = {"failed": str(error)}
    finally:
        torch.set_num_threads(threads)
    return Done(measured, round(time.perf_counter() - began, 3))


def read(kept: Path) -> dict[str, Done]:
    """The runs of a file. A last line without its end was being written when the study was stopped: it is taken off."""
    if not kept.exists():
        return {}
    done = {}
    lines = kept.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        os.truncate(kept, sum(map(len, lines[:-1])))
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            done[record["key"]] = Done(dict(record["measured"]), float(record["seconds"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{kept}: line {number} is no run: delete it, or the file") from error
    return done


def machine(jobs: int, seconds: float) -> dict[str, str]:
    """Where a study ran, and the seconds of all its runs, one after the other."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": platform.machine(),
        "cores": str(os.cpu_count()),
        "jobs": str(jobs),
        "seconds": f"{seconds:.0f}",
    }
