"""Turn embeddings: the right tokens are averaged; padding and other rows have no influence."""

import pytest
import torch
from helpers.tiny import nano
from hypothesis import given
from hypothesis import strategies as st

from rl_core.models.hidden_states import compute_turn_embeddings, find_turn_spans
from rl_core.types import Rollout, Trajectory


def build_rollout(prompt, completion, mask):
    trajectory = Trajectory("e", "l", "k", 0, "p", "t")
    return Rollout(prompt, completion, mask, [0.0] * len(mask), trajectory)


def test_spans_by_hand():
    t, f = True, False
    assert find_turn_spans([t, t, f, f, f, t]) == [(0, 2, 5), (5, 6, 6)]
    assert find_turn_spans([t, f]) == [(0, 1, 2)]
    assert find_turn_spans([t]) == [(0, 1, 1)] and find_turn_spans([]) == []


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_spans_are_the_turns(turns, last):
    mask, expected = [], []
    for acted, seen in turns:
        expected.append((len(mask), len(mask) + acted, len(mask) + acted + seen))
        mask += [True] * acted + [False] * seen
    expected.append((len(mask), len(mask) + last, len(mask) + last))
    assert find_turn_spans(mask + [True] * last) == expected


@pytest.mark.parametrize("max_tokens", [1, 1000])
def test_states_are_means_of_the_last_hidden_states(max_tokens):
    model = nano()
    long = build_rollout([5, 6, 7], [8, 9, 10, 1, 2, 3], [True, True, False, False, False, True])
    short = build_rollout([9], [4], [True])
    embeddings = compute_turn_embeddings(model, [short, long], pad_id=0, max_tokens=max_tokens)
    with torch.no_grad():
        ids = torch.tensor([[5, 6, 7, 8, 9, 10, 1, 2, 3]])
        hidden = model(ids, output_hidden_states=True).hidden_states[-1][0]
    expected = torch.stack([hidden[:3].mean(0), hidden[3:8].mean(0), hidden[8]])
    assert torch.allclose(embeddings[1].states_NH, expected, atol=1e-5)
    assert torch.allclose(
        embeddings[1].actions_NH, torch.stack([hidden[3:5].mean(0), hidden[8]]), atol=1e-5
    )
    assert embeddings[1].is_observed == [True, False] and embeddings[0].is_observed == [False]
    assert (
        embeddings[0].states_NH.shape == (2, hidden.shape[1])
        and not embeddings[0].states_NH.requires_grad
    )
    assert torch.equal(embeddings[0].states_NH[1], embeddings[0].actions_NH[0])  # no observation
