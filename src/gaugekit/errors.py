"""The errors a user can cause. Each message is one line: what is wrong, where, and what to do."""

from __future__ import annotations


class GaugekitError(Exception):
    """Base of all named errors; the command line prints its message and exits with 2."""


class CheckpointError(GaugekitError):
    """A checkpoint is missing, damaged, or does not hold what its config promises."""


class UnsupportedArchitecture(GaugekitError):
    """An architecture, or a config field that changes its function, is not described in `gaugekit.models`."""


class UnsupportedObservable(GaugekitError):
    """The chosen observable does not exist for this model."""


class ConfigError(GaugekitError):
    """A training config, a recipe, or a choice of a study, holds an unknown key or values that do not go together."""


class DataError(GaugekitError):
    """A text or data set is missing, unreadable, or too short for what is asked of it."""


class TrainingError(GaugekitError):
    """Training cannot go on: a loss or gradient that is not finite, or a checkpoint of another run."""
