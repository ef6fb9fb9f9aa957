"""Requests to the training engine: plain data and numpy arrays.

A request identifies what it works on; the engine stores no reference to it. `TrainingEngine` (`training_engine.py`)
returns the classes of `results.py`, or `errors.ServiceError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rl_core.errors import ServiceError

OptimizerKind = Literal["adamw", "muon"]
MAX_DENSE_CELLS = 1 << 26  # of one sparse tensor converted to a dense one
RECORDED_TOKENS = (
    32  # most likely tokens at each sampled position that clients' samples record for training
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Low-rank adapter of a training run: W + alpha / rank B A (arXiv:2106.09685). A is drawn from `seed`, B is 0."""

    rank: int = 32
    seed: int = 0
    alpha: float = 32.0
    train_attn: bool = True  # linear layers of attention
    train_mlp: bool = True  # all other linear layers between embedding and head
    train_unembed: bool = True  # the output head; a tied embedding does not change


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModel:
    """New training run over a base model."""

    model_id: str
    base: str  # name in the engine's settings
    # None = train all weights of a copy of the base
    adapter: AdapterConfig | None = AdapterConfig()
    optimizer: OptimizerKind = "adamw"
    seed: int = 0  # of the score head of `reward_modeling`


@dataclass(frozen=True, slots=True)
class ProvenanceSpan:
    """Consecutive positions of a datum that are tokens [offset, offset + length) of a sample's prompt or sequence."""

    source: Literal["prompt", "sampled"]
    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Datum:
    """Sequence and the inputs of its loss. Position i predicts `inputs["target_tokens"][i]`: nothing is shifted."""

    tokens: np.ndarray  # integers [T]
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)  # see `service.loss_registry`
    # Where tokens and target_tokens come from, in order; for the training service, which looks up what was recorded.
    token_spans: tuple[ProvenanceSpan, ...] = ()
    target_spans: tuple[ProvenanceSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """Loss on some sequences; its gradient is added to the run's unless `forward_only`."""

    model_id: str
    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParameters:
    """AdamW parameters as in torch, for every trained parameter; Muon uses learning rate, decay and clipping too."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # of the run's total gradient; 0 or negative = no clipping


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """Update by the gradient accumulated so far, which is then discarded."""

    model_id: str
    adam: AdamParameters = AdamParameters()
    muon_momentum: float = 0.95
    optimizer: OptimizerKind | None = None  # that the parameters are meant for; None = the run's


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateSampler:
    """Sampler over one source: a base model, a training run's current weights, or a folder of saved weights.

    A snapshot keeps these weights. `inflight` publishes them to all in-flight samplers of the run `model_id`, including
    earlier ones; `folder` may supply the weights to publish.
    """

    sampler_id: str
    base: str | None = None
    model_id: str | None = None
    folder: str | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleParameters:
    """Parameters of the sampling distribution, and ends of sequences."""

    max_tokens: int | None = None  # None, or more than fits = up to the context
    # None = end-of-sequence tokens; () = only the length ends a sequence
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    temperature: float = 1.0  # 0 = greedy; log-probabilities are then those at 1
    top_k: int = -1  # below 1 = all tokens
    top_p: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Request for continuations of one prompt, and log-probabilities of the prompt at temperature 1."""

    sampler_id: str
    prompt: np.ndarray  # integers [P]
    seed: int  # equal seeds give equal samples, whatever is sampled at the same time
    num_samples: int = 1
    parameters: SampleParameters = SampleParameters()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0  # most likely tokens at each prompt position
    # most likely tokens at each sampled position, of the sampling distribution
    topk_sample_logprobs: int = 0
    recorded_tokens: int = (
        0  # the same, for `SampledSequence.recorded`; more than the vocabulary = all of it
    )
    # integers [P - 1, K]: row i lists tokens to score at position i + 1; -1 = none
    target_prompt_logprobs: np.ndarray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Request for the log-probabilities of rows under a reference model, or their scores by a reward model."""

    model: str  # name in the settings, which says the kind
    rows: tuple[np.ndarray, ...]  # integers [S]
    temperature: float = 1.0  # of log-probabilities


def densify_rows(
    values: np.ndarray,
    row_starts: np.ndarray,
    columns: np.ndarray,
    shape: tuple[int, int],
    *,
    fill: float = 0,
) -> np.ndarray:
    """Convert a sparse matrix (compressed rows) to a dense one [T, K] of the same dtype.

    Args:
        values: [n].
        row_starts: integers [T + 1], ascending from 0 to n.
        columns: integers [n].
        fill: value of unlisted cells.
    Raises: ServiceError (user) if the arrays do not match, or the matrix is too large.
    """
    num_rows, num_columns = (int(size) for size in shape)
    row_starts, columns = np.asarray(row_starts), np.asarray(columns)
    if num_rows < 0 or num_columns < 0 or num_rows * num_columns > MAX_DENSE_CELLS:
        raise ServiceError(
            f"sparse tensor of shape {shape}: at most {MAX_DENSE_CELLS} cells, none negative",
            "user",
        )
    if row_starts.shape != (num_rows + 1,) or values.ndim != 1 or columns.shape != values.shape:
        raise ServiceError(
            f"sparse tensor of {num_rows} rows: crow_indices {row_starts.shape}, values {values.shape} and col_indices "
            f"{columns.shape} do not fit; expected ({num_rows + 1},), (n,) and (n,)",
            "user",
        )
    for name, indices in (("crow_indices", row_starts), ("col_indices", columns)):
        if indices.dtype.kind not in "iu":
            raise ServiceError(
                f"sparse tensor: {name} is {indices.dtype}, expected integers", "user"
            )
    if row_starts[0] != 0 or row_starts[-1] != len(values) or bool((np.diff(row_starts) < 0).any()):
        raise ServiceError(f"sparse tensor: crow_indices must rise from 0 to {len(values)}", "user")
    if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < num_columns:
        raise ServiceError(f"sparse tensor: col_indices must lie in 0..{num_columns - 1}", "user")
    dense = np.full((num_rows, num_columns), fill, dtype=values.dtype)
    dense[np.repeat(np.arange(num_rows), np.diff(row_starts)), columns] = values
    return dense
