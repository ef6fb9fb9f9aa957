"""A JSON body of a request, with bounds; unknown keys are ignored, so newer clients can be served.

JSON bodies of training and sampling. Names of classes are those of the routes.

JSON bodies about sessions, results and saved weights. Names of classes are those of the routes.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rl_core.errors import ServiceError

MAX_ID = (1 << 63) - 1
MAX_METADATA_BYTES = 1 << 16  # bytes as JSON: lists of runs and sessions carry it


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
        raise ValueError(f"has {size} bytes as JSON; at most {MAX_METADATA_BYTES} are kept")
    return metadata


Seq = Annotated[int, Field(ge=1, le=MAX_ID)]
Number = Annotated[int, Field(ge=0, le=MAX_ID)]
Id = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_refuse_nul)]
Text = Annotated[str, Field(max_length=10_000), AfterValidator(_refuse_nul)]
Metadata = Annotated[dict[str, Any], AfterValidator(_check_metadata_size)]
Tags = Annotated[dict[str, str], Field(max_length=100)]
Ttl = Annotated[int, Field(ge=1, le=10 * 366 * 86_400)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class RequestBody(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class TrainingRequestBody(RequestBody):
    """Fields that give a request its place in a run's order."""

    model_id: Id
    seq_id: Seq


T = TypeVar("T", bound=RequestBody)


def parse_request_body(kind: type[T], payload: bytes) -> T:
    """A body as its class. Raises: ServiceError (user) with the first fault and its place."""
    try:
        return kind.model_validate_json(payload or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        is_said = first["type"] in ("missing", "value_error")  # the message says what was found
        found = "" if is_said else f", not {repr(first['input'])[:100]}"
        more = f" ({error.error_count()} faults in all)" if error.error_count() > 1 else ""
        raise ServiceError(
            f"{place}: {first['msg'].removeprefix('Value error, ')}{found}{more}", "user"
        ) from None


SamplerKind = Literal["snapshot", "inflight"]


class LoraBody(RequestBody):
    """An adapter."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerFamily(RequestBody):
    """Family of an optimizer."""

    type: Text = "adamw"
    version: int = 1


class CreateModelBody(RequestBody):
    """A new training run."""

    session_id: Id
    model_seq_id: Number
    base_model: Text
    user_metadata: Metadata | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerFamily = OptimizerFamily()


class GetInfoBody(RequestBody):
    """A question about a training run."""

    model_id: Id


class AdamBody(RequestBody):
    """Parameters of AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimizerParameters(AdamBody):
    """Parameters of an optimizer by its type."""

    type: Text = "adamw"


class OptimStepBody(TrainingRequestBody):
    """An update."""

    adam_params: AdamBody | None = None
    optimizer_params: OptimizerParameters | None = None


class SaveBody(TrainingRequestBody):
    """Weights that are kept for some time."""

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
    """Saved weights into a new training run (by session) or an existing one (by model)."""

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
    """A sampler over saved weights or a base model."""

    session_id: Id
    sampling_session_seq_id: Number
    model_path: Text | None = None
    base_model: Text | None = None


class JoinSamplingSessionBody(RequestBody):
    """A copy of a sampling client asks for its number."""

    sampling_session_id: Id


class PromptChunk(RequestBody):
    """A part of a prompt."""

    type: Text = "encoded_text"
    tokens: list[int] = Field(default_factory=list)


class PromptBody(RequestBody):
    """Parts of a prompt."""

    chunks: list[PromptChunk] = Field(default_factory=list)


class TensorBody(RequestBody):
    """A tensor, dense or of compressed rows."""

    data: list[int] | list[float]
    dtype: Literal["float32", "int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SamplingBody(RequestBody):
    """The distribution to sample from."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: Finite = 1.0
    top_k: int = -1
    top_p: Finite = 1.0


class SampleBody(RequestBody):
    """Samples of one prompt."""

    sampling_session_id: Id
    seq_id: Number
    num_samples: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    prompt: PromptBody
    sampling_params: SamplingBody = SamplingBody()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class CreateSession(RequestBody):
    """A client's session."""

    tags: list[Text] = Field(default_factory=list)
    user_metadata: Metadata | None = None
    sdk_version: Text = ""
    project_id: Text | None = None
    display_name: Text | None = None


class SessionHeartbeat(RequestBody):
    """A client that lives."""

    session_id: Id


class FinishReason(RequestBody):
    """Type of an end."""

    type: Literal["success", "errored", "interrupted"] = "success"


class FinishSession(RequestBody):
    """The end of a client."""

    reason: FinishReason = FinishReason()
    detail: str | None = None


class SetProject(RequestBody):
    """The project of a session."""

    project_id: Text


class SearchOwner(RequestBody):
    """Owners of sessions; nobody but their own key may list them."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[Text] | None = None


class StatusQuery(RequestBody):
    """A state of sessions."""

    type: Text
    reasons: list[Text] | None = None


class SearchCursor(RequestBody):
    """The last session of the page before."""

    last_session_id: Id


class SearchSessions(RequestBody):
    """Sessions with some properties."""

    session_id: Id | None = None
    project_ids: list[Text] | None = None
    user_metadata: Tags = Field(default_factory=dict)
    display_name: Text | None = None
    owner: SearchOwner = SearchOwner()
    statuses: list[StatusQuery] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


class RequestReference(RequestBody):
    """A request by its id."""

    request_id: Id


class RetrieveFuture(RequestReference):
    """A question about one result."""

    allow_metadata_only: bool = False


class FuturesTarget(RequestBody):
    """A sampling session, or a copy of it."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id
    cloned_sampler_id: Annotated[int, Field(ge=0, le=1 << 32)] = (
        0  # numbers of its samples stay below 2^63
    )


class RetrieveFutures(RequestBody):
    """A question about all results of a sampling session."""

    target: FuturesTarget
    prev_cursor: Number = 0
    timeout: Annotated[float, Field(ge=0)] | None = None
    retrieved_request_ids: Annotated[list[Id], Field(max_length=100_000)] = Field(
        default_factory=list
    )


class CancelFuture(RequestReference):
    """A result that nobody wants."""


class WeightsInfo(RequestBody):
    """A question about saved weights."""

    tinker_path: Text


class CopyWeights(RequestBody):
    """A copy of saved weights."""

    source_path: Text
    session_id: Id | None = None
    model_seq_id: Number | None = None
    destination_project_id: Text | None = None
    ttl_seconds: Ttl | None = None
    weights_access_token: Text | None = None


class SetTtl(RequestBody):
    """The life of saved weights; None = for ever."""

    ttl_seconds: Ttl | None = None
