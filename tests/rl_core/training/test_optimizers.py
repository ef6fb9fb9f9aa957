"""Muon's parameters and first step, Grokfast, the average of the weights. Expected values by hand."""

import math

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from rl_core.errors import CheckpointError, SettingsError
from rl_core.models.lora import add_adapter
from rl_core.settings import LoraSettings, OptimizerSettings
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.training.optimizers import build_optimizer, find_hidden_matrices, step_adamw
from rl_core.types import TrainBatch

HIDDEN = {
    f"model.layers.0.{name}.weight"
    for name in (
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
}


def build_llama(kind=LlamaForCausalLM, **changes):
    shape = dict(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(
            LlamaConfig(
                **shape, num_hidden_layers=1, max_position_embeddings=8, pad_token_id=0, **changes
            )
        )


def build_settings(**changes):
    return OptimizerSettings(
        **{"learning_rate": 0.1, "warmup_steps": 0, "weight_decay": 0.0, **changes}
    )


def build_single_weight(value=1.0, dtype=torch.float32):
    model = nn.Linear(1, 1, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


BATCH = TrainBatch(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1))


def push_gradient(optimizer_step, gradient):
    """Run one update under the gradient of a model of one weight."""
    weight = next(optimizer_step.model.parameters())
    return optimizer_step.run_step([BATCH], lambda batch: ((weight.float() * gradient).sum(), {}))


def record_optimizer_gradients(optimizer_step, monkeypatch):
    observed = []
    monkeypatch.setattr(
        optimizer_step.optimizer,
        "step",
        lambda: observed.append(float(next(optimizer_step.model.parameters()).grad)),
    )
    return observed


# AdamW


def test_a_quick_adamw_step_is_torchs_to_the_last_bit():
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    settings = OptimizerSettings(weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6, warmup_steps=0)
    quick, baseline = (
        build_optimizer(model, dict(model.named_parameters()), settings) for model in models
    )
    generator = torch.Generator().manual_seed(0)
    for turn in range(5):
        for index, (ours, theirs) in enumerate(
            zip(models[0].parameters(), models[1].parameters(), strict=True)
        ):
            ours.grad = torch.randn(ours.shape, generator=generator)
            theirs.grad = ours.grad.clone()
            if turn == 3 and index == 2:
                ours.grad = theirs.grad = None  # a weight that is not in the loss
        for optimizer in (quick, baseline):
            optimizer.param_groups[1]["lr"] = 0.1 / (1 + turn)
        step_adamw(quick)
        baseline.step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for name, value in quick.state[ours].items():
            assert torch.equal(value, baseline.state[theirs][name])


# Muon


@pytest.mark.parametrize("is_tied", [True, False])
def test_muon_takes_the_hidden_matrices_and_adamw_the_rest(is_tied):
    model = build_llama(tie_word_embeddings=is_tied)
    assert find_hidden_matrices(model) == HIDDEN
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer_step = OptimizerStep(model, build_settings(optimizer="muon", weight_decay=0.5), 10)
    groups = {
        kind: [
            ({names[id(p)] for p in group["params"]}, group["weight_decay"])
            for group in part.param_groups
        ]
        for kind, part in optimizer_step.optimizer.parts.items()
    }
    matrices = (
        {"model.embed_tokens.weight"}
        if is_tied
        else {"model.embed_tokens.weight", "lm_head.weight"}
    )
    norms = {name for name in names.values() if "norm" in name}
    assert groups == {"muon": [(HIDDEN, 0.5)], "adamw": [(matrices, 0.5), (norms, 0.0)]}


def test_heads_of_a_reward_model_and_of_a_value_model_are_not_hidden():
    assert find_hidden_matrices(build_llama(LlamaForSequenceClassification, num_labels=1)) == HIDDEN
    model = nn.ModuleDict({"trunk": nn.Linear(2, 2), "value_head": nn.Linear(2, 1)})
    assert find_hidden_matrices(model) == {"trunk.weight"}


def test_adapters_go_to_muon():
    model = add_adapter(build_llama(), LoraSettings(rank=2, target_modules=("q_proj", "up_proj")))
    names = find_hidden_matrices(model)
    assert len(names) == 4 and all(".lora_" in name for name in names)
    assert set(OptimizerStep(model, build_settings(optimizer="muon"), 10).optimizer.parts) == {
        "muon"
    }


def test_first_muon_step_by_hand():
    """Check a diagonal gradient, of which Newton-Schulz makes p applied five times to diagonal / Frobenius norm."""
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[0].bias.zero_()
    settings = build_settings(optimizer="muon", weight_decay=0.5, warmup_steps=2, max_grad_norm=1e9)
    optimizer_step = OptimizerStep(model, settings, 10)
    gradient = torch.diag(torch.tensor([3.0, -4.0]))
    optimizer_step.run_step(
        [BATCH], lambda batch: ((model[0].weight * gradient).sum() + 7.0 * model[0].bias[0], {})
    )
    expected = []
    for x in (0.6, -0.8):
        for _ in range(5):
            x = 3.4445 * x - 4.775 * x**3 + 2.0315 * x**5
        # the warm-up halves the learning rate of 0.1; the decay leaves 1 - 0.05 * 0.5
        expected.append(0.975 - 0.05 * 0.2 * math.sqrt(2.0) * x)
    assert torch.diag(model[0].weight.detach()).tolist() == pytest.approx(
        expected, abs=6e-4
    )  # of 0.01, in bfloat16
    assert expected[0] < 0.975 < expected[1]
    assert float(model[0].weight.detach()[0, 1]) == pytest.approx(0.0, abs=1e-4)
    assert model[0].bias.tolist() == pytest.approx([-0.05, 0.0])  # AdamW, on the same schedule


def test_the_state_of_another_optimizer_is_refused():
    state = OptimizerStep(build_llama(), build_settings(), 10).state_dict()
    with pytest.raises(CheckpointError, match="another optimizer than 'muon'"):
        OptimizerStep(build_llama(), build_settings(optimizer="muon"), 10).load_state_dict(state)


# Grokfast


def test_grokfast_by_hand(monkeypatch):
    """Check alpha 1/2, lambda 2; mu starts at the first gradient: mu = 1, 2, 0.5, so g + 2 mu = 3, 7, 0."""
    optimizer_step = OptimizerStep(
        build_single_weight(),
        build_settings(grokfast_lambda=2.0, grokfast_alpha=0.5, max_grad_norm=1e9),
        10,
    )
    observed = record_optimizer_gradients(optimizer_step, monkeypatch)
    metrics = [push_gradient(optimizer_step, gradient) for gradient in (1.0, 3.0, -1.0)]
    assert observed == pytest.approx([3.0, 7.0, 0.0])
    assert [row["train/grad_norm"] for row in metrics] == pytest.approx([1.0, 3.0, 1.0])
    assert [row["train/grokfast_grad_norm"] for row in metrics] == pytest.approx([3.0, 7.0, 0.0])


def test_the_amplified_gradient_is_clipped(monkeypatch):
    optimizer_step = OptimizerStep(
        build_single_weight(),
        build_settings(grokfast_lambda=2.0, grokfast_alpha=0.5, max_grad_norm=2.0),
        10,
    )
    observed = record_optimizer_gradients(optimizer_step, monkeypatch)
    for gradient in (
        0.5,
        3.0,
    ):  # amplified to 1.5, unchanged, and to 3 + 2 * 1.75 = 6.5, clipped to 2
        push_gradient(optimizer_step, gradient)
    assert observed == pytest.approx([1.5, 2.0])


def test_a_bad_gradient_never_enters_grokfasts_average(monkeypatch):
    optimizer_step = OptimizerStep(
        build_single_weight(),
        build_settings(grokfast_lambda=2.0, grokfast_alpha=0.5, max_grad_norm=1e9),
        10,
    )
    observed = record_optimizer_gradients(optimizer_step, monkeypatch)
    metrics = [
        push_gradient(optimizer_step, gradient) for gradient in (1.0, math.nan, math.inf, 3.0)
    ]
    assert observed == pytest.approx([3.0, 7.0])
    assert metrics[-1]["train/skipped_steps"] == 2.0


def test_an_amplified_gradient_that_overflows_is_skipped():
    optimizer_step = OptimizerStep(build_single_weight(), build_settings(grokfast_lambda=2.0), 10)
    metrics = push_gradient(optimizer_step, 2e38)  # finite, but three times as much is not
    assert metrics["train/skipped_steps"] == 1.0
    assert float(optimizer_step.model.weight.detach()) == 1.0


# The average of the weights


def test_weight_average_by_hand():
    """Check Adam under a constant gradient: w = 0.9, 0.8, 0.7. decay 1/2, so a_3 = (0.9/4 + 0.8/2 + 0.7) / (7/4)."""
    optimizer_step = OptimizerStep(build_single_weight(), build_settings(ema_decay=0.5), 10)
    results = []
    for _ in range(3):
        push_gradient(optimizer_step, 1.0)
        with optimizer_step.ema.use_averages():
            results.append(float(optimizer_step.model.weight.detach()))
    assert results == pytest.approx([0.9, (0.45 + 0.8) / 1.5, 1.325 / 1.75], abs=1e-6)
    assert float(optimizer_step.model.weight.detach()) == pytest.approx(0.7, abs=1e-6)
    push_gradient(optimizer_step, math.nan)  # skipped: no update, so nothing new to average
    optimizer_step.ema.adopt_averages()
    assert float(optimizer_step.model.weight.detach()) == pytest.approx(1.325 / 1.75, abs=1e-6)


def test_before_the_first_update_the_average_is_the_weights():
    optimizer_step = OptimizerStep(build_single_weight(), build_settings(ema_decay=0.99), 10)
    with optimizer_step.ema.use_averages():
        assert float(optimizer_step.model.weight.detach()) == 1.0
    optimizer_step.ema.adopt_averages()
    assert float(optimizer_step.model.weight.detach()) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_swapped_in_place_and_come_back_bit_for_bit(dtype):
    model = build_llama().to(dtype)
    optimizer_step = OptimizerStep(model, build_settings(ema_decay=0.9), 10)
    for seed in range(3):
        ids = torch.randint(1, 11, (2, 6), generator=torch.Generator().manual_seed(seed))
        optimizer_step.run_step([BATCH], lambda batch, ids=ids: (model(ids, labels=ids).loss, {}))
    places = [parameter.data_ptr() for parameter in model.parameters()]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(KeyError), optimizer_step.ema.use_averages():
        inside = [parameter.detach().clone() for parameter in model.parameters()]
        assert [parameter.data_ptr() for parameter in model.parameters()] == places
        raise KeyError
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(inside, before, strict=True) if a.ndim == 2)
    if (
        dtype == torch.bfloat16
    ):  # averaged over the float32 masters: a bfloat16 average would stand still
        state = optimizer_step.state_dict()
        assert all(average.dtype == torch.float32 for average in state["ema"]["averages"].values())


def test_small_moves_add_up_in_the_average_of_bfloat16_weights():
    """Check lr 1e-4 on 1.0, below half a bfloat16 step: the average of w = 1 - 1e-4 t, t = 1..100, decay 0.5, is near
    w.
    """
    optimizer_step = OptimizerStep(
        build_single_weight(dtype=torch.bfloat16),
        build_settings(learning_rate=1e-4, ema_decay=0.5),
        200,
    )
    for _ in range(100):
        push_gradient(optimizer_step, 1.0)
    average = optimizer_step.state_dict()["ema"]["averages"]["weight"]
    assert float(average) == pytest.approx(
        0.9901, abs=2e-5
    )  # w + 1e-4 * sum of (1 - d) d^k k = w + 1e-4


def test_without_ema_the_weights_themselves_are_evaluated():
    optimizer_step = OptimizerStep(build_single_weight(), build_settings(), 10)
    push_gradient(optimizer_step, 1.0)
    with optimizer_step.ema.use_averages():
        assert float(optimizer_step.model.weight.detach()) == pytest.approx(0.9)
    assert optimizer_step.state_dict()["ema"] is None


def test_averages_of_another_model_are_refused():
    optimizer_step = OptimizerStep(
        build_single_weight(), build_settings(ema_decay=0.5, grokfast_lambda=1.0), 10
    )
    push_gradient(optimizer_step, 1.0)
    state = optimizer_step.state_dict()
    other = OptimizerStep(nn.Sequential(build_single_weight()), build_settings(ema_decay=0.5), 10)
    with pytest.raises(CheckpointError, match="no trainable parameter weight"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "changes", [{"ema_decay": 1.0}, {"ema_decay": 0.0}, {"grokfast_alpha": 1.0}]
)
def test_decays_lie_below_one(changes):
    with pytest.raises(SettingsError, match=next(iter(changes))):
        build_settings(**changes)
