"""Regression test of a champion: numbers worked by hand."""

import pytest
from helpers.evaluations import build_evaluation

from rl_core.analysis.statistics import Rate, wilson_interval
from rl_core.errors import SettingsError
from rl_core.evaluation import summarize_trajectories
from rl_core.types import Trajectory
from tasks.config import build_settings
from tasks.lifecycle.promotion import (
    build_check_settings,
    build_figure_tags,
    check_champion_regression,
    count_checks,
    read_success_figure,
    record_check,
)
from tasks.tracking import ModelVersion


def evaluation(wins, episodes):
    return summarize_trajectories(
        Trajectory(
            environment="e",
            level="l",
            kind="k",
            seed=seed,
            prompt="p",
            target="t",
            success=seed < wins,
            reward=0.0,
        )
        for seed in range(episodes)
    )


def rate(wins, episodes):
    return Rate(wins / episodes, *wilson_interval(wins, episodes), episodes)


# 80 of 100 before: Wilson 95% [71.12%, 86.66%]. 60 of 100 now: [50.20%, 69.06%].
# Upper bound of the change: -20 + sqrt(9.06^2 + 8.88^2) = -7.3 points.
@pytest.mark.parametrize(
    ("margin", "regressed"), [(0.0, True), (0.07, True), (0.08, False), (0.25, False)]
)
def test_the_upper_bound_of_the_change_has_to_be_below_the_margin(margin, regressed):
    verdict = check_champion_regression(evaluation(60, 100), rate(80, 100), margin)
    assert verdict.change.difference == pytest.approx(-0.2)
    assert verdict.change.high == pytest.approx(-0.0732, abs=2e-4)
    assert verdict.regressed is regressed
    assert ("is below" in str(verdict)) is regressed


@pytest.mark.parametrize("wins", [72, 80, 95])
def test_a_fall_within_the_noise_and_a_gain_are_none(wins):
    assert not check_champion_regression(evaluation(wins, 100), rate(80, 100), 0.0).regressed


def test_few_episodes_prove_little():
    # the same shares as 50 and 80 of 100
    assert not check_champion_regression(evaluation(5, 10), rate(8, 10), 0.0).regressed
    assert check_champion_regression(evaluation(50, 100), rate(80, 100), 0.0).regressed


def test_the_figure_of_a_version_comes_back_from_its_tags():
    result = evaluation(30, 40)
    figure = read_success_figure(build_figure_tags(result))
    assert figure.n == 40 and figure.rate == 0.75
    assert (figure.low, figure.high) == pytest.approx(wilson_interval(30, 40), abs=1e-6)
    assert (
        read_success_figure({}) is None
        and read_success_figure({"figure.success_rate": "x"}) is None
    )


def test_a_check_without_a_verifier_is_refused_before_anything_is_played(tmp_path):
    rows = [f'{{"prompt": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))

    def build_pipeline(**options):
        environment = {
            "name": "prompts",
            "options": {"path": str(tmp_path / "rows.jsonl"), **options},
        }
        return build_settings(
            {"name": "x", "environment": environment, "stages": {"sft": {}, "evaluate": {}}},
            check_files=False,
        )

    champion = ModelVersion("x", 3, None, None)
    with pytest.raises(SettingsError, match="success is unknown, as the environment has no veri"):
        build_check_settings(build_pipeline(), champion, 0)
    settings = build_check_settings(build_pipeline(verifier="exact"), champion, 0)
    assert settings.stages.active == ("evaluate",)
    unknown = build_evaluation([None, None], rewards=[0.5, 1.0])
    assert build_figure_tags(unknown) == {}
    with pytest.raises(SettingsError, match="success is unknown"):
        check_champion_regression(unknown, rate(80, 100), 0.02)


def test_each_check_plays_other_episodes_and_splits_the_data_as_ever(tmp_path):
    stages = {
        "prepare_data": {},
        "sft": {},
        "policy": {},
        "evaluate": {"episodes": 20},
        "promote": {},
    }
    typed = build_settings({"name": "x", "seed": 7, "stages": stages})
    champion = ModelVersion("x", 3, None, None)
    first, second = (build_check_settings(typed, champion, number) for number in (0, 1))
    assert first.stages.active == ("prepare_data", "evaluate") and first.model.path == "models:/x/3"
    assert first.seed == 7 and first.stages.evaluate.episodes == 20
    assert first.stages.evaluate.episodes_seed != second.stages.evaluate.episodes_seed
    assert build_check_settings(typed, champion, 0) == first
    assert count_checks(tmp_path, 3) == 0
    record_check(
        tmp_path,
        3,
        check_champion_regression(evaluation(60, 100), rate(80, 100), 0.02),
        rate(60, 100),
    )
    record_check(tmp_path, 2, None, rate(60, 100))
    assert (count_checks(tmp_path, 3), count_checks(tmp_path, 2)) == (1, 1)
