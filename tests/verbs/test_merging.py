"""Every method against mergekit's own code, on the same tensors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gaugekit.verbs.merging import TASKS, Method, Settings, drawing, linear, merged, slerp, thinned

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what mergekit imports
    from mergekit import sparsify
    from mergekit.merge_methods.api import merge_tensors
    from mergekit.merge_methods.registry import get

SHAPES = [(7, 5), (12,), (3, 4, 2)]
EXACT = 1e-12


def drawn(count: int, shape: Sequence[int] = (7, 5), seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def theirs(method: str, tensors: Sequence[Tensor], base: bool, **parameters: Any) -> Tensor:
    """By mergekit; the base comes first."""
    copies = [tensor.clone() for tensor in tensors]
    return merge_tensors(copies, method, parameters=parameters, base_index=0 if base else None)


def close(a: Tensor, b: Tensor, tolerance: float = EXACT) -> bool:
    assert a.dtype == b.dtype == torch.float64
    return float((a - b).abs().max()) <= tolerance


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalize", [True, False])
def test_linear(shape: tuple[int, ...], normalize: bool) -> None:
    tensors, weights = drawn(3, shape), (0.7, -0.2, 1.1)
    expected = theirs("linear", tensors, False, weight=list(weights), normalize=normalize)
    settings = Settings("linear", weights, normalize=normalize)
    assert close(merged(settings, "w", tensors[0], tensors[1:]), expected)
    assert not close(
        merged(Settings("linear", weights, normalize=not normalize), "w", tensors[0], tensors[1:]), expected
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("t", [0.0, 0.3, 0.5, 1.0])
def test_slerp(shape: tuple[int, ...], t: float) -> None:
    a, b = drawn(2, shape)
    for x, y in ((a, b), (a, 3 * b), (a, 2 * a + 1e-3 * b), (a, -a), (a, 0 * b), (0 * a, b)):
        assert close(slerp(x, y, t), theirs("slerp", [x, y], True, t=t))
    assert close(slerp(a, b, 0.0), a)
    assert close(slerp(a, b, 1.0), b)


def test_slerp_keeps_the_length_that_a_straight_line_loses() -> None:
    a, b = (x / x.norm() for x in drawn(2))
    assert float(slerp(a, b, 0.5).norm()) == pytest.approx(1.0)
    assert float(linear([a, b], (0.5, 0.5), True).norm()) < 0.9


@pytest.mark.parametrize("method", TASKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_task_vectors(method: Method, shape: tuple[int, ...], normalize: bool, scale: float) -> None:
    tensors, weights = drawn(4, shape), (0.6, -0.3, 1.2)
    settings = Settings(method, weights, (1.0,) * 3, normalize, scale=scale)
    expected = theirs(method, tensors, True, weight=[*weights], normalize=normalize, **{"lambda": scale})
    assert close(merged(settings, "w", tensors[0], tensors[1:]), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("density", [0.01, 0.3, 0.7])
def test_ties_trims_the_smallest(shape: tuple[int, ...], rescale: bool, density: float) -> None:
    tensors, weights, densities = drawn(3, shape), (0.6, 0.9), (density, 0.5)
    expected = theirs("ties", tensors, True, weight=[*weights], density=[*densities], rescale=rescale)
    assert close(merged(Settings("ties", weights, densities, True, rescale), "w", tensors[0], tensors[1:]), expected)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
@pytest.mark.parametrize("rescale", [True, False])
def test_dare_with_the_same_drops(method: Method, rescale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, weights, densities = drawn(3), (0.6, 0.9), (0.4, 0.7)
    settings = Settings(method, weights, densities, False, rescale, seed=5)
    masks = [
        (thinned(torch.ones(7, 5).double(), density, False, drawing(5, index, "w")) != 0).double()
        for index, density in enumerate(densities)
    ]
    waiting = iter(masks)
    monkeypatch.setattr(sparsify.torch, "bernoulli", lambda _: next(waiting))
    expected = theirs(method, tensors, True, weight=[*weights], density=[*densities], rescale=rescale)
    assert 0 < sum(float(mask.mean()) for mask in masks) < 2
    # mergekit thins in float32.
    assert close(merged(settings, "w", tensors[0], tensors[1:]), expected, 1e-6)


def test_defaults_are_those_of_mergekit() -> None:
    """`TASKS` are the defaults of recipes."""
    for method, task in TASKS.items():
        defaults = {each.name: each.default for each in get(method).spec.parameters if not each.required}
        assert (defaults["normalize"], defaults["rescale"]) == (task.normalize, task.rescale)
        assert (defaults["lambda"], defaults["density"]) == (1.0, 1.0)
    assert next(each for each in get("linear").spec.parameters if each.name == "normalize").default is True


def test_dare_keeps_the_share_and_the_mean_size() -> None:
    (delta,) = drawn(1, (400, 50))
    left = thinned(delta, 0.3, True, drawing(0, 0, "w"))
    assert float((left != 0).double().mean()) == pytest.approx(0.3, abs=0.02)
    assert float(left.abs().sum()) == pytest.approx(float(delta.abs().sum()))
    assert float((left / delta)[left != 0].mean()) == pytest.approx(1 / 0.3, rel=0.05)  # DARE's own factor


def test_drops_depend_on_seed_model_and_tensor_alone() -> None:
    tensors = drawn(3)
    settings = Settings("dare_linear", (1.0, 1.0), (0.5, 0.5), False, True, seed=1)
    once = merged(settings, "w", tensors[0], tensors[1:])
    torch.rand(3)
    assert torch.equal(once, merged(settings, "w", tensors[0], tensors[1:]))
    ones = torch.ones(50).double()
    masks = [thinned(ones, 0.5, False, drawing(*key)) for key in ((1, 0, "w"), (1, 1, "w"), (2, 0, "w"), (1, 0, "v"))]
    assert all(not torch.equal(masks[0], other) for other in masks[1:])


def test_ties_settles_a_conflict_by_mass() -> None:
    """Two small ups against one large down: the sign of the larger sum wins, and only its side is averaged."""
    base = torch.zeros(2, dtype=torch.float64)
    moves = [torch.tensor(x).double() for x in ([1.0, 1.0], [1.0, 3.0], [-3.0, 0.0])]
    result = merged(Settings("ties", (1.0,) * 3, (1.0,) * 3), "w", base, moves)
    assert result.tolist() == [-3.0, 2.0]


def test_weights_that_cancel_where_they_agree_divide_nothing() -> None:
    """0.1 + 0.2 - 0.3 is 6e-17; where the fourth model's sign is another, no more is left of the divisor."""
    base = torch.zeros(2, dtype=torch.float64)
    moves = [torch.tensor(x).double() for x in ([1.0, 1.0], [1.0, 1.0], [-0.5, -0.5], [-0.1, 1.0])]
    result = merged(Settings("ties", (0.1, 0.2, -0.3, 0.5), (1.0,) * 4), "w", base, moves)
    torch.testing.assert_close(result, torch.tensor([0.1 + 0.2 + 0.15, (0.1 + 0.2 + 0.15 + 0.5) / 0.5]).double())
