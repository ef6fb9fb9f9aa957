"""JSON bodies of requests, with bounds. Unknown keys are ignored, so newer clients can be served.

Class names follow the routes.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rl_core.errors import ServiceError

MAX_ID = (1 << 63) - 1
MAX_METADATA_BYTES = 1 << 16  # size as JSON, because lists of runs and sessions contain it


def _refuse_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL character")
    return text


def _check_metadata_size(metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(json.dumps(metadata, allow_nan=False))
    except ValueError:
        raise ValueError("holds a number that is not finite; write it as text") from None
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"has {size} bytes as JSON; at most {MAX_METADATA_BYTES} are allowed")
    return metadata


def _refuse_truth_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a number, found {str(value).lower()}")
    return value


def _refuse_truth_values(values: Any) -> Any:
    if isinstance(values, list) and bool in set(map(type, values)):
        raise ValueError("expected numbers, found true or false")
    return values


# pydantic takes true as 1
Integer = Annotated[int, BeforeValidator(_refuse_truth_value)]
Real = Annotated[float, BeforeValidator(_refuse_truth_value)]
Integers = Annotated[list[int], BeforeValidator(_refuse_truth_values)]
Seq = Annotated[Integer, Field(ge=1, le=MAX_ID)]
Number = Annotated[Integer, Field(ge=0, le=MAX_ID)]
Id = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_refuse_nul)]
Text = Annotated[str, Field(max_length=10_000), AfterValidator(_refuse_nul)]
Metadata = Annotated[dict[str, Any], AfterValidator(_check_metadata_size)]
Tags = Annotated[dict[str, str], Field(max_length=100)]
Ttl = Annotated[Integer, Field(ge=1, le=10 * 366 * 86_400)]
Finite = Annotated[Real, Field(allow_inf_nan=False)]


TokenIdList = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1 << 18)]
TextList = Annotated[
    tuple[Annotated[str, Field(max_length=1 << 20)] | TokenIdList, ...], Field(max_length=1 << 20)
]


class RequestBody(BaseModel):
    """JSON object."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class TrainingRequestBody(RequestBody):
    """Fields that define a request's position in a run's order."""

    model_id: Id
    seq_id: Seq


T = TypeVar("T", bound=RequestBody)


def parse_request_body(kind: type[T], payload: bytes) -> T:
    """Parse a body. Raises: ServiceError (user) with the first problem and its location."""
    try:
        return kind.model_validate_json(payload or b"{}")
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        location = ".".join(str(part) for part in problem["loc"]) or "body"
        message = problem["msg"].removeprefix("Value error, ")
        # The messages of these types already describe the value.
        if problem["type"] not in ("missing", "value_error"):
            message += f", not {repr(problem['input'])[:100]}"
        if error.error_count() > 1:
            message += f" ({error.error_count()} problems in all)"
        raise ServiceError(f"{location}: {message}", "user") from None


SamplerKind = Literal["snapshot", "inflight"]


class LoraBody(RequestBody):
    """LoRA adapter."""

    rank: Integer = 32
    seed: Integer | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerFamily(RequestBody):
    """Family of an optimizer."""

    type: Text = "adamw"
    version: Integer = 1


class CreateModelBody(RequestBody):
    """New training run."""

    session_id: Id
    model_seq_id: Number
    base_model: Text
    user_metadata: Metadata | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerFamily = OptimizerFamily()


class GetInfoBody(RequestBody):
    """Query about a training run."""

    model_id: Id


class AdamBody(RequestBody):
    """Parameters of AdamW."""

    learning_rate: Real = 1e-4
    beta1: Real = 0.9
    beta2: Real = 0.95
    eps: Real = 1e-12
    weight_decay: Real = 0.0
    grad_clip_norm: Real = 0.0


class OptimizerParameters(AdamBody):
    """Parameters of an optimizer, selected by its type."""

    type: Text = "adamw"


class OptimStepBody(TrainingRequestBody):
    """Optimizer update."""

    adam_params: AdamBody | None = None
    optimizer_params: OptimizerParameters | None = None


class SaveBody(TrainingRequestBody):
    """Weights to be saved for some time."""

    path: Text | None = None
    ttl_seconds: Ttl | None = None


class SaveWeightsBody(SaveBody):
    """Weights with the optimizer's state."""

    overwrite: bool = False
    user_metadata: Tags | None = None


class SaveForSamplerBody(SaveBody):
    """Weights for samplers: named, or for one sampling session."""

    sampling_session_seq_id: Number | None = None
    kind: SamplerKind = "snapshot"
    user_metadata: Tags | None = None


class SaveExternalBody(SaveBody):
    """Weights as files for other programs."""

    path: Text
    age_encryption_recipients: list[Text] | None = None


class LoadWeightsBody(RequestBody):
    """Saved weights to be loaded into a new training run (by session) or an existing run (by model)."""

    path: Text
    optimizer: bool = False
    session_id: Id | None = None
    model_seq_id: Number | None = None
    model_id: Id | None = None
    seq_id: Seq | None = None
    base_model: Text | None = None
    optimizer_config: OptimizerFamily | None = None
    user_metadata: Metadata | None = None
    weights_access_token: Text | None = None


class CreateSamplingSessionBody(RequestBody):
    """Sampler of saved weights or of a base model."""

    session_id: Id
    sampling_session_seq_id: Number
    model_path: Text | None = None
    base_model: Text | None = None


class JoinSamplingSessionBody(RequestBody):
    """Number request of a copied sampling client."""

    sampling_session_id: Id


class PromptChunk(RequestBody):
    """Part of a prompt."""

    type: Text = "encoded_text"
    tokens: Integers = Field(default_factory=list)


class PromptBody(RequestBody):
    """Parts of a prompt."""

    chunks: list[PromptChunk] = Field(default_factory=list)


class TensorBody(RequestBody):
    """Tensor, dense or in compressed rows."""

    data: Annotated[list[int] | list[float], BeforeValidator(_refuse_truth_values)]
    dtype: Literal["float32", "int64"]
    shape: Integers | None = None
    sparse_crow_indices: Integers | None = None
    sparse_col_indices: Integers | None = None


class SamplingBody(RequestBody):
    """Sampling distribution."""

    max_tokens: Integer | None = None
    seed: Integer | None = None
    stop: Annotated[str | list[int] | list[str] | None, BeforeValidator(_refuse_truth_values)] = (
        None
    )
    temperature: Finite = 1.0
    top_k: Integer = -1
    top_p: Finite = 1.0


class SampleBody(RequestBody):
    """Sampling request for one prompt."""

    sampling_session_id: Id
    seq_id: Number
    num_samples: Annotated[Integer, Field(ge=1, le=1 << 16)] = 1
    prompt: PromptBody
    sampling_params: SamplingBody = SamplingBody()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Integer = 0
    topk_sample_logprobs: Integer = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: Integer = 0
    prompt_logprobs_last_n: Integer | None = None
    record_stability_info: bool | None = None


class CreateSession(RequestBody):
    """New session of a client."""

    tags: list[Text] = Field(default_factory=list)
    user_metadata: Metadata | None = None
    sdk_version: Text = ""
    project_id: Text | None = None
    display_name: Text | None = None


class SessionHeartbeat(RequestBody):
    """Heartbeat of a client."""

    session_id: Id


class FinishReason(RequestBody):
    """Reason why a session ends."""

    type: Literal["success", "errored", "interrupted"] = "success"


class FinishSession(RequestBody):
    """End of a session."""

    reason: FinishReason = FinishReason()
    detail: str | None = None


class SetProject(RequestBody):
    """Project of a session."""

    project_id: Text


class SearchOwner(RequestBody):
    """Owners of sessions. Callers may list only the sessions of their key."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[Text] | None = None


class StatusQuery(RequestBody):
    """Session status to search for."""

    type: Text
    reasons: list[Text] | None = None


class SearchCursor(RequestBody):
    """Last session of the previous page."""

    last_session_id: Id


class SearchSessions(RequestBody):
    """Search for sessions by their properties."""

    session_id: Id | None = None
    project_ids: list[Text] | None = None
    user_metadata: Tags = Field(default_factory=dict)
    display_name: Text | None = None
    owner: SearchOwner = SearchOwner()
    statuses: list[StatusQuery] | None = None
    limit: Annotated[Integer, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


class RequestReference(RequestBody):
    """Request by id."""

    request_id: Id


class RetrieveFuture(RequestReference):
    """Query for one result."""

    allow_metadata_only: bool = False


class FuturesTarget(RequestBody):
    """Sampling session, or a copy of it."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id
    # bounded so that the sequence numbers of its samples stay below 2^63
    cloned_sampler_id: Annotated[Integer, Field(ge=0, le=1 << 32)] = 0


class RetrieveFutures(RequestBody):
    """Query for all results of a sampling session."""

    target: FuturesTarget
    prev_cursor: Number = 0
    timeout: Annotated[Real, Field(ge=0)] | None = None
    retrieved_request_ids: Annotated[list[Id], Field(max_length=100_000)] = Field(
        default_factory=list
    )


class CancelFuture(RequestReference):
    """Request whose result is no longer wanted."""


class WeightsInfo(RequestBody):
    """Query about saved weights."""

    tinker_path: Text


class CopyWeights(RequestBody):
    """Copy of saved weights."""

    source_path: Text
    session_id: Id | None = None
    model_seq_id: Number | None = None
    destination_project_id: Text | None = None
    ttl_seconds: Ttl | None = None
    weights_access_token: Text | None = None


class SetTtl(RequestBody):
    """Lifetime of saved weights; None = unlimited."""

    ttl_seconds: Ttl | None = None


class ReferenceScoreBody(RequestBody):
    """Rows that a reference model or a reward model scores."""

    model_config = ConfigDict(extra="forbid")

    scores_id: Annotated[
        Id | None,
        Field(description="chosen by the client; a repeated id is the same request, computed once"),
    ] = None
    rows: Annotated[
        tuple[TokenIdList, ...], Field(max_length=1 << 20, description="token ids of each row")
    ]
    temperature: Annotated[
        Finite, Field(gt=0, description="of log-probabilities; reward models have none")
    ] = 1.0
