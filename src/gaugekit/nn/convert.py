"""Swap the norms of a model for norms of another kind, in place.

Norms are recognised by what they compute, not by their class: a module whose class name contains "norm" is copied,
given random weights, and its outputs are compared with

    layer   γ (x − mean x)/√(var x + eps) + β       rms     γ x/√(mean x² + eps) + β

for γ = weight and γ = 1 + weight, at |x| near 1 and, where eps shows, near √eps. So classes of `transformers` and of
anyone else are known without being imported, and one that only looks like a norm is refused by name.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parametrize

from gaugekit.nn.norms import NORMS, norm

__all__ = ["BEFORE_ATTENTION", "KnownNorm", "ScaledEmbedding", "convert", "initial_alpha", "recognise"]

Choice = str | Callable[[str], bool]

BEFORE_ATTENTION = (
    r"(^|\.)(input_layernorm|layernorm_before|ln_?1|layer_?norm_?1|norm_?1|ln_attn|pre_attention_layernorm"
    r"|(self_|encoder_)?attn_(layer_?)?norm|(self_|cross_)?attention_(layer_?)?norm)$"
)
"""Names of the norms whose output attention reads, in the pre-norm transformers of torch, timm and transformers."""

ALPHAS = {1024: (1.0, 1.0), 2048: (1.0, 0.5), 4096: (0.8, 0.2), 5120: (0.6, 0.15), 8192: (0.2, 0.05)}
"""Where α starts in a language model, by width: (before attention, elsewhere). [DyT], tables 11 and 12."""

OTHER_AXES = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)
NO_NORMS = (nn.Embedding, nn.Linear, nn.modules.conv._ConvNd)


@dataclass(frozen=True)
class KnownNorm:
    """What a module computes: `kind` over the last axis, of `width` features, with γ = weight + `offset`."""

    kind: Literal["layer", "rms"]
    width: int
    eps: float
    offset: int


def convert(
    model: nn.Module,
    to: str,
    *,
    select: Choice | None = None,
    language_model: bool = False,
    attention: Choice = BEFORE_ATTENTION,
    embedding: str | None = None,
    **options: Any,
) -> nn.Module:
    """Replace the norms of `model` by those of another kind, in place, all of them or, on an error, none.

    γ, β and eps are carried over, as far as the new kind has them; a weight of 1 + w becomes γ = 1 + w, rounded to its
    dtype. Otherwise parameters are the same objects as before, so that ties and optimizers hold. Device, dtype,
    requires_grad and the training flag are kept. Converting to the same kind changes nothing but rounding. `rms` and
    `prms` keep the β of a LayerNorm; `l2`, `scale` and `none` have neither γ nor β and drop them.

    BatchNorm, GroupNorm and InstanceNorm are left alone. A config that comes with the model still speaks of the old
    norms: to load what was saved, convert a fresh model alike and load the state_dict.

    Args:
        model: any module; its parameters are not on the meta device.
        to: a name in `norms.NORMS`, but for `crms`, which has another width.
        select: which norms: a pattern to be found in their qualified names, or a function of the name. All if None.
        language_model: for `dyt` and `derf`: no β; α by width and place (`initial_alpha`, unless options have alpha);
            and the input embedding, with all that share its weight, becomes a `ScaledEmbedding`. That is how
            [DyT] trains language models from the start; [Derf] has no table of α, so it gets the same. Embeddings of
            positions are not scaled.
        attention: which names are of norms that attention reads, as `select`; only for `language_model`.
        embedding: name of the input embedding; from the model's `get_input_embeddings()` if None.
        options: for the new norms (alpha, p, robust, radius, eps ...).

    Returns:
        The model; or the new norm, if the model is itself one.

    Raises:
        ValueError: a module that looks like a norm is none of the known ones (named, with its class and the reason);
            no norm is found; an unknown name or option; or for `language_model`, no norm before attention is found
            by a pattern, or no plain input embedding.
    """
    _check_request(to, language_model, options)
    found = _find(model, select)
    before = _is_chosen(attention)
    if language_model and isinstance(attention, str) and not any(before(f.name) for f in found):
        raise ValueError(f"none of the norms ({found[0].name}, ...) is named as one before attention: give `attention`")
    embeddings = _input_embeddings(model, embedding) if language_model else []

    gammas = _gammas(model, found) if "elementwise_affine" in inspect.signature(NORMS[to]).parameters else {}
    like = next((p for p in model.parameters() if p.is_floating_point()), None)  # for norms without parameters
    options = ({} if like is None else {"device": like.device, "dtype": like.dtype}) | options
    new: dict[nn.Module, nn.Module] = {}
    for f in found:
        alpha = {"alpha": initial_alpha(f.known.width, before(f.name))} if language_model else {}
        new[f.module] = _successor(f, to, alpha | options, not language_model, gammas)
    if embeddings:
        scale = Parameter(embeddings[0].weight.new_full((1,), math.sqrt(embeddings[0].embedding_dim)))
        new |= {old: ScaledEmbedding(old, scale) for old in embeddings}
    return _swap(model, new)


def initial_alpha(width: int, before_attention: bool) -> float:
    """Where [DyT] starts α in a language model: its tables 11 and 12, at the entry nearest to `width` in its logarithm.

    1 up to a width of 1448 for every norm; smaller for wider ones, and larger before attention than elsewhere.
    """
    nearest = min(ALPHAS, key=lambda entry: abs(math.log(entry / width)))
    return ALPHAS[nearest][0 if before_attention else 1]


class ScaledEmbedding(nn.Embedding):
    """An embedding times a learned number, `scale` (1,). Its weight is the old one's: a tied head stays tied."""

    def __init__(self, old: nn.Embedding, scale: Parameter) -> None:
        options = (old.padding_idx, old.max_norm, old.norm_type, old.scale_grad_by_freq, old.sparse)
        super().__init__(old.num_embeddings, old.embedding_dim, *options, _weight=old.weight)
        self.weight = old.weight
        self.scale = scale
        self.train(old.training)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale.to(self.weight.dtype)


def recognise(module: nn.Module) -> KnownNorm:
    """What a norm computes, found on a copy with random weights, in float64 on the CPU and to 1e-5.

    Raises:
        ValueError: it is not known, and why: no weight (d,), parameters other than weight and bias, a forward of
            more than x, hooks, which a swap would lose, no eps among its attributes, or another function.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    width = _width(module, weight)
    if set(dict(module.named_parameters())) - {"weight", "bias"} or parametrize.is_parametrized(module):
        raise ValueError("it has parameters other than weight and bias")
    if any(isinstance(p, Tensor) and (not isinstance(p, Parameter) or p.is_meta) for p in (weight, bias)):
        raise ValueError("its weight is computed, or on the meta device: load the weights first")
    if any(v for k, v in vars(module).items() if k.endswith("_hooks") and k.startswith(("_forward", "_backward"))):
        raise ValueError("it has hooks, which would be lost: remove them first")
    kinds = [argument.kind for argument in inspect.signature(module.forward).parameters.values()]
    if kinds not in ([inspect.Parameter.POSITIONAL_ONLY], [inspect.Parameter.POSITIONAL_OR_KEYWORD]):
        raise ValueError("its forward takes more than x")
    try:
        twin = copy.deepcopy(module).to("cpu", torch.float64).eval()
    except Exception as error:  # anyone's code, here and below
        raise ValueError(f"it cannot be copied: {error}") from error
    if isinstance(twin, nn.RMSNorm) and twin.eps is None:  # torch: the smallest number of the dtype it computes in
        wide = torch.float32 if weight is None else torch.promote_types(weight.dtype, torch.float32)
        twin.eps = torch.finfo(wide).eps
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator, dtype=torch.float64))
        for eps in sorted({v for v in vars(twin).values() if isinstance(v, float) and 0 <= v < 1}):
            x = 1 + torch.randn(2, 3, width, generator=generator, dtype=torch.float64)
            scales = (1.0, math.sqrt(eps)) if eps else (1.0,)
            try:
                probes = [(scale * x, twin(scale * x)) for scale in scales]
            except Exception as error:
                raise ValueError(f"it does not run on a (2, 3, {width}) input: {error}") from error
            for known in (KnownNorm(kind, width, eps, offset) for kind in ("layer", "rms") for offset in (0, 1)):
                if all(_agrees(y, _formula(x, known, twin)) for x, y in probes):
                    return known
    raise ValueError("it computes neither LayerNorm nor RMSNorm with its weight and an eps among its attributes")


def _formula(x: Tensor, known: KnownNorm, module: nn.Module) -> Tensor:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    gamma = None if weight is None else weight + known.offset
    if known.kind == "layer":
        return F.layer_norm(x, (known.width,), gamma, bias, known.eps)
    y = F.rms_norm(x, (known.width,), gamma, known.eps)
    return y if bias is None else y + bias


def _agrees(y: Any, expected: Tensor) -> bool:
    if not isinstance(y, Tensor) or y.shape != expected.shape:
        return False
    return bool((y - expected).abs().max() <= 1e-5 * expected.abs().max())


def _width(module: nn.Module, weight: Any) -> int:
    if isinstance(weight, Tensor):
        if weight.ndim != 1 or not weight.is_floating_point():
            raise ValueError(f"its weight is not a vector of numbers but {weight.dtype} {tuple(weight.shape)}")
        return weight.shape[0]
    shape = getattr(module, "normalized_shape", ())
    if len(shape) != 1:
        raise ValueError("it has no weight that tells its width")
    return shape[0]


# --- what to swap, and swapping -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    name: str
    module: nn.Module
    known: KnownNorm


def _find(model: nn.Module, select: Choice | None) -> list[_Found]:
    chosen = _is_chosen(select)
    found: dict[nn.Module, _Found] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if module in found or not _looks_like_norm(module) or not chosen(name):
            continue
        try:
            found[module] = _Found(name, module, recognise(module))
        except ValueError as reason:
            kind = type(module).__name__
            raise ValueError(
                f"{name or 'the model'} ({kind}) cannot be converted: {reason}; or leave it out by `select`"
            ) from reason
    if not found:
        raise ValueError(
            f"no norm found in {type(model).__name__}" + ("" if select is None else " that `select` takes")
        )
    return list(found.values())


def _looks_like_norm(module: nn.Module) -> bool:
    """By the name of its class, and that nothing is below it: a block named after its norm is not one."""
    name = type(module).__name__.lower()
    if "norm" not in name or re.search("batchnorm|groupnorm|instancenorm", name):
        return False
    if isinstance(module, OTHER_AXES + NO_NORMS):
        return False
    return parametrize.is_parametrized(module) or not any(True for _ in module.children())


def _is_chosen(choice: Choice | None) -> Callable[[str], bool]:
    if choice is None:
        choice = ""  # is found in every name
    if not isinstance(choice, str):
        return choice
    pattern = re.compile(choice)
    return lambda name: pattern.search(name) is not None


def _check_request(to: str, language_model: bool, options: dict[str, Any]) -> None:
    kinds = [name for name in NORMS if name != "crms"]
    if to not in kinds:
        raise ValueError(f"cannot convert to {to!r}: choose one of {', '.join(kinds)}")
    kept = options.keys() & {"normalized_shape", "elementwise_affine", "bias", "device", "dtype"}
    if kept:
        raise ValueError(f"{', '.join(sorted(kept))} are kept from the old norms and cannot be chosen")
    if language_model and to not in ("dyt", "derf"):
        raise ValueError(f"language_model is of dyt and derf, not of {to}")


def _gammas(model: nn.Module, found: list[_Found]) -> dict[Parameter, Parameter]:
    """1 + w for every w of a norm that has γ = 1 + w: a new parameter, so that nobody else may hold w."""
    rewritten: dict[nn.Module, Parameter] = {
        f.module: f.module.get_parameter("weight") for f in found if f.known.offset
    }
    gammas = {w: Parameter(w.detach() + 1, requires_grad=w.requires_grad) for w in rewritten.values()}
    for name, module in model.named_modules():
        if module not in rewritten and any(p in gammas for p in module.parameters(recurse=False)):
            raise ValueError(
                f"{name or 'the model'} holds the weight w of a norm with γ = 1 + w, a tie that would break"
            )
    return gammas


def _successor(
    f: _Found, to: str, options: dict[str, Any], bias: bool, gammas: dict[Parameter, Parameter]
) -> nn.Module:
    weight, old_bias = getattr(f.module, "weight", None), getattr(f.module, "bias", None)
    kept = {"eps": f.known.eps, "elementwise_affine": weight is not None, "bias": bias and old_bias is not None}
    takes = inspect.signature(NORMS[to]).parameters
    kept = {key: value for key, value in kept.items() if key in takes}
    place = {} if weight is None else {"device": weight.device, "dtype": weight.dtype}
    new = norm(to, f.known.width, **kept | options | place)
    if kept.get("elementwise_affine") and weight is not None:
        new.register_parameter("weight", gammas.get(weight, weight))
        new.register_parameter("bias", old_bias if kept["bias"] else None)
    return new.train(f.module.training)


def _input_embeddings(model: nn.Module, name: str | None) -> list[nn.Embedding]:
    """The input embedding and all others that hold its weight."""
    get: Any = getattr(model, "get_input_embeddings", None)
    if name is None and get is None:
        raise ValueError(f"{type(model).__name__} has no get_input_embeddings: name its input by `embedding`")
    modules = dict(model.named_modules(remove_duplicate=False))
    if name is not None and name not in modules:
        raise ValueError(f"there is no module {name!r} to be the input embedding")
    first = get() if name is None else modules[name]
    holders = {
        m: m for m in modules.values() if isinstance(m, nn.Embedding) and m.weight is getattr(first, "weight", None)
    }
    for holder in holders or {first: first}:
        if type(holder) is not nn.Embedding:
            raise ValueError(f"the input embedding is a {type(holder).__name__}, not a plain torch.nn.Embedding")
    return list(holders)


def _swap(model: nn.Module, new: dict[nn.Module, nn.Module]) -> nn.Module:
    for parent in list(model.modules()):
        # In evaluation torch's encoders hand their norms' parameters to a kernel of their own, which is LayerNorm.
        if isinstance(parent, nn.TransformerEncoder) and any(module in new for module in parent.modules()):
            parent.use_nested_tensor = False
        swapped = [name for name, child in parent._modules.items() if child in new]
        if isinstance(parent, nn.TransformerEncoderLayer) and swapped:
            parent.activation_relu_or_gelu = 0
        for name in swapped:
            setattr(parent, name, new[parent.get_submodule(name)])
    return new.get(model, model)
