"""JSON bodies of training and sampling. Names of classes are those of the routes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flows.service.wire.json_body import Body, Finite, Id, Metadata, Number, Seq, Tags, Text, TrainingHead, Ttl

__all__ = [
    "CreateModelBody", "CreateSamplingSession", "GetInfo", "JoinSamplingSession", "LoadWeightsBody", "OptimStepBody",
    "OptimizerFamily", "Prompt", "SampleBody", "SaveExternalBody", "SaveForSamplerBody", "SaveWeightsBody",
    "TensorBody",
]  # fmt: skip

Kind = Literal["snapshot", "inflight"]


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
    user_metadata: Metadata | None = None
    lora_config: Lora | None = None
    optimizer_config: OptimizerFamily = OptimizerFamily()


class GetInfo(Body):
    """A question about a training run."""

    model_id: Id


class Adam(Body):
    """Parameters of AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimizerParameters(Adam):
    """Parameters of an optimizer by its type."""

    type: Text = "adamw"


class OptimStepBody(TrainingHead):
    """An update."""

    adam_params: Adam | None = None
    optimizer_params: OptimizerParameters | None = None


class SaveBody(TrainingHead):
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
    kind: Kind = "snapshot"
    user_metadata: Tags | None = None


class SaveExternalBody(SaveBody):
    """Weights as files for other programs."""

    path: Text
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
    user_metadata: Metadata | None = None
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
    tokens: list[int] = Field(default_factory=list)


class Prompt(Body):
    """Parts of a prompt."""

    chunks: list[PromptChunk] = Field(default_factory=list)


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
