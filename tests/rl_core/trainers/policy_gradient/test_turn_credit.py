"""Credit by turn inside the trainer: turns of a rollout, their rewards and states, tokens, replay, refusals."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.letters import LOW, Letters, Walk, capture_update, make_trainer
from helpers.policy_recipes import WALK

from rl_core.data.tokenizer import train_tokenizer
from rl_core.distributed import SINGLE_PROCESS
from rl_core.environments.environment import Episode, Step, warn_once
from rl_core.environments.maze import Maze
from rl_core.environments.mixture import MixtureEnvironment, MixturePart
from rl_core.errors import DataError, EnvironmentFault, SettingsError
from rl_core.rewards.mixture_rewards import build_rewards
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.rollouts.batching import TrainRow
from rl_core.rollouts.episode_sequence import normalize_step
from rl_core.settings import (
    CurriculumStage,
    PolicySettings,
    ReplaySettings,
    RewardSettings,
    SamplingSettings,
    TurnCreditSettings,
)
from rl_core.settings.distillation import DistilledPolicySettings
from rl_core.trainers.policy_gradient.rollout_buffer import RolloutBuffer
from rl_core.trainers.policy_gradient.samples import (
    ReplayBuffer,
    TrainingSample,
    build_sample_groups,
)
from rl_core.trainers.policy_gradient.turn_credit import SampleTurn, build_sample_turns
from rl_core.types import Rollout, RolloutGroup, Trajectory, Turn


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def build_rollout(turns, *, reward=1.0, mask=None, starts=(), prompt=(1, 2)):
    """Build a rollout; by default each turn's tokens are followed by one observed token."""
    if mask is None:
        mask = [counts for turn in turns for counts in [True] * turn.num_tokens + [False]][:-1]
    trajectory = Trajectory("e", "l", "k", 0, "", "", turns=turns, reward=reward)
    ids = list(range(10, 10 + len(mask)))
    return Rollout(
        list(prompt), ids, mask, [0.0] * len(mask), trajectory, context_starts=list(starts)
    )


def test_turns_of_a_rollout_by_hand():
    turns = [
        Turn("a", observation="x", num_tokens=2, reward=0.5),
        Turn("b", observation="y", num_tokens=1, reward=-0.25, state="key"),
        Turn("c", num_tokens=1, reward=1.0),
    ]
    actual = build_sample_turns(build_rollout(turns, reward=4.0), task_weight=2.0)
    # twice the rewards; the last turn has what remains of 4: 4 - (1 - 0.5)
    assert actual == [
        SampleTurn(range(0, 2), ("prompt", 1, 2), 1.0),
        SampleTurn(range(3, 4), ("observation", "x"), -0.5),
        SampleTurn(range(5, 6), ("state", "key"), 3.5),
    ]


def test_an_agents_turns_stand_in_the_order_of_its_calls():
    """Check two conversations that alternate; the second begins with another prompt, and one answer is not trained."""
    turns = [
        Turn("a", observation="x", num_tokens=1, info={"call": 1, "conversation": 1}),
        Turn("c", num_tokens=2, info={"call": 3, "conversation": 1}),
        Turn("b", observation="y", num_tokens=1, info={"call": 2, "conversation": 2}),
        Turn("d", num_tokens=3, info={"call": 4, "conversation": 2}, is_trained=False),
    ]
    #       a      x      c     c     prompt of b   b     y      d
    mask = [True, False, True, True, False, False, True, False, False, False, False]
    actual = build_sample_turns(build_rollout(turns, mask=mask, starts=[4]), task_weight=1.0)
    assert [turn.tokens for turn in actual] == [range(0, 1), range(6, 7), range(2, 4), range(0)]
    assert [turn.state for turn in actual[:3]] == [
        ("prompt", 1, 2),
        ("prompt", 14, 15),
        ("observation", "x"),
    ]
    assert [turn.reward for turn in actual] == [0, 0, 0, 1.0]


def test_a_history_that_is_rendered_again_keeps_its_states():
    turns = [Turn("a", observation="x", num_tokens=1), Turn("b", num_tokens=2)]
    mask = [True, False, False, False, True, True]
    actual = build_sample_turns(build_rollout(turns, mask=mask, starts=[1]), task_weight=1.0)
    assert [turn.tokens for turn in actual] == [range(0, 1), range(4, 6)]
    assert actual[1].state == ("observation", "x")


def test_tokens_that_are_not_those_of_the_turns_are_refused():
    with pytest.raises(DataError, match="2 sampled tokens"):
        build_sample_turns(build_rollout([Turn("a", num_tokens=3)], mask=[True, True]), 1.0)


def build_sample(turns, mask=(True, True, False, True), **values):
    row = TrainRow([5, 6], [7, 8, 9, 10], mask, [-0.5] * 4)
    return TrainingSample(row, **{"reward": 1.0, "is_truncated": False, "turns": turns, **values})


def estimate(groups, kl_reward_coef=0.0, ref=None, **options):
    settings = PolicySettings(
        **{"algorithm": "dr_grpo", "turn_credit": TurnCreditSettings(gamma=0.5), **options}
    )
    no_code = SimpleNamespace(advantages=None)
    buffer = RolloutBuffer(
        SimpleNamespace(
            device=torch.device("cpu"),
            teacher=None,
            custom_functions=no_code,
            role_baselines=None,
            optimizer_step=SimpleNamespace(process_group=SINGLE_PROCESS),
        ),
        settings,
        groups,
    )
    if ref is not None:
        buffer.old_logprobs_RS, buffer.ref_logprobs_RS = torch.zeros(buffer.shape), ref
    return buffer, buffer.estimate_advantages(kl_reward_coef)


def two_rollouts():
    """Return one that earns 1 at its end, and one that earns nothing; both begin in s, and pass through t or u."""
    good = [SampleTurn(range(0, 2), "s", 0.0), SampleTurn(range(3, 4), "t", 1.0)]
    bad = [SampleTurn(range(0, 2), "s", 0.0), SampleTurn(range(3, 4), "u", 0.0)]
    return [build_sample(good), build_sample(bad, reward=0.0)]


def test_advantages_of_tokens_by_hand():
    group = two_rollouts()
    buffer, metrics = estimate([group])
    # of the rollouts +-1/2; returns in s are 1/2 and 0, so +-1/4 on top; t and u have no counterpart
    assert buffer.advantages_RS.tolist() == [
        [0, 0, 0.75, 0.75, 0, 0.5],
        [0, 0, -0.75, -0.75, 0, -0.5],
    ]
    assert [sample.advantage for sample in group] == [0.5, -0.5]
    assert metrics == {
        "train/compared_turn_rate": 0.5,
        "train/turn_set_size": pytest.approx(4 / 3),
        "train/step_advantages_std": pytest.approx(0.25 / 2**0.5),
    }


@pytest.mark.parametrize(
    ("compare", "expected"),
    [
        # first turns: 1/2 and 0; second turns: 1 and 0
        ("turns", [[0.25, 0.25, 0.5], [-0.25, -0.25, -0.5]]),
        # 1/2, 1, 0, 0 with mean 3/8
        ("group", [[0.125, 0.125, 0.625], [-0.375, -0.375, -0.375]]),
    ],
)
def test_other_comparisons_by_hand(compare, expected):
    credit = TurnCreditSettings(compare=compare, gamma=0.5, episode_weight=0.0)
    buffer, _ = estimate([two_rollouts()], turn_credit=credit)
    assert buffer.advantages_RS[:, [2, 3, 5]].tolist() == expected


def test_masked_replayed_and_filtered_samples():
    good, bad = two_rollouts()
    masked = build_sample(good.turns, reward=9.0, is_masked=True)
    replayed = build_sample(
        (), advantage=0.25, token_advantages=[2.0, 3.0, 0.0, 4.0], is_replayed=True
    )
    buffer, _ = estimate([[good, masked, bad], [replayed]], filter_threshold=0.6)
    # as without the masked one; tokens below 0.6 leave loss and denominators
    assert buffer.advantages_RS.tolist() == [
        [0, 0, 0.75, 0.75, 0, 0],
        [0] * 6,
        [0, 0, -0.75, -0.75, 0, 0],
        [0, 0, 2.0, 3.0, 0, 4.0],
    ]
    assert buffer.mask_RS.sum(1).tolist() == [2, 0, 2, 3]


def test_a_kl_in_the_reward_falls_on_the_turn_of_its_token():
    ref = torch.zeros(2, 6)
    ref[0, 2], ref[0, 5] = -1.0, 0.5  # k1 of 1 and -1/2
    buffer, _ = estimate([two_rollouts()], kl_reward_coef=0.5, ref=ref)
    # rewards of the good one: -1/2, then 5/4, in all 3/4; its return in s: -1/2 + 5/8 = 1/8
    assert buffer.advantages_RS[:, [2, 5]].tolist() == [
        [0.375 + 0.0625, 0.375],
        [-0.375 - 0.0625, -0.375],
    ]


def test_the_replay_buffer_restores_advantages_of_tokens():
    first, second = two_rollouts()
    estimate([[first, second]])
    first.token_advantages = [0.1, 1 / 3, 0.0, -0.7]
    masked = build_sample((), is_masked=True, advantage=0.0)
    buffer = ReplayBuffer(ReplaySettings(iterations=1, share=1.0))
    buffer.add_groups([[first, masked]])
    restored = ReplayBuffer(buffer.settings)
    restored.load_state_dict(buffer.state_dict())
    for each in (buffer, restored):
        [samples] = each.draw_groups(np.random.default_rng(0), 1)
        assert samples[0].token_advantages == [0.1, 1 / 3, 0.0, -0.7]
        assert samples[1].token_advantages is None and samples[0].turns == ()
    assert "token_advantages" not in ReplayBuffer(buffer.settings).state_dict()


def test_a_run_credits_each_turn_with_its_rewards(tokenizer, monkeypatch):
    updates = capture_update(monkeypatch)
    trainer = make_trainer(
        tokenizer,
        Walk(),
        algorithm="dr_grpo",
        turn_credit=TurnCreditSettings(compare="turns", gamma=1.0, episode_weight=0.0),
        sampling=WALK,
        context=64,
        curriculum=LOW,
    )
    metrics = trainer.step()
    samples = updates[0].buffer.samples
    rollouts = [rollout for group in trainer.groups for rollout in group.rollouts]
    assert any(len(rollout.trajectory.turns) > 2 for rollout in rollouts)
    for sample, rollout in zip(samples, rollouts, strict=True):
        turns = rollout.trajectory.turns
        # the last one may have been cut off by the limit of tokens
        assert all(turn.reward in (0.5, -0.125) for turn in turns[:-1])
        assert sum(turn.reward for turn in sample.turns) == pytest.approx(rollout.reward)
        assert [len(turn.tokens) for turn in sample.turns] == [turn.num_tokens for turn in turns]
    # the first turn's return is the rollout's reward: for its tokens this is Dr. GRPO
    for row, sample in enumerate(samples):
        at = len(sample.row.prompt_ids)
        assert float(updates[0].buffer.advantages_RS[row, at]) == pytest.approx(
            sample.advantage, abs=1e-6
        )
    assert metrics["train/compared_turn_rate"] > 0.8 and metrics["train/turn_set_size"] > 3


def test_turns_of_a_mixture_have_the_weight_of_their_environment(tokenizer, monkeypatch):
    """The middle turns of `half` earn half of what the environment gives; the sum is still the rollout's reward."""
    mixture = MixtureEnvironment(
        [
            MixturePart(Walk(), label="whole", levels={"low": 1.0}, rewards={"task": 1.0}),
            MixturePart(Walk(), label="half", levels={"low": 1.0}, rewards={"task": 0.5}),
        ]
    )
    updates = capture_update(monkeypatch)
    trainer = make_trainer(
        tokenizer,
        mixture,
        rewards=build_rewards(mixture, {"task": 1.0}),
        turn_credit=TurnCreditSettings(),
        sampling=WALK,
        context=64,
    )
    trainer.step()
    rollouts = [rollout for group in trainer.groups for rollout in group.rollouts]
    num_compared = {"whole": 0, "half": 0}
    for sample, rollout in zip(updates[0].buffer.samples, rollouts, strict=True):
        label = rollout.trajectory.environment
        weight = {"whole": 1.0, "half": 0.5}[label]
        for turn, played in zip(sample.turns[:-1], rollout.trajectory.turns[:-1], strict=True):
            assert turn.reward == weight * played.reward
            num_compared[label] += 1
        assert sum(turn.reward for turn in sample.turns) == pytest.approx(rollout.reward)
    assert min(num_compared.values()) > 5


def test_a_run_compares_turns_in_the_states_that_the_environment_names(tokenizer, monkeypatch):
    class Named(Walk):
        def episode(self, seed, level):
            episode = super().episode(seed, level)
            act = episode.act
            episode.act = lambda text: dataclasses.replace(act(text), state=f"{len(text)}")
            return episode

    updates = capture_update(monkeypatch)
    options = dict(turn_credit=TurnCreditSettings(), sampling=WALK, context=64, curriculum=LOW)
    trainer = make_trainer(tokenizer, Named(), **options)
    trainer.step()
    rollouts = [rollout for group in trainer.groups for rollout in group.rollouts]
    num_named = 0
    for sample, rollout in zip(updates[0].buffer.samples, rollouts, strict=True):
        for turn, before in zip(sample.turns[1:], rollout.trajectory.turns[:-1], strict=True):
            assert turn.state == ("state", f"{len(before.action)}")
            num_named += 1
    assert num_named > 20


def test_a_stage_without_the_tasks_reward_credits_the_last_turn(tokenizer, monkeypatch):
    updates = capture_update(monkeypatch)
    stage = CurriculumStage(name="one", levels={"low": 1.0}, rewards={"task": 0.0})
    rewards = RewardOrchestrator(
        {"task": 1.0, "words": 1.0},
        functions={"words": lambda trajectories: [float(len(t.turns)) for t in trajectories]},
    )
    trainer = make_trainer(
        tokenizer,
        Walk(),
        rewards=rewards,
        turn_credit=TurnCreditSettings(),
        sampling=WALK,
        context=64,
        curriculum=(stage,),
    )
    trainer.step()
    for sample in updates[0].buffer.samples:
        assert [turn.reward for turn in sample.turns[:-1]] == [0.0] * (len(sample.turns) - 1)
        assert sample.turns[-1].reward == sample.reward > 0


@pytest.mark.parametrize(("environment", "warns"), [(Letters(), True), (Walk(), False)])
def test_episodes_of_one_turn_are_warned_about(tokenizer, caplog, environment, warns):
    warn_once.cache_clear()
    options = dict(turn_credit=TurnCreditSettings(), sampling=WALK, context=64, curriculum=LOW)
    trainer = make_trainer(tokenizer, environment, **options)
    for _ in range(2):
        trainer.step()
    assert caplog.text.count("every episode of an iteration had a single turn") == int(warns)


def test_prefix_sharing_and_micro_batches_change_nothing(tokenizer, monkeypatch):
    """Check that single rows give the gradient of shared prefixes and of large batches."""
    updates = capture_update(monkeypatch)
    trainers = [
        make_trainer(
            tokenizer,
            Walk(),
            turn_credit=TurnCreditSettings(),
            sampling=WALK,
            context=64,
            micro_batch_tokens=tokens,
        )
        for tokens in (1, 4096)
    ]
    for trainer in trainers:
        trainer.step()
    apart, shared = (update.buffer.advantages_RS for update in updates)
    assert torch.equal(apart, shared) and bool(apart.any())
    for ours, theirs in zip(
        trainers[0].policy.parameters(), trainers[1].policy.parameters(), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=2e-4)


def test_a_maze_names_the_cell_as_its_state():
    episode = Maze(max_moves=8).episode(3, "easy")
    way = sorted(episode.opened[episode.start])[0]
    wall = next(
        name
        for name in ("north", "east", "south", "west")
        if name not in episode.opened[episode.start]
    )
    blocked = episode.step(f"move {wall}")
    nonsense = episode.step("hm")
    moved = episode.step(f"move {way}")
    start = f"{episode.start[0]} {episode.start[1]} False"
    assert (blocked.state, nonsense.state) == (start, start)
    assert moved.state not in (None, start)


def test_a_state_must_be_text():
    with pytest.raises(ValueError, match=r"state .* is no text"):
        normalize_step(Step(state=("a", 1)))
    assert normalize_step(Step(state="a\ud800")).state != "a\ud800"


def test_a_step_with_another_state_fails_its_episode(tokenizer):
    class Numbered(Letters):
        def episode(self, seed, level):
            class Broken(Episode):
                def reset(self):
                    return [{"role": "user", "content": "a"}]

                def act(self, text):
                    return Step(messages=[{"role": "user", "content": "b"}], state=3)

            return Broken(seed, level)

    with pytest.raises(EnvironmentFault, match="state 3 is no text"):
        make_trainer(tokenizer, Numbered(), turn_credit=TurnCreditSettings()).step()


def test_records_hold_reward_and_state_only_where_there_are_any():
    plain = Turn("a", observation="x", num_tokens=2)
    assert not {"reward", "state", "is_trained"} & plain.to_json().keys()
    full = dataclasses.replace(plain, reward=-0.5, state="s", is_trained=False)
    assert Turn.from_json(full.to_json()) == full and full.to_json()["reward"] == -0.5


CREDIT = TurnCreditSettings()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(algorithm="ppo"), "turn_credit: .* ppo compares no groups"),
        (dict(algorithm="reinforce"), "turn_credit: .* reinforce compares no groups"),
        (dict(algorithm="gspo"), "turn_credit: gspo has one ratio"),
        (dict(advantages="module:estimator"), "turn_credit: not used by a custom advantage"),
        (dict(sampling=SamplingSettings(max_turns=1)), "turn_credit: sampling.max_turns 1"),
        (dict(reward_options=RewardSettings(clip=1.0)), "turn_credit: reward_options.clip"),
        (
            dict(reward_options=RewardSettings(normalise=("task",))),
            "turn_credit: reward_options.normalise",
        ),
    ],
)
def test_what_would_ignore_it_is_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        PolicySettings(turn_credit=CREDIT, **options)
    with pytest.raises(SettingsError, match="turn_credit: a distillation compares no rewards"):
        DistilledPolicySettings(turn_credit=CREDIT)
    with pytest.raises(SettingsError, match="step_weight"):
        TurnCreditSettings(step_weight=0.0)


def test_groups_are_built_without_turns_unless_they_are_needed():
    group = RolloutGroup([build_rollout([Turn("a", num_tokens=1)])])
    assert build_sample_groups([group])[0][0].turns == []
    assert len(build_sample_groups([group], read_task_weight=lambda _: 0.0)[0][0].turns) == 1
