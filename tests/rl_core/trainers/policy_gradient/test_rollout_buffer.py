"""Rollout buffer and replay buffer by hand: advantages of groups and of truncated rows, draws, sampler limits."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.letters import make_trainer

from rl_core import timing
from rl_core.data.tokenizer import train_tokenizer
from rl_core.distributed import SINGLE_PROCESS
from rl_core.rollouts.batching import TrainRow
from rl_core.settings import CriticSettings, PolicySettings, ReplaySettings
from rl_core.timing import collect_seconds
from rl_core.trainers.policy_gradient import trainer as policy_gradient
from rl_core.trainers.policy_gradient.rollout_buffer import RolloutBuffer
from rl_core.trainers.policy_gradient.samples import ReplayBuffer, TrainingSample


def build_sample(number=0, temperature=1.0, **values):
    row = TrainRow(
        [5, 6 + number],
        [7, 8, 9],
        [True, False, True],
        [-0.5, 0.0, -0.25 * number],
        temperature=temperature,
    )
    return TrainingSample(row, **{"reward": 8.0, "is_truncated": False, **values})


def test_values_of_cut_and_finished_rows_by_hand():
    """Check loss tokens at 2 and 4 with values 1 and 2; 4 after the row; gamma 1/2, lambda 1/4; final reward 8."""
    settings = PolicySettings(algorithm="ppo", gamma=0.5, gae_lambda=0.25, whiten_advantages=False)
    actor_critic = SimpleNamespace(device=torch.device("cpu"), teacher=None)
    buffer = RolloutBuffer(
        actor_critic, settings, [[build_sample(is_truncated=True), build_sample()]]
    )
    buffer.values_RS = torch.tensor([[0.0, 0.0, 1.0, 0.0, 2.0]] * 2)
    buffer.value_after_R = torch.tensor([4.0, 4.0])
    metrics = buffer.estimate_advantages()
    # cut off: 8 + 4/2 - 2 = 8, and before it 0 + 2/2 - 1 + (1/8) 8 = 1; over: 8 - 2 = 6, and 0 + (1/8) 6
    assert buffer.advantages_RS.tolist() == [[0, 0, 1.0, 0, 8.0], [0, 0, 0.75, 0, 6.0]]
    assert buffer.returns_RS is not None
    assert buffer.returns_RS[:, [2, 4]].tolist() == [[2.0, 10.0], [1.75, 8.0]]
    assert (
        metrics["value/values_mean"] == 1.5
        and metrics["value/returns_mean"] == (2 + 10 + 1.75 + 8) / 4
    )


def test_groups_of_unequal_size_are_compared_each_within_itself():
    settings = PolicySettings(algorithm="dr_grpo")
    groups = [
        [build_sample(reward=1.0), build_sample(reward=0.0)],
        [build_sample(reward=3.0), build_sample(reward=0.0), build_sample(reward=0.0)],
        [build_sample(reward=9.0, advantage=0.75, is_replayed=True)],
        [
            build_sample(reward=4.0, is_masked=True),
            build_sample(reward=1.0),
            build_sample(reward=3.0),
        ],
    ]
    no_code = SimpleNamespace(advantages=None)  # a user-defined function without advantages
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
    buffer.estimate_advantages()
    # r - mean: of 1/2, of 1, replayed as it was; masked: none, the others against their mean of 2
    expected = [0.5, -0.5, 2.0, -1.0, -1.0, 0.75, 0.0, -1.0, 1.0]
    assert buffer.advantages_RS.tolist() == [
        [0, 0, advantage, 0, advantage] for advantage in expected
    ]
    assert buffer.mask_RS.any(1).tolist() == [True] * 6 + [False, True, True]
    assert [[s.advantage for s in group] for group in groups] == [
        [0.5, -0.5],
        [2.0, -1.0, -1.0],
        [0.75],
        [0.0, -1.0, 1.0],
    ]


def test_a_penalty_in_the_reward_is_taken_off_where_it_stands():
    settings = PolicySettings(algorithm="ppo", gamma=0.5, gae_lambda=0.25, whiten_advantages=False)
    buffer = RolloutBuffer(
        SimpleNamespace(device=torch.device("cpu"), teacher=None), settings, [[build_sample()]]
    )
    buffer.values_RS, buffer.value_after_R = torch.zeros(1, 5), torch.zeros(1)
    buffer.old_logprobs_RS = torch.tensor([[0.0, 0.0, -1.0, 0.0, -2.0]])
    buffer.ref_logprobs_RS = torch.tensor(
        [[0.0, 0.0, -3.0, 0.0, -1.0]]
    )  # k1 is 2 at the first, -1 at the second
    buffer.estimate_advantages(kl_reward_coef=0.5)
    # rewards 0 - 1 and 8 + 1/2; A = 8.5, and -1 + (1/8) 8.5
    assert buffer.advantages_RS.tolist() == [[0, 0, 0.0625, 0, 8.5]]


def test_the_replay_buffer_draws_uniformly_and_is_restored_completely():
    buffer = ReplayBuffer(ReplaySettings(iterations=2, share=0.5))
    for iteration in range(3):
        buffer.add_groups(
            [
                [
                    build_sample(
                        10 * iteration + group,
                        reward=float(group),
                        is_truncated=group % 2 == 0,
                        is_masked=group % 3 == 0,
                        advantage=0.5 * group,
                        temperature=0.5 + group,
                    )
                ]
                for group in range(6)
            ]
        )
    selected = [16 + group for group in range(6)] + [
        26 + group for group in range(6)
    ]  # the oldest iteration was dropped
    restored = ReplayBuffer(buffer.settings)
    restored.load_state_dict(buffer.state_dict())
    for each in (buffer, restored):
        picked = sorted(np.random.default_rng(3).choice(12, size=4, replace=False).tolist())
        assert picked != list(range(4))
        drawn = [
            s for group in each.draw_groups(np.random.default_rng(3), 8) for s in group
        ]  # half as many as there are fresh ones
        assert [s.row.prompt_ids[1] for s in drawn] == [selected[index] for index in picked]
        groups = [index % 6 for index in picked]
        assert [
            (s.reward, s.is_truncated, s.is_masked, s.advantage, s.is_replayed) for s in drawn
        ] == [(float(g), g % 2 == 0, g % 3 == 0, 0.5 * g, True) for g in groups]
        assert [list(s.row.sampler_logprobs or ()) for s in drawn] == [
            [-0.5, 0.0, -0.25 * (selected[index] - 6)] for index in picked
        ]
        assert [s.row.temperature for s in drawn] == [0.5 + g for g in groups]
        assert len(each.draw_groups(np.random.default_rng(0), 100)) == 12


def test_a_buffer_saved_without_temperatures_holds_samples_at_1():
    buffer = ReplayBuffer(ReplaySettings(iterations=1, share=1.0))
    buffer.add_groups([[build_sample(temperature=0.5)]])
    state = buffer.state_dict()
    del state["temperatures"]
    buffer.load_state_dict(state)
    assert [
        [s.row.temperature for s in group]
        for group in buffer.draw_groups(np.random.default_rng(0), 1)
    ] == [[1.0]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"algorithm": "grpo"}, False),
        ({"algorithm": "ppo"}, False),
        ({"algorithm": "ppo", "critic": CriticSettings(bootstrap_limits=True)}, True),
    ],
)
def test_the_trainer_asks_for_limits_as_the_critic_s_settings_say(monkeypatch, options, expected):
    requests = []

    def record_limits(groups, *, bootstrap_limits=False, **others):
        requests.append(bootstrap_limits)
        raise InterruptedError  # enough was recorded

    monkeypatch.setattr(policy_gradient, "build_sample_groups", record_limits)
    trainer = make_trainer(
        train_tokenizer(["abc xyz"], 300), prompts_per_iteration=2, group_size=2, **options
    )
    with pytest.raises(InterruptedError):
        trainer.step()
    assert requests == [expected]


def test_each_measurement_counts_under_its_name(monkeypatch):
    """Check times: the reference's pass costs 100 seconds of this clock, the policy's 10, the critic's 1."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def advance_clock(seconds):
        now[0] += seconds
        return torch.zeros(1, 5)

    critic = torch.nn.Linear(1, 1)
    sharded = SimpleNamespace(run_independently_with_full_weights=lambda work: work())
    optimizer_step = SimpleNamespace(
        enable_autocast=contextlib.nullcontext, sharded=sharded, process_group=SINGLE_PROCESS
    )
    actor_critic = SimpleNamespace(
        device=torch.device("cpu"),
        policy="policy",
        reference="reference",
        critic=critic,
        optimizer_step=optimizer_step,
        critic_optimizer_step=None,
    )
    buffer = RolloutBuffer(actor_critic, PolicySettings(algorithm="ppo"), [[build_sample()]])
    monkeypatch.setattr(
        buffer,
        "_compute_logprobs",
        lambda model, plan: advance_clock({"policy": 10, "reference": 100}[model]),
    )
    monkeypatch.setattr(buffer, "run_on_each_batch", lambda plan, function: advance_clock(1))
    with collect_seconds() as seconds:
        buffer.compute_old_logprobs([[0]])
    assert seconds == {"measure": 10}
    with collect_seconds() as seconds:
        buffer.compute_values([[0]])
    assert seconds == {"measure": 1}
    with collect_seconds() as seconds:
        buffer.compute_ref_logprobs([[0]])
    assert seconds == {"reference": 100}
