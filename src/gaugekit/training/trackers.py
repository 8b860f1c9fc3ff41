"""Where records go besides the log: trackio or Weights & Biases, if asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gaugekit.errors import ConfigError, TrainingError
from gaugekit.training.config import Config

__all__ = ["check", "tracker"]

Record = dict[str, Any]


def check(config: Config) -> None:
    """Raises `ConfigError` if the package of the tracker is not installed."""
    name = config.run.tracker
    if name != "none" and find_spec(name) is None:
        raise ConfigError(f"run.tracker={name}: the package is missing: pip install 'gaugekit[{name}]'")


@contextmanager
def tracker(config: Config, run: str, asked: bool = True) -> Iterator[Callable[[Record], None]]:
    """What takes records, under their step, in a run of that name; if not `asked`, it forgets them."""
    if config.run.tracker == "none" or not asked:
        yield lambda record: None  # noqa: ARG005
        return
    # Both packages have the functions used here, and one of them says on stdout where its dashboard is.
    with redirect_stdout(sys.stderr):
        try:
            package = import_module(config.run.tracker)
            package.init(project=config.run.project, name=run, config=config.to_dict())
        except Exception as error:  # no network, no account, ...: of as many kinds as there are packages
            raise TrainingError(f"run.tracker={config.run.tracker}: {' '.join(str(error).split())}") from error
        try:
            yield lambda record: package.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])
        finally:
            package.finish()
