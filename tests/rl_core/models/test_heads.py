"""Reward models: where the score is read, how they start, how they are saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.model_tokenizer import make_tokenizer
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

from rl_core.errors import CheckpointError, DataError
from rl_core.models.causal_lm import create_model, save
from rl_core.models.heads import (
    compute_sequence_scores,
    create_reward_model,
    load_reward_model,
    score_rows,
)
from rl_core.settings import ModelSettings

SETTINGS = ModelSettings(preset="nano", context=32, device="cpu")
ROWS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12], [5, 4, 3, 1]]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    save(create_model(SETTINGS, make_tokenizer(), seed=0), make_tokenizer(), tmp_path / "policy")
    return tmp_path / "policy"


def score_one_by_one(model: torch.nn.Module, rows: list[list[int]]) -> list[float]:
    """Score rows one by one with transformers, unpadded."""
    with torch.no_grad():
        return [model(torch.tensor([row])).logits.item() for row in rows]


def test_the_trunk_is_the_policys_and_the_head_comes_from_the_seed(policy: Path) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model, tokenizer = create_reward_model(policy, SETTINGS, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    trunk = create_model(SETTINGS, make_tokenizer(), seed=0).model.state_dict()
    assert all(torch.equal(value, trunk[name]) for name, value in model.model.state_dict().items())
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id == 0
    repeated, _ = create_reward_model(policy, SETTINGS, seed=1)
    other, _ = create_reward_model(policy, SETTINGS, seed=2)
    assert torch.equal(model.score.weight, repeated.score.weight)
    assert not torch.equal(model.score.weight, other.score.weight)
    assert 0.5 < model.score.weight.std().item() * 33**0.5 < 1.5


@pytest.mark.parametrize("max_tokens", [1, 8, 1000])
def test_scores_equal_transformers_row_by_row(policy: Path, max_tokens: int) -> None:
    model, _ = create_reward_model(policy, SETTINGS)
    expected = score_one_by_one(model.eval(), ROWS)
    assert score_rows(model, ROWS, max_tokens=max_tokens) == pytest.approx(expected, abs=1e-5)
    assert score_rows(model, ROWS, pad_id=1, max_tokens=max_tokens) == pytest.approx(
        expected, abs=1e-5
    )
    assert score_rows(model, []) == []
    assert len({round(value, 4) for value in expected}) == 4


def test_a_model_without_padding_token_is_not_padded_with_token_0(policy: Path) -> None:
    model, _ = create_reward_model(policy, SETTINGS)
    expected = score_rows(model, ROWS)
    for missing in (None, -1):
        model.config.pad_token_id = missing
        with pytest.raises(DataError, match="names no padding token"):
            score_rows(model, ROWS)
        assert score_rows(model, ROWS, pad_id=1) == pytest.approx(expected, abs=1e-5)


def test_the_last_real_token_counts_also_when_it_equals_padding(policy: Path) -> None:
    model, _ = create_reward_model(policy, SETTINGS)
    model.eval()
    ids_BS = torch.tensor([[5, 4, 0, 0], [5, 4, 0, 0]])
    with torch.no_grad():
        short, long = compute_sequence_scores(model, ids_BS, torch.tensor([2, 3])).tolist()
    assert [short] == pytest.approx(score_one_by_one(model, [[5, 4]]), abs=1e-6)
    assert abs(short - long) > 1e-4


def test_gradient_reaches_head_and_trunk(policy: Path) -> None:
    model, _ = create_reward_model(policy, SETTINGS)
    compute_sequence_scores(model, torch.tensor([[3, 4, 5]]), torch.tensor([3])).sum().backward()
    assert model.score.weight.grad is not None and model.score.weight.grad.abs().sum() > 0
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_scoring_leaves_training_mode(policy: Path) -> None:
    model, _ = create_reward_model(policy, SETTINGS)
    assert model.training
    score_rows(model, ROWS)
    assert model.training


def test_save_and_load(policy: Path, tmp_path: Path) -> None:
    model, tokenizer = create_reward_model(policy, SETTINGS)
    save(model, tokenizer, tmp_path / "reward")
    loaded, _ = load_reward_model(tmp_path / "reward", SETTINGS)
    assert score_rows(loaded, ROWS) == score_rows(model, ROWS)
    assert type(
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    ).__name__.startswith("Llama")


def test_a_policy_is_refused_as_a_reward_model(policy: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1 are missing, first score\.weight"):
        load_reward_model(policy, SETTINGS)


def test_another_family(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=300,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=32,
        eos_token_id=1,
        bos_token_id=1,
    )
    save(GPT2LMHeadModel(config), make_tokenizer(), tmp_path / "gpt2")
    model, _ = create_reward_model(tmp_path / "gpt2", SETTINGS)
    assert score_rows(model, ROWS) == pytest.approx(score_one_by_one(model.eval(), ROWS), abs=1e-5)


def test_bad_rows(policy: Path) -> None:
    model, _ = create_reward_model(policy, SETTINGS)
    with pytest.raises(DataError, match="row 1 has no tokens"):
        score_rows(model, [[3], []])
    with pytest.raises(DataError, match="do not match"):
        compute_sequence_scores(model, torch.zeros(2, 3, dtype=torch.long), torch.tensor([1]))
    with pytest.raises(DataError, match=r"1\.\.3"):
        compute_sequence_scores(model, torch.zeros(1, 3, dtype=torch.long), torch.tensor([4]))
