"""Episodes played by a scripted backend and by a real model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.scripted_sequences import make_model
from helpers.typed_episodes import EOS, Looking, LookThenAnswer, Renderer, Typist

from rl_core.environments.environment import Episode, Step
from rl_core.errors import DataError, EnvironmentFault, SettingsError
from rl_core.inference.engine import create_rollout_backend
from rl_core.inference.sampling import RolloutSequence
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.models.logprobs import completion_logprobs
from rl_core.rollouts.batching import build_batches
from rl_core.rollouts.collect import collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import SamplingSettings
from rl_core.types import Message, StopReason, ToolCall, Trajectory, Turn


def play(
    script: Callable[[RolloutSequence, int], str | list[int]], *, seed: int = 3, **options: Any
) -> object:
    sampling = SamplingSettings(**{"max_completion_tokens": 30, "max_turns": 4, **options})
    (group,) = collect_rollouts(
        Looking(),
        Typist(script),
        Renderer(),
        [EpisodeRequest("easy", seed)],
        group_size=1,
        sampling=sampling,
        seed=0,
        policy_version=5,
    )
    (rollout,) = group.rollouts
    return rollout


def test_an_episode_by_hand() -> None:
    rollout = play(lambda sequence, turn: ["L", "LX", "A"][turn])
    r = Renderer()
    pieces = [("L", True), ("OOOP", False), ("LX", True), ("OOOP", False), ("A", True)]
    ids, mask = [], []
    for text, sampled in pieces:
        piece = (
            r.action_ids(text) if sampled else r.prompt_ids([Message(role="tool", content=text)])
        )
        ids += piece
        mask += [sampled] * len(piece)
    assert rollout.prompt_ids == [ord(c) - 32 for c in "SQ3"]
    assert (rollout.completion_ids, rollout.loss_mask) == (ids, mask)
    assert rollout.sampler_logprobs == [-0.5 * m for m in mask]
    assert (rollout.reward, rollout.is_truncated, rollout.success) == (0.5, False, True)
    t = rollout.trajectory
    assert (t.environment, t.level, t.kind, t.seed, t.prompt, t.target) == (
        "looking",
        "easy",
        "letters",
        3,
        "Q3",
        "A",
    )
    assert [turn.action for turn in t.turns] == ["L", "LX", "A"]
    assert [turn.observation for turn in t.turns] == ["OOO\nP", "OOO\nP", None]
    assert [turn.is_error for turn in t.turns] == [False, True, False]
    assert [turn.tool_call for turn in t.turns] == [
        ToolCall("look", {}),
        ToolCall("look", {}),
        None,
    ]
    assert [turn.num_tokens for turn in t.turns] == [2, 3, 2]
    assert (t.answer, t.success, t.reward, t.rewards) == ("A", True, 0.5, {"task": 0.5})
    assert (t.stop_reason, t.num_prompt_tokens, t.num_completion_tokens, t.num_action_tokens) == (
        "terminated",
        3,
        15,
        7,
    )
    assert (t.mean_logprob, t.policy_version, t.sample) == (-0.5, 5, 0)


def test_stop_texts_are_looked_for_in_the_newest_tokens() -> None:
    results: list[bool] = []

    def script(sequence: RolloutSequence, turn: int) -> str:
        ids = Renderer().action_ids("A" * 60 + "END" + "A" * 60)[:-1]
        results.extend(sequence.should_stop(ids[: count + 1]) for count in range(len(ids)))
        return "A"

    play(script, max_completion_tokens=30, stop=("END", "Z"))
    # "END" is complete at its third letter
    assert results.index(True) == 62 and not any(results[62 + 30 :])


def test_wrong_answer() -> None:
    rollout = play(lambda sequence, turn: "B")
    assert (rollout.reward, rollout.success, rollout.trajectory.answer, rollout.is_truncated) == (
        0.0,
        False,
        "B",
        False,
    )


def test_turn_limit() -> None:
    rollout = play(lambda sequence, turn: "L", max_turns=2)
    assert (
        rollout.trajectory.stop_reason == StopReason.MAX_TURNS
        and rollout.is_truncated
        and not rollout.success
    )
    assert len(rollout.trajectory.turns) == 2 and rollout.trajectory.turns[-1].observation is None
    assert rollout.loss_mask == [True, True, *[False] * 4, True, True], (
        "no observation after the last action"
    )


@pytest.mark.parametrize(
    ("actions", "options", "reward"),
    [
        (["L", "L"], {"max_turns": 2}, -1.5),  # no turn left; each look costs 0.25
        ([[33]], {}, -1.0),  # an action without an end
        (["L"], {"max_completion_tokens": 6}, -1.25),  # an observation without room after it
        (["L", "A"], {}, 0.75),  # ended by the environment, right
        (["B"], {}, 0.0),  # and wrong
    ],
)
def test_an_episode_that_a_limit_cuts_gets_its_cut_reward(
    monkeypatch, actions, options, reward
) -> None:
    monkeypatch.setattr(LookThenAnswer, "cut_reward", -1.0)
    rollout = play(lambda sequence, turn: actions[turn], **options)
    assert rollout.reward == rollout.trajectory.reward == reward
    assert sum(turn.reward for turn in rollout.trajectory.turns) == reward


@pytest.mark.parametrize(("room", "turns"), [(7, 2), (6, 1)])
def test_an_observation_that_leaves_no_room_ends_the_episode(room: int, turns: int) -> None:
    """'L' and its end token are 2 tokens, the observation 4: out of 7 tokens one is left to act, out of 6 none."""
    rollout = play(lambda sequence, turn: "L" if turn == 0 else [33], max_completion_tokens=room)
    assert rollout.trajectory.stop_reason == StopReason.MAX_TOKENS and rollout.is_truncated
    assert len(rollout.trajectory.turns) == turns and len(rollout.completion_ids) == (
        7 if turns == 2 else 2
    )


def test_the_context_is_a_limit_too() -> None:

    def script(sequence: RolloutSequence, turn: int) -> str | list[int]:
        return "L" if turn == 0 else [33]

    # 4 + 2 + 33 = 39 of 40: room for one token
    rollout = play(script, seed=32, max_completion_tokens=100)
    assert len(rollout.trajectory.turns) == 2
    rollout = play(script, seed=33, max_completion_tokens=100)
    assert (
        len(rollout.trajectory.turns) == 1
        and rollout.trajectory.stop_reason == StopReason.MAX_TOKENS
    )


def test_a_cut_action_is_not_shown_to_the_environment() -> None:
    rollout = play(lambda sequence, turn: [33])  # 'A' without its end token
    assert (rollout.reward, rollout.success, rollout.is_truncated) == (0.0, False, True)
    assert rollout.trajectory.turns[0].action == "A" and rollout.trajectory.answer is None


def test_truncation_by_the_environment() -> None:
    rollout = play(lambda sequence, turn: "TRUNCATE")
    assert (
        rollout.trajectory.stop_reason == StopReason.ENVIRONMENT
        and rollout.is_truncated
        and rollout.reward == -1.0
    )


def test_groups_and_seeds() -> None:
    easy, hard = EpisodeRequest("easy", 3), EpisodeRequest("hard", 3)
    backend = Typist(lambda sequence, turn: "A")

    def collect_seeds(requests: list[EpisodeRequest], seed: int = 0) -> list[int]:
        groups = collect_rollouts(
            Looking(),
            backend,
            Renderer(),
            requests,
            group_size=2,
            sampling=SamplingSettings(),
            seed=seed,
        )
        assert [len(group.rollouts) for group in groups] == [2] * len(requests)
        assert [[r.trajectory.sample for r in g.rollouts] for g in groups] == [[0, 1]] * len(
            requests
        )
        assert [g.rollouts[0].trajectory.level for g in groups] == [
            request.level for request in requests
        ]
        return [sequence.seed for sequence in backend.sequences]

    together = collect_seeds([easy, hard, easy])
    assert len(set(together)) == 6, "an episode requested twice gets new samples"
    assert collect_seeds([hard]) == together[2:4] and collect_seeds([easy]) == together[:2], (
        "samples do not depend on other requests"
    )
    assert not set(collect_seeds([easy], seed=1)) & set(together)


class FaultyEnvironment(Looking):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def episode(self, seed: int, level: str) -> Episode:
        fault = self.fault

        class Broken(LookThenAnswer):
            count = 0

            def reset(self) -> list[Message]:
                if fault == "reset":
                    raise ValueError("no grid")
                FaultyEnvironment.count = getattr(FaultyEnvironment, "count", 0) + 1
                content = str(FaultyEnvironment.count) if fault == "unseeded" else "Q"
                return [] if fault == "silent" else [Message(role="user", content=content)]

            def act(self, text: str) -> Step:
                if fault == "act":
                    raise KeyError("cell")
                if fault == "exit":
                    raise SystemExit(0)
                if fault == "cancel":
                    raise asyncio.CancelledError("gone")
                if fault == "type":
                    return "done"  # type: ignore[return-value]
                return Step(
                    terminated=fault != "endless", reward=float("nan") if fault == "nan" else 0.0
                )

        return Broken(seed, level)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reset", "ValueError: no grid"),
        ("act", "KeyError: 'cell'"),
        ("exit", "SystemExit: 0"),
        ("cancel", "CancelledError: gone"),
        ("type", "'str' object has no attribute 'terminated'"),
        ("nan", "finite reward"),
        ("silent", "without a message"),
        ("endless", "neither ended the episode nor returned an observation"),
        ("unseeded", "different messages"),
    ],
)
def test_faults_name_the_episode(fault: str, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message) as caught:
        collect_rollouts(
            FaultyEnvironment(fault),
            Typist(lambda sequence, turn: "A"),
            Renderer(),
            [EpisodeRequest("hard", 7)],
            group_size=2,
            sampling=SamplingSettings(),
            seed=0,
        )
    assert "environment 'looking', level 'hard', seed 7" in str(caught.value)


def test_unknown_levels_and_long_prompts() -> None:
    def collect(request: EpisodeRequest, backend: Typist) -> None:
        collect_rollouts(
            Looking(),
            backend,
            Renderer(),
            [request],
            group_size=1,
            sampling=SamplingSettings(),
            seed=0,
        )

    with pytest.raises(SettingsError, match="no level 'esy'; did you mean 'easy'"):
        collect(EpisodeRequest("esy", 1), Typist(lambda sequence, turn: "A"))
    cramped = Typist(lambda sequence, turn: "A")
    cramped.max_length = 3
    with pytest.raises(
        DataError, match="seed 1: a prompt of 3 tokens leaves no room in a context of 3"
    ):
        collect(EpisodeRequest("easy", 1), cramped)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("backend_class", [create_rollout_backend, TransformersBackend])
def test_with_a_model_the_trainer_sees_the_same_logprobs(
    backend_class: Any, temperature: float
) -> None:
    """Sampling and training use the same tokens, and a rollout does not depend on its neighbours."""
    model = make_model("llama")
    with torch.no_grad():
        # end actions often, so that episodes have several turns
        model.lm_head.weight[EOS] += model.lm_head.weight[ord("L") - 32]
    backend = backend_class(model, eos_ids=[EOS], pad_id=0, max_length=64)
    requests = [EpisodeRequest("easy", seed) for seed in range(1, 9)]

    def collect(requests: list[EpisodeRequest], slots: int) -> list[list[list[int]]]:
        sampling = SamplingSettings(max_completion_tokens=24, slots=slots, temperature=temperature)
        groups = collect_rollouts(
            Looking(), backend, Renderer(), requests, group_size=3, sampling=sampling, seed=4
        )
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert {rollout.temperature for rollout in rollouts} == {temperature}
        for batch in build_batches(rollouts, 200, 0):
            with torch.no_grad():
                logprobs_BS, _ = completion_logprobs(model, batch)
            torch.testing.assert_close(logprobs_BS, batch.sampler_logprobs_BS, atol=1e-4, rtol=0)
        return [[rollout.completion_ids for rollout in group.rollouts] for group in groups]

    all_ids = collect(requests, 100)
    assert collect(requests, 5) == all_ids
    assert collect(requests[3:5], 100) == all_ids[3:5]
    if temperature >= 1:
        assert len({tuple(ids) for group in all_ids for ids in group}) > 20, (
            "samples of a group differ"
        )


class TellingEpisode(LookThenAnswer):
    closed: list[int] = []  # noqa: RUF012 read by the test

    def act(self, text: str) -> Step:
        step = super().act(text)
        step.info = {"text": text, "number": float("nan")}
        if step.tool_call is not None:
            step.more_calls = [ToolCall("again", {"x": "\ud800"})]
        return step

    def close(self) -> None:
        self.closed.append(self.seed)


class TellingEnvironment(Looking):
    def episode(self, seed: int, level: str) -> TellingEpisode:
        return TellingEpisode(seed, level)


def test_info_and_further_calls_are_recorded_and_episodes_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TellingEpisode, "closed", [])
    groups = collect_rollouts(
        TellingEnvironment(),
        Typist(lambda sequence, turn: ["L", "A"][turn]),
        Renderer(),
        [EpisodeRequest("easy", 2)],
        group_size=2,
        sampling=SamplingSettings(max_turns=4, max_completion_tokens=40),
        seed=0,
    )
    assert TellingEpisode.closed == [2, 2]
    trajectory = groups[0].rollouts[0].trajectory
    assert [turn.info["text"] for turn in trajectory.turns] == ["L", "A"] and trajectory.info == {
        "text": "A",
        "number": "nan",
    }
    assert trajectory.turns[0].calls == [ToolCall("look", {}), ToolCall("again", {"x": "?"})]
    restored = Trajectory.from_json(trajectory.to_json())
    assert restored == trajectory
    assert "info" not in Turn("x").to_json() and "more_calls" not in Turn("x").to_json()
