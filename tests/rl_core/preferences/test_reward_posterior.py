"""The posterior of a linear reward head: updates and information by hand, and fewer labels than by chance."""

import math

import numpy as np
import pytest

from rl_core.errors import DataError
from rl_core.preferences.question_order import (
    RewardPosterior,
    compute_principal_axes,
    project_head_on_axes,
)


def integrate_posterior(mean, variance, labels, span=40.0):
    """Return mean and variance of a head of one feature after labels (x, label), on a fine grid."""
    w = np.linspace(mean - span, mean + span, 400_001)
    log_density = -((w - mean) ** 2) / (2 * variance)
    for x, label in labels:
        log_density += label * w * x - np.logaddexp(0, w * x)
    density = np.exp(log_density - log_density.max())
    density /= density.sum()
    exact = (density * w).sum()
    return exact, (density * (w - exact) ** 2).sum()


def test_one_update_is_exact():
    """Prefer the first answer with one feature, prior N(0, 4) and x = 1: E[w] = 2 E[w sigmoid(w)]."""
    posterior = RewardPosterior(np.array([[1.0], [2.0]]), prior_variance=4.0)
    posterior.update(0, 1.0)
    mean, variance = integrate_posterior(0, 4.0, [(1, 1)])
    assert mean == pytest.approx(1.2114, abs=1e-4)  # one Newton step gave 1
    assert posterior.mean_D[0] == pytest.approx(mean, rel=1e-6)
    assert posterior._covariance_DD[0, 0] == pytest.approx(variance, rel=1e-6)
    assert posterior._variance_N == pytest.approx([variance, 4 * variance], rel=1e-6)
    assert posterior.compute_probabilities() == pytest.approx(
        [1 / (1 + math.exp(-mean)), 1 / (1 + math.exp(-2 * mean))]
    )
    before = posterior.mean_D.copy()
    posterior.update(0, 0.5)  # a tie moves the mean towards 0
    assert 0 < posterior.mean_D[0] < before[0]


@pytest.mark.parametrize("variance", [0.5, 4.0])
@pytest.mark.parametrize(
    "labels",
    [
        [(1, 1), (1, 1)],
        [(1, 1)] * 6,
        [(2, 1), (0.5, 0), (1, 0.5), (1, 1)],
        [(1, 1), (1, 0)] * 5,
        [(3, 0)] * 3,
    ],
)
def test_many_updates_are_close_to_the_exact_posterior(labels, variance):
    posterior = RewardPosterior(np.array([[x] for x, _ in labels]), prior_variance=variance)
    for pair, (_, label) in enumerate(labels):
        posterior.update(pair, label)
    mean, exact = integrate_posterior(0, variance, labels, span=20 * math.sqrt(variance))
    # in standard deviations of the exact posterior, which is what the choice of pairs depends on
    assert abs(posterior.mean_D[0] - mean) < 0.1 * math.sqrt(exact)
    assert posterior._covariance_DD[0, 0] == pytest.approx(exact, rel=0.3)


def test_equal_answers_teach_nothing():
    posterior = RewardPosterior(np.zeros((1, 2)))
    posterior.update(0, 1.0)
    assert posterior.mean_D.tolist() == [0, 0] and posterior.compute_information() == [0]


def test_a_refit_equals_updates_label_by_label():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(20, 4))
    updated, refitted = (RewardPosterior(features, mean_D=np.ones(4)) for _ in range(2))
    labels = [(int(rng.integers(20)), float(rng.choice([0, 0.5, 1]))) for _ in range(30)]
    for pair, label in labels:
        updated.update(pair, label)
    refitted.update(3, 1.0)  # not part of the labels
    refitted.refit(labels)
    assert np.allclose(updated.mean_D, refitted.mean_D) and np.allclose(
        updated._variance_N, refitted._variance_N
    )
    assert np.allclose(updated.compute_information(), refitted.compute_information())


def test_information_by_numerical_integration():
    posterior = RewardPosterior(
        np.array([[1.0], [0.2], [3.0]]), prior_variance=2.0, mean_D=np.array([0.7])
    )
    grid = np.linspace(-20, 20, 40001)
    weight = np.exp(-((grid - 0.7) ** 2) / 4)
    weight /= weight.sum()

    def entropy(p):
        p = np.clip(p, 1e-15, 1 - 1e-15)
        return -(p * np.log2(p) + (1 - p) * np.log2(1 - p))

    for x, information in zip((1.0, 0.2, 3.0), posterior.compute_information(), strict=True):
        p = 1 / (1 + np.exp(-grid * x))
        exact = entropy((weight * p).sum()) - (weight * entropy(p)).sum()
        # tolerance of the closed form
        assert information == pytest.approx(exact, rel=0.1, abs=0.002)


def test_a_known_direction_is_not_asked_again():
    posterior = RewardPosterior(np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]]))
    for _ in range(8):
        posterior.update(0, 1.0)
    information = posterior.compute_information()
    assert information[1] > 3 * information[2] > 0


def test_axes_keep_differences_and_heads():
    rng = np.random.default_rng(0)
    states = rng.normal(size=(300, 12)) @ rng.normal(size=(12, 40))
    axes = compute_principal_axes(states, max_features=12)
    features = states @ axes
    assert features.shape == (300, 12) and (features**2).sum(1).mean() == pytest.approx(1)
    head = states.T @ rng.normal(size=300)  # within the span of the states
    assert features @ project_head_on_axes(head, axes) == pytest.approx(states @ head)
    with pytest.raises(DataError, match="finite"):
        compute_principal_axes(np.array([[np.nan]]))


def test_fewer_labels_than_by_chance():
    """Compare informative with random questions about similar pairs, for 40 labels without noise and 5 seeds."""
    gains = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        scales = np.where(np.arange(24) < 4, 3.0, 0.6)
        pairs = (
            rng.normal(size=(600, 24)) * scales * np.where(rng.random((600, 1)) < 0.85, 0.15, 1.0)
        )
        truth = rng.normal(size=24) / scales
        test = rng.normal(size=(2000, 24)) * scales
        accuracy = []
        for by_information in (True, False):
            posterior = RewardPosterior(pairs)
            remaining = set(range(600))
            for _ in range(40):
                candidates = np.array(sorted(remaining))
                chosen = int(
                    candidates[posterior.compute_information()[candidates].argmax()]
                    if by_information
                    else rng.choice(candidates)
                )
                remaining.discard(chosen)
                posterior.update(chosen, float(pairs[chosen] @ truth > 0))
            accuracy.append(
                ((posterior.compute_probabilities(test) > 0.5) == (test @ truth > 0)).mean()
            )
        gains.append(accuracy[0] - accuracy[1])
    assert np.mean(gains) > 0.02 and min(gains) > -0.02
