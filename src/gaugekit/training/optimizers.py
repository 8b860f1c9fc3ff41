"""From a config to the optimizer of a model and the schedule of its learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gaugekit.errors import ConfigError
from gaugekit.models.pairs import pairs
from gaugekit.nn.hypersphere import Scale
from gaugekit.nn.scores import LearnedScore
from gaugekit.nn.spheres import spheres
from gaugekit.optim.gated import GatedAdamW
from gaugekit.optim.horizontal import Metric
from gaugekit.optim.hyperball import Hyperball
from gaugekit.optim.muon import MuonAdamW
from gaugekit.optim.pairs import Pair
from gaugekit.optim.projected import Horizontal
from gaugekit.optim.quotient import QuotientAdam, QuotientSGD, Unit
from gaugekit.optim.schedules import constant, cosine_decay, logarithmic_decay
from gaugekit.training.config import OptimizerConfig, ScheduleConfig
from gaugekit.training.reading import typed

__all__ = ["OPTIONS", "make", "schedule"]

HORIZONTAL = {"metric": Metric, "rebalance": int}
SPHERES = {"mode": Literal["project", "tangent"], "max_angle": float, "method": Literal["retract", "exp"]}
FUSED = {"foreach": bool, "fused": bool}
ADAMW = {"amsgrad": bool, **FUSED}
SGDS = {"dampening": float, "nesterov": bool, **FUSED}
MUON = {"nesterov": bool, "ns_steps": int}
QUOTIENT = {"kinds": list, "unit": Unit, "masters": bool}

OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "sgd": SGDS,
    "muon": MUON,
    "quotient_adam": {**QUOTIENT, **FUSED},
    "quotient_sgd": {**QUOTIENT, **SGDS},
    "horizontal_adamw": {"kinds": list, **HORIZONTAL, **ADAMW},
    "horizontal_muon": {"kinds": list, **HORIZONTAL, **MUON},
    "gated_adamw": {"gate": float, "foreach": bool},
}
"""What `optimizer.options` may hold, and its type: keyword arguments of these optimizers (of both where one is around
another), and the kinds of pairs. Where weights live on spheres, keyword arguments of `Hyperball`, too."""

KINDS: dict[str, Callable[..., Optimizer]] = {
    "adamw": AdamW,
    "sgd": SGD,
    "quotient_adam": QuotientAdam,
    "quotient_sgd": QuotientSGD,
    "gated_adamw": GatedAdamW,
}


def make(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimizer of all parameters of a model that require gradients. `fully_shard` makes new ones: shard first.

    "muon"          Muon on matrices inside the model, AdamW with betas and eps on the rest: embeddings, a module named
                    `head`, scales, and parameters of three axes, as those of attention in invariants are
    "quotient_..."  on the pairs that `gaugekit.pairs` finds; AdamW or SGD on the rest
    "horizontal_.." around AdamW or Muon, on the same pairs

    The learning rate is one for all. Weight decay is that of matrices (two axes or more) that are no biases, scales or
    scores, and are not on spheres. Optimizers of pairs take it of products, of which biases are columns.

    Where weights live on spheres, `Hyperball` goes around the optimizer. There are no pairs among them: of the groups
    that act on pairs next to nothing keeps rows and columns at length 1. What else such a model has may have pairs.

    Raises: ConfigError for an option that is unknown or of another type, by name; for values that the optimizer
        refuses; for an optimizer of pairs where there are none.
    """
    on_spheres = spheres(model)
    known = {**OPTIONS[config.name], **(SPHERES if on_spheres else {})}
    options: dict[str, Any] = {}
    for name, value in config.options.items():
        where = f"optimizer.options.{name}"
        if name in SPHERES and name not in known:
            raise ConfigError(f"{where}: this model has no weights on spheres")
        if name not in known:
            raise ConfigError(f"{where}: {config.name} has no such option, it takes {', '.join(known)}")
        options[name] = typed(known[name], value, where)
    outer = {name: options.pop(name) for name in SPHERES if name in options}
    try:
        optimizer = _optimizer(model, config, {id(sphere.parameter) for sphere in on_spheres}, options)
        return Hyperball(optimizer, on_spheres, **outer) if on_spheres else optimizer
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}") from error


def schedule(optimizer: Optimizer, config: ScheduleConfig, total_steps: int) -> LRScheduler:
    """The schedule of an optimizer's learning rate: see `gaugekit.optim.schedules`.

    Raises: ConfigError for values out of range.
    """
    try:
        if config.name == "constant":
            return constant(optimizer, config.warmup)
        if config.name == "logarithmic":
            return logarithmic_decay(optimizer, total_steps, config.warmup, config.rho, config.final)
        return cosine_decay(optimizer, total_steps, config.warmup, config.final)
    except ValueError as error:
        raise ConfigError(f"schedule: {error}") from error


def _optimizer(model: nn.Module, config: OptimizerConfig, on_spheres: set[int], options: dict[str, Any]) -> Optimizer:
    name = config.name.removeprefix("horizontal_")
    around = {option: options.pop(option) for option in HORIZONTAL if option in options}
    found: list[Pair] = []
    if name != config.name or name.startswith("quotient_"):
        found = _pairs(model, config.name, options)
    hidden, rest = _parameters(model, on_spheres)
    decay, adam = config.weight_decay, {"betas": config.betas, "eps": config.eps}
    given = {"lr": config.lr, "weight_decay": decay, **options}
    if name == "muon":
        matrices, others = _groups(hidden, decay), _groups(rest, decay)
        optimizer = MuonAdamW(matrices, others, momentum=config.momentum, **adam, **given)
    else:
        given |= {"momentum": config.momentum} if name.endswith("sgd") else adam
        given |= {"pairs": found} if name.startswith("quotient_") else {}
        optimizer = KINDS[name](_groups([*hidden, *rest], decay), **given)
    return optimizer if name == config.name else Horizontal(optimizer, found, **around)


def _pairs(model: nn.Module, name: str, options: dict[str, Any]) -> list[Pair]:
    found = pairs(model, options.pop("kinds")) if "kinds" in options else pairs(model)
    if not found:
        raise ConfigError(
            f"optimizer.name={name} steps on pairs of factors, and this model has none: neither relational attention "
            "with plain values, nor attention in invariants, nor weights on spheres have any; take another optimizer"
        )
    return found


def _parameters(model: nn.Module, on_spheres: set[int]) -> tuple[list[tuple[Tensor, bool]], list[tuple[Tensor, bool]]]:
    """Matrices inside the model, and the rest; each with whether it decays."""
    hidden: dict[int, tuple[Tensor, bool]] = {}
    rest: dict[int, tuple[Tensor, bool]] = {}
    for path, module in model.named_modules():
        at_an_end = isinstance(module, nn.Embedding) or path.rpartition(".")[2] == "head"
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in hidden or id(parameter) in rest:
                continue
            matrix = parameter.ndim >= 2 and "bias" not in name and not isinstance(module, Scale | LearnedScore)
            into = hidden if matrix and parameter.ndim == 2 and not at_an_end else rest
            into[id(parameter)] = parameter, matrix and id(parameter) not in on_spheres
    return list(hidden.values()), list(rest.values())


def _groups(parameters: Iterable[tuple[Tensor, bool]], weight_decay: float) -> list[dict[str, Any]]:
    groups: dict[float, list[Tensor]] = {}
    for parameter, decays in parameters:
        groups.setdefault(weight_decay if decays else 0.0, []).append(parameter)
    return [{"params": group, "weight_decay": decay} for decay, group in groups.items()]
