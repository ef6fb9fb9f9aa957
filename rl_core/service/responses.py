"""Management API responses as plain data: states of runs, requests, queue and saved paths, and evaluations.

The server sends them and the client parses them. Uses only the standard library, so that clients need no torch. Times
are seconds since 1970, durations are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

RequestState = Literal["waiting", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """State of one request."""

    request_id: str
    kind: str
    seq: int  # position in the order of its run; for an evaluation a number derived from its id
    state: RequestState
    accepted: float
    started: float | None
    finished: float | None
    waited_seconds: float | None
    served_seconds: float | None
    answer_bytes: int
    error: str | None
    category: str | None  # of the error: user or server


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestList:
    """Requests of a training run, newest first."""

    requests: list[RequestStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledRequest:
    """Response to a cancellation."""

    request_id: str
    cancelled: bool  # False if the request is running or final


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedEvaluation:
    """Accepted evaluation; its result is at `/runs/{run}/requests/{request_id}/result`."""

    request_id: str
    evaluation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceInfo:
    """Frozen model whose log-probabilities (policy) or scores (reward_model) clients may request."""

    name: str
    kind: Literal["policy", "reward_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceList:
    """Reference and reward models of the service, by name."""

    references: list[ReferenceInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedScores:
    """Accepted scoring request; its result is at `/references/requests/{request_id}/result`."""

    request_id: str
    scores_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceScores:
    """Scores of token rows by a frozen model, in the order of the rows. None = not of this kind of model."""

    model: str
    kind: Literal["policy", "reward_model"]
    logprobs: list[list[float]] | None = None  # nats, of all tokens but the first
    scores: list[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KindStats:
    """Requests of one kind: waiting, running, and quantiles (0.5, 0.9, 0.99) over the newest finished ones."""

    waiting: int
    running: int
    finished: int
    waited_seconds: dict[str, float]
    served_seconds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """Queue of one training run."""

    run_id: str
    depth: int
    kinds: dict[str, KindStats]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """State of a training run."""

    run_id: str
    base_model: str
    state: Literal["creating", "live", "failed", "unloaded"]
    steps: int  # updates that have been acknowledged
    lora_rank: int | None  # None = all weights are trained
    created: float
    last_request: float
    user_metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunList:
    """Training runs of the caller, newest first."""

    runs: list[RunStatus]
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPath:
    """Saved weights."""

    path: str  # tinker://RUN/KIND/NAME
    kind: Literal["weights", "sampler_weights", "external_weights"]
    steps: int  # updates of the run
    bytes: int
    created: float
    expires: float | None
    public: bool
    registration: Literal["none", "waiting", "done", "failed"]
    version: str | None  # NAME/NUMBER in the model registry: what `posttrain promote` takes
    data_digest: str = ""  # SHA-256 of the training data, in order; "" if none or unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPathList:
    """Saved weights of a training run, newest first."""

    checkpoints: list[SavedPath]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean and its interval; without bounds if there is only one text or prompt."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class TextRow:
    """Scores of one text: sums over its scored tokens, nats."""

    tokens: int
    nll: float
    against_nll: float | None = None
    kl: float | None = None  # KL(model || against)
    reverse_kl: float | None = None


@dataclass(frozen=True, slots=True)
class TextScores:
    """Scores of a model on the texts; intervals over texts."""

    nll: Estimate  # -log p of the next token, nats per token
    perplexity: Estimate  # exp(nll)
    entropy: Estimate  # of the predicted distribution, nats per token


@dataclass(frozen=True, slots=True)
class TextComparison:
    """Comparison of the model with the other on the same texts; the KL is exact, over the complete vocabulary."""

    kl: Estimate  # KL(model || against), nats per token
    reverse_kl: Estimate  # KL(against || model)
    nll_difference: Estimate  # model - against, nats per token; paired
    perplexity_ratio: Estimate  # exp(nll_difference)
    better: int  # texts that are more likely under the model
    worse: int
    p_value: float  # two-sided exact sign test of better against worse


@dataclass(frozen=True, slots=True)
class DiversityScores:
    """Diversity of one model's samples; means over prompts, computed on words."""

    distinct: dict[str, Estimate]  # "1", "2", "3": distinct n-grams over all
    self_bleu: Estimate | None  # None with one sample per prompt
    unique: Estimate  # distinct samples over all
    tokens: Estimate  # per sample
    entropy: Estimate  # -log p of sampled tokens under the sampling distribution, nats per token
    ended: Estimate  # share of samples that ended before the length limit


@dataclass(frozen=True, slots=True)
class DiversityComparison:
    """Differences model - against over the same prompts, paired."""

    distinct: dict[str, Estimate]
    self_bleu: Estimate | None
    unique: Estimate
    tokens: Estimate
    entropy: Estimate
    ended: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEvaluation:
    """Scores of a model, optionally with those of another. None = not requested."""

    model: str
    against: str | None
    confidence: float
    texts: int
    text_tokens: int  # scored tokens: all but the first of each text
    prompts: int
    samples: int  # per prompt
    text: TextScores | None = None
    against_text: TextScores | None = None
    text_comparison: TextComparison | None = None
    rows: list[TextRow] | None = None  # in the order of the texts
    diversity: DiversityScores | None = None
    # None also for a reference model, which cannot be sampled from
    against_diversity: DiversityScores | None = None
    diversity_comparison: DiversityComparison | None = None
