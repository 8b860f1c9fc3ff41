"""What a study is, and what comes out of one. The result holds all that its figure, its table and its page need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EDGE", "Arm", "ArmResult", "Budget", "Conclusion", "Measured", "Result", "Study", "Table", "Verdict"]

Verdict = Literal["confirmed", "not confirmed", "inconclusive"]

Measured = dict[str, Any]
"""What one run measured: plain data. A run that broke off has the key "failed", with the reason, and no metric."""

EDGE = "Edge: the best rate is the least or largest of the grid, and a better one may lie outside"
"""For the title of a table that has `ArmResult.told_rate`."""


@dataclass(frozen=True)
class Arm:
    """One way to do it. `settings` is plain data, all in which it differs; arms are compared within their `group`."""

    name: str
    settings: Mapping[str, Any]
    group: str = ""

    @property
    def key(self) -> str:
        return f"{self.group} / {self.name}" if self.group else self.name


@dataclass(frozen=True)
class Budget:
    """What a run may cost, and how often it is done.

    rates       the learning rates that each arm tries; empty where nothing is trained
    seeds       of the runs that are reported, at the best rate; of weights and batches alike, so that arms are paired
    tuning      seeds of the runs that choose the rate, by the mean of their metrics, on data for validation: none of
                the reported ones
    options     what the study wants besides: sizes, batches
    """

    steps: int = 0
    rates: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0,)
    tuning: tuple[int, ...] = (1000,)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        """How many for each arm."""
        return len(self.rates) * len(self.tuning) + len(self.seeds)


@dataclass(frozen=True)
class Table:
    """For terminal and page: cells are text or numbers as they shall stand."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Conclusion:
    """The verdict on the claim at this size, one line that says why with figures, and the tables behind it."""

    verdict: Verdict
    line: str
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class ArmResult:
    """Of one arm: mean metric of each rate over the tuning seeds (inf: one broke off), the rate chosen, and a run for
    each of the other seeds.

    rate        None where nothing is trained
    at_edge     whether the rate is the least or the largest of the grid, so that a better one may lie outside
    """

    arm: Arm
    tuning: Mapping[str, float]
    rate: float | None
    at_edge: bool
    runs: tuple[Measured, ...]

    @property
    def whole(self) -> tuple[Measured, ...]:
        """The runs that did not break off."""
        return tuple(run for run in self.runs if "failed" not in run)

    @property
    def told_rate(self) -> str:
        """The rate as tables have it."""
        return f"{self.rate:g}{' (edge)' if self.at_edge else ''}"

    def values(self, key: str) -> list[float]:
        """One number a seed, inf of a run that broke off or whose number is not finite."""
        found = [math.inf if "failed" in run else run[key] for run in self.runs]
        return [math.inf if value is None or not math.isfinite(value) else float(value) for value in found]


@dataclass(frozen=True)
class Result:
    """All of a study's outcome; `to_dict` is what is written, `from_dict` reads it back."""

    study: str
    quick: bool
    budget: Budget
    arms: tuple[ArmResult, ...]
    machine: Mapping[str, str]

    def __getitem__(self, key: str) -> ArmResult:
        """The arm of that key: its name, after "group / " where it has one."""
        for each in self.arms:
            if each.arm.key == key:
                return each
        raise KeyError(f"{self.study} has no arm {key!r}: {', '.join(a.arm.key for a in self.arms)}")

    def groups(self) -> dict[str, tuple[ArmResult, ...]]:
        names = dict.fromkeys(each.arm.group for each in self.arms)
        return {name: tuple(a for a in self.arms if a.arm.group == name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Result:
        budget = dict(document["budget"])
        budget |= {key: tuple(budget[key]) for key in ("rates", "seeds", "tuning")}
        arms = tuple(
            ArmResult(
                Arm(**each["arm"]),
                # JSON has no infinity.
                {rate: math.inf if value is None else value for rate, value in each["tuning"].items()},
                each["rate"],
                each["at_edge"],
                tuple(each["runs"]),
            )
            for each in document["arms"]
        )
        return cls(document["study"], document["quick"], Budget(**budget), arms, document["machine"])


@dataclass(frozen=True)
class Study:
    """A question, and how it is answered.

    name            of the file that it is, and on the command line
    title           a few words
    question        in one sentence, as the claim to be confirmed or not
    source          who claims it
    setting         model, data, and what is alike in all arms, in two or three sentences
    equal           whether arms have equal parameters or equal compute, or why neither
    metric          key in `Measured` that tunes the learning rate; lower is better
    not_tested      what the study cannot say
    arms            see `Arm`
    full, quick     see `Budget`; `quick` takes seconds and says nothing
    run             one run: (arm, learning rate, seed, budget) → `Measured`; 0.0 for the rate where nothing is trained.
                    A function of its module, so that other processes find it; its budget has no grid and no seeds
    conclude        verdict and tables, of the result alone
    draw            the figure, of the result alone
    rates_are       what the numbers of the grid are, in the plural
    """

    name: str
    title: str
    question: str
    source: str
    setting: str
    equal: str
    metric: str
    not_tested: str
    arms: tuple[Arm, ...]
    full: Budget
    quick: Budget
    run: Callable[[Arm, float, int, Budget], Measured]
    conclude: Callable[[Result], Conclusion]
    draw: Callable[[Result], Figure]
    rates_are: str = "learning rates"
