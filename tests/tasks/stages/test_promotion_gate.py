"""Decision of the promotion gate: numbers worked by hand, both ways."""

import dataclasses
import math

import pytest
from helpers.evaluations import build_evaluation

from rl_core.evaluation import compare, summarize_trajectories
from tasks.config.settings import PromotionSettings
from tasks.stages import promotion_gate
from tasks.stages.promotion_gate import compute_attempt_level, decide_promotion


@pytest.mark.parametrize(("wins", "promoted"), [(6, True), (5, True), (4, False)])
def test_without_a_champion_the_minimum_decides(wins, promoted):
    outcomes = build_evaluation(([1] * wins + [0] * (10 - wins)) * 5)
    is_promoted, reason, numbers = decide_promotion(
        outcomes, None, PromotionSettings(min_success=0.5), None, seed=0
    )
    assert is_promoted is promoted
    assert numbers == {"success_rate": wins / 10}
    assert ("at least" in reason) is promoted


def test_a_clear_gain_is_promoted_and_a_clear_loss_is_not():
    weak, strong = build_evaluation([1, 0] * 50), build_evaluation([1, 1] * 40 + [1, 0] * 10)
    settings = PromotionSettings(min_gain=0.0)
    up, reason, numbers = decide_promotion(strong, weak, settings, 3, seed=0)
    assert up
    assert "version 3" in reason
    assert numbers["gain"] == pytest.approx(
        0.4
    )  # 90 of 100 against 50 of 100, on the same episodes
    # standard error sqrt(.4 * .6 / 100) = .049, so about .40 -+ .096
    assert 0.28 < numbers["gain_low"] < 0.33
    assert 0.47 < numbers["gain_high"] < 0.52
    down, _, numbers = decide_promotion(weak, strong, settings, 3, seed=0)
    assert not down
    assert numbers["gain"] == pytest.approx(-0.4)


def test_a_gain_within_the_noise_is_not_promoted():
    champion = build_evaluation([1, 0] * 20)
    challenger = build_evaluation([1, 0] * 18 + [0, 1, 1, 1])  # two episodes more, of 40
    promoted, reason, numbers = decide_promotion(
        challenger, champion, PromotionSettings(), 1, seed=0
    )
    assert not promoted
    assert numbers["gain"] > 0 >= numbers["gain_low"]
    assert "not above" in reason


def test_min_gain_raises_the_bar():
    weak, strong = build_evaluation([1, 0] * 50), build_evaluation([1, 1] * 40 + [1, 0] * 10)
    assert not decide_promotion(strong, weak, PromotionSettings(min_gain=0.39), 1, seed=0)[0]


def test_no_difference_at_all_is_not_above_zero():
    """Every resample of equal outcomes has the gain 0: the bound equals min_gain, which is not above it."""
    both = build_evaluation([1, 0] * 200)
    promoted, _, numbers = decide_promotion(both, both, PromotionSettings(min_gain=0.0), 1, seed=0)
    assert not promoted and (numbers["gain_low"], numbers["gain_high"]) == (0.0, 0.0)
    # 400 episodes alike: a loss of 1 point would have left that many alike in 2% of cases (.99^400) and of 5 never
    assert not decide_promotion(both, both, PromotionSettings(min_gain=-0.01), 1, seed=0)[0]
    assert decide_promotion(both, both, PromotionSettings(min_gain=-0.05), 1, seed=0)[0]


def test_confidence_samples_and_seed_are_those_of_the_settings(monkeypatch):
    asked = []

    def noted(*models, **options):
        asked.append((models, options))
        return compare(*models, **options)

    monkeypatch.setattr(promotion_gate, "compare", noted)
    new, old = build_evaluation([1, 1, 0] * 20), build_evaluation([1, 0, 0] * 20)
    settings = PromotionSettings(confidence=0.6, bootstrap_samples=150)
    numbers = decide_promotion(new, old, settings, 1, seed=7)[2]
    assert asked == [((new, old), {"bootstrap_samples": 150, "seed": 7, "confidence": 0.6})]
    expected = compare(new, old, bootstrap_samples=150, seed=7, confidence=0.6).success
    assert (numbers["gain_low"], numbers["gain_high"]) == (expected.low, expected.high)


def build_pair(wins, losses, both=0, neither=0):
    """Build challenger and champion with these numbers of episodes."""
    ours = [1] * wins + [0] * losses + [1] * both + [0] * neither
    theirs = [0] * wins + [1] * losses + [1] * both + [0] * neither
    return build_evaluation(ours), build_evaluation(theirs)


@pytest.mark.parametrize("episodes", [2, 3])
def test_two_of_two_and_three_of_three_are_no_evidence(episodes):
    """Every resample of equal gains has that gain, so the interval lies above 0; the exact p is 1/4 and 1/8."""
    promoted, reason, numbers = decide_promotion(
        *build_pair(episodes, 0), PromotionSettings(), 1, seed=0
    )
    assert not promoted and numbers["gain_low"] == 1.0
    assert numbers["p_value"] == pytest.approx(0.5**episodes)
    assert (
        f"{episodes} held-out episodes are too few to promote, 50 are needed: raise evaluate.episodes"
        in reason
    )
    assert "(not counted as an attempt)" in reason
    lenient = PromotionSettings(min_episodes=1, min_discordant=0)
    promoted, reason, _ = decide_promotion(*build_pair(episodes, 0), lenient, 1, seed=0)
    assert not promoted and f"sign test p = {0.5**episodes:.3g}, above 0.025" in reason


def test_few_discordant_episodes_say_how_many_it_takes():
    promoted, reason, numbers = decide_promotion(
        *build_pair(8, 0, both=72), PromotionSettings(), 1, seed=0
    )
    assert not promoted and numbers["p_value"] == pytest.approx(1 / 256) and numbers["gain_low"] > 0
    # 8 of 80 differ, so 10 differ among 100
    assert (
        "differ on 8 episodes, too few: 10 are needed, at this rate on about 100 episodes" in reason
    )
    assert decide_promotion(*build_pair(10, 0, both=90), PromotionSettings(), 1, seed=0)[0]


def test_the_exact_test_is_the_sign_test_of_the_discordant_episodes():
    promoted, reason, numbers = decide_promotion(
        *build_pair(15, 5, both=80), PromotionSettings(), 1, seed=0
    )
    by_hand = sum(math.comb(20, k) for k in range(15, 21)) / 2**20  # .0207
    assert numbers["p_value"] == pytest.approx(by_hand)
    assert (
        promoted
        and f"sign test p = {by_hand:.3g}, at most 0.025 (attempt 1 on these episodes" in reason
    )
    assert (numbers["attempt"], numbers["episodes"], numbers["discordant"]) == (1, 100, 20)
    assert (numbers["alpha"], numbers["alpha_left"]) == (0.025, 0.025)


def test_a_second_attempt_on_the_same_episodes_has_less_of_alpha():
    models = build_pair(15, 5, both=80)  # p = .0207
    promoted, reason, numbers = decide_promotion(*models, PromotionSettings(), 1, seed=0, attempt=2)
    assert not promoted  # .05 / (2 * 3) = .0083
    assert numbers["alpha"] == pytest.approx(0.05 / 6) and numbers["alpha_left"] == pytest.approx(
        0.05 / 3
    )
    assert "above 0.0083 (attempt 2 on these episodes, 0.017 of alpha 0.05 left)" in reason
    # gain .1, variance .19: (z(1 - .00833) + z(.8))^2 * .19 / .01 = (2.394 + .842)^2 * 19 = 198.9
    assert reason.endswith("detecting a gain of this size takes about 200 episodes")
    assert decide_promotion(
        *models, PromotionSettings(repeated_attempts="off"), 1, seed=0, attempt=2
    )[0]
    assert decide_promotion(*models, PromotionSettings(alpha=0.2), 1, seed=0, attempt=2)[0]


def test_the_levels_of_all_attempts_add_up_to_alpha():
    levels = [compute_attempt_level(PromotionSettings(alpha=0.1), k) for k in range(1, 1001)]
    assert sum(level.level for level in levels) == pytest.approx(0.1 - levels[-1].left)
    assert levels[-1].left == pytest.approx(0.1 / 1001)


def test_rewards_are_compared_where_the_setting_says_so():
    """The reward grows on 70 of 100 episodes by .5 and falls on 30 by .25; success stays as it is."""
    ours = build_evaluation([1] * 100, rewards=[0.75] * 70 + [0.25] * 30)
    theirs = build_evaluation([1] * 100, rewards=[0.25] * 70 + [0.5] * 30)
    assert not decide_promotion(ours, theirs, PromotionSettings(), 1, seed=0)[0]
    promoted, reason, numbers = decide_promotion(
        ours, theirs, PromotionSettings(metric="reward"), 1, seed=0
    )
    assert promoted and numbers["gain"] == pytest.approx(0.275) and numbers["discordant"] == 100
    assert "+0.275 in reward [" in reason and "sign-flip test p" in reason


def test_samples_of_an_episode_count_once():
    """50 episodes of four samples: one success more on 12 of them, one less on 3; that is 15 episodes, not 200."""
    ours, theirs = [2] * 12 + [1] * 3 + [2] * 35, [1] * 12 + [2] * 3 + [2] * 35
    numbers = decide_promotion(
        build_evaluation(ours, samples=4),
        build_evaluation(theirs, samples=4),
        PromotionSettings(),
        1,
        seed=0,
    )[2]
    assert numbers["p_value"] == pytest.approx(sum(math.comb(15, k) for k in range(12, 16)) / 2**15)
    assert numbers["discordant"] == 15


def test_the_first_champion_needs_the_episodes_too():
    promoted, reason, _ = decide_promotion(
        build_evaluation([1, 1]), None, PromotionSettings(min_success=0.5), None, seed=0
    )
    assert (
        not promoted
        and "success 100.0% is at least 50%, but 2 held-out episodes are too few" in reason
    )


def test_an_unknown_success_decides_nothing():
    settings = PromotionSettings(min_episodes=2, min_success=0.0)
    old, new = (
        build_evaluation([None] * 40, rewards=[level + 0.01 * (n % 3) for n in range(40)])
        for level in (0.0, 1.0)
    )
    assert new.success_rate is None
    for champion in (None, old):
        promoted, reason, numbers = decide_promotion(new, champion, settings, 1, 0)
        assert not promoted and "success is unknown" in reason and "metric: reward" in reason
        assert numbers == {}
    by_reward = dataclasses.replace(settings, metric="reward")
    unmet = dataclasses.replace(by_reward, min_success=0.5)
    assert not decide_promotion(new, None, unmet, None, 0)[0]
    for champion in (None, old):
        promoted, reason, numbers = decide_promotion(new, champion, by_reward, 1, 0)
        assert promoted, reason
        assert not [name for name in numbers if "success" in name]


def build_mixture(**outcomes):
    """Make an evaluation of several environments: label -> success of each episode."""
    rows = [
        dataclasses.replace(trajectory, environment=label, level=f"{label}/l")
        for label, successes in outcomes.items()
        for trajectory in build_trajectories(successes)
    ]
    return summarize_trajectories(rows)


def build_trajectories(successes):
    return build_evaluation(successes).trajectories


GUARD = PromotionSettings(max_environment_loss=0.05)


def test_a_gain_in_total_does_not_outweigh_an_environment_that_got_worse():
    """60 of 100 new successes in `sums`, 20 of 100 lost in `grid`: +20 points in total, -20 in `grid`."""
    old = build_mixture(sums=[0] * 100, grid=[1] * 100)
    new = build_mixture(sums=[1] * 60 + [0] * 40, grid=[0] * 20 + [1] * 80)
    assert decide_promotion(new, old, PromotionSettings(), 1, seed=0)[0]
    promoted, reason, numbers = decide_promotion(new, old, GUARD, 1, seed=0)
    assert not promoted and "grid -20.0 [" in reason and "sums" not in reason
    assert numbers["gain"] == pytest.approx(0.2)
    assert numbers["gain_by_environment/grid"] == pytest.approx(-0.2)
    assert numbers["gain_by_environment/sums"] == pytest.approx(0.6)
    # standard error sqrt(.2 * .8 / 100) = .04: about -.2 -+ .08
    assert -0.29 < numbers["gain_low_by_environment/grid"] < -0.26
    assert numbers["p_value_by_environment/grid"] > 0.5
    assert numbers["p_value_by_environment/sums"] < 1e-6


def test_environments_that_did_not_lose_are_promoted_and_the_number_of_them_is_not_corrected_for():
    """120 episodes alike, and a margin of 5 points: p = 2.1% is below 2.5%, but not below a ninth of it."""
    labels = [f"e{number}" for number in range(8)]
    old = build_mixture(main=[0] * 100, **{label: [1] * 120 for label in labels})
    new = build_mixture(main=[1] * 100, **{label: [1] * 120 for label in labels})
    promoted, reason, numbers = decide_promotion(new, old, GUARD, 1, seed=0)
    assert promoted and "each of 9 environments lost less than 0.05, tested at 0.025 each" in reason
    assert 0.025 / 9 < numbers["p_value_by_environment/e7"] < 0.025
    # 40 episodes alike can hide a loss of 5 points: at least 0.95^40 = 13%.
    few = {label: [1] * 40 for label in labels}
    promoted, reason, _ = decide_promotion(
        build_mixture(main=[1] * 100, **few), build_mixture(main=[0] * 100, **few), GUARD, 1, seed=0
    )
    assert not promoted and "e0 +0.0 [+0.0, +0.0] on 40 episodes" in reason


def test_an_environment_that_one_of_the_two_did_not_play_is_not_promoted():
    old = build_mixture(sums=[0] * 100, grid=[1] * 100)
    new = build_mixture(sums=[1] * 100, maze=[1] * 100)
    promoted, reason, _ = decide_promotion(new, old, GUARD, 1, seed=0)
    assert not promoted
    assert "maze has no episode that both played" in reason and "grid was not evaluated" in reason
    single = build_evaluation([0] * 100)
    promoted, reason, _ = decide_promotion(
        build_mixture(e=[1] * 100, grid=[1] * 100),
        dataclasses.replace(
            single, episodes=[dataclasses.replace(e, level="e/l") for e in single.episodes]
        ),
        GUARD,
        1,
        seed=0,
    )
    assert not promoted and "the champion was evaluated on other environments" in reason


def test_an_earlier_attempt_lowers_the_level_of_every_environment():
    old = build_mixture(sums=[0] * 100, grid=[1] * 120)
    new = build_mixture(sums=[1] * 100, grid=[1] * 120)
    # p = 2.1%: below alpha / 2 = 2.5%, above alpha / 6 = 0.83%.
    assert decide_promotion(new, old, GUARD, 1, seed=0)[0]
    promoted, reason, _ = decide_promotion(new, old, GUARD, 1, seed=0, attempt=2)
    assert not promoted and "at 0.0083 each: grid" in reason


def test_environments_are_compared_by_reward_where_the_gate_compares_rewards():
    def rewarded(sums, grid):
        rows = [
            dataclasses.replace(t, environment=label, level=f"{label}/l", reward=reward)
            for label, reward in (("sums", sums), ("grid", grid))
            for t in build_trajectories([1] * 100)
        ]
        return summarize_trajectories(rows)

    settings = PromotionSettings(metric="reward", max_environment_loss=0.05, min_discordant=0)
    promoted, reason, numbers = decide_promotion(
        rewarded(3.0, 0.8), rewarded(1.0, 1.0), settings, 1, seed=0
    )
    assert not promoted and "grid -0.200" in reason
    assert numbers["gain_by_environment/sums"] == pytest.approx(2.0)
    assert decide_promotion(rewarded(3.0, 1.1), rewarded(1.0, 1.0), settings, 1, seed=0)[0]
