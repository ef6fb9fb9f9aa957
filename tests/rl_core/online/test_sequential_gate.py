"""The gate: p-values by hand, decisions, and its error over the life of a service, by simulation."""

import numpy as np
import pytest

from rl_core.analysis.significance_tests import compute_spent_alpha
from rl_core.errors import DataError
from rl_core.online.canary_gate import SequentialGateTest
from rl_core.settings import OnlineGateSettings

MARGIN = 0.05


def gate(**options):
    return SequentialGateTest(
        OnlineGateSettings(**{"margin": MARGIN, "alpha": 0.05, "max_episodes": 400, **options})
    )


def stakes(margin):
    return 0.999 * (np.arange(1, 65) / 64) ** 2 / max(1 - margin, 0.02)


def test_p_values_by_hand():
    found = gate()
    found.open_candidate(10)
    assert found.compute_p_value("live") == 1.0
    for candidate, live, champion in ((1, 0, 1), (0, 1, 0), (1, 1, 0), (1, 0, 1)):
        found.observe_episode(candidate, live, champion)
    bets = stakes(MARGIN)
    # against the live model +1 -1 0 +1, against the champion 0 0 +1 0, each plus the margin
    live = np.mean((1 + bets * 1.05) ** 2 * (1 - bets * 0.95) * (1 + bets * 0.05))
    champion = np.mean((1 + bets * 0.05) ** 3 * (1 + bets * 1.05))
    assert found.compute_p_value("live") == pytest.approx(min(1, 1 / live))
    assert found.compute_p_value("champion") == pytest.approx(min(1, 1 / champion))
    assert found.decide_candidate() == "wait" and found.version == 10


def played(found, outcomes):
    """Decision, and the number of episodes that it took."""
    found.open(1)
    for number, outcome in enumerate(outcomes, start=1):
        found.observe(*outcome)
        decision = found.decide_candidate()
        if decision != "wait":
            return decision, number
    return "wait", len(outcomes)


def test_decisions():
    assert played(gate(), [(1, 0, 0)] * 400)[0] == "promote"
    assert played(gate(), [(0, 1, 0)] * 400) == ("reject", played(gate(), [(0, 1, 0)] * 400)[1])
    assert played(gate(), [(0, 1, 0)] * 400)[1] < 10
    # as good as the live one, not as the champion
    assert played(gate(), [(1, 0, 1), (0, 1, 1)] * 200)[0] != "promote"
    # a model that never differs is not worse: exactly when its wealth reaches 1 / level
    needed = next(
        n
        for n in range(1, 400)
        if np.mean((1 + stakes(MARGIN) * MARGIN) ** n) >= 1 / compute_spent_alpha(0.05, 1)
    )
    assert played(gate(), [(1, 1, 1)] * 400) == ("promote", needed)
    assert played(gate(max_episodes=20), [(1, 1, 1)] * 20) == ("reject", 20)


def test_the_level_falls_with_every_candidate_and_survives_a_restart():
    found = gate(max_episodes=1)
    for version in range(3):
        found.open_candidate(version)
        found.observe_episode(1, 1, 1)
        assert found.decide_candidate() == "reject"
    found.open_candidate(9)
    found.observe_episode(1, 0, 0.5)
    other = gate(max_episodes=1)
    other.load_state_dict(found.state_dict())
    assert (
        other.level == pytest.approx(0.05 / 20)
        and other.compute_metrics() == found.compute_metrics()
    )
    assert other.decide_candidate() == found.decide_candidate() == "reject"
    with pytest.raises(DataError, match="open one first"):
        other.observe_episode(1, 1, 1)
    other.open_candidate(10)
    with pytest.raises(DataError, match="still being tested"):
        other.open_candidate(11)
    with pytest.raises(DataError, match="between 0 and 1"):
        other.observe_episode(1, 2, 0)


def promotions(mean, candidates, services, *, rng, discordant=0.3, episodes=300, look=20):
    """[services] candidates that a service promotes: each is looked at every `look` episodes.

    The difference is -1 or 1 in a share `discordant` of the episodes, with this mean. Wealth as the gate computes it.
    """
    up = (discordant + mean) / 2
    bets = stakes(MARGIN)
    logs = np.log1p(np.array([1 + MARGIN, MARGIN - 1, MARGIN])[:, None] * bets)  # of d = 1, -1, 0
    promoted = np.zeros(services, dtype=int)
    for number in range(1, candidates + 1):
        shares = [up, discordant - up, 1 - discordant]
        counts = rng.multinomial(look, shares, size=(services, episodes // look)).cumsum(1)
        wealth = counts @ logs
        top = wealth.max(-1, keepdims=True)
        log_mean = (top + np.log(np.exp(wealth - top).mean(-1, keepdims=True)))[..., 0]
        promoted += (log_mean >= -np.log(compute_spent_alpha(0.05, number))).any(1)
    return promoted


def test_the_simulation_computes_what_the_gate_does():
    rng = np.random.default_rng(3)
    draws = rng.choice([1, -1, 0], p=[0.35, 0.1, 0.55], size=120)
    found = gate()
    found.open_candidate(1)
    logs = np.zeros(64)
    for difference in draws:
        found.observe_episode(max(difference, 0), max(-difference, 0), 0 if difference > 0 else 1)
        logs += np.log1p((difference + MARGIN) * stakes(MARGIN))
    assert found.compute_p_value("live") == pytest.approx(min(1, 1 / np.exp(logs).mean()))


def test_a_thousand_looks_promote_a_worse_model_at_most_at_the_stated_rate():
    rng = np.random.default_rng(0)
    # 66 candidates of 15 looks each: 990 looks
    worse = promotions(-MARGIN, 1000 // 15, 60, rng=rng)
    # 60 services at 5% or less: more than 7 come with a chance of 2.6%
    assert (worse > 0).sum() <= 7
    better = promotions(0.1, 10, 60, rng=rng)
    assert (better > 0).mean() > 0.9  # the gate lets through what is better


@pytest.mark.slow
def test_the_error_over_the_life_of_many_services():
    """1,000 candidates, 15 looks at each; the hypothesis at its edge, where the error is largest."""
    worse = promotions(-MARGIN, 1000, 400, rng=np.random.default_rng(1))
    assert (worse > 0).mean() <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)
    unchanged = promotions(0.0, 1000, 50, rng=np.random.default_rng(2))
    assert (unchanged > 0).mean() > 0.1  # an unchanged model may go live: it is not worse
