"""Windows into disk tensors: what is written through a view is read through it, and nothing else moves."""

from __future__ import annotations

import pytest
import torch
from cases import CASES
from hypothesis import given
from hypothesis import strategies as st
from oracle import Case, Tiny

from gaugekit.models import Edit, View
from gaugekit.models.spec import Attention, MoE

SEEN = {case.model_type: case for case in CASES}


def views_of(tiny: Tiny) -> set[View]:
    return {view for s in (*tiny.symmetries.continuous, *tiny.symmetries.discrete) for view in s.views}


@pytest.mark.parametrize("case", SEEN.values(), ids=str)
def test_every_view_of_every_layout_reads_back_what_it_writes(case: Case) -> None:
    tiny = Tiny(case)
    tensors = tiny.tensors()
    for view in views_of(tiny):
        before = tensors[view.name]
        edit = Edit(tensors)
        value = torch.randn(view.shape, dtype=torch.float64)
        edit[view] = value
        assert torch.allclose(edit[view], value, rtol=0, atol=1e-15)
        after = edit.changed[view.name]
        assert torch.equal(tensors[view.name], before), "the given tensor is not touched"
        window = torch.zeros_like(before, dtype=torch.bool)
        view.window(window).fill_(True)
        assert torch.equal(after[~window], before[~window]), "nothing outside the window moves"


@pytest.mark.parametrize("case", SEEN.values(), ids=str)
def test_views_of_a_model_do_not_overlap(case: Case) -> None:
    """Every parameter is seen by one weight only, and all but convolutions before a stream are seen."""
    tiny = Tiny(case)
    seen = torch.zeros(tiny.size, dtype=torch.long)
    weights: set[View] = set()
    for norm in tiny.spec.norms():
        weights |= {view for view in (norm.weight, norm.bias) if view is not None}
    for stream in tiny.spec.streams:
        weights |= {table.rows for table in stream.tables}
        head = stream.head
        if head is not None:
            weights |= {view for view in (head.linear.weight, head.linear.bias) if view is not None}
        for block in stream.blocks:
            for branch in block.branches:
                weights |= {branch.scale} if branch.scale is not None else set()
                body = branch.body
                bodies = body.experts if isinstance(body, MoE) else (body,)
                linears = [body.router] if isinstance(body, MoE) else []
                for each in bodies:
                    if isinstance(each, Attention):
                        linears += [each.q, each.k, each.v, each.o]
                        if each.qk_norm is not None:
                            weights |= {each.qk_norm.q, each.qk_norm.k}
                    else:
                        linears += [each.up, each.down] + ([each.gate] if each.gate is not None else [])
                weights |= {v for linear in linears for v in (linear.weight, linear.bias) if v is not None}
    for view in weights:
        seen[view.window(tiny.index[view.name]).reshape(-1)] += 1
    assert seen.max() == 1
    dead = sum(item.view.numel for item in tiny.spec.dead)
    unseen = int((seen == 0).sum())
    front = tiny.spec.family == "whisper"  # the first convolution has no symmetry that is continuous
    assert front or unseen <= dead


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_fused_by_head_and_transposed(heads: int, head_dim: int, width: int) -> None:
    fused = View("qkv", (width, heads * 3 * head_dim)).transpose(0, 1).unflatten(0, (heads, 3, head_dim)).select(1, 2)
    assert fused.shape == (heads, head_dim, width)
    base = torch.arange(width * heads * 3 * head_dim, dtype=torch.float64).reshape(width, -1)
    for head in range(heads):
        for i in range(head_dim):
            column = (head * 3 + 2) * head_dim + i
            assert torch.equal(fused.read(base)[head, i], base[:, column])


def test_norm_of_the_one_plus_w_kind() -> None:
    """TransformerLens#511, Liger-Kernel#74: Gemma stores w and multiplies by 1 + w."""
    view = View("norm", (3,)).plus(1.0)
    edit = Edit({"norm": torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64)})
    assert edit[view].tolist() == [1.0, 1.5, 0.5]
    edit[view] = edit[view] * 2
    assert edit.changed["norm"].tolist() == [1.0, 2.0, 0.0]
