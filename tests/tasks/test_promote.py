"""The promotion gate: numbers worked by hand, both ways."""

import pytest

from rl_core.evaluation import summarize
from rl_core.types import Trajectory
from tasks import promote as stage
from tasks.promote import ChampionChanged, decide
from tasks.settings import PromotionSettings


def evaluation(successes):
    """An evaluation of episodes 0, 1, 2, ... with these outcomes."""
    return summarize(
        Trajectory(
            environment="e",
            level="l",
            kind="k",
            seed=seed,
            prompt="p",
            target="t",
            success=bool(won),
            reward=float(won),
        )
        for seed, won in enumerate(successes)
    )


@pytest.mark.parametrize(("wins", "promoted"), [(6, True), (5, True), (4, False)])
def test_without_a_champion_the_minimum_decides(wins, promoted):
    found, reason, numbers = decide(
        evaluation([1] * wins + [0] * (10 - wins)), None, PromotionSettings(min_success=0.5), None, seed=0
    )
    assert found is promoted
    assert numbers == {"success_rate": wins / 10}
    assert ("at least" in reason) is promoted


def test_a_clear_gain_is_promoted_and_a_clear_loss_is_not():
    weak, strong = evaluation([1, 0] * 50), evaluation([1, 1] * 40 + [1, 0] * 10)
    settings = PromotionSettings(min_gain=0.0)
    up, reason, numbers = decide(strong, weak, settings, 3, seed=0)
    assert up
    assert "version 3" in reason
    assert numbers["gain"] == pytest.approx(0.4)  # 90 of 100 against 50 of 100, on the same episodes
    # standard error sqrt(.4 * .6 / 100) = .049, so about .40 -+ .096
    assert 0.28 < numbers["gain_low"] < 0.33
    assert 0.47 < numbers["gain_high"] < 0.52
    down, _, numbers = decide(weak, strong, settings, 3, seed=0)
    assert not down
    assert numbers["gain"] == pytest.approx(-0.4)


def test_a_gain_within_the_noise_is_not_promoted():
    champion = evaluation([1, 0] * 20)
    challenger = evaluation([1, 0] * 18 + [0, 1, 1, 1])  # two episodes more, of 40
    promoted, reason, numbers = decide(challenger, champion, PromotionSettings(), 1, seed=0)
    assert not promoted
    assert numbers["gain"] > 0 >= numbers["gain_low"]
    assert "not above" in reason


def test_min_gain_raises_the_bar():
    weak, strong = evaluation([1, 0] * 50), evaluation([1, 1] * 40 + [1, 0] * 10)
    assert not decide(strong, weak, PromotionSettings(min_gain=0.39), 1, seed=0)[0]


def test_a_champion_that_came_meanwhile_is_compared_with_in_turn(monkeypatch):
    met = []

    def once(*arguments):
        met.append(arguments)
        if len(met) < 3:
            raise ChampionChanged("x has another champion than 1 since the comparison began")
        return "promoted"

    monkeypatch.setattr(stage, "_promote", once)
    assert stage.promote("session", "evaluation", "sft", "challenger", None) == "promoted"
    assert met == [("session", "evaluation", "sft", "challenger", None)] * 3


def test_champions_that_change_for_ever_end_in_an_error(monkeypatch):
    met = []

    def never(*arguments):
        met.append(arguments)
        raise ChampionChanged("again")

    monkeypatch.setattr(stage, "_promote", never)
    with pytest.raises(ChampionChanged):
        stage.promote("session", "evaluation", "sft", "challenger", None)
    assert len(met) == stage.CHAMPIONS_MET
