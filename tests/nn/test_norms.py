"""Norm modules against torch's and the written-out formulas in float64, and at the edges where others broke."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivariance import assert_equivariant
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from gaugekit.nn.norms import (
    NORMS,
    CompressedRMSNorm,
    Derf,
    DyT,
    L2Norm,
    LayerNorm,
    PartialRMSNorm,
    RMSNorm,
    ScaleNorm,
    norm,
)

F64 = torch.float64
D = 24
NAMES = list(NORMS)
STATISTICS = ["layer", "rms", "prms", "crms", "l2", "scale"]
ROBUST = ["layer", "rms", "l2", "scale"]
HALVES = [torch.float16, torch.bfloat16]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def randomized(module: nn.Module, seed: int = 1) -> nn.Module:
    """The module with parameters away from their starting values, none of them 1 or 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.4 + torch.rand(p.shape, generator=generator, dtype=F64))
    return module


def make(name: str, width: int = D, dtype: torch.dtype = F64, **options: Any) -> nn.Module:
    if name in ("rms", "prms", "crms"):
        options.setdefault("bias", True)
    return randomized(norm(name, width, dtype=dtype, **options))


def formula(module: Any, name: str, x: Tensor) -> Tensor:
    """The definition, in float64."""
    x = x.to(F64)
    p = {key: value.detach().to(F64) for key, value in module.named_parameters()}
    gamma, beta = p.get("weight", 1.0), p.get("bias", 0.0)
    d = x.shape[-1]
    if name == "layer":
        c = x - x.mean(-1, keepdim=True)
        return gamma * c / (c.square().mean(-1, keepdim=True) + module.eps).sqrt() + beta
    if name == "rms":
        return gamma * x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() + beta
    if name == "prms":
        part = x[..., : math.ceil(module.p * d)]
        return gamma * x / (part.square().mean(-1, keepdim=True) + module.eps).sqrt() + beta
    if name == "crms":
        z = torch.cat([x, -x.sum(-1, keepdim=True)], -1)
        return gamma * (z / (z.square().mean(-1, keepdim=True) + module.eps).sqrt())[..., :-1] + beta
    if name in ("l2", "scale"):
        radius = module.radius if name == "l2" else p["weight"]
        return radius * x / (x.square().sum(-1, keepdim=True) + d * module.eps).sqrt()
    if name == "dyt":
        return gamma * torch.tanh(p["alpha"] * x) + beta
    if name == "derf":
        return gamma * torch.erf(p["alpha"] * x + p["shift"]) + beta
    return x


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    actual, expected = actual.detach().to(F64), expected.detach().to(F64)
    assert actual.isfinite().all()
    off = float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
    assert off <= tolerance, f"off by {off:.1e}"


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "eps"), [(n, None) for n in NAMES] + [(n, 0.3) for n in STATISTICS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-14), (torch.float32, 1e-6)])
def test_equals_the_formula(name: str, dtype: torch.dtype, tolerance: float, eps: float | None) -> None:
    module = make(name, dtype=dtype, **({} if eps is None else {"eps": eps}))
    x = 0.7 + normal(3, 5, D, dtype=dtype)
    y = module(x)
    assert y.dtype == dtype and y.shape == x.shape
    close(y, formula(module, name, x), tolerance)


def test_the_formulas_differ() -> None:
    """A control of the test above: no two names give the same result."""
    x = 0.7 + normal(3, D)
    results = [make(name)(x) for name in NAMES if name != "scale"]  # scale and l2 differ in who learns
    for i, a in enumerate(results):
        for b in results[:i]:
            assert (a - b).abs().max() > 0.01


@pytest.mark.parametrize(("name", "robust"), [(n, False) for n in NAMES] + [(n, True) for n in ROBUST])
def test_gradients_to_second_order(name: str, robust: bool) -> None:
    module = make(name, 5, **({"p": 0.5} if name == "prms" else {}), **({"robust": True} if robust else {}))
    x = (0.3 + normal(2, 3, 5)).requires_grad_()
    parameters = tuple(module.parameters())

    def call(x: Tensor, *values: Tensor) -> Tensor:
        names = [key for key, _ in module.named_parameters()]
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

    assert gradcheck(call, (x, *parameters))
    assert gradgradcheck(call, (x, *parameters))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(D,), (0, D), (2, 0, D), (2, 3, 4, D)])
def test_batches_of_any_shape(name: str, shape: tuple[int, ...]) -> None:
    module = make(name)
    x = normal(*shape).requires_grad_()
    y = module(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    if x.numel():
        rows = torch.stack([module(row) for row in x.detach().reshape(-1, D)])
        close(y.detach().reshape(-1, D), rows, 1e-15)


# --- drop-in for torch.nn -----------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_is_drop_in(affine: bool, bias: bool) -> None:
    ours, theirs = (kind(D, 1e-3, affine, bias, dtype=F64) for kind in (LayerNorm, nn.LayerNorm))
    randomized(theirs)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = 1 + normal(4, D)
    assert torch.equal(ours(x), theirs(x))
    assert isinstance(ours, nn.LayerNorm)  # as who spares norms from weight decay will ask
    assert (ours.eps, ours.normalized_shape) == (theirs.eps, theirs.normalized_shape)


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_is_drop_in(affine: bool) -> None:
    ours, theirs = (kind(D, 1e-3, affine, dtype=F64) for kind in (RMSNorm, nn.RMSNorm))
    randomized(theirs)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = 1 + normal(4, D)
    assert torch.equal(ours(x), theirs(x))
    assert isinstance(ours, nn.RMSNorm)


def test_width_as_a_tuple() -> None:
    for name in NAMES:
        assert repr(norm(name, (D,))) == repr(norm(name, D))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_saved_copied_and_reset(name: str) -> None:
    module = make(name)
    x = normal(3, D)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = norm(name, D, dtype=F64, **({"bias": True} if name in ("rms", "prms", "crms") else {}))
    start = copy.deepcopy(fresh.state_dict())
    fresh.load_state_dict(torch.load(file))
    assert torch.equal(fresh(x), module(x))
    if start:
        fresh.reset_parameters()  # type: ignore[operator]
    for key, value in fresh.state_dict().items():
        assert torch.equal(value, start[key])


@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_a_break(name: str) -> None:
    module = make(name, dtype=torch.float32)
    x = normal(3, D, dtype=torch.float32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    close(compiled(x), module(x), 1e-6)


def test_what_is_printed() -> None:
    assert "eps=0.001" in repr(LayerNorm(D, 1e-3)) and "robust=True" in repr(RMSNorm(D, robust=True))
    assert "p=0.0625" in repr(PartialRMSNorm(D)) and "radius=4.89898" in repr(L2Norm(D))
    assert "alpha=0.5" in repr(DyT(D)) and "shift=0.0" in repr(Derf(D))


# --- each norm's own ----------------------------------------------------------------------------------------


def test_partial_rms_norm_looks_at_the_first_features_only() -> None:
    module = make("prms", p=0.2)
    k = math.ceil(0.2 * D)
    x, other = normal(2, D)
    other[:k] = x[:k]
    scale = (module(x) - module.bias)[k:] / x[k:]  # type: ignore[operator]
    torch.testing.assert_close((module(other) - module.bias)[k:] / other[k:], scale)  # type: ignore[operator]
    assert PartialRMSNorm(D).p == 0.0625
    whole, rms = randomized(PartialRMSNorm(D, p=1.0, dtype=F64)), randomized(RMSNorm(D, dtype=F64))
    close(whole(x), rms(x), 1e-15)


def test_compressed_rms_norm_is_both_norms_of_the_completed_vector() -> None:
    x = normal(5, D)
    z = torch.cat([x, -x.sum(-1, keepdim=True)], -1)
    y = CompressedRMSNorm(D, eps=0.1, dtype=F64)(x)
    close(y, RMSNorm(D + 1, eps=0.1, dtype=F64)(z)[:, :-1], 1e-14)
    close(y, LayerNorm(D + 1, eps=0.1, dtype=F64)(z)[:, :-1], 1e-14)
    assert (y - RMSNorm(D, eps=0.1, dtype=F64)(x)).abs().max() > 1e-3


def test_rms_norm_with_a_bias_is_layer_norm_of_centred_rows() -> None:
    layer, rms = randomized(LayerNorm(D, 0.1, dtype=F64)), RMSNorm(D, 0.1, bias=True, dtype=F64)
    rms.load_state_dict(layer.state_dict())
    x = normal(5, D)
    close(rms(x - x.mean(-1, keepdim=True)), layer(x), 1e-14)
    assert (rms(x) - layer(x)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["l2", "scale"])
def test_the_radius_is_the_root_of_the_width(name: str) -> None:
    """x-transformers#246: a scale that starts at d^-1/2 instead of d^1/2."""
    module = norm(name, D, dtype=F64)
    length = module(normal(7, D)).norm(dim=-1)
    close(length, torch.full((7,), math.sqrt(D), dtype=F64), 1e-5)
    close(norm(name, D, radius=3.0, dtype=F64)(normal(7, D)).norm(dim=-1), torch.full((7,), 3.0, dtype=F64), 1e-5)
    exact = norm(name, D, eps=0.0, robust=True, dtype=F64)(normal(7, D)).norm(dim=-1)
    close(exact, torch.full((7,), math.sqrt(D), dtype=F64), 1e-15)
    if name == "scale":
        close(module.weight.detach(), torch.tensor([math.sqrt(D)], dtype=F64), 0.0)  # type: ignore[union-attr]
        close(randomized(module)(normal(7, D)).norm(dim=-1), module.weight.detach().expand(7), 1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "module", [RMSNorm(6, dtype=F64), L2Norm(6), ScaleNorm(6, dtype=F64)], ids=["rms", "l2", "scale"]
)
def test_without_a_weight_of_each_feature_turned_with_the_frame(module: nn.Module) -> None:
    assert_equivariant(module, normal(4, 6, seed=9))
    with pytest.raises(AssertionError):
        assert_equivariant(randomized(RMSNorm(6, dtype=F64)), normal(4, 6, seed=9))
    with pytest.raises(AssertionError):
        assert_equivariant(LayerNorm(6, dtype=F64), normal(4, 6, seed=9))


def test_dyt_and_derf_start_as_published() -> None:
    dyt, derf = DyT(D), Derf(D)
    assert {k: tuple(v.shape) for k, v in dyt.state_dict().items()} == {"weight": (D,), "bias": (D,), "alpha": (1,)}
    assert dyt.alpha.item() == 0.5 and derf.alpha.item() == 0.5 and derf.shift.item() == 0.0
    assert derf.shift.shape == (1,)
    assert DyT(D, alpha=0.2).alpha.item() == pytest.approx(0.2) and Derf(D, shift=0.1).shift.item() == pytest.approx(
        0.1
    )


# --- edges --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STATISTICS)
def test_eps_is_explicit(name: str) -> None:
    """pytorch#155527, #189581: eps=None is another number for another dtype."""
    for eps in (None, 0.0, -1e-6, math.nan, math.inf):
        with pytest.raises(ValueError, match="eps is a positive number that you choose"):
            norm(name, D, eps=eps)
    x = 1e-4 * normal(4, D, dtype=torch.float32)
    of_torch = [nn.RMSNorm(D, dtype=dtype)(x.to(dtype)) for dtype in (torch.float32, F64)]
    assert (of_torch[0] - of_torch[1]).abs().max() > 0.05  # what is refused
    ours = [norm(name, D, dtype=dtype)(x.to(dtype)) for dtype in (torch.float32, F64)]
    close(ours[0], ours[1], 1e-6)
    for dtype in HALVES:  # the same eps, and no rounding but of the input and of the output
        rounded = x.to(dtype)
        close(norm(name, D, dtype=dtype)(rounded), norm(name, D)(rounded.float()), torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("parameters", ["half", "float32"])
def test_halves_equal_the_float32_path(name: str, dtype: torch.dtype, scale: float, parameters: str) -> None:
    """pytorch PR#133085, #66707: half-precision overflow, and drift from the float32 result."""
    options = {"p": 0.5} if name == "prms" else {}
    module = make(name, dtype=dtype if parameters == "half" else torch.float32, **options)
    wide = copy.deepcopy(module).float()
    x = (scale * normal(64, D)).clamp(-6e4, 6e4).to(dtype)
    weights = normal(64, D, seed=3).to(dtype)
    y, expected = module(x), wide(x.float())
    assert y.dtype == dtype
    assert torch.equal(y, expected.to(dtype))

    def gradients(m: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        x = x.clone().requires_grad_()
        return torch.autograd.grad((m(x).float() * weights.float()).sum(), (x, *m.parameters()))

    for ours, theirs in zip(gradients(module, x), gradients(wide, x.float()), strict=True):
        close(ours, theirs, torch.finfo(dtype).eps)


def test_why_halves_are_widened_on_the_cpu() -> None:
    """A control of the test above: torch's own gradient of γ, summed over 2048 rows in bfloat16."""
    x, weights = (normal(2048, D, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))

    def of_gamma(module: nn.Module, x: Tensor) -> Tensor:
        return torch.autograd.grad((module(x).float() * weights.float()).sum(), module.weight)[0]  # type: ignore[arg-type]

    exact = of_gamma(nn.LayerNorm(D), x.float())
    close(of_gamma(LayerNorm(D, dtype=torch.bfloat16), x), exact, 2**-8)
    assert (of_gamma(nn.LayerNorm(D, dtype=torch.bfloat16), x) - exact).abs().max() > 2**-6 * exact.abs().max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_a_zero_vector_is_beta(name: str, dtype: torch.dtype) -> None:
    """pytorch#41527: a float16 row of zeros is NaN where eps is below the smallest float16."""
    module = make(name, dtype=dtype, **({"eps": 1e-12} if name in STATISTICS else {}))
    y = module(torch.zeros(2, D, dtype=dtype))
    expected = formula(module, name, torch.zeros(2, D, dtype=dtype))
    assert y.isfinite().all()
    close(y, expected, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(("name", "robust"), [(n, False) for n in NAMES] + [(n, True) for n in ROBUST])
def test_gradient_at_the_zero_vector(name: str, robust: bool) -> None:
    """pytorch#184575, #2421: 1e12 or NaN. Stated: γ/√eps (times r/√d, times the projector); 0 at eps = 0."""
    eps = 1e-6
    module: Any = make(name, **({"eps": eps} if name in STATISTICS else {}), **({"robust": True} if robust else {}))
    jacobian = torch.autograd.functional.jacobian(module, torch.zeros(D, dtype=F64))
    gamma = module.weight.detach().expand(D) if hasattr(module, "weight") else torch.ones(D, dtype=F64)
    expected = torch.diag(gamma / math.sqrt(eps))
    if name == "layer":
        expected = expected @ (torch.eye(D, dtype=F64) - 1 / D)
    elif name == "l2":
        expected = torch.eye(D, dtype=F64) * module.radius / math.sqrt(D * eps)
    elif name == "scale":
        expected = expected / math.sqrt(D)
    elif name == "dyt":
        expected = torch.diag(gamma * module.alpha.detach())
    elif name == "derf":
        slope = 2 / math.sqrt(math.pi) * torch.exp(-module.shift.detach().square())
        expected = torch.diag(gamma * module.alpha.detach() * slope)
    elif name == "none":
        expected = torch.eye(D, dtype=F64)
    close(jacobian, expected, 1e-9)


@pytest.mark.parametrize("name", ROBUST)
def test_without_eps_the_zero_vector_has_no_gradient(name: str) -> None:
    module: Any = make(name, eps=0.0, robust=True)
    jacobian = torch.autograd.functional.jacobian(module, torch.zeros(D, dtype=F64))
    assert torch.equal(jacobian, torch.zeros_like(jacobian))
    close(module(normal(3, D)), formula(module, name, normal(3, D)), 1e-14)


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("size", [1e15, 1e18, 1e30, 1e37])
def test_entries_of_1e30(name: str, size: float) -> None:
    """pytorch PR#178123: zeros or NaN in float32. The default is right below |x| = 1.8e19, robust=True everywhere."""
    module, robust = (make(name, dtype=torch.float32, robust=flag) for flag in (False, True))
    unit = normal(6, D, dtype=torch.float32)
    unit = unit / unit.double().norm(dim=-1, keepdim=True).float()
    x = (unit * size).requires_grad_()
    expected = formula(robust, name, x)
    close(robust(x), expected, 1e-6)
    y = module(x)
    if size < 1.8e19:
        close(y, expected, 1e-6)
    else:
        assert not y.isfinite().all() or (y - expected).abs().max() > 0.1
    (gradient,) = torch.autograd.grad(robust(x).sum(), x)
    assert gradient.isfinite().all() and gradient.abs().max() <= 100 / size


@pytest.mark.parametrize("ratio", [1e2, 1e4, 1e6])
def test_large_mean_and_small_variance(ratio: float) -> None:
    """pytorch#51102, #40302: a wrong variance. The default loses digits as stated, robust=True takes two passes."""
    x = (ratio + normal(64, 768)).float()
    module, robust = (LayerNorm(768, eps=1e-12, robust=flag) for flag in (False, True))
    expected = formula(module, "layer", x)
    assert (robust(x) - expected).abs().max() <= 2e-6
    assert (module(x) - expected).abs().max() <= 1e-6 + 2e-7 * ratio


def test_one_feature() -> None:
    """pytorch#108956: LayerNorm of one feature gives zeros without a word."""
    with pytest.raises(ValueError, match="the sphere is empty"):
        LayerNorm(1)
    for name in NAMES:
        if name != "layer":
            y = norm(name, 1, dtype=F64)(torch.tensor([[3.0], [-2.0]], dtype=F64))
            assert y.isfinite().all() and torch.equal(y.sign(), torch.tensor([[1.0], [-1.0]], dtype=F64))
    close(LayerNorm(2, dtype=F64)(normal(5, 2)).abs(), torch.ones(5, 2, dtype=F64), 1e-2)


# --- refusals -----------------------------------------------------------------------------------------------


def refused(call: Callable[[], Any], match: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_unknown_names_and_options() -> None:
    refused(lambda: norm("batch", D), "unknown norm 'batch': choose one of layer, rms, prms, crms, l2, scale")
    refused(lambda: norm("dyt", D, eps=1e-6), "norm 'dyt' has no option 'eps': it takes elementwise_affine, bias")
    refused(lambda: norm("none", D, bias=True), "norm 'none' has no option 'bias': it takes device, dtype")
    for name in NAMES:
        assert all(p.dtype == F64 for p in norm(name, D, dtype=F64, device="cpu").parameters())


@pytest.mark.parametrize("name", NAMES)
def test_widths(name: str) -> None:
    for shape in (0, (2, 3), ()):
        refused(lambda shape=shape: norm(name, shape), "over the last axis alone|empty")  # type: ignore[arg-type]
    if name == "none":
        return
    module = norm(name, D)
    for shape in ((3, 1), (3, D + 1), ()):
        refused(lambda shape=shape: module(torch.ones(shape)), f"over a last axis of {D}, got an input")
    refused(lambda: module(torch.ones(3, D, dtype=torch.int64)), "floating point", TypeError)


def test_options_out_of_range() -> None:
    for p in (0.0, 1.5, -1.0, math.nan):
        refused(lambda p=p: PartialRMSNorm(D, p=p), "share of features")
    for radius in (0.0, -1.0, math.inf, math.nan):
        refused(lambda radius=radius: L2Norm(D, radius=radius), "radius is positive and finite")


def test_torch_takes_the_same_kernel() -> None:
    """The default is the fused kernel: bit for bit what torch gives in float32."""
    x = 1 + normal(64, D, dtype=torch.float32)
    layer, rms = make("layer", dtype=torch.float32), randomized(RMSNorm(D))
    assert torch.equal(layer(x), F.layer_norm(x, (D,), layer.weight, layer.bias, 1e-5))  # type: ignore[arg-type]
    assert torch.equal(rms(x), F.rms_norm(x, (D,), rms.weight, 1e-6))  # type: ignore[arg-type]
