"""Served answers that become experiences: what is recorded and skipped, labels of choices, restarts."""

import dataclasses

import numpy as np
import pytest
from helpers.online_worker import make_worker, run_to_end, settings

from rl_core.environments import make_environment
from rl_core.errors import DataError
from rl_core.inference.serving_requests import FeedbackLabel, ServedAnswer, TopTokens
from rl_core.online.canary_gate import build_canary_requests, is_canary
from rl_core.online.experience import build_served_experience, check_experience
from rl_core.online.experience_log import ExperienceLogReader
from rl_core.online.experience_writer import ExperienceWriter
from rl_core.settings import OnlineServiceSettings, VotingSettings
from rl_core.types import Rollout, Trajectory, Turn

CHAT_SETTINGS = settings({"first_update": 100}, service=OnlineServiceSettings(record_top=2))


def build_answer(text="red", *, choice=0, request="chatcmpl-1", tokens=(4, 5), **fields):
    count = len(tokens)
    top = TopTokens(
        np.array([[token, 3] for token in tokens], np.int32),
        np.log(np.array([[0.5, 0.25]] * count, np.float32)),
        np.full(count, 0.25, np.float32),
    )
    return ServedAnswer(
        **{
            "answer_id": request,
            "choice": choice,
            "policy_version": 0,
            "prompt_ids": [1, 2],
            "completion_ids": list(tokens),
            "sampler_logprobs": [float(np.log(0.5))] * count,
            "temperature": 1.0,
            "text": text,
            "finish_reason": "stop",
            "top": top,
            **fields,
        }
    )


def build_episode_answer(level="easy", seed=1, *, text="red", request="chatcmpl-1", choice=0):
    trajectory = Trajectory(
        "pixel_grid",
        level,
        "k",
        seed,
        "p",
        "",
        [Turn("zoom", num_tokens=1), Turn("answer red")],
        answer=text,
        success=True,
        reward=1.0,
        rewards={"task": 1.0},
    )
    rollout = Rollout([1, 2], [4, 7, 5], [True, False, True], [-0.5, 0.0, -0.5], trajectory)
    return build_answer(text, choice=choice, request=request, rollout=rollout, tokens=(4, 5))


def test_an_experience_has_every_sample_its_ballot_and_distribution():
    answers = [
        build_answer("Red ", choice=0),
        build_answer("red", choice=1),
        build_answer("blue", choice=2, finish_reason="length"),
    ]
    answers = [dataclasses.replace(answer, max_votes=5, caller="anna") for answer in answers]
    experience = build_served_experience(answers, VotingSettings(), 7.0)
    check_experience(experience, vocab_size=11, max_tokens=100)
    assert (experience.vote.answer, experience.vote.num_ballots, experience.vote.is_early) == (
        "Red ",
        3,
        True,
    )
    assert experience.vote.confidence == pytest.approx(2 / 3)  # the truncated answer has no vote
    assert experience.returned_answers == ("Red ",) and (experience.caller, experience.time) == (
        "anna",
        7.0,
    )
    assert experience.vote.ballots[0].logprob == pytest.approx(2 * np.log(0.5))
    unvoted = build_served_experience(
        [dataclasses.replace(answer, max_votes=0) for answer in answers], VotingSettings(), 7.0
    )
    assert unvoted.returned_answers == ("Red ", "red", None) and not unvoted.is_voted
    assert type(experience).from_json(experience.to_json()).to_json() == experience.to_json()
    with pytest.raises(DataError, match="one request"):
        build_served_experience(
            [build_answer(), build_answer(request="chatcmpl-2")], VotingSettings(), 7.0
        )


def test_callers_with_long_names_stay_distinct():
    names = ["x" * 256, "x" * 999, "x" * 998, ""]
    experiences = [
        build_served_experience(
            [dataclasses.replace(build_answer(), caller=name)], VotingSettings(), 7.0
        )
        for name in names
    ]
    for experience in experiences:
        check_experience(experience, vocab_size=11, max_tokens=100)
    assert (
        experiences[0].caller == names[0]
        and experiences[3].caller == "anonymous"
        and len({experience.caller for experience in experiences}) == 4
    )


def test_a_session_keeps_its_rollout_and_what_the_environment_wrote_has_no_distribution():
    experience = build_served_experience([build_episode_answer()], VotingSettings(), 7.0)
    check_experience(experience, vocab_size=11, max_tokens=100)
    assert experience.recorded[0].ids_TK.tolist() == [[4, 3], [0, 0], [5, 3]]
    assert experience.vote.answer == "red" and experience.rollouts[0].reward == 1.0
    # only the tokens that the policy sampled
    ballot = experience.vote.ballots[0]
    assert (ballot.logprob, ballot.num_tokens) == (-1.0, 2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"temperature": 0.0}, "greedy"),
        ({"is_restricted": True}, "restricted"),
        ({"completion_ids": []}, "empty"),
    ],
)
def test_nothing_is_learned_from_answers_without_a_signal(tmp_path, change, why):
    with ExperienceWriter(tmp_path, CHAT_SETTINGS) as log:
        log.record_answers([dataclasses.replace(build_answer(), **change)])
        assert log.counts == {why: 1} and not log.knows("chatcmpl-1")
    assert list(ExperienceLogReader(tmp_path).read_records()) == []


def test_canary_episodes_are_held_out_by_content_whatever_their_seed(tmp_path):
    environment = make_environment("pixel_grid", None)
    requests = build_canary_requests(environment, (), 6, 3, 0)
    assert (
        requests
        == build_canary_requests(environment, (), 6, 3, 0)
        != build_canary_requests(environment, (), 6, 3, 1)
    )
    assert sorted({request.level for request in requests}) == sorted(environment.levels)
    assert all(is_canary(environment, request.level, request.seed) for request in requests)
    heldout_seed = next(seed for seed in range(100) if is_canary(environment, "easy", seed))
    training_seed = next(seed for seed in range(100) if not is_canary(environment, "easy", seed))
    with ExperienceWriter(tmp_path, CHAT_SETTINGS, environment) as log:
        log.record_answers([build_episode_answer(seed=heldout_seed)])
        log.record_answers([build_episode_answer(seed=training_seed, request="chatcmpl-2")])
        log.record_answers([build_answer(request="chatcmpl-3")])
        assert log.counts == {"canary": 1, "kept": 1, "other_environment": 1}
    assert [
        r.parse_experience().request_id for r in ExperienceLogReader(tmp_path).read_records()
    ] == ["chatcmpl-2"]


def test_canaries_of_a_mixture_are_those_of_each_environment(tmp_path):
    grid = make_environment("pixel_grid", None)
    options = {"environments": [{"name": "pixel_grid"}, {"name": "arithmetic", "label": "sums"}]}
    mixture = make_environment("mixture", options)
    requests = build_canary_requests(mixture, ("sums", "pixel_grid/easy"), 8, 3, 0)
    assert {request.level for request in requests} >= {"sums/easy", "sums/medium"}
    assert sum(request.level == "pixel_grid/easy" for request in requests) == 4
    assert all(is_canary(mixture, request.level, request.seed) for request in requests)
    # 2 of 4 episodes would not cover the three levels of one environment
    few = build_canary_requests(mixture, ("sums", "pixel_grid/easy"), 4, 3, 0)
    assert {request.level for request in few} == {request.level for request in requests}
    for seed in range(40):
        assert is_canary(mixture, "pixel_grid/easy", seed) == is_canary(grid, "easy", seed)


def test_labels_name_a_choice_and_are_taken_after_a_restart(tmp_path):
    with ExperienceWriter(tmp_path, CHAT_SETTINGS) as log:
        log.record_answers([build_answer("red"), build_answer("blue", choice=1)])
        log.accept_label("chatcmpl-1", 1, FeedbackLabel(thumb="up"))
        with pytest.raises(DataError, match="2 choices"):
            log.accept_label("chatcmpl-1", 2, FeedbackLabel(thumb="up"))
        with pytest.raises(DataError, match="is not used for learning"):
            log.accept_label("chatcmpl-9", 0, FeedbackLabel(thumb="up"))
        with pytest.raises(DataError, match="from -1 to 1"):
            log.accept_label("chatcmpl-1", 0, FeedbackLabel(score=7.0))
    with ExperienceWriter(tmp_path, CHAT_SETTINGS) as restarted_log:
        restarted_log.accept_label("chatcmpl-1", 0, FeedbackLabel(answer="green", score=0.3))
        restarted_log.append_orders([{"order": "resume"}])
    records = list(ExperienceLogReader(tmp_path).read_records())
    assert [record.kind for record in records] == ["experience", "label", "label", "control"]
    assert [record.parse_label()[1].text for record in records[1:3]] == ["blue", "green"]
    # the worker accepts all of these records
    with make_worker(tmp_path / "worker", tmp_path, CHAT_SETTINGS) as worker:
        run_to_end(worker)
        assert (
            worker.counts["refused"] == 0
            and worker.buffer.find_experience("chatcmpl-1").label.text == "green"
        )


def test_an_answer_accepts_at_most_16_labels(tmp_path):
    with ExperienceWriter(tmp_path, CHAT_SETTINGS) as log:
        log.record_answers([build_answer()])
        log.record_answers([build_answer(request="chatcmpl-2")])
        for number in range(10):
            log.accept_label("chatcmpl-1", 0, FeedbackLabel(answer=f"a{number}"))
    with ExperienceWriter(tmp_path, CHAT_SETTINGS) as log:  # earlier labels are counted
        for number in range(6):
            log.accept_label("chatcmpl-1", 0, FeedbackLabel(answer=f"b{number}"))
        with pytest.raises(DataError, match="16 labels already"):
            log.accept_label("chatcmpl-1", 0, FeedbackLabel(thumb="up"))
        log.accept_label("chatcmpl-2", 0, FeedbackLabel(thumb="up"))
    assert (
        sum(record.kind == "label" for record in ExperienceLogReader(tmp_path).read_records()) == 17
    )


def test_a_full_log_refuses_and_counts(tmp_path):
    small_buffer = dataclasses.replace(CHAT_SETTINGS.buffer, max_bytes=4096)
    small_settings = dataclasses.replace(CHAT_SETTINGS, buffer=small_buffer)
    with ExperienceWriter(tmp_path, small_settings) as log:
        for number in range(9):
            log.record_answers([build_answer(request=f"chatcmpl-{number}")])
        assert log.counts["full"] > 0 and log.counts["kept"] + log.counts["full"] == 9
        log.accept_label("chatcmpl-0", 0, FeedbackLabel(answer="x" * 9000))
        assert log.counts["labels_full"] == 1
        assert log.collect_metrics()["online/answers/kept"] == log.counts["kept"]
