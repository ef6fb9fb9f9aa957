"""Peak memory of a run.

Floating-point operations of an optimizer step, and model FLOPs utilisation (MFU).

S tokens of a sequence, N parameters.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def measure_peak_memory_gb(model: nn.Module) -> float:
    """Largest memory since the process began, in 10^9 bytes.

    Of a model on a GPU: what torch had allocated there. Of a model on a CPU: the resident memory of the whole process,
    libraries and data included.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9  # macOS counts bytes, Linux KiB


# dense bfloat16 peaks of the makers' data sheets, 10^12 operations a second; the first name that fits counts
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


def read_sequence_lengths(batch: object) -> list[int]:
    """Real tokens of every sequence of a micro-batch; [] where it has neither lengths nor a mask.

    They are read off `..._lengths_B`, else the attention mask; packed rows are taken apart.
    """
    names = (
        [field.name for field in dataclasses.fields(batch)]
        if dataclasses.is_dataclass(batch)
        else []
    )
    fields = {name: getattr(batch, name) for name in names}
    counted = [value for name, value in fields.items() if name.endswith("lengths_B")]
    if counted:
        return [int(length) for lengths_B in counted for length in lengths_B.tolist()]
    mask_BS, positions_BS = fields.get("attention_mask_BS"), fields.get("position_ids_BS")
    if mask_BS is None:
        return []
    if positions_BS is None:
        return [int(length) for length in mask_BS.sum(1).tolist()]
    lengths = []
    for mask_S, positions_S in zip(mask_BS, positions_BS, strict=True):
        real_S = positions_S[mask_S]
        starts = torch.nonzero(real_S == 0).flatten().tolist()
        lengths += [
            stop - start for start, stop in zip(starts, [*starts[1:], len(real_S)], strict=True)
        ]
    return lengths


def count_step_flops(model: nn.Module, lengths: list[int]) -> float:
    """Operations of forward and backward over sequences of these lengths, without any recomputation.

    Per token 2 N forward and 2 N backward to activations, for every parameter that multiplies (the input embedding is
    looked up, unless it is the head as well), and 2 N for the gradients of trainable ones. A token that is computed
    once for several rows (`cpu/shared_prefixes.py`) counts in each, as MFU is defined. Causal attention adds 6 layers
    width S, width = heads times head size. Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B, which counts
    attention twice as much, as if it were not causal.
    """
    if not lengths:  # of batches that are no sequences
        return 0.0
    fixed = trainable = 0
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    for parameter in model.parameters():
        if id(parameter) in embeddings - heads:
            continue
        if parameter.requires_grad:
            trainable += parameter.numel()
        else:
            fixed += parameter.numel()
    attention = sum(6 * layers * width for layers, width in _find_transformers(model))
    tokens = sum(lengths)
    return float(
        (6 * trainable + 4 * fixed) * tokens
        + attention * sum(length * length for length in lengths)
    )


def _find_transformers(model: nn.Module) -> list[tuple[int, int]]:
    """(layers, heads times head size) of every transformer within: a critic of its own is a second one."""
    found = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and hasattr(config, "num_attention_heads"):
            size = (
                getattr(config, "head_dim", None)
                or config.hidden_size // config.num_attention_heads
            )
            found.append((len(layers), config.num_attention_heads * size))
    return found


# among the spans, what is no time
COUNTER_SPANS = ("optimizer_flops", "packed_weights", "packed_weights_in_float", "out_of_memory")


def find_peak_flops(device_name: str) -> float | None:
    """Peak of a GPU in dense bfloat16, operations a second; None where it is not known."""
    return next((peak * 1e12 for name, peak in _PEAK_TFLOPS.items() if name in device_name), None)


def compute_throughput_metrics(
    spans: Mapping[str, float], model: nn.Module, *, is_bfloat16: bool
) -> dict[str, float]:
    """perf/update_tflops: 10^12 operations a second of the optimizer steps; on a known GPU in bfloat16 perf/mfu too.

    And perf/float_weight_share of rollouts by weights packed in digits (`rl_core.cpu.packed_gemm`), and
    perf/out_of_memory where memory ran out (`rl_core.out_of_memory`).
    """
    metrics: dict[str, float] = {}
    if spans.get("out_of_memory"):
        metrics["perf/out_of_memory"] = spans["out_of_memory"]
    if spans.get("packed_weights"):
        metrics["perf/float_weight_share"] = (
            spans["packed_weights_in_float"] / spans["packed_weights"]
        )
    if not spans.get("optimizer") or not spans.get("optimizer_flops"):
        return metrics
    rate = spans["optimizer_flops"] / spans["optimizer"]
    metrics["perf/update_tflops"] = rate / 1e12
    device = next(model.parameters()).device
    if device.type == "cuda" and is_bfloat16:
        peak = find_peak_flops(torch.cuda.get_device_name(device))
        if peak is not None:
            metrics["perf/mfu"] = rate / peak
    return metrics
