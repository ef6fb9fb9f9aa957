"""Online rewards, equal to offline rewards to the last bit for the same trajectory and label."""

import copy
import dataclasses
import math

import numpy as np
import pytest
from helpers.online import experience
from helpers.tiny import PAD, nano
from helpers.typed_episodes import Looking, LookThenAnswer, Renderer, Typist

import rl_core
from rl_core.environments.arithmetic import Arithmetic
from rl_core.errors import DataError
from rl_core.models.hidden_states import compute_turn_embeddings
from rl_core.online.experience import Experience
from rl_core.online.labelled_rewards import ExperienceScorer, apply_label
from rl_core.online.labels import Label, create_feedback_label
from rl_core.online.voting import Ballot, tally_votes
from rl_core.rewards.mixture_rewards import build_rewards
from rl_core.rewards.orchestrator import WEIGHTED_PREFIX, RewardOrchestrator
from rl_core.rollouts.collect import collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.settings import RewardSettings, SamplingSettings
from rl_core.storage.append_log import encode_checked_line, parse_checked_line
from rl_core.types import Rollout, RolloutGroup, Trajectory, Turn

WEIGHTS = {
    "task": 1.0,
    "curiosity": 0.3,
    "coherence": 0.2,
    "tool_use": 0.25,
    "learned": 0.4,
    "format": 0.1,
    "length": 0.05,
    "exact": 0.5,
    "numeric": 0.15,
}
ENVIRONMENT = Arithmetic(look_cost=0.01, misuse_cost=0.03)


def make_orchestrator():
    """Build an orchestrator with every component that has state, and with running scales."""
    return RewardOrchestrator(
        WEIGHTS,
        scorer=lambda rows: [len(row) / 7 - sum(row) / 100 for row in rows],
        options=RewardSettings(normalise=("task", "length"), clip=2.0),
        seed=3,
    )


def play_episode(seed, actions, sample):
    """Build a rollout as `collect` returns it: the environment knows the right answer."""
    episode = ENVIRONMENT.episode(seed, "easy")
    episode.reset()
    turns, tokens, mask, reward, last = [], [], [], 0.0, None
    for action in actions:
        last = episode.step(action)
        reward += last.reward
        seen = None if last.terminated else last.messages[0]["content"]
        turns.append(Turn(action, last.tool_call, seen, last.is_error, num_tokens=2))
        tokens += [3 + sample, seed] + ([6] if seen is not None else [])
        mask += [True, True] + ([False] if seen is not None else [])
    trajectory = Trajectory(
        environment="arithmetic",
        level="easy",
        kind=episode.kind,
        seed=seed,
        prompt=episode.prompt,
        target=episode.target,
        turns=turns,
        answer=last.answer,
        success=bool(last.success),
        reward=reward,
        rewards={"task": reward},
        num_action_tokens=sum(mask),
        sample=sample,
        is_grounded=last.is_grounded,
    )
    logprobs = [-0.7 if sampled else 0.0 for sampled in mask]
    return Rollout([1, 2, 7], tokens, mask, logprobs, trajectory)


def build_requests():
    """Build two requests of three samples, with tool calls, misuse, and wrong and right answers."""
    groups = []
    for seed in (5, 6):
        episode = ENVIRONMENT.episode(seed, "easy")
        chain, right = episode.prompt[:-4], episode.target
        groups.append(
            [
                play_episode(seed, [f"calculator {chain}", f"answer {right}"], 0),
                play_episode(seed, ["what?", f"calculator {chain}", "answer 9999"], 1),
                play_episode(seed, [f"answer {right}"], 2),
            ]
        )
    return groups


def build_served(rollouts, number):
    """Build the experience of a server that does not know the right answer, and read it back from the log."""
    unknown = []
    for rollout in rollouts:
        trajectory = dataclasses.replace(
            rollout.trajectory,
            target="",
            success=False,
            reward=0.0,
            rewards={"task": 0.0},
            is_grounded=None,
        )
        unknown.append(dataclasses.replace(rollout, trajectory=trajectory))
    vote = tally_votes([Ballot(r.trajectory.answer, sample=i) for i, r in enumerate(unknown)])
    served = Experience(f"r{number}", "anna", 1.0, tuple(unknown), vote, (None,) * len(unknown))
    record, _ = parse_checked_line(encode_checked_line({"value": served.to_json()}))
    return Experience.from_json(record["value"])


def compute_embeddings(rollouts):
    return compute_turn_embeddings(nano(), rollouts, pad_id=PAD)


@pytest.mark.parametrize("source", ["feedback", "consensus"])
def test_online_and_offline_rewards_are_equal_to_the_last_bit(source):
    groups = build_requests()
    pairs = [
        (build_served(rollouts, i), Label("answer", source, text=rollouts[0].trajectory.target))
        for i, rollouts in enumerate(groups)
    ]
    before = copy.deepcopy([pair[0].to_json() for pair in pairs])
    online, offline = make_orchestrator(), make_orchestrator()
    for _ in range(2):  # the second time with scales and a curiosity model that have moved
        tables = ExperienceScorer(online, ENVIRONMENT, embed=compute_embeddings).score_experiences(
            pairs
        )
        trained = copy.deepcopy([RolloutGroup(rollouts) for rollouts in groups])
        offline.score(trained, embed=compute_embeddings)
        for table, group in zip(tables, trained, strict=True):
            assert table.components == tuple(WEIGHTS)
            for index, rollout in enumerate(group.rollouts):
                rewards = rollout.trajectory.rewards
                assert table.raw_RC[index].tolist() == [rewards[name] for name in WEIGHTS]
                assert table.weighted_RC[index].tolist() == [
                    rewards[WEIGHTED_PREFIX + name] for name in WEIGHTS
                ]
                assert table.totals_R[index] == rollout.reward
    assert len({total for table in tables for total in table.totals_R.tolist()}) > 4
    # the label changes only the reward
    assert [pair[0].to_json() for pair in pairs] == before


def test_the_copies_are_the_offline_trajectories():
    rollouts, _ = build_requests()
    label = Label("answer", "consensus", text=rollouts[0].trajectory.target)
    labelled = apply_label(build_served(rollouts, 0), label, ENVIRONMENT)
    assert [rollout.trajectory for rollout in labelled] == [
        rollout.trajectory for rollout in rollouts
    ]
    assert [rollout.trajectory.reward for rollout in labelled] == pytest.approx(
        [1 - 0.01, -0.03 - 0.01, 1.0]
    )
    other = apply_label(
        build_served(rollouts, 0), Label("answer", "consensus", text="9999"), ENVIRONMENT
    )
    # a wrong label is accepted
    assert [rollout.success for rollout in other] == [False, True, False]


def test_a_truncated_action_is_not_passed_to_the_environment():
    rollouts, _ = build_requests()
    played = rollouts[2].trajectory
    turns = [*played.turns[:-1], dataclasses.replace(played.turns[-1], reward=0.0)]
    trajectory = dataclasses.replace(played, stop_reason="max_tokens", turns=turns, answer=None)
    cut = dataclasses.replace(rollouts[2], trajectory=trajectory)
    (labelled,) = apply_label(
        build_served([cut], 0), Label("answer", "feedback", text=trajectory.target), ENVIRONMENT
    )
    assert labelled.trajectory.reward == 0.0 and not labelled.success


def test_a_game_that_a_limit_ends_is_lost_under_a_right_answer_too():
    class OpenEpisode(LookThenAnswer):
        cut_reward = -1.0

    class Game(Looking):
        blocking = False

        def episode(self, seed, level):
            return OpenEpisode(seed, level)

    (group,) = collect_rollouts(
        Game(),
        Typist(lambda sequence, turn: "L"),
        Renderer(),
        [EpisodeRequest("easy", 1)],
        group_size=1,
        sampling=SamplingSettings(max_turns=2),
        seed=0,
    )
    (rollout,) = group.rollouts
    assert rollout.reward == -1.5
    (labelled,) = apply_label(
        build_served([rollout], 0), Label("answer", "feedback", text="B"), Game()
    )
    assert labelled.reward == -1.5 and not labelled.success


def test_chat_scores_and_played_rewards():
    served = experience(answers=("a", "A ", "b", None), task=0.25)
    chat = apply_label(served, Label("answer", "feedback", text="a"), None)
    assert [rollout.trajectory.rewards["task"] for rollout in chat] == [1.0, 1.0, 0.0, 0.0]
    assert [rollout.trajectory.target for rollout in chat] == ["a"] * 4
    down = apply_label(served, create_feedback_label("a", thumbs="down"), None)
    rewards = [None if rollout is None else rollout.trajectory.reward for rollout in down]
    assert rewards == [0.0, 0.0, None, None]
    scored = apply_label(served, create_feedback_label("b", score=0.75), None)
    assert [None if rollout is None else rollout.success for rollout in scored] == [
        None,
        None,
        True,
        None,
    ]
    # a score without an answer belongs to the returned answer, "a"
    silent = apply_label(served, Label("score", "feedback", None, 0.5), None)
    assert [rollout is None for rollout in silent] == [False, False, True, True]
    as_played = apply_label(served, Label("played", "environment"), None)
    assert [rollout.trajectory.rewards for rollout in as_played] == [{"task": 0.25}] * 4


def test_a_table_marks_unknown_rewards():
    served = experience(answers=("a", "b", "a"))
    scorer = ExperienceScorer(RewardOrchestrator({"task": 2.0}), None)
    (table,) = scorer.score_experiences([(served, create_feedback_label("a", thumbs="down"))])
    assert table.is_known_R.tolist() == [True, False, True] and not table.totals_R.any()
    assert table.to_json()["rollouts"][1] is None
    (table,) = scorer.score_experiences([(served, create_feedback_label("x", thumbs="down"))])
    assert not table.is_known_R.any()


def test_an_experience_that_cannot_be_scored_gives_a_reason_and_changes_no_state():
    served = experience(answers=("1", "2"))
    good = create_feedback_label(None, right_answer="1")
    bad = create_feedback_label(None, right_answer="one")
    rewards, alone = (
        RewardOrchestrator(
            {"task": 1.0, "numeric": 1.0}, options=RewardSettings(normalise=("task",))
        )
        for _ in range(2)
    )
    tables = ExperienceScorer(rewards, None).score_experiences([(served, good), (served, bad)])
    assert isinstance(tables[1], str) and "is not one number" in tables[1]
    expected = ExperienceScorer(alone, None).score_experiences([(served, good)])[0]
    assert (
        np.array_equal(tables[0].totals_R, expected.totals_R)
        and rewards.state_dict() == alone.state_dict()
    )
    foreign = dataclasses.replace(served, rollouts=tuple(map(move_to_maze, served.rollouts)))
    (wrong,) = ExperienceScorer(rewards, Arithmetic()).score_experiences([(foreign, good)])
    assert wrong == "an experience of environment 'maze'; this worker has 'arithmetic'"
    (unknown,) = ExperienceScorer(rewards, Arithmetic()).score_experiences(
        [(experience(level="impossible"), good)]
    )
    assert "has no level 'impossible'" in unknown
    with pytest.raises(DataError):
        apply_label(foreign, good, Arithmetic())


@pytest.mark.parametrize("num_others", [0, 1])
def test_an_experience_whose_rewards_all_fail_is_left_out_with_a_reason(num_others):
    def score(trajectories):
        return [math.nan if t.target == "7" else float(len(t.answer)) for t in trajectories]

    options = RewardSettings(max_failed_share=1, normalise=("task",))
    rewards, alone = (
        RewardOrchestrator({"task": 1.0, "mine": 1.0}, options=options, functions={"mine": score})
        for _ in range(2)
    )
    right, failing = (create_feedback_label(None, right_answer=text) for text in ("1", "7"))
    others = [(experience(answers=("1", "22")), right)] * num_others
    masked = experience(answers=("3", "44"))
    tables = ExperienceScorer(rewards, None).score_experiences([*others, (masked, failing)])
    assert isinstance(tables[-1], str) and "'mine'" in tables[-1]
    expected = ExperienceScorer(alone, None).score_experiences(others)
    assert len(expected) == num_others and rewards.state_dict() == alone.state_dict()
    for actual, table in zip(tables, expected, strict=False):
        assert np.array_equal(actual.totals_R, table.totals_R) and actual.is_known_R.all()


def test_experiences_of_several_environments_are_replayed_and_scored_by_their_own():
    """Check that an answer is scored as its environment alone scores it, and others are refused."""
    part = rl_core.MixturePart
    mixture = rl_core.MixtureEnvironment(
        [
            part(Arithmetic(), label="sums"),
            part(Arithmetic(), label="more", rewards={"task": 2.0, "format": 0.5}),
        ]
    )

    def label_as(served, name):
        rollouts = tuple(
            dataclasses.replace(
                row,
                trajectory=dataclasses.replace(
                    row.trajectory, environment=name, level=f"{name}/easy"
                ),
            )
            for row in served.rollouts
        )
        return dataclasses.replace(served, rollouts=rollouts)

    served, right = experience(answers=("1", "2")), create_feedback_label(None, right_answer="1")
    rewards = build_rewards(mixture, {"task": 1.0})
    first, second, foreign = ExperienceScorer(rewards, mixture).score_experiences(
        [(label_as(served, name), right) for name in ("sums", "more", "maze")]
    )
    alone = ExperienceScorer(RewardOrchestrator({"task": 1.0}), Arithmetic())
    (expected,) = alone.score_experiences([(served, right)])
    assert first.totals_R.tolist() == expected.totals_R.tolist() == [1.0, 0.0]
    assert first.components == ("task", "format") and first.weighted_RC[0].tolist() == [1.0, 0.0]
    assert second.totals_R.tolist() == [2.5, 0.5]  # 2 * 1 + 0.5 * 1; the format of both is right
    assert foreign == "an experience of environment 'maze'; this worker has 'sums, more'"


def move_to_maze(rollout):
    return dataclasses.replace(
        rollout, trajectory=dataclasses.replace(rollout.trajectory, environment="maze")
    )
