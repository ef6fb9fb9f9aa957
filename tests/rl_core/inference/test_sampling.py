"""Drawing tokens: values by hand, counters, edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rl_core.cpu import fused_decode
from rl_core.inference import sampling
from rl_core.inference.sampling import sequence_seed, uniforms


@pytest.fixture(params=["torch", "compiled"])
def draw(request):
    """Both ways to draw tokens."""
    if request.param == "torch":
        return sampling.draw
    if fused_decode.load() is None:
        pytest.skip("needs a C compiler")
    return fused_decode.load().draw


def test_inversion_by_hand(draw) -> None:
    """p = (.2, .5, .3): u below .2 gives token 0, below .7 token 1, else token 2; log-probs are of p."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log().repeat(5, 1) + 3.0
    tokens, logprobs = draw(logits, torch.tensor([0.0, 0.199, 0.201, 0.699, 0.999], dtype=torch.float64), 1.0)
    assert tokens.tolist() == [0, 0, 1, 1, 2]
    assert logprobs.tolist() == pytest.approx([math.log(p) for p in (0.2, 0.2, 0.5, 0.5, 0.3)], rel=1e-5)


def test_temperature_changes_the_draw_and_its_logprob(draw) -> None:
    """At temperature 1/2, p^2 / sum: (.04, .25, .09) / .38 has its bounds at .1053 and .7632."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log().repeat(4, 1) + 3.0
    tokens, logprobs = draw(logits, torch.tensor([0.104, 0.107, 0.762, 0.765], dtype=torch.float64), 0.5)
    assert tokens.tolist() == [0, 1, 1, 2]
    assert logprobs.tolist() == pytest.approx([math.log(p / 0.38) for p in (0.04, 0.25, 0.25, 0.09)], rel=1e-5)


def test_a_high_temperature_by_hand(draw) -> None:
    """At temperature 2, sqrt(p) / sum: p = (.16, .36, .16, .16, .16) gives (.4, .6, .4, .4, .4) / 2.2."""
    logits = torch.tensor([0.16, 0.36, 0.16, 0.16, 0.16]).log().repeat(4, 1) - 1.0
    tokens, logprobs = draw(logits, torch.tensor([0.181, 0.183, 0.454, 0.456], dtype=torch.float64), 2.0)
    assert tokens.tolist() == [0, 1, 1, 2]
    assert logprobs.tolist() == pytest.approx([math.log(p / 2.2) for p in (0.4, 0.6, 0.6, 0.4)], rel=1e-5)


def test_greedy_takes_the_most_likely(draw) -> None:
    """p = (.2, .6, .2): its log-probability is that of temperature 1."""
    tokens, logprobs = draw(torch.tensor([[0.0, math.log(3), 0.0]]), torch.tensor([0.999], dtype=torch.float64), 0.0)
    assert tokens.tolist() == [1] and logprobs.item() == pytest.approx(math.log(0.6), rel=1e-5)


def test_impossible_tokens_are_never_drawn(draw) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(3, 1)
    highest = np.nextafter(1.0, 0.0)
    assert draw(logits, torch.tensor([0.0, 0.5, highest], dtype=torch.float64), 1.0)[0].tolist() == [1, 3, 3]


def test_counters() -> None:
    assert np.array_equal(uniforms(7, 5), uniforms(7, 9)[:5]), "number t does not depend on how many are drawn"
    assert not np.array_equal(uniforms(7, 5), uniforms(8, 5))
    values = uniforms(sequence_seed("a", 1), 20000)
    assert values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 20000)


def test_session_seeds() -> None:
    assert sequence_seed(1, "pixel_grid", "easy", 3, 0) == sequence_seed(1, "pixel_grid", "easy", 3, 0)
    seeds = {sequence_seed(*parts) for parts in ((1, 23), (12, 3), (123,), ("1", "2", "3"), (1, 2, 3, 0))}
    assert len(seeds) == 5 and all(0 <= seed < 2**128 for seed in seeds)
