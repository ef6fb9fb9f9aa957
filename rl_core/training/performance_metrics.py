"""Peak memory, floating-point operations of an optimizer step, and model FLOPs utilisation (MFU).

Suffixes: S tokens of a sequence, N parameters.
"""

from __future__ import annotations

import dataclasses
import itertools
import resource
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# Names in the span totals that are counters, not seconds.
COUNTER_SPANS = ("optimizer_flops", "packed_weights", "packed_weights_in_float", "out_of_memory")

# Dense bfloat16 peaks of the makers' data sheets, 10^12 operations per second; the first matching name counts.
_PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A10G": 70,
    "A10": 125,
    "RTX 4090": 165,
}


def measure_peak_memory_gb(model: nn.Module) -> float:
    """Return the peak memory since the process started, in 10^9 bytes.

    For a model on a GPU: memory that torch allocated there. For a model on a CPU: resident memory of the whole process,
    including libraries and data.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9  # macOS counts bytes, Linux KiB


def read_sequence_lengths(batch: object) -> list[int]:
    """Return the number of real tokens of every sequence of a micro-batch; [] without lengths and without a mask.

    They are read from `..._lengths_B`, else from the attention mask; packed rows are split into their sequences.
    """
    fields: dict[str, Any] = {}
    if dataclasses.is_dataclass(batch):
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    length_tensors = [value for name, value in fields.items() if name.endswith("lengths_B")]
    if length_tensors:
        return [int(length) for lengths_B in length_tensors for length in lengths_B.tolist()]
    mask_BS, positions_BS = fields.get("attention_mask_BS"), fields.get("position_ids_BS")
    if mask_BS is None:
        return []
    if positions_BS is None:
        return [int(length) for length in mask_BS.sum(1).tolist()]
    lengths = []
    for mask_S, positions_S in zip(mask_BS, positions_BS, strict=True):
        real_S = positions_S[mask_S]
        starts = torch.nonzero(real_S == 0).flatten().tolist()
        bounds = [*starts, len(real_S)]
        lengths += [stop - start for start, stop in itertools.pairwise(bounds)]
    return lengths


def count_step_flops(model: nn.Module, lengths: list[int]) -> float:
    """Count the operations of forward and backward over sequences of these lengths, without any recomputation.

    Per token 2 N forward and 2 N backward to activations, for every parameter that multiplies (the input embedding is a
    lookup, unless it is also the head), and 2 N for the gradients of trainable ones. A token computed once for several
    rows (shared prefixes) counts in each, as MFU is defined. Causal attention adds 6 layers width S, width = heads
    times head size. Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B, which counts attention twice as much,
    as if it were not causal.
    """
    if not lengths:  # batches that are not sequences
        return 0.0
    num_frozen = num_trainable = 0
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    for parameter in model.parameters():
        if id(parameter) in embeddings - heads:
            continue
        if parameter.requires_grad:
            num_trainable += parameter.numel()
        else:
            num_frozen += parameter.numel()
    flops_per_token = 6 * num_trainable + 4 * num_frozen
    attention = sum(6 * layers * width for layers, width in _find_transformers(model))
    sum_of_squares = sum(length * length for length in lengths)
    return float(flops_per_token * sum(lengths) + attention * sum_of_squares)


def _find_transformers(model: nn.Module) -> list[tuple[int, int]]:
    """Return (layers, heads times head size) of every transformer in the model; a separate critic is a second one."""
    sizes = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and hasattr(config, "num_attention_heads"):
            size = (
                getattr(config, "head_dim", None)
                or config.hidden_size // config.num_attention_heads
            )
            sizes.append((len(layers), config.num_attention_heads * size))
    return sizes


def find_peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of a GPU in operations per second; None if it is not known."""
    return next((peak * 1e12 for name, peak in _PEAK_TFLOPS.items() if name in device_name), None)


def compute_throughput_metrics(
    spans: Mapping[str, float], model: nn.Module, *, is_bfloat16: bool
) -> dict[str, float]:
    """Compute perf/update_tflops, 10^12 operations per second of the optimizer steps, and perf/mfu on a known GPU in
    bfloat16.

    Adds perf/float_weight_share of rollouts with weights packed in digits (`rl_core.cpu.packed_gemm`), and
    perf/out_of_memory if memory ran out (`rl_core.out_of_memory`).
    """
    metrics: dict[str, float] = {}
    if spans.get("out_of_memory"):
        metrics["perf/out_of_memory"] = spans["out_of_memory"]
    if spans.get("packed_weights"):
        share = spans["packed_weights_in_float"] / spans["packed_weights"]
        metrics["perf/float_weight_share"] = share
    if not spans.get("optimizer") or not spans.get("optimizer_flops"):
        return metrics
    flops_per_second = spans["optimizer_flops"] / spans["optimizer"]
    metrics["perf/update_tflops"] = flops_per_second / 1e12
    device = next(model.parameters()).device
    if device.type == "cuda" and is_bfloat16:
        peak = find_peak_flops(torch.cuda.get_device_name(device))
        if peak is not None:
            metrics["perf/mfu"] = flops_per_second / peak
    return metrics
