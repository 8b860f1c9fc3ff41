"""What a training run is: five frozen dataclasses, from YAML and `key=value` words, with unknown keys refused.

Sizes are in tokens, features, or optimizer steps; see the field comments.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from gaugekit.errors import ConfigError

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "ScheduleConfig",
    "from_dict",
    "read",
    "typed",
]

T = TypeVar("T")

Norm = Literal["layer", "rms", "prms", "crms", "l2", "scale", "dyt", "derf", "none"]
Placement = Literal["pre", "post", "peri", "sandwich"]
Attention = Literal["standard", "relational", "invariant"]
Score = Literal["dot", "cosine", "rbf", "bilinear", "learned"]
Positions = Literal["learned", "rotary", "none"]
MLP = Literal["gelu", "relu", "swiglu"]
Optimizer = Literal[
    "adamw", "sgd", "muon", "quotient_adam", "quotient_sgd", "horizontal_adamw", "horizontal_muon", "gated_adamw"
]


@dataclass(frozen=True)
class ModelConfig:
    """The decoder: see `gaugekit.training.decoder`."""

    vocab: int = 0  # 0: as many as the tokenizer has
    context: int = 128  # tokens in a window, and rows of learned positions
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 0  # 0: one a query head
    hidden: int = 0  # units of an MLP; 0: 4 width, for swiglu 8/3 width up to a multiple of 8, of like parameters
    norm: Norm = "layer"
    norm_options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of that norm
    placement: Placement = "pre"
    attention: Attention = "standard"
    score: Score = "dot"  # of relational attention, as are frame and values
    frame: Literal["full", "split"] = "split"
    values: Literal["plain", "linear"] = "linear"
    residual: Literal["plain", "sphere"] = "plain"
    positions: Positions = "learned"
    rotary_base: float = 10000.0
    mlp: MLP = "gelu"
    bias: bool = False  # of linear maps; norms have what their options say
    tied: bool = False  # one matrix for embedding and head
    init_std: float = 0.02  # of matrices; of those that write to the stream, over √(2 layers). Not on spheres

    def check(self) -> None:
        """Raises `ConfigError` for values that do not go together, naming the keys."""
        for name in ("context", "width", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("vocab", "kv_heads", "hidden"):
            if getattr(self, name) < 0:
                raise ConfigError(f"model.{name} must be 0 (the default) or more, got {getattr(self, name)}")
        for name in ("rotary_base", "init_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"model.{name} must be a positive number, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ConfigError(f"model.heads={self.heads} does not divide model.width={self.width}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}")
        if self.positions == "rotary" and self.attention != "standard":
            raise ConfigError(
                f"model.positions=rotary turns queries and keys, which attention={self.attention} has none of: "
                "take learned or none"
            )
        if self.positions == "rotary" and self.width // self.heads % 2:
            raise ConfigError("model.positions=rotary needs an even width / heads")
        if self.attention == "relational" and self.kv_heads not in (0, self.heads):
            raise ConfigError("model.attention=relational has no key/value heads to share: leave out kv_heads")
        if self.attention != "relational":
            for name in ("score", "frame", "values"):
                if getattr(self, name) != getattr(ModelConfig, name):
                    raise ConfigError(
                        f"model.{name}={getattr(self, name)} is of attention=relational, and attention is "
                        f"{self.attention}: leave it out"
                    )
        if self.residual == "sphere":
            if self.placement == "post":
                raise ConfigError("model.residual=sphere normalizes the sum itself: placement=post has no place in it")
            if self.tied or self.bias:
                raise ConfigError("model.residual=sphere has neither biases nor a tied head: set both to false")

    def check_vocab(self, known: int) -> None:
        """Raises `ConfigError` unless there is a row for each of the `known` tokens of a tokenizer."""
        if 0 < self.vocab < known:
            raise ConfigError(f"model.vocab={self.vocab} is less than the tokenizer's {known}: leave it out")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def units(self) -> int:
        """Hidden units of an MLP, the default resolved."""
        if self.hidden:
            return self.hidden
        return -(-8 * self.width // 24) * 8 if self.mlp == "swiglu" else 4 * self.width


@dataclass(frozen=True)
class DataConfig:
    """What is read: see `gaugekit.training.data`."""

    source: str = "pydoc"  # "pydoc": Python's own documentation; a text file; or a directory that `datasets` saved
    tokenizer: Literal["byte", "bpe"] = "byte"
    vocab: int = 1024  # of bpe, which is trained on the text
    column: str = "text"  # of a data set
    held_out: float = 0.1  # share of the text, at its end, for evaluation
    cache: str = ""  # folder of token files; "": beside the run

    def check(self) -> None:
        if not 0 < self.held_out < 1:
            raise ConfigError(f"data.held_out is a share between 0 and 1, got {self.held_out}")
        if self.tokenizer == "bpe" and self.vocab < 257:
            raise ConfigError(f"data.vocab must be at least 257 for bpe, 256 bytes and a merge, got {self.vocab}")


@dataclass(frozen=True)
class OptimizerConfig:
    """Who steps: see `gaugekit.training.optimizers`."""

    name: Optimizer = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0  # of matrices; norms, biases and scales have none
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9  # of sgd and muon
    clip: float = 1.0  # largest norm of the whole gradient; 0: none
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of that optimizer


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the steps: see `gaugekit.optim.schedules`."""

    name: Literal["cosine", "logarithmic", "constant"] = "cosine"
    warmup: int = 0  # steps
    final: float = 0.1  # share of the largest rate at the end
    rho: float = 0.1  # of logarithmic


@dataclass(frozen=True)
class RunConfig:
    """How long, how wide, how exact, and what is kept."""

    steps: int = 1000
    batch: int = 16  # windows in a step, over all processes and accumulated parts
    accumulation: int = 1  # parts of a batch that run one after the other
    seed: int = 0  # of weights and batches
    precision: Literal["float32", "bfloat16", "float64"] = "float32"  # bfloat16: autocast, with float32 weights
    compile: bool = False
    device: str = "cpu"
    log_every: int = 10
    evaluate_every: int = 100  # 0: at the end only
    evaluation_batches: int = 8
    save_every: int = 100  # 0: at the end only
    keep: int = 2  # checkpoints
    tracker: Literal["none", "trackio", "wandb"] = "none"
    project: str = "gaugekit"  # of a tracker

    def check(self) -> None:
        for name in ("steps", "batch", "accumulation", "log_every", "evaluation_batches", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"run.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("evaluate_every", "save_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"run.{name} must be 0 (at the end only) or more, got {getattr(self, name)}")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"run.seed must be from 0 to 2^63 - 1, got {self.seed}")
        if self.batch % self.accumulation:
            raise ConfigError(f"run.accumulation={self.accumulation} does not divide run.batch={self.batch}")


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def check(self) -> None:
        """Raises `ConfigError` for values that do not go together, naming the keys."""
        self.model.check()
        self.data.check()
        self.run.check()
        if not 0 < self.optimizer.lr < math.inf:
            raise ConfigError(f"optimizer.lr must be positive, got {self.optimizer.lr}")
        for name in ("weight_decay", "eps", "momentum", "clip"):
            if not 0 <= getattr(self.optimizer, name) < math.inf:
                raise ConfigError(f"optimizer.{name} must be 0 or more, got {getattr(self.optimizer, name)}")
        if not 0 <= self.schedule.warmup < self.run.steps:
            raise ConfigError(
                f"schedule.warmup must be from 0 to run.steps - 1 = {self.run.steps - 1}, got {self.schedule.warmup}"
            )
        if not 0 <= self.schedule.final <= 1:
            raise ConfigError(f"schedule.final is a share between 0 and 1, got {self.schedule.final}")
        if not self.schedule.rho > 0:
            raise ConfigError(f"schedule.rho must be above 0, got {self.schedule.rho}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read(path: Path | None, words: Iterable[str] = ()) -> Config:
    """The config of a YAML file (None: all defaults), with `section.key=value` words put over it; checked.

    Raises:
        ConfigError: a file that is missing or no YAML mapping, an unknown key, a value of another type, or values that
            do not go together.
    """
    document: Any = {}
    if path is not None:
        try:
            document = _yaml(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: no YAML: {' '.join(str(error).split())}") from error
    document = {} if document is None else document
    where = str(path) if path is not None else "config"
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: must be a mapping of sections to keys, got a {type(document).__name__}")
    for word in words:
        name, equals, value = word.partition("=")
        *sections, key = name.split(".")
        if not equals or not key:
            raise ConfigError(f"{word!r}: options are section.key=value, such as optimizer.lr=3e-4")
        place = document
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{word!r}: {section} is no section")
        try:
            place[key] = _yaml(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{word!r}: no value that YAML knows") from error
    config = from_dict(Config, document, where)
    config.check()
    return config


def _yaml(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise
    except Exception as error:  # of a value that only looks like a date, such as 2020-13-45, and the like
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


class _Loader(yaml.SafeLoader):
    """YAML, of which a key that comes twice is refused, and 3e-4 is a number, as in its version 1.2."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def from_dict(kind: type[T], values: Mapping[str, Any], where: str = "config") -> T:
    """A dataclass of this module from a mapping; missing keys have their defaults. Raises `ConfigError`."""
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]  # pyright: ignore[reportArgumentType]
    made = {}
    for key, value in values.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {close[0]}?" if close else f"it may be {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key}: {hint}")
        made[key] = typed(hints[key], value, f"{where}: {key}" if where.endswith(("yaml", "yml")) else f"{where}.{key}")
    return kind(**made)


def typed(hint: Any, value: Any, where: str) -> Any:
    """The value as its field has it, which may be a number given as text, or a whole one where a float is meant. Raises
    `ConfigError` that begins with `where`.

    Args:
        hint: int, float, str, bool, list, dict, a `Literal`, a tuple of these, or a dataclass.
    """
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: must be a section with keys of its own, got {value!r}")
        return from_dict(hint, value, where)
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        # YAML reads a bare `none` as text, but `null`, `no` and `~` as no text at all.
        if value not in choices:
            raise ConfigError(f"{where}: must be one of {', '.join(map(str, choices))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(choices):
            raise ConfigError(f"{where}: must be a list of {len(choices)} numbers, got {value!r}")
        return tuple(typed(c, v, where) for c, v in zip(choices, value, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: must be a mapping, got {value!r}")
        return value
    if hint is float and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isnan(number):
            raise ConfigError(f"{where}: must be a number, got {value!r}")
        return number
    if type(value) is not hint:
        name = {int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list"}[hint]
        raise ConfigError(f"{where}: must be {name}, got {value!r}")
    return value
