"""Demonstrations out of a recorded buffer: right episodes under the label that counts, one of a request."""

import numpy as np
import pytest
from helpers.online_worker import settings

from rl_core.environments import make
from rl_core.errors import DataError
from rl_core.inference.served_answers import FeedbackLabel, ServedAnswer
from rl_core.online.answer_log import AnswerLog
from rl_core.online.canary_episodes import is_canary
from rl_core.online.demonstrations import demonstrations
from rl_core.settings import OnlineLabelSettings
from rl_core.types import Rollout, Trajectory, Turn

TRUSTING = OnlineLabelSettings(use_consensus=False, trust_environment=True)


def played(place, seed, request, *, right):
    """An episode answered at once, without a look."""
    episode = place.episode(seed=seed, level="easy")
    said = episode.target if right else "wrong"
    trajectory = Trajectory(
        "pixel_grid", "easy", "colour", seed, "p", episode.target, [Turn(f"answer {said}", num_tokens=2)],
        answer=said, success=right, reward=float(right), rewards={"task": float(right)},
    )  # fmt: skip
    rollout = Rollout([1, 2], [4, 5], [True, True], [-0.5, -0.5], trajectory)
    return ServedAnswer(
        answer_id=request, choice=0, policy_version=0, prompt_ids=[1, 2], completion_ids=[4, 5], temperature=1.0,
        sampler_logprobs=[float(np.log(0.5))] * 2, text=said, finish_reason="stop", rollout=rollout,
    )  # fmt: skip


def test_right_episodes_are_kept_and_a_label_of_feedback_wins(tmp_path):
    place = make("pixel_grid", None)
    seeds = [seed for seed in range(60) if not is_canary(place, "easy", seed)][:3]
    with AnswerLog(tmp_path, settings(labels=TRUSTING), place) as log:
        log.record([played(place, seeds[0], "right", right=True)])
        log.record([played(place, seeds[1], "wrong", right=False)])
        log.record([played(place, seeds[2], "relabelled", right=True)])
        log.accept("relabelled", 0, FeedbackLabel(answer="something else"))
    rows = list(demonstrations(tmp_path, TRUSTING, place))
    assert [(row["request_id"], row["label"]) for row in rows] == [("right", "environment")]
    roles = [message["role"] for message in rows[0]["messages"]]
    target = place.episode(seed=seeds[0], level="easy").target
    assert roles[-1] == "assistant" and rows[0]["messages"][-1]["content"] == f"answer {target}"
    with pytest.raises(DataError, match="holds no episode of environment 'pixel_grid' that is right"):
        list(demonstrations(tmp_path, OnlineLabelSettings(use_consensus=False), place))
