"""Muon for matrices and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon
from torch.optim.optimizer import Optimizer

from gaugekit.optim.sharding import local, rows_like, whole

__all__ = ["MuonAdamW"]


class MuonAdamW(Optimizer):
    """torch's Muon on some parameters, which must be matrices, and its AdamW on others.

    Parameter groups and state are those of both, side by side: schedulers, `zero_grad`, `state_dict`, copies and
    checkpoints of torch.distributed see one optimizer. Groups are told apart by what is in them, Muon's having
    "ns_steps".

    Muon's step has orthogonal rows or columns, and is scaled to the root mean square of AdamW's ("match_rms_adamw", Liu
    et al., arXiv 2502.16982), so that lr and weight_decay mean the same for both. It is orthogonal to some 20 %, as
    five iterations in bfloat16 make it, whatever the parameter's dtype.

    A sharded matrix is put together for its step, on every process, which then keeps its own rows. So the step is that
    of one process but for what rounding to bfloat16 makes of gradients that were summed in another order.

    Args:
        matrices: parameters, or groups of them, for Muon.
        others: the same for AdamW. One of both may be empty.
        lr, weight_decay: of both.
        momentum, nesterov, ns_steps: as Muon's.
        betas, eps: as AdamW's.

    Raises: ValueError as these two; for a matrix that is none; for a parameter that is given to both.

    Source: Jordan et al., https://kellerjordan.github.io/posts/muon/
    """

    def __init__(
        self,
        matrices: Iterable[Any],
        others: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        nothing = [{"params": []}]
        fixed: dict[str, Any] = {"ns_steps": ns_steps, "adjust_lr_fn": "match_rms_adamw"}
        self.muon = Muon(list(matrices) or nothing, lr, weight_decay, momentum, nesterov, **fixed)
        self.adamw = AdamW(list(others) or nothing, lr, betas, eps, weight_decay)
        groups = [*self.muon.param_groups, *self.adamw.param_groups]
        super().__init__([group for group in groups if group["params"]], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """For AdamW, or for Muon if it has "ns_steps"; what else is missing in it is as in the constructor."""
        part = self.muon if "ns_steps" in param_group else self.adamw
        super().add_param_group({**part.defaults, **param_group})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # This object's own groups and state are replaced when it loads a state.
        matrices = [group for group in self.param_groups if "ns_steps" in group]
        sharded = [(p, group) for group in matrices for p in group["params"] if isinstance(p, DTensor)]
        apart = {id(p) for p, _ in sharded}
        self.muon.param_groups = [{**g, "params": [p for p in g["params"] if id(p) not in apart]} for g in matrices]
        self.adamw.param_groups = [group for group in self.param_groups if "ns_steps" not in group]
        self.adamw.state = self.muon.state = self.state
        self.muon.step()
        self.adamw.step()
        for parameter, group in sharded:
            self._step_whole(parameter, group)
        return loss

    @torch.no_grad()
    def _step_whole(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        matrix, buffer = whole(parameter.detach()), whole(state["momentum_buffer"])
        matrix.grad = whole(parameter.grad)
        self.muon.param_groups = [{**group, "params": [matrix]}]
        self.muon.state = defaultdict(dict, {matrix: {"momentum_buffer": buffer}})
        self.muon.step()
        local(parameter.detach()).copy_(rows_like(matrix, parameter))
        local(state["momentum_buffer"]).copy_(rows_like(buffer, parameter))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "muon": self.muon, "adamw": self.adamw}
