"""Drawing tokens: hand-computed values, counters, edge cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rl_core.cpu import fused_decode
from rl_core.inference import sampling
from rl_core.inference.sampling import (
    apply_repetition_penalty,
    compute_sequence_seed,
    draw_uniforms,
)
from rl_core.settings import SamplingSettings


@pytest.fixture(params=["torch", "compiled"])
def draw(request):
    """Return both implementations of drawing."""
    if request.param == "torch":
        return sampling.draw_tokens
    if fused_decode.load_decode_kernels() is None:
        pytest.skip("needs a C compiler")
    return fused_decode.load_decode_kernels().draw_tokens


def test_inversion_by_hand(draw) -> None:
    """p = (.2, .5, .3): u below .2 gives token 0, below .7 token 1, otherwise token 2; log-probs are of p."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log().repeat(5, 1) + 3.0
    tokens, logprobs = draw(
        logits, torch.tensor([0.0, 0.199, 0.201, 0.699, 0.999], dtype=torch.float64), 1.0
    )
    assert tokens.tolist() == [0, 0, 1, 1, 2]
    assert logprobs.tolist() == pytest.approx(
        [math.log(p) for p in (0.2, 0.2, 0.5, 0.5, 0.3)], rel=1e-5
    )


def test_temperature_changes_the_draw_and_its_logprob(draw) -> None:
    """At temperature 1/2, p^2 / sum: (.04, .25, .09) / .38 has its bounds at .1053 and .7632."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log().repeat(4, 1) + 3.0
    tokens, logprobs = draw(
        logits, torch.tensor([0.104, 0.107, 0.762, 0.765], dtype=torch.float64), 0.5
    )
    assert tokens.tolist() == [0, 1, 1, 2]
    assert logprobs.tolist() == pytest.approx(
        [math.log(p / 0.38) for p in (0.04, 0.25, 0.25, 0.09)], rel=1e-5
    )


def test_a_high_temperature_by_hand(draw) -> None:
    """At temperature 2, sqrt(p) / sum: p = (.16, .36, .16, .16, .16) gives (.4, .6, .4, .4, .4) / 2.2."""
    logits = torch.tensor([0.16, 0.36, 0.16, 0.16, 0.16]).log().repeat(4, 1) - 1.0
    tokens, logprobs = draw(
        logits, torch.tensor([0.181, 0.183, 0.454, 0.456], dtype=torch.float64), 2.0
    )
    assert tokens.tolist() == [0, 1, 1, 2]
    assert logprobs.tolist() == pytest.approx(
        [math.log(p / 2.2) for p in (0.4, 0.6, 0.6, 0.4)], rel=1e-5
    )


def test_greedy_takes_the_most_likely(draw) -> None:
    """p = (.2, .6, .2): its log-probability is that of temperature 1."""
    tokens, logprobs = draw(
        torch.tensor([[0.0, math.log(3), 0.0]]), torch.tensor([0.999], dtype=torch.float64), 0.0
    )
    assert tokens.tolist() == [1] and logprobs.item() == pytest.approx(math.log(0.6), rel=1e-5)


def test_impossible_tokens_are_never_drawn(draw) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(3, 1)
    highest = np.nextafter(1.0, 0.0)
    assert draw(logits, torch.tensor([0.0, 0.5, highest], dtype=torch.float64), 1.0)[
        0
    ].tolist() == [1, 3, 3]


def test_counters() -> None:
    assert np.array_equal(draw_uniforms(7, 5), draw_uniforms(7, 9)[:5]), (
        "number t does not depend on how many are drawn"
    )
    for first in (1, 3, 4, 5, 8, 1001):
        assert np.array_equal(draw_uniforms(7, 6, first), draw_uniforms(7, first + 6)[first:])
    assert len(draw_uniforms(7, 3, 2**31)) == 3, (
        "earlier numbers are not drawn: they would take 16 GiB"
    )
    assert not np.array_equal(draw_uniforms(7, 5), draw_uniforms(8, 5))
    values = draw_uniforms(compute_sequence_seed("a", 1), 20000)
    assert values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 20000)


def test_session_seeds() -> None:
    assert compute_sequence_seed(1, "pixel_grid", "easy", 3, 0) == compute_sequence_seed(
        1, "pixel_grid", "easy", 3, 0
    )
    seeds = {
        compute_sequence_seed(*parts)
        for parts in ((1, 23), (12, 3), (123,), ("1", "2", "3"), (1, 2, 3, 0))
    }
    assert len(seeds) == 5 and all(0 <= seed < 2**128 for seed in seeds)


P = (0.4, 0.3, 0.15, 0.1, 0.05)
RESTRICTED = [
    # settings, relative probabilities of the kept tokens
    (dict(top_k=2), (4, 3, 0, 0, 0)),
    (dict(top_k=5), (8, 6, 3, 2, 1)),
    (dict(top_k=99), (8, 6, 3, 2, 1)),
    (dict(top_p=0.39), (1, 0, 0, 0, 0)),
    (dict(top_p=0.41), (4, 3, 0, 0, 0)),
    (dict(top_p=0.71), (8, 6, 3, 0, 0)),
    (dict(top_p=1e-9), (1, 0, 0, 0, 0)),
    (dict(min_p=0.3), (8, 6, 3, 0, 0)),  # at least 0.12
    (dict(min_p=1.0), (1, 0, 0, 0, 0)),
    (dict(top_k=2, top_p=0.5), (1, 0, 0, 0, 0)),  # 0.4 is 4/7 of the two
    (dict(top_k=2, top_p=0.58), (4, 3, 0, 0, 0)),
    # 0.7 is 82% of 0.85; of all tokens a third one would be needed
    (dict(top_p=0.80, min_p=0.3), (4, 3, 0, 0, 0)),
    (dict(top_p=0.80), (8, 6, 3, 0, 0)),
    (dict(top_k=4, top_p=0.95, min_p=0.2), (8, 6, 3, 2, 0)),
    (dict(top_k=3, temperature=0.5), (64, 36, 9, 0, 0)),  # squares
    (dict(top_p=0.55, temperature=0.5), (1, 0, 0, 0, 0)),  # 0.16 of 0.285 is 56%
    (dict(top_p=0.55, temperature=1.0), (4, 3, 0, 0, 0)),
]


def draw_restricted(settings, logits, uniforms_B):
    return sampling.draw_tokens(
        logits, uniforms_B, settings.temperature, settings if settings.is_restricted else None
    )


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [3, 0, 4, 1, 2]])
@pytest.mark.parametrize(("options", "shares"), RESTRICTED)
def test_sampled_tokens_by_hand(options, shares, order) -> None:
    """Frequencies over an even grid of uniforms equal renormalised probabilities, and so do log-probabilities."""
    settings, count = SamplingSettings(**options), 4000
    expected = torch.tensor(shares, dtype=torch.float64)[order] / sum(shares)
    logits = (torch.tensor(P).log()[order] + 2.0).repeat(count, 1)
    tokens, logprobs = draw_restricted(
        settings, logits, (torch.arange(count, dtype=torch.float64) + 0.5) / count
    )
    frequencies = torch.bincount(tokens, minlength=5) / count
    assert torch.allclose(frequencies.double(), expected, atol=1.01 / count)
    assert torch.allclose(logprobs.double(), expected[tokens].log(), atol=1e-5)


def test_greedy_ignores_restrictions() -> None:
    logits = torch.tensor(P).log()[None]
    for options in (
        dict(top_k=3),
        dict(top_p=0.2),
        dict(min_p=0.9),
        dict(top_k=1, top_p=0.1, min_p=1.0),
    ):
        tokens, logprobs = draw_restricted(
            SamplingSettings(temperature=0, **options), logits, torch.zeros(1).double()
        )
        assert tokens.tolist() == [0] and logprobs.item() == pytest.approx(math.log(0.4), rel=1e-5)


def test_equally_likely_tokens_stay_together() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]])
    for options in (dict(top_k=2), dict(top_p=0.5)):
        _, logprob = draw_restricted(SamplingSettings(**options), logits, torch.zeros(1).double())
        assert logprob.item() == pytest.approx(
            math.log(math.e / (math.e**2 + 3 * math.e)), rel=1e-5
        )


@pytest.mark.parametrize(
    "options", [dict(top_p=0.9), dict(top_p=0.999), dict(top_k=50, top_p=0.9, min_p=0.01)]
)
def test_large_vocabularies_by_numpy(options) -> None:
    """A flat row needs the whole vocabulary sorted, a steep one does not; rows are independent."""
    settings = SamplingSettings(**options)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5000, generator=generator) * torch.tensor([[0.1], [1.0], [4.0], [9.0]])
    uniforms_B = torch.rand(4, generator=generator, dtype=torch.float64)
    tokens, logprobs = draw_restricted(settings, logits, uniforms_B)
    for row in range(4):
        alone = draw_restricted(settings, logits[row : row + 1], uniforms_B[row : row + 1])
        assert alone[0].item() == tokens[row] and alone[1].item() == logprobs[row]
        p = compute_restricted_by_numpy(logits[row].double().numpy(), settings)
        assert logprobs[row].item() == pytest.approx(math.log(p[tokens[row]]), abs=1e-4)
        assert np.searchsorted(p.cumsum(), uniforms_B[row].item(), side="right") == tokens[row]


def compute_restricted_by_numpy(logits, settings):
    """Compute restricted probabilities token by token in order of likelihood."""
    p = np.exp(logits / settings.temperature - (logits / settings.temperature).max())
    p[p < settings.min_p] = 0.0
    ranks = np.argsort(-p)
    if settings.top_k:
        p[ranks[settings.top_k :]] = 0.0
    p /= p.sum()
    mass = 0.0
    for token in ranks:
        if mass >= settings.top_p:
            p[token] = 0.0
        mass += p[token]
    return p / p.sum()


def test_penalty_by_hand() -> None:
    """Seen tokens: 2 is divided, -2 multiplied, 0 unchanged."""
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 0.0], [2.0, -2.0, 2.0, -2.0, 0.0]])
    seen = torch.tensor([[True, True, False, False, True], [False] * 5])
    assert apply_repetition_penalty(logits, seen, 4.0).tolist() == [
        [0.5, -8.0, 2.0, -2.0, 0.0],
        logits[1].tolist(),
    ]
    assert apply_repetition_penalty(logits, seen, 0.5)[0].tolist() == [4.0, -1.0, 2.0, -2.0, 0.0]


@pytest.mark.parametrize(
    ("options", "processor"),
    [
        ({"min_p": 0.2}, MinPLogitsWarper(0.2)),
        ({"top_k": 5}, TopKLogitsWarper(5)),
        ({"top_p": 0.7}, TopPLogitsWarper(0.7)),
    ],
    ids=["min_p", "top_k", "top_p"],
)
def test_each_restriction_is_that_of_transformers(options, processor) -> None:
    """Each restriction alone, with a temperature: the same tokens with the same log-probs. (transformers applies
    min_p last.)
    """
    logits_BV = torch.randn(3, 40, generator=torch.Generator().manual_seed(3)) * 2
    expected_BV = torch.log_softmax(
        processor(None, TemperatureLogitsWarper(0.7)(None, logits_BV)), dim=-1
    )
    uniforms = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1]
    for logits_V, expected_V in zip(logits_BV, expected_BV, strict=True):
        tokens, logprobs = sampling.draw_tokens(
            logits_V.expand(4000, -1), uniforms, 0.7, SamplingSettings(**options)
        )
        assert torch.allclose(logprobs, expected_V[tokens], atol=1e-5)
        likely = set(torch.nonzero(expected_V > math.log(1e-3)).flatten().tolist())
        assert (
            likely
            <= set(tokens.tolist())
            <= set(torch.nonzero(expected_V.isfinite()).flatten().tolist())
        )


def test_the_penalty_is_that_of_transformers() -> None:
    logits_BV = torch.randn(2, 12, generator=torch.Generator().manual_seed(4))
    ids_BT = torch.tensor([[1, 5, 5, 7], [0, 2, 3, 11]])
    seen_BV = torch.zeros(2, 12, dtype=torch.bool).scatter(1, ids_BT, True)
    expected_BV = RepetitionPenaltyLogitsProcessor(1.4)(ids_BT, logits_BV.clone())
    assert torch.allclose(apply_repetition_penalty(logits_BV, seen_BV, 1.4), expected_BV)


def test_ids_without_text_by_hand(draw) -> None:
    """p = (.2, .5, .3) without token 1: u below .4 gives token 0; log-probs are those of all tokens, as in training."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log().repeat(3, 1) + 3.0
    never = torch.tensor([1])
    uniforms = torch.tensor([0.0, 0.399, 0.401], dtype=torch.float64)
    tokens, logprobs = draw(logits, uniforms, 1.0, textless_ids=never)
    assert tokens.tolist() == [0, 0, 2]
    assert logprobs.tolist() == pytest.approx([math.log(p) for p in (0.2, 0.2, 0.3)], rel=1e-5)
    tokens, logprobs = draw(logits, uniforms, 0.0, textless_ids=never)
    assert tokens.tolist() == [2] * 3
    assert logprobs.tolist() == pytest.approx([math.log(0.3)] * 3, rel=1e-5)


def test_ids_without_text_at_any_place(draw) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 83, generator=generator) * 3
    never = torch.tensor([0, 7, 8, 15, 16, 17, 40, 79, 80, 81, 82])
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1 - 1e-16])
    for temperature in (0.0, 1.0, 0.3):
        tokens, logprobs = draw(logits, uniforms, temperature, textless_ids=never)
        expected, _ = sampling.draw_tokens(
            logits.index_fill(1, never, -torch.inf), uniforms, temperature
        )
        assert tokens.tolist() == expected.tolist()
        all_logprobs = sampling.compute_log_probabilities(logits, temperature)
        torch.testing.assert_close(logprobs, all_logprobs.gather(1, tokens[:, None])[:, 0])


def test_a_restriction_keeps_tokens_with_text() -> None:
    """p = (.2, .5, .3), the two best with text: (.2, .3) / .5."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log().repeat(2, 1)
    tokens, logprobs = sampling.draw_tokens(
        logits,
        torch.tensor([0.39, 0.41], dtype=torch.float64),
        1.0,
        SamplingSettings(top_k=2),
        torch.tensor([1]),
    )
    assert tokens.tolist() == [0, 2]
    assert logprobs.tolist() == pytest.approx([math.log(0.4), math.log(0.6)], rel=1e-5)
