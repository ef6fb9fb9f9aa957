"""JSON bodies of requests, with bounds; unknown keys are ignored, so newer clients can be served.

Names of classes are those of the routes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_core.errors import ServiceError

__all__ = [
    "Body", "CancelFuture", "CopyWeights", "CreateModelBody", "CreateSamplingSession", "CreateSession", "FinishSession",
    "GetInfo", "Heartbeat", "JoinSamplingSession", "LoadWeightsBody", "OptimStepBody", "Prompt", "RetrieveFuture",
    "RetrieveFutures", "SampleBody", "SaveExternalBody", "SaveForSamplerBody", "SaveWeightsBody", "SearchSessions",
    "SetProject", "SetTtl", "TensorBody", "UnloadModelBody", "WeightsInfo", "read_body",
]  # fmt: skip

MAX_ID = (1 << 63) - 1
Seq = Annotated[int, Field(ge=1, le=MAX_ID)]
Number = Annotated[int, Field(ge=0, le=MAX_ID)]
Id = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(max_length=10_000)]
Tags = Annotated[dict[str, str], Field(max_length=100)]
Ttl = Annotated[int, Field(ge=1, le=10 * 366 * 86_400)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Kind = Literal["snapshot", "inflight"]


class Body(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class CreateSession(Body):
    """A client's session."""

    tags: list[Text] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: Text = ""
    project_id: Text | None = None
    display_name: Text | None = None


class Heartbeat(Body):
    """A client that lives."""

    session_id: Id


class FinishReason(Body):
    """Type of an end."""

    type: Literal["success", "errored", "interrupted"] = "success"


class FinishSession(Body):
    """The end of a client."""

    reason: FinishReason = FinishReason()
    detail: str | None = None


class Lora(Body):
    """An adapter."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerFamily(Body):
    """Family of an optimizer."""

    type: Text = "adamw"
    version: int = 1


class CreateModelBody(Body):
    """A new training run."""

    session_id: Id
    model_seq_id: Number
    base_model: Text
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: OptimizerFamily = OptimizerFamily()


class GetInfo(Body):
    """A question about a training run."""

    model_id: Id


class UnloadModelBody(Body):
    """The end of a training run."""

    model_id: Id
    seq_id: Seq | None = None


class Adam(Body):
    """Parameters of AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimizerParameters(Body):
    """Parameters of an optimizer by its type."""

    type: Text = "adamw"
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(Body):
    """An update."""

    model_id: Id
    seq_id: Seq
    adam_params: Adam | None = None
    optimizer_params: OptimizerParameters | None = None


class SaveWeightsBody(Body):
    """Weights with the optimizer's state."""

    model_id: Id
    seq_id: Seq
    path: Text | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Tags | None = None


class SaveForSamplerBody(Body):
    """Weights for samplers: named, or for one sampling session."""

    model_id: Id
    seq_id: Seq
    path: Text | None = None
    sampling_session_seq_id: Number | None = None
    kind: Kind = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: Tags | None = None


class SaveExternalBody(Body):
    """Weights as files for other programs."""

    model_id: Id
    seq_id: Seq
    path: Text
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: list[Text] | None = None


class LoadWeightsBody(Body):
    """Saved weights into a new training run (by session) or an existing one (by model)."""

    path: Text
    optimizer: bool = False
    session_id: Id | None = None
    model_seq_id: Number | None = None
    model_id: Id | None = None
    seq_id: Seq | None = None
    base_model: Text | None = None
    optimizer_config: OptimizerFamily | None = None
    user_metadata: dict[str, Any] | None = None
    weights_access_token: Text | None = None


class CreateSamplingSession(Body):
    """A sampler over saved weights or a base model."""

    session_id: Id
    sampling_session_seq_id: Number
    model_path: Text | None = None
    base_model: Text | None = None


class JoinSamplingSession(Body):
    """A copy of a sampling client asks for its number."""

    sampling_session_id: Id


class PromptChunk(Body):
    """A part of a prompt."""

    type: Text = "encoded_text"
    tokens: list[int] = []


class Prompt(Body):
    """Parts of a prompt."""

    chunks: list[PromptChunk] = []


class TensorBody(Body):
    """A tensor, dense or of compressed rows."""

    data: list[int] | list[float]
    dtype: Literal["float32", "int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SamplingBody(Body):
    """The distribution to sample from."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: Finite = 1.0
    top_k: int = -1
    top_p: Finite = 1.0


class SampleBody(Body):
    """Samples of one prompt."""

    sampling_session_id: Id
    seq_id: Number
    num_samples: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    prompt: Prompt
    sampling_params: SamplingBody = SamplingBody()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class RetrieveFuture(Body):
    """A question about one result."""

    request_id: Id
    allow_metadata_only: bool = False


class FuturesTarget(Body):
    """A sampling session, or a copy of it."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id
    cloned_sampler_id: Number = 0


class RetrieveFutures(Body):
    """A question about all results of a sampling session."""

    target: FuturesTarget
    prev_cursor: Number = 0
    timeout: Annotated[float, Field(ge=0)] | None = None
    retrieved_request_ids: Annotated[list[Id], Field(max_length=100_000)] = []


class CancelFuture(Body):
    """A result that nobody wants."""

    request_id: Id


class WeightsInfo(Body):
    """A question about saved weights."""

    tinker_path: Text


class CopyWeights(Body):
    """A copy of saved weights."""

    source_path: Text
    session_id: Id | None = None
    model_seq_id: Number | None = None
    destination_project_id: Text | None = None
    ttl_seconds: Ttl | None = None
    weights_access_token: Text | None = None


class SetTtl(Body):
    """The life of saved weights; None = for ever."""

    ttl_seconds: Ttl | None = None


class SetProject(Body):
    """The project of a session."""

    project_id: Text


class SearchSessions(Body):
    """Sessions with some properties."""

    session_id: Id | None = None
    project_ids: list[Text] | None = None
    user_metadata: Tags = {}
    display_name: Text | None = None
    owner: dict[str, Any] = {"type": "own"}
    statuses: list[dict[str, Any]] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: dict[str, Any] | None = None


T = TypeVar("T", bound=Body)


def read_body(kind: type[T], payload: bytes) -> T:
    """A body as its class. Raises: ServiceError (user) with the first fault and its place."""
    try:
        return kind.model_validate_json(payload or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        found = "" if first["type"] == "missing" else f", not {repr(first['input'])[:100]}"
        more = f" ({error.error_count()} faults in all)" if error.error_count() > 1 else ""
        raise ServiceError(f"{place}: {first['msg']}{found}{more}", "user") from None
