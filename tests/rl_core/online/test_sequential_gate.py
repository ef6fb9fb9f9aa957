"""The sequential test of the gate: p-values and decisions by hand, lifetime error by simulation."""

import numpy as np
import pytest

from rl_core.analysis.significance_tests import compute_spent_alpha
from rl_core.errors import DataError
from rl_core.online.canary_gate import SequentialGateTest
from rl_core.settings import OnlineGateSettings

MARGIN = 0.05


def make_gate(**options):
    return SequentialGateTest(
        OnlineGateSettings(**{"margin": MARGIN, "alpha": 0.05, "max_episodes": 400, **options})
    )


def compute_bets(margin):
    return 0.999 * (np.arange(1, 65) / 64) ** 2 / max(1 - margin, 0.02)


def test_p_values_by_hand():
    gate = make_gate()
    gate.open_candidate(10)
    assert gate.compute_p_value("live") == 1.0
    for candidate, live, champion in ((1, 0, 1), (0, 1, 0), (1, 1, 0), (1, 0, 1)):
        gate.observe_episode(candidate, live, champion)
    bets = compute_bets(MARGIN)
    # against the live model +1 -1 0 +1, against the champion 0 0 +1 0, each plus the margin
    live = np.mean((1 + bets * 1.05) ** 2 * (1 - bets * 0.95) * (1 + bets * 0.05))
    champion = np.mean((1 + bets * 0.05) ** 3 * (1 + bets * 1.05))
    assert gate.compute_p_value("live") == pytest.approx(min(1, 1 / live))
    assert gate.compute_p_value("champion") == pytest.approx(min(1, 1 / champion))
    assert gate.decide_candidate() == "wait" and gate.version == 10


def play_outcomes(gate, outcomes):
    """Return the decision and the number of episodes that it took."""
    gate.open_candidate(1)
    for number, outcome in enumerate(outcomes, start=1):
        gate.observe_episode(*outcome)
        decision = gate.decide_candidate()
        if decision != "wait":
            return decision, number
    return "wait", len(outcomes)


def test_decisions():
    assert play_outcomes(make_gate(), [(1, 0, 0)] * 400)[0] == "promote"
    assert play_outcomes(make_gate(), [(0, 1, 0)] * 400) == (
        "reject",
        play_outcomes(make_gate(), [(0, 1, 0)] * 400)[1],
    )
    assert play_outcomes(make_gate(), [(0, 1, 0)] * 400)[1] < 10
    # equal to the live model, but worse than the champion
    assert play_outcomes(make_gate(), [(1, 0, 1), (0, 1, 1)] * 200)[0] != "promote"
    # a model that never differs is promoted exactly when its wealth reaches 1 / level
    needed = next(
        n
        for n in range(1, 400)
        if np.mean((1 + compute_bets(MARGIN) * MARGIN) ** n) >= 1 / compute_spent_alpha(0.05, 1)
    )
    assert play_outcomes(make_gate(), [(1, 1, 1)] * 400) == ("promote", needed)
    assert play_outcomes(make_gate(max_episodes=20), [(1, 1, 1)] * 20) == ("reject", 20)


def test_the_level_falls_with_every_candidate_and_survives_a_restart():
    gate = make_gate(max_episodes=1)
    for version in range(3):
        gate.open_candidate(version)
        gate.observe_episode(1, 1, 1)
        assert gate.decide_candidate() == "reject"
    gate.open_candidate(9)
    gate.observe_episode(1, 0, 0.5)
    restarted_gate = make_gate(max_episodes=1)
    restarted_gate.load_state_dict(gate.state_dict())
    assert (
        restarted_gate.level == pytest.approx(0.05 / 20)
        and restarted_gate.compute_metrics() == gate.compute_metrics()
    )
    assert restarted_gate.decide_candidate() == gate.decide_candidate() == "reject"
    with pytest.raises(DataError, match="call open_candidate first"):
        restarted_gate.observe_episode(1, 1, 1)
    restarted_gate.open_candidate(10)
    with pytest.raises(DataError, match="still being tested"):
        restarted_gate.open_candidate(11)
    with pytest.raises(DataError, match="between 0 and 1"):
        restarted_gate.observe_episode(1, 2, 0)


def simulate_promotions(mean, candidates, services, *, rng, discordant=0.3, episodes=300, look=20):
    """Count the candidates that each of `services` services promotes, with a look every `look` episodes.

    The difference is -1 or 1 in a share `discordant` of the episodes, and has the given mean. Wealth is computed as in
    the gate.
    """
    positive_share = (discordant + mean) / 2
    bets = compute_bets(MARGIN)
    logs = np.log1p(np.array([1 + MARGIN, MARGIN - 1, MARGIN])[:, None] * bets)  # of d = 1, -1, 0
    promoted = np.zeros(services, dtype=int)
    for number in range(1, candidates + 1):
        shares = [positive_share, discordant - positive_share, 1 - discordant]
        counts = rng.multinomial(look, shares, size=(services, episodes // look)).cumsum(1)
        wealth = counts @ logs
        largest = wealth.max(-1, keepdims=True)
        log_mean = (largest + np.log(np.exp(wealth - largest).mean(-1, keepdims=True)))[..., 0]
        promoted += (log_mean >= -np.log(compute_spent_alpha(0.05, number))).any(1)
    return promoted


def test_the_simulation_agrees_with_the_gate():
    rng = np.random.default_rng(3)
    draws = rng.choice([1, -1, 0], p=[0.35, 0.1, 0.55], size=120)
    gate = make_gate()
    gate.open_candidate(1)
    logs = np.zeros(64)
    for difference in draws:
        gate.observe_episode(max(difference, 0), max(-difference, 0), 0 if difference > 0 else 1)
        logs += np.log1p((difference + MARGIN) * compute_bets(MARGIN))
    assert gate.compute_p_value("live") == pytest.approx(min(1, 1 / np.exp(logs).mean()))


def test_a_thousand_looks_promote_a_worse_model_at_most_at_the_stated_rate():
    rng = np.random.default_rng(0)
    # 66 candidates of 15 looks each: 990 looks
    worse = simulate_promotions(-MARGIN, 1000 // 15, 60, rng=rng)
    # 60 services at 5% or less: more than 7 come with a chance of 2.6%
    assert (worse > 0).sum() <= 7
    better = simulate_promotions(0.1, 10, 60, rng=rng)
    assert (better > 0).mean() > 0.9  # better candidates are promoted


@pytest.mark.slow
def test_the_error_over_the_life_of_many_services():
    """Simulate 1,000 candidates with 15 looks each, at the edge of the hypothesis, where the error is largest."""
    worse = simulate_promotions(-MARGIN, 1000, 400, rng=np.random.default_rng(1))
    assert (worse > 0).mean() <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)
    unchanged = simulate_promotions(0.0, 1000, 50, rng=np.random.default_rng(2))
    assert (unchanged > 0).mean() > 0.1  # an unchanged model may go live: it is not worse
