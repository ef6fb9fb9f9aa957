"""Answers of models as items to rate."""

import dataclasses

import pytest
from helpers.serving import make_folder_of_model

from posttrain.preferences.sampled_answers import find_models, sample_items
from posttrain.serving.served_model import NoChampion
from rl_core.errors import DataError, SettingsError
from rl_core.settings import RatingSettings, SamplingSettings
from tasks.config import ConfigError, build_settings


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder_of_model(
        tmp_path_factory.mktemp("model") / "model", texts=["3 + 4 = ?\n7\n12 - 5 = ?\n"] * 30
    )


def sample_model_items(model, tmp_path, number, messages, **rating):
    settings = build_settings(
        {"name": "x", "environment": {"name": "arithmetic"}, "stages": {"sft": {}}}
    )
    sampling = SamplingSettings(max_completion_tokens=4, max_turns=1, **rating.pop("sampling", {}))
    rating_settings = RatingSettings(
        models=(str(model),) * number, prompts=12, sampling=sampling, **rating
    )
    return sample_items(
        settings, rating_settings, find_models(settings, rating_settings, tmp_path), messages.append
    )


def test_two_rollouts_of_one_model_to_each_training_episode(model, tmp_path):
    messages = []
    items = sample_model_items(model, tmp_path, 1, messages)
    assert 0 < len(items) <= 12 and all(item.answers[0] != item.answers[1] for item in items)
    assert {item.sources for item in items} == {(str(model), str(model))}
    assert {item.about["level"] for item in items} >= {"easy", "medium"}
    assert messages[0] == f"{model} answers 12 episodes twice"
    assert [dataclasses.asdict(item) for item in sample_model_items(model, tmp_path, 1, [])] == [
        dataclasses.asdict(i) for i in items
    ]


def test_selected_levels(model, tmp_path):
    assert {
        item.about["level"]
        for item in sample_model_items(model, tmp_path, 1, [], levels=("medium",))
    } == {"medium"}
    with pytest.raises(SettingsError, match="mediun"):
        sample_model_items(model, tmp_path, 1, [], levels=("mediun",))
    values = {
        "name": "x",
        "environment": {"name": "arithmetic"},
        "stages": {"sft": {}},
        "prefer": {"levels": ["esy"]},
    }
    with pytest.raises(ConfigError, match="did you mean 'easy'"):
        build_settings(values)


def test_pairs_of_equal_answers_are_left_out_and_counted(model, tmp_path):
    with pytest.raises(
        DataError, match=r"all answers to an episode are equal.*prefer\.sampling\.temperature"
    ):
        sample_model_items(model, tmp_path, 2, [], sampling={"temperature": 0.0})
    messages = []
    num_left_out = 12 - len(
        sample_model_items(model, tmp_path, 1, messages, sampling={"temperature": 0.01})
    )
    advice = "; for more, name two models in prefer.models, or raise prefer.sampling.temperature"
    assert (
        num_left_out
        and messages[-1]
        == f"{num_left_out} of 12 pairs are left out: their answers are equal{advice if num_left_out > 6 else ''}"
    )


def test_without_a_champion_the_next_step_is_named(tmp_path):
    settings = build_settings(
        {"name": "x", "environment": {"name": "arithmetic"}, "stages": {"sft": {}}}
    )
    with pytest.raises(
        NoChampion,
        match=r"posttrain run x`, or name an existing model: --set 'prefer\.models=\[FOL",
    ):
        find_models(settings, RatingSettings(), tmp_path)


def test_single_answers_for_scores(model, tmp_path):
    items = sample_model_items(model, tmp_path, 1, [], ask="scores")
    assert len(items) > 6 and all(len(item.answers) == 1 for item in items)
