"""Every algorithm's advantages and loss inside the trainer: by hand, by identity, and across a resume."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers.letters import LOW, comparable, make_trainer, weights
from helpers.policy_recipes import RECIPES, build_recipe

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import DataError
from rl_core.losses.advantages import batch_advantages
from rl_core.rollouts.batching import TrainRow
from rl_core.settings import (
    CriticSettings,
    PolicySettings,
    SamplingSettings,
)
from rl_core.trainers.policy_gradient.advantages import (
    compute_relative_advantages,
    compute_value_advantages,
    scatter_rewards_to_last_token,
)
from rl_core.trainers.policy_gradient.losses import (
    LossDenominators,
    compute_policy_loss,
)
from rl_core.trainers.policy_gradient.rollout_buffer import RolloutBuffer
from rl_core.trainers.policy_gradient.samples import (
    TrainingSample,
)
from rl_core.trainers.policy_gradient.update import PolicyUpdate


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def play_groups(trainer):
    return [rollout for group in trainer.groups for rollout in group.rollouts]


def test_rewards_stand_on_the_last_loss_token():
    mask = torch.tensor([[False, True, True, False], [False, True, False, False]])
    actual = scatter_rewards_to_last_token(torch.tensor([2.0, -1.0]), mask)
    assert actual.tolist() == [[0, 0, 2, 0], [0, -1, 0, 0]]
    with pytest.raises(DataError, match="no loss token"):
        scatter_rewards_to_last_token(torch.tensor([1.0]), torch.zeros(1, 3, dtype=torch.bool))


def test_value_advantages_by_hand():
    # two loss tokens with an observation between them; V = 0.5, 0.25; lambda 0.5, gamma 1
    mask = torch.tensor([[True, False, True]] * 2)
    values = torch.tensor([[0.5, 9.0, 0.25]] * 2)
    advantages, returns = compute_value_advantages(
        torch.tensor([1.0, 1.0]),
        torch.tensor([False, True]),
        values,
        torch.tensor([7.0, 2.0]),
        mask,
        gamma=1.0,
        gae_lambda=0.5,
    )
    # terminated: delta_1 = 1 - 0.25 = 0.75; delta_0 = 0.25 - 0.5 = -0.25; A_0 = -0.25 + 0.5 * 0.75 = 0.125
    # truncated: delta_1 = 1 + 2 - 0.25 = 2.75; A_0 = -0.25 + 0.5 * 2.75 = 1.125
    assert advantages.tolist() == [[0.125, 0.0, 0.75], [1.125, 0.0, 2.75]]
    assert returns.tolist() == [[0.625, 0.0, 1.0], [1.625, 0.0, 3.0]]


def test_a_kl_penalty_is_taken_off_each_token():
    mask = torch.tensor([[True, True]])
    penalty = torch.tensor([[0.1, -0.3]])
    advantages, _ = compute_value_advantages(
        torch.tensor([1.0]),
        torch.tensor([False]),
        torch.zeros(1, 2),
        torch.zeros(1),
        mask,
        gamma=1.0,
        gae_lambda=1.0,
        kl_penalty_RS=penalty,
    )
    assert advantages.tolist() == [pytest.approx([1.0 + 0.3 - 0.1, 1.0 + 0.3])]


HALF = 0.5 / (0.5**0.5 + 1e-4)  # (1 - 1/2) over the std of (1, 0), which is sqrt(1/2)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("dr_grpo", [[0.5, -0.5], [0.0, 0.0]]),
        ("rloo", [[1.0, -1.0], [0.0, 0.0]]),
        ("maxrl", [[1.0, -1.0], [0.0, 0.0]]),  # mean 1/2
        # one component: grpo's over the batch's deviation, sqrt((2 HALF^2) / 3)
        (
            "gdpo",
            [[x / (HALF * (2 / 3) ** 0.5 + 1e-4) for x in (HALF, -HALF)], [0.0, 0.0]],
        ),
        *[
            (name, [[HALF, -HALF], [0.0, 0.0]])
            for name in ("grpo", "dapo", "gspo", "cispo", "dppo")
        ],
        # mean 1/4, unbiased variance (0.75^2 + 3 * 0.25^2) / 3 = 1/4
        ("reinforce", [[0.75 / 0.5001, -0.25 / 0.5001], [-0.25 / 0.5001, -0.25 / 0.5001]]),
    ],
)
def test_comparison_advantages_by_hand(algorithm, expected):
    groups = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64).unbind()
    actual = compute_relative_advantages(groups, algorithm)
    assert torch.allclose(
        torch.stack(actual), torch.tensor(expected, dtype=torch.float64), atol=1e-12
    )


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("dr_grpo", [[0.5, -0.5], [2.0, -1.0, -1.0], [-0.5, 0.5], [0.0]]),
        ("rloo", [[1.0, -1.0], [3.0, -1.5, -1.5], [-1.0, 1.0], [0.0]]),
        # mean 5/8; squares 2 (3/8)^2 + 5 (5/8)^2 + (19/8)^2 = 504/64, over 7: 9/8
        (
            "reinforce",
            [
                [x / (1.125**0.5 + 1e-4) for x in row]
                for row in ([0.375, -0.625], [2.375, -0.625, -0.625], [-0.625, 0.375], [-0.625])
            ],
        ),
    ],
)
def test_groups_may_differ_in_size(algorithm, expected):
    rewards = [[1.0, 0.0], [3.0, 0.0, 0.0], [0.0, 1.0], [0.0]]
    actual = compute_relative_advantages(
        [torch.tensor(row, dtype=torch.float64) for row in rewards], algorithm
    )
    assert [row.tolist() for row in actual] == [pytest.approx(row, abs=1e-12) for row in expected]


def test_ppo_has_no_advantages_without_values():
    with pytest.raises(DataError, match="without a critic"):
        compute_relative_advantages([torch.ones(2)], "ppo")


def test_losses_by_hand():
    """Check one row of two tokens at ratio (2, 1/2), A = (1, -1), and an untrained row that counts: 3 loss tokens."""
    old = torch.zeros(1, 2)
    new = torch.tensor([[math.log(2.0), math.log(0.5)]])
    advantages = torch.tensor([[1.0, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    counts = LossDenominators(
        num_loss_tokens=3, num_forward_tokens=2, num_sequences=2, num_forward_sequences=1
    )

    def compute_loss(algorithm, **options):
        settings = PolicySettings(algorithm=algorithm, group_size=2, **options)
        actual, metrics = compute_policy_loss(settings, new, old, advantages, mask, counts)
        assert metrics["loss"] == actual
        assert metrics["update_kl"] == pytest.approx(
            (2 - 1 - math.log(2) + 0.5 - 1 + math.log(2)) / 2
        )  # k3 of old || new
        return float(actual)

    # clipped: -1.2 at A = 1; at A = -1, ratio 1/2: max(0.5, 0.8) = 0.8
    for name in ("grpo", "rloo", "ppo"):
        assert compute_loss(name) == pytest.approx((-1.2 + 0.8) / 3)
    assert compute_loss("dapo") == pytest.approx((-1.28 + 0.8) / 3)
    assert compute_loss("grpo", clip_eps=0.1) == pytest.approx((-1.1 + 0.9) / 3)
    assert compute_loss("grpo", clip_eps=0.6, clip_eps_high=0.1) == pytest.approx((-1.1 + 0.5) / 3)
    # cispo: -min(r, 1.2) A log pi
    assert compute_loss("cispo") == pytest.approx((-1.2 * math.log(2) + 0.5 * math.log(0.5)) / 3)
    assert compute_loss("reinforce") == pytest.approx((-math.log(2) + math.log(0.5)) / 3)
    # sapo: -4 sigmoid(1) at A = 1, (4 / 1.05) sigmoid(-1.05 / 2) at A = -1; mean of the row's two tokens, over 2 rows
    p, q = 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(0.525))
    assert compute_loss("sapo") == pytest.approx((-4 * p + 4 / 1.05 * q) / 2 / 2)
    assert compute_loss("grpo", loss_aggregation="sequence_mean") == pytest.approx(
        (-1.2 + 0.8) / 2 / 2
    )
    # gspo: the sequence's ratio is exp(0) = 1, its advantage 0
    assert compute_loss("gspo") == pytest.approx(0.0)
    # dr_grpo: 4 rollouts of at most 5 tokens
    counts = LossDenominators(3, 2, 2, 1, num_rollouts=4)
    assert compute_loss(
        "dr_grpo", sampling=SamplingSettings(max_completion_tokens=5)
    ) == pytest.approx((-1.2 + 0.8) / 20)
    limit = {"sampling": SamplingSettings(max_completion_tokens=5)}
    assert compute_loss("cispo", loss_aggregation="constant", **limit) == pytest.approx(
        (-1.2 * math.log(2) + 0.5 * math.log(0.5)) / 20
    )
    advantages = torch.tensor([[1.0, 1.0]])
    assert compute_loss("gspo") == pytest.approx(-1.0 / 2)
    assert compute_loss("gspo", loss_aggregation="token_mean") == pytest.approx(
        -2.0 / 3
    )  # two of three tokens
    assert compute_loss("gspo", loss_aggregation="constant", **limit) == pytest.approx(-2.0 / 20)


@pytest.mark.parametrize(
    "algorithm", ["grpo", "rloo", "dapo", "cispo", "gspo", "sapo", "reinforce"]
)
def test_the_first_step_is_the_policy_gradient(tokenizer, algorithm):
    """Check that at ratio 1 all have the gradient of -A log pi, over tokens or (gspo, sapo) sequences."""
    options = {"dynamic_sampling_tries": 0, "overlong_buffer": 0} if algorithm == "dapo" else {}
    trainer = make_trainer(tokenizer, algorithm=algorithm, **options)
    trainer.step()
    rollouts = play_groups(trainer)
    advantages = [a for group in trainer.groups for a in group.advantages]
    rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float64).view(6, 6)
    if algorithm == "reinforce":
        assert advantages == batch_advantages(rewards).flatten().tolist()
    fresh = make_trainer(tokenizer, algorithm=algorithm, **options)
    samples = [
        TrainingSample(
            TrainRow(r.prompt_ids, r.completion_ids, r.loss_mask, r.sampler_logprobs),
            r.reward,
            False,
        )
        for r in rollouts
    ]
    groups = [samples[start : start + 6] for start in range(0, 36, 6)]
    update = PolicyUpdate(fresh.actor_critic, fresh.settings, groups)
    gradients = []
    fresh.optimizer_step.run_step = lambda batches, loss: (
        gradients.append(compute_gradient(fresh.policy, batches, loss)) or {}
    )
    update.run_optimizer_steps(np.random.default_rng(0))
    expected = []
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        length = sum(rollout.loss_mask)
        tokens = sum(sum(r.loss_mask) for r in rollouts)
        expected.append(
            advantage / (36 * length) if algorithm in ("gspo", "sapo") else advantage / tokens
        )
    actual = compute_reference_gradient(fresh.policy, rollouts, expected)
    assert torch.allclose(gradients[0], actual, atol=1e-6, rtol=1e-4)
    assert actual.norm() > 1e-3


def compute_gradient(model, batches, loss):
    model.zero_grad()
    for batch in batches:
        loss(batch)[0].backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def compute_reference_gradient(model, rollouts, factors):
    """Compute the gradient of -sum factor log pi(token), one full forward pass for each rollout."""
    model.zero_grad()
    for rollout, factor in zip(rollouts, factors, strict=True):
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        logp = model(input_ids=ids).logits[0].log_softmax(-1)
        start = len(rollout.prompt_ids)
        for t, counts in enumerate(rollout.loss_mask):
            if counts:
                (-factor * logp[start + t - 1, ids[0, start + t]]).backward(retain_graph=True)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", RECIPES)
def test_learns(tokenizer, name):
    trainer = build_recipe(tokenizer, name)
    rates = [trainer.step()["train/success_rate"] for _ in range(26)]
    assert sum(rates[:3]) / 3 < 0.45
    assert sum(rates[-3:]) / 3 > 0.7


@pytest.mark.parametrize(
    "name", ["ppo", "ppo_shared", "dapo", "sapo", "replay", "kl_reward", "turn_credit"]
)
def test_resumes_bit_for_bit(tokenizer, name):
    options = dict(
        minibatches=2,
        schedule="cosine",
        iterations=5,
        entropy_coef=0.01,
        entropy_decay=0.999,
        **(
            {"kl_controller": "adaptive", "kl_target": 0.001, "kl_horizon": 40}
            if name == "kl_reward"
            else {}
        ),
    )
    uninterrupted, first, second = (build_recipe(tokenizer, name, **options) for _ in range(3))
    expected = [comparable(uninterrupted.step()) for _ in range(5)]
    actual = [comparable(first.step()) for _ in range(2)]
    second.step()  # its earlier state is overwritten
    second.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    second.optimizer_step.load_state_dict(copy.deepcopy(first.optimizer_step.state_dict()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    actual += [comparable(second.step()) for _ in range(3)]
    assert actual == expected
    assert torch.equal(weights(second), weights(uninterrupted))


@pytest.mark.slow
def test_a_critic_learns_what_rollouts_are_worth(tokenizer):
    for kind in ("separate", "shared"):
        trainer = make_trainer(
            tokenizer,
            algorithm="ppo",
            critic=CriticSettings(kind=kind, learning_rate=1e-2),
            epochs=4,
            curriculum=LOW,
        )
        first = trainer.step()
        assert first["value/values_mean"] == 0 and first[
            "value/explained_variance"
        ] == pytest.approx(0)
        for _ in range(12):
            last = trainer.step()
        assert last["value/values_mean"] == pytest.approx(last["value/returns_mean"], abs=0.35)
        assert abs(last["train/advantages_mean"]) < 1e-5 and last[
            "train/advantages_std"
        ] == pytest.approx(1, abs=0.02)


def test_a_warming_critic_leaves_the_policy_alone(tokenizer):
    trainer = make_trainer(
        tokenizer, algorithm="ppo", critic=CriticSettings(warmup_iterations=2), epochs=2
    )
    before = copy_weights(trainer.policy)
    for step in (1, 2):
        metrics = trainer.step()
        assert (
            torch.equal(copy_weights(trainer.policy), before)
            and trainer.optimizer_step.num_steps == 2 * step
        )
        assert metrics["value/loss"] > 0 and "train/loss" not in metrics
    trainer.step()
    assert not torch.equal(copy_weights(trainer.policy), before)


def copy_weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_critics_agree_about_positions(tokenizer):
    """Check that a separate critic with the policy's trunk and a shared head of equal weights agree."""
    separate = make_trainer(tokenizer, algorithm="ppo")
    shared = make_trainer(tokenizer, algorithm="ppo", critic=CriticSettings(kind="shared"))
    torch.manual_seed(3)
    line = torch.randn(32)
    results = []
    for trainer in (separate, shared):
        head = trainer.model.value_head or trainer.model.critic.head
        with torch.no_grad():
            head.head.weight.copy_(line[None])
        rollouts = [
            ([5, 6, 7], [8, 9, 10, 11], [True, False, True, True]),
            ([5], [6, 7], [True, True]),
        ]
        samples = [
            TrainingSample(TrainRow(p, c, m, [0.0] * len(c)), 1.0, True) for p, c, m in rollouts
        ]
        buffer = RolloutBuffer(trainer.actor_critic, trainer.settings, [samples])
        buffer.compute_values([[0, 1]])
        results.append((buffer.values_RS, buffer.value_after_R))
        hidden = trainer.policy.base_model(
            input_ids=torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
        ).last_hidden_state[0]
        by_hand = (hidden @ line).detach()
        # V before token s is read at the position before it; 3 is the first loss token, 4 an observation
        assert torch.allclose(
            buffer.values_RS[0], torch.tensor([0, 0, 0, *by_hand[[2]], 0, *by_hand[[4, 5]]])
        )
        assert buffer.value_after_R[0] == pytest.approx(float(by_hand[6]), rel=1e-5)
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6) and torch.allclose(
        results[0][1], results[1][1], atol=1e-6
    )
