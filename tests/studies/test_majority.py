"""The majority task: its sequences, its model, and what is measured of learning it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from gaugekit.errors import TrainingError
from gaugekit.studies.majority import (
    CLASSES,
    LEAD,
    LENGTH,
    Majority,
    accuracy_and_loss,
    evenness,
    learning,
    majority,
    sequences,
)
from gaugekit.studies.parts import PartNorm


def test_sequences_have_every_class_and_a_leading_one() -> None:
    tokens = sequences(300, 5)
    counts = F.one_hot(tokens, CLASSES).sum(1)
    best = counts.topk(2, -1).values
    assert tokens.shape == (300, LENGTH) and int(counts.min()) >= 1
    assert int((best[:, 0] - best[:, 1]).min()) >= LEAD
    assert torch.equal(tokens, sequences(300, 5)) and not torch.equal(tokens, sequences(300, 6))
    assert len(counts.argmax(-1).unique()) == CLASSES


def test_targets_name_the_most_frequent_class_and_batches_depend_on_seed_and_step_alone() -> None:
    task = majority(False)
    tokens, targets = task.batches(3)(7)
    assert torch.equal(targets, tokens.mode(-1, keepdim=True).values.expand_as(tokens))
    assert torch.equal(tokens, task.batches(3)(7)[0])
    for other in (task.batches(3)(8), task.batches(4)(7), task.held_out[0]):
        assert not torch.equal(tokens, other[0])


def test_rates_are_chosen_on_other_sequences() -> None:
    trained, others = (torch.cat([tokens for tokens, _ in majority(each).held_out]) for each in (False, True))
    rows = [{tuple(row) for row in each.tolist()} for each in (trained, others)]
    assert len(rows[0]) == len(rows[1]) > 500 and not rows[0] & rows[1]
    assert torch.equal(majority(True).batches(3)(7)[0], majority(False).batches(3)(7)[0])

    def norm() -> PartNorm:
        return PartNorm(False, True)

    final, choosing = (learning(norm, 8, 0.1, [4], 2, 0.05, validation=each) for each in (False, True))
    assert final["loss"] != choosing["loss"] and final["loss"] == pytest.approx(choosing["loss"], rel=0.2)


def test_the_order_of_tokens_does_not_count() -> None:
    torch.manual_seed(0)
    model = Majority(PartNorm(True, True), 8).double()
    tokens = sequences(4, 0)
    order = torch.randperm(LENGTH)
    torch.testing.assert_close(model(tokens)[:, order], model(tokens[:, order]))


@pytest.mark.parametrize("parts", [(True, True), (False, True), (True, False), (False, False)])
def test_parameters_are_drawn_alike_whatever_the_norm(parts: tuple[bool, bool]) -> None:
    models = []
    for each in ((True, True), parts):
        torch.manual_seed(0)
        models.append(dict(Majority(PartNorm(*each), 8).named_parameters()))
    assert list(models[0]) == list(models[1])
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


class Knowing(torch.nn.Module):
    """Right about all tokens but the first of each sequence."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        right = tokens.mode(-1, keepdim=True).values.expand_as(tokens).clone()
        right[:, 0] = (right[:, 0] + 1) % CLASSES
        return 50.0 * F.one_hot(right, CLASSES).float()


def test_accuracy_and_loss_of_known_answers() -> None:
    right, loss = accuracy_and_loss(Knowing(), majority(False))
    assert right == pytest.approx(1 - 1 / LENGTH) and loss == pytest.approx(50 / LENGTH)


def test_evenness_is_one_of_uniform_attention_and_less_of_other() -> None:
    torch.manual_seed(0)
    model = Majority(PartNorm(False, True), 8)
    some = evenness(model, majority(False))
    with torch.no_grad():
        model.query.weight.mul_(100)
        sharp = evenness(model, majority(False))
        model.query.weight.zero_()
        even = evenness(model, majority(False))
    assert 1 / LENGTH < sharp < some < 1 and even == pytest.approx(1.0)


def test_learning_is_the_mean_over_models() -> None:
    def norm() -> PartNorm:
        return PartNorm(False, True)

    each = [learning(norm, 8, 0.1, [seed], 6, 0.05, validation=False) for seed in (4, 5)]
    both = learning(norm, 8, 0.1, [4, 5], 6, 0.05, validation=False)
    for key in ("loss", "accuracy", "evenness"):
        assert both[key] == pytest.approx((each[0][key] + each[1][key]) / 2)
    assert [step for step, _ in both["curve"]] == [0, 2, 4, 6]
    assert learning(norm, 8, 0.1, [4], 6, 1.0, validation=False)["to_goal"] is None
    first = [next(step for step, right in run["curve"][1:] if right >= 0.05) for run in each]
    assert [run["to_goal"] for run in each] == pytest.approx(first)
    assert both["to_goal"] == pytest.approx(math.sqrt(first[0] * first[1]))


def test_a_run_that_diverges_breaks_off() -> None:
    with pytest.raises(TrainingError, match=r"nan|inf|not finite"):
        learning(lambda: PartNorm(False, False), 8, 1e30, [0], 6, 0.9, validation=False)
