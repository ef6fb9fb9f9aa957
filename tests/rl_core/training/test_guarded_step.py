"""A guarded step: what is copied before it, what is restored beyond a limit, and what is not."""

import math

import pytest
import torch
from torch import nn

from rl_core.settings import OptimizerSettings
from rl_core.training.guarded_step import run_guarded_step
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.types import TrainBatch


class Counter:
    """State with a value that a step adds 1 to."""

    def __init__(self) -> None:
        self.value, self.num_restored = 0, 0

    def copy_state(self):
        return self.value

    def restore_state(self, state):
        self.value, self.num_restored = state, self.num_restored + 1

    def add_one(self):
        self.value += 1
        return {"value": float(self.value)}


@pytest.mark.parametrize(
    ("kls", "limits", "is_refused"),
    [
        ([0.5], [0.5], False),  # the limit itself is allowed
        ([0.5001], [0.5], True),
        ([math.nan], [0.5], True),
        ([0.1, 0.9], [0.5, 1.0], False),
        ([0.1, 0.9], [0.5, 0.8], True),  # one of several
        ([], [0.5], False),  # the step changed nothing
    ],
)
def test_a_step_beyond_a_limit_is_undone(kls, limits, is_refused):
    counter = Counter()
    result = run_guarded_step(counter, counter.add_one, lambda: kls, limits)
    assert (result.is_refused, result.kls, result.metrics) == (is_refused, kls, {"value": 1.0})
    assert (counter.value, counter.num_restored) == ((0, 1) if is_refused else (1, 0))


def test_the_limits_are_compared_after_the_step_and_each_has_its_kl():
    counter, seen = Counter(), []
    run_guarded_step(counter, counter.add_one, lambda: seen.append(counter.value) or [0.0], [1.0])
    assert seen == [1]
    with pytest.raises(ValueError, match=r"shorter|longer"):
        run_guarded_step(counter, counter.add_one, lambda: [0.0], [1.0, 1.0])


def test_an_error_of_the_step_leaves_the_state_to_the_caller():
    counter = Counter()
    with pytest.raises(ZeroDivisionError):
        run_guarded_step(counter, lambda: 1 / 0, lambda: [0.0], [1.0])
    assert counter.num_restored == 0


def test_weights_moments_and_averages_are_restored_but_the_count_of_steps_goes_on():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    step = OptimizerStep(model, OptimizerSettings(learning_rate=0.1, ema_decay=0.5), 10)
    batch = build_batch()

    def run_step():
        return step.run_step([batch], lambda _: (model.weight.square().sum(), {}))

    run_step()
    weights, state = model.weight.detach().clone(), str(step.state_dict())
    step.learning_rate_scale = 1.0
    assert run_guarded_step(step, run_step, lambda: [2.0], [1.0]).is_refused
    assert torch.equal(model.weight, weights) and step.num_steps == 2
    assert str(step.state_dict() | {"num_steps": 1}) == state
    assert not run_guarded_step(step, run_step, lambda: [0.5], [1.0]).is_refused
    assert not torch.equal(model.weight, weights) and step.num_steps == 3


def build_batch():
    ones = torch.ones(1, 2, dtype=torch.long)
    return TrainBatch(input_ids_BS=ones, attention_mask_BS=ones, loss_mask_BS=ones.bool())
