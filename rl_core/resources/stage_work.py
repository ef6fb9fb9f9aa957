"""Work of a stage: tokens, floating-point operations, decoding steps and memory traffic."""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.resources.model_shape import ModelShape
from rl_core.settings import OptimizerSettings

__all__ = ["StageWork", "decoding_work", "scoring_work", "training_work"]

_ADAMW_VALUES = 10  # a parameter: 7 of the update (floor of tests/benchmarks), 3 of the norm and its clip
_MUON_VALUES = 9  # momentum, update, norm and clip
_HEAD_VALUES = 8  # a logit: log-softmax, its exponential and its gradient, each read and written
_MUON_STEPS = 5  # Newton-Schulz iterations of three products each


@dataclass(frozen=True, slots=True)
class StageWork:
    """Sums over a stage. Adding two gives the work of both."""

    trained_tokens: float = 0.0
    scored_tokens: float = 0.0  # in passes without gradient, prompts of rollouts included
    decoded_tokens: float = 0.0
    updates: float = 0.0  # optimizer steps
    training_flops: float = 0.0
    scoring_flops: float = 0.0
    decoding_flops: float = 0.0
    decode_steps: float = 0.0
    decode_rows: float = 0.0  # sum over the steps of the sequences that are decoded in them
    decode_bytes: float = 0.0  # weights, keys and values that the steps read
    traffic_bytes: float = 0.0  # of optimizer, logits and gradient sums, read and written

    @property
    def flops(self) -> float:
        """All operations."""
        return self.training_flops + self.scoring_flops + self.decoding_flops

    def __add__(self, other: StageWork) -> StageWork:
        return StageWork(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def times(self, factor: float) -> StageWork:
        """The same work so many times."""
        return StageWork(*(getattr(self, name) * factor for name in self.__slots__))


def training_work(
    shape: ModelShape, settings: OptimizerSettings, *, rows: float, length: float, loss_length: float, updates: float,
    micro_batches: float, computed: float = 1.0, skipped: float = 0.0,
) -> StageWork:  # fmt: skip
    """Forward, backward and optimizer steps.

    Args:
        rows: sequences in all, every epoch counted. length, loss_length: mean tokens of one, and those with loss.
        updates: optimizer steps in all. micro_batches: of one step.
        computed: share of the tokens that is computed, where rows share prefixes.
        skipped: parameters that tokens without loss are not multiplied by (the last layer's MLP of the packed pass).
    """
    tokens, pairs = rows * length, rows * length**2
    each = 4 if shape.ranks else 6  # operations of a weight that is frozen under an adapter, or trains
    flops = shape.training.of(tokens, pairs) - each * skipped * rows * (length - loss_length)
    flops *= computed
    if settings.activation_checkpointing:
        flops += shape.forward.of(tokens, pairs)
    by_muon = shape.muon if settings.optimizer == "muon" else 0
    flops += updates * _MUON_STEPS * 6 * by_muon * shape.hidden
    values = _ADAMW_VALUES * (shape.trainable - by_muon) + _MUON_VALUES * by_muon
    sums = 3 * shape.trainable * max(0.0, micro_batches - 1)
    logits = rows * loss_length * shape.vocabulary * _HEAD_VALUES if shape.head else 0.0
    return StageWork(
        trained_tokens=tokens, updates=updates, training_flops=flops,
        traffic_bytes=4 * (updates * (values + sums) + logits),
    )  # fmt: skip


def scoring_work(
    shape: ModelShape, *, rows: float, length: float, loss_length: float, widened: float = 0.0, computed: float = 1.0,
    skipped: float = 0.0,
) -> StageWork:  # fmt: skip
    """Passes without gradient, as `training_work`. `widened`: bytes of few-bit weights that a row's pass widens."""
    tokens = rows * length
    flops = computed * (shape.forward.of(tokens, rows * length**2) - 2 * skipped * rows * (length - loss_length))
    logits = rows * loss_length * shape.vocabulary * _HEAD_VALUES / 2 if shape.head else 0.0
    return StageWork(
        scored_tokens=tokens, scoring_flops=flops,
        traffic_bytes=4 * logits + rows * widened,
    )  # fmt: skip


def decoding_work(
    shape: ModelShape, *, sequences: float, prompts: float, prompt_length: float, new_tokens: float, slots: int,
    item: float, processes: int = 1,
) -> StageWork:  # fmt: skip
    """Prompts read once each, then steps of as many sequences as there are slots; slots are refilled as they end.

    Args:
        prompts: different ones, which are read once. new_tokens: mean of a sequence.
        slots: of all processes. item: bytes of a weight as it is read.
        processes: that decode side by side, each of which reads all weights in every step.
    """
    rows = max(1.0, min(float(slots), sequences))
    tokens = sequences * new_tokens
    steps = max(new_tokens, tokens / rows) if sequences else 0.0
    context = prompt_length + new_tokens / 2
    per_token = shape.forward.per_token + 2 * shape.forward.per_pair * context  # S^2 counts both, the causal half
    reading = scoring_work(shape, rows=prompts, length=prompt_length, loss_length=0.0)
    weights = item * processes * (shape.parameters - (0 if shape.tied else shape.embedding))
    return reading + StageWork(
        decoded_tokens=tokens, decoding_flops=tokens * per_token, decode_steps=steps, decode_rows=tokens,
        decode_bytes=steps * weights + tokens * context * shape.kv_bytes_per_token * item / 4,
    )  # fmt: skip
