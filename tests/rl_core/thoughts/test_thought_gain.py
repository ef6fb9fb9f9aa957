"""Gain of a thought: worked values, limits, errors."""

import math

import pytest
import torch

from rl_core.errors import DataError
from rl_core.thoughts.episodes import compute_thought_gain

WITH = torch.tensor([math.log(0.8), math.log(0.1), math.log(0.5)])
WITHOUT = torch.tensor([math.log(0.2), math.log(0.4), math.log(0.5)])


def test_logprob_gain():
    gains = compute_thought_gain(WITH, WITHOUT)
    # log(.8 / .2) = log 4, log(.1 / .4) = -log 4, 0
    torch.testing.assert_close(gains, torch.tensor([1.3862944, -1.3862944, 0.0]))


def test_correctness_gain():
    torch.testing.assert_close(
        compute_thought_gain(WITH, WITHOUT, kind="correctness_gain"), torch.tensor([0.6, -0.3, 0.0])
    )


def test_clip_holds_on_both_sides():
    torch.testing.assert_close(
        compute_thought_gain(WITH, WITHOUT, clip=0.5), torch.tensor([0.5, -0.5, 0.0])
    )
    gains = compute_thought_gain(WITH, WITHOUT, kind="correctness_gain", clip=0.5)
    torch.testing.assert_close(gains, torch.tensor([0.5, -0.3, 0.0]))


def test_no_gradient():
    assert not compute_thought_gain(WITH.clone().requires_grad_(), WITHOUT).requires_grad


@pytest.mark.parametrize(
    ("with_thought", "without", "options", "part"),
    [
        (WITH, WITHOUT[:2], {}, r"\[N\]"),
        (WITH[None], WITHOUT[None], {}, r"\[N\]"),
        (WITH, WITHOUT, {"clip": 0}, "clip 0"),
        (WITH, WITHOUT, {"kind": "gain"}, "'gain'"),
        (torch.tensor([math.nan]), torch.tensor([0.0]), {}, "with_thought"),
        (torch.tensor([0.0]), torch.tensor([-math.inf]), {}, "without"),
        (torch.tensor([0.3]), torch.tensor([0.0]), {}, "above 0"),
    ],
)
def test_refusals(with_thought, without, options, part):
    with pytest.raises(DataError, match=part):
        compute_thought_gain(with_thought, without, **options)
