"""Runs a study: every arm at every learning rate of the grid, then at the best one for every seed.

Runs are kept as they come, in NAME.runs.jsonl beside the result, so that a study that was stopped goes on where it was.
A run is known by its arm, rate, seed, steps and options, and by what made it: more seeds, or a wider grid, leave the
others as they are; runs of other code, or of another torch or Python, stay in the file and are not used.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gaugekit.errors import TrainingError
from gaugekit.studies.kept import Done, Job, append, maker, read
from gaugekit.studies.study import Arm, ArmResult, Budget, Measured, Result, Study

__all__ = ["run"]

Track = Callable[[Iterable[Any], int | None, str], Iterable[Any]]
Run = Callable[[Arm, float, int, Budget], Measured]


def run(study: Study, *, quick: bool = False, out: Path, jobs: int = 1, track: Track) -> Result:
    """The result of a study.

    Args:
        quick: with the budget that takes seconds and says nothing.
        out: an existing folder; NAME.runs.jsonl there (NAME.quick.runs.jsonl) keeps the runs.
        jobs: processes that run at a time. 1: this process. Each run has one thread.
        track: (items, total, what) → items, to show progress.

    Raises: DataError where kept runs cannot be read or written.
    """
    budget = study.quick if quick else study.full
    each, made_by = replace(budget, rates=(), seeds=()), maker()
    kept = out / f"{study.name}{'.quick' if quick else ''}.runs.jsonl"
    done = read(kept)
    # Not forked: torch's threads do not survive it.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, stop_quietly) if jobs > 1 else nullcontext() as pool:

        def perform(wanted: list[Job], what: str) -> list[Done]:
            """What came of each; runs that are not kept yet are made, and kept."""
            missing = [job for job in wanted if job.key not in done]
            if missing:
                for job, (measured, seconds) in track(made(study.run, missing, pool), len(missing), what):
                    done[job.key] = Done(measured, seconds, jobs)
                    append(kept, job, done[job.key])
            return [done[job.key] for job in wanted]

        # Those that choose the rates, where there is anything to choose.
        pairs = [(arm, rate) for arm in study.arms for rate in budget.rates]
        trials = [Job(study.name, *pair, seed, each, made_by) for pair in pairs for seed in budget.tuning]
        tried = perform(trials, f"{study.name}: choosing {study.rates_are}")
        tuning: dict[str, dict[float, float]] = {arm.key: {} for arm in study.arms}
        for i, (arm, rate) in enumerate(pairs):
            of_pair = tried[i * len(budget.tuning) : (i + 1) * len(budget.tuning)]
            metrics = [metric(outcome.measured, study.metric) for outcome in of_pair]
            tuning[arm.key][rate] = math.fsum(metrics) / len(metrics)
        best = {key: least(metrics) for key, metrics in tuning.items()}
        final = [
            Job(study.name, arm, best[arm.key], seed, each, made_by) for arm in study.arms for seed in budget.seeds
        ]
        reported = perform(final, f"{study.name}: seeds")
    arms = []
    for arm in study.arms:
        metrics, rate = tuning[arm.key], best[arm.key]
        runs = tuple(outcome.measured for job, outcome in zip(final, reported, strict=True) if job.arm is arm)
        edge = len(metrics) > 1 and rate in (min(metrics), max(metrics))
        told = {f"{rate:g}": value for rate, value in metrics.items()}
        arms.append(ArmResult(arm, told, rate if metrics else None, edge, runs))
    return Result(study.name, quick, budget, tuple(arms), machine(made_by, [*tried, *reported]))


def least(metrics: dict[float, float]) -> float:
    """The rate of the least metric; 0 where there is none."""
    return min(metrics, key=lambda rate: metrics[rate]) if metrics else 0.0


def metric(measured: Measured, key: str) -> float:
    value = math.inf if "failed" in measured else float(measured[key])
    return value if math.isfinite(value) else math.inf


def made(
    measure: Run, wanted: list[Job], pool: ProcessPoolExecutor | None
) -> Iterator[tuple[Job, tuple[Measured, float]]]:
    """Each as soon as it is done."""
    if pool is None:
        for job in wanted:
            yield job, one(measure, job)
        return
    futures: dict[Future[tuple[Measured, float]], Job] = {pool.submit(one, measure, job): job for job in wanted}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def stop_quietly() -> None:
    """Ctrl-C reaches all processes of a terminal: those that compute end at once, and leave the word to the first."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def one(measure: Run, job: Job) -> tuple[Measured, float]:
    """What a run measured, and its seconds. One that is not finite, or of which a decomposition fails, has broken off,
    which is a result."""
    began, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # sums depend on the number of threads, and so would what comes out
    try:
        # As it will be read back: fresh runs and kept ones are alike.
        measured = json.loads(json.dumps(measure(job.arm, job.rate, job.seed, job.budget)))
    except (TrainingError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        measured = {"failed": " ".join(str(error).split())}
    finally:
        torch.set_num_threads(threads)
    return measured, round(time.perf_counter() - began, 3)


def machine(made_by: Mapping[str, str], done: Sequence[Done]) -> dict[str, str]:
    """What made a study's runs, and where it was put together; how many ran at a time, and the seconds of all, one
    after the other."""
    return {
        **made_by,
        "processor": platform.machine(),
        "cores": str(os.cpu_count()),
        "jobs": " or ".join(map(str, sorted({each.jobs for each in done}))),
        "seconds": f"{math.fsum(each.seconds for each in done):.0f}",
    }
