"""Finds the pairs of factors in a module: torch's own attention, gaugekit's layers, and low-rank adapters of PEFT.

PEFT is known by what its layers hold, never imported. Layers that only look like a plain product are refused by name.

Legend
------
h, k, E      heads, head dimension, width: E = h k; g key/value heads, each of which a group of h/g heads shares
d, f         width of the stream, hidden units
r            rank of an adapter; groups of a convolution, experts of a stacked one: one product each
A (N, r, m), B (N, r, n)    as in `pairs`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gaugekit.nn.decoding import MLP, CausalAttention
from gaugekit.nn.relational import RelationalAttention
from gaugekit.nn.rotary import planes
from gaugekit.nn.scores import Bilinear
from gaugekit.nn.spheres import Unit
from gaugekit.optim.pairs import Factor, Pair, Window

__all__ = ["KINDS", "Steps", "check_kinds", "find_pairs", "refuse_shared", "trained"]

KINDS = ("vo", "qk", "lora", "units")

PLAIN_VARIANTS = frozenset(
    (
        "ALoraLinearVariant",
        "DoraConv1dVariant",
        "DoraConv2dVariant",
        "DoraConv3dVariant",
        "DoraEmbeddingVariant",
        "DoraLinearVariant",
        "MiCAEmbeddingVariant",
        "MiCALinearVariant",
        "VeloraLinearVariant",
    )
)
"""Variants of PEFT's LoRA that see their factors through the product only; others put something between them."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Steps:
    """A chain of torch's view methods, (name, arguments...) each: a view that can be copied and pickled."""

    steps: tuple[tuple[Any, ...], ...]

    def __call__(self, base: Tensor) -> Tensor:
        for name, *arguments in self.steps:
            base = getattr(base, name)(*arguments)
        return base


def seen(parameter: Tensor, *steps: tuple[Any, ...]) -> Window:
    return Window(parameter, Steps(steps))


def find_pairs(model: nn.Module, kinds: Collection[str] = ("vo", "qk", "lora")) -> list[Pair]:
    """Every pair of factors G = BᵀA in the parts of a module that torch, PEFT and gaugekit itself define.

    `nn.MultiheadAttention`, of any constructor's making: "vo", values [W_V b_V bias_v] and outputs W_O, and "qk",
    queries [W_Q b_Q] and keys [W_K b_K bias_k], both (h, k, columns) with GL(k) for every head. Left out where forward
    is overridden, or where a weight is not the parameter itself (parametrized, pruned, or under an adapter).
    `nn.decoding.CausalAttention`: "vo", A = values [W_V b_V] (g, k, ·), B = outputs of a group's query heads side by
    side (g, k, h/g · d), GL(k); "qk", A = queries [W_Q b_Q] of a group side by side, B = keys [W_K b_K], GL(k), or with
    rotary positions a scale and a turn for each plane. `nn.relational.RelationalAttention` with linear values: "vo",
    (h, k, d) each. `nn.decoding.MLP`: "units", A = rows of up (f, 1, d + bias), B = columns of down (f, 1, d), any
    scale for swiglu, positive ones for relu, none for gelu; not found unless asked for. All left out as above.
    `scores.Bilinear` with two factors, not symmetric: "qk", A = R, B = L.
    LoRA adapters of PEFT: "lora", A = lora_A (r, in) and B = lora_B (r, out), GL(r) for every adapter of a linear
    layer, embedding or convolution, every group of a grouped convolution, and every expert of a stacked parameter
    (`target_parameters`). What stands behind the product (scaling, the bias of lora_B, DoRA's magnitudes) is no part of
    it.

    Args:
        model: any module; nothing in it is changed.
        kinds: which of "vo", "qk", "lora", "units".

    Returns:
        Pairs named module.kind, or module.adapter.lora; those of which no parameter requires grad are left out, as are
        other tuners than LoRA.

    Raises:
        ValueError: an unknown kind; an adapter that trains and is no plain product of its factors, by name; a
            parameter of a pair that has a second place in the model, by the names of both.
    """
    check_kinds(kinds)
    modules = dict(model.named_modules())
    found = trained(pair for name, module in modules.items() for pair in pairs_of(name, module, kinds))
    refuse_shared(found, modules)
    return found


def check_kinds(kinds: Collection[str]) -> None:
    unknown = [kind for kind in ((kinds,) if isinstance(kinds, str) else kinds) if kind not in KINDS]
    if unknown or isinstance(kinds, str):
        raise ValueError(f"kinds must be a collection of {', '.join(KINDS)}, got {kinds!r}")


def kind_of(pair: Pair) -> str:
    return pair.name.rpartition(".")[2]


def trained(pairs: Iterable[Pair]) -> list[Pair]:
    """Those of which a parameter requires grad."""
    return [pair for pair in pairs if any(p.requires_grad for p in pair.parameters)]


def refuse_shared(pairs: Iterable[Pair], modules: Mapping[str, nn.Module]) -> None:
    """ValueError for a parameter of a pair that is used in a second place: then the product is not all that the model
    sees of it. Also where two parameters are one memory, as PEFT's tied adapters are."""
    places: dict[int, list[str]] = defaultdict(list)
    for path, module in modules.items():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places[memory(parameter)].append(f"{path}.{name}".lstrip("."))
    for pair in pairs:
        for parameter in pair.parameters:
            names = places[memory(parameter)]
            if len(names) > 1:
                raise ValueError(
                    f"{pair.name} is no pair by itself: {names[0]} is shared with {names[1]}; untie them, or leave out "
                    f"kind {kind_of(pair)!r}"
                )


def memory(parameter: Any) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.data_ptr() or id(parameter)  # empty, or on the meta device: no memory to share


def pairs_of(name: str, module: nn.Module, kinds: Collection[str]) -> Iterator[Pair]:
    prefix = f"{name}." if name else ""
    if isinstance(module, nn.MultiheadAttention):
        yield from (pair for pair in torch_attention(prefix, module) if kind_of(pair) in kinds)
    elif isinstance(module, Bilinear):
        left, right = module.left, module.right
        two = isinstance(left, nn.Parameter) and isinstance(right, nn.Parameter) and not module.symmetric
        if "qk" in kinds and right is not None and two:
            yield Pair(f"{prefix}qk", factor(headed(right)), factor(headed(left)))
    elif isinstance(module, CausalAttention | RelationalAttention):
        yield from (pair for pair in attention(prefix, module) if kind_of(pair) in kinds)
    elif isinstance(module, MLP):
        yield from units(prefix, module) if "units" in kinds else ()
    elif "lora" in kinds:
        yield from adapters(prefix, module)


def factor(*windows: Window | None) -> Factor:
    return Factor(tuple(window for window in windows if window is not None))


def headed(matrix: Tensor) -> Window:
    """(k, r) or (h, k, r) as (N, r, k)."""
    batched = (("unsqueeze", 0),) if matrix.ndim == 2 else ()
    return seen(matrix, *batched, ("transpose", 1, 2))


# --- nn.MultiheadAttention ------------------------------------------------------------------------------------


def torch_attention(prefix: str, module: nn.MultiheadAttention) -> Iterator[Pair]:
    if type(module).forward is not nn.MultiheadAttention.forward or not isinstance(module.out_proj, nn.Linear):
        return
    separate = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    packed, bias, output = module.in_proj_weight, module.in_proj_bias, module.out_proj.weight
    tensors = (*separate, packed, bias, module.bias_k, module.bias_v, output)
    if any(tensor is not None and not isinstance(tensor, nn.Parameter) for tensor in tensors):
        return
    width, heads = module.embed_dim, module.num_heads
    split = ("unflatten", 0, (heads, width // heads))

    def weight(part: int) -> Window:
        if packed is None:
            return seen(separate[part], split)
        return seen(packed, ("narrow", 0, part * width, width), split)

    def column(part: int) -> Window | None:
        return None if bias is None else seen(bias, ("narrow", 0, part * width, width), split, ("unsqueeze", -1))

    def extra(row: Tensor | None) -> Window | None:  # one more key or value beside those of the tokens
        return None if row is None else seen(row, ("flatten",), split, ("unsqueeze", -1))

    queries, keys = factor(weight(0), column(0)), factor(weight(1), column(1), extra(module.bias_k))
    values, outputs = factor(weight(2), column(2), extra(module.bias_v)), factor(seen(output, ("t",), split))
    yield Pair(f"{prefix}vo", values, outputs)
    yield Pair(f"{prefix}qk", queries, keys)


# --- gaugekit's own layers --------------------------------------------------------------------------------------


def attention(prefix: str, module: CausalAttention | RelationalAttention) -> Iterator[Pair]:
    standard = isinstance(module, CausalAttention)
    kind, shared = (CausalAttention, module.kv_heads) if standard else (RelationalAttention, module.heads)
    if type(module).forward is not kind.forward:
        return
    k = module.width // module.heads
    heads = ("unflatten", 0, (shared, k))
    groups = ("unflatten", 0, (shared, module.heads // shared, k)), ("transpose", 1, 2)
    if (standard or module.values == "linear") and plain(module.value, module.out):
        yield Pair(f"{prefix}vo", reader(module.value, heads), factor(seen(module.out.weight, ("t",), *groups)))
    if standard and plain(module.query, module.key):
        turning = () if module.rotary_base is None else planes(k, module.rotary_base)
        yield Pair(f"{prefix}qk", reader(module.query, *groups), reader(module.key, heads), turning)


def units(prefix: str, module: MLP) -> Iterator[Pair]:
    homogeneous = module.activation != "gelu" and type(module).forward is MLP.forward
    if homogeneous and plain(module.up, module.down):
        down = factor(seen(module.down.weight, ("t",), ("unsqueeze", 1)))
        yield Pair(f"{prefix}units", reader(module.up, ("unsqueeze", 1)), down, positive=module.activation == "relu")


def plain(*layers: Any) -> bool:
    """Whether all are linear layers as torch has them, whose weights are the parameters themselves and free to move."""
    return all(
        isinstance(layer, nn.Linear)
        and not isinstance(layer, Unit)
        and type(layer).forward is nn.Linear.forward
        and isinstance(layer.weight, nn.Parameter)
        and isinstance(layer.bias, nn.Parameter | None)
        for layer in layers
    )


def reader(linear: nn.Linear, *steps: tuple[Any, ...]) -> Factor:
    """[W b], its rows split into heads by `steps`."""
    bias = None if linear.bias is None else seen(linear.bias, ("unsqueeze", -1), *steps)
    return factor(seen(linear.weight, *steps), bias)


# --- LoRA adapters of PEFT ------------------------------------------------------------------------------------


def adapters(prefix: str, module: Any) -> Iterator[Pair]:
    lora_a, lora_b = getattr(module, "lora_A", None), getattr(module, "lora_B", None)
    if isinstance(lora_a, nn.ModuleDict) and isinstance(lora_b, nn.ModuleDict):
        for adapter, a in lora_a.items():
            b, name = lora_b[adapter], f"{prefix}{adapter}.lora"
            if any(p.requires_grad for layer in (a, b) for p in layer.parameters()):
                refuse_variant(name, module, adapter)
                yield Pair(name, *layers(name, a, b, module, adapter))
    table_a, table_b = getattr(module, "lora_embedding_A", None), getattr(module, "lora_embedding_B", None)
    if isinstance(table_a, nn.ParameterDict) and isinstance(table_b, nn.ParameterDict):
        for adapter, a in table_a.items():
            b, name = table_b[adapter], f"{prefix}{adapter}.lora"
            if a.requires_grad or b.requires_grad:
                refuse_variant(name, module, adapter)
                if module.get_base_layer().max_norm is not None:
                    raise ValueError(f"{name} is no plain product: max_norm acts on the rows of its first factor alone")
                yield Pair(name, factor(seen(a, ("unsqueeze", 0))), factor(headed(b)))


def refuse_variant(name: str, module: Any, adapter: str) -> None:
    variant = type(getattr(module, "lora_variant", {}).get(adapter)).__name__
    if variant not in PLAIN_VARIANTS and variant != "NoneType":
        raise ValueError(
            f"{name} is no plain product of its factors, but a {variant}: leave out kind 'lora', or train plain LoRA"
        )


def layers(name: str, a: Any, b: Any, module: Any, adapter: str) -> tuple[Factor, Factor]:
    """The factors of the layers lora_A and lora_B."""
    linear = isinstance(a, nn.Linear) and isinstance(b, nn.Linear)
    convolution = isinstance(a, CONVOLUTIONS) and isinstance(b, CONVOLUTIONS) and a.groups == 1
    if not linear and not convolution:
        raise ValueError(f"{name} is no plain product: its layers are {type(a).__name__} and {type(b).__name__}")
    if a.bias is not None or not isinstance(a.weight, nn.Parameter) or not isinstance(b.weight, nn.Parameter):
        raise ValueError(f"{name} is no plain product: a bias or another parametrization stands between its factors")
    first, second = a.weight, b.weight
    if linear:
        # `target_parameters`: ranks of all experts in one layer, by the expert in lora_A, by the rank in lora_B.
        experts = module.num_experts if hasattr(module, "parameter_name") else 1
        rank = len(first) // experts
        outputs = seen(second, ("unflatten", 1, (rank, experts)), ("permute", (2, 1, 0)))
        return factor(seen(first, ("unflatten", 0, (experts, rank)))), factor(outputs)
    groups = getattr(b, "groups", 1)
    if groups > 1 and adapter in getattr(module, "lora_magnitude_vector", {}):
        raise ValueError(f"{name} is no plain product: DoRA takes norms of something else where there are groups")
    outputs = seen(second, ("unflatten", 0, (groups, len(second) // groups)), ("transpose", 1, 2))
    return factor(seen(first, ("unflatten", 0, (groups, len(first) // groups)))), factor(outputs)
