"""Aggregation, importance weights and masks, and V-trace inside the trainer: by plain passes over the model."""

import math

import numpy as np
import pytest
import torch
from helpers.letters import LOW, FewLetters, make_trainer, resumes_bit_for_bit
from oracles import policy_oracles as oracle

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import SettingsError
from rl_core.rollouts.batching import TrainRow
from rl_core.settings import CriticSettings, PolicySettings, ReplaySettings, SamplingSettings
from rl_core.trainers.policy_gradient.rollout_buffer import RolloutBuffer
from rl_core.trainers.policy_gradient.samples import TrainingSample
from rl_core.trainers.policy_gradient.update import PolicyUpdate

ROWS = [  # prompt, completion, loss mask, sampler's log-probs, reward; ragged, with an observation in two of them
    ([5, 6], [7, 8, 9, 10], [True, True, False, True], [-5.0, -7.0, 0.0, -6.0], 1.0),
    ([5, 6], [7], [True], [-6.5], 0.0),
    ([5], [11, 12, 13], [True, False, True], [-5.5, 0.0, -6.25], 0.5),
    ([5], [14, 15], [True, True], [-6.0, -6.0], 2.0),
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def build_samples(temperature=1.0):
    created = [
        TrainingSample(TrainRow(*row[:4], temperature=temperature), row[4], False) for row in ROWS
    ]
    return [created[:2], created[2:]]


def compute_distributions(model, row, temperature=1.0):
    """Compute log-probs of all words before each token of the completion, float64."""
    ids = torch.tensor([row[0] + row[1]])
    logits = model(input_ids=ids).logits[0].double() / temperature
    return logits.log_softmax(-1)[len(row[0]) - 1 : -1]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "gspo", "sapo"])
def test_kl_and_entropy_are_aggregated_as_the_policy_loss(tokenizer, algorithm, temperature):
    """Check that at ratio 1 the loss is -A + 0.3 k3 - 0.2 H at every token, summed with the algorithm's weights."""
    reference = make_trainer(tokenizer, model_seed=3).policy
    trainer = make_trainer(
        tokenizer,
        algorithm=algorithm,
        reference=reference,
        kl_coef=0.3,
        entropy_coef=0.2,
        micro_batch_tokens=8,
        sampling=SamplingSettings(max_completion_tokens=9),
    )
    update = PolicyUpdate(trainer.actor_critic, trainer.settings, build_samples(temperature))
    results, parts = [], []
    apply = trainer.optimizer_step.run_step
    trainer.optimizer_step.run_step = lambda batches, loss: (
        results.append(apply(batches, loss)) or parts.append(len(batches)) or results[0]
    )
    reference_of = [compute_distributions(reference, row, temperature) for row in ROWS]
    policy_of = [compute_distributions(trainer.policy, row, temperature) for row in ROWS]
    update.run_optimizer_steps(np.random.default_rng(0))
    tokens = {"grpo": 1 / 8, "dr_grpo": 1 / 36}
    expected, kl_mean = 0.0, 0.0
    for index, (row, ours, theirs) in enumerate(zip(ROWS, policy_of, reference_of, strict=True)):
        advantage = update.buffer.samples[index].advantage
        length = sum(row[2])
        for t, counts in enumerate(row[2]):
            if not counts:
                continue
            now, base = float(ours[t, row[1][t]]), float(theirs[t, row[1][t]])
            k3 = math.exp(base - now) - 1 + now - base
            entropy = float(-(ours[t].exp() * ours[t]).sum())
            gate = (
                4 / (1.05 if advantage <= 0 else 1.0) / 2 if algorithm == "sapo" else 1.0
            )  # sigmoid(0) = 1/2
            weight = tokens.get(algorithm, 1 / 4 / length)
            expected += weight * (-gate * advantage + 0.3 * k3 - 0.2 * entropy)
            kl_mean += k3 / 8
    assert parts[0] > 1  # in several micro-batches
    assert results[0]["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert results[0]["policy/ref_kl"] == pytest.approx(kl_mean, rel=1e-5)  # metrics stay per token


def test_later_steps_of_reinforce_are_weighted_by_the_policy_as_it_is(tokenizer):
    """Check that the weight is of the current policy, not the first: the loss has no ratio to the old policy."""
    trainer = make_trainer(
        tokenizer, algorithm="reinforce", importance="token", importance_cap=3.0, epochs=2
    )
    update = PolicyUpdate(trainer.actor_critic, trainer.settings, build_samples())
    measured = []

    def apply_and_scale(batches, loss):
        parts = [loss(batch)[1] for batch in batches]
        measured.append(sum(float(part["policy/importance_mean"]) for part in parts))
        if len(measured) == 1:
            with torch.no_grad():
                for parameter in trainer.policy.parameters():
                    parameter.mul_(3.0)
        return {"train/loss": 0.0}

    trainer.optimizer_step.run_step = apply_and_scale
    expected = []

    def mean_weight():
        results = []
        for row in ROWS:
            logp = compute_distributions(trainer.policy, row)
            results += [
                min(3.0, math.exp(float(logp[t, row[1][t]]) - row[3][t]))
                for t in range(len(row[1]))
                if row[2][t]
            ]
        return sum(results) / len(results)

    expected.append(mean_weight())
    update.run_optimizer_steps(np.random.default_rng(0))
    expected.append(mean_weight())
    assert abs(expected[1] - expected[0]) > 0.05
    assert measured == pytest.approx(expected, rel=1e-4)


# log-ratios of each row's loss tokens (None = observation), and which tokens stay within [e^-1.1, e^1.1]
DROPPED = {
    "token": (
        [[0.0, 2.0, None, -1.0], [0.5], [1.5, None, -2.0], [0.9, 0.9]],
        [[1, 0, None, 1], [1], [0, None, 0], [1, 1]],
    ),
    "sequence": (  # sums 1.5, 0.5, -1.5, 1.8
        [[0.5, 2.0, None, -1.0], [0.5], [0.5, None, -2.0], [0.9, 0.9]],
        [[0, 0, None, 0], [1], [0, None, 0], [0, 0]],
    ),
    "geometric": (  # means 0.33, 0.5, -0.25, 1.2
        [[0.0, 2.0, None, -1.0], [0.5], [1.5, None, -2.0], [0.9, 1.5]],
        [[1, 1, None, 1], [1], [1, None, 1], [0, 0]],
    ),
}


@pytest.mark.parametrize("level", DROPPED)
def test_what_leaves_the_interval_is_dropped_and_still_counts(tokenizer, level):
    logs, selected = DROPPED[level]
    dropped = sum(k == 0 for row in selected for k in row) / 8
    trainer = make_trainer(
        tokenizer,
        importance_mask=level,
        importance_low=math.exp(-1.1),
        importance_high=math.exp(1.1),
        algorithm="dr_grpo",
        loss_aggregation="token_mean",
    )
    groups = build_samples()
    for row, sample, log in zip(ROWS, [s for group in groups for s in group], logs, strict=True):
        logp = compute_distributions(trainer.policy, row).detach()
        sample.row.sampler_logprobs = [
            0.0 if x is None else float(logp[t, row[1][t]]) - x for t, x in enumerate(log)
        ]
    update = PolicyUpdate(trainer.actor_critic, trainer.settings, groups)
    observed = []
    apply = trainer.optimizer_step.run_step
    trainer.optimizer_step.run_step = lambda batches, loss: (
        observed.append(apply(batches, loss)) or observed[0]
    )
    metrics = update.run_optimizer_steps(np.random.default_rng(0))
    advantages = [0.5, -0.5, -0.75, 0.75]
    expected = (
        -sum(a * sum(k or 0 for k in ks) for a, ks in zip(advantages, selected, strict=True)) / 8
    )  # ratio 1; the denominator stays 8
    assert observed[0]["train/loss"] == pytest.approx(expected, abs=1e-6)
    assert metrics["policy/importance_dropped"] == pytest.approx(dropped)
    assert metrics["policy/importance_mean"] == pytest.approx(1 - dropped)


def test_vtrace_advantages_equal_the_oracle(tokenizer):
    trainer = make_trainer(
        tokenizer,
        algorithm="ppo",
        importance="vtrace",
        gamma=0.9,
        gae_lambda=0.8,
        vtrace_c=0.7,
        importance_cap=1.5,
        whiten_advantages=False,
    )
    torch.manual_seed(1)
    with torch.no_grad():
        trainer.model.critic.head.head.weight.normal_()
    groups = build_samples()
    groups[1][0].is_truncated = True
    update = PolicyUpdate(trainer.actor_critic, trainer.settings, groups)
    update.run_optimizer_steps(np.random.default_rng(0))
    buffer: RolloutBuffer = update.buffer
    mask, rewards = buffer.mask_RS.numpy(), np.zeros(buffer.shape)
    for index, row in enumerate(ROWS):
        rewards[index, np.flatnonzero(mask[index])[-1]] = row[4]
    truncated = np.array([False, False, True, False])
    case = oracle.Case(
        mask=mask,
        new=mask,
        old=buffer.old_logprobs_RS.double().numpy(),
        sampler=buffer.sampler_logprobs_RS.double().numpy(),
        reference=mask,
        advantages=mask,
        rewards=rewards,
        values=buffer.values_RS.double().numpy(),
        bootstrap=np.where(truncated, buffer.value_after_R.numpy(), 0.0),
        max_tokens=1,
    )
    assert [round(float(x), 2) for x in case.sampler[0][mask[0]]] == [-5.0, -7.0, -6.0]
    ratio = oracle.ratios(case.old, case.sampler, mask, "token")
    assert (ratio[mask] > 1.5).any() and (ratio[mask] < 1).any()  # truncated and not
    advantages, targets = oracle.vtrace(case, ratio, 0.9, 0.8, 1.5, 0.7)
    np.testing.assert_allclose(buffer.advantages_RS.numpy(), advantages, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(buffer.returns_RS.numpy(), targets, rtol=1e-4, atol=1e-5)


OFF_POLICY = dict(
    algorithm="ppo",
    importance="vtrace",
    replay=ReplaySettings(iterations=2, share=0.5),
    epochs=2,
    learning_rate=5e-3,
    importance_mask="geometric",
    importance_low=0.1,
    importance_high=10.0,
)


@pytest.mark.slow
def test_vtrace_learns_from_replayed_rollouts(tokenizer):
    trainer = make_trainer(tokenizer, FewLetters(), curriculum=LOW, **OFF_POLICY)
    metrics = [trainer.step() for _ in range(26)]
    rates = [part["train/success_rate"] for part in metrics]
    assert sum(rates[:3]) / 3 < 0.45 and sum(rates[-3:]) / 3 > 0.7
    assert metrics[0]["policy/importance_mean"] == pytest.approx(1, abs=1e-4)  # only fresh ones
    assert all(0 < part["policy/effective_sample_share"] <= 1 for part in metrics)


def test_vtrace_resumes_bit_for_bit(tokenizer):
    assert resumes_bit_for_bit(
        lambda: make_trainer(tokenizer, FewLetters(), curriculum=LOW, **OFF_POLICY)
    )


def test_weights_that_nothing_uses_are_refused():
    with pytest.raises(SettingsError, match="importance: vtrace corrects a critic's targets"):
        PolicySettings(algorithm="grpo", importance="vtrace")
    with pytest.raises(SettingsError, match="set epochs and minibatches to 1"):
        PolicySettings(
            algorithm="reinforce", critic=CriticSettings(), importance="vtrace", epochs=2
        )
    with pytest.raises(SettingsError, match="clip_eps: sapo has a soft gate"):
        PolicySettings(algorithm="sapo", clip_eps_high=0.3)
    assert (
        PolicySettings(
            algorithm="reinforce", critic=CriticSettings(), importance="vtrace"
        ).weight_cap
        == 1.0
    )
    assert PolicySettings(importance="token").weight_cap == 2.0
    defaults = {
        name: PolicySettings(algorithm=name).aggregation
        for name in ("grpo", "dapo", "ppo", "dr_grpo", "gspo")
    }
    assert defaults == {
        "grpo": "token_mean",
        "dapo": "token_mean",
        "ppo": "token_mean",
        "dr_grpo": "constant",
        "gspo": "sequence_mean",
    }
