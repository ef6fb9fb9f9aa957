"""KL(old || new) over the whole vocabulary in the update: value and gradient, weights untouched, invalid settings."""

import copy

import pytest
import torch
from helpers.letters import LOW, make_trainer, weights

from rl_core.data.tokenizer import train_tokenizer
from rl_core.errors import SettingsError
from rl_core.models.logprobs import compute_vocabulary_logprobs
from rl_core.settings import KLBandSettings, LaunchSettings, PolicySettings, SamplingSettings
from rl_core.trainers.policy_gradient.update import ExactTrustRegion


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["abc xyz"], 300)


def collect_penalties(trainer, monkeypatch):
    """Collect (value, gradient, the same computed from logits of both policies) of each micro-batch after the first."""
    results = []
    old = copy.deepcopy(trainer.policy)
    arguments = ExactTrustRegion.compute_penalty

    def compare_penalty(self, batch, loss_weights_BS, num_loss_tokens):
        value, metrics = arguments(self, batch, loss_weights_BS, num_loss_tokens)
        if not self.is_first_step:
            parameters = list(self.policy.parameters())
            gradient = torch.autograd.grad(value, parameters, retain_graph=True)
            baseline, expected_gradient = compute_from_logits(
                self.policy, old, batch, loss_weights_BS
            )
            results.append((value.item(), baseline, gradient, expected_gradient))
        return value, metrics

    monkeypatch.setattr(ExactTrustRegion, "compute_penalty", compare_penalty)
    return results


def compute_from_logits(policy, old, batch, weights_BS):
    """Compute sum_t w_t sum_v p_v log(p_v / q_v) from transformers' logits, token by token."""
    positions = batch.loss_mask_BS.nonzero().tolist()
    temperatures = batch.temperatures_BS

    def compute_distributions(model):
        logits = model(input_ids=batch.input_ids_BS).logits
        rows = [
            logits[b, s - 1] / (1.0 if temperatures is None else temperatures[b, s])
            for b, s in positions
        ]
        return torch.stack(rows).softmax(-1)

    p_NV = compute_distributions(old).detach()
    q_NV = compute_distributions(policy)
    weights_N = torch.stack([weights_BS[b, s] for b, s in positions])
    value = (weights_N * (p_NV * (p_NV.log() - q_NV.log())).sum(-1)).sum()
    return value.item(), torch.autograd.grad(value, list(policy.parameters()))


def test_value_and_gradient_are_those_of_both_policies_logits(tokenizer, monkeypatch):
    trainer = make_trainer(
        tokenizer,
        trust_region_coef=0.5,
        trust_region_kl="exact",
        epochs=2,
        micro_batch_tokens=64,
        loss_aggregation="sequence_mean",
        curriculum=LOW,
        sampling=SamplingSettings(max_completion_tokens=3, temperature=0.7),
    )
    actual = collect_penalties(trainer, monkeypatch)
    metrics = trainer.step()
    assert len(actual) > 1 and metrics["policy/update_kl_exact"] > 0
    for value, baseline, gradient, expected_gradient in actual:
        assert value == pytest.approx(baseline, rel=1e-3, abs=1e-7) and baseline > 0
        for ours, theirs in zip(gradient, expected_gradient, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6, rtol=1e-3)


def test_it_holds_the_policy_near_the_old_one_and_the_metric_agrees_with_the_estimate(tokenizer):
    moved = {}
    for coef in (1e-9, 10.0):
        trainer = make_trainer(
            tokenizer, trust_region_coef=coef, trust_region_kl="exact", epochs=4, curriculum=LOW
        )
        rows = [trainer.step() for _ in range(3)]
        moved[coef] = sum(row["policy/update_kl_exact"] for row in rows)
        estimated = sum(row["policy/update_kl"] for row in rows)
        # of similar size; not equal, as the estimate's samples are those that the policy was updated on
        assert 0.3 < estimated / moved[coef] < 3
    assert moved[10.0] < 0.7 * moved[1e-9]


def test_a_weight_of_next_to_nothing_changes_next_to_nothing(tokenizer):
    """Check that the old weights that are swapped in for a pass leave no trace."""
    with_swap = make_trainer(
        tokenizer, trust_region_coef=1e-12, trust_region_kl="exact", epochs=3, curriculum=LOW
    )
    without = make_trainer(tokenizer, trust_region_coef=1e-12, epochs=3, curriculum=LOW)
    for _ in range(2):
        with_swap.step(), without.step()
    assert torch.allclose(weights(with_swap), weights(without), atol=1e-6)


def test_the_distribution_is_that_of_the_weights_before_the_update(tokenizer, monkeypatch):
    trainer = make_trainer(
        tokenizer, trust_region_coef=1.0, trust_region_kl="exact", epochs=3, curriculum=LOW
    )
    before = {name: value.detach().clone() for name, value in trainer.policy.state_dict().items()}
    observed = []
    begin = ExactTrustRegion.prepare_batch

    def compare_distribution(self, batch):
        now = {name: value.detach().clone() for name, value in self.policy.state_dict().items()}
        begin(self, batch)
        assert all(
            torch.equal(now[name], value) for name, value in self.policy.state_dict().items()
        )
        if self._old_NV is not None:
            self.policy.load_state_dict(before)
            with torch.no_grad():
                observed.append(
                    torch.equal(compute_vocabulary_logprobs(self.policy, batch), self._old_NV)
                )
            self.policy.load_state_dict(now)

    monkeypatch.setattr(ExactTrustRegion, "prepare_batch", compare_distribution)
    trainer.step()
    assert len(observed) >= 2 and all(observed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(trust_region_kl="exact", epochs=2),
            "trust_region_kl: has no effect if trust_region_coef is 0",
        ),
        (dict(trust_region_kl="exact", trust_region_coef=1.0), "starts at the old policy"),
        (
            dict(
                trust_region_kl="exact",
                trust_region_coef=1.0,
                epochs=2,
                launch=LaunchSettings(kind="torchrun"),
            ),
            "needs a single trainer process",
        ),
        (dict(kl_band=KLBandSettings(width=0.1)), "kl_band: not used by kl_controller fixed"),
        (
            dict(kl_controller="banded", kl_coef=0.5, kl_band=KLBandSettings(maximum=0.2)),
            "kl_coef: 0.5 must lie between kl_band.minimum 0.0001 and kl_band.maximum 0.2",
        ),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        PolicySettings(**options)
    with pytest.raises(SettingsError, match=r"minimum: 0.5 is above maximum 0.1"):
        KLBandSettings(minimum=0.5, maximum=0.1)
