"""Bodies of evaluations: of the service's own interface, where an unknown key is a mistake."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field

from flows.service.wire.json_body import Body, Finite, Id, Text, read_body
from rl_core.service.evaluation_requests import EvaluateRequest
from rl_core.service.requests import SampleParameters

__all__ = ["EvaluateBody", "decode_evaluate"]

Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1 << 18)]
Given = Annotated[tuple[Annotated[str, Field(max_length=1 << 20)] | Tokens, ...], Field(max_length=1 << 20)]


class EvaluateSampling(Body):
    """Samples of an evaluation."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: Annotated[int, Field(ge=1, le=1 << 18)] = 64
    temperature: Annotated[Finite, Field(ge=0, le=5)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0
    stop: list[Text] | list[int] | None = None


class EvaluateBody(Body):
    """A question about one model, or two."""

    model_config = ConfigDict(extra="forbid")

    evaluation_id: Annotated[
        Id | None, Field(description="chosen by the client: the same id again is the same evaluation, computed once")
    ] = None
    model: Annotated[Text, Field(description="a saved path (tinker://...) or the name of a base model")]
    against: Annotated[
        Text | None, Field(description="another path, base model or reference model on the same texts and prompts")
    ] = None
    texts: Annotated[Given, Field(description="texts, or lists of token ids, that are scored")] = ()
    prompts: Annotated[Given, Field(description="texts, or lists of token ids, that are continued")] = ()
    num_samples: Annotated[int, Field(ge=1, le=1 << 16, description="of each prompt")] = 8
    sampling: EvaluateSampling = EvaluateSampling()
    seed: Annotated[int, Field(ge=0, lt=1 << 53, description="of samples and intervals")] = 0
    confidence: Annotated[Finite, Field(gt=0, lt=1)] = 0.95
    resamples: Annotated[int, Field(ge=1, le=100_000)] = 2000


def decode_evaluate(payload: bytes) -> EvaluateRequest:
    """The engine's request; the worker adds the folders of saved weights. Raises: ServiceError (user)."""
    body = read_body(EvaluateBody, payload)
    sampling = body.sampling
    return EvaluateRequest(
        model=body.model, against=body.against, texts=_rows(body.texts), prompts=_rows(body.prompts),
        num_samples=body.num_samples, seed=body.seed, confidence=body.confidence, resamples=body.resamples,
        parameters=SampleParameters(
            max_tokens=sampling.max_tokens, temperature=sampling.temperature, top_k=sampling.top_k,
            top_p=sampling.top_p, stop=None if sampling.stop is None else tuple(sampling.stop),  # type: ignore[arg-type]
        ),
    )  # fmt: skip


def _rows(given: tuple[str | list[int], ...]) -> tuple[str | np.ndarray, ...]:
    return tuple(one if isinstance(one, str) else np.array(one, dtype=np.int64) for one in given)
