"""Networks: log-probabilities and entropies by hand, sampling, statistics of observations, files."""

import json
import math

import numpy as np
import pytest
import torch

from rl_core.errors import DataError, ModelError, NonFiniteTensor, SettingsError
from rl_core.networks.actor_critic import (
    ActionSpace,
    ActorCritic,
    NetworkShape,
    ObservationStatistics,
    compute_gaussian_entropy,
    compute_gaussian_logprobs,
)
from rl_core.networks.network_files import CONFIG_FILE, WEIGHTS_FILE, load_network, publish_network

THREE = ActionSpace("discrete", 3)
PLANE = ActionSpace("continuous", 2, low=(-1.0, -math.inf), high=(1.0, math.inf), shape=(2,))


def build_actor_critic(actions=THREE, seed=0, **shape):
    return ActorCritic(NetworkShape(4, actions, **shape), seed)


def draw_rows(count=7, size=4):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(1))


def test_gaussian_by_hand():
    # at the mean with s = 1: -log(2 pi) / 2 each; one deviation away with s = 2: -1/2 - log 2 - log(2 pi) / 2
    log_std = torch.tensor([0.0, math.log(2.0)])
    actual = compute_gaussian_logprobs(
        torch.tensor([[3.0, 7.0]]), torch.tensor([[3.0, 5.0]]), log_std
    )
    assert actual.tolist() == [pytest.approx(-0.5 - math.log(2) - math.log(2 * math.pi), rel=1e-6)]
    assert float(compute_gaussian_entropy(log_std)) == pytest.approx(
        math.log(2) + 1 + math.log(2 * math.pi), rel=1e-6
    )


def test_logprobs_and_entropy_equal_numpy_in_float64():
    model, actions = build_actor_critic(), torch.tensor([0, 1, 2, 2, 1, 0, 0])
    weights = {name: value.double().numpy() for name, value in model.policy.state_dict().items()}
    hidden = draw_rows().double().numpy()
    for index in (0, 2):
        hidden = np.tanh(
            hidden @ weights[f"layers.{index}.weight"].T + weights[f"layers.{index}.bias"]
        )
    logits = hidden @ weights["layers.4.weight"].T + weights["layers.4.bias"]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    outputs, values = model(draw_rows())
    logprobs, entropy = (
        model.policy.logprobs_of(outputs, actions),
        model.policy.entropy_of(outputs),
    )
    alone = model.policy.logprobs_and_entropy(draw_rows(), actions)
    torch.testing.assert_close((logprobs, entropy), alone)
    np.testing.assert_allclose(logprobs.detach(), np.log(p[np.arange(7), actions]), rtol=1e-5)
    np.testing.assert_allclose(entropy.detach(), -(p * np.log(p)).sum(1), rtol=1e-5)
    assert values.shape == (7,) and values.requires_grad


def test_actions_of_another_shape_are_refused():
    with pytest.raises(DataError, match=r"actions: shape \(7, 1\), expected \(7,\)"):
        build_actor_critic().policy.logprobs_and_entropy(
            draw_rows(), torch.zeros(7, 1, dtype=torch.int64)
        )
    with pytest.raises(DataError, match=r"actions: shape \(7,\), expected \(7, 2\)"):
        build_actor_critic(PLANE).policy.logprobs_and_entropy(draw_rows(), torch.zeros(7))
    with pytest.raises(SettingsError, match="hidden: sizes"):
        build_actor_critic(hidden=(0,))


def test_gumbel_noise_samples_the_softmax():
    model = build_actor_critic()
    with torch.no_grad():
        model.policy.layers[-1].bias.copy_(torch.tensor([0.0, math.log(3.0), math.log(6.0)]))
        model.policy.layers[-1].weight.zero_()
    noise = torch.from_numpy(np.random.default_rng(0).gumbel(size=(20_000, 3)).astype(np.float32))
    counts = torch.bincount(model.act(torch.zeros(20_000, 4), noise), minlength=3) / 20_000
    # shares 0.1, 0.3, 0.6; four standard errors are 0.0085, 0.013, 0.014
    assert counts.tolist() == pytest.approx([0.1, 0.3, 0.6], abs=0.014)
    assert model.act(torch.zeros(2, 4)).tolist() == [2, 2]


def test_gaussian_sampling_and_mode():
    model = build_actor_critic(PLANE, initial_log_std=math.log(0.5))
    noise = torch.tensor([[1.0, -2.0]])
    mean = model.act(draw_rows(1))
    assert torch.allclose(model.act(draw_rows(1), noise), mean + torch.tensor([[0.5, -1.0]]))


def test_the_first_weights_follow_the_seed_alone():
    torch.manual_seed(5)
    first, same, other = (
        build_actor_critic(seed=3),
        build_actor_critic(seed=3),
        build_actor_critic(seed=4),
    )
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True)
    )
    assert not torch.equal(first.value.layers[0].weight, other.value.layers[0].weight)
    last = first.policy.layers[
        -1
    ].weight  # orthogonal rows of length 0.01, so all actions are about as likely
    torch.testing.assert_close(last @ last.T, 1e-4 * torch.eye(3))


def test_statistics_of_parts_are_those_of_all_rows():
    statistics, drawn = (
        ObservationStatistics(3),
        np.random.default_rng(0).normal(5.0, 2.0, (60, 3)).astype(np.float32),
    )
    for part in np.split(drawn, [1, 8, 40]):
        statistics.update(torch.from_numpy(part))
    wide = drawn.astype(np.float64)
    np.testing.assert_allclose(statistics.mean_D, wide.mean(0), rtol=1e-12)
    np.testing.assert_allclose(statistics.squares_D / statistics.count, wide.var(0), rtol=1e-12)
    observed = statistics(torch.from_numpy(drawn))
    assert observed.dtype == torch.float32
    np.testing.assert_allclose(
        observed, (wide - wide.mean(0)) / np.sqrt(wide.var(0) + 1e-8), rtol=1e-5, atol=1e-6
    )
    assert statistics(torch.full((1, 3), 1e6)).tolist() == [[10.0, 10.0, 10.0]]


def test_statistics_change_nothing_before_the_first_row_and_take_no_nan():
    statistics = ObservationStatistics(2)
    raw = torch.tensor([[100.0, -3.0]])
    assert torch.equal(statistics(raw), raw)
    with pytest.raises(NonFiniteTensor, match="observations: nan"):
        statistics.update(torch.tensor([[1.0, math.nan]]))
    assert int(statistics.count) == 0
    statistics.update(raw)  # one row has no variance
    assert statistics(raw).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("actions", [THREE, PLANE], ids=["discrete", "continuous"])
def test_a_saved_network_acts_the_same(tmp_path, actions):
    model = build_actor_critic(actions, normalises=True, hidden=(5,), activation="relu")
    model.statistics.update(draw_rows() * 3)
    publish_network(model, tmp_path / "net", "Walk-v0")
    loaded = load_network(tmp_path / "net")
    assert loaded.shape.actions == actions
    noise = torch.randn(7, actions.size, generator=torch.Generator().manual_seed(2))
    assert torch.equal(loaded.act(draw_rows(), noise), model.act(draw_rows(), noise))
    assert torch.equal(loaded.values(draw_rows()), model.values(draw_rows()))
    publish_network(model, tmp_path / "net", "Walk-v0")  # replaced entirely
    assert {path.name for path in (tmp_path / "net").iterdir()} == {
        CONFIG_FILE,
        WEIGHTS_FILE,
        "manifest.json",
    }


def test_what_is_no_network_is_refused(tmp_path):
    with pytest.raises(
        ModelError, match=r"network.json' cannot be read .*; pass the folder of a trained network"
    ):
        load_network(tmp_path)
    publish_network(build_actor_critic(), tmp_path / "net", "Walk-v0")
    config = json.loads((tmp_path / "net" / CONFIG_FILE).read_text())
    for change, message in (
        ({"format": 2}, "not a network.s config in format 1"),
        ({"hidden": [8]}, "does not match the network.json"),
        ({"hidden": [-1]}, "must all be at least 1"),
        ({"activation": "sin"}, "not a network's config .KeyError"),
        ({"actions": 3}, "not a network's config .TypeError"),
    ):
        (tmp_path / "net" / CONFIG_FILE).write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelError, match=message):
            load_network(tmp_path / "net")
    (tmp_path / "net" / CONFIG_FILE).write_text(json.dumps(config))
    (tmp_path / "net" / WEIGHTS_FILE).write_bytes(b"\0" * 20)
    with pytest.raises(ModelError, match="contains no weights"):
        load_network(tmp_path / "net")


@pytest.mark.parametrize("actions", [THREE, PLANE], ids=["discrete", "continuous"])
def test_log_probabilities_and_entropies_are_those_of_the_trainer(actions):
    model = build_actor_critic(actions, normalises=True, initial_log_std=-0.3)
    model.statistics.update(draw_rows() * 3)
    chosen, logprobs, entropies, values = model.get_action_and_value(
        draw_rows(), generator=torch.Generator().manual_seed(0)
    )
    inputs = model.normalised(draw_rows())
    expected = model.policy.logprobs_and_entropy(inputs, chosen)
    torch.testing.assert_close((logprobs, entropies), expected)
    torch.testing.assert_close(values, model.value(inputs))
    evaluated = model.evaluate_actions(draw_rows(), chosen)
    torch.testing.assert_close(evaluated, (values, logprobs, entropies))
    assert model.get_action_and_value(draw_rows(), chosen)[0] is chosen
    assert all(x.shape == (7,) and x.requires_grad for x in evaluated)
    (evaluated[0].sum() + evaluated[1].sum() + evaluated[2].sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("actions", [THREE, PLANE], ids=["discrete", "continuous"])
def test_samples_follow_the_generator_alone_and_are_torchs(actions):
    model = build_actor_critic(actions)
    generator = torch.Generator().manual_seed(4)
    torch.manual_seed(1)
    model.get_action_and_value(draw_rows(), generator=generator)
    state = generator.get_state()
    first = model.get_action_and_value(draw_rows(500), generator=generator)[0]
    torch.manual_seed(2)
    generator.set_state(state)  # as a resumed loop does
    again = model.get_action_and_value(draw_rows(500), generator=generator)[0]
    assert torch.equal(first, again)
    assert not torch.equal(
        first, model.get_action_and_value(draw_rows(500), generator=generator)[0]
    )
    torch.manual_seed(3)
    expected = model.build_distribution(draw_rows()).sample()
    torch.manual_seed(3)
    assert torch.equal(model.get_action_and_value(draw_rows())[0], expected)


def test_sampled_shares_and_moments():
    model = build_actor_critic()
    with torch.no_grad():
        model.policy.layers[-1].bias.copy_(torch.tensor([0.0, math.log(3.0), math.log(6.0)]))
        model.policy.layers[-1].weight.zero_()
    generator = torch.Generator().manual_seed(0)
    drawn = model.get_action_and_value(torch.zeros(20_000, 4), generator=generator)[0]
    counts = torch.bincount(drawn, minlength=3) / 20_000
    assert counts.tolist() == pytest.approx([0.1, 0.3, 0.6], abs=0.014)  # four standard errors
    plane = build_actor_critic(PLANE, initial_log_std=math.log(0.5))
    drawn = plane.get_action_and_value(torch.zeros(20_000, 4), generator=generator)[0]
    assert drawn.std(0).tolist() == pytest.approx([0.5, 0.5], abs=0.01)


def test_actions_that_do_not_exist_are_refused():
    with pytest.raises(DataError, match="actions: 3 is not one of 0 to 2"):
        build_actor_critic().evaluate_actions(draw_rows(2), torch.tensor([0, 3]))
    with pytest.raises(DataError, match=r"actions: shape \(2,\), expected \(2, 2\)"):
        build_actor_critic(PLANE).evaluate_actions(draw_rows(2), torch.zeros(2))
    with pytest.raises(NonFiniteTensor, match="actions: nan"):
        build_actor_critic(PLANE).evaluate_actions(draw_rows(1), torch.full((1, 2), math.nan))
    with pytest.raises(NonFiniteTensor, match="outputs: nan"):
        build_actor_critic().get_action_and_value(torch.full((1, 4), math.nan))
