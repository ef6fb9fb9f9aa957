"""DPPO, MaxRL and GDPO inside the trainer: top-K divergences, reward components, custom estimators, refusals."""

import math

import pytest
import torch
from helpers.letters import LOW, FewLetters, comparable, make_trainer, resumes_bit_for_bit, weights
from helpers.library import Echo, settings, small_policy

import rl_core
from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import SettingsError
from rl_core.losses.kl import binary_divergence, exact_forward_kl, top_k_divergence
from rl_core.models.logprobs import compute_vocabulary_logprobs
from rl_core.models.lora import add_adapter
from rl_core.rewards.orchestrator import RewardOrchestrator
from rl_core.settings import (
    LaunchSettings,
    LoraSettings,
    PolicySettings,
    ReplaySettings,
    SamplingSettings,
    TurnCreditSettings,
)
from rl_core.trainers.policy_gradient.custom_functions import CustomAdvantages
from rl_core.trainers.policy_gradient.trust_region import TopKRegion


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def test_divergences_by_hand():
    # q = (1/2, 1/4, 1/4) became p = (1/4, 1/4, 1/2)
    old, new = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    assert binary_divergence(new[:, 0], old[:, 0], "tv").item() == pytest.approx(0.25)
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert binary_divergence(new[:, 0], old[:, 0], "kl").item() == pytest.approx(kl)
    assert top_k_divergence(new, old, "tv").item() == pytest.approx(0.25)  # all tokens
    # two tokens and the rest: 1/2 (1/4 + 0 + 1/4)
    assert top_k_divergence(new[:, :2], old[:, :2], "tv").item() == pytest.approx(0.25)
    assert top_k_divergence(new[:, 1:2], old[:, 1:2], "tv").item() == pytest.approx(0)  # merged
    whole = exact_forward_kl(old, new).item()
    assert top_k_divergence(new, old, "kl").item() == pytest.approx(whole, abs=1e-6)
    assert 0 < top_k_divergence(new[:, :1], old[:, :1], "kl").item() < whole
    # certain tokens: no NaN, a sure token that became unsure, and the other way round
    for pair in ((0.0, 0.0), (0.0, -1.0), (-1.0, 0.0), (-200.0, -1.0)):
        for kind in ("tv", "kl"):
            value = binary_divergence(torch.tensor(pair[0]), torch.tensor(pair[1]), kind)
            assert math.isfinite(value) and (value == 0) == (pair[0] == pair[1])


@pytest.mark.parametrize("kind", ["tv", "kl"])
@pytest.mark.parametrize("num_tokens", [3, 10_000])
def test_the_trainer_measures_top_k_divergences(tokenizer, monkeypatch, kind, num_tokens):
    """Compare every micro-batch with distributions of a copy of the old policy, over all or over the top tokens."""
    trainer = make_trainer(
        tokenizer,
        algorithm="dppo",
        dppo_divergence=f"topk_{kind}",
        dppo_topk=num_tokens,
        epochs=2,
        minibatches=2,
        micro_batch_tokens=60,
        sampling=SamplingSettings(max_completion_tokens=3, temperature=0.7),
    )
    old = make_trainer(tokenizer).policy
    differences, largest = [], []
    measure = TopKRegion.measure_divergence

    def compare(self, batch):
        actual_BS = measure(self, batch)
        with torch.no_grad():
            p_NV, q_NV = (compute_vocabulary_logprobs(model, batch) for model in (self.policy, old))
        total = 0.5 * (p_NV.exp() - q_NV.exp()).abs().sum(1)
        exact_N = total if kind == "tv" else exact_forward_kl(q_NV, p_NV)
        actual_N = actual_BS[batch.loss_mask_BS]
        assert (actual_N <= exact_N + 1e-5).all() and not actual_BS[~batch.loss_mask_BS].any()
        sampled = batch.input_ids_BS[batch.loss_mask_BS][:, None]
        binary_N = binary_divergence(p_NV.gather(1, sampled), q_NV.gather(1, sampled), kind)[:, 0]
        assert (actual_N >= binary_N - 1e-5).all()  # the sampled token is always among them
        differences.append(float((actual_N - exact_N).abs().max()))
        largest.append(float(exact_N.max()))
        return actual_BS

    monkeypatch.setattr(TopKRegion, "measure_divergence", compare)
    metrics = trainer.step()
    assert max(largest) > 0.05 and metrics["policy/divergence_mean"] > 0
    assert (max(differences) < 1e-4) == (num_tokens == 10_000)


def test_a_first_step_on_fresh_rollouts_masks_nothing_and_equals_grpo(tokenizer):
    """Check that both losses have one gradient while the policy is the sampler."""
    results = [make_trainer(tokenizer, FewLetters(), algorithm=name) for name in ("grpo", "dppo")]
    metrics = [trainer.step() for trainer in results]
    assert metrics[1]["policy/clip_fraction"] == 0
    assert metrics[1]["policy/divergence_mean"] == pytest.approx(0, abs=1e-6)
    assert metrics[1]["train/grad_norm"] == pytest.approx(metrics[0]["train/grad_norm"], rel=1e-4)
    assert metrics[0]["train/grad_norm"] > 0


def test_tokens_beyond_the_limit_are_masked(tokenizer):
    options = dict(algorithm="dppo", epochs=4, learning_rate=2e-2)
    tight = make_trainer(tokenizer, FewLetters(), clip_eps=1e-3, **options).step()
    loose = make_trainer(tokenizer, FewLetters(), clip_eps=0.9, clip_eps_high=9.0, **options).step()
    assert tight["policy/clip_fraction"] > 0.1 > loose["policy/clip_fraction"]
    assert tight["policy/update_kl"] < loose["policy/update_kl"]


@pytest.mark.parametrize(
    "options",
    [
        dict(algorithm="dppo", epochs=2, minibatches=2, replay=ReplaySettings(iterations=2)),
        dict(algorithm="dppo", dppo_divergence="topk_tv", epochs=2, minibatches=2),
        dict(algorithm="maxrl", maxrl_order=2, epochs=2),
        dict(algorithm="gdpo", epochs=2, replay=None),
    ],
    ids=lambda options: "-".join(map(str, list(options.values())[:2])),
)
@pytest.mark.parametrize("adapted", [False, True])
def test_they_resume_bit_for_bit_with_adapters_too(tokenizer, options, adapted):
    def build():
        model = None
        if adapted:
            model = add_adapter(make_trainer(tokenizer).policy, LoraSettings(rank=2))
        rewards = RewardOrchestrator(
            {"task": 1.0, "length": 0.2}, options={"length": {"free": 1, "limit": 3}}
        )
        if options["algorithm"] == "maxrl":
            rewards = None
        return make_trainer(tokenizer, FewLetters(), model=model, rewards=rewards, **options)

    assert resumes_bit_for_bit(build)


def two_rewards(task=1.0, other=1.0, function=None):
    """Build rewards of the environment and of a function, by default the parity of the answer's length."""
    function = function or (lambda trajectories: [len(t.completion) % 2 for t in trajectories])
    return RewardOrchestrator({"task": task, "other": other}, functions={"other": function})


def test_gdpo_is_the_formula_on_the_components_of_rollouts(tokenizer):
    """Recompute the advantages from the raw components in the trajectories."""
    trainer = make_trainer(
        tokenizer, FewLetters(), rewards=two_rewards(0.5, -2.0), algorithm="gdpo", overlong_buffer=3
    )
    trainer.step()
    summed = []
    for group in trainer.groups:
        total = 0.0
        for name, weight in (("task", 0.5), ("other", -2.0), ("overlong", 1.0)):
            values = torch.tensor(
                [rollout.trajectory.rewards[name] for rollout in group.rollouts]
            ).double()
            if values.std() >= 1e-3:
                total = total + weight * (values - values.mean()) / (values.std() + 1e-4)
        summed.append(total + torch.zeros(len(group.rollouts)).double())
    flat = torch.cat(summed)
    expected = (flat - flat.mean()) / (flat.std() + 1e-4)
    actual = torch.tensor([a for group in trainer.groups for a in group.advantages]).double()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
    assert actual.abs().max() > 0.5


def test_a_sample_whose_component_fails_is_left_out(tokenizer):
    """Return NaN for one rollout of each group: it has no advantage, and the others are compared without it."""

    def unsure(trajectories):
        return [float("nan") if t.sample == 0 else float(t.sample) for t in trajectories]

    rewards = RewardOrchestrator(
        {"task": 1.0, "other": 1.0}, functions={"other": unsure}, options={"max_failed_share": 0.5}
    )
    trainer = make_trainer(tokenizer, FewLetters(), rewards=rewards, algorithm="gdpo")
    trainer.step()
    for group in trainer.groups:
        assert group.rollouts[0].is_masked and group.advantages[0] == 0
        assert sum(group.advantages) == pytest.approx(0, abs=1e-9)
        assert group.advantages[5] != 0


def test_dynamic_sampling_keeps_groups_that_differ_in_a_component_only(tokenizer):
    """Cancel the environment's reward: all totals are equal, and only gdpo can learn from them."""
    rewards = lambda: two_rewards(  # noqa: E731
        function=lambda trajectories: [-float(bool(t.success)) for t in trajectories]
    )
    options = dict(dynamic_sampling_tries=1, curriculum=LOW)
    merged = make_trainer(tokenizer, FewLetters(), rewards=rewards(), **options).step()
    apart = make_trainer(
        tokenizer, FewLetters(), rewards=rewards(), algorithm="gdpo", **options
    ).step()
    assert merged["train/dropped_group_rate"] == 1 > apart["train/dropped_group_rate"]


def test_all_groups_failing_or_succeeding_teach_nothing(tokenizer):
    for value in (0.0, 1.0, -3.0):
        for algorithm in ("maxrl", "gdpo", "dppo"):
            rewards = RewardOrchestrator(
                {"constant": 1.0},
                functions={"constant": lambda trajectories, v=value: [v] * len(trajectories)},
            )
            trainer = make_trainer(tokenizer, FewLetters(), rewards=rewards, algorithm=algorithm)
            before = weights(trainer)
            assert trainer.step()["train/zero_advantage_rate"] == 1
            assert torch.equal(weights(trainer), before)


def read_other(rewards_R, groups_R, lengths_R, components_R):
    """Return one component as the advantage, which the small example of the check lacks."""
    return components_R["other"], {}


def test_a_custom_estimator_gets_the_components(tokenizer):
    example = CustomAdvantages("mine", {}, lambda rewards_R, groups_R, lengths_R: (rewards_R, {}))
    assert not example.takes_components
    trainer = make_trainer(
        tokenizer,
        FewLetters(),
        rewards=two_rewards(1.0, 0.5),
        custom={
            "advantages": lambda r, g, n, components_R: (
                components_R.get("other", r),
                {"gap": (sum(components_R.values()) - r).abs().max()},
            )
        },
        advantages="mine",
    )
    metrics = trainer.step()
    assert metrics["train/advantages/gap"] < 1e-12
    for group in trainer.groups:
        parts = [rollout.trajectory.rewards["weighted/other"] for rollout in group.rollouts]
        assert group.advantages == pytest.approx(parts)
    with pytest.raises(SettingsError, match="raised KeyError on a small example"):
        CustomAdvantages("mine", {}, read_other)


class Even(Echo):
    """An environment of a mixture with other components."""

    name = "even"


def test_a_mixture_with_other_components_by_environment():
    """Train gdpo on two environments, one of which has a component that the other lacks, at another weight."""
    part = rl_core.MixturePart
    mixture = {
        "echo": part(Echo(), rewards={"task": 1.0, "length": 0.1}),
        "even": part(Even(), rewards={"task": 3.0}),
    }
    runs = []
    for _ in range(2):
        training = rl_core.grpo(
            small_policy(),
            environment=mixture,
            settings=settings(prompts_per_iteration=4, iterations=1, algorithm="gdpo"),
        )
        trainer = training.trainer
        runs.append(comparable(trainer.step()))
        for group in trainer.groups:
            parts = trainer.rewards.read_components(group.rollouts[0])
            expected = {"task": 1.0, "length": 0.1}
            if group.rollouts[0].trajectory.environment == "even":
                expected = {"task": 3.0}
            assert {name: weight for name, (_, weight) in parts.items()} == expected
            total = sum(value * weight for value, weight in parts.values())
            assert total == pytest.approx(group.rollouts[0].reward)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dppo_divergence="binary_kl"), "dppo_divergence: not used by grpo"),
        (dict(algorithm="gdpo", maxrl_order=2), "maxrl_order: not used by gdpo"),
        (dict(algorithm="dppo", dppo_topk=5), "dppo_topk: not used by dppo_divergence binary_tv"),
        (dict(algorithm="dppo", importance="token"), "importance: token; the ratio of dppo"),
        (dict(algorithm="dppo", dual_clip=3.0), "dual_clip: dppo masks"),
        (dict(algorithm="dppo", dropout=True), "dropout: dppo compares with the policy"),
        (
            dict(algorithm="dppo", dppo_divergence="topk_tv", replay=ReplaySettings()),
            "dppo_divergence: topk_tv compares with the policy before the update",
        ),
        (
            dict(
                algorithm="dppo",
                dppo_divergence="topk_kl",
                launch=LaunchSettings(kind="torchrun", processes=2),
            ),
            "dppo_divergence: topk_kl makes another pass",
        ),
        (dict(algorithm="maxrl", kl_coef=0.1, kl_in="reward"), "kl_in: reward; maxrl takes"),
        (dict(algorithm="gdpo", kl_coef=0.1, kl_in="reward"), "kl_in: reward; gdpo normalises"),
        (
            dict(algorithm="maxrl", turn_credit=TurnCreditSettings()),
            "turn_credit: compares returns",
        ),
        (dict(algorithm="maxrl", group_size=1), "leaves maxrl without a baseline"),
        (
            dict(algorithm="maxrl", maxrl_order=1, advantages="a.py:b"),
            "maxrl_order: not used by a custom",
        ),
        (
            dict(algorithm="gdpo", role_baseline=dict(group_weight=0.5)),
            "role_baseline.group_weight: gdpo compares components",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused_by_name(options, message):
    with pytest.raises(SettingsError, match=message):
        rl_core.settings.build_settings(options, PolicySettings, "policy")
    with pytest.raises(SettingsError):
        PolicySettings(algorithm="maxrl", maxrl_order=0)


def test_limits_have_the_defaults_of_their_divergence():
    assert PolicySettings(algorithm="dppo").clip == (0.15, 0.15)
    assert PolicySettings(algorithm="dppo", dppo_divergence="topk_kl").clip == (0.05, 0.05)
    assert PolicySettings(algorithm="dppo", clip_eps=0.3).clip == (0.3, 0.3)
    assert PolicySettings(algorithm="dppo", clip_eps_high=0.3).clip == (0.15, 0.3)
    assert PolicySettings(algorithm="dppo", replay=ReplaySettings()).corrects_sampler
    assert not PolicySettings(algorithm="dppo").corrects_sampler
