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


def rollout(request, environment, sample):
    """The question as token ids, then a success for even samples."""
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


def collected(environment, backend, renderer, requests, *, group_size, **others):
    return [
        RolloutGroup([rollout(request, environment, g) for g in range(group_size)])
        for request in requests
    ]


@pytest.fixture
def pairs_of(monkeypatch, tmp_path):
    def pairs(environment, num_pairs, seed=0, loss="dpo", collect=collected):
        monkeypatch.setattr(
            preference_pairs, "build_pipeline_environment", lambda pipeline, data: environment
        )
        tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
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


def questions(part: list[PreferencePair]) -> set[str]:
    return {
        "".join(map(chr, side.prompt_ids)) for pair in part for side in (pair.chosen, pair.rejected)
    }


def test_no_question_is_on_both_sides(pairs_of):
    """Before: groups were split in the order of their episodes, of which several may ask the same."""
    environment = Arithmetic()
    environment.levels = ("easy",)
    found = pairs_of(environment, 1600)
    train, heldout = questions(found.train), questions(found.heldout)
    assert len(train) > 200 and len(heldout) > 30 and not train & heldout
    assert 0.13 < len(heldout) / (len(train) + len(heldout)) < 0.17
    again = pairs_of(environment, 1600)
    assert (again.train, again.heldout) == (found.train, found.heldout)
    assert questions(pairs_of(environment, 1600, seed=1).heldout) != heldout


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_the_pairs_are_left_as_texts(pairs_of, tmp_path, loss):
    found = pairs_of(Prompts([{"prompt": f"row {n}"} for n in range(40)]), 100, loss=loss)
    for name, part in (("train", found.train), ("heldout", found.heldout)):
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


def test_rows_that_are_drawn_again_stay_on_their_side(pairs_of):
    environment = Prompts([{"prompt": f"row {n}"} for n in range(40)])
    found = pairs_of(environment, 800)  # 200 groups of 40 rows
    assert len(questions(found.train)) == 34 and len(questions(found.heldout)) == 6
    assert not questions(found.train) & questions(found.heldout)


def test_a_single_question_leaves_nothing_to_hold_out(pairs_of):
    with pytest.raises(DataError, match="there is no heldout pair"):
        pairs_of(Prompts([{"prompt": "only"}]), 16)


def test_successes_by_guesses_that_make_no_pair_are_counted(pairs_of):
    """Before: `no train pair ... of which 50.0% succeeded`, without a reason."""

    def guessed(*arguments, **options):
        groups = collected(*arguments, **options)
        for group in groups:
            for each in group.rollouts:
                each.trajectory.is_grounded = False
        return groups

    pairs = pairs_of(Prompts([{"prompt": f"row {n}"} for n in range(40)]), 10)
    assert "50.0% succeeded" in pairs.note and "guesses" not in pairs.note
    with pytest.raises(DataError, match=r"50\.0% succeeded, 50\.0% by guesses, which make no pair"):
        pairs_of(Prompts([{"prompt": f"row {n}"} for n in range(40)]), 10, collect=guessed)


def test_kto_takes_both_sides_once_beside_the_completion_of_another_prompt(pairs_of):
    environment = Prompts([{"prompt": f"row {n}"} for n in range(40)])
    found = pairs_of(environment, 100, loss="kto")
    for part in (found.train, found.heldout):
        labels = [
            (tuple(pair.chosen.prompt_ids), pair.chosen.completion_ids[0], pair.desirable)
            for pair in part
        ]
        assert len(labels) == len(set(labels))
        assert all(
            label == (completion % 2 == 1) for _, completion, label in labels
        )  # samples 0 and 2 succeed
        assert all(pair.rejected.prompt_ids == pair.chosen.prompt_ids for pair in part)
    assert not questions(found.train) & questions(found.heldout)
