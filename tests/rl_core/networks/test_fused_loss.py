"""The loss in numpy against the losses of `rl_core.losses` with autograd: value, metrics, gradients."""

import numpy as np
import pytest
import torch

from rl_core.networks.actor_critic import ActionSpace, ActorCritic, NetworkShape
from rl_core.networks.fused_loss import LossOptions, NetworkArrays, compute_fused_loss
from rl_core.networks.network_update import NetworkUpdate
from rl_core.networks.step_buffer import NetworkBatch
from rl_core.settings import NetworkSettings
from rl_core.training.optimizer_step import OptimizerStep

THREE = ActionSpace("discrete", 3)
PLANE = ActionSpace("continuous", 2, low=(-1.0, -1.0), high=(1.0, 1.0), shape=(2,))


def build_update(actions=THREE, shape=None, **options):
    model = ActorCritic(NetworkShape(4, actions, **(shape or {})), seed=3).eval()
    settings = NetworkSettings(**options)
    update = NetworkUpdate(model, OptimizerStep(model, settings, 100), settings, [])
    update.num_rows = 50
    return update


def draw_batch(update, spread=1.0):
    """Draw rows whose ratios lie on both sides of the clip, with advantages of both signs."""
    model, space = update.model, update.model.shape.actions
    rng = np.random.default_rng(0)

    def draw_column(scale=1.0):
        return torch.from_numpy(rng.normal(0, scale, (40, 1)).astype(np.float32))

    observations = torch.from_numpy(rng.normal(size=(40, 4)).astype(np.float32))
    if space.is_discrete:
        actions = torch.from_numpy(rng.integers(0, space.size, 40))
    else:
        actions = torch.from_numpy(rng.normal(size=(40, space.size)).astype(np.float32))
    with torch.no_grad():
        outputs, values = model.outputs_and_values(observations)
        old = model.policy.logprob_column(outputs, actions) + draw_column(spread)
    return NetworkBatch(
        observations, actions, old, draw_column(), values + draw_column(), values + draw_column(0.3)
    )


def collect_gradients(update, loss):
    for parameter in update.model.parameters():
        parameter.grad = None
    loss.backward()
    return {name: p.grad for name, p in update.model.named_parameters()}


def count_clipped_values(update, batch):
    """Count rows whose value the clip holds where its error is larger; rounding within the clip does not count."""
    eps = update.settings.value_clip_eps
    if eps is None:
        return 0
    values = update.model.value(batch.observations_MD)[:, None].detach()
    moved = values - batch.values_M1
    bounded = batch.values_M1 + moved.clamp(-eps, eps)
    is_worse = (bounded - batch.targets_M1).square() > (values - batch.targets_M1).square()
    count = int((is_worse & (moved.abs() > eps)).sum())
    assert 0 < count < 40
    return count


CASES = {
    "plain": ({}, {}),
    "everything": ({}, {"entropy_coef": 0.03, "value_clip_eps": 0.2, "value_coef": 0.7}),
    "relu": ({"activation": "relu", "hidden": (8, 5, 8)}, {"clip_eps": 0.05}),
    "linear": ({"hidden": ()}, {"entropy_coef": 0.5}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("actions", [THREE, PLANE], ids=["discrete", "continuous"])
@pytest.mark.parametrize("spread", [0.3, 15.0], ids=["near", "far"])
def test_it_is_the_composed_loss(name, actions, spread):
    shape, options = CASES[name]
    update = build_update(actions, shape, **options)
    with torch.no_grad():  # logits that differ between the actions
        update.model.policy.layers[-1].weight.mul_(50)
    batch = draw_batch(update, spread)
    expected_loss, expected = update.compose_loss(batch)
    expected_gradients = collect_gradients(update, expected_loss)
    loss, metrics = update.compute_loss(batch)
    gradients = collect_gradients(update, loss)
    assert metrics.keys() == expected.keys()
    expected["value/clip_fraction"] = count_clipped_values(update, batch) / 50
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(float(value), rel=2e-4, abs=1e-5), key
    assert 0.1 < metrics["policy/clip_fraction"] < 0.9
    torch.testing.assert_close(loss.detach(), expected_loss.detach(), rtol=2e-4, atol=1e-5)
    for key, gradient in expected_gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(
            gradients[key], gradient, rtol=1e-3, atol=1e-5 * max(scale, 1.0), msg=key
        )
        assert scale > 0, key


def test_one_row_by_hand():
    # two actions, equally likely: log p = -log 2; the old policy gave e^-1 times as much: ratio e, clipped at 1.2.
    # A = +1: loss -1.2, no gradient; A = -1: loss e, dL/dlogits = -A r (onehot - p) = e (1/2, -1/2)
    model = ActorCritic(NetworkShape(1, ActionSpace("discrete", 2), hidden=()), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    options = LossOptions(1, 0.2, None, 1.0, 0.0)
    for advantage, expected, gradient in (
        (1.0, -1.2, [0.0, 0.0]),
        (-1.0, np.e, [np.e / 2, -np.e / 2]),
    ):
        batch = NetworkBatch(
            torch.ones(1, 1),
            torch.tensor([0]),
            torch.tensor([[-np.log(2) - 1]], dtype=torch.float32),
            torch.tensor([[advantage]]),
            torch.tensor([[3.0]]),
            torch.zeros(1, 1),
        )
        loss, metrics = compute_fused_loss(NetworkArrays(model), batch, options)
        assert metrics["policy/loss"] == pytest.approx(expected, rel=1e-5)
        assert metrics["value/loss"] == pytest.approx(4.5)  # (0 - 3)^2 / 2
        assert metrics["policy/update_kl"] == pytest.approx(np.e - 2, rel=1e-5)  # e^1 - 1 - 1
        assert float(loss.detach()) == pytest.approx(expected + 4.5, rel=1e-5)
        for parameter in model.parameters():
            parameter.grad = None
        loss.backward()
        assert model.policy.layers[0].bias.grad.tolist() == pytest.approx(gradient, rel=1e-5)
        assert model.value.layers[0].bias.grad.tolist() == [-3.0]
        loss.backward()  # micro-batches add up
        assert model.value.layers[0].bias.grad.tolist() == [-6.0]


def test_a_tensor_that_is_not_finite_is_named():
    update = build_update()
    batch = draw_batch(update)
    batch.advantages_M1[3] = float("nan")
    with pytest.raises(Exception, match="advantages: nan at"):
        update.compute_loss(batch)


@pytest.mark.parametrize("actions", [THREE, PLANE], ids=["discrete", "continuous"])
def test_actions_in_a_rollout_are_those_of_the_network(actions):
    update = build_update(actions)
    rng = np.random.default_rng(1)
    observations, noise = (
        rng.normal(size=(64, size)).astype(np.float32) for size in (4, actions.size)
    )
    actual = NetworkArrays(update.model).draw_actions(torch.from_numpy(observations), noise)
    expected = update.model.act(torch.from_numpy(observations), torch.from_numpy(noise)).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert actual.dtype == expected.dtype
