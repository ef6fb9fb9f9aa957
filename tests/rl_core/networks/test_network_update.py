"""Optimizer steps against a plain loop without the project's losses, and the effects of options."""

import copy
import itertools

import numpy as np
import pytest
import torch
from helpers.vector_worlds import walkers

from rl_core.errors import DataError
from rl_core.networks.actor_critic import compute_paired_layers, compute_single_layers
from rl_core.networks.network_update import (
    NetworkUpdate,
    adapt_learning_rate_scale,
    compute_policy_logprobs,
    whiten_advantages,
)
from rl_core.networks.trainer import NetworkTrainer
from rl_core.settings import NetworkSettings

SMALL = {
    "num_environments": 3,
    "rollout_steps": 16,
    "environment_steps": 10_000,
    "epochs": 3,
    "minibatches": 2,
}


def build_trainer(continuous=False, seed=0, **options):
    settings = NetworkSettings(**{**SMALL, "hidden": (8, 8), **options})
    vector = walkers(settings.num_environments, continuous=continuous)
    return NetworkTrainer(None, settings, seed, name="Walk", vector=vector)


def build_filled_trainer(**options):
    """Build a trainer that has filled its buffer once and changed nothing."""
    created = build_trainer(**options)
    created.environment.reset()
    created._collect_rollouts(created._rotate_buffers())
    return created


def run_reference_update(model, buffer, settings, rng):
    """Run PPO as in the paper, written out: GAE by recursion, both nets one after the other, torch's Adam."""
    D = torch.from_numpy
    T, N = buffer.shape
    with torch.no_grad():
        values, after = (
            model.value(D(x).flatten(0, 1)).view(T, N) for x in (buffer.observations, buffer.after)
        )
    advantages = torch.zeros(T, N)
    for n in range(N):
        running = 0.0
        for t in reversed(range(T)):
            is_over = buffer.terminated[t, n] or buffer.truncated[t, n]
            following = (
                0.0
                if buffer.terminated[t, n]
                else (after[t, n] if is_over or t == T - 1 else values[t + 1, n])
            )
            delta = float(buffer.rewards[t, n]) + settings.gamma * following - values[t, n]
            running = delta + (0.0 if is_over else settings.gamma * settings.gae_lambda * running)
            advantages[t, n] = running
    rows = [
        x.transpose(0, 1).flatten(0, 1)
        for x in (D(buffer.observations), D(buffer.actions), advantages, values)
    ]
    observed, actions, advantages, values = rows
    targets = advantages + values

    def build_distribution():
        outputs = model.policy.layers(seen_now)
        if model.shape.actions.is_discrete:
            return torch.distributions.Categorical(logits=outputs)
        return torch.distributions.Independent(
            torch.distributions.Normal(outputs, model.policy.log_std_A.exp()), 1
        )

    seen_now = observed
    old = build_distribution().log_prob(actions).detach()
    optimizer = torch.optim.Adam(
        model.parameters(), lr=settings.learning_rate, betas=settings.betas, eps=settings.eps
    )
    for _ in range(settings.epochs):
        order = torch.from_numpy(rng.permutation(len(old)))
        for index in order.tensor_split(settings.minibatches):
            seen_now = observed[index]
            law, A = build_distribution(), advantages[index]
            A = (A - A.mean()) / A.std()
            ratio = (law.log_prob(actions[index]) - old[index]).exp()
            low, high = 1 - settings.clip_eps, 1 + settings.clip_eps
            loss = -torch.min(ratio * A, ratio.clamp(low, high) * A).mean()
            v = model.value.layers(seen_now)[:, 0]
            errors = (v - targets[index]) ** 2
            if settings.value_clip_eps is not None:
                clipped = values[index] + (v - values[index]).clamp(
                    -settings.value_clip_eps, settings.value_clip_eps
                )
                errors = torch.max(errors, (clipped - targets[index]) ** 2)
            loss = (
                loss
                + settings.value_coef * 0.5 * errors.mean()
                - settings.entropy_coef * law.entropy().mean()
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"entropy_coef": 0.02, "value_clip_eps": 0.1, "value_coef": 0.7}], ids=str
)
def test_an_update_equals_a_reference_loop(continuous, options):
    created = build_filled_trainer(continuous=continuous, learning_rate=3e-3, **options)
    baseline = copy.deepcopy(created.model)
    run_reference_update(baseline, created._buffers[0], created.settings, np.random.default_rng(9))
    before = copy.deepcopy(created.model)
    metrics = NetworkUpdate(
        created.model, created.optimizer_step, created.settings, created._buffers
    ).run_update(np.random.default_rng(9))
    moved = 0.0
    for (name, ours), theirs, start in zip(
        created.model.named_parameters(), baseline.parameters(), before.parameters(), strict=True
    ):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
        moved = max(moved, float((ours - start).detach().abs().max()))
    assert moved > 5e-3 and created.optimizer_step.num_steps == 6
    assert 0 < metrics["policy/update_kl"] < 0.5


def test_both_networks_together_are_each_by_itself():
    generator = torch.Generator().manual_seed(0)

    def draw_parameter(*shape):
        return torch.randn(shape, generator=generator, requires_grad=True)

    for widths in ((), (6,), (6, 5, 6)):
        for activation in ("tanh", "relu"):
            sizes = (4, *widths)
            nets = []
            for outputs in (3, 1):
                layers = [*sizes, outputs]
                nets.append(
                    [
                        part
                        for a, b in itertools.pairwise(layers)
                        for part in (draw_parameter(b, a), draw_parameter(b))
                    ]
                )
            inputs = draw_parameter(7, 4).detach()
            actual = compute_paired_layers(inputs, *nets, activation)
            expected = []
            for net in nets:
                x = inputs
                for index in range(0, len(net), 2):
                    x = torch.nn.functional.linear(x, net[index], net[index + 1])
                    x = x if index == len(net) - 2 else getattr(torch, activation)(x)
                expected.append(x)
            weights = [torch.randn(out.shape, generator=generator) for out in expected]
            every = [*nets[0], *nets[1]]
            ours, theirs = (
                torch.autograd.grad(
                    sum((w * o).sum() for w, o in zip(weights, outs, strict=True)), every
                )
                for outs in (actual, expected)
            )
            for actual_part, expected_part in zip(
                (*actual, *ours), (*expected, *theirs), strict=True
            ):
                torch.testing.assert_close(actual_part, expected_part, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"activation": "relu", "hidden": ()}, {"hidden": (8, 5, 8)}], ids=str
)
def test_one_network_without_its_modules_gives_the_same_bits(options):
    model = build_trainer(**options).model
    observations = torch.randn(
        7, model.shape.observation_size, generator=torch.Generator().manual_seed(3)
    )
    with torch.no_grad():
        assert torch.equal(model.act(observations), model.policy(observations).argmax(-1))
        assert torch.equal(model.values(observations), model.value(observations))
        actual = compute_single_layers(
            observations, tuple(model.policy.layers.parameters()), model.shape.activation
        )
        assert torch.equal(actual, model.policy(observations))


def test_the_size_of_a_micro_batch_changes_rounding_alone():
    full, cut = (
        build_filled_trainer(minibatches=1),
        build_filled_trainer(minibatches=1, micro_batch_tokens=10),
    )
    actual = [
        NetworkUpdate(
            trainer.model, trainer.optimizer_step, trainer.settings, trainer._buffers
        ).run_update(np.random.default_rng(1))
        for trainer in (full, cut)
    ]
    for trainer, cut_parameter in zip(full.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(trainer, cut_parameter, rtol=1e-4, atol=1e-6)
    for name in (
        "train/loss",
        "policy/update_kl",
        "policy/entropy",
        "value/loss",
        "policy/ratio_max",
    ):
        assert actual[0][name] == pytest.approx(actual[1][name], rel=1e-4, abs=1e-6), name


def test_advantages_are_normalised_over_the_configured_rows():
    A = torch.tensor([1.0, 2.0, 6.0, -3.0])
    np.testing.assert_allclose(
        whiten_advantages(A[:, None])[:, 0],
        (A.numpy() - 1.5) / A.double().numpy().std(ddof=1),
        rtol=1e-6,
    )
    observed = {}
    for kind in ("none", "iteration", "minibatch"):
        created = build_filled_trainer(normalise_advantages=kind, epochs=1, minibatches=2)
        update, parts = (
            NetworkUpdate(
                created.model, created.optimizer_step, created.settings, created._buffers
            ),
            [],
        )
        update._run_optimizer_step = lambda rows, parts=parts: (
            parts.append(rows.advantages_M1) or {"train/loss": 0.0}
        )
        update.run_update(np.random.default_rng(0))
        observed[kind] = parts
    assert [float(part.mean()) for part in observed["minibatch"]] == pytest.approx([0, 0], abs=1e-6)
    joined = torch.cat(observed["iteration"])
    assert float(joined.mean()) == pytest.approx(0, abs=1e-6) and float(
        joined.std()
    ) == pytest.approx(1, rel=1e-5)
    raw = torch.cat(observed["none"])
    torch.testing.assert_close(joined, (raw - raw.mean()) / raw.std(), rtol=1e-4, atol=1e-5)


def test_the_rewards_scale_is_that_of_learning_alone():
    baseline, half = (
        build_filled_trainer(normalise_advantages="none"),
        build_filled_trainer(normalise_advantages="none", reward_scale=0.5),
    )
    rows = [
        NetworkUpdate(x.model, x.optimizer_step, x.settings, x._buffers)._build_rows()
        for x in (baseline, half)
    ]
    assert np.array_equal(baseline._buffers[0].rewards, half._buffers[0].rewards)
    assert not torch.allclose(rows[0].targets_M1, rows[1].targets_M1)


def test_the_adapted_learning_rate_by_hand():
    limits = {"target": 0.01, "factor": 1.5, "low": 0.1, "high": 2.0}
    assert adapt_learning_rate_scale(1.0, 0.021, **limits) == pytest.approx(1 / 1.5)
    assert adapt_learning_rate_scale(1.0, 0.0049, **limits) == 1.5
    assert (
        adapt_learning_rate_scale(1.0, 0.02, **limits)
        == adapt_learning_rate_scale(1.0, 0.005, **limits)
        == 1.0
    )
    assert (
        adapt_learning_rate_scale(1.9, -1e-6, **limits) == 2.0
        and adapt_learning_rate_scale(0.12, 9.0, **limits) == 0.1
    )
    with pytest.raises(DataError, match="out of range"):
        adapt_learning_rate_scale(1.0, float("nan"), **limits)


@pytest.mark.parametrize(("target", "up"), [(10.0, True), (1e-9, False)])
def test_the_learning_rate_follows_the_kl(target, up):
    created = build_trainer(
        desired_kl=target, learning_rate=1e-3, learning_rate_low=1e-4, learning_rate_high=1.6e-3
    )
    rates = [created.step()["train/learning_rate"] for _ in range(8)]
    assert rates[0] == 1e-3
    assert rates[1] == pytest.approx(1.5e-3 if up else 1e-3 / 1.5)
    assert rates[-1] == pytest.approx(1.6e-3 if up else 1e-4)


def test_vtrace_of_fresh_steps_is_gae_and_of_old_ones_is_corrected():
    gae, vtrace = build_filled_trainer(), build_filled_trainer(advantages="vtrace")
    for trainer in (gae, vtrace):
        buffer = trainer._buffers[0]
        buffer.behaviour_logprobs_M = compute_policy_logprobs(
            trainer.model, buffer.read_real_steps("observations"), buffer.read_real_steps("actions")
        )

    def build_rows(trainer):
        return NetworkUpdate(
            trainer.model, trainer.optimizer_step, trainer.settings, trainer._buffers
        )._build_rows()

    fresh = build_rows(vtrace)
    torch.testing.assert_close(
        build_rows(gae).advantages_M1, fresh.advantages_M1, rtol=1e-4, atol=1e-4
    )
    vtrace._buffers[
        0
    ].behaviour_logprobs_M += 1.0  # the steps were e times as likely: ratios of 1 / e
    old = build_rows(vtrace)
    assert torch.equal(old.old_logprobs_M1, fresh.old_logprobs_M1)
    parts = vtrace._buffers[0].split_into_segments()
    values, rewards = old.values_M1[:, 0], vtrace._buffers[0].read_real_steps("rewards")
    last, ratio = (
        parts.last_E[-1],
        np.exp(-1.0),
    )  # of the last step: rho (r + gamma V' - V), with nothing after it
    after = vtrace.model.values(vtrace._buffers[0].read_real_steps("after")[last][None])[0]
    alive = 1.0 - float(vtrace._buffers[0].read_real_steps("terminated")[last])
    delta = rewards[last] + vtrace.settings.gamma * alive * after - values[last]
    assert float(old.advantages_M1[last]) == pytest.approx(float(ratio * delta), rel=1e-4)
    assert float(old.targets_M1[last]) == pytest.approx(
        float(values[last] + ratio * delta), rel=1e-4
    )
