"""Heads of several layers: drawn from the seed, saved with the model, loaded without specifying their shape."""

import pytest
import torch
from helpers.library import small_policy
from helpers.tiny import weights_digest

from rl_core.errors import ModelError
from rl_core.models import causal_lm, heads
from rl_core.settings import ModelSettings

ROWS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_policy().save(tmp_path_factory.mktemp("policy") / "model")


def create_model(folder, layers=3, width=8, seed=0):
    return heads.create_reward_model(
        folder, ModelSettings(), seed=seed, shape=heads.HeadShape(layers, width)
    )


def test_shape_and_start(folder):
    model, _ = create_model(folder)
    hidden = model.config.hidden_size
    linear = [layer for layer in model.score.modules() if isinstance(layer, torch.nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linear] == [
        (hidden, 8),
        (8, 8),
        (8, 1),
    ]
    assert linear[0].bias.abs().sum() == 0 and linear[-1].bias is None
    assert linear[0].weight.std().item() == pytest.approx((2 / hidden) ** 0.5, rel=0.25)
    same, _ = create_model(folder)
    other, _ = create_model(folder, seed=1)
    assert weights_digest(same) == weights_digest(model) != weights_digest(other)


def test_saved_and_loaded_with_its_shape(folder, tmp_path):
    model, tokenizer = create_model(folder)
    causal_lm.publish_model(model, tokenizer, tmp_path / "reward")
    loaded, _ = heads.load_reward_model(tmp_path / "reward", ModelSettings())
    assert heads.score_rows(loaded, ROWS) == heads.score_rows(model, ROWS)
    assert len(set(heads.score_rows(loaded, ROWS))) == 3
    # a new linear head on the trunk of a reward model
    with_linear_head, _ = create_model(tmp_path / "reward", layers=1)
    assert isinstance(with_linear_head.score, torch.nn.Linear)
    causal_lm.publish_model(with_linear_head, tokenizer, tmp_path / "plain")
    loaded_linear, _ = heads.load_reward_model(tmp_path / "plain", ModelSettings())
    assert heads.score_rows(loaded_linear, ROWS) == heads.score_rows(with_linear_head, ROWS)


def test_a_policy_is_no_reward_model(folder):
    with pytest.raises(ModelError, match="missing"):
        heads.load_reward_model(folder, ModelSettings())


def test_gradients_reach_every_layer(folder):
    model, _ = create_model(folder)
    ids = torch.tensor([[1, 2, 3]])
    heads.compute_sequence_scores(model, ids, torch.tensor([3])).sum().backward()
    assert all(
        part.grad is not None and part.grad.abs().sum() > 0 for part in model.score.parameters()
    )


def test_one_layer_is_drawn_from_the_seed(folder):
    model, _ = heads.create_reward_model(folder, ModelSettings(), seed=5)
    hidden = model.config.hidden_size
    expected = (
        torch.randn((1, hidden), generator=torch.Generator().manual_seed(5)) * (hidden + 1) ** -0.5
    )
    assert torch.equal(model.score.weight, expected)
