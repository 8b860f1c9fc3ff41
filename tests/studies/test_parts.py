"""LayerNorm in its parts, and keys that cannot be selected behind it."""

from __future__ import annotations

import math

import pytest
import torch
from drawn import gap, normal

from gaugekit.geometry.keys import unselectable
from gaugekit.nn.norms import LayerNorm, RMSNorm
from gaugekit.studies.fitting import made, sized
from gaugekit.studies.parts import PartNorm, by_chance, decoder, unselectable_shares
from gaugekit.studies.selectability import PARTS, STUDY


def test_both_parts_are_layer_norm_and_scaling_alone_is_rms_norm() -> None:
    x = normal(7, 9) + 3
    for parts, norm in (((True, True), LayerNorm(9, 1e-12, False)), ((False, True), RMSNorm(9, 1e-12, False))):
        assert gap(PartNorm(*parts)(x), norm.double()(x)) < 1e-12
    assert gap(PartNorm(True, True)(x), PartNorm(False, True)(x)) > 0.1


def test_without_scaling_lengths_differ_and_their_mean_square_is_that_of_the_others() -> None:
    x = normal(50, 9) * normal(50, 1, seed=1) + 3
    for project in (True, False):
        scaled, plain = PartNorm(project, True)(x), PartNorm(project, False).double()(x)
        assert gap(scaled.norm(dim=-1), torch.full((50,), 3.0)) < 1e-6
        assert float(plain.square().mean()) == pytest.approx(1.0)
        assert float(plain.norm(dim=-1).std()) > 0.3
        # They differ in length alone.
        assert gap(torch.nn.functional.normalize(scaled, dim=-1), torch.nn.functional.normalize(plain, dim=-1)) < 1e-12
        assert (float(plain.mean(-1).abs().max()) < 1e-12) == project


def test_the_size_is_that_of_the_first_input_and_stays() -> None:
    norm = PartNorm(False, False)
    x = normal(5, 4).float()
    first = norm(x)
    torch.testing.assert_close(norm(10 * x), 10 * first)
    torch.testing.assert_close(norm.state_dict()["size"], x.square().mean().sqrt())


def test_decoders_of_all_arms_are_drawn_alike() -> None:
    models = [decoder(40, 0, STUDY.quick, *parts) for parts in PARTS.values()]
    plain = made(sized(STUDY.quick, 40, init_std=8**-0.5), 0)
    first = dict(models[0].named_parameters())
    for model in models:
        assert isinstance(model.blocks[0].norm_attention, PartNorm)
        assert isinstance(model.blocks[0].norm_mlp, LayerNorm) and isinstance(model.norm, LayerNorm)
        found = dict(model.named_parameters())
        assert list(found) == list(first)
        assert all(torch.equal(found[name], first[name]) for name in first)
        assert all(torch.equal(p, dict(plain.named_parameters())[name]) for name, p in found.items())


def test_shares_are_of_the_keys_that_they_say() -> None:
    windows = [torch.randint(40, (1, 48), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    for name, (project, scale) in PARTS.items():
        model = decoder(40, 3, STUDY.quick, project, scale)
        model(windows[0])
        found = unselectable_shares(model, windows)
        block, wide = model.blocks[0], model.double()
        x = torch.cat([wide.embedding(tokens) + wide.positions.weight for tokens in windows])
        keys = block.attention.key(block.norm_attention(x)).unflatten(-1, (4, 2)).transpose(1, 2)
        centred = x - x.mean(-1, keepdim=True) if project else x
        assert found["unscaled"] == [round(unselectable(centred).share, 4)], name
        assert found["inputs"] == ([0.0] if scale else found["unscaled"]), name
        assert found["heads"] == [round(unselectable(keys.detach()).share, 4)], name
        assert found["unscaled"][0] > 0.01 and found["heads"][0] > 0.5, name


def test_by_chance() -> None:
    assert by_chance(5, 6) == 0.0  # a simplex
    assert by_chance(200, 1) == pytest.approx(198 / 200)  # all between the two ends
    # Of n normal points in the plane 2 √(2π log n) are corners of the hull, for large n.
    corners = 200 * (1 - by_chance(200, 2))
    assert 0.5 < corners / (2 * math.sqrt(2 * math.pi * math.log(200))) < 1.2
    assert by_chance(200, 2) == by_chance(200, 2)
