"""Finds the pairs of factors in a living module: those of `optim.finding`, and the heads of models of `transformers`.

A model of `transformers` is described by the same families as its checkpoints. Its parameters get the names they have
on disk, the family says what is what, and its views lead back to the parameters themselves.

Legend
------
h, g, k      query heads, key/value heads, head dimension; a group is the h/g query heads of one key/value head
d, f         width of the stream, hidden units
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from gaugekit.errors import CheckpointError, UnsupportedArchitecture
from gaugekit.models.parts import ACTIVATIONS
from gaugekit.models.registry import Family, describe, family_of
from gaugekit.models.spec import MLP, Attention, Linear, MoE, Spec
from gaugekit.models.view import View
from gaugekit.optim.finding import check_kinds, find_pairs, refuse_shared, trained
from gaugekit.optim.pairs import Factor, Pair, Window

__all__ = ["pairs"]

BILINEAR = re.compile(r"(paged\|)?(eager|sdpa|flash_attention_\w+|flex_attention)|[\w.-]+/.+")
"""Attention implementations that score by inner products: those of `transformers` and kernels from the hub."""

TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Where torch.compile, activation checkpointing and FSDP keep the module they wrap."""

WRAPPED = ("base_layer", "original_module")
"""Where PEFT keeps the module that an adapter changes, or that a trained copy stands for."""


def pairs(model: nn.Module, kinds: Collection[str] = ("vo", "qk", "lora")) -> list[Pair]:
    """Every pair of factors G = BᴴA in a module of which the module sees the product only.

    What `optim.finding.find_pairs` finds, and in every model of `transformers` inside, of any family that
    `gaugekit inspect` supports:

    "vo"      A = values [W_V b_V] (g, k, ·), B = outputs of a group's query heads side by side (g, k, h/g · d); GL(k)
    "qk"      A = queries [W_Q b_Q] of a group side by side, B = keys [W_K b_K]; what commutes with rotary turns: GL(n)
              over the complex numbers where n pairs turn alike, GL of the dimensions that stand still. None with
              QK-norms, nor under the scores of `models.attention`.
    "units"   A = rows of up (f, 1, d + bias), B = columns of down (f, 1, d): any scale for gated units, positive ones
              for plain ReLU units; expert by expert. None for other activations. Not found unless asked for.

    Args:
        model: any module, or a model wrapped in others (PEFT, torch.compile, FSDP2, DDP). Nothing in it is changed.
        kinds: which of "vo", "qk", "lora", "units".

    Returns:
        Pairs by unique names, "model.layers.3.self_attn.qk" say. Those of which no parameter requires grad are left
        out: of a frozen model with adapters, only these are found. So are pairs with a factor that carries an adapter
        or is replaced by a trained copy: they are no products of two factors. A list may be empty.

    Raises:
        UnsupportedArchitecture: a model of `transformers` that trains and that no family describes, by name.
        ValueError: as `find_pairs`.
    """
    check_kinds(kinds)
    modules = dict(model.named_modules())
    found = []
    if not {"vo", "qk", "units"}.isdisjoint(kinds):
        for path, host in hosts(modules):
            found += host_pairs(f"{path}." if path else "", host, kinds)
    found = trained(found)
    refuse_shared(found, modules)
    return found + find_pairs(model, kinds)


def hosts(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """The outermost models of `transformers`, by path."""
    transformers = sys.modules.get("transformers.modeling_utils")  # no model without it, and it is slow to import
    inside: set[int] = set()
    for path, module in modules.items():
        if transformers is not None and isinstance(module, transformers.PreTrainedModel) and id(module) not in inside:
            inside.update(id(part) for part in module.modules())
            yield path, module


# --- one model of transformers ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Place:
    """A parameter in a living model: its name without wrappers, and whether an adapter changes it."""

    name: str
    parameter: nn.Parameter
    wrapped: bool


@dataclass(frozen=True, eq=False)
class Living:
    """The parameters of a model, by name, and where among them lies what a checkpoint has by its name on disk."""

    prefix: str
    places: Mapping[str, Place]
    views: Mapping[str, View]

    def within(self, view: View) -> View:
        """A view of a tensor on disk as one of the parameter that holds it."""
        home = self.views[view.name]
        return replace(home, steps=(*home.steps, *view.steps))

    def window(self, view: View) -> Window:
        home = self.within(view)
        return Window(self.places[home.name].parameter, home.window)

    def plain(self, *views: View | None) -> bool:
        """Whether no adapter changes any of them."""
        return not any(view is not None and self.places[self.views[view.name].name].wrapped for view in views)

    def path(self, *views: View) -> str:
        """The innermost module that holds all of them."""
        parts = [self.views[view.name].name.split(".")[:-1] for view in views]
        shared = []
        for names in zip(*parts, strict=False):
            if len(set(names)) > 1:
                break
            shared.append(names[0])
        return self.prefix + ".".join(shared)


def host_pairs(prefix: str, host: Any, kinds: Collection[str]) -> Iterator[Pair]:
    places = {place.name: place for place in parameters(host)}
    if not any(place.parameter.requires_grad and not place.wrapped for place in places.values()):
        return
    family, raw, kind = *known(host), type(host).__name__
    views = on_disk(family, {name: tuple(place.parameter.shape) for name, place in places.items()})
    base = host.base_model_prefix
    try:
        spec = describe(
            raw,
            {name: view.shape for name, view in views.items()},
            kind,
            beside=rf"^(?!{re.escape(base)}\.)" if hasattr(host, base) else None,
        )
    except CheckpointError as error:
        what = str(error).partition(":")[0]  # what follows speaks of checkpoints
        raise UnsupportedArchitecture(f"{kind} is not {family.name} as gaugekit knows it: {what}") from error
    yield from spec_pairs(spec, Living(prefix, places, views), inner_products(host), kinds)


def parameters(module: nn.Module, path: str = "", wrapped: bool = False) -> Iterator[Place]:
    """Every parameter under the name that it has without wrappers; what adapters add is passed over."""
    children = module._modules
    inner = next((name for name in (*TRANSPARENT, *WRAPPED) if children.get(name) is not None), None)
    if inner is not None:
        child = children[inner]
        assert child is not None
        yield from parameters(child, path, wrapped or inner in WRAPPED)
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield Place(path + name, parameter, wrapped)
    for name, child in module.named_children():
        yield from parameters(child, f"{path}{name}.", wrapped)


def known(host: Any) -> tuple[Family, dict[str, Any]]:
    """The family of a model and its config, or an error that names its class."""
    raw = host.config.to_dict()
    try:
        return family_of(raw, type(host).__name__), raw
    except (CheckpointError, UnsupportedArchitecture) as error:
        raise UnsupportedArchitecture(
            f"pairs of {type(host).__name__} cannot be found: {error}; freeze it, ask for 'lora' alone, or make pairs "
            "by hand"
        ) from error


def inner_products(host: Any) -> bool:
    """Whether attention scores are inner products of queries and keys, whatever makes them."""
    config = getattr(host.config, "text_config", host.config)
    name = getattr(config, "_attn_implementation", None)
    if name is None or BILINEAR.fullmatch(name):
        return True
    if name.startswith("gaugekit_"):
        return False
    raise UnsupportedArchitecture(
        f"attention implementation {name!r} of {type(host).__name__} is not known: what it leaves alone cannot be told"
    )


def on_disk(family: Family, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, View]:
    """Views of living parameters by the names of the tensors that a checkpoint would hold."""
    found: dict[str, View] = {}
    for name, shape in shapes.items():
        for disk, view in apart(View(name, shape)):
            for pattern, replacement in family.living:
                disk = re.sub(pattern, replacement, disk)
            found[disk] = view
    return found


def apart(view: View) -> Iterator[tuple[str, View]]:
    """The experts of a layer, which `transformers` holds in two tensors (experts, 2 f, d) and (experts, d, f), one by
    one and gate and up apart; anything else as it is."""
    at, _, last = view.name.rpartition(".experts.")
    if len(view.shape) != 3 or last not in ("gate_up_proj", "down_proj"):
        yield view.name, view
        return
    for expert in range(view.shape[0]):
        one = view.select(0, expert)
        if last == "down_proj":
            yield f"{at}.experts.{expert}.down_proj.weight", one
        else:
            half = view.shape[1] // 2
            yield f"{at}.experts.{expert}.gate_proj.weight", one.narrow(0, 0, half)
            yield f"{at}.experts.{expert}.up_proj.weight", one.narrow(0, half, half)


# --- what a spec says ------------------------------------------------------------------------------------------


def spec_pairs(spec: Spec, living: Living, inner: bool, kinds: Collection[str]) -> Iterator[Pair]:
    bodies = [branch.body for s in spec.streams for block in s.blocks for branch in block.branches]
    for body in bodies:
        if isinstance(body, Attention):
            if "vo" in kinds:
                yield from value_output(body, living)
            if "qk" in kinds and inner:
                yield from query_key(body, living)
        elif "units" in kinds:
            yield from units(body, living)


def value_output(a: Attention, living: Living) -> Iterator[Pair]:
    if living.plain(a.v.weight, a.v.bias, a.o.weight):
        path = living.path(a.q.weight, a.k.weight, a.v.weight, a.o.weight)
        outputs = Factor((living.window(grouped(a.o.weight, a.kv_heads)),))
        yield Pair(f"{path}.vo", rows(a.v, living), outputs)


def query_key(a: Attention, living: Living) -> Iterator[Pair]:
    if a.qk_norm is None and living.plain(a.q.weight, a.q.bias, a.k.weight, a.k.bias):
        path = living.path(a.q.weight, a.k.weight, a.v.weight, a.o.weight)
        queries = Linear(grouped(a.q.weight, a.kv_heads), a.q.bias and grouped(a.q.bias, a.kv_heads))
        turning = () if a.rotary is None else a.rotary.blocks(a.head_dim)[0]
        yield Pair(f"{path}.qk", rows(queries, living), rows(a.k, living), turning)


def units(body: MLP | MoE, living: Living) -> Iterator[Pair]:
    experts = body.experts if isinstance(body, MoE) else (body,)
    for expert, mlp in enumerate(experts):
        positive = mlp.gate is None
        if positive and ACTIVATIONS[mlp.activation] != 1:
            continue
        if not living.plain(mlp.up.weight, mlp.up.bias, mlp.down.weight):
            continue
        path = living.path(mlp.up.weight, mlp.down.weight)
        if isinstance(body, MoE) and not path.endswith(f".{expert}"):
            path = f"{path}.{expert}"
        up = Linear(mlp.up.weight.unsqueeze(1), mlp.up.bias and mlp.up.bias.unsqueeze(1))
        down = Factor((living.window(mlp.down.weight.unsqueeze(1)),))
        yield Pair(f"{path}.units", rows(up, living), down, positive=positive)


def grouped(view: View, groups: int) -> View:
    """(h, k, ...) as (g, k, h/g, ...): what the query heads of one group hold, side by side."""
    split = view.unflatten(0, (groups, view.shape[0] // groups))
    return split.permute(0, 2, 1, *range(3, len(split.shape)))


def rows(linear: Linear, living: Living) -> Factor:
    """[W b] as a factor."""
    weight = living.window(linear.weight)
    if linear.bias is None:
        return Factor((weight,))
    return Factor((weight, living.window(linear.bias.unsqueeze(-1))))
