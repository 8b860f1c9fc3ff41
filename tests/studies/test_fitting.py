"""Data of a run by its seed, and what breaks a run off."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gaugekit.errors import TrainingError
from gaugekit.studies import fitting
from gaugekit.studies.fitting import SIZE, Task, characters, fit, language, made, sized, without
from gaugekit.studies.recalling import copying, recall
from gaugekit.studies.study import Budget
from gaugekit.training.config import ModelConfig, OptimizerConfig
from gaugekit.training.decoder import Decoder

CONFIG = ModelConfig(vocab=11, context=8, width=12, layers=1, heads=2)


# --- data ---------------------------------------------------------------------------------------------------


def test_lines_that_are_trained_on_are_taken_out() -> None:
    long, other = "a line of forty characters, or a few more", "another line of forty characters or more"
    assert len(other) == 40
    trained = f"begin\n  {long}\n{other[:-1]}\nshort\n"
    part = f"short\n{long}\n{other}\n      {long}  \n{long} and more\n{other[:-1]}"
    assert without(part, trained) == f"short\n{other}\n{long} and more\n{other[:-1]}"
    assert without(part, f"{trained}{other}") == f"short\n{long} and more\n{other[:-1]}"
    assert without(part, "") == part


def lines(tokens: np.ndarray, newline: int) -> set[tuple[int, ...]]:
    """The long ones."""
    parts = np.split(tokens, np.flatnonzero(tokens == newline) + 1)
    return {tuple(part.tolist()) for part in parts if len(part) > 60}


def test_the_text_is_in_three_parts_that_share_no_long_line() -> None:
    (training, validation, held_out), vocab = characters()
    assert 7.9 < len(training) / len(held_out) < 9.5 and 0.9 < len(validation) / len(held_out) < 1.1
    for part in (training, validation, held_out):
        assert int(part.min()) >= 0 and part.max() < vocab and (part == 0).mean() < 1e-3
    newline = 1  # of all common characters the first
    each = [lines(part, newline) for part in (training, validation, held_out)]
    assert min(map(len, each)) > 20
    assert not each[0] & each[1] and not each[0] & each[2]


def windows(batches: tuple[tuple[Tensor, Tensor], ...]) -> set[tuple[int, ...]]:
    return {tuple(row) for tokens, _ in batches for row in tokens.tolist()}


OPTIONS: dict[Any, dict[str, Any]] = {
    language: {"context": 48, "batch": 8},
    recall: {"pairs": 4, "keys": 4, "values": 8, "queries": 3, "batch": 8, "context": 31},
    copying: {"length": 16, "symbols": 16, "batch": 8, "context": 32},
}


@pytest.mark.parametrize("task", OPTIONS, ids=lambda task: task.__name__)
def test_seeds_that_choose_rates_are_evaluated_on_other_windows(task: Any) -> None:
    budget = Budget(tuning=(1000, 1001), options=OPTIONS[task])
    found = {seed: windows(task(budget, seed).held_out) for seed in (0, 1, 1000, 1001)}
    assert found[0] == found[1] and found[1000] == found[1001]
    # A few windows of the text are lines of dashes, which stand in all its parts.
    few = 5 if task is language else 0
    assert min(map(len, found.values())) > 240 and len(found[0] & found[1000]) <= few
    for seed in (0, 1000):
        made_up = task(budget, seed)
        trained = windows(tuple(made_up.batches(seed)(step) for step in range(40)))
        assert len(trained) > 300 and len(trained & (found[0] | found[1000])) <= few
        assert torch.equal(made_up.batches(5)(2)[0], task(budget, 0).batches(5)(2)[0])


def test_sizes() -> None:
    config = sized(Budget(options={**SIZE, "other": 3}), 7, norm="rms")
    assert (config.vocab, config.width, config.layers, config.norm) == (7, 64, 3, "rms")
    assert config.init_std == 1 / 8
    assert sized(Budget(options={"width": 16}), 7).init_std == ModelConfig().init_std
    model = made(config, 0)
    assert float(model.embedding.weight.detach().std()) == pytest.approx(1 / 8, rel=0.1)


# --- one run ------------------------------------------------------------------------------------------------


def task(held_out: Tensor | None = None) -> Task:
    tokens = torch.randint(11, (4, 8), generator=torch.Generator().manual_seed(0))
    evaluated = tokens if held_out is None else held_out
    return Task(11, lambda seed: lambda step: (tokens, tokens.roll(seed + step, 0)), ((evaluated, evaluated),))


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(CONFIG)


class Breaking(torch.optim.SGD):
    """Writes a number into a weight in the step of that number, from 1."""

    def __init__(self, model: nn.Module, at: int, value: float) -> None:
        super().__init__(model.parameters(), lr=1e-3)
        self.weight, self.at, self.value, self.taken = model.get_parameter("head.weight"), at, value, 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        with torch.no_grad():
            if self.taken == self.at:
                self.weight[3, 2] = self.value


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_watch_sees_no_weight_that_is_not_finite(value: float) -> None:
    seen: list[int] = []

    def watch(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        seen.append(step)

    with pytest.raises(TrainingError, match=r"^head.weight is not finite after step 2$"):
        fit(decoder(), lambda model: Breaking(model, 2, value), task(), Budget(steps=4), 0, watch=watch)
    assert seen == [0, 1]


def test_nor_at_the_start() -> None:
    model = decoder()
    with torch.no_grad():
        model.head.weight[0, 0] = math.nan
    with pytest.raises(TrainingError, match=r"^head.weight is not finite after step 0$"):
        fit(model, OptimizerConfig(lr=1e-3), task(), Budget(steps=2), 0, watch=lambda *_: None)


def test_a_last_step_that_breaks_off_does() -> None:
    with pytest.raises(TrainingError, match=r"^head.weight is not finite after step 3$"):
        fit(decoder(), lambda model: Breaking(model, 3, math.nan), task(), Budget(steps=3), 0)
    # Large, but finite: the loss of what is held out is not.
    with pytest.raises(TrainingError, match=r"^the held-out loss is (nan|inf) after step 3$"):
        fit(decoder(), lambda model: Breaking(model, 3, 3e38), task(), Budget(steps=3), 0)


def test_seconds_are_of_the_steps_alone_and_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of the processor that goes on by 1 whenever it is read, and stands still otherwise."""
    read: list[int] = []

    def clock() -> float:
        read.append(1)
        return float(len(read))

    class Time:
        process_time = staticmethod(clock)
        perf_counter = staticmethod(time.perf_counter)

    monkeypatch.setattr(fitting, "time", Time)
    found = fit(
        decoder(), OptimizerConfig(lr=1e-3), task(), Budget(steps=3), 0, watch=lambda *_: read.extend([1] * 100)
    )
    assert found.seconds == 3 + 1  # and the look whether there is one more
    assert found.measured()["seconds"] == 4.0
    assert found.tokens == 3 * 4 * 8 and len(found.losses) == 3
