"""An optimizer around another one: what is done before and after each of its steps, and nothing else."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["MOMENTA", "Wrapper", "check_gradients"]

MOMENTA = ("momentum_buffer", "exp_avg")
"""Where torch's optimizers keep sums of gradients: SGD, RMSprop and Muon in the first, Adam's family in the second."""

SHARED_HOOKS = tuple(f"_optimizer_{verb}state_dict_{when}_hooks" for verb in ("", "load_") for when in ("pre", "post"))
"""Where torch keeps the hooks of `state_dict` and `load_state_dict`, which are the inner optimizer's."""

NOT_COPIED = ("step", "_opt_called")
"""What a learning rate scheduler writes into its optimizer; it refers to that very object."""


class Wrapper(Optimizer):
    """Base of optimizers that change the steps of another one, `inner`, of any class.

    Parameter groups, state and defaults are the inner optimizer's own, so that schedulers, `zero_grad`,
    `add_param_group`, `state_dict` and checkpoints of the inner optimizer work as they do without the wrapper. Hooks of
    `step` are the wrapper's (the inner one runs its own as well); those of `state_dict` and `load_state_dict` are the
    inner one's. A deep copy or a pickle keeps everything but hooks, and the patch of a scheduler, as torch's do.

    A subclass overrides `before` and `after`, which run around each inner step without gradients; it may hold anything
    that can be copied and pickled. A wrapper may wrap a wrapper.
    """

    def __init__(self, inner: Optimizer) -> None:
        """Raises: TypeError if `inner` is no optimizer; ValueError if it cannot step without a closure (LBFGS)."""
        if not isinstance(inner, Optimizer):
            raise TypeError(f"{type(self).__name__} wraps a torch.optim.Optimizer, got {type(inner).__name__}")
        closure = inspect.signature(inner.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{type(inner).__name__} evaluates a closure several times in one step: it cannot be wrapped, "
                "take an optimizer whose step needs none"
            )
        self.__setstate__({"inner": inner})

    # --- what a subclass does ---------------------------------------------------------------------------------

    def before(self) -> None:
        """Runs before the inner step, when gradients are there; an error raised here leaves everything unmoved."""

    def after(self) -> None:
        """Runs after the inner step."""

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, parameter) of all groups; named "group 0, parameter 3" unless the groups have names."""
        for i, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for j, parameter in enumerate(group["params"]):
                yield names[j] if names else f"group {i}, parameter {j}", parameter

    # --- torch.optim.Optimizer --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. The closure is evaluated once, with gradients, before `before`; its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.before()
            self.inner.step()
            self.after()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    # The inner optimizer replaces these objects when it loads a state, so they are looked up each time.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in NOT_COPIED and not k.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.inner: Optimizer = state["inner"]
        super().__setstate__(state)
        for name in SHARED_HOOKS:
            setattr(self, name, getattr(self.inner, name))

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.inner!r}"


def check_gradients(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """ValueError that names the first parameter whose gradient is sparse, or has NaN or inf entries.

    With DTensors every process finds the same. The host waits once for each device or mesh, not for each parameter.
    """
    named = [(name, p, p.grad.detach()) for name, p in parameters if p.grad is not None]
    totals: dict[Any, Tensor] = {}
    for name, parameter, gradient in named:
        if gradient.layout != torch.strided:
            raise ValueError(f"the gradient of {name} is sparse: make its layer with sparse=False")
        place = getattr(parameter, "device_mesh", parameter.device)
        total = gradient.sum()  # of sharded ones a part, reduced once after all are added
        totals[place] = totals[place] + total if place in totals else total
    if all(bool(total.isfinite()) for total in totals.values()):
        return
    for name, _, gradient in named:  # or large numbers have added up to infinity
        if not bool((gradient * 0).sum() == 0):
            raise ValueError(f"the gradient of {name} has NaN or inf entries: no step was taken; clear it, or clip")
