"""Every policy loss, aggregation, importance weight, KL and entropy term, and trace against numpy float64."""

import itertools

import numpy as np
import pytest
import torch

from oracles import policy_oracles as oracle
from rl_core.errors import DataError
from rl_core.losses.advantages import (
    aligned_distillation_advantages,
    distillation_advantages,
    gae,
    returns,
    vtrace,
)
from rl_core.losses.importance import importance_ratios
from rl_core.losses.kl import kl_penalty
from rl_core.losses.supervised import entropy_bonus, token_entropy
from rl_core.losses.turn_advantages import turn_advantages
from rl_core.settings import CriticSettings, PolicySettings, SamplingSettings
from rl_core.trainers.policy_gradient.losses import (
    LossDenominators,
    compute_importance_weights,
    compute_policy_loss,
    compute_token_weights,
)

EXACT = {"rtol": 1e-9, "atol": 1e-9}
CASES = [
    pytest.param(range(30), id="30"),
    pytest.param(range(30, 230), id="200", marks=pytest.mark.slow),
]
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
LEVELS = ("none", "token", "sequence", "geometric")
# name of the loss in the oracle, its options there, the settings that ask for it
LOSSES = {
    "clipped": (
        "clipped",
        dict(low=0.2, high=0.28),
        dict(algorithm="grpo", clip_eps=0.2, clip_eps_high=0.28),
    ),
    "dual clip": (
        "clipped",
        dict(low=0.2, high=0.2, dual=1.5),
        dict(algorithm="ppo", critic=CriticSettings(), dual_clip=1.5),
    ),
    "gspo": (
        "gspo",
        dict(low=0.1, high=0.15),
        dict(algorithm="gspo", clip_eps=0.1, clip_eps_high=0.15),
    ),
    "cispo": ("cispo", dict(high=0.3), dict(algorithm="cispo", clip_eps_high=0.3)),
    "sapo": (
        "sapo",
        dict(positive=1.0, negative=1.4),
        dict(algorithm="sapo", sapo_tau_positive=1.0, sapo_tau_negative=1.4),
    ),
    "dppo tv": (
        "dppo",
        dict(kind="tv", low=0.05, high=0.1),
        dict(algorithm="dppo", clip_eps=0.05, clip_eps_high=0.1),
    ),
    "dppo kl": (
        "dppo",
        dict(kind="kl", low=0.01, high=0.01),
        dict(algorithm="dppo", clip_eps=0.01, dppo_divergence="binary_kl"),
    ),
    "reinforce": ("reinforce", {}, dict(algorithm="reinforce")),
}


def to_tensor(array):
    return torch.tensor(array, dtype=torch.bool if array.dtype == bool else torch.float64)


def count_denominators(case):
    sequences = int(case.mask.any(1).sum())
    tokens = int(case.mask.sum())
    return LossDenominators(tokens, tokens, sequences, sequences, num_rollouts=len(case.mask))


def build_settings(case, aggregation, **more):
    sampling = SamplingSettings(max_completion_tokens=case.max_tokens)
    return PolicySettings(loss_aggregation=aggregation, sampling=sampling, **more)


def split_micro_batches(case, seed):
    """Split row numbers into one to three micro-batches, in any order."""
    rng = np.random.default_rng(seed)
    return [
        part
        for part in np.array_split(rng.permutation(len(case.mask)), int(rng.integers(1, 4)))
        if len(part)
    ]


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses(name, aggregation, cases):
    """Compare loss and gradient of a step in micro-batches, with every importance weight and mask."""
    kind, options, chosen = LOSSES[name]
    weightings = list(itertools.product(LEVELS, LEVELS))
    for seed in cases:
        case = oracle.draw(seed)
        weighting, masking = weightings[seed % len(weightings)]
        if kind == "dppo":  # its ratio has the weights
            weighting = "none"
        settings = build_settings(
            case,
            aggregation,
            importance=weighting,
            importance_cap=1.7,
            importance_mask=masking,
            importance_low=0.6,
            importance_high=1.9,
            **chosen,
        )
        target = case.new if kind == "reinforce" else case.old
        multiplied = oracle.importance(
            case, weighting, 1.7, masking, 0.6, 1.9, target
        ) * np.nan_to_num(case.advantages)
        expected, slope = oracle.policy_loss(
            case, kind, oracle.weights(case, aggregation), multiplied, **options
        )
        new = to_tensor(case.new).requires_grad_()
        total, reported = 0.0, 0.0
        for rows in split_micro_batches(case, seed):
            part = (
                new[rows],
                to_tensor(case.old)[rows],
                to_tensor(case.sampler)[rows],
                to_tensor(case.mask)[rows],
            )
            actual = compute_importance_weights(settings, *part)
            advantages = to_tensor(case.advantages)[rows] * (actual if actual is not None else 1.0)
            loss, metrics = compute_policy_loss(
                settings, part[0], part[1], advantages, part[3], count_denominators(case)
            )
            loss.backward()
            total += float(loss)
            reported += float(metrics["loss"])
        assert total == pytest.approx(expected, rel=1e-9, abs=1e-9), (name, aggregation, seed)
        assert reported == total
        np.testing.assert_allclose(np.nan_to_num(new.grad.numpy()), slope, **EXACT)


@pytest.mark.parametrize("cases", CASES)
def test_kl_and_entropy_terms_have_the_weights_of_the_policy_loss(cases):
    for seed, aggregation, estimator in itertools.product(cases, AGGREGATIONS, ("k1", "k2", "k3")):
        case = oracle.draw(seed)
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal((*case.mask.shape, 7)) * 3
        expected = np.array(
            [
                [oracle.entropy(logits[b, t]) for t in range(case.mask.shape[1])]
                for b in range(len(case.mask))
            ]
        )
        weight, each = oracle.weights(case, aggregation), oracle.weights(case, "token_mean")
        settings, counts = build_settings(case, aggregation), count_denominators(case)
        kl, bonus, kl_mean, entropy_mean = 0.0, 0.0, 0.0, 0.0
        for rows in split_micro_batches(case, seed):
            mask = to_tensor(case.mask)[rows]
            actual = compute_token_weights(settings, mask, counts, torch.float64)
            arguments = {"num_loss_tokens": counts.num_loss_tokens, "loss_weights_BT": actual}
            part, metrics = kl_penalty(
                to_tensor(case.new)[rows],
                to_tensor(case.reference)[rows],
                mask,
                estimator=estimator,
                **arguments,
            )
            kl, kl_mean = kl + float(part), kl_mean + float(metrics["ref_kl"])
            entropy = token_entropy(torch.log_softmax(to_tensor(logits)[rows], dim=-1))
            part, metrics = entropy_bonus(entropy, mask, **arguments)
            bonus, entropy_mean = bonus + float(part), entropy_mean + float(metrics["entropy"])
        assert kl == pytest.approx(oracle.kl(case, estimator, weight), rel=1e-9, abs=1e-9)
        assert kl_mean == pytest.approx(
            oracle.kl(case, estimator, each), rel=1e-9, abs=1e-9
        )  # metrics stay per token
        assert bonus == pytest.approx(-(expected * weight).sum(), rel=1e-9, abs=1e-9)
        assert entropy_mean == pytest.approx((expected * each).sum(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("cases", CASES)
def test_gae_vtrace_and_returns(cases):
    for seed in cases:
        case = oracle.draw(seed)
        rng = np.random.default_rng(seed)
        gamma, lam = (float(rng.choice([0.0, 0.5, 0.97, 1.0])) for _ in range(2))
        rho_cap, c_cap = float(rng.uniform(1.0, 2.5)), float(rng.uniform(0.3, 1.0))
        mask, bootstrap = to_tensor(case.mask), to_tensor(case.bootstrap)
        arguments = (to_tensor(case.rewards), to_tensor(case.values))
        actual = gae(*arguments, mask, gamma=gamma, gae_lambda=lam, bootstrap_B=bootstrap)
        for ours, theirs in zip(actual, oracle.gae(case, gamma, lam), strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, **EXACT)
        ratio = importance_ratios(to_tensor(case.old), to_tensor(case.sampler), mask)
        np.testing.assert_allclose(
            ratio, oracle.ratios(case.old, case.sampler, case.mask, "token"), **EXACT
        )
        traced = vtrace(
            *arguments,
            ratio,
            mask,
            gamma=gamma,
            trace_lambda=lam,
            rho_cap=rho_cap,
            c_cap=c_cap,
            bootstrap_B=bootstrap,
        )
        expected = oracle.vtrace(case, ratio.numpy(), gamma, lam, rho_cap, c_cap)
        for ours, theirs in zip(traced, expected, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, **EXACT)
        on_policy = vtrace(
            *arguments, mask.double(), mask, gamma=gamma, trace_lambda=lam, bootstrap_B=bootstrap
        )
        for ours, theirs in zip(on_policy, actual, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), **EXACT)
        sums = returns(to_tensor(case.rewards), mask, gamma=gamma)
        np.testing.assert_allclose(
            sums.numpy(), oracle.discounted(case.rewards, case.mask, gamma), **EXACT
        )


@pytest.mark.parametrize("cases", CASES)
def test_distillation_advantages(cases):
    for seed, gamma in itertools.product(cases, (0.0, 0.9, 1.0)):
        case = oracle.draw(seed)
        actual = distillation_advantages(
            to_tensor(case.old), to_tensor(case.reference), to_tensor(case.mask), gamma=gamma
        )
        np.testing.assert_allclose(actual.numpy(), oracle.distillation(case, gamma), **EXACT)


def draw_spans(rng, rows, width, numbers):
    """Draw ascending spans of every number of a row, each with one token or more, the rest of the row without loss."""
    spans = np.full((rows, width), -1)
    for b, row_numbers in enumerate(numbers):
        lengths = rng.integers(1, 4, size=len(row_numbers))
        tokens = np.repeat(row_numbers, lengths)[:width]
        assert {*tokens} == {*row_numbers}
        start = int(rng.integers(0, width - len(tokens) + 1))
        spans[b, start : start + len(tokens)] = tokens
    return spans


@pytest.mark.parametrize("cases", CASES)
def test_aligned_distillation_advantages(cases):
    """Compare with sums over spans of other lengths on both sides; spans without loss lie between them."""
    signs = set()
    for seed, gamma in itertools.product(cases, (0.0, 0.9, 1.0)):
        rng = np.random.default_rng([20261130, seed])
        rows = int(rng.integers(1, 5))
        numbers = [np.flatnonzero(rng.random(6) < 0.7) for _ in range(rows)]
        spans = [draw_spans(rng, rows, width, numbers) for width in (18, 20)]
        logprobs = [-rng.exponential(2.0, part.shape) for part in spans]
        actual = aligned_distillation_advantages(
            *map(to_tensor, logprobs), *map(torch.tensor, spans), gamma=gamma
        )
        expected = oracle.aligned_distillation(*logprobs, *spans, gamma)
        np.testing.assert_allclose(actual.numpy(), expected, **EXACT)
        signs |= {*np.sign(expected).flatten().tolist()}
    assert signs == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_spans_of_one_token_have_the_bits_of_distillation_advantages(gamma):
    for seed in range(30):
        case = oracle.draw(seed)
        student, teacher, mask = map(to_tensor, (case.old, case.reference, case.mask))
        student, teacher = student.float(), teacher.float()
        spans = (mask.long().cumsum(1) - 1).masked_fill(~mask, -1)
        aligned = aligned_distillation_advantages(student, teacher, spans, spans, gamma=gamma)
        assert torch.equal(aligned, distillation_advantages(student, teacher, mask, gamma=gamma))


def test_spans_of_one_side_are_refused():
    logprobs, spans = torch.zeros(1, 3), torch.tensor([[0, 0, 1]])
    with pytest.raises(DataError, match="tokens in the same ones"):
        aligned_distillation_advantages(logprobs, logprobs, spans, torch.tensor([[0, 1, 2]]))
    with pytest.raises(DataError, match="at most as many"):
        aligned_distillation_advantages(logprobs, logprobs, spans, torch.tensor([[0, 1, 3]]))
    with pytest.raises(DataError, match="2 rows"):
        two = torch.zeros(2, 3)
        aligned_distillation_advantages(logprobs, two, spans, spans.expand(2, 3))


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
def test_turn_advantages(method, cases):
    """Compare groups of ragged rollouts that revisit states; some turns are not compared."""
    for seed in cases:
        rng = np.random.default_rng([20261129, seed])
        sizes = rng.integers(0 if seed % 3 == 0 else 1, 7, size=int(rng.integers(1, 7)))
        rewards = [rng.standard_normal(size) * rng.choice([0.0, 1.0]) for size in sizes]
        keys = [[None if k == 3 else int(k) for k in rng.integers(0, 4, size)] for size in sizes]
        episodes = rng.standard_normal(len(sizes))
        gamma, episode_weight = float(rng.choice([0.0, 0.5, 0.95, 1.0])), float(rng.choice([0, 1]))
        step_weight = float(rng.uniform(0.1, 3))
        expected = oracle.turn_advantages(
            rewards, keys, episodes, gamma, episode_weight, step_weight, method
        )
        actual = turn_advantages(
            to_tensor(episodes),
            [to_tensor(row) for row in rewards],
            keys,
            gamma=gamma,
            episode_weight=episode_weight,
            step_weight=step_weight,
            method=method,
        )
        for ours, theirs in zip(actual.advantages, expected, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, **EXACT)
        known = [key for row in keys for key in row if key is not None]
        assert actual.set_sizes == [known.count(key) for key in dict.fromkeys(known)]


def test_vtrace_over_hundreds_of_tokens():
    """Check that the doubling windows agree with the plain recurrence, also where traces vanish."""
    rng = np.random.default_rng(0)
    width, gamma, lam = 700, 0.999, 0.97
    ratio = np.exp(0.3 * rng.standard_normal(width))
    rewards, values = rng.standard_normal((2, width))
    error, expected = 0.0, np.zeros(width)
    for t in reversed(range(width)):
        after = values[t + 1] if t + 1 < width else 0.0
        delta = min(1.0, ratio[t]) * (rewards[t] + gamma * after - values[t])
        error = delta + gamma * lam * min(1.0, ratio[t]) * error
        expected[t] = values[t] + error
    mask = torch.ones(1, width, dtype=torch.bool)
    arguments = [to_tensor(part[None]) for part in (rewards, values, ratio)]
    np.testing.assert_allclose(
        vtrace(*arguments, mask, gamma=gamma, trace_lambda=lam)[1][0], expected, **EXACT
    )
