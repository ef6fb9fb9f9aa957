"""Demonstrations from a recorded buffer: answers that are right under the prevailing label, one per request."""

import json

import numpy as np
import pytest
from helpers.online_worker import settings

from rl_core.data.records import read_demonstrations
from rl_core.environments import make_environment
from rl_core.errors import DataError
from rl_core.inference.serving_requests import FeedbackLabel, ServedAnswer
from rl_core.online.canary_gate import is_canary
from rl_core.online.experience_writer import ExperienceWriter
from rl_core.online.labelled_rewards import extract_demonstrations
from rl_core.settings import OnlineLabelSettings
from rl_core.types import Conversation, Rollout, Trajectory, Turn

TRUSTING_SETTINGS = OnlineLabelSettings(use_consensus=False, trust_environment=True)


def play_episode(environment, seed, request, *, right):
    """Build an episode that is answered in its first turn, without a look."""
    episode = environment.episode(seed=seed, level="easy")
    answer = episode.target if right else "wrong"
    trajectory = Trajectory(
        "pixel_grid",
        "easy",
        "colour",
        seed,
        "p",
        episode.target,
        [Turn(f"answer {answer}", num_tokens=2)],
        answer=answer,
        success=right,
        reward=float(right),
        rewards={"task": float(right)},
    )
    rollout = Rollout([1, 2], [4, 5], [True, True], [-0.5, -0.5], trajectory)
    return ServedAnswer(
        answer_id=request,
        choice=0,
        policy_version=0,
        prompt_ids=[1, 2],
        completion_ids=[4, 5],
        temperature=1.0,
        sampler_logprobs=[float(np.log(0.5))] * 2,
        text=answer,
        finish_reason="stop",
        rollout=rollout,
    )


def test_right_episodes_are_recorded_and_a_label_of_feedback_wins(tmp_path):
    environment = make_environment("pixel_grid", None)
    seeds = [seed for seed in range(60) if not is_canary(environment, "easy", seed)][:3]
    with ExperienceWriter(tmp_path, settings(labels=TRUSTING_SETTINGS), environment) as log:
        log.record_answers([play_episode(environment, seeds[0], "right", right=True)])
        log.record_answers([play_episode(environment, seeds[1], "wrong", right=False)])
        log.record_answers([play_episode(environment, seeds[2], "relabelled", right=True)])
        log.accept_label("relabelled", 0, FeedbackLabel(answer="something else"))
    rows = list(extract_demonstrations(tmp_path, TRUSTING_SETTINGS, environment))
    assert [(row["request_id"], row["label"]) for row in rows] == [("right", "environment")]
    roles = [message["role"] for message in rows[0]["messages"]]
    target = environment.episode(seed=seeds[0], level="easy").target
    assert roles[-1] == "assistant" and rows[0]["messages"][-1]["content"] == f"answer {target}"
    with pytest.raises(
        DataError, match="holds no episode of environment 'pixel_grid' that is right"
    ):
        list(
            extract_demonstrations(tmp_path, OnlineLabelSettings(use_consensus=False), environment)
        )


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Sure? Grüße"},
]


def build_answers(request, texts, *, tools=(), has_conversation=True):
    """Build answers to the last message of a conversation."""
    conversation = Conversation(MESSAGES, list(tools)) if has_conversation else None
    return [
        ServedAnswer(
            answer_id=request,
            choice=index,
            policy_version=0,
            prompt_ids=[1, 2],
            completion_ids=[4, 5],
            temperature=1.0,
            sampler_logprobs=[float(np.log(0.5))] * 2,
            text=text,
            conversation=conversation,
            finish_reason="length" if text == "cut" else "stop",
        )
        for index, text in enumerate(texts)
    ]


def test_a_conversation_is_exported_with_its_turns_and_only_the_right_answer_is_imitated(tmp_path):
    tool = {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
    with ExperienceWriter(tmp_path / "log", settings()) as log:
        log.record_answers(build_answers("up", ["four", "4"], tools=[tool]))
        log.accept_label("up", 1, FeedbackLabel(thumb="up"))
        log.record_answers(build_answers("corrected", ["3", " FOUR "]))
        log.accept_label("corrected", 0, FeedbackLabel(answer="four"))
        log.record_answers(build_answers("never right", ["3", "5"]))
        log.accept_label("never right", 0, FeedbackLabel(answer="four"))
        log.record_answers(build_answers("down", ["3"]))
        log.accept_label("down", 0, FeedbackLabel(thumb="down"))
        log.record_answers(build_answers("cut off", ["cut", "cut"]))
        log.accept_label("cut off", 0, FeedbackLabel(answer="cut"))
        log.record_answers(build_answers("old record", ["4"], has_conversation=False))
        log.accept_label("old record", 0, FeedbackLabel(thumb="up"))
    labels = OnlineLabelSettings(use_consensus=False)
    rows = list(extract_demonstrations(tmp_path / "log", labels, None))
    assert [(row["request_id"], row["messages"][-1]["content"]) for row in rows] == [
        ("up", "4"),
        ("corrected", " FOUR "),
    ]
    assert rows[0]["tools"] == [tool] and "tools" not in rows[1]
    file = tmp_path / "right.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_demonstrations(file).rows
    assert [message.get("weight", 1) for message in read[0]["messages"]] == [1, 1, 0, 1, 1]
    assert [message["content"] for message in read[0]["messages"][:4]] == [
        message["content"] for message in MESSAGES
    ]
    with pytest.raises(DataError, match="holds no episode of environment 'pixel_grid'"):
        list(extract_demonstrations(tmp_path / "log", labels, make_environment("pixel_grid", None)))
    with pytest.raises(DataError, match="holds no conversation that is right"):
        list(extract_demonstrations(tmp_path / "nothing", labels, None))
