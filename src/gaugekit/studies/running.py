"""Runs a study: every arm at every learning rate of the grid, then at the best one for every seed.

Runs are kept as they come, in NAME.runs.jsonl beside the result, so that a study that was stopped goes on where it was.
A run is known by arm, rate, seed and budget; the file is to be deleted by hand when the code has changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gaugekit.errors import DataError, TrainingError
from gaugekit.studies.catalog import study as find
from gaugekit.studies.study import Arm, ArmResult, Budget, Measured, Result, Study

__all__ = ["run"]

Track = Callable[[Iterable[Any], int | None, str], Iterable[Any]]


@dataclass(frozen=True)
class Job:
    study: str
    arm: Arm
    rate: float
    seed: int
    budget: Budget

    @property
    def key(self) -> str:
        told = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def run(study: Study, *, quick: bool = False, out: Path, jobs: int = 1, track: Track) -> Result:
    """The result of a study.

    Args:
        quick: with the budget that takes seconds and says nothing.
        out: an existing folder; NAME.runs.jsonl there (NAME.quick.runs.jsonl) keeps the runs.
        jobs: processes that run at a time, one thread each. 1: this process.
        track: (items, total, what) → items, to show progress.

    Raises: DataError where kept runs cannot be read.
    """
    budget = study.quick if quick else study.full
    kept = out / f"{study.name}{'.quick' if quick else ''}.runs.jsonl"
    done = read(kept)
    trained = bool(budget.rates)
    rates = budget.rates or (0.0,)
    trials = [Job(study.name, arm, rate, budget.tuning, budget) for arm in study.arms for rate in rates if trained]
    tried = dict(zip(trials, perform(trials, done, kept, jobs, track, f"{study.name}: learning rates"), strict=True))
    chosen: dict[str, tuple[dict[str, float], float]] = {}
    for arm in study.arms:
        metrics = {job.rate: metric(measured, study.metric) for job, measured in tried.items() if job.arm is arm}
        best = min(metrics, key=lambda rate: metrics[rate]) if trained else 0.0
        chosen[arm.key] = {f"{rate:g}": value for rate, value in metrics.items()}, best
    final = [Job(study.name, arm, chosen[arm.key][1], seed, budget) for arm in study.arms for seed in budget.seeds]
    measured = perform(final, done, kept, jobs, track, f"{study.name}: seeds")
    arms = []
    for arm in study.arms:
        tuning, best = chosen[arm.key]
        runs = tuple(m for job, m in zip(final, measured, strict=True) if job.arm is arm)
        edge = trained and len(rates) > 1 and best in (min(rates), max(rates))
        arms.append(ArmResult(arm, tuning, best if trained else None, edge, runs))
    return Result(study.name, quick, budget, tuple(arms), machine(jobs))


def metric(measured: Measured, key: str) -> float:
    value = math.inf if "failed" in measured else float(measured[key])
    return value if math.isfinite(value) else math.inf


def perform(
    wanted: list[Job], done: dict[str, Measured], kept: Path, jobs: int, track: Track, what: str
) -> list[Measured]:
    """What was measured, in the order of `wanted`; runs that are not kept yet are made, and kept."""
    missing = [job for job in wanted if job.key not in done]
    for job, measured in track(made(missing, jobs), len(missing), what):
        done[job.key] = measured
        with open(kept, "a", encoding="utf-8") as file:
            file.write(json.dumps({"key": job.key, "arm": job.arm.key, "measured": measured}) + "\n")
    return [done[job.key] for job in wanted]


def made(wanted: list[Job], jobs: int) -> Iterator[tuple[Job, Measured]]:
    if jobs <= 1 or len(wanted) <= 1:
        for job in wanted:
            yield job, one(job)
        return
    # Not forked: torch's threads do not survive it.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), single_thread) as pool:
        futures: dict[Future[Measured], Job] = {pool.submit(one, job): job for job in wanted}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def single_thread() -> None:
    torch.set_num_threads(1)


def one(job: Job) -> Measured:
    """A run whose loss or gradient is not finite has broken off, which is a result."""
    try:
        return find(job.study).run(job.arm, job.rate, job.seed, job.budget)
    except TrainingError as error:
        return {"failed": str(error)}


def read(kept: Path) -> dict[str, Measured]:
    if not kept.exists():
        return {}
    done = {}
    lines = kept.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            done[record["key"]] = record["measured"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):  # the run was stopped while this was written
                kept.write_text("".join(lines[:-1]), encoding="utf-8")
                break
            raise DataError(f"{kept}: line {number} is no run: delete it, or the file") from error
    return done


def machine(jobs: int) -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": platform.machine(),
        "cores": str(os.cpu_count()),
        "jobs": str(jobs),
    }
