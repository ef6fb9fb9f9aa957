"""Memory of a stage by part and phase; the parts of a phase are in memory together, and the peak is the largest phase.

On a CPU the figure is peak resident memory of the process (VmHWM, ru_maxrss): glibc's heap keeps freed memory
(`rl_core.cpu.allocator`), so a part of one phase is reused by the next. On a GPU it is what torch allocates there; the
CUDA context and cached blocks come on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rl_core.resources.activations import Activations, MicroBatch, estimate_head_bytes
from rl_core.resources.model_shape import ModelShape
from rl_core.settings import LoopSettings, OptimizerSettings, PolicySettings
from rl_core.settings.common import Precision

PERSISTENT_PARTS = ("KV cache", "packed weights")  # of rollouts, in memory during updates
PACKED_LIMIT = 1 << 30  # `capabilities.decoding.PACKED_BYTES`: larger models are not packed
_PREFILL_TOKENS = 8192  # of `rl_core.inference.engine`
_OFFLOAD_BUFFER_BYTES = 1 << 30  # of `training.offloaded_adamw` on the device
_SHARD_BYTES = 1 << 28  # `storage.checkpoint.SHARD_BYTES`: checkpoint files are built in memory


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
    """Phases of a stage, in order."""

    phases: tuple[MemoryPhase, ...]

    @property
    def peak(self) -> MemoryPhase:
        """Largest phase."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def largest_part(self) -> str:
        """Largest part of the peak except the runtime: the one to reduce."""
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
        None  # bytes of a quantized weight under an adapter; None = `item`
    )


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """Slots of the rollout engine, and the longest sequence in one, in tokens."""

    slots: int
    length: int
    prompt_tokens: int = 0  # of all prompts that are prefilled together


def estimate_training_state(
    shape: ModelShape, settings: OptimizerSettings, placement: Placement
) -> dict[str, int]:
    """Estimate weights and the state that training holds between steps: master weights, moments, averages.

    AdamW has two float32 moments per parameter, Muon one. With several processes each holds all moments of Muon and a
    full copy of its weights (see `GatheredMuon`), and its share of the rest.
    """
    muon = shape.muon if settings.optimizer == "muon" else 0
    quantized = shape.adapted if placement.frozen_linear is not None else 0
    adamw_bytes = 4 * 2 * (shape.trainable - muon)
    if settings.optimizer_state == "host" and placement.device != "cpu":
        adamw_bytes = min(adamw_bytes, _OFFLOAD_BUFFER_BYTES)
    muon_bytes = 4 * muon
    if placement.processes > 1:
        muon_bytes *= 2
    quantized_bytes = (placement.frozen_linear or 0) * quantized
    sizes = {
        "weights": int(placement.item * (shape.parameters - quantized) + quantized_bytes),
        "master weights": 4 * shape.trainable if placement.item < 4 else 0,
        "optimizer moments": adamw_bytes,
        "EMA": 4 * shape.trainable if settings.ema_decay is not None else 0,
        "Grokfast": 4 * shape.trainable if settings.grokfast_lambda > 0 else 0,
    }
    sizes = {name: -(-size // placement.processes) for name, size in sizes.items()}
    sizes["optimizer moments"] += muon_bytes
    return {name: size for name, size in sizes.items() if size}


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
    """Estimate the phases of an optimizer step: the backward pass, the update itself, a checkpoint.

    With one micro-batch gradients appear as activations are freed, layer by layer; with several the sum of earlier
    gradients exists from the start.
    Args:
        resident_parts: further parts in memory, in bytes.
        evaluates: the weights of the best evaluation are kept during training.
    """
    best = {"best model": -(-placement.item * shape.trainable // placement.processes)}
    state = estimate_training_state(shape, settings, placement)
    if evaluates:
        state |= best
    processes = placement.processes
    gradients = 4 * shape.trainable
    gathered_bytes = _estimate_gathered_bytes(shape, placement)
    saved_bytes = activations.saved
    if micro_batches > 1:
        trains_most = shape.trainable > shape.parameters // 2
        early_gradients = gradients + (4 * shape.largest_product if trains_most else 0)
    else:
        early_gradients = 4 * shape.head if shape.head_trains else 0
    start = {
        "gradients": early_gradients,
        "activations": saved_bytes + activations.temporary,
        "logits": 0,
    }
    at_head = {
        "gradients": early_gradients,
        "activations": saved_bytes,
        "logits": activations.logits,
    }
    # The gradient of a tied embedding comes from both ends.
    tied_gradients = 4 * shape.embedding if shape.tied and shape.head_trains else 0
    end = {
        "gradients": gradients + tied_gradients,
        "activations": min(saved_bytes, activations.layer) + activations.temporary,
        "logits": 0,
    }
    peak = max((start, at_head, end), key=lambda parts: sum(parts.values()))
    if processes > 1:
        # Full gradients of the gathered weights, then the rows of each process.
        gathered = min(peak["gradients"], gathered_bytes // max(1, placement.item) * 4)
        peak["gradients"] = -(-peak["gradients"] // processes) + gathered
    # The moments fragment the memory of the last step's gradients in glibc's heap, so that no activation fits.
    freed = min(-(-gradients // processes), saved_bytes) if placement.device == "cpu" else 0
    heap = {"holes of the heap": activations.holes, "freed gradients": freed}
    moments = state.get("optimizer moments", 0) + 4 * shape.trainable // processes
    saves = not isinstance(settings, LoopSettings) or settings.checkpoint_every > 0
    # A file of a checkpoint: its tensors' bytes fit into what a step has freed, the file does not.
    buffer = min(_SHARD_BYTES, moments) if placement.device == "cpu" and saves else 0
    heap["checkpoint buffer"] = buffer
    backward = {**resident_parts, **state, "gathered weights": gathered_bytes, **peak, **heap}
    temporary = _estimate_optimizer_temporary(shape, settings)
    update = {
        **resident_parts,
        **state,
        "gradients": -(-gradients // processes),
        "optimizer temporaries": temporary,
    }
    checkpoint = {**resident_parts, **state, **best, "checkpoint buffer": 2 * buffer}
    phases = (("backward", backward), ("optimizer step", update), ("checkpoint", checkpoint))
    return [
        MemoryPhase(name, {part: size for part, size in parts.items() if size})
        for name, parts in phases
    ]


def estimate_gathered_weights(shape: ModelShape, placement: Placement) -> dict[str, int]:
    """Estimate the full weights that each of several processes holds besides its share during rollouts.

    `Shards.run_independently_with_full_weights`: each process calls the model as often as it needs.
    """
    if placement.processes == 1:
        return {}
    return {"gathered weights": placement.item * shape.parameters}


def _estimate_gathered_bytes(shape: ModelShape, placement: Placement) -> int:
    """Estimate the weights that each of several processes gathers in an update: by block on a GPU, else all.

    By block: the one that computes, the prefetched next one, and the weights outside the blocks.
    """
    if placement.processes == 1:
        return 0
    if placement.device == "cpu":
        return placement.item * shape.parameters
    outside = shape.parameters - shape.layers * shape.largest_block
    gathered = 2 * shape.largest_block + max(0, outside)
    return placement.item * min(shape.parameters, gathered)


def _estimate_optimizer_temporary(shape: ModelShape, settings: OptimizerSettings) -> int:
    """Estimate the temporaries of the optimizer for the largest matrix.

    Muon has its update in float32 and three matrices in bfloat16. Fused AdamW has none.
    """
    return (4 + 3 * 2) * shape.largest_matrix if settings.optimizer == "muon" else 0


def estimate_rollout_parts(
    shape: ModelShape, sizes: SlotSizes, placement: Placement
) -> dict[str, int]:
    """Estimate the parts of the rollout engine besides the weights: KV cache, packed copies, originals under adapters.

    The KV cache is reserved for all slots at their longest. On a CPU weights up to a GiB are packed; activations and
    cache are then float32. With adapters, the weights under them are kept while the adapters are merged. On a CPU
    `PERSISTENT_PARTS` stay between rollouts.
    """
    products = shape.linear + shape.head
    is_packed = placement.device == "cpu" and placement.item * products <= PACKED_LIMIT
    packed_weight = placement.packed_weight if placement.item == 4 else placement.item
    item = 4 if is_packed else placement.item  # bytes of an activation
    cache = shape.kv_bytes_per_token // 4 * item * sizes.slots * sizes.length
    prefilled = min(sizes.prompt_tokens or sizes.slots * sizes.length, _PREFILL_TOKENS)
    widest = max(2 * shape.inner, shape.query_width + 2 * shape.kv_width) + 3 * shape.hidden
    parts = {
        "KV cache": cache,
        "packed weights": int(packed_weight * products) if is_packed else 0,
        "merged weights": placement.item * shape.adapted,
        "prefill": prefilled * (shape.kv_bytes_per_token // 4 + widest) * item,
        "sampling": sizes.slots * shape.vocabulary * 4 * 2,
    }
    return {name: size for name, size in parts.items() if size}


def estimate_forward_parts(
    shape: ModelShape, batch: MicroBatch, placement: Placement
) -> dict[str, int]:
    """Estimate the parts of a pass without gradient besides the weights: temporaries of one layer, and log-probs.

    The float32 log-probs are those of two models that are compared in chunks of tokens.
    """
    widths = 4 * shape.hidden + shape.query_width + 2 * shape.kv_width + 3 * shape.inner
    dtype = torch.float32 if placement.item == 4 else torch.bfloat16
    parts = {
        "activations": placement.item * widths * batch.padded,
        "logits": 2 * estimate_head_bytes(shape, batch, placement.device, dtype),
    }
    return {name: size for name, size in parts.items() if size}


def estimate_frozen_bytes(shape: ModelShape, item: int, precision: Precision = "full") -> int:
    """Estimate the weights of a frozen copy; linear layers in 8 bits, or in 4 bits with a scale per 32 weights."""
    if precision == "full":
        return item * shape.parameters
    other_bytes = item * (shape.parameters - shape.linear)
    if precision == "int8":
        return other_bytes + shape.linear
    return other_bytes + shape.linear // 2 + shape.linear // 32 * item


def needs_reference_copy(settings: PolicySettings, shape: ModelShape) -> bool:
    """Return whether the KL term needs a copy of the initial model; adapters would only be disabled."""
    return settings.kl_coef > 0 and not shape.ranks
