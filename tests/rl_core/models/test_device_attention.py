"""Attention within packed sequences: bounds, the path's obstacles and trial, its numbers, on a pretended GPU."""

import copy
import itertools

import pytest
import torch
from helpers.pretended_device import use_pretended_device
from helpers.tiny import PAD, nano
from torch.nn import functional

from rl_core.capabilities import check_packed_attention
from rl_core.models import device_attention
from rl_core.models.logprobs import completion_logprobs
from rl_core.out_of_memory import halve_batch
from rl_core.rollouts.batching import TrainRow, build_batches


def run_reference_kernel(query, key, value, bounds, scale):
    """Compute what torch's kernel does, one sequence after the other."""
    attended, starts = torch.zeros_like(query), bounds.starts_N.tolist()
    for start, stop in itertools.pairwise(starts):
        assert 0 < stop - start <= bounds.longest
        part = [tensor[start:stop].transpose(0, 1)[None] for tensor in (query, key, value)]
        attended[start:stop] = functional.scaled_dot_product_attention(
            *part, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )[0].transpose(0, 1)
    return attended


def ignore_bounds(query, key, value, bounds, scale):
    return run_reference_kernel(
        query, key, value, type(bounds)(bounds.starts_N[[0, -1]], 10**6), scale
    )


def refuse(*_):
    raise RuntimeError("no kernel image is available for execution on the device")


def build_packed_batch():
    rows = [
        TrainRow([1, 2 + index], [3 + index] * (3 + index % 3), [True] * (3 + index % 3))
        for index in range(5)
    ]
    (batch,) = build_batches(rows, 1000, PAD, packing=True)
    return batch


def test_bounds_of_packed_rows():
    batch = build_packed_batch()
    bounds = batch.find_sequence_bounds()
    lengths = [
        stop - start for start, stop in zip(bounds.starts_N, bounds.starts_N[1:], strict=False)
    ]
    assert bounds.starts_N.dtype == torch.int32 and bounds.starts_N[0] == 0
    assert bounds.starts_N[-1] == batch.input_ids_BS.numel() and bounds.longest == max(lengths)
    real = sorted(int(length) for length in lengths)
    padding = int((~batch.attention_mask_BS).sum())
    assert sum(real) == batch.attention_mask_BS.sum() + padding
    (plain,) = build_batches([TrainRow([1], [2], [True])], 100, PAD)
    assert plain.find_sequence_bounds() is None


def compute_logprobs(model, monkeypatch, kernel):
    monkeypatch.setattr(device_attention, "_run_kernel", kernel)
    with use_pretended_device() as counts:
        placed = copy.deepcopy(model).to("cuda")
        batch = build_packed_batch().to("cuda")
        with torch.no_grad():
            completion_logprobs(placed, batch)  # the first one tries the kernel
            counts.clear()
            logprobs_BS, _ = completion_logprobs(placed, batch)
        used = placed.base_model.__dict__.get("_posttrain_packed_attention")
        reads = [stop for stop in counts.stops if "@ rl_core" in stop]
        return logprobs_BS.cpu().clone(), used, reads


@pytest.mark.parametrize("kernel", [run_reference_kernel, ignore_bounds, refuse])
def test_a_packed_batch_has_the_logprobs_of_the_masked_one(kernel, monkeypatch):
    """A kernel that mixes sequences, or does not run here, fails its trial and is not used."""
    model = nano().to(torch.bfloat16).eval()
    expected = compute_logprobs(model, monkeypatch, refuse)[0]
    logprobs_BS, used, reads = compute_logprobs(model, monkeypatch, kernel)
    is_right = kernel is run_reference_kernel
    assert used == {torch.bfloat16: is_right}
    assert not reads
    torch.testing.assert_close(logprobs_BS, expected, rtol=0.02, atol=0.02)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.float(), "its weights are float32 without autocast"),
        (lambda model: model.gradient_checkpointing_enable(), "activation checkpointing"),
        (lambda model: model.set_attn_implementation("eager"), "attention is set to 'eager'"),
    ],
)
def test_obstacles(change, reason):
    model = nano().to(torch.bfloat16)
    assert check_packed_attention(model, "cuda").allowed
    change(model)
    assert reason in check_packed_attention(model, "cuda").reason
    assert "its weights are on cpu" in check_packed_attention(nano()).reason


def test_halves_of_a_moved_batch_find_their_own_bounds():
    with use_pretended_device():
        rows = [TrainRow([1], [2] * 6, [True] * 6), TrainRow([1], [2] * 6, [True] * 6)]
        (batch,) = build_batches(rows, 1000, PAD, packing=True)
        moved = batch.to("cuda")
        assert moved.sequence_bounds is not None and moved.loss_positions_N is not None
        first, second = halve_batch(moved)
        assert first.sequence_bounds is None and second.loss_positions_N is None
        assert first.num_loss_tokens + second.num_loss_tokens == batch.num_loss_tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_passes_its_trial_on_a_gpu():
    model = nano(head_dim=64).to("cuda", torch.bfloat16).eval()
    assert device_attention.can_use_packed_attention(model.base_model)
