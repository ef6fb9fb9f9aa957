"""Memory of a stage by part, in the phases whose parts stand in memory together; its peak is the largest phase.

Of a model on a CPU the figure is peak resident memory of the process (VmHWM, ru_maxrss): glibc's heap keeps what was
freed (`rl_core.cpu.allocator`), so that a part of one phase is room for the next. Of a model on a GPU it is what torch
allocates there; the CUDA context and cached blocks come on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rl_core.resources.activations import Activations, MicroBatch, estimate_head_bytes
from rl_core.resources.model_shape import ModelShape
from rl_core.settings import OptimizerSettings, PolicySettings
from rl_core.settings.common import Precision

PACKED_LIMIT = 1 << 30  # as `capabilities.decoding.PACKED_BYTES`: larger models are not packed
_PREFILL_TOKENS = 8192  # as in `rl_core.inference.engine`
_SHARD_BYTES = (
    1 << 30
)  # as `storage.checkpoint.SHARD_BYTES`: a file of a checkpoint is built in memory


@dataclass(frozen=True, slots=True)
class MemoryPhase:
    """Parts that are in memory at the same time, in bytes."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Phases of a stage, in the order in which they come."""

    phases: tuple[MemoryPhase, ...]

    @property
    def peak(self) -> MemoryPhase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def largest_part(self) -> str:
        """Largest part of the peak, the runtime aside: what to make smaller."""
        parts = {name: size for name, size in self.peak.parts.items() if name != "runtime"}
        return max(parts, key=lambda name: parts[name]) if parts else "runtime"


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and dtype of a model, and the processes that share its weights."""

    device: str  # cpu or cuda
    item: int  # bytes of a weight in memory
    processes: int = 1
    runtime: int = 0  # bytes of the process without any model
    packed_weight: float = 4.0  # bytes of a weight in its copy for rollouts on a CPU
    frozen_linear: float | None = (
        None  # bytes of a weight under an adapter that is rounded; None = `item`
    )


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """Slots of the rollout engine and the longest sequence in one, in tokens."""

    slots: int
    length: int
    prompt_tokens: int = 0  # of all prompts that are read at once


def estimate_training_state(
    shape: ModelShape, settings: OptimizerSettings, placement: Placement
) -> dict[str, int]:
    """Weights and what training holds on to between steps: master weights, moments, averages.

    Moments: two float32 values a parameter for AdamW, one for what Muon updates (with several processes the whole of
    it and a whole copy of the weights in each, see `GatheredMuon`). Each process holds its share of the rest.
    """
    muon = shape.muon if settings.optimizer == "muon" else 0
    rounded = shape.adapted if placement.frozen_linear is not None else 0
    shared, whole = 4 * 2 * (shape.trainable - muon), 4 * muon
    if placement.processes > 1:
        whole *= 2
    found = {
        "weights": int(
            placement.item * (shape.parameters - rounded) + (placement.frozen_linear or 0) * rounded
        ),
        "master weights": 4 * shape.trainable if placement.item < 4 else 0,
        "optimizer moments": shared,
        "EMA": 4 * shape.trainable if settings.ema_decay is not None else 0,
        "Grokfast": 4 * shape.trainable if settings.grokfast_lambda > 0 else 0,
    }
    found = {name: -(-size // placement.processes) for name, size in found.items()}
    found["optimizer moments"] += whole
    return {name: size for name, size in found.items() if size}


def estimate_update_phases(
    shape: ModelShape,
    settings: OptimizerSettings,
    placement: Placement,
    activations: Activations,
    micro_batches: int,
    resident_parts: Mapping[str, int],
    *,
    evaluates: bool = False,
) -> list[MemoryPhase]:
    """Phases of an optimizer step: the backward pass, the update itself, a checkpoint.

    With one micro-batch gradients appear as activations go, layer by layer; with several the sum of the earlier ones'
    is there from the start.
    Args:
        beside: what stands in memory meanwhile, in bytes by part.
        evaluates: True = the weights of the best evaluation are kept while training goes on.
    """
    best = {"best model": -(-placement.item * shape.trainable // placement.processes)}
    held = estimate_training_state(shape, settings, placement) | (best if evaluates else {})
    share = placement.processes
    gradients = 4 * shape.trainable
    whole = _estimate_gathered_bytes(shape, placement)
    kept = activations.saved
    if micro_batches > 1:
        of_one = 4 * shape.largest_product if shape.trainable > shape.parameters // 2 else 0
        early = gradients + of_one
    else:
        early = 4 * shape.head if shape.head_trains else 0
    start = {"gradients": early, "activations": kept + activations.temporary, "logits": 0}
    at_head = {"gradients": early, "activations": kept, "logits": activations.logits}
    tied_twice = (
        4 * shape.embedding if shape.tied and shape.head_trains else 0
    )  # its gradient comes from both ends
    end = {
        "gradients": gradients + tied_twice,
        "activations": min(kept, activations.layer) + activations.temporary,
        "logits": 0,
    }
    busiest = max((start, at_head, end), key=lambda parts: sum(parts.values()))
    if share > 1:  # full gradients of what is gathered, then each process its rows
        gathered = whole // max(1, placement.item) * 4
        busiest["gradients"] = -(-busiest["gradients"] // share) + min(
            busiest["gradients"], gathered
        )
    # What the last step's gradients have left in glibc's heap is cut up by the moments and fits no activation.
    freed = min(-(-gradients // share), kept) if placement.device == "cpu" else 0
    heap = {"holes of the heap": activations.holes, "freed gradients": freed}
    backward = {**resident_parts, **held, "gathered weights": whole, **busiest, **heap}
    temporary = _estimate_optimizer_temporary(shape, settings)
    update = {
        **resident_parts,
        **held,
        "gradients": -(-gradients // share),
        "optimizer temporaries": temporary,
    }
    moments = held.get("optimizer moments", 0) + 4 * shape.trainable // share
    buffer = (
        2 * min(_SHARD_BYTES, moments) if placement.device == "cpu" else 0
    )  # built, then as bytes; of the host
    saved = {**resident_parts, **held, **best, "checkpoint buffer": buffer}
    named = (("backward", backward), ("optimizer step", update), ("checkpoint", saved))
    return [
        MemoryPhase(name, {part: size for part, size in parts.items() if size})
        for name, parts in named
    ]


def estimate_gathered_weights(shape: ModelShape, placement: Placement) -> dict[str, int]:
    """Weights that a process of several has in place beside its share while it plays rollouts: all of them.

    `Shards.run_independently_with_full_weights`: the processes call the model as often as each of them likes.
    """
    return (
        {"gathered weights": placement.item * shape.parameters} if placement.processes > 1 else {}
    )


def _estimate_gathered_bytes(shape: ModelShape, placement: Placement) -> int:
    """Weights that a process of several has in place beside its share in an update: by block on a GPU, else all.

    By block: the one that computes, the next one on its way, and what lies outside the blocks.
    """
    if placement.processes == 1:
        return 0
    outside = shape.parameters - shape.layers * shape.largest_block
    on_gpu = 2 * shape.largest_block + max(0, outside)
    return placement.item * (
        shape.parameters if placement.device == "cpu" else min(shape.parameters, on_gpu)
    )


def _estimate_optimizer_temporary(shape: ModelShape, settings: OptimizerSettings) -> int:
    """Of the largest matrix: Muon's update in float32, and three matrices in bfloat16. Fused AdamW has none."""
    return (4 + 3 * 2) * shape.largest_matrix if settings.optimizer == "muon" else 0


def estimate_rollout_parts(
    shape: ModelShape, sizes: SlotSizes, placement: Placement
) -> dict[str, int]:
    """Parts of the rollout engine beside the weights: keys and values, packed copies, originals under adapters.

    Keys and values are reserved for all slots at their longest. On a CPU in float32 weights up to a GiB are packed.
    With adapters, the weights under them are kept while the adapters are merged. Some of a CPU's parts stay between
    rollouts: `STAYING`.
    """
    cache = shape.kv_bytes_per_token // 4 * placement.item * sizes.slots * sizes.length
    products = shape.linear + shape.head
    is_packed = placement.device == "cpu" and placement.item == 4 and 4 * products <= PACKED_LIMIT
    prefilled = min(sizes.prompt_tokens or sizes.slots * sizes.length, _PREFILL_TOKENS)
    widest = max(2 * shape.inner, shape.query_width + 2 * shape.kv_width) + 3 * shape.hidden
    parts = {
        "KV cache": cache,
        "packed weights": int(placement.packed_weight * products) if is_packed else 0,
        "merged weights": placement.item * shape.adapted,
        "prefill": prefilled * (shape.kv_bytes_per_token // 4 + widest) * placement.item,
        "sampling": sizes.slots * shape.vocabulary * 4 * 2,
    }
    return {name: size for name, size in parts.items() if size}


def estimate_forward_parts(
    shape: ModelShape, batch: MicroBatch, placement: Placement
) -> dict[str, int]:
    """Parts of a pass without gradient beside the weights: one layer's temporaries, and log-probs in float32.

    The latter of two models, as they are compared, for chunks of tokens.
    """
    widths = 4 * shape.hidden + shape.query_width + 2 * shape.kv_width + 3 * shape.inner
    dtype = torch.float32 if placement.item == 4 else torch.bfloat16
    parts = {
        "activations": placement.item * widths * batch.padded,
        "logits": 2 * estimate_head_bytes(shape, batch, placement.device, dtype),
    }
    return {name: size for name, size in parts.items() if size}


PERSISTENT_PARTS = ("KV cache", "packed weights")  # of rollouts, in memory during updates


def estimate_frozen_bytes(shape: ModelShape, item: int, precision: Precision = "full") -> int:
    """Weights of a frozen copy; its linear layers in 8 bits, or in 4 bits with a scale for 32 weights."""
    if precision == "full":
        return item * shape.parameters
    rest = item * (shape.parameters - shape.linear)
    return rest + (
        shape.linear if precision == "int8" else shape.linear // 2 + shape.linear // 32 * item
    )


def needs_reference_copy(settings: PolicySettings, shape: ModelShape) -> bool:
    """True = the KL term needs a copy of the starting model: without adapters, which would only be switched off."""
    return settings.kl_coef > 0 and not shape.ranks
