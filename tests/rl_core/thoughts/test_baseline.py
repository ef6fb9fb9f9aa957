"""The baseline: states pooled over prefixes, a head that learns."""

import pytest
import torch

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import DataError
from rl_core.models import causal_lm
from rl_core.settings import ModelSettings
from rl_core.thoughts.baseline import BaselineHead, LearnedBaseline, compute_pooled_states


@pytest.fixture(scope="module")
def model():
    tokenizer = train_tokenizer(["abc"], 300)
    return causal_lm.create_model(
        ModelSettings(preset="nano", context=32, device="cpu"), tokenizer, 0
    )


def test_pooled_states_are_means_of_each_prefix_alone(model):
    rows, ends = [[5, 9, 7, 11, 3], [8, 2, 6]], [[2, 5], [1]]
    for max_tokens in (1, 1000):  # padding and batching change nothing
        actual = compute_pooled_states(model, rows, ends, pad_id=0, max_tokens=max_tokens)
        for row, places, states in zip(rows, ends, actual, strict=True):
            for index, state in zip(places, states, strict=True):
                hidden = model.model(torch.tensor([row[:index]])).last_hidden_state[0]
                torch.testing.assert_close(state, hidden.mean(0), atol=1e-5, rtol=1e-4)
    assert not actual[0].requires_grad


@pytest.mark.parametrize("end", [0, 4])
def test_ends_lie_within_their_row(model, end):
    with pytest.raises(DataError, match="row 0"):
        compute_pooled_states(model, [[1, 2, 3]], [[end]], pad_id=0)


def test_the_head_starts_at_zero():
    states = torch.randn(7, 32)
    assert torch.equal(BaselineHead(32)(states), torch.zeros(7))


def test_it_learns_a_constant():
    baseline = LearnedBaseline(32, 0.05, torch.device("cpu"))
    states = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    assert baseline.fit_returns(states, torch.full((16,), 1.5)) == pytest.approx(
        0.5 * 1.5**2
    )  # .5 MSE at value 0
    for _ in range(200):
        baseline.fit_returns(states, torch.full((16,), 1.5))
    torch.testing.assert_close(
        baseline.predict_values(states), torch.full((16,), 1.5), atol=0.05, rtol=0
    )


def test_it_learns_what_differs_between_states():
    baseline = LearnedBaseline(32, 0.05, torch.device("cpu"))
    states = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    returns = states[:, 0] - states[:, 3] + 2
    for _ in range(300):
        loss = baseline.fit_returns(states, returns)
    assert loss < 0.02  # predicting the mean leaves 1
