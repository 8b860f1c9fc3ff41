"""What a training run is: five frozen dataclasses. `gaugekit.training.reading` makes them of YAML.

Sizes are in tokens, features, or optimizer steps; see the field comments.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gaugekit.errors import ConfigError

__all__ = ["Config", "DataConfig", "ModelConfig", "OptimizerConfig", "RunConfig", "ScheduleConfig"]

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
