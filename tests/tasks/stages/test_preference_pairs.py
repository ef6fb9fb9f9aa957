"""Preference pairs of a stage: no question is on both sides."""

import json
from types import SimpleNamespace

import pytest

from rl_core.data.pairs import PreferencePair
from rl_core.data.records import read_preferences
from rl_core.environments.arithmetic import Arithmetic
from rl_core.environments.prompts import Prompts
from rl_core.errors import DataError, RecordsError
from rl_core.settings import PreferenceSettings
from rl_core.types import Rollout, RolloutGroup, StopReason, Trajectory
from tasks.stages import preference_pairs


def build_rollout(request, environment, sample):
    """Build a rollout of the question as token IDs, then a success for even samples."""
    question = environment.episode(request.seed, request.level).prompt
    trajectory = Trajectory(
        environment=environment.name,
        level=request.level,
        kind="",
        seed=request.seed,
        prompt=question,
        target="",
        turns=[],
        answer=None,
        success=sample % 2 == 0,
        is_grounded=None,
        temperature=1.0,
        reward=0.0,
        rewards={},
        stop_reason=StopReason.TERMINATED,
        num_prompt_tokens=0,
        num_completion_tokens=0,
        num_action_tokens=0,
        mean_logprob=0.0,
        policy_version=0,
        sample=sample,
    )
    return Rollout(
        prompt_ids=[ord(c) for c in question],
        completion_ids=[sample + 1],
        loss_mask=[True],
        sampler_logprobs=[0.0],
        trajectory=trajectory,
        is_truncated=False,
    )


def collect_groups(environment, backend, renderer, requests, *, group_size, **others):
    return [
        RolloutGroup([build_rollout(request, environment, g) for g in range(group_size)])
        for request in requests
    ]


@pytest.fixture
def build_pairs(monkeypatch, tmp_path):
    def pairs(environment, num_pairs, seed=0, loss="dpo", collect=collect_groups):
        monkeypatch.setattr(
            preference_pairs, "build_pipeline_environment", lambda pipeline, data: environment
        )
        tokenizer = SimpleNamespace(
            decode=lambda ids, **_: "".join(map(chr, ids)),
            encode=lambda text, **_: list(map(ord, text)),
            get_vocab=dict,
        )
        policy = SimpleNamespace(backend=lambda: None, renderer=None, tokenizer=tokenizer)
        monkeypatch.setattr(preference_pairs, "load_frozen_policy", lambda model, pipeline: policy)
        monkeypatch.setattr(preference_pairs, "collect_rollouts", collect)
        context = SimpleNamespace(
            name="preference",
            folder=tmp_path,
            inputs={"model": tmp_path},
            pipeline=None,
            seed=seed,
            settings=PreferenceSettings(num_pairs=num_pairs, group_size=4, loss=loss),
            tracker=SimpleNamespace(progress=lambda *_: None),
        )
        return preference_pairs.load_stage_pairs(context)

    return pairs


def collect_questions(part: list[PreferencePair]) -> set[str]:
    return {
        "".join(map(chr, side.prompt_ids)) for pair in part for side in (pair.chosen, pair.rejected)
    }


def test_no_question_is_on_both_sides(build_pairs):
    """Regression: groups were split in the order of their episodes, of which several may ask the same."""
    environment = Arithmetic()
    environment.levels = ("easy",)
    stage_pairs = build_pairs(environment, 1600)
    train, heldout = collect_questions(stage_pairs.train), collect_questions(stage_pairs.heldout)
    assert len(train) > 200 and len(heldout) > 30 and not train & heldout
    assert 0.13 < len(heldout) / (len(train) + len(heldout)) < 0.17
    again = build_pairs(environment, 1600)
    assert (again.train, again.heldout) == (stage_pairs.train, stage_pairs.heldout)
    assert collect_questions(build_pairs(environment, 1600, seed=1).heldout) != heldout


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_the_pairs_are_left_as_texts(build_pairs, tmp_path, loss):
    stage_pairs = build_pairs(Prompts([{"prompt": f"row {n}"} for n in range(40)]), 100, loss=loss)
    for name, part in (("train", stage_pairs.train), ("heldout", stage_pairs.heldout)):
        rows = [
            json.loads(line) for line in (tmp_path / f"pairs_{name}.jsonl").read_text().splitlines()
        ]
        assert len(rows) == len(part)
        for row, pair in zip(rows, part, strict=True):
            assert row.pop("prompt_text") == "".join(map(chr, pair.chosen.prompt_ids))
            if loss == "kto":
                assert row == {
                    "completion_text": chr(pair.chosen.completion_ids[0]),
                    "label": pair.desirable,
                }
            else:  # samples 0 and 2 succeed
                assert (
                    row["chosen_text"] in "\1\3"
                    and row["rejected_text"] in "\2\4"
                    and len(row) == 2
                )
    with pytest.raises(
        RecordsError
    ):  # tokens would not be the sampled ones: not to be trained on by mistake
        read_preferences(tmp_path / "pairs_train.jsonl")


def test_rows_that_are_drawn_again_stay_on_their_side(build_pairs):
    environment = Prompts([{"prompt": f"row {n}"} for n in range(40)])
    stage_pairs = build_pairs(environment, 800)  # 200 groups of 40 rows
    assert (
        len(collect_questions(stage_pairs.train)) == 34
        and len(collect_questions(stage_pairs.heldout)) == 6
    )
    assert not collect_questions(stage_pairs.train) & collect_questions(stage_pairs.heldout)


def test_a_single_question_leaves_nothing_to_hold_out(build_pairs):
    with pytest.raises(DataError, match="there is no heldout pair"):
        build_pairs(Prompts([{"prompt": "only"}]), 16)


def test_successes_by_guesses_that_make_no_pair_are_counted(build_pairs):
    """Regression: `no train pair ... of which 50.0% succeeded`, without a reason."""

    def guessed(*arguments, **options):
        groups = collect_groups(*arguments, **options)
        for group in groups:
            for each in group.rollouts:
                each.trajectory.is_grounded = False
        return groups

    pairs = build_pairs(Prompts([{"prompt": f"row {n}"} for n in range(40)]), 10)
    assert "50.0% succeeded" in pairs.note and "guesses" not in pairs.note
    with pytest.raises(DataError, match=r"50\.0% succeeded, 50\.0% by guesses, which form no pair"):
        build_pairs(Prompts([{"prompt": f"row {n}"} for n in range(40)]), 10, collect=guessed)


def test_kto_takes_both_sides_once_with_the_completion_of_another_prompt(build_pairs):
    environment = Prompts([{"prompt": f"row {n}"} for n in range(40)])
    stage_pairs = build_pairs(environment, 100, loss="kto")
    for part in (stage_pairs.train, stage_pairs.heldout):
        labels = [
            (tuple(pair.chosen.prompt_ids), pair.chosen.completion_ids[0], pair.desirable)
            for pair in part
        ]
        assert len(labels) == len(set(labels))
        assert all(
            label == (completion % 2 == 1) for _, completion, label in labels
        )  # samples 0 and 2 succeed
        assert all(pair.rejected.prompt_ids == pair.chosen.prompt_ids for pair in part)
    assert not collect_questions(stage_pairs.train) & collect_questions(stage_pairs.heldout)
