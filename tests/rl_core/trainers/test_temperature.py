"""Learning at temperatures other than 1: everything is of softmax(logits / T), the policy that acted.

The expected values come from the model's full logits, one unpadded forward pass for each rollout.
"""

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from helpers.letters import LOW, make_trainer
from transformers import LlamaConfig, LlamaForCausalLM

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import DataError, SettingsError
from rl_core.inference.engine import create_rollout_backend
from rl_core.inference.transformers_backend import TransformersBackend
from rl_core.models import causal_lm
from rl_core.rollouts.batching import TrainRow
from rl_core.settings import (
    CriticSettings,
    CurriculumStage,
    ModelSettings,
    PolicySettings,
    PreferenceSettings,
    ReplaySettings,
    RewardModelSettings,
    SamplingSettings,
)
from rl_core.trainers.policy_gradient import trainer as policy_gradient
from rl_core.trainers.policy_gradient.actor_critic import build_actor_critic
from rl_core.trainers.policy_gradient.samples import TrainingSample
from rl_core.trainers.policy_gradient.update import PolicyUpdate

TEMPERATURES = (0.5, 2.0)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def build_sharp_model(tokenizer, seed=0):
    """Build a model with preferences; an untrained one is nearly uniform at every temperature."""
    model = causal_lm.create_model(
        ModelSettings(preset="nano", context=32, device="cpu"), tokenizer, seed
    )
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8.0)
    return model


def build_trainer(tokenizer, temperature, **options):
    sampling = SamplingSettings(max_completion_tokens=3, temperature=temperature)
    return make_trainer(
        tokenizer, model=build_sharp_model(tokenizer), **{"sampling": sampling, **options}
    )


def compute_naive_logprobs(model, ids, start, temperature):
    """Compute [T] log-probabilities of ids[start:] and entropies, of softmax(logits / T)."""
    with torch.no_grad():
        logits_SV = (
            model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1].double() / temperature
        )
    log_p_TV = logits_SV.log_softmax(-1)
    return log_p_TV.gather(1, torch.tensor(ids[start:])[:, None])[:, 0], -(
        log_p_TV.exp() * log_p_TV
    ).sum(-1)


def compute_all_logprobs(model, rollouts, temperature):
    """Compute `compute_naive_logprobs` of all sampled tokens in order; every completion here is one action."""
    assert all(all(rollout.loss_mask) for rollout in rollouts)
    parts = [
        compute_naive_logprobs(
            model, [*r.prompt_ids, *r.completion_ids], len(r.prompt_ids), temperature
        )
        for r in rollouts
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat(
        [entropies for _, entropies in parts]
    )


def play_groups(trainer):
    return [rollout for group in trainer.groups for rollout in group.rollouts]


def build_toy_model(vocabulary=4):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=8,
            initializer_range=0.5,
            tie_word_embeddings=False,
            pad_token_id=0,
        )
        return LlamaForCausalLM(config)


def compute_gradient(model, value):
    model.zero_grad()
    value.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    "algorithm", ["grpo", "dr_grpo", "rloo", "dapo", "cispo", "gspo", "reinforce"]
)
def test_the_expected_gradient_is_that_of_the_policy_that_acted(algorithm, temperature):
    """Compare all 16 answers of two tokens, weighted by their probability, with d/dtheta sum_y pi_T(y) R(y).

    R depends on the first token alone, so the second token's logits have no part in the exact gradient. With
    advantages pi_T(y) R(y) the losses are means over 32 tokens (gspo: 16 sequences of 2), hence the factor.
    """
    model = build_toy_model()
    pairs = list(itertools.product(range(4), repeat=2))
    rewards = torch.tensor(
        [(1.0, -0.5, 0.25, 2.0)[first] for first, _ in pairs], dtype=torch.float64
    )
    first_V = (model(torch.tensor([[1]])).logits[0, -1].double() / temperature).softmax(-1)
    second_VV = (
        model(torch.tensor([[1, token] for token in range(4)])).logits[:, -1].double() / temperature
    ).softmax(-1)
    p = torch.stack([first_V[a] * second_VV[a, b] for a, b in pairs])
    expected = -compute_gradient(model, (p * rewards).sum()) / 32
    weighed = (p * rewards).detach().tolist()
    settings = PolicySettings(
        algorithm=algorithm,
        group_size=16,
        prompts_per_iteration=1,
        sampling=SamplingSettings(max_completion_tokens=2, temperature=temperature),
        overlong_buffer=0,
    )
    samples = [
        TrainingSample(
            TrainRow([1], pair, [True, True], [0.0, 0.0], temperature), 0.0, False, weight, True
        )
        for pair, weight in zip(pairs, weighed, strict=True)
    ]
    update = PolicyUpdate(build_actor_critic(model, None, settings, 0), settings, [samples])
    results = []
    update.actor_critic.optimizer_step.run_step = lambda batches, loss: (
        results.append(compute_gradient(model, sum(loss(batch)[0] for batch in batches))) or {}
    )
    update.run_optimizer_steps(np.random.default_rng(0))
    torch.testing.assert_close(results[0], expected, atol=1e-7, rtol=1e-4)
    assert expected.norm() > 1e-3


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("term", ["entropy", "kl"])
def test_the_gradients_of_entropy_and_kl_are_of_the_policy_that_acted(term, temperature):
    """Compare the terms, as all rewards are equal, with autograd through all logits over T."""
    model, reference = build_toy_model(), build_toy_model()
    with torch.no_grad():
        reference.lm_head.weight.add_(
            0.3 * torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
        )
    pairs = [(0, 2), (3, 1), (1, 1)]
    settings = PolicySettings(
        algorithm="rloo",
        group_size=3,
        prompts_per_iteration=1,
        kl_coef=0.5 if term == "kl" else 0.0,
        entropy_coef=0.7 if term == "entropy" else 0.0,
        sampling=SamplingSettings(max_completion_tokens=2, temperature=temperature),
    )
    total = torch.zeros((), dtype=torch.float64)
    for pair in pairs:
        logits, others = (
            m(torch.tensor([[1, *pair]])).logits[0, :2].double() / temperature
            for m in (model, reference)
        )
        log_p, log_q = logits.log_softmax(-1), others.log_softmax(-1).detach()
        if term == "entropy":
            total = total + 0.7 * (log_p.exp() * log_p).sum()  # minus the entropy
        else:
            d = (log_p - log_q).gather(1, torch.tensor(pair)[:, None])
            total = total + 0.5 * ((-d).exp() - 1 + d).sum()
    expected = compute_gradient(model, total / 6)
    samples = [
        TrainingSample(TrainRow([1], pair, [True, True], [0.0, 0.0], temperature), 1.0, False)
        for pair in pairs
    ]
    update = PolicyUpdate(build_actor_critic(model, reference, settings, 0), settings, [samples])
    results = []
    update.actor_critic.optimizer_step.run_step = lambda batches, loss: (
        results.append(compute_gradient(model, sum(loss(batch)[0] for batch in batches))) or {}
    )
    update.run_optimizer_steps(np.random.default_rng(0))
    torch.testing.assert_close(results[0], expected, atol=1e-6, rtol=1e-4)
    assert expected.norm() > 1e-2


ALGORITHMS = {
    **{
        name: dict(algorithm=name)
        for name in ("grpo", "dr_grpo", "rloo", "cispo", "gspo", "reinforce")
    },
    "dapo": dict(algorithm="dapo", dynamic_sampling_tries=0, overlong_buffer=0),
    "ppo": dict(algorithm="ppo"),
    "ppo shared": dict(algorithm="ppo", critic=CriticSettings(kind="shared")),
    "cut": dict(algorithm="grpo", micro_batch_tokens=20),
}


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_kl_and_entropy_of_every_algorithm_are_of_the_policy_that_acted(
    tokenizer, name, temperature
):
    trainer = build_trainer(
        tokenizer,
        temperature,
        reference=build_sharp_model(tokenizer, 1),
        kl_coef=0.1,
        importance="token",
        **ALGORITHMS[name],
    )
    before = copy.deepcopy(trainer.policy)
    metrics = trainer.step()
    rollouts = play_groups(trainer)
    assert {rollout.temperature for rollout in rollouts} == {temperature}
    logprobs, entropies = compute_all_logprobs(before, rollouts, temperature)
    reference, _ = compute_all_logprobs(trainer.actor_critic.reference, rollouts, temperature)
    sampler = torch.tensor(
        [value for rollout in rollouts for value in rollout.sampler_logprobs], dtype=torch.float64
    )
    assert (sampler - logprobs).abs().max() < 1e-4
    assert (sampler - compute_all_logprobs(before, rollouts, 1.0)[0]).abs().max() > 0.1
    assert metrics["policy/mean_logprob"] == pytest.approx(float(logprobs.mean()), abs=1e-5)
    assert metrics["policy/entropy"] == pytest.approx(float(entropies.mean()), rel=1e-4)
    distance = reference - logprobs
    assert metrics["policy/ref_kl"] == pytest.approx(
        float((distance.exp() - distance - 1).mean()), rel=1e-4
    )
    # on policy: ratio and weights are 1
    assert (
        metrics["policy/sampler_difference_max"] < 1e-4 and abs(metrics["policy/sampler_kl"]) < 1e-6
    )
    assert metrics["policy/importance_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["policy/effective_sample_share"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_kl_in_the_reward_is_of_the_policy_that_acted(tokenizer, temperature, epochs):
    """Check that a single update uses the sampler's log-probs for the policy's, and that two measure them."""
    trainer = build_trainer(
        tokenizer,
        temperature,
        reference=build_sharp_model(tokenizer, 1),
        kl_coef=0.1,
        kl_in="reward",
        algorithm="rloo",
        epochs=epochs,
    )
    before = copy.deepcopy(trainer.policy)
    metrics = trainer.step()
    logprobs, _ = compute_all_logprobs(before, play_groups(trainer), temperature)
    reference, _ = compute_all_logprobs(
        trainer.actor_critic.reference, play_groups(trainer), temperature
    )
    assert metrics["policy/ref_kl"] == pytest.approx(float((logprobs - reference).mean()), rel=1e-4)


@pytest.mark.parametrize("backend_class", ["engine", "transformers"])
def test_weights_show_that_another_temperature_acted(tokenizer, backend_class):
    """Check a sampler at 2 that says 1: weights pi_1 / pi_2, cut at the cap."""
    trainer = build_trainer(
        tokenizer, 1.0, importance="token", importance_cap=1.5, filter_threshold=0.0
    )
    make = create_rollout_backend if backend_class == "engine" else TransformersBackend
    inner = make(trainer.policy, eos_ids=range(0, len(tokenizer), 2), pad_id=0, max_length=32)
    run = inner.run_sequences
    inner.run_sequences = lambda sequences, sampling: run(
        sequences, dataclasses.replace(sampling, temperature=2.0)
    )
    trainer.backend = inner
    before = copy.deepcopy(trainer.policy)
    metrics = trainer.step()
    learned = [
        r for g in trainer.groups for r, a in zip(g.rollouts, g.advantages, strict=True) if a != 0
    ]
    weights = (
        (
            compute_all_logprobs(before, learned, 1.0)[0]
            - compute_all_logprobs(before, learned, 2.0)[0]
        )
        .exp()
        .clamp(max=1.5)
    )
    assert metrics["policy/importance_mean"] == pytest.approx(float(weights.mean()), rel=1e-3)
    assert metrics["policy/effective_sample_share"] < 0.97 and metrics["policy/sampler_kl"] > 0.01


def test_the_hard_kl_limit_is_of_the_policy_that_acted(tokenizer):
    trainer = build_trainer(tokenizer, 2.0, kl_max=1e9, learning_rate=1e-2)
    before = copy.deepcopy(trainer.policy)
    metrics = trainer.step()
    learned = [
        r for g in trainer.groups for r, a in zip(g.rollouts, g.advantages, strict=True) if a != 0
    ]
    moved = (
        compute_all_logprobs(trainer.policy, learned, 2.0)[0]
        - compute_all_logprobs(before, learned, 2.0)[0]
    )
    assert metrics["policy/kl_after_max"] == pytest.approx(
        float((moved.exp() - moved - 1).mean()), rel=1e-3
    )


def test_a_replayed_sample_keeps_the_temperature_of_its_stage(tokenizer, monkeypatch):
    """Check stages that sample at 1/2 and 2: with unchanged weights nothing is off policy, so all weights are 1."""
    stages = (
        CurriculumStage(name="cold", levels={"low": 1.0}, temperature=0.5, max_iterations=1),
        CurriculumStage(name="hot", levels={"low": 1.0}, temperature=2.0),
    )
    updates = []

    class RecordedUpdate(PolicyUpdate):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            updates.append(self)

    monkeypatch.setattr(policy_gradient, "PolicyUpdate", RecordedUpdate)

    def make_replaying_trainer():
        return build_trainer(
            tokenizer,
            1.0,
            curriculum=stages,
            importance="token",
            replay=ReplaySettings(iterations=2, share=0.5),
            learning_rate=1e-12,
            entropy_coef=0.01,
        )

    trainer = make_replaying_trainer()
    trainer.step()
    assert {rollout.temperature for rollout in play_groups(trainer)} == {0.5}
    resumed = make_replaying_trainer()
    resumed.load_state_dict(copy.deepcopy(trainer.state_dict()))
    for each in (trainer, resumed):
        metrics = each.step()
        samples = updates[-1].buffer.samples
        assert {(sample.is_replayed, sample.row.temperature) for sample in samples} == {
            (False, 2.0),
            (True, 0.5),
        }
        assert metrics["policy/sampler_difference_max"] < 1e-4
        assert metrics["policy/importance_mean"] == pytest.approx(1, abs=1e-4)
        entropies = [
            compute_naive_logprobs(
                each.policy,
                [*s.row.prompt_ids, *s.row.completion_ids],
                len(s.row.prompt_ids),
                s.row.temperature,
            )[1]
            for s in samples
        ]
        assert metrics["policy/entropy"] == pytest.approx(
            float(torch.cat(entropies).mean()), rel=1e-4
        )
    assert trainer.settings.sampling.temperature == 1.0


def test_greedy_rollouts_are_refused():
    greedy = SamplingSettings(temperature=0)
    for settings in (PolicySettings, PreferenceSettings, RewardModelSettings):
        with pytest.raises(SettingsError, match=r"^sampling\.temperature: 0 is greedy"):
            settings(sampling=greedy)
    with pytest.raises(SettingsError, match="temperature: 0 must be greater than 0"):
        CurriculumStage(name="one", levels={"low": 1.0}, temperature=0)
    settings = PolicySettings(group_size=2)
    samples = [TrainingSample(TrainRow([1], [2], [True], [0.0], 0.0), 1.0, False)] * 2
    with pytest.raises(DataError, match="sampled greedily"):
        PolicyUpdate(build_actor_critic(build_toy_model(), None, settings, 0), settings, [samples])


def test_a_renderer_without_padding_token_is_refused(tokenizer):
    trainer = build_trainer(tokenizer, 1.0, curriculum=LOW)

    def rebuild_trainer(renderer, **options):
        return policy_gradient.PolicyGradientTrainer(
            trainer.policy,
            None,
            renderer,
            trainer.environment,
            trainer.settings,
            7,
            trainer.rewards,
            trainer.backend,
            **options,
        )

    class Bare:
        prompt_ids, observation_ids, action_text = (
            getattr(trainer.renderer, name)
            for name in ("prompt_ids", "observation_ids", "action_text")
        )

    with pytest.raises(DataError, match=r"^pad_id: the renderer \(Bare\) has no padding token"):
        rebuild_trainer(Bare())
    assert rebuild_trainer(Bare(), pad_id=5).actor_critic.pad_id == 5
    assert rebuild_trainer(trainer.renderer).actor_critic.pad_id == tokenizer.pad_token_id
