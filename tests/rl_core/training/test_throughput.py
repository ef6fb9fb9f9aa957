"""Operations of an optimizer step, worked by hand, and their share of a peak."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl_core.data.batches import build_unscored_batch
from rl_core.models.heads import PolicyWithCritic, SeparateCritic
from rl_core.rollouts.batching import TrainRow, build_batches
from rl_core.settings import OptimizerSettings
from rl_core.timing import collect_seconds
from rl_core.training.optimizer_step import OptimizerStep
from rl_core.training.performance_metrics import (
    compute_throughput_metrics,
    count_step_flops,
    find_peak_flops,
    read_sequence_lengths,
)


def make_model(*, tied=False):
    config = LlamaConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=12,
        vocab_size=20,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


# a layer: q, o 64 each; k, v 32 each; gate, up, down 96 each; two norms of 8. Two of them, the last norm, the head.
MULTIPLYING = 2 * (64 + 64 + 32 + 32 + 3 * 96 + 16) + 8 + 160


@pytest.mark.parametrize("tied", [False, True])
def test_flops_by_hand(tied):
    tokens, squares = 5 + 3, 25 + 9
    assert (
        count_step_flops(make_model(tied=tied), [5, 3])
        == 6 * MULTIPLYING * tokens + 6 * 2 * 8 * squares
    )


def test_frozen_parameters_need_no_gradients():
    model = make_model().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert count_step_flops(model, [4]) == (4 * (MULTIPLYING - 160) + 6 * 160) * 4 + 6 * 2 * 8 * 16


def test_a_separate_critic_counts_only_its_trunk():
    policy = make_model()
    critic = SeparateCritic(policy)
    custom = sum(p.numel() for p in critic.parameters()) - 160  # excluding its embedding
    assert count_step_flops(critic, [4]) == 6 * custom * 4 + 6 * 2 * 8 * 16
    assert count_step_flops(PolicyWithCritic(policy, critic), [4]) == count_step_flops(
        policy, [4]
    ) + count_step_flops(critic, [4])


def test_lengths_of_every_kind_of_batch():
    rows = [[1] * 5, [1] * 3]
    assert read_sequence_lengths(build_unscored_batch(rows, 0)) == [5, 3]
    trained = [
        TrainRow([1] * 2, [1] * 4, [True] * 4),
        TrainRow([1], [1] * 2, [True] * 2),
        TrainRow([1], [1], [True]),
    ]
    (packed,) = build_batches(trained, 64, 0, packing=True)
    assert packed.position_ids_BS is not None and sorted(read_sequence_lengths(packed)) == [2, 3, 6]
    assert read_sequence_lengths(SimpleNamespace()) == []


def test_an_optimizer_step_reports_what_it_did():
    model = make_model()
    optimizer_step = OptimizerStep(model, OptimizerSettings(), 1)
    (batch,) = build_batches([TrainRow([1, 2], [3, 4, 5], [True] * 3)], 64, 0)
    with collect_seconds() as spans:
        optimizer_step.run_step(
            [batch], lambda b: (model(b.input_ids_BS).logits.square().mean(), {})
        )
    assert spans["optimizer_flops"] == count_step_flops(model, [5]) and spans["optimizer"] > 0
    metrics = compute_throughput_metrics(
        {"optimizer": 2.0, "optimizer_flops": 3e12}, model, is_bfloat16=True
    )
    assert metrics == {"perf/update_tflops": 1.5}  # no MFU on a CPU
    assert compute_throughput_metrics({"optimizer": 2.0}, model, is_bfloat16=True) == {}
    packed = {"packed_weights": 400, "packed_weights_in_float": 100}
    assert compute_throughput_metrics(packed, model, is_bfloat16=True) == {
        "perf/float_weight_share": 0.25
    }


def test_mfu_on_a_known_gpu_in_bfloat16_alone(monkeypatch):
    model = SimpleNamespace(
        parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda", 0))])
    )
    spans = {"optimizer": 2.0, "optimizer_flops": 989e12}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert compute_throughput_metrics(spans, model, is_bfloat16=True)["perf/mfu"] == pytest.approx(
        0.5
    )
    assert "perf/mfu" not in compute_throughput_metrics(spans, model, is_bfloat16=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card of tomorrow")
    assert "perf/mfu" not in compute_throughput_metrics(spans, model, is_bfloat16=True)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("Tesla T4", None),
    ],
)
def test_peaks(name, peak):
    assert find_peak_flops(name) == peak
